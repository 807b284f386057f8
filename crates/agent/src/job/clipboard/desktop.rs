//! Finding the desktop: the session that is active, and the environment of its programs.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::config::Config;
use crate::tool::{Tool, find};

/// How long `loginctl` may take, each time.
const TOOL_TIMEOUT: Duration = Duration::from_secs(5);

/// The most sessions that are checked.
const MAX_SESSIONS: usize = 64;

/// The most processes that are checked.
const MAX_PROCESSES: usize = 65_536;

/// The most that is read of a process's environment, in bytes.
const MAX_ENVIRONMENT_LEN: usize = 256 * 1024;

/// How long reading all environments may take.
const ENVIRONMENTS_TIMEOUT: Duration = Duration::from_secs(10);

/// What a program needs to find the display and to be let in.
const VARIABLES: [&str; 7] = [
    "DBUS_SESSION_BUS_ADDRESS",
    "DISPLAY",
    "HOME",
    "WAYLAND_DISPLAY",
    "XAUTHORITY",
    "XDG_RUNTIME_DIR",
    "XDG_SESSION_ID",
];

/// How programs show something there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Display {
    Wayland,
    X11,
}

/// The desktop in use.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Desktop {
    /// The identifier of its session.
    pub(super) session: String,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) display: Display,
    pub(super) environment: Vec<(OsString, OsString)>,
}

impl Desktop {
    /// The desktop of the active session.
    ///
    /// # Errors
    /// In words: there is none.
    pub(super) fn find(config: &Config) -> Result<Desktop, String> {
        let loginctl = find(&config.search_path, "loginctl").ok_or_else(|| {
            "there is no loginctl in this guest, by which a desktop could be found".to_owned()
        })?;
        let list = run(&loginctl, &["list-sessions", "--no-legend"])?;
        let ids = list
            .lines()
            .filter_map(|line| line.split_whitespace().next());
        let mut sessions = Vec::new();
        for id in ids.filter(|id| is_identifier(id)).take(MAX_SESSIONS) {
            let about = run(
                &loginctl,
                &[
                    "show-session",
                    id,
                    "--property=User",
                    "--property=Active",
                    "--property=Class",
                    "--property=Seat",
                    "--property=Remote",
                ],
            )?;
            sessions.extend(session(id, &about));
        }
        if sessions.is_empty() {
            return Err("no user is logged in at a screen of this guest".to_owned());
        }
        for session in &sessions {
            let deadline = Instant::now() + ENVIRONMENTS_TIMEOUT;
            let cat = find(&config.search_path, "cat").unwrap_or_else(|| "cat".into());
            if let Some(desktop) = Desktop::of(session, Path::new("/proc"), &cat, deadline)? {
                return Ok(desktop);
            }
        }
        Err("there is no desktop in this guest: no program of the active session has a Wayland or X11 display".to_owned())
    }

    /// Each environment is read by a process of the user: it is in memory of the user's process, which may be of a FUSE file system that never
    /// answers.
    fn of(
        session: &Session,
        proc: &Path,
        cat: &Path,
        deadline: Instant,
    ) -> Result<Option<Desktop>, String> {
        let mut other = None;
        let processes = std::fs::read_dir(proc).into_iter().flatten().flatten();
        for process in processes.take(MAX_PROCESSES) {
            let is_process = process
                .file_name()
                .as_bytes()
                .iter()
                .all(u8::is_ascii_digit);
            let owner = process
                .metadata()
                .ok()
                .filter(|metadata| is_process && metadata.uid() == session.uid);
            let Some(owner) = owner else {
                continue;
            };
            let path = process.path().join("environ");
            let read = as_user(cat, session.uid, owner.gid())
                .arguments([&path])
                .max_output(MAX_ENVIRONMENT_LEN)
                .run(deadline);
            let read = read.map_err(|error| format!("cannot read {}: {error}", path.display()))?;
            let environment = variables(&read.stdout);
            let has = |name: &str| environment.iter().any(|(key, _)| key == name);
            let display = match (has("WAYLAND_DISPLAY"), has("DISPLAY")) {
                (true, _) => Display::Wayland,
                (false, true) => Display::X11,
                (false, false) => continue,
            };
            let is_of_session = environment
                .iter()
                .any(|(key, value)| key == "XDG_SESSION_ID" && value == session.id.as_str());
            let desktop = Desktop {
                session: session.id.clone(),
                uid: session.uid,
                gid: owner.gid(),
                display,
                environment,
            };
            // A program of the same user may have been started from elsewhere, as over ssh with a display of its own.
            if is_of_session {
                return Ok(Some(desktop));
            }
            other.get_or_insert(desktop);
        }
        Ok(other)
    }
}

#[derive(Debug, PartialEq, Eq)]
struct Session {
    id: String,
    uid: u32,
}

/// What `loginctl show-session` says, if a person sits there now.
fn session(id: &str, about: &str) -> Option<Session> {
    let property = |name: &str| {
        about
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix('='))
    };
    // A session without a seat, as over ssh, is always active (sd_session_is_active(3) checks the seat's).
    let is_here =
        property("Seat").is_some_and(|seat| !seat.is_empty()) && property("Remote") == Some("no");
    let is_active = property("Active") == Some("yes") && property("Class") == Some("user");
    let uid = property("User")?.parse().ok()?;
    let id = id.to_owned();
    (is_active && is_here).then_some(Session { id, uid })
}

