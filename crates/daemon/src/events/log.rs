//! The ring of events, and where each reader is in it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use api::{Event, EventDetails, EventKind, Refusal, Unanswered};
use jiff::Timestamp;
use tokio::sync::{Notify, watch};
use tokio::time::sleep;

use super::allowance::Allowances;
use super::places::Places;
use super::reader::EventReader;
use super::refusals::{Call, Refusals};
use super::silence::SilentAgents;
use hostside::audit::AuditDecision;
use runtime::places::{NoPlace, Whose};
use runtime::rate;

/// The most events that are kept. Of older ones only their number is known.
pub const MAX_EVENTS: usize = 4096;

/// The longest text of an event, in bytes. What is longer is cut.
pub const MAX_TEXT_LEN: usize = 1024;

/// Where events are sent and read. Clones are the same.
#[derive(Debug, Clone)]
pub struct Events {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    log: Mutex<Log>,
    refusals: Mutex<Refusals>,
    /// Locked before the log.
    allowances: Mutex<Allowances>,
    /// That an event is held which a VM has caused beyond its allowance.
    is_held: Notify,
    /// Changes with each event for as long as there are readers.
    changed: watch::Sender<()>,
}

/// What a reader asks for.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Asked {
    /// Only what came after the event of this number.
    pub after: Option<u64>,
    /// Of what is kept already at most so many, the latest.
    pub last: Option<usize>,
    /// Only what a VM of this full name has to do with.
    pub vm: Option<String>,
    /// Only of these kinds; of none in particular, of all.
    pub kinds: Vec<EventKind>,
    /// Goes on when all that is kept has been shown.
    pub follow: bool,
}

impl Asked {
    pub(super) fn wants(&self, event: &Kept) -> bool {
        let of_kind = self.kinds.is_empty() || self.kinds.contains(&event.kind);
        let vm = self.vm.as_deref();
        of_kind && vm.is_none_or(|vm| event.details.is_about(vm))
    }
}

/// An event as it is kept.
#[derive(Debug)]
pub(super) struct Kept {
    pub(super) id: u64,
    time: SystemTime,
    kind: EventKind,
    details: EventDetails,
}

impl Kept {
    pub(super) fn to_event(&self) -> Event {
        Event {
            id: self.id,
            time: rfc_3339(self.time),
            kind: self.kind,
            details: self.details.clone(),
        }
    }
}

#[derive(Debug)]
struct Log {
    ring: VecDeque<Arc<Kept>>,
    first_id: u64,
    next_id: u64,
    places: Places,
    dropped_readers: u64,
    silent_agents: SilentAgents,
}

/// How far a reader has come.
#[derive(Debug)]
pub(super) enum Position {
    /// It follows, and has the place of this number.
    Followed(u64),
    /// It ends before the event `end`, and knows itself that `given` was the last that it was given or has passed over. It takes no place from those who
    /// follow, and is found to be late only when it asks.
    Alone { given: u64, end: u64 },
}

/// What there is for a reader.
#[derive(Debug)]
pub(super) enum Next {
    /// Events, in order. There may be none that it wants.
    Events(Vec<Arc<Kept>>),
    /// Nothing until there is more.
    Nothing,
    /// All that it wanted it has.
    End,
    /// It was dropped, and has missed so many.
    Dropped(u64),
}

impl Default for Events {
    fn default() -> Events {
        Events::beginning_at(SystemTime::now())
    }
}

impl Events {
    /// Events of a daemon that was started then.
    pub fn beginning_at(start: SystemTime) -> Events {
        let since = start.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
        let first_id = (since.as_millis() as u64) << 10;
        let log = Log {
            ring: VecDeque::new(),
            first_id,
            next_id: first_id,
            places: Places::default(),
            dropped_readers: 0,
            silent_agents: SilentAgents::default(),
        };
        Events {
            shared: Arc::new(Shared {
                log: Mutex::new(log),
                refusals: Mutex::default(),
                allowances: Mutex::default(),
                is_held: Notify::new(),
                changed: watch::Sender::new(()),
            }),
        }
    }

    /// Reports what has happened. Never waits for a reader.
    pub fn tell(&self, kind: EventKind, details: EventDetails) {
        sys::lock(&self.shared.log).push(kind, bounded(details));
        if self.shared.changed.receiver_count() > 0 {
            self.shared.changed.send_replace(());
        }
    }

    /// Reports an event that a VM has caused, which `details` name, within its allowance. What is left out is counted, and the last of it is reported later, so
    /// that readers see the last state.
    pub fn tell_of_vm(&self, kind: EventKind, details: EventDetails) {
        let mut allowances = sys::lock(&self.shared.allowances);
        // Sent while it is locked: of one VM nothing overtakes what was held.
        match allowances.admit(kind, details, rate::now()) {
            Some((kind, details)) => self.tell(kind, details),
            None => self.shared.is_held.notify_one(),
        }
    }

