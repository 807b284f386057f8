//! `ringdown exec`: waits until the guest is ready, then runs the command through the VM's host socket.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::time::Duration;

use crate::arguments::Exec;
use crate::client::Client;
use crate::exec::{self, ExecOptions};
use crate::failure::Failure;

/// Runs the command and returns its exit code.
///
/// # Errors
/// [`Failure`] when nothing was started, or the command's end is not known.
pub fn run(client: &Client, options: Exec) -> Result<u8, Failure> {
    let environment = options
        .env
        .iter()
        .map(|text| variable(text))
        .collect::<Result<_, _>>()?;
    let vm = client.wait_ready(&options.name, Duration::from_secs(options.wait))?;
    let exec_options = ExecOptions {
        command: options.command,
        environment,
        directory: options.cwd,
        terminal: options.tty,
    };
    exec::run(&vm.host, exec_options).map_err(|error| Failure::with_code(error.exit_code(), error))
}

fn variable(text: &OsStr) -> Result<(OsString, OsString), Failure> {
    let bytes = text.as_bytes();
    match bytes.iter().position(|byte| *byte == b'=') {
        Some(position) if position > 0 => {
            let (name, value) = (&bytes[..position], &bytes[position + 1..]);
            Ok((
                OsStr::from_bytes(name).to_owned(),
                OsStr::from_bytes(value).to_owned(),
            ))
        }
        _ => Err(Failure::usage(format!(
            "--env {}: expected NAME=VALUE, such as LANG=C",
            text.to_string_lossy()
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_has_a_name_and_anything_as_its_value() {
        let split = |text: &[u8]| {
            let (name, value) = variable(OsStr::from_bytes(text)).ok()?;
            Some((name.as_bytes().to_vec(), value.as_bytes().to_vec()))
        };
        assert_eq!(split(b"A=b"), Some((b"A".to_vec(), b"b".to_vec())));
        assert_eq!(split(b"A="), Some((b"A".to_vec(), b"".to_vec())));
        assert_eq!(
            split(b"A=b=\xff"),
            Some((b"A".to_vec(), b"b=\xff".to_vec()))
        );
        for wrong in [&b"A"[..], b"=b", b""] {
            assert_eq!(split(wrong), None);
        }
    }
}
