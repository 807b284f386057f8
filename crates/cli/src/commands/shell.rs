//! `ringdown shell`: the login shell of the agent's user, on a terminal of its own.

use std::ffi::OsString;

use crate::arguments::{Exec, Shell};
use crate::client::Client;
use crate::failure::Failure;

/// The agent sets SHELL to what the guest's user has; a guest without such a user has a shell all the same.
const LOGIN_SHELL: &str = "exec \"${SHELL:-/bin/sh}\" -l";

/// Runs the shell and returns its exit code.
///
/// # Errors
/// [`Failure`] when no shell was started, or its end is not known.
pub fn run(client: &Client, options: Shell) -> Result<u8, Failure> {
    let command = ["/bin/sh", "-c", LOGIN_SHELL].map(OsString::from).to_vec();
    let exec = Exec {
        name: options.name,
        tty: true,
        env: options.env,
        cwd: None,
        wait: options.wait,
        command,
    };
    super::exec::run(client, exec)
}
