//! Peers whose sockets make our system calls slow.
//!
//! A call on a socket wakes, before it returns, all that wait on the peer's socket, and the peer chooses how many wait: a socket can be
//! watched by thousands of epoll instances. One thread serves all lines, so all wait with it.
//!
//! - *Calm*: each call costs one look at the clock. What has taken longer than an honest call can, be it the call or what was done since the
//!   last one, begins an *alert*, and is charged to no party.
//! - *Alert*: calls are timed singly, and time in which the thread had no processor does not count. A party whose call is still too long is
//!   on *probation*.
//! - *Probation*: calls on all sockets of this party are measured by the processor's time. They use our own memory, as a guest's may have to
//!   be made first, and move few bytes, more with each fast call. Excess is *debt*; with too much of it, the party is *barred*.
//!
//! Reclaim of memory and the like can make single calls slow without the peer: one call is never enough.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use policy::{LineId, ServiceId};
use rustix::time::{ClockId, clock_gettime};
use vsock::CircuitId;

/// What an honest call may use beside what its bytes cost: to wake a program or two on a busy virtual machine takes a fortieth of this; a hypervisor that takes the processor away for a moment takes more.
const CALL: Duration = Duration::from_millis(2);

/// What each byte may cost: several times what a copy does.
const BYTE_NS: u64 = 4;

/// How long calls are timed singly after a slow one, and at least as long as a probation lasts.
const ALERT: Duration = Duration::from_secs(600);

/// How long a party is on probation, or barred, at first and at most; each time twice as long.
const FIRST_TERM: Duration = Duration::from_secs(60);
const LONGEST_TERM: Duration = Duration::from_secs(3600);

/// How long a party is known after that.
const MEMORY: Duration = Duration::from_secs(3600);

/// With so much debt a party is barred: after three calls at least, of which one adds so much at most, behind the one that has begun the
/// probation. A minute takes away as much as one call adds.
const MOST_DEBT: Duration = Duration::from_millis(5);
const MOST_OF_A_CALL: Duration = Duration::from_millis(2);
const MINUTE: Duration = Duration::from_secs(60);

/// Bytes that the first call moves on probation: each may be a piece of its own, whose sender is woken.
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
    /// The VMM of a hybrid line.
    Vmm(LineId),
    /// The program that listens for a VM's calls to a port of the host.
    Listener(LineId, u32),
    /// A service.
    Service(ServiceId),
    /// Callers of a published TCP port from this host, by its name's hash.
    Published(u64),
}

impl Party {
    pub(crate) fn published(name: &str) -> Party {
        let mut hasher = DefaultHasher::new();
        name.hash(&mut hasher);
        Party::Published(hasher.finish())
    }

    fn is_of(self, line: LineId) -> bool {
        matches!(self, Party::Vmm(of) | Party::Listener(of, _) if of == line)
    }
}

/// What is read before and after calls.
pub(crate) trait Clock {
    /// The time.
    fn wall(&self) -> Duration;
    /// What this thread has had of its processor.
    fn processor(&self) -> Duration;
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
}

fn read(clock: ClockId) -> Duration {
    let time = clock_gettime(clock);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// A party that has been found too slow, with the circuit of the call that was one too many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Overrun {
    pub(crate) party: Party,
    pub(crate) circuit: Option<CircuitId>,
    /// All its circuits end, and it gets no new ones.
    pub(crate) barred: bool,
}

/// Measures calls.
#[derive(Debug, Default)]
pub(crate) struct Slow<C = System> {
    clock: C,
    /// The user that is cut and not barred, beside root: the daemon's own.
    own_user: Option<u32>,
    /// When the clock was last read.
    last: Duration,
    /// Both clocks, as they were read in this turn.
    both: Option<(Duration, Duration)>,
    alert_until: Option<Duration>,
    /// When the last probation ends of those that have begun.
    probation_until: Duration,
    known: HashMap<Party, Record>,
    overruns: Vec<Overrun>,
}

/// What is known of a party.
#[derive(Debug, Default)]
struct Record {
    probation: Term,
    bar: Term,
    debt: Duration,
    debt_at: Duration,
    piece: usize,
    /// Fast calls since the last slow one.
    fast: u32,
}

/// A time that is longer each time.
#[derive(Debug, Default, Clone, Copy)]
struct Term {
    until: Duration,
    times: u32,
}

impl Term {
    fn begin(&mut self, now: Duration) {
        let factor = 1u32.checked_shl(self.times.min(16)).unwrap_or(u32::MAX);
        self.times += 1;
        self.until = now + (FIRST_TERM * factor).min(LONGEST_TERM);
    }

    fn lasts(self, now: Duration) -> bool {
        now < self.until
    }
}

impl Record {
    fn ends(&self) -> Duration {
        self.probation.until.max(self.bar.until)
    }

    /// Adds a call's excess. Returns whether it is too much.
    fn owe(&mut self, now: Duration, excess: Duration) -> bool {
        let paid = (now - self.debt_at).as_secs_f64() / MINUTE.as_secs_f64();
        let paid = MOST_OF_A_CALL.mul_f64(paid);
        self.debt_at = now;
        self.debt = self.debt.saturating_sub(paid) + excess.min(MOST_OF_A_CALL);
        self.debt >= MOST_DEBT
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
        self.both = None;
        let now = self.last;
        match self.alert_until {
            Some(until) if now < until => self.both = Some((now, self.clock.processor())),
            Some(_) => {
                // A bar lasts no longer than its party's probation.
                let is_over = now >= self.probation_until;
                self.alert_until = (!is_over).then_some(self.probation_until);
                self.both = (!is_over).then(|| (now, self.clock.processor()));
            }
            None => {}
        }
    }