    /// Reports held events when they are due. With none held it sleeps.
    pub(crate) async fn tell_held(self) {
        loop {
            self.shared.is_held.notified().await;
            while self.tell_due() {
                sleep(Duration::from_secs(1)).await;
            }
        }
    }

    /// Reports the held events that are due. Returns whether any are left.
    fn tell_due(&self) -> bool {
        let mut allowances = sys::lock(&self.shared.allowances);
        for (kind, details) in allowances.due(rate::now()) {
            self.tell(kind, details);
        }
        allowances.holds_any()
    }

    /// Reports a refused call, and remembers why. `told_to_readers` says whether its caller has not been refused all too often
    /// lately. `caller` and `callee` are the words by which they are asked for.
    pub fn tell_refusal(
        &self,
        call: Call<'_>,
        decision: AuditDecision,
        told_to_readers: bool,
        details: EventDetails,
    ) {
        let details = bounded(details);
        let is_denial = decision == AuditDecision::Denied;
        let now = SystemTime::now();
        self.refusals_of(|refusals| refusals.note(call, is_denial, now, &details));
        if told_to_readers {
            self.tell(EventKind::Refused, details);
        }
    }

    /// A call was put through: what failed before it is past.
    pub fn put_through(&self, call: Call<'_>) {
        self.refusals_of(|refusals| refusals.put_through(call));
    }

    /// Reports that the configuration changed: what failed before it is past.
    pub fn tell_of_change(&self, details: EventDetails) {
        self.refusals_of(Refusals::changed);
        self.tell(EventKind::PolicyChanged, details);
    }

    /// The last refusals of these callers' calls, and the last call and its time, if it failed in the last 10 minutes. One that the policy denied does not count.
    pub fn of_calls(
        &self,
        callers: &[String],
        to: &str,
        port: u32,
    ) -> (Vec<Refusal>, Option<(SystemTime, Refusal)>) {
        let calls = callers.iter().map(|from| Call {
            from: Some(from),
            to: Some(to),
            port,
        });
        let mut refusals: Vec<Refusal> = calls.flat_map(|call| self.refusals(call)).collect();
        refusals.sort_by(|one, other| other.time.cmp(&one.time));
        let now = SystemTime::now();
        let last = self.refusals_of(|known| known.last_failure(callers, (to, port), now));
        (refusals, last)
    }

    #[cfg(test)]
    pub(super) fn last_failure(&self, call: Call<'_>) -> Option<Refusal> {
        let callers = [call.from.unwrap_or_default().to_owned()];
        let (_, last) = self.of_calls(&callers, call.to.unwrap_or_default(), call.port);
        last.map(|(_, refusal)| refusal)
    }

    /// The last refusals of a call, the latest first. Without a caller or a callee, of any.
    pub fn refusals(&self, call: Call<'_>) -> Vec<Refusal> {
        self.refusals_of(|refusals| refusals.of(call))
    }

    /// An event that is not kept, with the number of the last one.
    pub(super) fn now(&self, kind: EventKind, details: EventDetails) -> Event {
        Event {
            id: sys::lock(&self.shared.log).next_id - 1,
            time: rfc_3339(SystemTime::now()),
            kind,
            details,
        }
    }

    /// How the last caller of this VM's agent waited in vain, if it did.
    pub fn unanswered(&self, vm: &str) -> Option<Unanswered> {
        sys::lock(&self.shared.log).silent_agents.of(vm)
    }

    /// How many readers were dropped.
    pub fn dropped_readers(&self) -> u64 {
        sys::lock(&self.shared.log).dropped_readers
    }

    /// How many events there were, and how many readers there are.
    pub fn counts(&self) -> (u64, usize) {
        let log = sys::lock(&self.shared.log);
        (log.next_id - log.first_id, log.places.len())
    }

    /// A reader, and what it has to get first if it asked for events that are not known.
    ///
    /// # Errors
    /// [`NoPlace`], for a follower.
    pub fn read(
        &self,
        asked: Asked,
        whose: Whose,
    ) -> Result<(EventReader, Option<Event>), NoPlace> {
        let mut log = sys::lock(&self.shared.log);
        let (mut given, lost) = log.begin(asked.after);
        if let Some(last) = asked.last {
            let wanted = log.ring.iter().rev().filter(|event| asked.wants(event));
            let from = match last {
                0 => log.next_id,
                _ => wanted
                    .take(last)
                    .last()
                    .map_or(log.next_id, |event| event.id),
            };
            given = given.max(from - 1);
        }
        let end = log.next_id;
        let position = match asked.follow {
            true => Position::Followed(log.places.enter(whose, given)?),
            false => Position::Alone { given, end },
        };
        drop(log);
        let changed = self.shared.changed.subscribe();
        let reader = EventReader::new(self.clone(), position, asked, changed);
        Ok((reader, lost))
    }

