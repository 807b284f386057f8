//! What a daemon after this one goes on with: which port uses which address, and which links are down. Another guest could take an address
//! otherwise before its owner has said anything.
//!
//! It is written down ([`guestmem::journal`]) before any frame is passed on that was judged by it. There is one such *ledger*, for the fabrics of all threads, so
//! that it means the same to a next daemon that spreads its networks otherwise. It is locked for the addresses of a batch that have other users than
//! before, and for nothing else: a guest that uses new addresses all the time delays others that do, for as long as those take to be written.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex};
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

/// What the daemon's networks are written down in, for the next one.
#[derive(Debug, Clone)]
pub struct NetLedger {
    pub(super) keeper: Arc<Keeper>,
    pages: Arc<Mutex<Pages>>,
}

#[derive(Debug)]
struct Pages {
    journal: Journal,
    /// Of the networks and ports of the daemon before, with where it is written down.
    before: HashMap<Place, Vec<(usize, Known)>>,
    /// Places that are free again, and the first that never was in use.
    free: Vec<usize>,
    next: usize,
}

/// What a fabric has written down, and is to write down.
#[derive(Debug, Default)]
pub(super) struct Handover {
    ledger: Option<NetLedger>,
    /// Places that are to be free, in the same moment in which what is said there counts elsewhere.
    erased: Vec<usize>,
    /// Something was written that does not count yet.
    is_touched: bool,
    /// Networks of which something was inherited that is yet to be written anew.
    inherited: Vec<usize>,
    /// Where what is in force is written down.
    places: HashMap<About, usize>,
    /// What was not inherited when the daemon had started is forgotten.
    has_forgotten: bool,
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

impl NetLedger {
    /// Finds what a predecessor has left with this keeper, or begins anew.
    ///
    /// # Errors
    /// When what is kept is a later version's, or there is no memory to write in.
    pub fn of(keeper: Arc<Keeper>) -> io::Result<NetLedger> {
        let pages = match JOURNAL.of_before(&keeper)? {
            Some(journal) => Pages::read(journal),
            None => Pages::of(JOURNAL.create(&keeper)?),
        };
        let pages = Arc::new(Mutex::new(pages));
        Ok(NetLedger { keeper, pages })
    }
}

impl Pages {
    fn of(journal: Journal) -> Pages {
        Pages {
            next: journal.written(),
            journal,
            before: HashMap::new(),
            free: Vec::new(),
        }
    }

    /// Takes over what is written down. It counts until its port has inherited it.
    fn read(journal: Journal) -> Pages {
        let mut pages = Pages::of(journal);
        for place in 0..pages.next {
            let bytes = pages.journal.read(place);
            let record = bytes.as_deref().map(postcard::from_bytes::<Record<'_>>);
            let Some(Ok(Record { network, vm, known })) = record else {
                pages.free.push(place);
                continue;
            };
            let port = (network.to_owned(), vm.map(str::to_owned));
            pages.before.entry(port).or_default().push((place, known));
        }
        pages
    }

    fn erase(&mut self, place: usize) {
        self.journal.write(place, &[]);
        self.free.push(place);
    }

    /// Writes a record, at this place if it has one, and returns where it is, if there was room.
    fn write(&mut self, place: Option<usize>, record: &[u8]) -> Option<usize> {
        let place = place.or_else(|| self.free.pop()).unwrap_or(self.next);
        let is_written = self.journal.write(place, record);
        is_written.then(|| {
            self.next = self.next.max(place + 1);
            place
        })
    }
}

impl Handover {
    pub(super) fn of(ledger: NetLedger) -> Handover {
        Handover {
            ledger: Some(ledger),
            ..Handover::default()
        }
    }

    pub(super) fn is_in_use(&self) -> bool {
        self.ledger.is_some()
    }

