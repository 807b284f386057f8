//! Peers whose sockets make our system calls slow.
//!
//! A call on a socket wakes, before it returns, all that wait on the peer's socket, and the peer chooses how many wait: a socket can be
//! watched by thousands of epoll instances. One thread serves all lines, so all wait with it.
//!
//! The rule: *the slow calls of a party may use 500 ms of the processor, of which 50 ms come back each second. A party that has used them up
//! gets no circuits for a minute, the next time for twice as long.* A slow call is one that uses more than [`CALL`] and [`BYTE_NS`] a byte,
//! and what it uses beyond that counts.
//!
//! What may also be slow is the thread that waits for a processor, memory that is reclaimed, an interrupt within the call. So it is measured
//! in steps, which cost calls on sockets that are fast no more than two looks at the clock:
//!
//! - The first call that takes long begins an *alert*. It counts for no party.
//! - In an alert the processor's time is read once a turn. A call that takes long without what was spent off the processor makes its party a
//!   *suspect*. It does not count either: it may have been the first to touch a guest's memory.
//! - Calls of a suspect are measured singly by the processor's time. They use our own memory and move few bytes, more with each fast call.
//!
//! Within a virtual machine the processor's time may contain what the hypervisor gave to others. That may hit any instruction, a party's calls no
//! more than a loop of our own. So behind each fast call of a party that has used much of its budget such a loop runs, for several times as long as
//! the call, and what it loses at once is given back.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io;
use std::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use guestmem::io::Received;
use policy::ServiceId;
use rustix::time::{ClockId, clock_gettime};
use vsock::CircuitId;

/// What an honest call may use beside what its bytes cost: to wake a program or two on a busy virtual machine takes a fortieth of this.
const CALL: Duration = Duration::from_millis(2);

/// What each byte may cost: several times what a copy does.
const BYTE_NS: u64 = 4;

/// What slow calls of a party may use.
const BUDGET: Duration = Duration::from_millis(500);

/// In so many seconds of time one second of its budget comes back.
const REFILL: u32 = 20;

/// What is used of it before the party's fast calls are compared with a loop, which runs for so many times as long within these bounds.
const MUCH: Duration = Duration::from_millis(100);
const LOOP_FACTOR: u32 = 4;
const SHORTEST_LOOP: Duration = Duration::from_micros(20);
const LONGEST_LOOP: Duration = Duration::from_micros(200);

/// How long an alert, and the suspicion of a party, last after the last slow call.
const SUSPICION: Duration = Duration::from_secs(600);

/// How long a party is barred at first and at most; each time twice as long.
const FIRST_TERM: Duration = Duration::from_secs(60);
const LONGEST_TERM: Duration = Duration::from_secs(3600);

/// How long a bar is remembered.
const MEMORY: Duration = Duration::from_secs(3600);

/// Bytes that the first call on a suspect's socket moves: each may be a piece of its own, whose sender is woken.
const FIRST_PIECE: usize = 1;

/// Fast calls after which they move twice as much. Of a UNIX socket that is full the first three quarters are read without waking its sender.
const CALLS_OF_A_PIECE: u32 = 16;

/// Parties that are known.
const MAX_PARTIES: usize = 4096;

/// Whose socket it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Party {
    /// A user of the host whose programs call.
    User(u32),
    /// The VMM of a hybrid line, by the line's generation.
    Vmm(u64),
    /// The program that listens for a VM's calls to a port of the host, by the line's generation.
    Listener(u64, u32),
    /// A service.
    Service(ServiceId),
    /// Callers of a published TCP port from one network address, by the hash of both.
    Published(u64),
}

impl Party {
    /// Callers of this published port from an address of our own, or else from this one. One that has an IPv6 network has all addresses of it.
    pub(crate) fn published(name: &str, from: Option<IpAddr>) -> Party {
        let network = from.map(|address| match address.to_canonical() {
            IpAddr::V6(address) => {
                let network = u128::from(address) >> 64 << 64;
                IpAddr::V6(Ipv6Addr::from(network))
            }
            address => address,
        });
        let mut hasher = DefaultHasher::new();
        (name, network).hash(&mut hasher);
        Party::Published(hasher.finish())
    }
}

/// What is read before and after calls.
pub(crate) trait Clock {
    /// The time.
    fn wall(&self) -> Duration;
    /// What this thread has had of its processor.
    fn processor(&self) -> Duration;
    /// Uses the processor for so long, and returns what was counted beyond that in pieces longer than [`CALL`].
    fn stolen_within(&self, len: Duration) -> Duration;
}