    /// Up to `limit` events for a reader. It counts as having been given them.
    pub(super) fn next(&self, position: &mut Position, asked: &Asked, limit: usize) -> Next {
        let mut log = sys::lock(&self.shared.log);
        let oldest = log.oldest();
        let Log { ring, places, .. } = &mut *log;
        let (given, end) = match position {
            Position::Followed(number) => match places.find(*number) {
                None => return Next::Dropped(0),
                Some(place) => match place.missed {
                    Some(missed) => return Next::Dropped(missed),
                    None => (&mut place.given, u64::MAX),
                },
            },
            Position::Alone { given, end } if *given + 1 >= *end => return Next::End,
            Position::Alone { given, end } if *given + 1 < oldest => {
                let missed = *end - 1 - *given;
                log.dropped_readers += 1;
                drop(log);
                self.tell(EventKind::ReaderDropped, dropped(missed));
                return Next::Dropped(missed);
            }
            Position::Alone { given, end } => (given, *end),
        };
        let first = ring.partition_point(|event| event.id <= *given);
        if first == ring.len() {
            return Next::Nothing;
        }
        let mut events = Vec::new();
        for event in ring.range(first..) {
            if events.len() == limit || event.id >= end {
                break;
            }
            *given = event.id;
            if asked.wants(event) {
                events.push(event.clone());
            }
        }
        Next::Events(events)
    }

    /// The reader that had this place has gone.
    pub(super) fn leave(&self, number: u64) {
        sys::lock(&self.shared.log).places.leave(number);
    }

    fn refusals_of<T>(&self, job: impl FnOnce(&mut Refusals) -> T) -> T {
        job(&mut sys::lock(&self.shared.refusals))
    }
}

impl Log {
    fn push(&mut self, kind: EventKind, details: EventDetails) {
        self.add(kind, details);
        // A dropped reader is an event too, which may push another reader out; there are few readers.
        while let Some(dropped) = self.drop_one() {
            self.add(EventKind::ReaderDropped, dropped);
        }
    }

    fn add(&mut self, kind: EventKind, details: EventDetails) {
        if self.ring.len() == MAX_EVENTS {
            self.ring.pop_front();
        }
        let time = SystemTime::now();
        self.silent_agents.note(kind, &details, time);
        let event = Kept {
            id: self.next_id,
            time,
            kind,
            details,
        };
        self.next_id += 1;
        self.ring.push_back(Arc::new(event));
    }

    /// Drops a reader that missed an event of the ring.
    fn drop_one(&mut self) -> Option<EventDetails> {
        let late = self.places.late(self.oldest())?;
        let missed = self.next_id - 1 - late.given;
        late.missed = Some(missed);
        self.dropped_readers += 1;
        Some(dropped(missed))
    }

    /// The first event that is kept, or the next one if there is none.
    fn oldest(&self) -> u64 {
        self.ring.front().map_or(self.next_id, |event| event.id)
    }

    /// Where a reader begins that saw the event of this number, and what is lost to it.
    fn begin(&self, after: Option<u64>) -> (u64, Option<Event>) {
        let before = self.oldest() - 1;
        let Some(after) = after else {
            return (before, None);
        };
        let lost = |count, reason: &str| Event {
            id: before,
            time: rfc_3339(SystemTime::now()),
            kind: EventKind::Lost,
            details: EventDetails {
                count,
                reason: Some(reason.to_owned()),
                ..EventDetails::default()
            },
        };
        if after + 1 < self.first_id || after >= self.next_id {
            let reason = "that event is from before the daemon was restarted, and is not kept";
            return (before, Some(lost(None, reason)));
        }
        if after < before {
            let reason = format!("only the last {MAX_EVENTS} events are kept");
            return (before, Some(lost(Some(before - after), &reason)));
        }
        (after, None)
    }
}

/// The log of a reader that was dropped.
fn dropped(missed: u64) -> EventDetails {
    EventDetails {
        count: Some(missed),
        reason: Some("the reader was too slow".to_owned()),
        ..EventDetails::default()
    }
}

fn bounded(mut details: EventDetails) -> EventDetails {
    let texts = [
        &mut details.vm,
        &mut details.from,
        &mut details.to,
        &mut details.reached,
        &mut details.rule,
        &mut details.reason,
    ];
    for text in texts.into_iter().flatten() {
        let mut end = MAX_TEXT_LEN.min(text.len());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        text.truncate(end);
    }
    details
}

/// A time as RFC 3339 has it, in UTC and to the microsecond.
pub(crate) fn rfc_3339(time: SystemTime) -> String {
    // Fails only for times some thousand years away, which a broken clock may show.
    let timestamp = Timestamp::try_from(time).unwrap_or(Timestamp::MAX);
    format!("{timestamp:.6}")
}
