//! A network of layer 2: to which ports a frame goes, and whether it may.
//!
//! A [`Bridge`] is one network with its ports. It only decides: it is shown a private copy of a frame's first
//! [`SNAPSHOT_LEN`](wire::ethernet::SNAPSHOT_LEN) bytes and the time, and answers with a [`Verdict`]. It never sees payload, a ring or a clock.
//!
//! # Theory of operation
//!
//! A network knows an address in one of two ways. It was *assigned* by the operator: then it is one port's alone, in every VLAN, from the moment
//! the port is added. Or it was *learned* from frames, where the operator allows that (uplinks, above all): then it is the port's
//! that used it first, until it falls silent or its port goes (`owners.rs`; `outside.rs` for those in use behind uplinks). No port can take what is another's, and no port's
//! addresses cost another port room: all bounds are reserved when a port is added.
//!
//! [`classify`](Bridge::classify) asks in this order: may the port send at all; is the frame well-formed and not too long; is its source the port's; in
//! which VLAN is it; do the filters let it pass (`filter.rs`); and then where it goes. A frame that was refused has taught nothing. For the common
//! case there is a shorter way to the same answer (`shortcut.rs`).
//!
//! A frame to an unknown address goes only where addresses are learned: any other port has one address, which is known.
//!
//! A port's rates are kept by waiting, not by loss: [`throttled_until`](Bridge::throttled_until). Only what goes to many ports at once is thrown away
//! beyond its rate.

mod assignment;
mod config;
mod filter;
mod outside;
mod owners;
mod port;
mod refusal;
mod shortcut;
#[cfg(test)]
mod tests;
mod used;
mod vlan;

use core::net::{IpAddr, Ipv6Addr};
use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use foldhash::fast::FixedState;
use policy::Time;
use slab::Slab;
use wire::ethernet::{HEADER_LEN, Head, Ipv4, MacAddress, TAG_LEN, TagControl};

use assignment::Assigned;
use filter::Arrival;
use owners::Owners;
use port::{Gate, Port, Storm, reaches};

pub use config::{AddPortError, BridgeLimits, Ipv6Guard, Ipv6Prefix, PortConfig, PortKind, Rates};
pub use port::PortCounters;
pub use refusal::Refusal;
pub use used::{Used, UsedAddress};
pub use vlan::{Tagging, Vlan, VlanId, VlanSet};

/// A port of a network, by its number. Numbers of ports that are gone are used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PortId(pub u16);

impl fmt::Display for PortId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(formatter)
    }
}

/// Where a frame goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Verdict {
    /// Nowhere.
    Drop(Refusal),
    /// To one port.
    Port(PortId, Tagging),
    /// To those that [`Bridge::flood_ports`] names until the next frame is classified. There is at least one.
    Flood,
}

/// A MAC address of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MacEntry {
    /// The address.
    pub mac: MacAddress,
    /// In which VLAN it was learned; an assigned address is its port's in every one.
    pub vlan: Option<VlanId>,
    /// Where it is.
    pub port: PortId,
    /// How long ago it was seen, to within a second; an assigned address does not age.
    pub age: Option<Duration>,
}

/// An IPv6 address that a guest has given itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv6Entry {
    /// The address.
    pub address: Ipv6Addr,
    /// In which VLAN it is used.
    pub vlan: VlanId,
    /// Whose it is.
    pub port: PortId,
    /// How long ago it was seen, to within a second.
    pub age: Duration,
}

/// One network: its ports, its addresses, and every decision about a frame.
#[derive(Debug)]
pub struct Bridge {
    limits: BridgeLimits,
    ports: Slab<Port>,
    /// By the ports' numbers; those of no port are down.
    gates: Vec<Gate>,
    /// MAC addresses that were assigned, as numbers. A port that learns may have one, too.
    stations: HashMap<u64, PortId, FixedState>,
    /// MAC addresses that were learned, with their VLAN in the upper 16 bits.
    learned: Owners<u64>,
    /// IP addresses that were assigned.
    assigned: HashMap<(VlanId, IpAddr), Assigned, FixedState>,
    /// IPv6 addresses that guests have given themselves.
    bindings: Owners<(VlanId, Ipv6Addr)>,
    /// Learned addresses of either kind that the ports may have together.
    reserved: u32,
    flooded: Vec<(PortId, Tagging)>,
}

