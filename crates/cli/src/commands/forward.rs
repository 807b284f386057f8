//! `ringdown forward`: carries connections between the host and a guest until it is interrupted.

use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use policy::{Time, TokenBucket};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior, interval};
use wire::agent::CAPABILITY_FORWARD;

use crate::arguments::ForwardArguments;
use crate::client::Client;
use crate::failure::Failure;
use crate::forward::{self, Direction, Forward, Guest, Places};
use crate::guest::Connection;

/// Words for a person that wait to be written. Who produces more waits.
const MAX_WORDS: usize = 64;

/// Lines at once, and seconds until as many may be written again: as many as the daemon's log takes of one kind. Callers here and in the guest cause as many
/// as they like.
const LINES: u64 = 100;

/// How often the lines that were not written are counted.
const WINDOW: Duration = Duration::from_secs(1);

/// Words for a person, within a budget.
struct Budgeted<W> {
    out: W,
    bucket: TokenBucket,
    held_back: u64,
}

impl<W: Write> Budgeted<W> {
    fn new(out: W) -> Budgeted<W> {
        Budgeted {
            out,
            bucket: TokenBucket::new(1, Duration::from_secs(LINES)),
            held_back: 0,
        }
    }

    fn say(&mut self, words: &str, now: Time) {
        if self.bucket.take(now) {
            // With standard error closed there is no place for the line.
            let _ = writeln!(self.out, "{words}");
        } else {
            self.held_back += 1;
        }
    }

    /// Write how many lines were not written, if there are any.
    fn count(&mut self) {
        let lines = match std::mem::take(&mut self.held_back) {
            0 => return,
            1 => "1 more line".to_owned(),
            count => format!("{count} more lines"),
        };
        let _ = writeln!(self.out, "suppressed {lines} like these");
    }
}

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
    let ready = client.wait_ready(&options.name, Duration::from_secs(options.wait))?;
    // Before it says that it forwards.
    drop(Connection::open(&ready.host, CAPABILITY_FORWARD)?);
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
                _ = window.tick(), if lines.held_back > 0 => lines.count(),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_callers_without_end_are_written_in_part_and_counted() {
        let mut lines = Budgeted::new(Vec::new());
        let start = WINDOW;
        for _ in 0..50_000 {
            lines.say("cannot connect to localhost:80", start);
        }
        lines.count();
        lines.count();
        lines.say("a second later", start + WINDOW);
        lines.say("one too many", start + WINDOW);
        lines.count();
        let written = String::from_utf8(lines.out).unwrap();
        let written: Vec<_> = written.lines().collect();
        let (before, after) = written.split_at(LINES as usize);
        assert!(
            before
                .iter()
                .all(|line| *line == "cannot connect to localhost:80")
        );
        let expected = [
            "suppressed 49900 more lines like these",
            "a second later",
            "suppressed 1 more line like these",
        ];
        assert_eq!(after, expected);
    }
}
