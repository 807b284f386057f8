//! Addresses for guests that are not on the list.
//!
//! One slot for each address, so the pool cannot grow. A guest gets the address that it had, else the one that it asks for, else a free one, searched
//! from a place that its MAC address names: so it mostly gets the same again also when the server has forgotten everything. Leases run out by
//! themselves, when another guest needs the slot; there is no timer.

use core::net::Ipv4Addr;
use std::collections::{BTreeSet, HashMap};
use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use wire::ethernet::MacAddress;

/// How long an offer is kept for the guest that it was made to.
const OFFER_TIME: Duration = Duration::from_secs(30);

/// How long an address that a guest found in use by another is not given out.
const DECLINED_TIME: Duration = Duration::from_secs(600);

/// What part of the pool can be declined at a time: a guest that declines everything must not take the pool from the others.
const DECLINED_SHARE: usize = 4;

/// What part of the pool one guest's port can have, and the uplink, with what was declined there: a host that may use many MAC addresses must not take the pool
/// from the others.
const PORT_SHARE: usize = 2;

/// An address's client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Client {
    pub mac: MacAddress,
    /// The guest's port; none for all that are behind an uplink.
    pub port: Option<u16>,
}

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
    /// By which guest's port it came, as in [`Client`].
    port: Option<u16>,
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
    /// Slots without an entry, but for those that are set aside. A guest that asks has no slot searched for that it may not have.
    empty: BTreeSet<usize>,
    /// Slots without an entry whose addresses were another host's, until the hosts change.
    set_aside: BTreeSet<usize>,
    /// Slots by when their entries are over.
    ends: BTreeSet<(Instant, usize)>,
    /// Those of them that were declined, but for some that are over.
    declined: BTreeSet<(Instant, usize)>,
}

impl Pool {
    /// The range was checked with the rest of the configuration.
    pub fn new(range: RangeInclusive<Ipv4Addr>) -> Self {
        let len = range.end().to_bits() - range.start().to_bits() + 1;
        Self {
            first: *range.start(),
            slots: vec![None; len as usize],
            by_mac: HashMap::new(),
            empty: (0..len as usize).collect(),
            set_aside: BTreeSet::new(),
            ends: BTreeSet::new(),
            declined: BTreeSet::new(),
        }
    }

    /// What another pool has given out stays given, as far as it is of this one, too. This one is new.
    pub fn inherit(&mut self, before: &Pool) {
        for (slot, entry) in before.slots.iter().enumerate() {
            let own = self.slot(before.address(slot));
            if let (Some(own), Some(entry)) = (own, entry) {
                if entry.state != State::Declined {
                    self.by_mac.insert(entry.mac, own);
                }
                self.set(own, Some(*entry));
            }
        }
    }

