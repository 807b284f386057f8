//! What the person sees when a command fails, and the exit code that a script sees.

use std::fmt;
use std::io;

use config::ConfigError;
use config::input::InputError;
use daemon::serve::ServeError;

use crate::guest::{GuestError, printable_lines};

/// The exit code when what was asked for failed.
pub const FAILURE: u8 = 1;

/// The exit code when the command line is wrong.
pub const USAGE: u8 = 2;

/// The exit code of a program that SIGPIPE has ended, as a shell reports it: 128 and its number. Rust's programs ignore the signal, and see an error.
pub const NOBODY_READS: u8 = 141;

/// A command that did not succeed.
#[derive(Debug)]
pub struct Failure {
    /// The exit code.
    pub code: u8,
    message: String,
}

impl Failure {
    /// What was asked for failed.
    pub fn failed(message: impl fmt::Display) -> Failure {
        Failure {
            code: FAILURE,
            message: message.to_string(),
        }
    }

    /// What was asked for failed, and the exit code says how.
    pub fn with_code(code: u8, message: impl fmt::Display) -> Failure {
        Failure {
            code,
            message: message.to_string(),
        }
    }

    /// Standard output took no more. Of a reader that has had enough, as `head` has, there is nothing to be said.
    pub fn of_output(error: &io::Error) -> Failure {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::with_code(NOBODY_READS, ""),
            _ => Failure::failed(format!("cannot write to standard output: {error}")),
        }
    }

    /// Whether there is nothing to be said about it: the exit code is all.
    pub fn is_silent(&self) -> bool {
        self.message.is_empty()
    }

    /// What is written to standard error. It may have words of a guest's, which must not steer a terminal.
    pub fn line(&self) -> String {
        printable_lines(&format!("error: {self}\n"))
    }

    /// The command line is wrong.
    pub fn usage(message: impl fmt::Display) -> Failure {
        Failure {
            code: USAGE,
            message: message.to_string(),
        }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl From<InputError> for Failure {
    fn from(error: InputError) -> Failure {
        Failure::usage(error)
    }
}

impl From<ConfigError> for Failure {
    fn from(error: ConfigError) -> Failure {
        ServeError::from(error).into()
    }
}

impl From<GuestError> for Failure {
    fn from(error: GuestError) -> Failure {
        Failure::failed(error)
    }
}

impl From<ServeError> for Failure {
    fn from(error: ServeError) -> Failure {
        if error.is_usage() {
            Failure::usage(error)
        } else {
            Failure::failed(error)
        }
    }
}
