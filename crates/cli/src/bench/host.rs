//! Streams between the host, which is this program, and a guest.

use std::time::Instant;

use hdrhistogram::Histogram;
use wire::agent::Frame;
use wire::agent::bench::{
    Arrival, LATENCY_FIGURES, Latency, MAX_DURATION_MS, MAX_LATENCY_NS, Message, Messages, Outcome,
    Peer, Received, Start,
};

use super::link::Link;
use super::run::{Ending, Progress};
use super::{BenchError, Kind, Party, Plan, STALL_TIMEOUT};
use crate::guest::Deadline;

/// A stream that is connected and waits for its start.
#[derive(Debug)]
pub(super) struct HostStream {
    link: Link,
    plan: Plan,
    seed: Option<u64>,
}

impl HostStream {
    /// Connect a stream.
    pub(super) fn connect(
        vm: &Party,
        plan: &Plan,
        seed: Option<u64>,
        deadline: Deadline,
    ) -> Result<HostStream, BenchError> {
        let start = Start {
            role: plan.kind.roles().1,
            peer: Peer::Host,
            message_len: plan.message_len,
            seed,
            limit_ms: MAX_DURATION_MS,
        };
        let mut link = Link::open(vm, start, deadline)?;
        link.wait_until_ready()?;
        let plan = *plan;
        Ok(HostStream { link, plan, seed })
    }

    /// Let it run until it is enough: what the receiver says.
    pub(super) fn run(self, progress: &Progress) -> Result<Outcome, BenchError> {
        match self.plan.kind {
            Kind::There => self.send(progress),
            Kind::Back => self.receive(progress),
            Kind::Ping => self.ping(progress),
        }
    }

    fn send(mut self, progress: &Progress) -> Result<Outcome, BenchError> {
        let mut messages = Messages::new(self.plan.message_len, self.seed)?;
        let mut ending = Ending::default();
        // At least one segment: a busy machine may come to it only when the time is over.
        loop {
            loop {
                let bytes = messages.next_message();
                let header_len = bytes.len() - self.plan.message_len as usize;
                self.link.send(bytes)?;
                progress.add(bytes.len() - header_len);
                if ending.is_overdue(progress, STALL_TIMEOUT) {
                    return Err(self.link.stalled());
                }
                if messages.is_between_segments() {
                    break;
                }
            }
            if progress.is_enough() {
                break;
            }
        }
        self.finish(messages.bytes())
    }

    /// Say that it was all, and take the receiver's word.
    fn finish(mut self, bytes: u64) -> Result<Outcome, BenchError> {
        self.link.say(Message::End { bytes })?;
        let until = Instant::now() + STALL_TIMEOUT;
        let mut nothing = Received::new(None);
        loop {
            match self.link.next(&mut nothing)? {
                None => {}
                Some(Arrival::Frame(Frame::Bench(Message::Outcome(outcome)))) => {
                    if outcome.bytes != bytes {
                        let said = outcome.bytes;
                        let what = format!("it has received {said} bytes where {bytes} were sent");
                        return Err(self.link.protocol(what));
                    }
                    return Ok(outcome);
                }
                Some(_) => return Err(self.link.protocol("expected what it has received")),
            }
            self.link.receive()?;
            if Instant::now() > until {
                return Err(self.link.stalled());
            }
        }
    }

    fn receive(mut self, progress: &Progress) -> Result<Outcome, BenchError> {
        self.link.say(Message::Go)?;
        let mut received = Received::new(self.seed);
        let (mut stopped, mut ending) = (false, Ending::default());
        let mut last = Instant::now();
        loop {
            match self.link.next(&mut received)? {
                Some(Arrival::Payload(bytes)) => progress.add(bytes.len()),
                Some(Arrival::Segment) => {}
                Some(Arrival::Frame(Frame::Bench(Message::End { .. }))) => break,
                Some(Arrival::WrongSum { said }) => {
                    let count = received.bytes();
                    let what = format!("it reports {said} bytes sent, and {count} arrived");
                    return Err(self.link.protocol(what));
                }
                Some(_) => {
                    return Err(self
                        .link
                        .protocol("a frame that is not allowed between payload"));
                }
                None => {
                    if progress.is_enough() && !stopped {
                        stopped = true;
                        self.link.say(Message::Stop)?;
                    }
                    if self.link.receive()? {
                        last = Instant::now();
                    }
                    let is_overdue = ending.is_overdue(progress, STALL_TIMEOUT);
                    if is_overdue || last.elapsed() > STALL_TIMEOUT {
                        return Err(self.link.stalled());
                    }
                }
            }
        }
        let outcome = Outcome {
            bytes: received.bytes(),
            duration_us: 0,
            wrong_bytes: received.wrong_bytes(),
            first_wrong: received.first_wrong(),
            latency: None,
        };
        self.link.say(Message::Outcome(outcome))?;
        Ok(outcome)
    }

    fn ping(mut self, progress: &Progress) -> Result<Outcome, BenchError> {
        let mut messages = Messages::new(self.plan.message_len, self.seed)?;
        let mut ending = Ending::default();
        let mut received = Received::new(self.seed);
        let mut times = new_histogram()?;
        // At least one segment: a busy machine may come to it only when the time is over.
        loop {
            loop {
                let sent = Instant::now();
                self.link.send(messages.next_message())?;
                self.take_echo(messages.message().len(), &mut received)?;
                times
                    .saturating_record(sent.elapsed().as_nanos().min(MAX_LATENCY_NS.into()) as u64);
                progress.add(messages.message().len());
                if ending.is_overdue(progress, STALL_TIMEOUT) {
                    return Err(self.link.stalled());
                }
                if messages.is_between_segments() {
                    break;
                }
            }
            if progress.is_enough() {
                break;
            }
        }
        let outcome = self.finish(messages.bytes())?;
        Ok(Outcome {
            wrong_bytes: received.wrong_bytes(),
            first_wrong: received.first_wrong(),
            latency: latency(&times),
            ..outcome
        })
    }

    fn take_echo(&mut self, len: usize, received: &mut Received) -> Result<(), BenchError> {
        let mut left = len;
        let mut last = None;
        while left > 0 {
            let bytes = self.link.raw(left);
            left -= bytes.len();
            received.count(bytes);
            // Only when nothing was left is there certainly room for more.
            let nothing_left = bytes.is_empty();
            if nothing_left {
                self.link.receive()?;
                let since: &mut Instant = last.get_or_insert_with(Instant::now);
                if since.elapsed() > STALL_TIMEOUT {
                    return Err(self.link.stalled());
                }
            }
        }
        Ok(())
    }
}

fn new_histogram() -> Result<Histogram<u64>, BenchError> {
    Histogram::new_with_bounds(1, MAX_LATENCY_NS, LATENCY_FIGURES).map_err(|error| {
        BenchError::Local {
            what: "keep the times of round trips",
            source: std::io::Error::other(error.to_string()),
        }
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
