//! How many events a VM may cause: so that none pushes those of all others out of the ring.

use std::collections::HashMap;
use std::time::Duration;

use api::{EventDetails, EventKind};

use policy::{Time, TokenBucket};

/// Events at once, and seconds until as many may be sent again: one each second in the long run.
pub(super) const EVENTS: u64 = 100;

/// Of each VM, by the name that its events have.
#[derive(Debug, Default)]
pub(super) struct Allowances {
    by_vm: HashMap<String, Allowance>,
}

#[derive(Debug)]
struct Allowance {
    bucket: TokenBucket,
    /// The last event that was left out, with the number of those before it that were.
    held: Option<(EventKind, EventDetails)>,
}

impl Allowances {
    /// The event, if it may be sent now. Else it is held, in the place of another one of the VM.
    pub(super) fn admit(
        &mut self,
        kind: EventKind,
        mut details: EventDetails,
        now: Time,
    ) -> Option<(EventKind, EventDetails)> {
        let vm = details.vm.clone().unwrap_or_default();
        if !self.by_vm.contains_key(&vm) {
            // A new one makes room: the table never outgrows the VMs that caused events lately.
            self.by_vm
                .retain(|_, one| one.held.is_some() || !one.bucket.is_full(now));
        }
        let one = self.by_vm.entry(vm).or_insert_with(|| Allowance {
            bucket: TokenBucket::new(1, Duration::from_secs(EVENTS)),
            held: None,
        });
        if let Some((_, held)) = one.held.take() {
            details.left_out = Some(held.left_out.unwrap_or_default() + 1);
        }
        if one.bucket.take(now) {
            return Some((kind, details));
        }
        one.held = Some((kind, details));
        None
    }

    /// The held events that may be reported now: readers see the last state, and how many events were left out.
    pub(super) fn due(&mut self, now: Time) -> Vec<(EventKind, EventDetails)> {
        let held = self.by_vm.values_mut().filter(|one| one.held.is_some());
        let due = held.filter_map(|one| match one.bucket.take(now) {
            true => one.held.take(),
            false => None,
        });
        due.collect()
    }

    /// Whether anything is held.
    pub(super) fn holds_any(&self) -> bool {
        self.by_vm.values().any(|one| one.held.is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_vm_has_its_events_and_no_more_and_takes_none_of_others() {
        let mut allowances = Allowances::default();
        let now = SECOND;
        let mut tell = |vm: &str, now| {
            let details = EventDetails::of_vm(vm);
            allowances.admit(EventKind::LineUp, details, now)
        };
        let told = (0..3 * EVENTS).filter(|_| tell("web", now).is_some());
        assert_eq!(told.count() as u64, EVENTS);
        assert!(tell("db", now).is_some());
        // The next one that is sent says how many were not.
        let (_, details) = tell("web", now + SECOND).unwrap();
        assert_eq!(details.left_out, Some(2 * EVENTS));
        assert_eq!(tell("db", now + SECOND).unwrap().1.left_out, None);
    }

    #[test]
    fn the_last_event_is_told_in_the_end_with_the_number_of_those_that_were_not() {
        let mut allowances = Allowances::default();
        let now = SECOND;
        for _ in 0..EVENTS + 7 {
            allowances.admit(EventKind::LineUp, EventDetails::of_vm("web"), now);
        }
        allowances.admit(EventKind::LineDown, EventDetails::of_vm("web"), now);
        assert!(allowances.due(now).is_empty() && allowances.holds_any());
        let due = allowances.due(now + SECOND);
        let [(kind, details)] = due.as_slice() else {
            panic!("{due:?}")
        };
        assert_eq!((*kind, details.left_out), (EventKind::LineDown, Some(7)));
        assert!(!allowances.holds_any());
        assert!(allowances.due(now + 2 * SECOND).is_empty());
    }

    #[test]
    fn vms_that_caused_nothing_lately_are_forgotten() {
        let mut allowances = Allowances::default();
        let mut now = SECOND;
        for number in 0..50 {
            let details = EventDetails::of_vm(format!("vm{number}"));
            assert!(allowances.admit(EventKind::LineUp, details, now).is_some());
            now += 2 * SECOND;
        }
        assert_eq!(allowances.by_vm.len(), 1);
    }
}
