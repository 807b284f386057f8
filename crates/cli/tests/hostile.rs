//! The program on a terminal, against an agent that sends what it likes.

#![allow(clippy::unwrap_used)]

mod program;
mod ready_guest;
mod terminal;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use agent::session::Options;
use fake_daemon::FakeDaemon;
use program::{ringdown, run_with};
use terminal::Terminal;
use wire::agent::job::{Answer, Ask, FileSystem, LogEntry, Stats};
use wire::agent::transfer::{File, Message, Metadata, Part, Totals};
use wire::agent::{CONNECTION_CHANNEL, Decoder, Frame, Hello, OPERATION_CHANNEL, Stream};

/// What steers a terminal, in each of its ways, and what turns text around.
const STEERING: &str =
    "\u{9b}2J\u{9d}0;title\u{9c}\x1b[31m\x7f\u{85}\u{202e}\u{61c}\u{2028}\u{2029}\u{2066}";

/// An agent that says hello, takes one request and answers it as `answer` does.
fn hostile(daemon: &FakeDaemon, answer: fn(&Frame<'_>, &mut UnixStream)) -> UnixStream {
    let serve = move |mut stream: UnixStream| {
        let hello = Hello {
            capabilities: ["exec", "logs", "stats", "freeze", "transfer"]
                .map(str::to_owned)
                .to_vec(),
            ..Hello::new("hostile 1")
        };
        let hello = Frame::Hello(hello).to_bytes(CONNECTION_CHANNEL).unwrap();
        stream.write_all(&hello).unwrap();
        let mut decoder = Decoder::new();
        loop {
            match decoder.next_frame().unwrap() {
                Some((_, request @ (Frame::Ask(_) | Frame::ExecStart(_) | Frame::Transfer(_)))) => {
                    answer(&request, &mut stream);
                    // It hangs then, until the client leaves.
                    let _ = stream.read_to_end(&mut Vec::new());
                    return;
                }
                Some(_) => {}
                None => match stream.read(decoder.space()) {
                    Ok(0) | Err(_) => return,
                    Ok(count) => decoder.advance(count),
                },
            }
        }
    };
    ready_guest::announce_serving(daemon, "web", Options::new(), |_| (), serve)
}

/// Sends an answer, and says whether the client is still there.
fn send(stream: &mut UnixStream, answer: Answer) -> bool {
    let frame = Frame::Answer(answer).to_bytes(OPERATION_CHANNEL).unwrap();
    stream.write_all(&frame).is_ok()
}

fn steering(request: &Frame<'_>, stream: &mut UnixStream) {
    let stats = Stats {
        file_systems: vec![FileSystem {
            mounted_at: format!("/{STEERING}"),
            kind: STEERING.to_owned(),
            size: 1000,
            ..FileSystem::default()
        }],
        ..Stats::default()
    };
    match request {
        Frame::Ask(Ask::Stats { .. }) => {
            for _ in 0..2 {
                send(stream, Answer::Stats(Box::new(stats.clone())));
            }
        }
        Frame::Ask(Ask::Logs(_)) => {
            let entry = LogEntry {
                identifier: STEERING.to_owned(),
                text: STEERING.into(),
                ..LogEntry::default()
            };
            send(stream, Answer::Log(vec![entry]));
            send(stream, Answer::Note(STEERING.to_owned()));
        }
        _ => {
            send(stream, Answer::FileSystems(vec![STEERING.into()]));
        }
    }
    send(stream, Answer::Done);
}

fn is_harmful(character: char) -> bool {
    let turns = "\u{61c}\u{200e}\u{200f}\u{2028}\u{2029}\u{202e}\u{2066}".contains(character);
    turns || character.is_control() && !"\r\n".contains(character)
}

#[test]
fn an_agent_steers_no_terminal_with_what_it_says_whatever_prints_it() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let _uplink = hostile(&daemon, steering);
    for (words, expected) in [
        ("logs web --json", "title"),
        ("logs web", "title"),
        ("stats web --json", "title"),
        ("stats web", "title"),
        ("freeze web", "title"),
        ("metrics", "title"),
    ] {
        let words: Vec<&str> = words.split(' ').collect();
        let mut terminal = Terminal::open(200, 60);
        let mut command = ringdown(&words);
        command.arg("--runtime-dir").arg(daemon.runtime_dir());
        terminal.start(command);
        assert_eq!(terminal.wait_for_end(), (Some(0), None), "{words:?}");
        let written = terminal.written();
        assert!(written.contains(expected), "{words:?}: {written}");
        let found = written.chars().find(|character| is_harmful(*character));
        assert_eq!(found, None, "{words:?}: {written:?}");
    }
}

