//! An address's user: the first one, until it falls silent.
//!
//! Learned MAC addresses and IPv6 addresses that guests have given themselves are the same to a switch. An address is the port's that
//! used it first; another gets it only when the first has not used it for the ageing time, or is gone.
//!
//! # Theory of operation
//!
//! Every port's addresses are a list in the order of their last use, through slots that never move. So a port that is at its
//! bound gives up its own oldest address at once, a port that goes takes time in proportion to its own addresses, and
//! nothing that one port does costs another anything. There is no timer: an address that is too old is one that is not there. To move an
//! address to the end of its list at each frame would cost more than the rest of the decision, so that is done
//! only when the last time was a while ago ([`Owners::coarse`]).
//!
//! Routers' addresses, which [`Owners::keep`] names, are in a list of their own, of [`KEPT_MAX`] at most: however many other addresses are used behind
//! that port, none takes their place. So are, behind uplinks, those that were used again a while after the first time, up to [`Bound::known`]: a flood of addresses that are
//! used once pushes out no host that goes on speaking. One of these makes room only when it is too old.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use foldhash::fast::FixedState;
use policy::Time;
use slab::Slab;

use super::PortId;

/// The end of a list.
const NONE: u32 = u32::MAX;

/// The most addresses that are kept for a port. A link has a router or two.
const KEPT_MAX: u32 = 16;

/// The lists of a port's addresses: those that are used, those of hosts that are known to go on speaking, and those that are kept.
const USED: usize = 0;
const KNOWN: usize = 1;
const KEPT: usize = 2;

/// How many addresses a port may have.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bound {
    /// All together, at least one.
    pub(super) max: u16,
    /// Those that were used more than once and make no room for others.
    pub(super) known: u16,
}

#[derive(Debug)]
pub(super) struct Owners<K> {
    slots: Slab<Slot<K>>,
    by_key: HashMap<K, u32, FixedState>,
    /// By the port's number.
    lists: Vec<[List; 3]>,
    ageing: Duration,
    /// How much too old the time of an address' last use may be.
    coarse: Duration,
    /// Addresses whose owner may have changed, if that is recorded.
    changed: Option<Vec<K>>,
}

#[derive(Debug)]
struct Slot<K> {
    key: K,
    port: PortId,
    since: Time,
    seen: Time,
    /// Until when it is the port's also if it is not seen.
    kept: Time,
    /// Which of its port's lists it is in.
    list: usize,
    asked: Option<Time>,
    older: u32,
    newer: u32,
}

impl<K> Slot<K> {
    #[inline]
    fn is_held(&self, now: Time, ageing: Duration) -> bool {
        now.saturating_sub(self.seen) < ageing || now < self.kept
    }
}

#[derive(Debug, Clone, Copy)]
struct List {
    oldest: u32,
    newest: u32,
    count: u32,
}

const EMPTY: List = List {
    oldest: NONE,
    newest: NONE,
    count: 0,
};

fn count_of(lists: &[List; 3]) -> u32 {
    lists.iter().map(|list| list.count).sum()
}

/// What became of a wish to use an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Claim {
    /// It is the port's.
    Own,
    /// It is another's.
    Taken,
}

/// An address's owner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    pub(super) port: PortId,
    /// Since when; or when it asked last whether another has the address.
    pub(super) since: Time,
    /// When those behind uplinks were first asked whether one of them has it.
    pub(super) asked: Option<Time>,
}

/// An address in use.
#[derive(Debug, Clone, Copy)]
pub(super) struct Owned<K> {
    pub(super) key: K,
    pub(super) port: PortId,
    pub(super) age: Duration,
}

impl<K: Copy + Eq + Hash> Owners<K> {
    pub(super) fn new(seed: u64, ageing: Duration) -> Owners<K> {
        Owners {
            slots: Slab::new(),
            by_key: HashMap::with_hasher(FixedState::with_seed(seed)),
            lists: Vec::new(),
            ageing,
            coarse: (ageing / 8).min(Duration::from_secs(1)),
            changed: None,
        }
    }

    pub(super) fn record_changes(&mut self) {
        self.changed.get_or_insert_default();
    }

    pub(super) fn take_changed(&mut self) -> Vec<K> {
        self.changed
            .as_mut()
            .map(std::mem::take)
            .unwrap_or_default()
    }

    fn note(&mut self, key: K) {
        if let Some(changed) = &mut self.changed {
            changed.push(key);
        }
    }

