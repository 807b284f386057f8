//! The four parts.

use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use wire::agent::bench::{
    Arrival, LATENCY_FIGURES, Latency, MAX_LATENCY_NS, Message, Messages, Outcome, Received, Role,
    Start,
};
use wire::agent::{ErrorKind, ErrorReport, Frame};

use super::line::Line;
use super::protocol;
use crate::stop::Stop;

/// How often the host hears how far it is, when it does not see the payload.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);

/// Do what was asked for, and send all the result.
pub(super) fn perform(line: &mut Line<'_>, start: &Start) -> Result<(), Stop> {
    let outcome = match start.role {
        Role::Source => send(line, start)?,
        Role::Sink => receive(line, start)?,
        Role::Ping => ping(line, start)?,
        Role::Echo => echo(line, start)?,
    };
    if !start.role.sends() && line.is_between_guests() {
        line.tell_other(Message::Outcome(outcome))?;
    }
    if start.role == Role::Source && !line.is_between_guests() {
        // The host has counted for itself.
        return Ok(());
    }
    line.tell_host(Message::Outcome(outcome))
}

fn send(line: &mut Line<'_>, start: &Start) -> Result<Outcome, Stop> {
    let mut messages = messages(start)?;
    let began = Instant::now();
    let limit = Duration::from_millis(start.limit_ms.into());
    // At least one segment: a busy machine may come to it only when the time is over.
    loop {
        line.set_inside_payload(true);
        loop {
            line.send(messages.next_message(), true)?;
            if messages.is_between_segments() {
                break;
            }
        }
        line.set_inside_payload(false);
        line.hear_host()?;
        if line.is_stopped() || began.elapsed() >= limit {
            break;
        }
    }
    finish(line, messages.bytes(), began)
}

/// Say that it was all, and wait for the receiver's word.
fn finish(line: &mut Line<'_>, bytes: u64, began: Instant) -> Result<Outcome, Stop> {
    line.tell_other(Message::End { bytes })?;
    let duration_us = began.elapsed().as_micros() as u64;
    let mut nothing = Received::new(None);
    let between = line.is_between_guests();
    loop {
        let theirs = match line.next(&mut nothing)? {
            None => {
                line.receive()?;
                continue;
            }
            Some(Arrival::Frame(Frame::Bench(Message::Outcome(outcome)))) => outcome,
            // It crossed the end.
            Some(Arrival::Frame(Frame::Bench(Message::Stop))) if !between => continue,
            Some(_) => return Err(protocol("expected the receiver's result")),
        };
        if theirs.bytes != bytes {
            return Err(protocol(format!(
                "{bytes} bytes were sent, and the receiver confirms {}",
                theirs.bytes
            )));
        }
        return Ok(Outcome {
            duration_us,
            latency: None,
            ..theirs
        });
    }
}

fn receive(line: &mut Line<'_>, start: &Start) -> Result<Outcome, Stop> {
    let mut received = Received::new(start.seed);
    let mut clock = Clock::default();
    loop {
        match line.next(&mut received)? {
            None => {
                line.receive()?;
                clock.tick(line, &received)?;
            }
            Some(Arrival::Segment | Arrival::Payload(_)) => {}
            Some(Arrival::Frame(Frame::Bench(Message::End { .. }))) => break,
            Some(other) => return Err(unexpected(&other)),
        }
    }
    Ok(clock.outcome(&received))
}

fn echo(line: &mut Line<'_>, start: &Start) -> Result<Outcome, Stop> {
    let mut received = Received::new(None);
    let mut clock = Clock::default();
    let mut message: Vec<u8> = Vec::with_capacity(start.message_len as usize);
    let len = start.message_len as usize;
    loop {
        match line.next(&mut received)? {
            None => {
                line.receive()?;
                clock.begin();
                continue;
            }
            Some(Arrival::Segment) => {
                line.set_inside_payload(true);
                continue;
            }
            Some(Arrival::Payload(bytes)) if message.len() + bytes.len() <= len => {
                message.extend_from_slice(bytes);
            }
            Some(Arrival::Payload(_)) => {
                return Err(protocol("a message was sent before the last came back"));
            }
            Some(Arrival::Frame(Frame::Bench(Message::End { .. }))) if message.is_empty() => break,
            Some(other) => return Err(unexpected(&other)),
        }
        if message.len() == len {
            line.send(&message, false)?;
            message.clear();
        }
    }
    line.set_inside_payload(false);
    Ok(clock.outcome(&received))
}

