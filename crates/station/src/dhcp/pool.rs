//! Addresses for guests that are not on the list.
//!
//! One slot for each address, so the pool cannot grow. A guest gets the address that it had, else the one that it asks for, else a free one, searched
//! from a place that its MAC address names: so it mostly gets the same again also when the server has forgotten everything. Leases run out by
//! themselves, when somebody else needs the slot; there is no timer.

use std::collections::HashMap;
use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use wire::ethernet::MacAddress;

/// How long an offer is kept for the guest that it was made to.
const OFFER_TIME: Duration = Duration::from_secs(30);

/// How long an address that a guest found in use by another is not given out.
const DECLINED_TIME: Duration = Duration::from_secs(600);

/// What part of the pool can be declined at a time: a guest that declines everything must not take the pool from the others.
const DECLINED_SHARE: usize = 4;

/// An address of the pool that a guest has.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Lease {
    /// The address.
    pub address: Ipv4Addr,
    /// The guest's MAC address.
    pub mac: MacAddress,
    /// When it ends, if ever.
    pub until: Option<Instant>,
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum State {
    Offered,
    Bound,
    Declined,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    mac: MacAddress,
    state: State,
    /// Never, if there is none.
    until: Option<Instant>,
}

impl Entry {
    fn is_over(&self, now: Instant) -> bool {
        self.until.is_some_and(|until| until <= now)
    }
}

pub(super) struct Pool {
    first: Ipv4Addr,
    slots: Vec<Option<Entry>>,
    by_mac: HashMap<MacAddress, usize>,
    /// Until then every slot is in use, unless one is given back before: the slots are not searched for each guest that asks in vain.
    full_until: Option<Instant>,
}

impl Pool {
    /// The range was checked with the rest of the configuration.
    pub fn new(range: RangeInclusive<Ipv4Addr>) -> Self {
        let len = range.end().to_bits() - range.start().to_bits() + 1;
        Self {
            first: *range.start(),
            slots: vec![None; len as usize],
            by_mac: HashMap::new(),
            full_until: None,
        }
    }

    pub fn leases(&self, now: Instant) -> Vec<Lease> {
        let slots = self.slots.iter().enumerate();
        slots
            .filter_map(|(slot, entry)| Some((slot, entry.as_ref()?)))
            .filter(|(_, entry)| entry.state == State::Bound && !entry.is_over(now))
            .map(|(slot, entry)| Lease {
                address: self.address(slot),
                mac: entry.mac,
                until: entry.until,
            })
            .collect()
    }

    /// An address for a guest, kept for it until it has had the time to take it.
    pub fn offer(
        &mut self,
        now: Instant,
        mac: MacAddress,
        wanted: Option<Ipv4Addr>,
        is_taken: impl Fn(Ipv4Addr) -> bool,
    ) -> Option<Ipv4Addr> {
        let has = self.by_mac.get(&mac).copied();
        let slot = has
            .filter(|slot| !is_taken(self.address(*slot)))
            .or_else(|| {
                self.slot(wanted?)
                    .filter(|slot| self.is_free(*slot, now) && !is_taken(self.address(*slot)))
            })
            .or_else(|| self.find(now, mac, is_taken))?;
        let is_lease = self.slots[slot].is_some_and(|entry| {
            entry.mac == mac && entry.state == State::Bound && !entry.is_over(now)
        });
        if !is_lease {
            self.put(slot, mac, State::Offered, now.checked_add(OFFER_TIME));
        }
        Some(self.address(slot))
    }

    /// Gives a guest the address that it wants, unless another has it.
    pub fn bind(
        &mut self,
        now: Instant,
        mac: MacAddress,
        wanted: Ipv4Addr,
        lease: Duration,
    ) -> bool {
        let Some(slot) = self.slot(wanted) else {
            return false;
        };
        if self.by_mac.get(&mac) != Some(&slot) && !self.is_free(slot, now) {
            return false;
        }
        // A lease for ever is one that ends beyond the clock's range.
        self.put(slot, mac, State::Bound, now.checked_add(lease));
        true
    }

    pub fn take_back_offer(&mut self, now: Instant, mac: MacAddress) {
        self.end(now, mac, |entry| entry.state == State::Offered);
    }

    /// The guest does not need its address any more. It is remembered, so that the guest gets it again if nobody else took it meanwhile.
    pub fn release(&mut self, now: Instant, mac: MacAddress, address: Option<Ipv4Addr>) {
        let slot = address.and_then(|address| self.slot(address));
        if slot.is_some() && self.by_mac.get(&mac).copied() == slot {
            self.end(now, mac, |_| true);
        }
    }

