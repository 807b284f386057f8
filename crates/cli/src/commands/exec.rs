//! `ringdown exec`: waits until the guest is ready, then runs the command through the VM's host socket.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;

use crate::arguments::Exec;
use crate::client::Client;
use crate::exec::{self, ExecError, ExecOptions};
use crate::failure::Failure;
use crate::guest::GuestError;

/// The exit code if the guest has no such command.
const NO_COMMAND: u8 = 127;

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
    let ready = client.wait_ready(&options.name, options.wait)?;
    let exec_options = ExecOptions {
        command: options.command,
        environment,
        directory: options.cwd,
        terminal: options.tty,
    };
    let hint = line_hint(&exec_options.command);
    let run = || exec::run(ready.agent(), exec_options);
    // Words would stand in the middle of a terminal's screen.
    let done = match options.tty {
        true => run(),
        false => client.say_if_paused(&ready.vm, run),
    };
    done.map_err(|error| {
        let words = in_words(&error, hint, || client.has_ended());
        Failure::with_code(error.exit_code(), words)
    })
}

/// What failed, with what is known besides: what is wrong with the line, or that there is no daemon any more.
fn in_words(
    error: &ExecError,
    line_hint: Option<&str>,
    has_daemon_ended: impl FnOnce() -> bool,
) -> String {
    let of_daemon = || has_daemon_ended().then_some(DAEMON_ENDED);
    let hints = match error {
        ExecError::Guest(GuestError::Broken(_)) => [of_daemon(), Some(HUNG_UP)],
        ExecError::NotReached(_) => [of_daemon(), None],
        error => [line_hint.filter(|_| error.exit_code() == NO_COMMAND), None],
    };
    let hints = hints.into_iter().flatten().map(|hint| format!("; {hint}"));
    format!("{error}{}", hints.collect::<String>())
}

/// Why the connection broke, if no daemon answers any more.
const DAEMON_ENDED: &str = "the daemon has ended";

/// What becomes of what was started.
const HUNG_UP: &str = "the agent hangs the command up, and kills it if it does not go";

/// Where one word is a whole line: ssh gives it to a shell, and `exec` does not.
fn line_hint(command: &[OsString]) -> Option<&'static str> {
    let [line] = command else { return None };
    line.as_bytes()
        .contains(&b' ')
        .then_some("a line is for a shell to read: `ringdown exec NAME -- sh -c 'LINE'`")
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
    fn a_line_in_one_word_is_for_a_shell() {
        let hint =
            |words: &[&str]| line_hint(&words.iter().map(OsString::from).collect::<Vec<_>>());
        assert!(hint(&["ls -l /"]).unwrap().contains("sh -c"));
        assert_eq!(hint(&["ls"]), None);
        assert_eq!(hint(&["my prog", "x"]), None);
    }

    #[test]
    fn a_daemon_that_has_ended_is_named_where_the_connection_breaks() {
        let broken = ExecError::from(GuestError::Broken("it was closed".to_owned()));
        let directory = tempfile::tempdir().unwrap();
        let client = Client::new(Some(directory.path()));
        let words = |error: &ExecError| in_words(error, None, || client.has_ended());
        assert!(words(&broken).contains("; the daemon has ended; the agent hangs the command up"));
        assert!(!words(&ExecError::Interrupted).contains("daemon"));
        let _daemon = std::os::unix::net::UnixListener::bind(directory.path().join("control.sock"));
        assert!(!words(&broken).contains("the daemon has ended"));
    }

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
