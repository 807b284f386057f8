//! The daemon that runs, by the kernel's word.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::Parser as _;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::binary::{ASK_TIMEOUT, Binary, output_within};
use crate::arguments::{Arguments, Command as Words, Sandbox};
use crate::client::{self, Client};
use crate::failure::Failure;
use crate::unix;

/// How long a killed process may take to be gone.
const KILL_PATIENCE: Duration = Duration::from_secs(5);

/// The time between two polls of a process that is to end.
const LOOK_PAUSE: Duration = Duration::from_millis(500);

/// What the kernel appends to the path of a file that has been replaced.
const DELETED: &str = " (deleted)";

/// Variables of the daemon's that a new one gets, beside those of this command.
const VARIABLES: [&str; 4] = [
    "RINGDOWN_LOG",
    "RINGDOWN_RUNTIME_DIR",
    "XDG_RUNTIME_DIR",
    "HOME",
];

/// The daemon's process.
#[derive(Debug)]
pub struct Running {
    pub(super) pid: Pid,
    /// Its user.
    pub uid: u32,
    pub(super) unit: Option<Unit>,
    process: OwnedFd,
}

/// A service of systemd's.
#[derive(Debug)]
pub(super) struct Unit {
    pub(super) name: String,
    is_of_user: bool,
}

/// How it was started.
pub(super) struct Start {
    /// Its own program.
    pub(super) old: Binary,
    arguments: Vec<OsString>,
    directory: PathBuf,
    variables: Vec<(OsString, OsString)>,
    /// Input, output and log, where they can be opened again.
    files: [Option<File>; 3],
}

/// The process that listens at the control socket.
///
/// # Errors
/// The system's.
pub(super) fn process_at(socket: &Path) -> io::Result<i32> {
    let stream = client::connect(socket, unix::CONNECT_TIMEOUT)?;
    sys::peer::process(stream.as_fd())
}

impl Running {
    /// The one that listens at this client's control socket.
    ///
    /// # Errors
    /// [`Failure`] when there is none, or it cannot be seen from here.
    pub fn at(client: &Client) -> Result<Running, Failure> {
        let unseen = |error: io::Error| {
            Failure::failed(format!("cannot look at the daemon's process: {error}"))
        };
        let stream = client::connect(client.socket(), unix::CONNECT_TIMEOUT);
        let stream = stream.map_err(|error| client.unreachable(error))?;
        let peer = sys::peer::peer(stream.as_fd()).map_err(unseen)?;
        let pid = Pid::from_raw(peer.pid).ok_or_else(|| {
            Failure::failed("the daemon's process cannot be seen from here: is this a container?")
        })?;
        let process = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| unseen(error.into()))?;
        let unit = Unit::of(peer.pid);
        Ok(Running {
            pid,
            uid: peer.uid,
            unit,
            process,
        })
    }

    fn place(&self, name: &str) -> PathBuf {
        format!("/proc/{}/{name}", self.pid.as_raw_nonzero()).into()
    }

    /// What is started if nothing else is said: the file from which it was started, or that its unit starts.
    ///
    /// # Errors
    /// [`Failure`] when this user may not look.
    pub fn program(&self) -> Result<PathBuf, Failure> {
        if let Some(unit) = &self.unit {
            return unit.program();
        }
        let link = std::fs::read_link(self.place("exe")).map_err(|error| {
            Failure::failed(format!(
                "cannot see which program the daemon runs: {error}; name the new one with --binary"
            ))
        })?;
        let bytes = link.as_os_str().as_bytes();
        let path = bytes.strip_suffix(DELETED.as_bytes()).unwrap_or(bytes);
        Ok(PathBuf::from(OsStr::from_bytes(path)))
    }

    /// Waits until it has ended, be it that the kernel does not let go of it. Returns whether it has.
    pub(super) fn wait(&self, timeout: Duration) -> bool {
        let deadline = Instant::now() + timeout;
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let pause = Timespec::try_from(left.min(LOOK_PAUSE)).ok();
            let mut ends = [PollFd::new(&self.process, PollFlags::IN)];
            let is_gone = matches!(poll(&mut ends, pause.as_ref()), Ok(1..));
            if is_gone || sys::ended::has_ended(self.pid.as_raw_nonzero().get()) {
                return true;
            }
            if left.is_zero() {
                return false;
            }
        }
    }

    /// Kills it, and waits until it has ended.
    ///
    /// # Errors
    /// [`Failure`] when it may not be killed, or hangs in the kernel.
    pub(super) fn kill(&self) -> Result<(), Failure> {
        let killed = pidfd_send_signal(&self.process, Signal::KILL);
        match self.wait(KILL_PATIENCE) {
            true => Ok(()),
            false => Err(Failure::failed(format!(
                "the daemon, process {}, cannot be ended{}: nothing was started",
                self.pid.as_raw_nonzero(),
                killed
                    .err()
                    .map_or_else(String::new, |error| format!(" ({error})"))
            ))),
        }
    }

    /// Whether this user may see how it was started.
    pub(super) fn is_seen(&self) -> bool {
        [0, self.uid].contains(&rustix::process::geteuid().as_raw())
    }

    /// How it was started. To be asked while it runs.
    ///
    /// # Errors
    /// That this user may not look, or that it was started as no daemon is.
    pub(super) fn starts(&self) -> Result<Start, String> {
        let unseen = |error: io::Error| format!("cannot see how the daemon was started: {error}");
        let words = words_of(&std::fs::read(self.place("cmdline")).map_err(unseen)?);
        let status = std::fs::read_to_string(self.place("status")).map_err(unseen)?;
        check_arguments(&words, is_sandboxed(&status))?;
        let environment = words_of(&std::fs::read(self.place("environ")).map_err(unseen)?);
        // Root does not start another user's daemon itself, and must not open for it what that user may not.
        let is_own = rustix::process::geteuid().as_raw() == self.uid;
        let file = |number: usize| {
            let place = self.place(&format!("fd/{number}"));
            is_own.then(|| opened_again(&place, number > 0).ok())?
        };
        Ok(Start {
            old: Binary::of_process(self.pid.as_raw_nonzero().get()).map_err(unseen)?,
            arguments: words.into_iter().skip(1).collect(),
            directory: std::fs::read_link(self.place("cwd")).map_err(unseen)?,
            variables: environment.iter().filter_map(variable).collect(),
            files: [file(0), file(1), file(2)],
        })
    }
}