    /// The guest found its address in use.
    pub fn decline(&mut self, now: Instant, mac: MacAddress, address: Ipv4Addr) {
        let Some(slot) = self.slot(address) else {
            return;
        };
        if self.by_mac.get(&mac) != Some(&slot) {
            return;
        }
        self.by_mac.remove(&mac);
        self.full_until = None;
        let is_declined = |entry: &Entry| entry.state == State::Declined && !entry.is_over(now);
        let declined = self
            .slots
            .iter()
            .flatten()
            .filter(|entry| is_declined(entry))
            .count();
        self.slots[slot] = (declined < self.slots.len() / DECLINED_SHARE).then_some(Entry {
            mac,
            state: State::Declined,
            until: now.checked_add(DECLINED_TIME),
        });
    }

    fn end(&mut self, now: Instant, mac: MacAddress, which: impl Fn(&Entry) -> bool) {
        let Some(slot) = self.by_mac.get(&mac) else {
            return;
        };
        if let Some(entry) = self.slots[*slot].as_mut().filter(|entry| which(entry)) {
            entry.until = Some(now);
            self.full_until = None;
        }
    }

    /// A slot that nobody has; if every one was used before, the one that has been free for longest.
    fn find(
        &mut self,
        now: Instant,
        mac: MacAddress,
        is_taken: impl Fn(Ipv4Addr) -> bool,
    ) -> Option<usize> {
        if self.full_until.is_some_and(|until| now < until) {
            return None;
        }
        let len = self.slots.len();
        let start = place(mac) % len;
        let mut oldest = None;
        let mut full_until = now.checked_add(OFFER_TIME);
        for slot in (start..len).chain(0..start) {
            if is_taken(self.address(slot)) {
                continue;
            }
            let Some(entry) = &self.slots[slot] else {
                return Some(slot);
            };
            let is_older = oldest.is_none_or(|(_, until)| entry.until < until);
            if entry.is_over(now) && is_older {
                oldest = Some((slot, entry.until));
            }
            full_until = full_until.min(entry.until.or(full_until));
        }
        if oldest.is_none() {
            self.full_until = full_until;
        }
        oldest.map(|(slot, _)| slot)
    }

    fn put(&mut self, slot: usize, mac: MacAddress, state: State, until: Option<Instant>) {
        let entry = Entry { mac, state, until };
        if let Some(before) = self.slots[slot].replace(entry) {
            if before.mac != mac && self.by_mac.get(&before.mac) == Some(&slot) {
                self.by_mac.remove(&before.mac);
            }
        }
        // One address for each guest: what it had before is free.
        if let Some(other) = self.by_mac.insert(mac, slot).filter(|other| *other != slot) {
            self.slots[other] = None;
            self.full_until = None;
        }
    }

    fn is_free(&self, slot: usize, now: Instant) -> bool {
        self.slots[slot].is_none_or(|entry| entry.is_over(now))
    }

    fn slot(&self, address: Ipv4Addr) -> Option<usize> {
        let slot = address.to_bits().checked_sub(self.first.to_bits())? as usize;
        (slot < self.slots.len()).then_some(slot)
    }

    fn address(&self, slot: usize) -> Ipv4Addr {
        // A slot is less than the number of addresses that follow the first.
        Ipv4Addr::from_bits(self.first.to_bits() + slot as u32)
    }
}

/// Where the search for a guest's address begins: FNV-1a, of which only matters that it is the same tomorrow.
fn place(mac: MacAddress) -> usize {
    let hash = mac.0.iter().fold(0x811c_9dc5_u32, |hash, byte| {
        (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193)
    });
    hash as usize
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_full_pool_is_not_searched_again_until_an_address_may_be_free() {
        let mut now = Instant::now();
        let range = Ipv4Addr::new(10, 0, 0, 1)..=Ipv4Addr::new(10, 0, 0, 100);
        let mut pool = Pool::new(range);
        let searched = Cell::new(0);
        let mac = |number: u8| MacAddress([2, 0, 0, 0, 0, number]);
        let offer = |pool: &mut Pool, now, number| {
            searched.set(0);
            let is_taken = |_| {
                searched.set(searched.get() + 1);
                false
            };
            let offered = pool.offer(now, mac(number), None, is_taken);
            (offered, searched.get())
        };
        for number in 1..=100 {
            let (offered, _) = offer(&mut pool, now, number);
            assert!(pool.bind(now, mac(number), offered.unwrap(), Duration::from_secs(60)));
        }
        assert_eq!(offer(&mut pool, now, 101), (None, 100));
        assert_eq!(offer(&mut pool, now, 102), (None, 0));
        let released = pool.leases(now)[0];
        pool.release(now, released.mac, Some(released.address));
        assert_eq!(offer(&mut pool, now, 101).0, Some(released.address));
        assert_eq!(offer(&mut pool, now, 102).0, None);
        now += Duration::from_secs(60);
        assert!(offer(&mut pool, now, 102).0.is_some());
    }
}
