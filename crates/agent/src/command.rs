//! Starting a command, on pipes or on a terminal.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use rustix::event::PollFlags;
use rustix::process::{Pid, PidfdFlags, Signal};
use rustix::pty::OpenptFlags;
use rustix::termios::{InputModes, OptionalActions, Winsize};
use wire::agent::{ErrorKind, ErrorReport, ExecStart, ExitStatus, Terminal};

use crate::guest::User;
use crate::launch;
use crate::stream::wait;

/// A command that runs, and the agent's ends of what connects it. Dropping it ends the command at once.
#[derive(Debug)]
pub struct Running {
    child: Child,
    pid: Pid,
    /// Whether the command's end was taken note of, so that its number may belong to others by now.
    reaped: bool,
    /// Becomes readable when the command has ended.
    ended: OwnedFd,
    /// Where its standard input is written to; non-blocking.
    pub stdin: Option<OwnedFd>,
    /// Where its standard output, or its terminal, is read from; non-blocking.
    pub stdout: Option<OwnedFd>,
    /// Where its standard error is read from; non-blocking; none with a terminal.
    pub stderr: Option<OwnedFd>,
    /// The controlling side of its terminal, if it has one.
    pub terminal: Option<OwnedFd>,
}

impl Running {
    /// Start a command. `launcher` is the agent's own executable, needed for terminals.
    ///
    /// # Errors
    /// Report to the host: nothing was started.
    pub fn start(request: &ExecStart, launcher: &Path) -> Result<Running, ErrorReport> {
        let user = User::current();
        let directory = match &request.directory {
            Some(directory) => Path::new(OsStr::from_bytes(directory)),
            None => user.start_directory(),
        };
        // Checked first because a missing directory and a missing command give the same error below.
        match std::fs::metadata(directory) {
            Ok(metadata) if metadata.is_dir() => {}
            Ok(_) => return Err(no_directory(directory, "it is not a directory")),
            Err(error) => return Err(no_directory(directory, &error.to_string())),
        }
        match &request.terminal {
            None => start_on_pipes(request, &user, directory),
            Some(terminal) => start_on_terminal(request, &user, directory, terminal, launcher),
        }
    }

    /// The command's process identifier.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What becomes readable when the command has ended.
    pub fn ended(&self) -> BorrowedFd<'_> {
        self.ended.as_fd()
    }

    /// Send a signal to the command's process group, or to the terminal's group in the foreground; nothing happens
    /// after [`Running::reap`].
    pub fn signal(&self, signal: Signal) {
        if self.reaped {
            return;
        }
        let foreground = self
            .terminal
            .as_ref()
            .and_then(|terminal| rustix::termios::tcgetpgrp(terminal).ok());
        // The group may have ended meanwhile, which is what a late signal finds anywhere.
        let _ = rustix::process::kill_process_group(foreground.unwrap_or(self.pid), signal);
    }

    /// End the command because it is no longer wanted: everything in its process group gets SIGHUP, and
    /// what is left at the deadline, or when the command itself has ended, SIGKILL. What the command left in the
    /// background when it ended before is let live.
    pub fn hang_up(&mut self, deadline: Instant) {
        if self.reaped {
            return;
        }
        self.signal(Signal::HUP);
        // A stopped process handles the signal only when it goes on.
        self.signal(Signal::CONT);
        // A pipe of input stays open until the command is gone: its end would look like the end of what the host had to say. The kernel hangs up
        // the whole session of a terminal whose controlling side closes.
        let input = self.stdin.take().filter(|_| self.terminal.is_none());
        (self.stdout, self.stderr, self.terminal) = (None, None, None);
        let _ = wait(&self.ended, PollFlags::IN, deadline);
        self.kill();
        drop(input);
    }

    fn kill(&mut self) {
        if !self.reaped {
            let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
            let _ = self.reap();
        }
    }

    /// How the command ended; waits until it has.
    ///
    /// # Errors
    /// The system does not say.
    pub fn reap(&mut self) -> io::Result<ExitStatus> {
        use std::os::unix::process::ExitStatusExt;
        let status = self.child.wait()?;
        self.reaped = true;
        Ok(match (status.code(), status.signal()) {
            (Some(code), _) => ExitStatus::Code((code & 0xff) as u8),
            (None, Some(signal)) => ExitStatus::Signal((signal & 0x7f) as u8),
            (None, None) => {
                return Err(io::Error::other(format!(
                    "unexpected wait status {status:?}"
                )));
            }
        })
    }

    fn new(mut child: Child) -> Result<Running, ErrorReport> {
        let watch = || {
            let pid = i32::try_from(child.id())
                .ok()
                .and_then(Pid::from_raw)
                .ok_or(rustix::io::Errno::SRCH)?;
            Ok((pid, rustix::process::pidfd_open(pid, PidfdFlags::empty())?))
        };
        match watch() {
            Ok((pid, ended)) => {
                let (stdin, stdout, stderr, terminal) = (None, None, None, None);
                Ok(Running {
                    child,
                    pid,
                    reaped: false,
                    ended,
                    stdin,
                    stdout,
                    stderr,
                    terminal,
                })
            }
            Err(error) => {
                let error: rustix::io::Errno = error;
                let _ = child.kill();
                let _ = child.wait();
                Err(failed("watch the command", error))
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.kill();
    }
}

fn start_on_pipes(
    request: &ExecStart,
    user: &User,
    directory: &Path,
) -> Result<Running, ErrorReport> {
    let mut command = Command::new(OsStr::from_bytes(&request.arguments[0]));
    command.args(
        request.arguments[1..]
            .iter()
            .map(|argument| OsStr::from_bytes(argument)),
    );
    set_environment(&mut command, request, user);
    command.current_dir(directory).process_group(0);
    command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command
        .spawn()
        .map_err(|error| cannot_execute(&request.arguments[0], &error))?;
    let stdin = child.stdin.take().map(OwnedFd::from);
    let stdout = child.stdout.take().map(OwnedFd::from);
    let stderr = child.stderr.take().map(OwnedFd::from);
    let mut running = Running::new(child)?;
    (running.stdin, running.stdout, running.stderr) = (stdin, stdout, stderr);
    for end in [&running.stdin, &running.stdout, &running.stderr]
        .into_iter()
        .flatten()
    {
        set_nonblocking(end).map_err(|error| failed("set up the command's pipes", error))?;
    }
    Ok(running)
}

fn start_on_terminal(
    request: &ExecStart,
    user: &User,
    directory: &Path,
    terminal: &Terminal,
    launcher: &Path,
) -> Result<Running, ErrorReport> {
    let unavailable = |error| failed("open a terminal (is /dev/pts mounted?)", error);
    let (controller, device) = open_terminal(terminal).map_err(unavailable)?;
    let (result, result_end) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)
        .map_err(|error| failed("open a pipe", error))?;

    let mut command = Command::new(launcher);
    command.arg(launch::SUBCOMMAND).args(
        request
            .arguments
            .iter()
            .map(|argument| OsStr::from_bytes(argument)),
    );
    set_environment(&mut command, request, user);
    let copy = device
        .try_clone()
        .map_err(|error| failed("open a terminal", error))?;
    command
        .current_dir(directory)
        .stdin(device)
        .stdout(copy)
        .stderr(result_end);
    let spawned = command.spawn();
    // It holds the agent's copies of the terminal's device and of the pipe's end: they have to close.
    drop(command);
    let mut child = spawned.map_err(|error| match error.kind() {
        io::ErrorKind::ArgumentListTooLong => cannot_execute(&request.arguments[0], &error),
        _ => failed("start its launcher", error),
    })?;
    if let Err(error) = launch::read_result(result) {
        let _ = child.wait();
        return Err(cannot_execute(&request.arguments[0], &error));
    }
    let mut running = Running::new(child)?;
    let copy = || {
        controller
            .try_clone()
            .map_err(|error| failed("use the terminal", error))
    };
    (running.stdin, running.stdout) = (Some(copy()?), Some(copy()?));
    running.terminal = Some(controller);
    Ok(running)
}