/// For so long the MAC address of a gateway behind an uplink is no other port's, however silent it is.
const RESERVED_FOR: Duration = Duration::from_secs(24 * 60 * 60);

fn learned_key(vlan: VlanId, mac: MacAddress) -> u64 {
    u64::from(vlan.get()) << 48 | mac.to_u64()
}

impl Bridge {
    /// A network without ports. `seed` is a random number, or in tests one that is always the same: guests choose the addresses
    /// that are learned, and may not know where they come to lie in a table.
    pub fn new(limits: BridgeLimits, seed: u64) -> Bridge {
        let hasher = || FixedState::with_seed(seed);
        Bridge {
            ports: Slab::new(),
            gates: Vec::new(),
            stations: HashMap::with_hasher(hasher()),
            learned: Owners::new(seed, limits.ageing),
            assigned: HashMap::with_hasher(hasher()),
            bindings: Owners::new(seed, limits.ageing),
            reserved: 0,
            flooded: Vec::new(),
            limits,
        }
    }

    /// The limits that it was made with.
    pub fn limits(&self) -> &BridgeLimits {
        &self.limits
    }

    /// Adds a port, whose link is up.
    pub fn add_port(&mut self, config: PortConfig) -> Result<PortId, AddPortError> {
        let ports_max = self.limits.ports_max.min(BridgeLimits::PORTS_MAX);
        if self.ports.len() >= usize::from(ports_max) {
            return Err(AddPortError::TooManyPorts { ports_max });
        }
        self.check_config(&config, None)?;
        // Below PORTS_MAX: a slab uses the numbers of what was removed again before it makes new ones.
        let id = PortId(self.ports.vacant_key() as u16);
        self.assign(id, &config);
        let number = usize::from(id.0);
        if self.gates.len() <= number {
            self.gates.resize(number + 1, Gate::NONE);
        }
        self.gates[number] = Gate::new(&config);
        self.ports.insert(Port::new(config));
        Ok(id)
    }

    /// Changes a port. What was learned behind it stays, as far as it may still use that; it counts on.
    pub fn configure_port(
        &mut self,
        now: Time,
        id: PortId,
        config: PortConfig,
    ) -> Result<(), AddPortError> {
        if !self.ports.contains(id.0.into()) {
            return Err(AddPortError::NoSuchPort);
        }
        self.check_config(&config, Some(id))?;
        self.forget_what_is_not_of(now, id, &config);
        self.unassign(id);
        self.assign(id, &config);
        self.gates[usize::from(id.0)].set_config(&config);
        self.ports[id.0.into()].set_config(config);
        Ok(())
    }

    /// Removes a port with everything that is known of it, and says what it has counted.
    pub fn remove_port(&mut self, id: PortId) -> Option<PortCounters> {
        let counters = self.counters(id)?;
        self.learned.forget(id);
        self.bindings.forget(id);
        self.unassign(id);
        self.ports.remove(id.0.into());
        self.gates[usize::from(id.0)] = Gate::NONE;
        Some(counters)
    }

    /// Says whether a port's link is up. While it is down, frames neither come from there nor go there, and what was learned is forgotten. Behind
    /// an uplink hosts live on: what they use is kept until they have been silent for the ageing time.
    pub fn set_link(&mut self, id: PortId, is_up: bool) {
        let Some(port) = self.ports.get(id.0.into()) else {
            return;
        };
        self.gates[usize::from(id.0)].is_up = is_up;
        if !is_up && port.config.kind != PortKind::Uplink {
            self.learned.forget(id);
            self.bindings.forget(id);
        }
    }

    /// How its operator wants a port.
    pub fn config(&self, id: PortId) -> Option<&PortConfig> {
        self.ports.get(id.0.into()).map(|port| &port.config)
    }

