//! How many of something there are at once, and no more.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

/// Counts permits that have been given and not yet dropped.
#[derive(Debug, Clone, Default)]
pub(crate) struct Counter(Arc<AtomicU32>);

/// Some of those that are counted. Dropping it makes room for as many.
#[derive(Debug)]
pub(crate) struct Permit {
    counter: Arc<AtomicU32>,
    units: u32,
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.counter.fetch_sub(self.units, Ordering::Relaxed);
    }
}

impl Counter {
    /// A permit for so many, if no more than `limit` are out then.
    fn take(&self, units: u32, limit: u32) -> Option<Permit> {
        let taken = self
            .0
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
                count.checked_add(units).filter(|count| *count <= limit)
            });
        taken.ok().map(|_| Permit {
            counter: self.0.clone(),
            units,
        })
    }

    /// How many permits are out.
    pub(crate) fn count(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }
}

/// A counter for each holder: a VM by its full name, or a caller.
#[derive(Debug, Default)]
pub(crate) struct Counters(Mutex<HashMap<String, Counter>>);

impl Counters {
    /// A permit for a holder if fewer than `limit` of its own are out.
    pub(crate) fn take(&self, holder: &str, limit: u32) -> Option<Permit> {
        self.take_many(holder, 1, limit)
    }

    fn take_many(&self, holder: &str, units: u32, limit: u32) -> Option<Permit> {
        let mut counters = sys::lock(&self.0);
        if let Some(counter) = counters.get(holder) {
            return counter.take(units, limit);
        }
        // A new holder pays for those that are gone, so that the table never outgrows those that hold something.
        counters.retain(|_, counter| counter.count() > 0);
        let counter = counters.entry(holder.to_owned()).or_default();
        counter.take(units, limit)
    }
}

/// Capacity that holders share, none of which may have all of it.
#[derive(Debug, Default)]
pub(crate) struct Capacity {
    all: Counter,
    by_holder: Counters,
}

/// Room that a holder has. Dropping it gives it back.
#[derive(Debug)]
pub(crate) struct Room {
    _of_all: Permit,
    _of_holder: Permit,
}

/// Why there is no room.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// All of it is taken.
    Full,
    /// The holder has its share.
    Share,
}

impl Capacity {
    /// Room for one more of a holder, of `limit` in all and `share` of its own.
    pub(crate) fn take(&self, holder: &str, limit: u32, share: u32) -> Result<Room, NoRoom> {
        self.take_many(holder, 1, limit, share)
    }

    /// The same for so many units.
    pub(crate) fn take_many(
        &self,
        holder: &str,
        units: u32,
        limit: u32,
        share: u32,
    ) -> Result<Room, NoRoom> {
        let of_all = self.all.take(units, limit).ok_or(NoRoom::Full)?;
        let of_holder = self.by_holder.take_many(holder, units, share);
        Ok(Room {
            _of_all: of_all,
            _of_holder: of_holder.ok_or(NoRoom::Share)?,
        })
    }
}

/// Capacity that VMs share. Of what a VM may have, its ordinary programs leave a part to those that are privileged.
#[derive(Debug, Default)]
pub(crate) struct GuestCapacity {
    by_vm: Capacity,
    of_ordinary: Arc<Counters>,
}

/// The part of its VM's share that is for privileged programs alone: one in so many.
const PRIVILEGED_PART: u32 = 4;

/// Room that a program of a VM has.
#[derive(Debug)]
pub(crate) struct GuestRoom {
    _of_vm: Room,
    of_ordinary: Option<Permit>,
    vm: String,
    /// What ordinary programs of the VM may have, and have.
    share: u32,
    ordinary: Arc<Counters>,
}

impl GuestRoom {
    /// Whether it is a privileged program's.
    pub(crate) fn is_privileged(&self) -> bool {
        self.of_ordinary.is_none()
    }

    /// Counts it as an ordinary program's from now on.
    pub(crate) fn be_ordinary(&mut self) -> Result<(), NoRoom> {
        if self.of_ordinary.is_none() {
            let permit = self.ordinary.take(&self.vm, self.share);
            self.of_ordinary = Some(permit.ok_or(NoRoom::Share)?);
        }
        Ok(())
    }
}

impl GuestCapacity {
    /// Room for one more of a VM, as [`Capacity::take`] has it.
    pub(crate) fn take(
        &self,
        vm: &str,
        limit: u32,
        share: u32,
        is_privileged: bool,
    ) -> Result<GuestRoom, NoRoom> {
        let mut room = GuestRoom {
            _of_vm: self.by_vm.take(vm, limit, share)?,
            of_ordinary: None,
            vm: vm.to_owned(),
            share: share - share / PRIVILEGED_PART,
            ordinary: self.of_ordinary.clone(),
        };
        if !is_privileged {
            room.be_ordinary()?;
        }
        Ok(room)
    }
}