    /// An owner, and how long it is kept.
    pub(super) fn user(&self, now: Time, key: K) -> Option<(PortId, Duration)> {
        let slot = &self.slots[*self.by_key.get(&key)? as usize];
        let kept = slot.kept.saturating_sub(now);
        self.is_held(now, slot).then_some((slot.port, kept))
    }

    /// How many addresses a port has, of those also that are too old.
    pub(super) fn count(&self, port: PortId) -> u32 {
        self.lists.get(usize::from(port.0)).map_or(0, count_of)
    }

    /// An address's owner.
    #[inline]
    pub(super) fn owner(&self, now: Time, key: K) -> Option<Owner> {
        let slot = &self.slots[*self.by_key.get(&key)? as usize];
        self.is_held(now, slot).then_some(Owner {
            port: slot.port,
            since: slot.since,
            asked: slot.asked,
        })
    }

    #[inline]
    fn is_held(&self, now: Time, slot: &Slot<K>) -> bool {
        slot.is_held(now, self.ageing)
    }

    /// An address that is `port`'s stays so until then, also if it is not seen, and makes room for no other. While [`KEPT_MAX`] are kept, a further
    /// one makes room as all others do.
    pub(super) fn keep(&mut self, now: Time, key: K, port: PortId, until: Time) {
        let Some(slot) = self.slot_of(key, port) else {
            return;
        };
        slot.kept = until;
        let was_kept = slot.list == KEPT;
        self.note(key);
        let index = self.by_key[&key];
        if !was_kept && until > now {
            self.release(now, port);
        }
        let has_room = was_kept || self.lists[usize::from(port.0)][KEPT].count < KEPT_MAX;
        match until > now && has_room {
            true => self.put(index, KEPT),
            false if was_kept => self.put(index, USED),
            false => {}
        }
    }

    /// Keeps those of a port's addresses no longer whose time is over.
    fn release(&mut self, now: Time, port: PortId) {
        let mut next = self.lists[usize::from(port.0)][KEPT].oldest;
        while next != NONE {
            let index = next;
            let slot = &self.slots[index as usize];
            next = slot.newer;
            if slot.kept <= now {
                self.put(index, USED);
            }
        }
    }

    /// Puts a slot at the new end of one of its port's lists.
    fn put(&mut self, index: u32, list: usize) {
        self.unlink(index);
        self.slots[index as usize].list = list;
        self.link(index);
    }

    /// `port` asks whether another has an address that is its own, as if it were new.
    pub(super) fn renew(&mut self, now: Time, key: K, port: PortId) {
        if let Some(slot) = self.slot_of(key, port) {
            slot.since = now;
        }
    }

    /// Those behind uplinks have been asked whether one of them has an address that is `port`'s.
    pub(super) fn ask(&mut self, now: Time, key: K, port: PortId) {
        if let Some(slot) = self.slot_of(key, port) {
            slot.asked.get_or_insert(now);
        }
    }

    fn slot_of(&mut self, key: K, port: PortId) -> Option<&mut Slot<K>> {
        let index = self.by_key.get(&key)?;
        let slot = self.slots.get_mut(*index as usize)?;
        (slot.port == port).then_some(slot)
    }

    /// `port` wants an address, and may have so many.
    pub(super) fn claim(&mut self, now: Time, key: K, port: PortId, bound: Bound) -> Claim {
        match self.owner(now, key) {
            Some(owner) if owner.port != port => Claim::Taken,
            _ => {
                self.take(now, key, port, bound);
                Claim::Own
            }
        }
    }

    /// `port` gets an address, also from another port, or uses it once more.
    #[inline]
    pub(super) fn take(&mut self, now: Time, key: K, port: PortId, bound: Bound) {
        let Some(index) = self.by_key.get(&key).copied() else {
            return self.insert(now, key, port, bound);
        };
        let slot = &self.slots[index as usize];
        if slot.port != port {
            self.remove(index);
            return self.insert(now, key, port, bound);
        }
        if now.saturating_sub(slot.seen) < self.coarse {
            return;
        }
        let is_held = self.is_held(now, slot);
        let slot = &mut self.slots[index as usize];
        // No port has taken it meanwhile: what was asked before still holds.
        if !is_held {
            slot.since = now;
        }
        slot.seen = now;
        let before = slot.list;
        let list = match before {
            USED if is_held && self.has_room_among_known(now, port, bound) => KNOWN,
            KNOWN if !is_held => USED,
            _ => before,
        };
        self.put(index, list);
    }

    /// Whether one more of a port's addresses can be known. The oldest makes room if it is too old.
    fn has_room_among_known(&mut self, now: Time, port: PortId, bound: Bound) -> bool {
        let count = self.lists[usize::from(port.0)][KNOWN].count;
        count < u32::from(bound.known) || self.remove_silent(now, port)
    }

