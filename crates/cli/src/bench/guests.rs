//! Streams between two guests, of which this program only hears.

use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use wire::agent::Frame;
use wire::agent::bench::{Arrival, MAX_DURATION_MS, Message, Outcome, Peer, Received, Start};

use super::link::Link;
use super::run::{Ending, Progress};
use super::{BenchError, Kind, Party, Plan, STALL_TIMEOUT};
use crate::guest::Deadline;

/// How long to wait for words of the agents before looking whether it is enough.
const LOOK_INTERVAL: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 50_000_000,
};

/// How much longer than planned a sender goes on if it is not stopped, in milliseconds.
const MARGIN_MS: u32 = 30_000;

/// A stream whose two ends are connected and wait for their start.
#[derive(Debug)]
pub(super) struct GuestStream {
    sender: Link,
    receiver: Link,
    kind: Kind,
}

impl GuestStream {
    /// Let `other` listen for `vm`, and `vm` dial.
    pub(super) fn connect(
        vm: &Party,
        other: &Party,
        port: u32,
        plan: &Plan,
        seed: Option<u64>,
        deadline: Deadline,
    ) -> Result<GuestStream, (BenchError, u32)> {
        let (caller_role, called_role) = plan.kind.roles();
        let nonce = nonce().map_err(|error| (error, port))?;
        let time_ms = u32::try_from(plan.time.as_millis()).unwrap_or(MAX_DURATION_MS);
        let start = Start {
            role: called_role,
            peer: Peer::Listen {
                cid: vm.cid,
                port,
                nonce,
            },
            message_len: plan.message_len,
            seed,
            limit_ms: time_ms.saturating_add(MARGIN_MS).min(MAX_DURATION_MS),
        };
        let mut called = Link::open(other, start, deadline).map_err(|error| (error, port))?;
        let port = match called.answer() {
            Ok(Message::Listening { port }) => port,
            Ok(_) => {
                return Err((
                    called.protocol("expected the address where it listens"),
                    port,
                ));
            }
            Err(error) => return Err((error, port)),
        };
        let connect = || {
            let peer = Peer::Dial {
                cid: other.cid,
                port,
                nonce,
            };
            let start = Start {
                role: caller_role,
                peer,
                ..start
            };
            let mut caller = Link::open(vm, start, deadline)?;
            caller.wait_until_ready()?;
            called.wait_until_ready()?;
            Ok(match plan.kind {
                Kind::There | Kind::Ping => (caller, called),
                Kind::Back => (called, caller),
            })
        };
        let (sender, receiver) = connect().map_err(|error| (error, port))?;
        let kind = plan.kind;
        Ok(GuestStream {
            sender,
            receiver,
            kind,
        })
    }

    /// Let it run until it is enough: what the receiver says, or of round trips the side that began.
    pub(super) fn run(mut self, progress: &Progress) -> Result<Outcome, BenchError> {
        self.sender.say(Message::Go)?;
        let (mut sent, mut received) = (None, None);
        let (mut stopped, mut ending) = (false, Ending::default());
        let mut last = Instant::now();
        loop {
            if progress.is_enough() && !stopped {
                stopped = true;
                self.sender.say(Message::Stop)?;
            }
            self.wait()?;
            let before = (progress.bytes(), sent.is_some(), received.is_some());
            hear(&mut self.sender, &mut sent, progress)?;
            hear(&mut self.receiver, &mut received, progress)?;
            if let (Some(sent), Some(received)) = (sent, received) {
                return self.agree(sent, received);
            }
            if before != (progress.bytes(), sent.is_some(), received.is_some()) {
                last = Instant::now();
            }
            // The agents notice it first, and say more.
            let patience = STALL_TIMEOUT + Duration::from_secs(10);
            if ending.is_overdue(progress, patience) || last.elapsed() > patience {
                return Err(self.receiver.stalled());
            }
        }
    }

    fn agree(&self, sent: Outcome, received: Outcome) -> Result<Outcome, BenchError> {
        if sent.bytes != received.bytes {
            let what = format!(
                "it has received {} bytes where the other guest has sent {}",
                received.bytes, sent.bytes
            );
            return Err(self.receiver.protocol(what));
        }
        match self.kind {
            Kind::Ping if sent.latency.is_none() && sent.bytes > 0 => Err(self
                .sender
                .protocol("it does not say how long round trips took")),
            Kind::Ping => Ok(sent),
            Kind::There | Kind::Back => Ok(received),
        }
    }

    fn wait(&self) -> Result<(), BenchError> {
        let mut fds = [
            PollFd::new(&self.sender, PollFlags::IN),
            PollFd::new(&self.receiver, PollFlags::IN),
        ];
        match rustix::event::poll(&mut fds, Some(&LOOK_INTERVAL)) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(BenchError::Local {
                what: "wait for the agents",
                source: error.into(),
            }),
        }
    }
}

/// Take what an agent says, if it says something now.
fn hear(
    link: &mut Link,
    outcome: &mut Option<Outcome>,
    progress: &Progress,
) -> Result<(), BenchError> {
    let mut fds = [PollFd::new(&*link, PollFlags::IN)];
    let now = Timespec::default();
    let says_something = matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(1));
    // Once it has given its outcome it may leave.
    if outcome.is_some() || !says_something {
        return Ok(());
    }
    link.receive()?;
    let mut nothing = Received::new(None);
    loop {
        match link.next(&mut nothing)? {
            None => return Ok(()),
            Some(Arrival::Frame(Frame::Bench(Message::Progress { bytes, .. }))) => {
                progress.reach(bytes);
            }
            Some(Arrival::Frame(Frame::Bench(Message::Outcome(last)))) if outcome.is_none() => {
                *outcome = Some(last);
            }
            Some(_) => return Err(link.protocol("an unexpected frame")),
        }
    }
}

fn nonce() -> Result<[u8; 16], BenchError> {
    let mut nonce = [0; 16];
    let result = rustix::rand::getrandom(&mut nonce, rustix::rand::GetRandomFlags::empty());
    match result {
        Ok(16) => Ok(nonce),
        Ok(_) => Err(rustix::io::Errno::IO),
        Err(error) => Err(error),
    }
    .map_err(|error| BenchError::Local {
        what: "make a random number",
        source: error.into(),
    })
}
