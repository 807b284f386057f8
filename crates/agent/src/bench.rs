//! The guest's part in a benchmark: one stream of bytes, or of round trips.
//!
//! The host says which part ([`Role`]) and the peer ([`Peer`]): with its own program, then everything passes on the
//! connection that asked; or with the agent of another guest, then the host's connection carries only words, and the
//! payload a circuit of its own between the guests. [`Line`] hides the difference. What passes is said in [`wire::agent::bench`].

mod line;
mod meeting;
mod parts;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use wire::agent::bench::{MAX_BUFFERED, MAX_STREAMS, Message, Peer, Role, Start};
use wire::agent::{Decoder, ErrorKind, ErrorReport};

use crate::share::Share;
use crate::stop::Stop;
use line::{GO_TIMEOUT, Line};

/// How long nothing may pass before a stream is given up. A paused guest, or one without KVM on a busy machine, is slow.
const STALL_TIMEOUT: Duration = Duration::from_secs(60);

/// What all streams of benchmarks have together.
#[derive(Debug, Default)]
pub struct Places {
    streams: Arc<AtomicUsize>,
    buffered: Arc<AtomicUsize>,
}

/// Take this part, and send the host the result. `place` is given back as soon as the stream has one of its own.
pub(crate) fn run(
    host: &OwnedFd,
    decoder: Decoder,
    places: &Places,
    has_vsock: bool,
    start: Start,
    place: Option<Share>,
) -> Result<(), Stop> {
    let busy = |message: String| Stop::Report(ErrorReport::new(ErrorKind::Busy, message));
    let streams = Share::take(&places.streams, 1, MAX_STREAMS).ok_or_else(|| {
        busy(format!(
            "{MAX_STREAMS} streams of benchmarks run in this guest already, which is the limit"
        ))
    })?;
    drop(place);
    let needed = match start.role {
        Role::Sink => 0,
        Role::Source | Role::Ping | Role::Echo => start.message_len as usize,
    };
    let memory = Share::take(&places.buffered, needed, MAX_BUFFERED).ok_or_else(|| {
        busy(format!(
            "the messages of the benchmarks in this guest need more than {MAX_BUFFERED} bytes: \
             use shorter messages or fewer streams"
        ))
    })?;
    let result = take_part(host, decoder, has_vsock, &start);
    drop((streams, memory));
    result
}

fn take_part(host: &OwnedFd, decoder: Decoder, has_vsock: bool, start: &Start) -> Result<(), Stop> {
    let refuse = |message: &str| {
        Err(Stop::Report(ErrorReport::new(
            ErrorKind::InvalidRequest,
            message,
        )))
    };
    if start.peer == Peer::Host && start.role == Role::Ping {
        return refuse("round trips with the host are begun by the host");
    }
    if start.peer != Peer::Host && !has_vsock {
        return refuse("this agent does not use vsock, and so reaches no other guest");
    }
    let mut line = Line::new(host, decoder);
    line.end_by(
        Instant::now() + Duration::from_millis(start.limit_ms.into()) + GO_TIMEOUT + STALL_TIMEOUT,
    );
    match start.peer {
        Peer::Host => {}
        Peer::Listen { cid, port, nonce } => meeting::listen(&mut line, cid, port, &nonce)?,
        Peer::Dial { cid, port, nonce } => meeting::dial(&mut line, cid, port, &nonce)?,
    }
    line.tell_host(Message::Ready)?;
    if start.role.sends() {
        line.wait_for_go()?;
    }
    let result = parts::perform(&mut line, start);
    // In the middle of payload, on the host's own connection, a word would be taken for payload: only its end can be seen.
    match result {
        Err(Stop::Report(report)) if line.is_inside_payload() => {
            Err(Stop::HostGone(std::io::Error::other(report.message)))
        }
        result => result,
    }
}

fn protocol(message: impl Into<String>) -> Stop {
    Stop::Report(ErrorReport::new(ErrorKind::Protocol, message))
}

#[cfg(test)]
mod tests;
