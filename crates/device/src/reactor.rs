//! Waiting for many descriptors at once, and being woken from another thread.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::Duration;

use policy::LineId;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use vsock::{CircuitId, Side};

pub(crate) use rustix::event::epoll::EventFlags;

/// Events taken in one call: enough to amortise the call, few enough that no line waits for long.
const BATCH: usize = 256;

/// What a descriptor is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Token {
    /// Another thread has something for us.
    Wake,
    /// A guest kicked this ring.
    Ring { line: LineId, index: u8 },
    /// Programs call on a line's host socket; the index says at which of its listeners.
    Listener { line: LineId, index: u8 },
    /// A program that called and named no callee yet.
    Caller { slot: u32 },
    /// A circuit's host socket.
    Circuit(CircuitId),
    /// A VMM calls for the guest of this hybrid line, for this port of the host.
    HybridListener { line: LineId, port: u32 },
    /// A VMM that has been asked to put a circuit through.
    Ringing(CircuitId),
    /// One of two sockets that have been joined.
    Relayed { circuit: CircuitId, side: Side },
    /// The host has frames for this network.
    Uplink { network: u32 },
}

const KIND_SHIFT: u32 = 60;
const INDEX_BITS: u32 = 28;

impl Token {
    fn encode(self) -> u64 {
        let (kind, value) = match self {
            Token::Wake => (0, 0),
            Token::Ring { line, index } => (1, u64::from(line.0) << 8 | u64::from(index)),
            Token::Listener { line, index } => (2, u64::from(line.0) << 8 | u64::from(index)),
            Token::Caller { slot } => (3, u64::from(slot)),
            Token::Circuit(id) => (4, encode_circuit(id)),
            Token::HybridListener { line, port } => {
                debug_assert!(line.0 < 1 << INDEX_BITS);
                (5, u64::from(line.0) << 32 | u64::from(port))
            }
            Token::Ringing(id) => (6, encode_circuit(id)),
            Token::Uplink { network } => (9, u64::from(network)),
            Token::Relayed { circuit, side } => (7 + side.index() as u64, encode_circuit(circuit)),
        };
        kind << KIND_SHIFT | value
    }

    fn decode(value: u64) -> Option<Token> {
        let low = value & ((1 << KIND_SHIFT) - 1);
        Some(match value >> KIND_SHIFT {
            0 => Token::Wake,
            1 => Token::Ring {
                line: LineId((low >> 8) as u32),
                index: low as u8,
            },
            2 => Token::Listener {
                line: LineId((low >> 8) as u32),
                index: low as u8,
            },
            3 => Token::Caller { slot: low as u32 },
            4 => Token::Circuit(decode_circuit(low)),
            5 => Token::HybridListener {
                line: LineId((low >> 32) as u32),
                port: low as u32,
            },
            6 => Token::Ringing(decode_circuit(low)),
            kind @ (7 | 8) => Token::Relayed {
                circuit: decode_circuit(low),
                side: if kind == 7 {
                    Side::Caller
                } else {
                    Side::Callee
                },
            },
            9 => Token::Uplink {
                network: low as u32,
            },
            _ => return None,
        })
    }
}

fn encode_circuit(id: CircuitId) -> u64 {
    debug_assert!(id.index < 1 << INDEX_BITS);
    u64::from(id.generation) << INDEX_BITS | u64::from(id.index)
}

fn decode_circuit(low: u64) -> CircuitId {
    CircuitId {
        index: (low & ((1 << INDEX_BITS) - 1)) as u32,
        generation: (low >> INDEX_BITS) as u32,
    }
}

/// Wakes a reactor from any thread.
#[derive(Debug, Clone)]
pub struct Waker(Arc<OwnedFd>);

impl Waker {
    /// Makes the reactor's wait end now, or its next one at once.
    pub fn wake(&self) {
        // Only a counter at its maximum could refuse, and then a wake-up is pending anyway.
        let _ = rustix::io::write(&*self.0, &1u64.to_ne_bytes());
    }
}

pub(crate) struct Reactor {
    epoll: OwnedFd,
    wake: Arc<OwnedFd>,
}