/// A capacity for each of many wholes, such as the agents of VMs.
#[derive(Debug, Default)]
pub(crate) struct Capacities {
    wholes: Counters,
    by_holder: Counters,
}

impl Capacities {
    /// Room for one more of a holder in a whole, as [`Capacity::take`] has it.
    pub(crate) fn take(
        &self,
        whole: &str,
        holder: &str,
        limit: u32,
        share: u32,
    ) -> Result<Room, NoRoom> {
        let of_all = self.wholes.take(whole, limit).ok_or(NoRoom::Full)?;
        let holder = format!("{whole} {holder}");
        let of_holder = self.by_holder.take(&holder, share);
        Ok(Room {
            _of_all: of_all,
            _of_holder: of_holder.ok_or(NoRoom::Share)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permits_are_given_up_to_the_limit_and_come_back() {
        let counter = Counter::default();
        assert!(counter.take(1, 0).is_none());
        let first = counter.take(1, 2);
        let second = counter.take(1, 2);
        assert!(first.is_some() && second.is_some());
        assert!(counter.take(1, 2).is_none());
        assert_eq!(counter.count(), 2);
        drop(first);
        assert!(counter.take(1, 2).is_some());
    }

    #[test]
    fn units_are_taken_and_come_back_together() {
        let counter = Counter::default();
        assert!(counter.take(3, 2).is_none());
        assert!(counter.take(u32::MAX, u32::MAX).is_some());
        let two = counter.take(2, 2);
        assert!(two.is_some() && counter.take(1, 2).is_none());
        drop(two);
        assert_eq!(counter.count(), 0);
    }

    #[test]
    fn ordinary_programs_leave_a_part_of_their_vms_share() {
        let capacity = GuestCapacity::default();
        let take = |is_privileged| capacity.take("web", 100, 4, is_privileged);
        let ordinary: Vec<_> = (0..3).map(|_| take(false)).collect();
        assert!(ordinary.iter().all(Result::is_ok));
        assert_eq!(take(false).err(), Some(NoRoom::Share));
        let privileged = take(true);
        assert!(privileged.is_ok());
        assert_eq!(take(true).err(), Some(NoRoom::Share));
        // What was taken as privileged and turns out to be ordinary has no other room.
        drop(ordinary);
        let ordinary: Vec<_> = (0..2).map(|_| take(false)).collect();
        let mut turned = privileged.expect("it was taken");
        assert_eq!(
            (turned.be_ordinary(), turned.be_ordinary()),
            (Ok(()), Ok(()))
        );
        assert_eq!(take(false).err(), Some(NoRoom::Share));
        let mut last = take(true).expect("the part of privileged ones");
        assert_eq!(last.be_ordinary(), Err(NoRoom::Share));
        drop(ordinary);
        assert_eq!(last.be_ordinary(), Ok(()));
        // Where there is one place, any may take it.
        assert!(capacity.take("db", 100, 1, false).is_ok());
    }

    #[test]
    fn each_whole_has_its_own_capacity() {
        let capacities = Capacities::default();
        let take = |whole, holder| capacities.take(whole, holder, 2, 1);
        let a = take("web", "a");
        assert!(a.is_ok());
        assert_eq!(take("web", "a").err(), Some(NoRoom::Share));
        let b = take("web", "b");
        assert!(b.is_ok());
        assert_eq!(take("web", "c").err(), Some(NoRoom::Full));
        assert!(take("db", "a").is_ok());
    }

    #[test]
    fn a_holder_leaves_the_others_what_is_beyond_its_share() {
        let capacity = Capacity::default();
        let a = capacity.take_many("a", 5, 10, 5);
        assert!(a.is_ok());
        assert_eq!(capacity.take("a", 10, 5).err(), Some(NoRoom::Share));
        let b = capacity.take_many("b", 5, 10, 5);
        assert!(b.is_ok());
        assert_eq!(capacity.take("c", 10, 5).err(), Some(NoRoom::Full));
        drop(a);
        assert!(capacity.take("c", 10, 5).is_ok());
    }

    #[test]
    fn each_holder_has_its_own_count_and_those_that_are_gone_leave_nothing() {
        let counters = Counters::default();
        let web = counters.take("web", 1);
        assert!(web.is_some());
        assert!(counters.take("web", 1).is_none());
        assert!(counters.take("db", 1).is_some());
        drop(web);
        let third = counters.take("third", 1);
        assert!(third.is_some());
        assert_eq!(counters.0.lock().expect("not poisoned").len(), 1);
    }
}