/// Many links in place of a directory, far below, each of which cannot be made.
fn failing(_: &Frame<'_>, stream: &mut UnixStream) {
    let mut reader = stream.try_clone().unwrap();
    std::thread::spawn(move || reader.read_to_end(&mut Vec::new()));
    let metadata = Metadata {
        mode: 0o755,
        ..Metadata::default()
    };
    let directory = |name: &[u8]| Message::Directory {
        name: name.to_vec(),
        metadata,
    };
    let totals = Totals {
        entries: 10_000,
        ..Totals::default()
    };
    let link = Message::Symlink {
        name: b"d".to_vec(),
        metadata,
        target: b"t".to_vec(),
    };
    let mut messages = vec![Message::Announce(totals), directory(b"asked")];
    messages.extend(std::iter::repeat_n(directory(&[1; 255]), 126));
    messages.extend([directory(b"d"), Message::Leave]);
    messages.extend(std::iter::repeat_n(link, 600));
    messages.extend(std::iter::repeat_n(Message::Leave, 127));
    messages.extend([Message::End, Message::Finished]);
    say(stream, messages);
}

#[test]
fn an_agent_floods_no_terminal_with_the_paths_of_what_cannot_be_copied() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let _uplink = hostile(&daemon, failing);
    let files = tempfile::tempdir().unwrap();
    let to = files.path().to_str().unwrap();
    let words = ["cp", "-r", "--retry", "0s", "web:asked", to];
    let outcome = run_with(daemon.runtime_dir(), &words);
    assert_eq!(outcome.code, Some(1), "{:.500}", outcome.err);
    let (len, lines) = (outcome.err.len(), outcome.err.lines().count());
    assert!(outcome.err.contains("more lines like these"), "{len}");
    assert!(
        (100..200).contains(&lines) && len < 1_000_000,
        "{lines}, {len}"
    );
}

/// Sends a file, as one that may have holes and has this size, and of it no more than four bytes.
fn send_file(stream: &mut UnixStream, name: &str, size: u64) {
    let begun = Message::File(File {
        name: name.into(),
        metadata: Metadata::default(),
        size: Some(size),
        sparse: true,
        identity: 1,
        asks: false,
    });
    let chunk = Message::Chunk {
        offset: 0,
        len: 4,
        checksum: xxhash_rust::xxh64::xxh64(b"four", 0),
    };
    let end = Message::EndOfFile {
        size: 4,
        digest: None,
        changed: false,
    };
    say(stream, [begun, chunk]);
    let _ = stream.write_all(b"four");
    say(stream, [end]);
}

/// The client may have left.
fn say(stream: &mut UnixStream, messages: impl IntoIterator<Item = Message>) {
    for message in messages {
        let frame = Frame::Transfer(message)
            .to_bytes(OPERATION_CHANNEL)
            .unwrap();
        let _ = stream.write_all(&frame);
    }
}

/// Sends of what is asked for `whole` as it is, `short` not to its end, another name in place of `other`, and nothing of all else.
fn lying(request: &Frame<'_>, stream: &mut UnixStream) {
    let Frame::Transfer(Message::Start(start)) = request else {
        return;
    };
    let Part::Send { sources, .. } = &start.part else {
        return;
    };
    say(stream, [Message::Announce(Totals::default())]);
    for source in sources {
        match source.as_slice() {
            b"/srv/whole" => send_file(stream, "whole", 4),
            b"/srv/short" => send_file(stream, "short", 1 << 20),
            b"/srv/other" => send_file(stream, ".bashrc", 4),
            b"/srv/refused" => say(
                stream,
                [Message::Skipped {
                    path: source.clone(),
                    reason: "no".to_owned(),
                }],
            ),
            _ => {}
        }
    }
    say(stream, [Message::End, Message::Finished]);
}

#[test]
fn what_an_agent_leaves_out_or_cuts_short_is_an_error_that_names_it() {
    const MISSING: &str = "/srv/none: it was asked for and did not come";
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let _uplink = hostile(&daemon, lying);
    for (line, expected, arrived) in [
        ("cp web:/srv/whole TO", "", &["whole"][..]),
        ("cp web:/srv/none web:/srv/whole TO", MISSING, &["whole"]),
        ("cp web:/srv/whole web:/srv/none TO", MISSING, &["whole"]),
        ("cp web:/srv/none -", MISSING, &[]),
        ("sync web:/srv/none TO", MISSING, &[]),
        ("cp -r web: TO", ".: it was asked for", &[]),
        ("cp web:/srv/short TO", "short: it ends after 4 bytes", &[]),
        ("cp web:/srv/short -", "short: it ends after 4 bytes", &[]),
        ("cp web:/srv/other TO", ".bashrc", &[]),
        ("cp web:/srv/refused TO", "/srv/refused: no", &[]),
    ] {
        let files = tempfile::tempdir().unwrap();
        let line = line.replace("TO", files.path().to_str().unwrap());
        let words: Vec<&str> = line.split(' ').collect();
        let outcome = run_with(daemon.runtime_dir(), &words);
        let code = i32::from(!expected.is_empty());
        assert_eq!(outcome.code, Some(code), "{line}: {}", outcome.err);
        assert!(outcome.err.contains(expected), "{line}: {}", outcome.err);
        let is_said = outcome.err.contains("did not come");
        assert_eq!(is_said, expected.contains("it was asked"), "{line}");
        let there = std::fs::read_dir(files.path()).unwrap();
        let there: Vec<_> = there.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(there, arrived, "{line}");
    }
}