    /// Whether a port's link is up.
    pub fn link(&self, id: PortId) -> Option<bool> {
        let exists = self.ports.contains(id.0.into());
        exists.then(|| self.gates[usize::from(id.0)].is_up)
    }

    /// What a port has counted.
    pub fn counters(&self, id: PortId) -> Option<PortCounters> {
        let port = self.ports.get(id.0.into())?;
        Some(port.counters(&self.gates[usize::from(id.0)]))
    }

    /// Every port, in the order of their numbers.
    pub fn ports(&self) -> impl Iterator<Item = PortId> + '_ {
        self.ports.iter().map(|(number, _)| PortId(number as u16))
    }

    /// Every MAC address that is known, assigned ones first, in no further order.
    pub fn macs(&self, now: Time) -> impl Iterator<Item = MacEntry> + '_ {
        let assigned = self.stations.iter().map(|(mac, port)| MacEntry {
            mac: MacAddress::from_u64(*mac),
            vlan: None,
            port: *port,
            age: None,
        });
        let learned = self.learned.iter(now).map(|owned| MacEntry {
            mac: MacAddress::from_u64(owned.key),
            vlan: VlanId::new((owned.key >> 48) as u16),
            port: owned.port,
            age: Some(owned.age),
        });
        assigned.chain(learned)
    }

    /// Every IPv6 address that guests have given themselves, in no order.
    pub fn ipv6_bindings(&self, now: Time) -> impl Iterator<Item = Ipv6Entry> + '_ {
        self.bindings.iter(now).map(|owned| Ipv6Entry {
            address: owned.key.1,
            vlan: owned.key.0,
            port: owned.port,
            age: owned.age,
        })
    }

    /// Until when frames of a port are to be left where they are, as it has sent more than its rates allow. A frame that
    /// is classified nevertheless is not refused for that, but makes the rest longer.
    #[inline]
    pub fn throttled_until(&self, now: Time, id: PortId) -> Option<Time> {
        self.ports.get(id.0.into())?.throttled_until(now)
    }

    /// Where the frame goes that was classified last, if that was [`Verdict::Flood`].
    pub fn flood_ports(&self) -> &[(PortId, Tagging)] {
        &self.flooded
    }

    /// Decides about a frame.
    ///
    /// `snapshot` is its first bytes, all of them or [`SNAPSHOT_LEN`](wire::ethernet::SNAPSHOT_LEN), `frame_len` its length in bytes, `segment_len` that of the longest
    /// frame that it is to become ([`Offload::longest_segment_len`](wire::net_header::Offload::longest_segment_len)), which is the same unless it is to be segmented.
    #[inline]
    pub fn classify(
        &mut self,
        now: Time,
        from: PortId,
        snapshot: &[u8],
        frame_len: usize,
        segment_len: usize,
    ) -> Verdict {
        let shortcut = self.shortcut(from, snapshot, frame_len, segment_len);
        shortcut
            .unwrap_or_else(|| self.take_the_long_way(now, from, snapshot, frame_len, segment_len))
    }

    /// Charges a frame that came to nothing before it could be classified.
    pub fn charge_malformed(&mut self, now: Time, from: PortId, frame_len: usize) {
        let gate = self.gates.get(usize::from(from.0));
        if gate.is_some_and(|gate| gate.has_rate) {
            self.ports[from.0.into()].charge(now, frame_len);
        }
    }

    fn take_the_long_way(
        &mut self,
        now: Time,
        from: PortId,
        snapshot: &[u8],
        frame_len: usize,
        segment_len: usize,
    ) -> Verdict {
        let decided = self.decide(now, from, snapshot, frame_len, segment_len);
        decided.unwrap_or_else(|refusal| {
            if let Some(port) = self.ports.get_mut(from.0.into()) {
                port.refused_frames[refusal as usize] += 1;
            }
            Verdict::Drop(refusal)
        })
    }

    #[inline]
    fn decide(
        &mut self,
        now: Time,
        from: PortId,
        snapshot: &[u8],
        frame_len: usize,
        segment_len: usize,
    ) -> Result<Verdict, Refusal> {
        let gate = self
            .gates
            .get_mut(usize::from(from.0))
            .ok_or(Refusal::NoSuchPort)?;
        gate.received(frame_len);
        let gate = *gate;
        if gate.has_rate {
            self.ports[from.0.into()].charge(now, frame_len);
        }
        if !gate.is_up {
            return Err(match self.ports.contains(from.0.into()) {
                true => Refusal::LinkDown,
                false => Refusal::NoSuchPort,
            });
        }
        let head = Head::parse(snapshot).ok_or(Refusal::TooShort)?;
        let tag_len = if head.tag.is_some() { TAG_LEN } else { 0 };
        if segment_len > usize::from(self.limits.mtu) + HEADER_LEN + tag_len {
            return Err(Refusal::TooLong);
        }
        let learns = gate.mac == Gate::LEARNS;
        if learns && !head.source.is_assignable() {
            return Err(Refusal::InvalidSource);
        }
        if !learns && gate.mac != head.source.to_u64() {
            return Err(Refusal::OtherSource);
        }
        if head.destination.is_link_local() {
            return Err(Refusal::Reserved);
        }
        let vlan = match (gate.access, head.tag) {
            (Some(vlan), None) => vlan,
            _ => self.admit(from, head.tag)?,
        };
        let arrival = Arrival {
            now,
            from,
            kind: gate.place.kind,
            ipv4: gate.ipv4,
            vlan,
            head,
            snapshot,
            frame_len,
            frames: frames_of(frame_len, segment_len),
        };
        if learns && !self.may_learn(&arrival) {
            return Err(Refusal::SourceTaken);
        }
        let only_for = self.filter(&arrival)?;
        if learns {
            self.learn(&arrival);
        }
        match only_for {
            Some(to) => self.forward(&arrival, to),
            None => self.deliver(&arrival),
        }
    }

    /// To the port that has the destination, or to all.
    #[inline]
    fn deliver(&mut self, arrival: &Arrival<'_>) -> Result<Verdict, Refusal> {
        let destination = arrival.head.destination;
        if destination.is_multicast() {
            let storm = match destination.is_broadcast() {
                true => Storm::Broadcast,
                false => Storm::Multicast,
            };
            return self.flood(arrival, storm);
        }
        match self.find(arrival) {
            Some(to) => self.forward(arrival, to),
            None => self.flood(arrival, Storm::Unknown),
        }
    }

    /// In which VLAN a frame is that has a tag or comes from a trunk.
    fn admit(&self, from: PortId, tag: Option<TagControl>) -> Result<VlanId, Refusal> {
        let vlan = self.ports[from.0.into()].config.vlan.admit(tag);
        vlan.ok_or(Refusal::WrongVlan)
    }

    /// Whether a frame's source may be learned: it is free. Between uplinks an address moves at once, as when the world outside changes its
    /// ways; otherwise it stays with the port that had it first.
    fn may_learn(&self, arrival: &Arrival<'_>) -> bool {
        let mac = arrival.head.source;
        if let Some(port) = self.stations.get(&mac.to_u64()) {
            return *port == arrival.from;
        }
        let key = learned_key(arrival.vlan, mac);
        let owner = self.learned.owner(arrival.now, key);
        owner.is_none_or(|owner| {
            self.is_same_side(arrival, owner.port) || self.is_reserved_outside(arrival)
        })
    }

    /// Whether a port is where the frame came from, or both are uplinks, between which addresses move.
    fn is_same_side(&self, arrival: &Arrival<'_>, port: PortId) -> bool {
        let kinds = (self.gates[usize::from(port.0)].place.kind, arrival.kind);
        port == arrival.from || kinds == (PortKind::Uplink, PortKind::Uplink)
    }

    /// Learns a frame's source, which may be.
    fn learn(&mut self, arrival: &Arrival<'_>) {
        if self.stations.contains_key(&arrival.head.source.to_u64()) {
            return;
        }
        let config = &self.ports[arrival.from.0.into()].config;
        let bound = config.bound(config.learned_max);
        let key = learned_key(arrival.vlan, arrival.head.source);
        self.learned.take(arrival.now, key, arrival.from, bound);
        let may_reserve = arrival.kind == PortKind::Uplink && !self.assigned.is_empty();
        if may_reserve && self.is_reserved_outside(arrival) {
            let until = arrival.now + RESERVED_FOR;
            self.learned.keep(arrival.now, key, arrival.from, until);
        }
    }

    /// Where a frame's receiver is.
    #[inline]
    fn find(&self, arrival: &Arrival<'_>) -> Option<PortId> {
        let mac = arrival.head.destination;
        if let Some(port) = self.stations.get(&mac.to_u64()) {
            return Some(*port);
        }
        let key = learned_key(arrival.vlan, mac);
        self.learned.owner(arrival.now, key).map(|owner| owner.port)
    }

    /// Sends a frame to one port, if it may go there.
    #[inline]
    fn forward(&mut self, arrival: &Arrival<'_>, to: PortId) -> Result<Verdict, Refusal> {
        if to == arrival.from {
            return Err(Refusal::SamePort);
        }
        let source = self.gates[usize::from(arrival.from.0)].place;
        let target = &mut self.gates[usize::from(to.0)];
        reaches(source, target.place)?;
        if !target.is_up {
            return Err(Refusal::DestinationDown);
        }
        let tagging = tagging(&self.ports, to, target, arrival);
        let tagging = tagging.ok_or(Refusal::DestinationVlan)?;
        target.sent(arrival.frame_len);
        Ok(Verdict::Port(to, tagging))
    }

    /// Sends a frame to every port where it may go.
    #[cold]
    fn flood(&mut self, arrival: &Arrival<'_>, storm: Storm) -> Result<Verdict, Refusal> {
        self.flooded.clear();
        let from = usize::from(arrival.from.0);
        self.ports[from].take(arrival.now, storm, arrival.frames)?;
        let source = self.gates[from].place;
        for (number, gate) in self.gates.iter_mut().enumerate() {
            let known = storm == Storm::Unknown && gate.mac != Gate::LEARNS;
            if number == from || known || !gate.is_up || reaches(source, gate.place).is_err() {
                continue;
            }
            let to = PortId(number as u16);
            let Some(tagging) = tagging(&self.ports, to, gate, arrival) else {
                continue;
            };
            gate.sent(arrival.frame_len);
            self.flooded.push((to, tagging));
        }
        if self.flooded.is_empty() {
            return Err(Refusal::NoReceiver);
        }
        self.ports[from].flooded_frames += 1;
        Ok(Verdict::Flood)
    }
}

