//! Programs that get their sockets from what starts them (`sd_listen_fds(3)`). They take them only if their own process is named, and this one is: so the program's process becomes this program
//! first, names itself, and becomes the program.

use std::convert::Infallible;
use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

/// The argument that makes this program that step. It is not for people.
pub const SUBCOMMAND: &str = "launch-with-sockets";

/// The variable that has the number of the process for which sockets are.
const FOR: &str = "LISTEN_PID";

/// What starts the program.
pub(super) fn command(program: &OsStr) -> Command {
    let own = std::process::id().to_string();
    if std::env::var_os(FOR).is_none_or(|number| *number != *own) {
        return Command::new(program);
    }
    let mut command = Command::new("/proc/self/exe");
    command.arg(SUBCOMMAND).arg(program);
    command
}

/// Becomes the program, which is the first of the arguments. Returns if it cannot.
pub fn run(arguments: impl Iterator<Item = OsString>) -> ExitCode {
    let error = match become_program(arguments) {
        Ok(never) => match never {},
        Err(error) => error,
    };
    eprintln!("ringdown-agent run: cannot run the program: {error}");
    match error.kind() {
        io::ErrorKind::NotFound => ExitCode::from(127),
        _ => ExitCode::from(126),
    }
}

fn become_program(mut arguments: impl Iterator<Item = OsString>) -> io::Result<Infallible> {
    let program = arguments.next().ok_or(io::ErrorKind::InvalidInput)?;
    let mut command = Command::new(program);
    command.args(arguments);
    // The number stays when the program is executed.
    command.env(FOR, std::process::id().to_string());
    Err(command.exec())
}
