//! The command line of Ringdown. The tree of commands is data here, so that manual pages and completions can be
//! made from it; `main` only hands over the process's arguments.
//!
//! Exit codes: 0 for success, 2 when the command line is wrong, 1 when what they asked for failed, 141 when the reader of the output has gone. `exec` ends with the
//! code of the guest's command, and `run` with that of its own.

mod agent_install;
mod alioth;
mod arguments;
mod bench;
mod carry;
mod check;
mod client;
mod cloud_hypervisor;
mod commands;
mod completion;
mod copy;
mod exec;
mod failure;
mod firecracker;
mod forward;
mod guest;
mod install_log;
mod jobs;
mod json;
mod libvirt;
mod lines;
mod mistake;
mod qemu;
mod quote;
mod separator;
mod size;
pub mod top;
mod unix;
mod upgrade;
mod vmm;
mod web;
mod windows;

use std::ffi::OsString;
use std::io::Write;
use std::process::ExitCode;

use clap::{CommandFactory, Parser};

/// The tree of commands.
pub fn command() -> clap::Command {
    arguments::Arguments::command()
}

/// Whether the words, of which the first is the program's name, are a command line.
///
/// # Errors
/// What is wrong with them.
pub fn check_words(words: &[OsString]) -> Result<(), String> {
    let arguments =
        arguments::Arguments::try_parse_from(words).map_err(|error| error.to_string())?;
    separator::check(words, &arguments.command).map_err(|failure| failure.to_string())
}

/// Does what the arguments ask for; the first is the program's name. Messages go to standard error.
pub fn run(arguments: impl IntoIterator<Item = OsString>) -> ExitCode {
    let words: Vec<OsString> = arguments.into_iter().collect();
    let arguments = match arguments::Arguments::try_parse_from(&words) {
        Ok(arguments) => arguments,
        Err(error) => {
            // Help and the version are such errors too. Where they cannot be written, nothing can be said.
            let error = mistake::clearer(error, &command());
            let _ = error.print();
            return ExitCode::from(u8::try_from(error.exit_code()).unwrap_or(failure::USAGE));
        }
    };
    let checked = separator::check(&words, &arguments.command);
    match checked.and_then(|()| commands::run(arguments)) {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            if !failure.is_silent() {
                // Standard error may be closed too; `eprintln!` would panic then.
                let _ = std::io::stderr().write_all(failure.line().as_bytes());
            }
            ExitCode::from(failure.code)
        }
    }
}