/// A new terminal: its controlling side, non-blocking, and its device.
fn open_terminal(terminal: &Terminal) -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let controller = rustix::pty::openpt(flags)?;
    rustix::pty::grantpt(&controller)?;
    rustix::pty::unlockpt(&controller)?;
    let device = rustix::pty::ioctl_tiocgptpeer(&controller, flags)?;
    set_window_size(&controller, terminal.rows, terminal.columns)?;
    let mut modes = rustix::termios::tcgetattr(&device)?;
    modes.input_modes |= InputModes::IUTF8;
    rustix::termios::tcsetattr(&device, OptionalActions::Now, &modes)?;
    set_nonblocking(&controller)?;
    Ok((controller, device))
}

/// Set a terminal's size in characters.
///
/// # Errors
/// It is not a terminal any more.
pub fn set_window_size(terminal: impl AsFd, rows: u16, columns: u16) -> rustix::io::Result<()> {
    let size = Winsize {
        ws_row: rows,
        ws_col: columns,
        ws_xpixel: 0,
        ws_ypixel: 0,
    };
    rustix::termios::tcsetwinsize(terminal, size)
}

/// Has a program run as any other: the agent's unit spares the agent, and not what it runs, nor has that as many descriptors.
pub(crate) fn be_as_usual(command: &mut Command) {
    sys::oom::spare_no_child(command);
    sys::descriptors::raise_no_childs_limit(command);
}

fn set_environment(command: &mut Command, request: &ExecStart, user: &User) {
    be_as_usual(command);
    command.env_clear().envs(user.environment());
    if let Some(terminal) = &request.terminal {
        let kind = if terminal.kind.is_empty() {
            "linux"
        } else {
            &terminal.kind
        };
        command.env("TERM", kind);
    }
    command.envs(
        request
            .environment
            .iter()
            .map(|(name, value)| (OsStr::from_bytes(name), OsStr::from_bytes(value))),
    );
}

fn set_nonblocking(file: impl AsFd) -> rustix::io::Result<()> {
    rustix::io::ioctl_fionbio(file, true)
}

fn no_directory(directory: &Path, reason: &str) -> ErrorReport {
    ErrorReport::new(
        ErrorKind::NoSuchDirectory,
        format!("cannot start in {}: {reason}", directory.display()),
    )
}

fn cannot_execute(name: &[u8], error: &io::Error) -> ErrorReport {
    let name = String::from_utf8_lossy(name);
    match error.kind() {
        io::ErrorKind::NotFound => ErrorReport::new(
            ErrorKind::CommandNotFound,
            format!("{name}: there is no such command in the guest"),
        ),
        io::ErrorKind::ArgumentListTooLong => {
            ErrorReport::new(ErrorKind::InvalidRequest, format!("{name}: {error}"))
        }
        io::ErrorKind::OutOfMemory | io::ErrorKind::WouldBlock => ErrorReport::new(
            ErrorKind::Unavailable,
            format!("{name}: cannot start a process: {error}"),
        ),
        _ => ErrorReport::new(
            ErrorKind::CommandNotExecutable,
            format!("{name}: cannot be executed: {error}"),
        ),
    }
}

fn failed(what: &str, error: impl std::fmt::Display) -> ErrorReport {
    ErrorReport::new(
        ErrorKind::Unavailable,
        format!("the agent cannot {what}: {error}"),
    )
}