/// Many more figures than were asked for, as fast as they go.
fn flooding(_: &Frame<'_>, stream: &mut UnixStream) {
    let mut left = 0..10_000;
    while left.next().is_some() && send(stream, Answer::Stats(Box::default())) {}
}

fn ending(_: &Frame<'_>, stream: &mut UnixStream) {
    send(stream, Answer::Done);
}

#[test]
fn an_agent_gives_as_much_as_was_asked_for() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let _uplink = hostile(&daemon, flooding);
    let begun = Instant::now();
    for (words, count) in [("stats web", 1), ("stats web --interval 1s --count 3", 3)] {
        let words: Vec<&str> = words.split(' ').chain(["--json"]).collect();
        let outcome = run_with(daemon.runtime_dir(), &words);
        assert_eq!(outcome.code, Some(0), "{}", outcome.err);
        assert_eq!(outcome.out.lines().count(), count);
    }
    // Of three, two wait for half an interval each.
    let took = begun.elapsed();
    assert!(took >= Duration::from_secs(1), "{took:?}");

    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let _uplink = hostile(&daemon, ending);
    for (words, expected) in [
        ("stats web", "it ended after 0 reports"),
        ("stats web --interval 1s", "it ended after 0 reports"),
        (
            "logs web --follow",
            "it ended a log that was to be followed",
        ),
    ] {
        let words: Vec<&str> = words.split(' ').collect();
        let outcome = run_with(daemon.runtime_dir(), &words);
        assert_eq!(outcome.code, Some(1), "{words:?}: {}", outcome.err);
        assert!(outcome.err.contains(expected), "{}", outcome.err);
    }
}

/// Notes about a log, as fast as they go.
fn noting(_: &Frame<'_>, stream: &mut UnixStream) {
    let note = || Answer::Note("x".repeat(1000));
    let mut left = 0..5_000;
    while left.next().is_some() && send(stream, note()) {}
    std::thread::sleep(Duration::from_millis(1100));
    send(stream, note());
    send(stream, Answer::Done);
}

#[test]
fn an_agent_floods_no_terminal_with_notes_about_a_log() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let _uplink = hostile(&daemon, noting);
    let outcome = run_with(daemon.runtime_dir(), &["logs", "web"]);
    assert_eq!(outcome.code, Some(0), "{:.500}", outcome.err);
    let lines: Vec<&str> = outcome.err.lines().collect();
    assert!((102..120).contains(&lines.len()), "{}", lines.len());
    // On a slow machine some are shown in between.
    let suppressed = lines.iter().filter_map(|line| {
        let count = line.strip_prefix("suppressed ")?.split(' ').next()?;
        count.parse::<usize>().ok()
    });
    assert!(suppressed.sum::<usize>() > 4_000);
    let last = lines.last().unwrap();
    assert!(last.starts_with("web: xxx"), "{last:.100}");
}

/// A command that runs and takes no key: there is no credit for any.
fn hanging(_: &Frame<'_>, stream: &mut UnixStream) {
    let frames = [
        Frame::Started { pid: 1 },
        Frame::Data {
            stream: Stream::Stdout,
            bytes: b"it hangs",
        },
    ];
    for frame in frames {
        stream
            .write_all(&frame.to_bytes(OPERATION_CHANNEL).unwrap())
            .unwrap();
    }
}

#[test]
fn a_person_leaves_a_guest_that_takes_no_key() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let _uplink = hostile(&daemon, hanging);
    for words in [&["shell", "web"][..], &["exec", "-t", "web", "sh"][..]] {
        let mut terminal = Terminal::open(80, 24);
        let before = terminal.modes();
        let mut command = ringdown(&words[..1]);
        command.arg("--runtime-dir").arg(daemon.runtime_dir());
        command.args(&words[1..]);
        terminal.start(command);
        terminal.wait_for("it hangs");
        // Keys of the guest's, and a tilde that is inside of a line.
        terminal.type_in("\x03\x1c~.");
        terminal.type_in("\r~~\r");
        std::thread::sleep(Duration::from_millis(100));
        assert!(!terminal.screen().contains("left"));
        // What a terminal answers to a shell that asks where the cursor is.
        terminal.type_in("\x1b[24;3R");
        terminal.type_in("~.");
        assert_eq!(terminal.wait_for_end(), (Some(255), None));
        assert!(terminal.screen().contains("left by ~."));
        assert_eq!(terminal.modes(), before);
    }
}
