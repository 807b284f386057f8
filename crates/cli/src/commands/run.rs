//! `ringdown run`: finds VMs for what is carried.

use std::path::PathBuf;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use api::VmStatus;
use config::input::check_name_of;

use crate::arguments::RunArguments;
use crate::carry::{self, DialError, Directory, MAX_ROUTES, Route, Settings};
use crate::client::{ANSWER_TIMEOUT, Client, ClientError, say_if_slow};
use crate::failure::Failure;
use crate::lines::note;

/// What the daemon knows. It is asked each time, since names and CIDs can change hands.
struct Daemon {
    client: Client,
    domain: String,
    /// That it does not answer is said, once or with each connection.
    is_silence_said: AtomicBool,
}

impl Daemon {
    /// The host socket of the first VM of which this is true.
    fn find(
        &self,
        is_it: impl Fn(&VmStatus) -> bool,
        timeout: Duration,
    ) -> Result<Option<PathBuf>, DialError> {
        let client = self.client.clone().with_patience(timeout);
        let list = await_daemon(timeout, || client.list());
        let list = list.map_err(|error| {
            let is_silent = matches!(
                error,
                ClientError::Silent { .. } | ClientError::Stopped { .. }
            );
            if is_silent && !self.is_silence_said.swap(true, Ordering::Relaxed) {
                note(&format!("ringdown run: {error}"));
            }
            not_told(&error)
        })?;
        let found = list.vms.into_iter().find(is_it);
        Ok(found.map(|vm| vm.host))
    }
}

impl Directory for Daemon {
    fn by_cid(&self, cid: u32, timeout: Duration) -> Result<PathBuf, DialError> {
        let is_it = |vm: &VmStatus| vm.cid == cid && vm.domain == self.domain;
        self.find(is_it, timeout)?.ok_or_else(|| {
            let domain = &self.domain;
            DialError::Unreachable(format!("no VM of the domain {domain:?} has the CID {cid}"))
        })
    }

    fn by_name(&self, name: &str, timeout: Duration) -> Result<PathBuf, DialError> {
        let is_it = |vm: &VmStatus| {
            let prefix = vm.full_name();
            let prefix = prefix.strip_suffix(&vm.name).unwrap_or_default();
            let name = name.strip_prefix(prefix);
            name.is_some_and(|name| name == vm.name || vm.aliases.iter().any(|alias| alias == name))
        };
        let unknown = || DialError::Unreachable(format!("there is no VM named {name:?}"));
        self.find(is_it, timeout)?.ok_or_else(unknown)
    }
}

/// Has the daemon answer, and says what it waits for as other commands do.
fn await_daemon<T>(patience: Duration, ask: impl FnOnce() -> T) -> T {
    let what = || Some("the daemon to answer".to_owned());
    say_if_slow(patience, what, ask)
}

/// That the daemon has not said where a VM is, since it may not be asked, or for another reason.
fn not_told(error: &ClientError) -> DialError {
    match error {
        ClientError::Denied { .. } => DialError::Denied(error.to_string()),
        other => DialError::Unreachable(other.to_string()),
    }
}

/// Runs the command and returns its exit code.
///
/// # Errors
/// [`Failure`] when nothing was started, or the command's end is not known.
pub fn run(client: Client, options: RunArguments) -> Result<u8, Failure> {
    check_name_of("a domain", &options.domain)?;
    if options.unix.len() > MAX_ROUTES {
        return Err(Failure::usage(format!(
            "--unix is given {} times, and {MAX_ROUTES} are the most",
            options.unix.len()
        )));
    }
    let routes = options.unix.iter().map(|text| Route::parse(text));
    let routes: Result<Vec<_>, _> = routes.collect();
    let routes = routes.map_err(Failure::usage)?;
    for route in &routes {
        match await_daemon(ANSWER_TIMEOUT, || client.find(&route.vm)) {
            Ok(Some(_)) => {}
            // Misspelt, mostly. The daemon's answer says what may be meant.
            Ok(None) => drop(client.show(&route.vm)?),
            // It is asked again at each connection.
            Err(failure) => {
                note(&format!("ringdown run: {failure}"));
                break;
            }
        }
    }
    let settings = Settings {
        directory: Box::new(Daemon {
            client,
            domain: options.domain,
            is_silence_said: AtomicBool::new(options.verbose),
        }),
        routes,
        timeout: options.connect_timeout,
        verbose: options.verbose,
    };
    let mut words = options.command.into_iter();
    // The command line does not go without a command.
    let program = words.next().unwrap_or_default();
    let mut command = Command::new(program);
    command.args(words);
    carry::run(command, settings).map_err(|error| Failure::with_code(error.exit_code(), error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_may_not_ask_the_daemon_is_told_from_one_that_finds_none() {
        let socket = PathBuf::from("/run/ringdown/control.sock");
        let denied = not_told(&ClientError::Denied { socket });
        assert!(
            matches!(&denied, DialError::Denied(words) if words.contains("control.sock")),
            "{denied}"
        );
        let runtime_dir = PathBuf::from("/run/ringdown");
        let none = not_told(&ClientError::NoDaemon { runtime_dir });
        assert!(matches!(none, DialError::Unreachable(_)), "{none}");
    }
}