/// How many frames one is, about, of which none is to be longer than `segment_len`: headers are repeated before each, of which
/// these are the shortest.
fn frames_of(frame_len: usize, segment_len: usize) -> u32 {
    const SHORTEST: usize = HEADER_LEN + Ipv4::HEADER_LEN + 8;
    if frame_len <= segment_len {
        return 1;
    }
    let payload = frame_len.saturating_sub(SHORTEST);
    // Frames are of 64 KiB at most.
    payload.div_ceil(segment_len.saturating_sub(SHORTEST).max(1)) as u32
}

/// What happens to a frame's tag before it goes to a port, unless that is not in its VLAN.
#[inline]
fn tagging(ports: &Slab<Port>, to: PortId, gate: &Gate, arrival: &Arrival<'_>) -> Option<Tagging> {
    let Head { tag, ethertype, .. } = arrival.head;
    match (gate.access, tag) {
        (Some(vlan), _) if vlan != arrival.vlan || ethertype.is_tag() => None,
        (Some(_), None) => Some(Tagging::Keep),
        (Some(_), Some(_)) => Some(Tagging::Strip),
        (None, _) => {
            let vlan = &ports[to.0.into()].config.vlan;
            vlan.tagging(arrival.vlan, tag, ethertype.is_tag())
        }
    }
}