    /// Addresses that were another host's may be free now.
    pub fn hosts_have_changed(&mut self) {
        self.empty.append(&mut self.set_aside);
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
        client: Client,
        wanted: Option<Ipv4Addr>,
        is_taken: impl Fn(Ipv4Addr) -> bool,
    ) -> Option<Ipv4Addr> {
        if self.has_its_share(now, client) {
            return None;
        }
        let mac = client.mac;
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
            self.put(slot, client, State::Offered, now.checked_add(OFFER_TIME));
        }
        Some(self.address(slot))
    }

    /// Gives a guest the address that it wants, unless another has it.
    pub fn bind(
        &mut self,
        now: Instant,
        client: Client,
        wanted: Ipv4Addr,
        lease: Duration,
    ) -> bool {
        let Some(slot) = self.slot(wanted) else {
            return false;
        };
        let is_anothers = self.by_mac.get(&client.mac) != Some(&slot) && !self.is_free(slot, now);
        if is_anothers || self.has_its_share(now, client) {
            return false;
        }
        // A lease for ever is one that ends beyond the clock's range.
        self.put(slot, client, State::Bound, now.checked_add(lease));
        true
    }

    /// Whether a client that has no address may have none, as its port has as many as it may.
    fn has_its_share(&self, now: Instant, client: Client) -> bool {
        let own = self.by_mac.get(&client.mac);
        if own.is_some_and(|slot| !self.is_free(*slot, now)) {
            return false;
        }
        let entries = self.slots.iter().flatten();
        let of_port = entries.filter(|entry| entry.port == client.port && !entry.is_over(now));
        of_port.count() >= self.slots.len().div_ceil(PORT_SHARE)
    }

    pub fn take_back_offer(&mut self, now: Instant, mac: MacAddress) {
        self.end(now, mac, |entry| entry.state == State::Offered);
    }

    /// The guest does not need its address any more. It is remembered, so that the guest gets it again if no other took it meanwhile.
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
        let port = self.slots[slot].and_then(|before| before.port);
        while self
            .declined
            .first()
            .is_some_and(|(until, _)| *until <= now)
        {
            self.declined.pop_first();
        }
        let has_room = self.declined.len() < self.slots.len() / DECLINED_SHARE;
        let declined = has_room.then_some(Entry {
            mac,
            port,
            state: State::Declined,
            until: now.checked_add(DECLINED_TIME),
        });
        self.set(slot, declined);
    }

    fn end(&mut self, now: Instant, mac: MacAddress, which: impl Fn(&Entry) -> bool) {
        let Some(slot) = self.by_mac.get(&mac).copied() else {
            return;
        };
        if let Some(entry) = self.slots[slot].filter(which) {
            let until = Some(now);
            self.set(slot, Some(Entry { until, ..entry }));
        }
    }

    /// A free slot; if every one was used before, the one that has been free for longest.
    fn find(
        &mut self,
        now: Instant,
        mac: MacAddress,
        is_taken: impl Fn(Ipv4Addr) -> bool,
    ) -> Option<usize> {
        let start = place(mac) % self.slots.len();
        loop {
            let mut empty = self.empty.range(start..).chain(&self.empty);
            let over = || self.ends.first().filter(|(until, _)| *until <= now);
            let slot = match empty.next() {
                Some(slot) => *slot,
                None => over()?.1,
            };
            if !is_taken(self.address(slot)) {
                return Some(slot);
            }
            self.clear(slot);
            self.empty.remove(&slot);
            self.set_aside.insert(slot);
        }
    }

    fn put(&mut self, slot: usize, client: Client, state: State, until: Option<Instant>) {
        let Client { mac, port } = client;
        if self.slots[slot].is_some_and(|before| before.mac != mac) {
            self.clear(slot);
        }
        // One address for each guest: what it had before is free.
        if let Some(other) = self.by_mac.insert(mac, slot).filter(|other| *other != slot) {
            self.set(other, None);
        }
        let entry = Entry {
            mac,
            port,
            state,
            until,
        };
        self.set(slot, Some(entry));
    }

    /// Forgets whose a slot was.
    fn clear(&mut self, slot: usize) {
        if let Some(before) = self.slots[slot] {
            if self.by_mac.get(&before.mac) == Some(&slot) {
                self.by_mac.remove(&before.mac);
            }
            self.set(slot, None);
        }
    }

    fn set(&mut self, slot: usize, entry: Option<Entry>) {
        if let Some(until) = self.slots[slot].and_then(|before| before.until) {
            self.ends.remove(&(until, slot));
            self.declined.remove(&(until, slot));
        }
        self.set_aside.remove(&slot);
        self.slots[slot] = entry;
        let Some(entry) = entry else {
            self.empty.insert(slot);
            return;
        };
        self.empty.remove(&slot);
        if let Some(until) = entry.until {
            self.ends.insert((until, slot));
            if entry.state == State::Declined {
                self.declined.insert((until, slot));
            }
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

    /// At a port of its own.
    fn client(mac: MacAddress) -> Client {
        Client {
            mac,
            port: Some(mac.0[5].into()),
        }
    }

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
            let offered = pool.offer(now, client(mac(number)), None, is_taken);
            (offered, searched.get())
        };
        for number in 1..=100 {
            let (offered, _) = offer(&mut pool, now, number);
            assert!(pool.bind(
                now,
                client(mac(number)),
                offered.unwrap(),
                Duration::from_secs(60)
            ));
        }
        assert_eq!(offer(&mut pool, now, 101), (None, 0));
        assert_eq!(offer(&mut pool, now, 102), (None, 0));
        let released = pool.leases(now)[0];
        pool.release(now, released.mac, Some(released.address));
        assert_eq!(offer(&mut pool, now, 101), (Some(released.address), 1));
        assert_eq!(offer(&mut pool, now, 102).0, None);
        now += Duration::from_secs(60);
        assert!(offer(&mut pool, now, 102).0.is_some());
    }

    #[test]
    fn what_a_pool_has_given_out_stays_given_in_the_next_one() {
        let now = Instant::now();
        let address = |number: u8| Ipv4Addr::new(10, 0, 0, number);
        let mac = |number: u8| MacAddress([2, 0, 0, 0, 0, number]);
        let mut before = Pool::new(address(1)..=address(20));
        for number in 1..=8 {
            assert!(before.bind(now, client(mac(number)), address(number), OFFER_TIME));
        }
        before.decline(now, mac(8), address(8));
        let mut pool = Pool::new(address(5)..=address(30));
        pool.inherit(&before);
        // The first four are not of this pool.
        let leases = pool.leases(now);
        let given: Vec<_> = leases.iter().map(|lease| lease.address).collect();
        assert_eq!(given, [5, 6, 7].map(address));
        assert!(!pool.bind(now, client(mac(9)), address(5), OFFER_TIME));
        assert!(!pool.bind(now, client(mac(8)), address(8), OFFER_TIME));
        assert!(pool.bind(now, client(mac(5)), address(5), OFFER_TIME));
        assert!(pool.bind(now, client(mac(9)), address(9), OFFER_TIME));
        let later = now + OFFER_TIME;
        assert!(pool.bind(later, client(mac(10)), address(6), OFFER_TIME));
    }

    #[test]
    fn addresses_of_hosts_are_looked_at_once_and_again_when_the_hosts_have_changed() {
        let now = Instant::now();
        let address = |number: u8| Ipv4Addr::new(10, 0, 0, number);
        let mut pool = Pool::new(address(1)..=address(100));
        let searched = Cell::new(0);
        let is_host = |of_host: Ipv4Addr| {
            searched.set(searched.get() + 1);
            of_host != address(50)
        };
        let mac = |number: u8| MacAddress([2, 0, 0, 0, 0, number]);
        assert_eq!(
            pool.offer(now, client(mac(1)), None, is_host),
            Some(address(50))
        );
        pool.release(now, mac(1), Some(address(50)));
        for number in 2..100 {
            let offered = pool.offer(now, client(mac(number)), None, is_host);
            assert_eq!(offered, Some(address(50)));
            pool.release(now, mac(number), offered);
        }
        // Each address once, and that which is offered each time.
        assert!(searched.get() <= 100 + 98, "{}", searched.get());
        pool.hosts_have_changed();
        assert!(pool.offer(now, client(mac(2)), None, |_| false).is_some());
        assert!(
            pool.offer(now, client(mac(3)), None, |_| false)
                != pool.offer(now, client(mac(4)), None, |_| false)
        );
    }
}
