//! The step between the agent and a command that gets a terminal.
//!
//! A process must be in a session of its own to take a terminal as its controlling one, and both are system calls that
//! the new process has to make itself, between fork and exec. Rather than run code there, where almost nothing is
//! safe, the agent starts itself again with [`SUBCOMMAND`]: an ordinary process that makes the two calls and then
//! becomes the command.
//!
//! It is started with the terminal as its standard input and output, and a pipe as its standard error. The pipe closes
//! when the command is executed; if that fails, the error number passes through it first ([`read_result`]).

use std::ffi::OsString;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// The argument that asks for this step. It is not for people.
pub const SUBCOMMAND: &str = "launch-on-terminal";

/// Become the leader of a session on the terminal at standard input, then execute the command.
pub fn run(arguments: Vec<OsString>) -> ExitCode {
    let stderr = rustix::stdio::stderr();
    // The copy closes at exec; the terminal takes its place as standard error.
    let Ok(result) = rustix::io::fcntl_dupfd_cloexec(stderr, 3) else {
        return ExitCode::FAILURE;
    };
    let error = match become_command(arguments) {
        Ok(never) => match never {},
        Err(error) => error,
    };
    let number = error
        .raw_os_error()
        .unwrap_or(rustix::io::Errno::IO.raw_os_error());
    // If the agent is gone, there is no reader.
    let _ = File::from(result).write_all(&number.to_le_bytes());
    ExitCode::FAILURE
}

fn become_command(arguments: Vec<OsString>) -> io::Result<std::convert::Infallible> {
    let stdin = rustix::stdio::stdin();
    rustix::process::setsid()?;
    rustix::process::ioctl_tiocsctty(stdin)?;
    rustix::stdio::dup2_stderr(stdin)?;
    let mut arguments = arguments.into_iter();
    let name = arguments.next().ok_or(rustix::io::Errno::INVAL)?;
    Err(Command::new(name).args(arguments).exec())
}

/// Wait until the launcher has executed the command (`Ok`) or failed (its error).
///
/// # Errors
/// The command could not be executed, or the pipe not be read.
pub fn read_result(pipe: OwnedFd) -> io::Result<()> {
    let mut number = Vec::new();
    File::from(pipe).take(4).read_to_end(&mut number)?;
    match <[u8; 4]>::try_from(number) {
        Ok(number) => Err(io::Error::from_raw_os_error(i32::from_le_bytes(number))),
        Err(_) => Ok(()),
    }
}