impl Start {
    fn command(&self, binary: &Binary) -> Command {
        let mut command = binary.command();
        command.args(&self.arguments).current_dir(&self.directory);
        for name in VARIABLES {
            command.env_remove(name);
        }
        command.envs(self.variables.iter().cloned());
        command
    }

    /// The VMs that a program would serve if it was started so, by full name.
    ///
    /// # Errors
    /// Why it would not start.
    pub(super) fn dry_run(&self, binary: &Binary) -> Result<Vec<String>, String> {
        if !self.directory.is_dir() {
            let directory = self.directory.display();
            return Err(format!(
                "the daemon's working directory is gone: {directory}"
            ));
        }
        let output = output_within(self.command(binary).arg("--dry-run"), ASK_TIMEOUT);
        let output = output.map_err(|error| error.to_string())?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            let last = said.lines().last().unwrap_or("it does not say why");
            return Err(last.strip_prefix("error: ").unwrap_or(last).to_owned());
        }
        let names = String::from_utf8_lossy(&output.stdout);
        Ok(names.lines().map(str::to_owned).collect())
    }

    /// Starts a program so.
    ///
    /// # Errors
    /// The system's.
    pub(super) fn start(&self, binary: &Binary) -> io::Result<Child> {
        let stdio = |file: &Option<File>| match file {
            Some(file) => file.try_clone().map(Stdio::from),
            None => Ok(Stdio::null()),
        };
        let [input, output, log] = &self.files;
        let mut command = self.command(binary);
        command.stdin(stdio(input)?).stdout(stdio(output)?);
        // A socket cannot be opened again.
        match log {
            Some(_) => command.stderr(stdio(log)?),
            None => command.stderr(Stdio::inherit()),
        };
        command.process_group(0).spawn()
    }
}

/// Opens a file of the daemon's. It may be a named pipe that no program reads, for which nothing is to wait.
fn opened_again(place: &Path, writes: bool) -> io::Result<File> {
    let flags = OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = OpenOptions::new()
        .read(!writes)
        .append(writes)
        .custom_flags(flags.bits() as i32)
        .open(place)?;
    let flags = fcntl_getfl(&file)?;
    fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    Ok(file)
}

/// Words that end with a zero byte each.
fn words_of(bytes: &[u8]) -> Vec<OsString> {
    let bytes = bytes.strip_suffix(&[0]).unwrap_or(bytes);
    let words = bytes.split(|byte| *byte == 0);
    words
        .map(|word| OsString::from_vec(word.to_vec()))
        .collect()
}

fn variable(entry: &OsString) -> Option<(OsString, OsString)> {
    let (name, value) = entry.to_str()?.split_once('=')?;
    let is_one = VARIABLES.contains(&name);
    is_one.then(|| (name.into(), value.into()))
}

/// Whether the kernel filters system calls of a process, by its status (proc_pid_status(5)).
fn is_sandboxed(status: &str) -> bool {
    status
        .lines()
        .filter_map(|line| line.strip_prefix("Seccomp:"))
        .any(|mode| mode.trim() == "2")
}

