//! What a daemon after this one goes on with: which port uses which address, and which links are down. Another guest could take an address
//! otherwise before its owner has said anything.
//!
//! It is written down ([`guestmem::journal`]) before any frame is passed on that was judged by it.

use std::collections::HashMap;
use std::io;
use std::time::Duration;

use guestmem::crash::{self, Point};
use guestmem::journal::{Journal, MAX_RECORD_BYTES};
use keeper::Keeper;
use l2::bridge::{PortId, Used, UsedAddress, VlanId};
use serde::{Deserialize, Serialize};
use wire::ethernet::MacAddress;

use super::{Behind, NetFabric};
use crate::journals::KeptJournal;

const JOURNAL: KeptJournal = KeptJournal {
    key: "networks",
    // What is more ends with this process.
    records: 1 << 17,
    loss: "the first port of a network to use an address has it",
};

/// A record: the network's full name, and the VM's of the port, or none for the uplink's.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Record<'a> {
    pub(super) network: &'a str,
    pub(super) vm: Option<&'a str>,
    pub(super) known: Known,
}

/// A network, and a VM with a port in it, or none for the uplink.
type Place = (String, Option<String>);

/// What is known of a port.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) enum Known {
    /// It uses an address, and is to have it for so many seconds also if it is silent.
    Mac(u16, [u8; 6], u32),
    Ipv6(u16, [u8; 16], u32),
    /// Its link was taken down.
    Down,
}

/// What a record is about, in this process: a network's place, and an address there, or a port's link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum About {
    Used(usize, Used),
    Link(usize, PortId),
}

/// What a fabric writes down, and what another has written down before.
#[derive(Debug, Default)]
pub(super) struct Handover {
    journal: Option<Journal>,
    /// Of the networks and ports of the daemon before, with where it is written down.
    before: HashMap<Place, Vec<(usize, Known)>>,
    /// Networks of which something was inherited that is yet to be written anew.
    inherited: Vec<usize>,
    /// Where what is in force is written down.
    places: HashMap<About, usize>,
    /// Places that are free again, and the first that never was in use.
    free: Vec<usize>,
    next: usize,
}

impl Known {
    fn of(used: &Used, kept: Duration) -> Known {
        let (vlan, kept) = (
            used.vlan.get(),
            kept.as_secs().try_into().unwrap_or(u32::MAX),
        );
        match used.address {
            UsedAddress::Mac(mac) => Known::Mac(vlan, mac.0, kept),
            UsedAddress::Ipv6(address) => Known::Ipv6(vlan, address.octets(), kept),
        }
    }

    /// The address, and for how long it is to be kept.
    fn used(self) -> Option<(Used, Duration)> {
        let (vlan, address, kept) = match self {
            Known::Mac(vlan, mac, kept) => (vlan, UsedAddress::Mac(MacAddress(mac)), kept),
            Known::Ipv6(vlan, address, kept) => (vlan, UsedAddress::Ipv6(address.into()), kept),
            Known::Down => return None,
        };
        let vlan = VlanId::new(vlan)?;
        Some((Used { vlan, address }, Duration::from_secs(kept.into())))
    }
}

impl Handover {
    /// Finds what a predecessor has left with this keeper, or begins anew.
    pub(super) fn of(keeper: &Keeper) -> io::Result<Handover> {
        let mut handover = Handover::default();
        match JOURNAL.of_before(keeper)? {
            Some(journal) => handover.read(journal),
            None => handover.journal = Some(JOURNAL.create(keeper)?),
        }
        Ok(handover)
    }