fn ping(line: &mut Line<'_>, start: &Start) -> Result<Outcome, Stop> {
    let mut messages = messages(start)?;
    let mut received = Received::new(start.seed);
    let mut clock = Clock::default();
    let mut times = Histogram::<u64>::new_with_bounds(1, MAX_LATENCY_NS, LATENCY_FIGURES)
        .map_err(|error| Stop::Report(ErrorReport::new(ErrorKind::Internal, error.to_string())))?;
    let began = Instant::now();
    let limit = Duration::from_millis(start.limit_ms.into());
    clock.begin();
    // At least one segment: a busy machine may come to it only when the time is over.
    loop {
        loop {
            let sent = Instant::now();
            line.send(messages.next_message(), true)?;
            let mut left = messages.message().len();
            while left > 0 {
                let bytes = line.raw(left);
                left -= bytes.len();
                received.count(bytes);
                if bytes.is_empty() {
                    line.receive()?;
                }
            }
            times.saturating_record(sent.elapsed().as_nanos().min(MAX_LATENCY_NS.into()) as u64);
            if messages.is_between_segments() {
                break;
            }
        }
        clock.tick(line, &received)?;
        line.hear_host()?;
        if line.is_stopped() || began.elapsed() >= limit {
            break;
        }
    }
    let theirs = finish(line, messages.bytes(), began)?;
    let outcome = clock.outcome(&received);
    Ok(Outcome {
        duration_us: theirs.duration_us,
        latency: latency(&times),
        ..outcome
    })
}

fn latency(times: &Histogram<u64>) -> Option<Latency> {
    let quantile = |share| times.value_at_quantile(share);
    Latency::of(
        times.len(),
        times.min(),
        times.mean(),
        times.max(),
        quantile,
    )
}

fn messages(start: &Start) -> Result<Messages, Stop> {
    Messages::new(start.message_len, start.seed).map_err(|error| protocol(error.to_string()))
}

fn unexpected(arrival: &Arrival<'_>) -> Stop {
    protocol(match arrival {
        Arrival::WrongSum { said } => {
            format!("the sender reports {said} bytes sent, which is not what arrived")
        }
        _ => "a frame that is not allowed between payload".to_owned(),
    })
}

/// Since when something passes, and when the host was notified last.
#[derive(Debug, Default)]
struct Clock {
    began: Option<Instant>,
    notified: Option<Instant>,
}

impl Clock {
    fn begin(&mut self) {
        self.began.get_or_insert_with(Instant::now);
    }

    /// Something has come: send word now and then, if it does not see it.
    fn tick(&mut self, line: &Line<'_>, received: &Received) -> Result<(), Stop> {
        let now = Instant::now();
        self.began.get_or_insert(now);
        if line.is_between_guests()
            && now.duration_since(*self.notified.get_or_insert(now)) >= PROGRESS_INTERVAL
        {
            self.notified = Some(now);
            line.tell_host(Message::Progress {
                bytes: received.bytes(),
                wrong_bytes: received.wrong_bytes(),
            })?;
        }
        Ok(())
    }

    fn outcome(&self, received: &Received) -> Outcome {
        Outcome {
            bytes: received.bytes(),
            duration_us: self
                .began
                .map_or(0, |began| began.elapsed().as_micros() as u64),
            wrong_bytes: received.wrong_bytes(),
            first_wrong: received.first_wrong(),
            latency: None,
        }
    }
}
