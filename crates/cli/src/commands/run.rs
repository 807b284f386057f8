//! `ringdown run`: finds VMs for what is carried.

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use config::input::check_name_of;

use crate::arguments::RunArguments;
use crate::carry::{self, Directory, MAX_ROUTES, Route, Settings};
use crate::client::Client;
use crate::failure::Failure;

/// What the daemon knows. It is asked each time, since names and CIDs can change hands.
struct Daemon {
    client: Client,
    domain: String,
}

impl Directory for Daemon {
    fn by_cid(&self, cid: u32, timeout: Duration) -> Result<PathBuf, String> {
        let client = self.client.clone().with_patience(timeout);
        let list = client.list().map_err(|error| error.to_string())?;
        let found = list
            .vms
            .into_iter()
            .find(|vm| vm.cid == cid && vm.domain == self.domain);
        let unknown = || format!("no VM of the domain {:?} has the CID {cid}", self.domain);
        found.map(|vm| vm.host).ok_or_else(unknown)
    }

    fn by_name(&self, name: &str, timeout: Duration) -> Result<PathBuf, String> {
        let client = self.client.clone().with_patience(timeout);
        let vm = client.show(name).map_err(|failure| failure.to_string())?;
        Ok(vm.host)
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
        match client.find(&route.vm) {
            Ok(Some(_)) => {}
            // Misspelt, mostly. The daemon's answer says what may be meant.
            Ok(None) => drop(client.show(&route.vm)?),
            // It is asked again at each connection.
            Err(_) => break,
        }
    }
    let settings = Settings {
        directory: Box::new(Daemon {
            client,
            domain: options.domain,
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
