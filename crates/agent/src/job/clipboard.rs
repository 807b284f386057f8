//! The clipboard of the guest's desktop, and locking its screens: with the desktop's own tools, as the user whose desktop it is.
//!
//! A static binary that runs as root has no desktop. The one that a person sits at is found by what `loginctl` says of sessions, and its
//! environment (where its display is, and how to be let in) by that of its processes. Everything from there on is run as that user.

mod desktop;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use wire::agent::job::{Answer, MAX_CLIPBOARD_LEN};
use wire::agent::{ErrorKind, Frame, MAX_DATA_LEN, OPERATION_CHANNEL, Stream};

use self::desktop::{Desktop, Display, as_user};
use super::{Host, report, unavailable};
use crate::config::Config;
use crate::stop::Stop;
use crate::stream::send_all;
use crate::tool::{Tool, find};

/// How long a tool of the desktop may take. What has the clipboard is another program, which has to give its content.
const TOOL_TIMEOUT: Duration = Duration::from_secs(10);

/// How long the host may take from one piece of the text to the next.
const PIECE_TIMEOUT: Duration = Duration::from_secs(30);

/// A program and its arguments.
type Call = (&'static str, &'static [&'static str]);

/// How to read and how to write the clipboard: on Wayland, and on X11 in one of two ways.
const WAYLAND: [(Call, Call); 1] = [(("wl-paste", &["--no-newline"]), ("wl-copy", &[]))];
const X11: [(Call, Call); 2] = [
    (
        ("xclip", &["-selection", "clipboard", "-out"]),
        ("xclip", &["-selection", "clipboard", "-in"]),
    ),
    (
        ("xsel", &["--clipboard", "--output"]),
        ("xsel", &["--clipboard", "--input"]),
    ),
];

pub(super) fn get(host: &mut Host<'_>, config: &Config) -> Result<(), Stop> {
    let desktop = Desktop::find(config).map_err(unavailable)?;
    let (program, arguments) = tool(config, &desktop, false).map_err(unavailable)?;
    let output = for_desktop(&program, &desktop)
        .arguments(arguments)
        .max_output(MAX_CLIPBOARD_LEN as usize)
        .run(Instant::now() + TOOL_TIMEOUT)
        .map_err(|error| unavailable(format!("{}: {error}", program.display())))?;
    if output.was_cut {
        let message =
            format!("the clipboard has more than {MAX_CLIPBOARD_LEN} bytes, which is the limit");
        return Err(unavailable(message));
    }
    // An empty clipboard is an error to all of these tools, which say so in words of their own.
    if !output.succeeded && output.stdout.is_empty() && !says_empty(&output.complaint) {
        return Err(unavailable(format!(
            "{}: {}",
            program.display(),
            output.complaint
        )));
    }
    let len = output.stdout.len() as u32;
    host.answer(Answer::Clipboard { len })?;
    let mut frames = Vec::new();
    for bytes in output.stdout.chunks(MAX_DATA_LEN) {
        let stream = Stream::Stdout;
        let encoded = Frame::Data { stream, bytes }.encode(OPERATION_CHANNEL, &mut frames);
        encoded.map_err(|error| report(ErrorKind::Internal, error.to_string()))?;
    }
    let encoded = Frame::EndOfStream(Stream::Stdout).encode(OPERATION_CHANNEL, &mut frames);
    encoded.map_err(|error| report(ErrorKind::Internal, error.to_string()))?;
    send_all(host.socket, &frames, Instant::now() + PIECE_TIMEOUT).map_err(Stop::HostGone)
}

/// What `wl-paste`, `xclip` and `xsel` say when nothing is in the clipboard.
fn says_empty(complaint: &str) -> bool {
    complaint.is_empty()
        || [
            "No selection",
            "Nothing is copied",
            "target STRING not available",
            "target UTF8_STRING not available",
        ]
        .iter()
        .any(|words| complaint.contains(words))
}

pub(super) fn set(host: &mut Host<'_>, config: &Config, len: u32) -> Result<(), Stop> {
    let text = receive_text(host, len as usize)?;
    let desktop = Desktop::find(config).map_err(unavailable)?;
    let (program, arguments) = tool(config, &desktop, true).map_err(unavailable)?;
    // The program that sets the clipboard serves each paste: these tools stay for that.
    let output = for_desktop(&program, &desktop)
        .arguments(arguments)
        .input(&text)
        .leaves_child()
        .run(Instant::now() + TOOL_TIMEOUT)
        .map_err(|error| unavailable(format!("{}: {error}", program.display())))?;
    if !output.succeeded {
        return Err(unavailable(format!(
            "{}: {}",
            program.display(),
            output.complaint
        )));
    }
    host.answer(Answer::Done)
}

fn receive_text(host: &mut Host<'_>, len: usize) -> Result<Vec<u8>, Stop> {
    let mut text = Vec::with_capacity(len);
    while text.len() < len {
        match host.next_frame(Instant::now() + PIECE_TIMEOUT)? {
            Frame::Data {
                stream: Stream::Stdin,
                bytes,
            } if text.len() + bytes.len() <= len => text.extend_from_slice(bytes),
            Frame::Data { .. } => {
                return Err(report(
                    ErrorKind::Protocol,
                    "more text arrived than was announced",
                ));
            }
            _ => {
                return Err(report(
                    ErrorKind::Protocol,
                    "expected the text for the clipboard",
                ));
            }
        }
    }
    Ok(text)
}

pub(super) fn lock(host: &mut Host<'_>, config: &Config) -> Result<(), Stop> {
    let program = find(&config.search_path, "loginctl").ok_or_else(|| {
        unavailable("there is no loginctl in this guest, so its screens cannot be locked")
    })?;
    // Without a session there is no screen, and loginctl would say nothing.
    let desktop = Desktop::find(config).map_err(unavailable)?;
    let output = Tool::new(&program)
        .arguments(["lock-session", &desktop.session])
        .run(Instant::now() + TOOL_TIMEOUT)
        .map_err(|error| unavailable(format!("loginctl: {error}")))?;
    if !output.succeeded {
        return Err(unavailable(format!(
            "loginctl lock-session: {}",
            output.complaint
        )));
    }
    host.answer(Answer::Done)
}

fn for_desktop<'a>(program: &std::path::Path, desktop: &Desktop) -> Tool<'a> {
    as_user(program, desktop.uid, desktop.gid).environment(desktop.environment.clone())
}

/// The tool of this desktop, and its arguments.
fn tool(
    config: &Config,
    desktop: &Desktop,
    writes: bool,
) -> Result<(PathBuf, &'static [&'static str]), String> {
    let tools: &[(Call, Call)] = match desktop.display {
        Display::Wayland => &WAYLAND,
        Display::X11 => &X11,
    };
    let mut calls = tools
        .iter()
        .map(|(read, write)| if writes { write } else { read });
    let found =
        calls.find_map(|(name, arguments)| Some((find(&config.search_path, name)?, *arguments)));
    found.ok_or_else(|| match desktop.display {
        Display::Wayland => {
            "there is no wl-copy and wl-paste in this guest: install wl-clipboard".to_owned()
        }
        Display::X11 => "there is neither xclip nor xsel in this guest: install xclip".to_owned(),
    })
}