/// The system's clocks.
#[derive(Debug, Default)]
pub(crate) struct System;

impl Clock for System {
    fn wall(&self) -> Duration {
        read(ClockId::Monotonic)
    }

    fn processor(&self) -> Duration {
        read(ClockId::ThreadCPUTime)
    }

    fn stolen_within(&self, len: Duration) -> Duration {
        let begin = self.processor();
        let (mut last, mut stolen) = (begin, Duration::ZERO);
        while last - begin - stolen < len {
            let now = self.processor();
            stolen += (now - last).saturating_sub(CALL);
            last = now;
        }
        stolen
    }
}

fn read(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// What a call has given, as far as it says how many bytes it has moved.
pub(crate) trait Outcome {
    fn moved(&self) -> usize {
        0
    }
}

impl Outcome for () {}

impl Outcome for bool {}

impl<E> Outcome for Result<usize, E> {
    fn moved(&self) -> usize {
        *self.as_ref().unwrap_or(&0)
    }
}

impl Outcome for io::Result<Received> {
    fn moved(&self) -> usize {
        self.as_ref().map_or(0, |received| received.len)
    }
}

/// A party that has used up its budget, with the circuit of the call that was one too many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Overrun {
    pub(crate) party: Party,
    pub(crate) circuit: Option<CircuitId>,
    /// All its circuits end, and not only this one.
    pub(crate) all: bool,
}

/// Measures calls.
#[derive(Debug, Default)]
pub(crate) struct Slow<C = System> {
    clock: C,
    /// The user that is cut and not barred, beside root: the daemon's own.
    own_user: Option<u32>,
    /// When the clock was last read.
    last: Duration,
    alert_until: Duration,
    /// Both clocks, as they were read when this turn began, in an alert.
    turn: Option<(Duration, Duration)>,
    /// When the last suspicion ends.
    suspects_until: Duration,
    known: HashMap<Party, Record>,
    overruns: Vec<Overrun>,
}

/// What is known of a suspect.
#[derive(Debug, Default)]
struct Record {
    suspect_until: Duration,
    barred_until: Duration,
    /// How often it was barred.
    bars: u32,
    /// What it has used of its budget, as of then.
    used: Duration,
    used_at: Duration,
    piece: usize,
    /// Fast calls since the last slow one.
    fast: u32,
}

impl Record {
    /// Takes a call's excess from the budget. Returns whether it is used up.
    fn spend(&mut self, now: Duration, excess: Duration) -> bool {
        let back = now.saturating_sub(self.used_at) / REFILL;
        self.used_at = now;
        self.used = self.used.saturating_sub(back) + excess;
        self.used >= BUDGET
    }

    /// Another call is not slow, and has used so much.
    fn was_fast(&mut self, clock: &impl Clock, used: Duration) {
        self.fast = self.fast.wrapping_add(1);
        if self.fast % CALLS_OF_A_PIECE == 0 {
            self.piece = self.piece.saturating_mul(2);
        }
        if self.used >= MUCH {
            let len = (used * LOOP_FACTOR).clamp(SHORTEST_LOOP, LONGEST_LOOP);
            let stolen = clock.stolen_within(len);
            self.used = self.used.saturating_sub(stolen);
        }
    }

    fn bar(&mut self, now: Duration) {
        let factor = 1u32 << self.bars.min(16);
        self.bars += 1;
        self.barred_until = now + (FIRST_TERM * factor).min(LONGEST_TERM);
        self.suspect_until = self.barred_until + SUSPICION;
        // It begins anew with half of it.
        (self.used, self.used_at) = (BUDGET / 2, self.barred_until);
    }
}

/// What a call for so many bytes may use.
fn allowed(bytes: usize) -> Duration {
    CALL + Duration::from_nanos(BYTE_NS * bytes as u64)
}

impl<C: Clock> Slow<C> {
    /// Has parties of this user and of root cut and not barred. Without one, which holds until this is called, all are barred.
    pub(crate) fn set_own_user(&mut self, user: Option<u32>) {
        self.own_user = user;
    }

    /// A turn begins.
    pub(crate) fn begin_turn(&mut self) {
        self.last = self.clock.wall();
        let is_alert = self.last < self.alert_until;
        self.turn = is_alert.then(|| (self.last, self.clock.processor()));
    }

