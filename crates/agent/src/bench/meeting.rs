//! How two guests' agents find each other: one listens and reports to the host where, the other dials and proves that it is
//! the one that the host sent.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use wire::agent::bench::{Message, Received};
use wire::agent::{Decoder, ErrorKind, ErrorReport, Frame, OPERATION_CHANNEL};

use super::line::Line;
use crate::stop::Stop;
use crate::stream::{receive, send_all};
use crate::transport::{accept_guest, dial_guest, listen_for_guest};

/// How long it may take from listening until the other has come.
const MEETING_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a newcomer may take to name itself. Others wait behind it.
const JOIN_TIMEOUT: Duration = Duration::from_secs(5);

/// How many may come beside the one that is waited for.
const MAX_STRANGERS: u32 = 1000;

/// Wait for the other guest's agent.
pub(super) fn listen(
    line: &mut Line<'_>,
    cid: u32,
    port: u32,
    nonce: &[u8; 16],
) -> Result<(), Stop> {
    let deadline = Instant::now() + MEETING_TIMEOUT;
    let (listener, port) = listen_for_guest(port).map_err(|error| {
        let place = if port == 0 {
            "any vsock port".to_owned()
        } else {
            format!("vsock port {port}")
        };
        unavailable(format!("the agent cannot listen at {place}: {error}"))
    })?;
    line.tell_host(Message::Listening { port })?;
    let mut strangers = 0;
    while Instant::now() < deadline && strangers <= MAX_STRANGERS {
        if !line.wait_for(&listener, deadline)? {
            continue;
        }
        let accepted = accept_guest(&listener, cid);
        match accepted.map_err(|error| unavailable(format!("the agent cannot accept: {error}")))? {
            Some(circuit) if has_joined(&circuit, nonce) => {
                line.set_circuit(circuit, Decoder::new());
                return line.tell_other(Message::Ready);
            }
            _ => strangers += 1,
        }
    }
    let message = format!(
        "the other guest did not connect to vsock port {port} within {} s",
        MEETING_TIMEOUT.as_secs()
    );
    Err(Stop::Report(ErrorReport::new(
        ErrorKind::Unreachable,
        message,
    )))
}

/// Whether a newcomer says the right word.
fn has_joined(circuit: &OwnedFd, expected: &[u8; 16]) -> bool {
    let deadline = Instant::now() + JOIN_TIMEOUT;
    let mut decoder = Decoder::new();
    loop {
        match decoder.next_frame() {
            // Nothing may follow: its sender waits for an answer.
            Ok(Some((OPERATION_CHANNEL, Frame::Bench(Message::Join { nonce })))) => {
                return nonce == *expected && !decoder.is_inside_frame();
            }
            Ok(None) => {}
            _ => return false,
        }
        if receive(circuit, &mut decoder, deadline).is_err() {
            return false;
        }
    }
}

/// Go to the other guest's agent.
pub(super) fn dial(line: &mut Line<'_>, cid: u32, port: u32, nonce: &[u8; 16]) -> Result<(), Stop> {
    let unreachable =
        |message: String| Stop::Report(ErrorReport::new(ErrorKind::Unreachable, message));
    let circuit = dial_guest(cid, port).map_err(|error| {
        unreachable(format!(
            "CID {cid} port {port} cannot be dialled from this guest: {error}"
        ))
    })?;
    let deadline = Instant::now() + MEETING_TIMEOUT;
    let join = Frame::Bench(Message::Join { nonce: *nonce })
        .to_bytes(OPERATION_CHANNEL)
        .map_err(|error| unavailable(error.to_string()))?;
    let broken = |error| {
        unreachable(format!(
            "the circuit to CID {cid} port {port} broke: {error}"
        ))
    };
    send_all(&circuit, &join, deadline).map_err(broken)?;
    line.set_circuit(circuit, Decoder::new());
    loop {
        match line.next(&mut Received::new(None))? {
            None => line.receive()?,
            Some(arrival) => {
                return match arrival {
                    wire::agent::bench::Arrival::Frame(Frame::Bench(Message::Ready)) => Ok(()),
                    _ => Err(super::protocol(
                        "the other guest's agent does not say that it is ready",
                    )),
                };
            }
        }
    }
}

fn unavailable(message: String) -> Stop {
    Stop::Report(ErrorReport::new(ErrorKind::Unavailable, message))
}
