//! Connections that are carried for the host: to a program of the guest, or from one.
//!
//! What passes is said in [`wire::agent::forward`]. A connection that is carried has a thread of its own, as every operation; it keeps its
//! place among [`MAX_CONNECTIONS`] instead of one among the operations, so that a busy forward does not keep commands out. A place to listen
//! is an operation like any other: it ends with the host's connection, and with it all callers that still wait there.

mod frames;
mod listeners;
mod place;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use sys::tcp_callers::{Place as CallersPlace, Places};
use wire::agent::forward::{Key, MAX_CONNECTIONS, Message, Place};
use wire::agent::{Decoder, ErrorKind, ErrorReport, Frame, OPERATION_CHANNEL};

use crate::pump::{end_on_close, reset_on_close};
use crate::share::Share;
use crate::stop::Stop;
use crate::stream::send_all;
pub(crate) use listeners::Listeners;

/// How long the host may take to read a word.
const SAY_TIMEOUT: Duration = Duration::from_secs(30);

/// The most callers of places in the guest, of those that wait and of those that are carried: half of all connections. A user of the guest has as many of them as it leaves to others. The other half
/// is for what the host connects to.
const MAX_CALLERS: usize = MAX_CONNECTIONS / 2;

/// What all forwarding of an agent has together.
#[derive(Debug)]
pub struct Forwarding {
    connections: Arc<AtomicUsize>,
    listeners: Listeners,
    callers: Arc<Places>,
}

impl Default for Forwarding {
    fn default() -> Forwarding {
        Forwarding {
            connections: Arc::default(),
            listeners: Listeners::default(),
            callers: Places::new(MAX_CALLERS),
        }
    }
}

/// Do what the host asks for, and carry bytes until both directions have ended. `places` are given back as soon as the connection has one of
/// its own.
pub(crate) fn run(
    host: &OwnedFd,
    decoder: Decoder,
    forwarding: &Forwarding,
    request: Message,
    places: (Option<Share>, Option<Share>),
) -> Result<(), Stop> {
    let connection = || {
        Share::take(&forwarding.connections, 1, MAX_CONNECTIONS).ok_or_else(|| {
            let message = format!(
                "{MAX_CONNECTIONS} connections are carried in this guest already, which is the limit"
            );
            refusal(ErrorKind::Busy, message)
        })
    };
    let (program, _connection, _caller) = match request {
        Message::Dial(to) => {
            let share = connection()?;
            drop(places);
            (dial(&to, host)?, share, None)
        }
        Message::Take { key, number } => {
            let share = connection()?;
            drop(places);
            let (program, caller) = take(&forwarding.listeners, &key, number)?;
            (program, share, Some(caller))
        }
        Message::Listen(at) => return listeners::listen(host, decoder, forwarding, &at),
        other => {
            let message = format!("the agent is not asked for {other:?}");
            return Err(refusal(ErrorKind::Protocol, message));
        }
    };
    reset_on_close(&program);
    say(host, Message::Connected)?;
    frames::carry(host, &program, decoder).map_err(Stop::HostGone)?;
    end_on_close(&program);
    Ok(())
}

fn dial(to: &Place, host: &OwnedFd) -> Result<OwnedFd, Stop> {
    place::connect(to, host).map_err(|error| {
        let message = format!("cannot connect to {to} in the guest: {error}");
        refusal(ErrorKind::Unreachable, message)
    })
}

fn take(listeners: &Listeners, key: &Key, number: u32) -> Result<(OwnedFd, CallersPlace), Stop> {
    listeners.take(key, number).ok_or_else(|| {
        let message = "this caller has closed its connection";
        refusal(ErrorKind::Unreachable, message)
    })
}

fn say(host: &OwnedFd, message: Message) -> Result<(), Stop> {
    let bytes = Frame::Forward(message)
        .to_bytes(OPERATION_CHANNEL)
        .map_err(|error| refusal(ErrorKind::Internal, error.to_string()))?;
    send_all(host, &bytes, Instant::now() + SAY_TIMEOUT).map_err(Stop::HostGone)
}

fn refusal(kind: ErrorKind, message: impl Into<String>) -> Stop {
    Stop::Report(ErrorReport::new(kind, message))
}

#[cfg(test)]
mod tests;
