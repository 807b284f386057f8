//! `ringdown forward`: carries connections between the host and a guest until it is interrupted.

use std::path::PathBuf;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval};
use wire::agent::CAPABILITY_FORWARD;

use crate::arguments::ForwardArguments;
use crate::client::{Client, reach_agent};
use crate::failure::Failure;
use crate::forward::{self, Direction, Forward, Guest, Places};
use crate::lines::{Budgeted, WINDOW};

/// Words for a person that wait to be written. A source of more waits.
const MAX_WORDS: usize = 64;

/// The way to a VM's agent through the daemon.
struct Vm {
    client: Client,
    name: String,
}

impl Guest for Vm {
    fn host_socket(&self, timeout: Duration) -> Result<PathBuf, String> {
        let ready = self.client.await_ready(&self.name, timeout);
        ready
            .map(|vm| vm.host)
            .map_err(|failure| failure.to_string())
    }
}

/// Forwards until a signal ends it, and returns 128 and its number, as a shell would.
///
/// # Errors
/// [`Failure`] when it cannot listen here or there.
pub fn run(client: Client, options: ForwardArguments) -> Result<u8, Failure> {
    let forwards = forwards(&options)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(Failure::failed)?;
    // A mistake here is reported before the guest is waited for.
    let places = runtime
        .block_on(Places::listen(forwards))
        .map_err(Failure::failed)?;
    let ready = client.wait_ready(&options.name, options.wait)?;
    // Before it says that it forwards.
    drop(reach_agent(ready.agent(), CAPABILITY_FORWARD)?);
    let vm = Vm {
        client,
        name: options.name,
    };
    let ended = runtime.block_on(async {
        let mut interrupt = signal(SignalKind::interrupt())?;
        let mut terminate = signal(SignalKind::terminate())?;
        let (sender, mut messages) = mpsc::channel(MAX_WORDS);
        let forwarding = forward::run(vm, places, sender);
        tokio::pin!(forwarding);
        let start = Instant::now();
        let mut lines = Budgeted::new(std::io::stderr());
        let mut window = interval(WINDOW);
        window.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let ended = loop {
            tokio::select! {
                ended = &mut forwarding => break ended.map(|()| 0),
                Some(words) = messages.recv() => lines.say(&words, start.elapsed()),
                _ = window.tick(), if lines.holds_back() => lines.count(),
                _ = interrupt.recv() => break Ok(128 + 2),
                _ = terminate.recv() => break Ok(128 + 15),
            }
        };
        lines.count();
        ended
    });
    // A call of the agent that still waits must not hold up the end.
    runtime.shutdown_background();
    ended.map_err(|error: std::io::Error| Failure::failed(error))
}

fn forwards(options: &ForwardArguments) -> Result<Vec<Forward>, Failure> {
    let ports = options.ports.iter().map(|text| Forward::parse_ports(text));
    let local = options.local.iter().map(|text| {
        Forward::parse(Direction::ToGuest, text).map_err(|words| format!("-L {words}"))
    });
    let remote = options
        .remote
        .iter()
        .map(|text| Forward::parse(Direction::ToHost, text).map_err(|words| format!("-R {words}")));
    let forwards: Result<Vec<_>, _> = ports.chain(local).chain(remote).collect();
    match forwards {
        Ok(forwards) if forwards.is_empty() => Err(Failure::usage(
            "nothing to forward: give ports such as 8080:80, or -L or -R as for ssh",
        )),
        forwards => forwards.map_err(Failure::usage),
    }
}