    /// Removes the oldest of a port's known addresses if it is too old. Says whether it was.
    fn remove_silent(&mut self, now: Time, port: PortId) -> bool {
        let oldest = self.lists[usize::from(port.0)][KNOWN].oldest;
        let is_silent = oldest != NONE && !self.is_held(now, &self.slots[oldest as usize]);
        if is_silent {
            self.remove(oldest);
        }
        is_silent
    }

    fn insert(&mut self, now: Time, key: K, port: PortId, bound: Bound) {
        let number = usize::from(port.0);
        if self.lists.len() <= number {
            self.lists.resize(number + 1, [EMPTY; 3]);
        }
        let is_full = count_of(&self.lists[number]) >= u32::from(bound.max);
        if is_full && !self.remove_silent(now, port) {
            self.remove_oldest(port);
        }
        // Far below 2^32: the network's bound is a number of 32 bits, and reserved.
        let index = self.slots.insert(Slot {
            key,
            port,
            since: now,
            seen: now,
            kept: Time::ZERO,
            list: USED,
            asked: None,
            older: NONE,
            newer: NONE,
        }) as u32;
        self.by_key.insert(key, index);
        self.link(index);
        self.note(key);
    }

    /// Forgets all addresses of a port.
    pub(super) fn forget(&mut self, port: PortId) {
        while self.remove_oldest(port) {}
    }

    /// Removes the address of a port that has been out of use for longest, one that is known or kept only if there is no other. Says whether there was one.
    fn remove_oldest(&mut self, port: PortId) -> bool {
        let lists = self.lists.get(usize::from(port.0)).into_iter().flatten();
        let oldest = lists.map(|list| list.oldest).find(|oldest| *oldest != NONE);
        oldest.map(|oldest| self.remove(oldest)).is_some()
    }

    /// Forgets the addresses that are meant, of every port. Takes time in proportion to all there are.
    pub(super) fn forget_keys(&mut self, is_meant: impl Fn(&K) -> bool) {
        self.forget_slots(|slot| is_meant(&slot.key));
    }

    /// Leaves a port those of its addresses that are meant, `max` of them at most: its oldest ones go first. Takes time in proportion to
    /// all there are.
    pub(super) fn retain(
        &mut self,
        now: Time,
        port: PortId,
        max: u16,
        is_meant: impl Fn(&K) -> bool,
    ) {
        let ageing = self.ageing;
        let stays = |slot: &Slot<K>| slot.is_held(now, ageing) && is_meant(&slot.key);
        self.forget_slots(|slot| slot.port == port && !stays(slot));
        while self.count(port) > max.into() {
            self.remove_oldest(port);
        }
    }

    fn forget_slots(&mut self, is_meant: impl Fn(&Slot<K>) -> bool) {
        let meant: Vec<u32> = self
            .by_key
            .values()
            .copied()
            .filter(|index| is_meant(&self.slots[*index as usize]))
            .collect();
        meant.into_iter().for_each(|index| self.remove(index));
    }

    /// All addresses that are not too old, in no order.
    pub(super) fn iter(&self, now: Time) -> impl Iterator<Item = Owned<K>> + '_ {
        let slots = self.slots.iter().map(|(_, slot)| slot);
        let held = slots.filter(move |slot| self.is_held(now, slot));
        held.map(move |slot| Owned {
            key: slot.key,
            port: slot.port,
            age: now.saturating_sub(slot.seen),
        })
    }

    fn remove(&mut self, index: u32) {
        self.unlink(index);
        let slot = self.slots.remove(index as usize);
        self.by_key.remove(&slot.key);
        self.note(slot.key);
    }

    /// Puts a slot at the new end of its list.
    fn link(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        let list = &mut self.lists[usize::from(slot.port.0)][slot.list];
        (slot.older, slot.newer) = (list.newest, NONE);
        let older = slot.older;
        list.newest = index;
        list.count += 1;
        match older {
            NONE => list.oldest = index,
            _ => self.slots[older as usize].newer = index,
        }
    }

    fn unlink(&mut self, index: u32) {
        let slot = &self.slots[index as usize];
        let (older, newer) = (slot.older, slot.newer);
        let list = &mut self.lists[usize::from(slot.port.0)][slot.list];
        list.count -= 1;
        match older {
            NONE => list.oldest = newer,
            _ => self.slots[older as usize].newer = newer,
        }
        match newer {
            NONE => list.newest = older,
            _ => self.slots[newer as usize].older = older,
        }
    }
}