    /// Takes over what is written down. It counts until its port has inherited it.
    fn read(&mut self, journal: Journal) {
        self.next = journal.written();
        for place in 0..self.next {
            let bytes = journal.read(place);
            let record = bytes.as_deref().map(postcard::from_bytes::<Record<'_>>);
            let Some(Ok(Record { network, vm, known })) = record else {
                self.free.push(place);
                continue;
            };
            let port = (network.to_owned(), vm.map(str::to_owned));
            self.before.entry(port).or_default().push((place, known));
        }
        self.journal = Some(journal);
    }

    fn erase(&mut self, place: usize) {
        if let Some(journal) = &mut self.journal {
            journal.write(place, &[]);
            self.free.push(place);
        }
    }

    pub(super) fn is_in_use(&self) -> bool {
        self.journal.is_some()
    }

    /// Writes down what is known of something, or that nothing is.
    fn write(&mut self, about: About, record: Option<Record<'_>>) {
        let Some(journal) = &mut self.journal else {
            return;
        };
        let mut room = [0; MAX_RECORD_BYTES];
        let bytes = record.and_then(|record| postcard::to_slice(&record, &mut room).ok());
        match (bytes, self.places.get(&about).copied()) {
            (Some(bytes), Some(place)) => {
                journal.write(place, bytes);
            }
            (Some(bytes), None) => {
                let place = self.free.pop().unwrap_or(self.next);
                if journal.write(place, bytes) {
                    self.next = self.next.max(place + 1);
                    self.places.insert(about, place);
                }
            }
            (None, Some(place)) => {
                self.places.remove(&about);
                self.erase(place);
            }
            (None, None) => {}
        }
    }

    fn commit(&mut self) {
        if let Some(journal) = &mut self.journal {
            journal.commit();
        }
    }
}

impl NetFabric {
    /// Has a new port go on with what a port of the same place had in the daemon before. Returns whether its link is up.
    pub(super) fn inherit(&mut self, network: usize, id: PortId, vm: Option<&str>) -> bool {
        let place = (self.networks[network].name.clone(), vm.map(str::to_owned));
        let mut is_up = true;
        let before = self.handover.before.remove(&place).unwrap_or_default();
        if !before.is_empty() {
            self.handover.inherited.push(network);
        }
        for (place, known) in before {
            self.handover.erase(place);
            crash::point(Point::TakeOver);
            match known.used() {
                Some((used, kept)) => {
                    let bridge = &mut self.networks[network].bridge;
                    bridge.inherit(self.now, id, &used, kept);
                }
                None => is_up = false,
            }
        }
        is_up
    }

    /// Forgets what was written down of ports that are not there any more, once the daemon has started.
    fn forget_before(&mut self) {
        let has_started = self.keeper.as_ref().is_some_and(|keeper| keeper.runs());
        if has_started && !self.handover.before.is_empty() {
            let before = std::mem::take(&mut self.handover.before);
            for (place, _) in before.into_values().flatten() {
                self.handover.erase(place);
            }
        }
    }

    /// Writes down which addresses of a network have other users than before. Called before its frames are passed on.
    pub(super) fn note_used(&mut self, index: usize) {
        if self.handover.is_in_use() {
            self.note_changed(index);
            self.commit_noted();
        }
    }

    /// Has all count that was written down. What was inherited is written anew in the same moment in which it does not count any more where it was.
    fn commit_noted(&mut self) {
        while let Some(index) = self.handover.inherited.pop() {
            self.note_changed(index);
        }
        self.handover.commit();
    }

    fn note_changed(&mut self, index: usize) {
        let Some(network) = self.networks.get_mut(index) else {
            return;
        };
        let changed: Vec<Used> = network.bridge.take_changed().collect();
        for used in &changed {
            let user = network.bridge.user(self.now, used);
            let record = user.and_then(|(id, kept)| {
                let vm = match network.behind(id)? {
                    Behind::Guest(number) => Some(self.ports.get(number)?.vm.as_str()),
                    Behind::Uplink => None,
                    Behind::Station => return None,
                };
                let known = Known::of(used, kept);
                let network = &network.name;
                Some(Record { network, vm, known })
            });
            self.handover.write(About::Used(index, *used), record);
        }
    }

    /// Writes down what has changed beside what frames have: ports and links, and what is not inherited.
    pub(super) fn note_rest(&mut self) {
        if self.handover.is_in_use() {
            self.forget_before();
            self.commit_noted();
        }
    }

    /// Writes down that a port's link was taken down, or is up.
    pub(super) fn note_link(&mut self, number: usize, is_up: bool) {
        let port = &self.ports[number];
        let record = Record {
            network: &self.networks[port.network].name,
            vm: Some(&port.vm),
            known: Known::Down,
        };
        let about = About::Link(port.network, port.id);
        self.handover.write(about, (!is_up).then_some(record));
    }

    /// Forgets what is written down of a network.
    pub(super) fn forget_written(&mut self, index: usize) {
        let places = self.handover.places.keys().copied();
        let gone = places.filter(|about| match about {
            About::Used(network, _) | About::Link(network, _) => *network == index,
        });
        let gone: Vec<About> = gone.collect();
        for about in gone {
            self.handover.write(about, None);
        }
    }
}