    /// Makes a call on a socket of this party, for this circuit. Calls on our own are not measured.
    #[inline]
    pub(crate) fn timed<T: Outcome>(
        &mut self,
        party: Option<Party>,
        circuit: Option<CircuitId>,
        call: impl FnOnce() -> T,
    ) -> T {
        let Some(party) = party else {
            return call();
        };
        let begin = self.clock.wall();
        self.last = begin;
        let is_suspect = self.is_suspect(Some(party));
        let had = is_suspect.then(|| self.clock.processor());
        let outcome = call();
        self.last = self.clock.wall();
        let took = self.last.saturating_sub(begin);
        let allowed = allowed(outcome.moved());
        if took > allowed {
            let used = self.used(took, had);
            let excess = used.map_or(Duration::ZERO, |used| used.saturating_sub(allowed));
            if !excess.is_zero() {
                self.charge(party, circuit, excess);
                return outcome;
            }
        }
        if let (Some(had), Some(record)) = (had, self.known.get_mut(&party)) {
            let used = self.clock.processor().saturating_sub(had);
            record.was_fast(&self.clock, used);
        }
        outcome
    }

    /// What a call that took so long has used of the processor, if that can be said: `had` was read when it began.
    #[cold]
    fn used(&mut self, took: Duration, had: Option<Duration>) -> Option<Duration> {
        let processor = self.clock.processor();
        let turn = self.turn;
        self.alert_until = self.last + SUSPICION;
        if let Some(had) = had {
            return Some(processor.saturating_sub(had).min(took));
        }
        // Whatever the turn has spent off the processor may have been within the call.
        let (at, had) = turn?;
        let without = (self.last - at).saturating_sub(processor.saturating_sub(had));
        Some(took.saturating_sub(without))
    }

    fn charge(&mut self, party: Party, circuit: Option<CircuitId>, excess: Duration) {
        let now = self.last;
        if !self.known.contains_key(&party) {
            self.make_room();
        }
        let is_exempt = self.is_own_or_root(party);
        let record = self.known.entry(party).or_default();
        if now >= record.suspect_until.max(record.barred_until + MEMORY) {
            *record = Record::default();
        }
        (record.piece, record.fast) = (FIRST_PIECE, 0);
        let was_suspect = now < record.suspect_until;
        let was_barred = now < record.barred_until;
        record.suspect_until = record.suspect_until.max(now + SUSPICION);
        let is_used_up = was_suspect && !was_barred && record.spend(now, excess);
        if is_used_up {
            record.bar(now);
        }
        self.suspects_until = self.suspects_until.max(record.suspect_until);
        if is_used_up || was_barred {
            self.overruns.push(Overrun {
                party,
                circuit,
                all: is_used_up && !is_exempt,
            });
        }
    }

    /// Forgets the first to be forgotten.
    fn make_room(&mut self) {
        if self.known.len() < MAX_PARTIES {
            return;
        }
        let first = self
            .known
            .iter()
            .min_by_key(|(_, record)| record.suspect_until);
        if let Some(party) = first.map(|(party, _)| *party) {
            self.known.remove(&party);
        }
    }

    fn is_own_or_root(&self, party: Party) -> bool {
        matches!(party, Party::User(user) if user == 0 && self.own_user.is_some() || Some(user) == self.own_user)
    }

    /// Whether calls on this party's sockets are to use our own memory.
    pub(crate) fn is_suspect(&self, party: Option<Party>) -> bool {
        self.suspect(party).is_some()
    }

    /// Whether this party's sockets are to be closed on another thread: a call was slow that was measured exactly.
    pub(crate) fn closes_elsewhere(&self, party: Party) -> bool {
        let record = self.suspect(Some(party));
        record.is_some_and(|record| !record.used.is_zero())
    }

    /// How many bytes the next call on a socket of this party may move.
    pub(crate) fn piece(&self, party: Option<Party>) -> usize {
        self.suspect(party)
            .map_or(usize::MAX, |record| record.piece)
    }

    /// Whether this party gets no circuits.
    pub(crate) fn is_barred(&self, party: Option<Party>) -> bool {
        let record = self.suspect(party);
        record.is_some_and(|record| self.last < record.barred_until)
            && !party.is_some_and(|party| self.is_own_or_root(party))
    }

    /// What is known of a party, if it is a suspect.
    fn suspect(&self, party: Option<Party>) -> Option<&Record> {
        if self.last >= self.suspects_until {
            return None;
        }
        let record = self.known.get(&party?)?;
        (self.last < record.suspect_until).then_some(record)
    }

    /// Whether a party has used up its budget.
    #[inline]
    pub(crate) fn has_overrun(&self) -> bool {
        !self.overruns.is_empty()
    }

    /// A party that has used up its budget since this was last asked for.
    pub(crate) fn take_overrun(&mut self) -> Option<Overrun> {
        self.overruns.pop()
    }
}

#[cfg(test)]
mod tests;