/// Nothing that could be taken for an option.
fn is_identifier(id: &str) -> bool {
    id.len() <= 64
        && id
            .chars()
            .all(|character| character.is_ascii_alphanumeric())
}

/// Those of a process's variables that are needed.
fn variables(environment: &[u8]) -> Vec<(OsString, OsString)> {
    let pairs = environment.split(|byte| *byte == 0).filter_map(|pair| {
        let equals = pair.iter().position(|byte| *byte == b'=')?;
        let (name, value) = (&pair[..equals], &pair[equals + 1..]);
        let is_needed =
            VARIABLES.iter().any(|needed| needed.as_bytes() == name) && !value.is_empty();
        is_needed.then(|| {
            (
                OsStr::from_bytes(name).to_owned(),
                OsStr::from_bytes(value).to_owned(),
            )
        })
    });
    pairs.take(VARIABLES.len()).collect()
}

/// A tool that runs as this user.
pub(super) fn as_user<'a>(program: &Path, uid: u32, gid: u32) -> Tool<'a> {
    let tool = Tool::new(program);
    // Without the right to change its user, an agent that is run by the desktop's own user needs none.
    match rustix::process::geteuid().as_raw() == uid {
        true => tool,
        false => tool.user(uid, gid),
    }
}

fn run(loginctl: &Path, arguments: &[&str]) -> Result<String, String> {
    let output = Tool::new(loginctl)
        .arguments(arguments)
        .run(Instant::now() + TOOL_TIMEOUT)
        .map_err(|error| format!("loginctl: {error}"))?;
    match output.succeeded {
        true => Ok(String::from_utf8_lossy(&output.stdout).into_owned()),
        false => Err(format!("loginctl {}: {}", arguments[0], output.complaint)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_counts_if_a_person_sits_there_now() {
        let here = Some(Session {
            id: "c1".to_owned(),
            uid: 1000,
        });
        let about = "User=1000\nActive=yes\nClass=user\nSeat=seat0\nRemote=no\n";
        assert_eq!(session("c1", about), here);
        // As systemd's loginctl prints the session of an ssh login: active, and no seat.
        for (part, other) in [
            ("Active=yes", "Active=no"),
            ("Class=user", "Class=greeter"),
            ("User=1000", "User=nobody"),
            ("Seat=seat0", "Seat="),
            ("Seat=seat0\n", ""),
            ("Remote=no", "Remote=yes"),
            ("Remote=no\n", ""),
        ] {
            assert_eq!(session("c1", &about.replace(part, other)), None, "{other}");
        }
        assert_eq!(session("c1", ""), None);
    }

    #[test]
    fn the_programs_of_the_session_know_the_display() {
        let proc = tempfile::tempdir().unwrap();
        let process = |number: &str, environment: &str| {
            let directory = proc.path().join(number);
            std::fs::create_dir(&directory).unwrap();
            std::fs::write(directory.join("environ"), environment).unwrap();
        };
        let uid = rustix::process::geteuid().as_raw();
        let session = Session {
            id: "2".to_owned(),
            uid,
        };
        let of = |session: &Session| {
            let deadline = Instant::now() + Duration::from_secs(60);
            Desktop::of(session, proc.path(), Path::new("/bin/cat"), deadline).unwrap()
        };
        process("10", "PATH=/bin\0HOME=/root\0");
        process("self", "DISPLAY=:9\0");
        assert_eq!(of(&session), None);
        process("11", "DISPLAY=:1\0XAUTHORITY=/x\0SECRET=s\0");
        let desktop = of(&session).unwrap();
        assert_eq!(desktop.display, Display::X11);
        let names: Vec<_> = desktop
            .environment
            .iter()
            .map(|(name, _)| name.to_str().unwrap())
            .collect();
        assert_eq!(names, ["DISPLAY", "XAUTHORITY"]);
        process(
            "12",
            "WAYLAND_DISPLAY=wayland-0\0DISPLAY=:0\0XDG_SESSION_ID=2\0",
        );
        let desktop = of(&session).unwrap();
        assert_eq!((desktop.display, desktop.uid), (Display::Wayland, uid));
        let other = Session {
            id: "2".to_owned(),
            uid: uid + 1,
        };
        assert_eq!(of(&other), None);
    }

    /// A process that takes what is read of it from nowhere.
    #[test]
    fn an_environment_that_never_comes_is_given_up() {
        let proc = tempfile::tempdir().unwrap();
        let path = proc.path().join("10/environ");
        std::fs::create_dir(proc.path().join("10")).unwrap();
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &path,
            rustix::fs::FileType::Fifo,
            0o600.into(),
            0,
        )
        .unwrap();
        let session = Session {
            id: "2".to_owned(),
            uid: rustix::process::geteuid().as_raw(),
        };
        let deadline = Instant::now() + Duration::from_millis(200);
        let words = Desktop::of(&session, proc.path(), Path::new("/bin/cat"), deadline);
        let expected = format!("cannot read {}: timed out", path.display());
        assert_eq!(words.unwrap_err(), expected);
    }

    #[test]
    fn identifiers_are_no_options() {
        assert!(is_identifier("c12"));
        assert!(
            !is_identifier("--all") && !is_identifier("a b") && !is_identifier(&"1".repeat(65))
        );
    }
}