    /// Writes down what is known of something, or that nothing is.
    fn write(&mut self, pages: &mut Pages, about: About, record: Option<Record<'_>>) {
        let mut room = [0; MAX_RECORD_BYTES];
        let bytes = record.and_then(|record| postcard::to_slice(&record, &mut room).ok());
        self.is_touched = true;
        match (bytes, self.places.get(&about).copied()) {
            (Some(bytes), place) => {
                if let Some(place) = pages.write(place, bytes) {
                    self.places.insert(about, place);
                }
            }
            (None, Some(place)) => {
                self.places.remove(&about);
                pages.erase(place);
            }
            (None, None) => {}
        }
    }
}

impl NetFabric {
    /// Has a new port go on with what a port of the same place had in the daemon before. Returns whether its link is up.
    pub(super) fn inherit(&mut self, network: usize, id: PortId, vm: Option<&str>) -> bool {
        let Some(ledger) = &self.handover.ledger else {
            return true;
        };
        let place = (self.networks[network].name.clone(), vm.map(str::to_owned));
        let before = sys::lock(&ledger.pages).before.remove(&place);
        let before = before.unwrap_or_default();
        let mut is_up = true;
        if !before.is_empty() {
            self.handover.inherited.push(network);
        }
        for (place, known) in before {
            self.handover.erased.push(place);
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
        let handover = &mut self.handover;
        let Some(ledger) = &handover.ledger else {
            return;
        };
        if !handover.has_forgotten && ledger.keeper.runs() {
            handover.has_forgotten = true;
            let before = std::mem::take(&mut sys::lock(&ledger.pages).before);
            let gone = before.into_values().flatten().map(|(place, _)| place);
            handover.erased.extend(gone);
        }
    }

    /// Writes down which addresses of a network have other users than before. Called before its frames are passed on.
    pub(super) fn note_used(&mut self, index: usize) {
        if self.handover.is_in_use() {
            self.commit_noted(Some(index));
        }
    }

    /// Has all count that is noted, and what has changed in this network. What was inherited is written anew in the same moment in which it does not count any
    /// more where it was: fabrics of other threads have all count, too, so that nothing of it is written before.
    fn commit_noted(&mut self, network: Option<usize>) {
        let mut changed: Vec<(usize, Used)> = Vec::new();
        for index in self.handover.inherited.drain(..).chain(network) {
            if let Some(network) = self.networks.get_mut(index) {
                changed.extend(network.bridge.take_changed().map(|used| (index, used)));
            }
        }
        let handover = &self.handover;
        if changed.is_empty() && handover.erased.is_empty() && !handover.is_touched {
            return;
        }
        let Some(ledger) = handover.ledger.clone() else {
            return;
        };
        let mut pages = sys::lock(&ledger.pages);
        for place in self.handover.erased.drain(..) {
            pages.erase(place);
        }
        for (index, used) in changed {
            self.write_user(&mut pages, index, &used);
        }
        self.handover.is_touched = false;
        pages.journal.commit();
    }

    /// Writes down who uses an address.
    fn write_user(&mut self, pages: &mut Pages, index: usize, used: &Used) {
        let network = &self.networks[index];
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
        self.handover
            .write(pages, About::Used(index, *used), record);
    }

    /// Writes down what has changed beside what frames have: ports and links, and what is not inherited.
    pub(super) fn note_rest(&mut self) {
        if self.handover.is_in_use() {
            self.forget_before();
            self.commit_noted(None);
        }
    }

    /// Writes down that a port's link was taken down, or is up.
    pub(super) fn note_link(&mut self, number: usize, is_up: bool) {
        let Some(ledger) = self.handover.ledger.clone() else {
            return;
        };
        let port = &self.ports[number];
        let record = Record {
            network: &self.networks[port.network].name,
            vm: Some(&port.vm),
            known: Known::Down,
        };
        let about = About::Link(port.network, port.id);
        if is_up && !self.handover.places.contains_key(&about) {
            return;
        }
        let mut pages = sys::lock(&ledger.pages);
        self.handover
            .write(&mut pages, about, (!is_up).then_some(record));
    }

    /// Forgets what is written down of a network.
    pub(super) fn forget_written(&mut self, index: usize) {
        let Handover { places, erased, .. } = &mut self.handover;
        places.retain(|about, place| {
            let (About::Used(network, _) | About::Link(network, _)) = about;
            let is_gone = *network == index;
            if is_gone {
                erased.push(*place);
            }
            !is_gone
        });
    }
}