/// A process can change its command line: it has to be one of `serve` with a keeper, and in the sandbox if the process is.
fn check_arguments(words: &[OsString], is_sandboxed: bool) -> Result<(), String> {
    let arguments = Arguments::try_parse_from(words).ok();
    let Some(Words::Serve(options)) = arguments.map(|arguments| arguments.command) else {
        return Err("the daemon's command line is not one of `ringdown serve`".to_owned());
    };
    match options.sandbox {
        Sandbox::Off | Sandbox::Log if is_sandboxed => {
            Err("the daemon is in its sandbox and its command line says otherwise: it was changed; stop the daemon and start it by hand".to_owned())
        }
        _ => Ok(()),
    }
}

impl Unit {
    /// The service whose main process this is.
    fn of(pid: i32) -> Option<Unit> {
        let cgroups = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
        let path = cgroups.lines().find_map(|line| line.strip_prefix("0::"))?;
        let name = path.rsplit('/').next()?;
        if !name.ends_with(".service") {
            return None;
        }
        let unit = Unit {
            name: name.to_owned(),
            is_of_user: path.contains("/user@"),
        };
        let main = unit.property("MainPID").ok()?;
        (main.trim() == pid.to_string()).then_some(unit)
    }

    fn systemctl(&self) -> Command {
        let mut command = Command::new("systemctl");
        if self.is_of_user {
            command.arg("--user");
        }
        command
    }

    fn property(&self, property: &str) -> io::Result<String> {
        let mut command = self.systemctl();
        command.args(["show", "--value", "--property", property, "--", &self.name]);
        let output = command.output()?;
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn program(&self) -> Result<PathBuf, Failure> {
        let started = self.property("ExecStart").unwrap_or_default();
        program_in(&started).ok_or_else(|| {
            Failure::failed(format!(
                "systemctl does not say which program {self} starts"
            ))
        })
    }

    pub(super) fn restart(&self) -> Result<(), Failure> {
        let restarted = self
            .systemctl()
            .args(["restart", "--", &self.name])
            .status();
        match restarted {
            Ok(status) if status.success() => Ok(()),
            Ok(_) => Err(Failure::failed(format!(
                "`systemctl restart {self}` failed; what is kept waits for a daemon that starts: see `journalctl -u {self}`, and put the old program back"
            ))),
            Err(error) => Err(Failure::failed(format!("cannot run systemctl: {error}"))),
        }
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.name)
    }
}

/// The path in what systemctl says of `ExecStart=`: `{ path=/usr/bin/ringdown ; argv[]=… }`.
fn program_in(started: &str) -> Option<PathBuf> {
    let (_, rest) = started.split_once("path=")?;
    let (path, _) = rest.split_once(" ;")?;
    Some(PathBuf::from(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words(line: &str) -> Vec<OsString> {
        line.split(' ').map(OsString::from).collect()
    }

    #[test]
    fn only_a_daemon_in_its_sandbox_is_started_as_it_was() {
        let serve = words("ringdown serve --keeper /run/k");
        assert_eq!(check_arguments(&serve, true), Ok(()));
        let open = words("ringdown serve --keeper /run/k --sandbox=off");
        assert_eq!(check_arguments(&open, false), Ok(()));
        assert!(check_arguments(&open, true).is_err());
        assert!(check_arguments(&words("ringdown vm ls"), false).is_err());
        assert!(check_arguments(&words("ringdown serve --nonsense"), false).is_err());
        assert!(is_sandboxed(
            "Name:\tringdown\nSeccomp:\t2\nSeccomp_filters:\t1\n"
        ));
        assert!(!is_sandboxed("Seccomp:\t0\nSeccomp_filters:\t2\n"));
    }

    #[test]
    fn a_named_pipe_is_opened_again_only_where_a_program_reads() {
        let directory = tempfile::tempdir().unwrap();
        let pipe = directory.path().join("log");
        rustix::fs::mkfifoat(rustix::fs::CWD, &pipe, rustix::fs::Mode::RWXU).unwrap();
        opened_again(&pipe, true).unwrap_err();
        let _reader = opened_again(&pipe, false).unwrap();
        let log = opened_again(&pipe, true).unwrap();
        let flags = fcntl_getfl(&log).unwrap();
        assert!(flags.contains(OFlags::APPEND) && !flags.contains(OFlags::NONBLOCK));
    }

    #[test]
    fn a_unit_says_what_it_starts() {
        let said =
            "{ path=/usr/bin/ringdown ; argv[]=/usr/bin/ringdown serve ; ignore_errors=no }\n";
        assert_eq!(program_in(said), Some(PathBuf::from("/usr/bin/ringdown")));
        assert_eq!(program_in("\n"), None);
    }

    #[test]
    fn only_some_variables_go_on() {
        let found = words_of(b"LD_PRELOAD=/x.so\0RINGDOWN_LOG=debug\0");
        let found: Vec<_> = found.iter().filter_map(variable).collect();
        assert_eq!(found, [("RINGDOWN_LOG".into(), "debug".into())]);
    }
}