    /// A call is about to be made.
    #[inline]
    pub(crate) fn before(&mut self, party: Option<Party>) {
        if self.alert_until.is_some() {
            self.read_before(party);
        }
    }

    #[cold]
    fn read_before(&mut self, party: Option<Party>) {
        self.last = self.clock.wall();
        if self.is_on_probation(party) {
            self.both = Some((self.last, self.clock.processor()));
        }
    }

    /// A call has moved so many bytes.
    #[inline]
    pub(crate) fn after(&mut self, party: Option<Party>, bytes: usize, circuit: Option<CircuitId>) {
        let now = self.clock.wall();
        let took = now.saturating_sub(self.last);
        self.last = now;
        if took > allowed(bytes) {
            self.was_long(party, bytes, circuit, took);
        } else if self.alert_until.is_some() {
            self.was_short(party);
        }
    }

    #[cold]
    fn was_short(&mut self, party: Option<Party>) {
        if self.last >= self.probation_until {
            return;
        }
        if let Some(record) = party.and_then(|party| self.known.get_mut(&party)) {
            record.fast = record.fast.wrapping_add(1);
            if record.fast % CALLS_OF_A_PIECE == 0 {
                record.piece = record.piece.saturating_mul(2);
            }
        }
    }

    #[cold]
    fn was_long(
        &mut self,
        party: Option<Party>,
        bytes: usize,
        circuit: Option<CircuitId>,
        took: Duration,
    ) {
        let now = self.last;
        let processor = self.clock.processor();
        let before = self.both.replace((now, processor));
        let Some((at, had)) = before else {
            self.alert_until = Some(now + ALERT);
            return;
        };
        let without = (now - at).saturating_sub(processor.saturating_sub(had));
        let used = took.saturating_sub(without);
        let excess = used.saturating_sub(allowed(bytes));
        match party {
            Some(party) if !excess.is_zero() => self.charge(party, circuit, excess),
            other => self.was_short(other),
        }
    }

    fn charge(&mut self, party: Party, circuit: Option<CircuitId>, excess: Duration) {
        let now = self.last;
        self.alert_until = Some(now + ALERT);
        if !self.known.contains_key(&party) {
            self.make_room();
        }
        let is_exempt = self.is_own_or_root(party);
        let record = self.known.entry(party).or_default();
        if now >= record.ends() + MEMORY {
            *record = Record::default();
        }
        (record.piece, record.fast) = (FIRST_PIECE, 0);
        if !record.probation.lasts(now) {
            // What else it did in the call may have been anything: the next ones count.
            record.probation.begin(now);
            self.probation_until = self.probation_until.max(record.ends());
            return;
        }
        let was_barred = record.bar.lasts(now);
        if !record.owe(now, excess) && !was_barred {
            return;
        }
        // It is paid off like any other: a peer that is slow again soon after is barred sooner.
        record.debt = MOST_DEBT;
        if !was_barred {
            record.bar.begin(now);
            record.probation.until = record.ends();
            self.probation_until = self.probation_until.max(record.ends());
        }
        self.overruns.push(Overrun {
            party,
            circuit,
            barred: !is_exempt,
        });
    }

    /// Forgets who would be forgotten first.
    fn make_room(&mut self) {
        if self.known.len() < MAX_PARTIES {
            return;
        }
        let first = self.known.iter().min_by_key(|(_, record)| record.ends());
        if let Some(party) = first.map(|(party, _)| *party) {
            self.known.remove(&party);
        }
    }

    fn is_own_or_root(&self, party: Party) -> bool {
        matches!(party, Party::User(user) if user == 0 && self.own_user.is_some() || Some(user) == self.own_user)
    }

    /// Whether calls on this party's sockets are to use our own memory.
    pub(crate) fn is_on_probation(&self, party: Option<Party>) -> bool {
        self.record(party)
            .is_some_and(|record| record.probation.lasts(self.last))
    }

    /// Whether this party's sockets are to be closed on another thread: a call was slow that was measured exactly.
    pub(crate) fn is_in_debt(&self, party: Option<Party>) -> bool {
        let record = self.record(party);
        record.is_some_and(|record| record.probation.lasts(self.last) && !record.debt.is_zero())
    }

    /// How many bytes the next call on a socket of this party may move.
    pub(crate) fn piece(&self, party: Option<Party>) -> usize {
        match self.record(party) {
            Some(record) if record.probation.lasts(self.last) => record.piece,
            _ => usize::MAX,
        }
    }

    /// Whether this party gets no circuits.
    pub(crate) fn is_barred(&self, party: Option<Party>) -> bool {
        let barred = self
            .record(party)
            .is_some_and(|record| record.bar.lasts(self.last));
        barred && !party.is_some_and(|party| self.is_own_or_root(party))
    }

    /// What is known of a party, unless nothing can follow from it now.
    fn record(&self, party: Option<Party>) -> Option<&Record> {
        match self.last < self.probation_until {
            true => self.known.get(&party?),
            false => None,
        }
    }

    /// Whether a party has been found too slow.
    #[inline]
    pub(crate) fn has_overrun(&self) -> bool {
        !self.overruns.is_empty()
    }

    /// A party that has been found too slow since this was last asked for.
    pub(crate) fn take_overrun(&mut self) -> Option<Overrun> {
        self.overruns.pop()
    }

    /// A line is gone, whose number another may get.
    pub(crate) fn forget_line(&mut self, line: LineId) {
        self.known.retain(|party, _| !party.is_of(line));
    }
}

#[cfg(test)]
mod tests;