impl Reactor {
    pub(crate) fn new() -> io::Result<Reactor> {
        let reactor = Reactor {
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            wake: Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?),
        };
        // Edge-triggered, so that the counter need not be read back.
        reactor.add(&*reactor.wake, Token::Wake, EventFlags::IN | EventFlags::ET)?;
        Ok(reactor)
    }

    pub(crate) fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.wake))
    }

    pub(crate) fn add(
        &self,
        descriptor: impl AsFd,
        token: Token,
        flags: EventFlags,
    ) -> io::Result<()> {
        epoll::add(
            &self.epoll,
            descriptor,
            epoll::EventData::new_u64(token.encode()),
            flags,
        )?;
        Ok(())
    }

    pub(crate) fn retag(
        &self,
        descriptor: impl AsFd,
        token: Token,
        flags: EventFlags,
    ) -> io::Result<()> {
        epoll::modify(
            &self.epoll,
            descriptor,
            epoll::EventData::new_u64(token.encode()),
            flags,
        )?;
        Ok(())
    }

    /// Forgets a descriptor that stays open elsewhere. One that is about to be closed need not be forgotten, unless
    /// another process holds it too.
    pub(crate) fn remove(&self, descriptor: impl AsFd) {
        // It can only fail when the descriptor was not there, which is what is wanted.
        let _ = epoll::delete(&self.epoll, descriptor);
    }

    /// Sleeps for `length`, or until something happens. What, the next wait says. Unlike there, a fraction of a millisecond means
    /// what it says, on any kernel.
    pub(crate) fn nap(&self, length: Duration) -> io::Result<()> {
        let mut watched = [PollFd::new(&self.epoll, PollFlags::IN)];
        match poll(&mut watched, Some(&timespec(length))) {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Waits until something happens, at most for `limit`, and appends what did.
    pub(crate) fn wait(
        &self,
        limit: Option<Duration>,
        happened: &mut Vec<(Token, EventFlags)>,
    ) -> io::Result<()> {
        let limit = limit.map(timespec);
        let mut room = [const { MaybeUninit::uninit() }; BATCH];
        let events = match epoll::wait(&self.epoll, &mut room, limit.as_ref()) {
            Ok((events, _)) => events,
            Err(rustix::io::Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        for event in events {
            let (flags, data) = (event.flags, event.data);
            if let Some(token) = Token::decode(data.u64()) {
                happened.push((token, flags));
            }
        }
        Ok(())
    }
}

fn timespec(time: Duration) -> Timespec {
    Timespec {
        tv_sec: time.as_secs() as i64,
        tv_nsec: i64::from(time.subsec_nanos()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_survive_their_encoding() {
        let tokens = [
            Token::Wake,
            Token::Ring {
                line: LineId(70_000),
                index: 2,
            },
            Token::Listener {
                line: LineId(0),
                index: 1,
            },
            Token::Caller { slot: u32::MAX },
            Token::Uplink { network: u32::MAX },
            Token::HybridListener {
                line: LineId((1 << 28) - 1),
                port: u32::MAX,
            },
            Token::Ringing(CircuitId {
                index: 1,
                generation: u32::MAX,
            }),
            Token::Relayed {
                circuit: CircuitId {
                    index: 3,
                    generation: u32::MAX,
                },
                side: Side::Caller,
            },
            Token::Relayed {
                circuit: CircuitId {
                    index: (1 << 28) - 1,
                    generation: 0,
                },
                side: Side::Callee,
            },
            Token::Circuit(CircuitId {
                index: (1 << 28) - 1,
                generation: u32::MAX,
            }),
        ];
        for token in tokens {
            assert_eq!(Token::decode(token.encode()), Some(token));
        }
    }

    #[test]
    fn a_waker_ends_a_wait() {
        let reactor = Reactor::new().unwrap();
        reactor.waker().wake();
        let mut happened = Vec::new();
        reactor.wait(None, &mut happened).unwrap();
        assert_eq!(happened[0].0, Token::Wake);
    }
    #[test]
    fn a_nap_ends_when_something_happens_and_leaves_it_to_the_next_wait() {
        let reactor = Reactor::new().unwrap();
        reactor.nap(Duration::from_micros(1)).unwrap();
        reactor.waker().wake();
        let begin = std::time::Instant::now();
        reactor.nap(Duration::from_secs(3600)).unwrap();
        assert!(begin.elapsed() < Duration::from_secs(1800));
        let mut happened = Vec::new();
        reactor.wait(Some(Duration::ZERO), &mut happened).unwrap();
        assert_eq!(happened[0].0, Token::Wake);
    }
}
