//! IPv6 addresses that are in use behind uplinks.
//!
//! No guest may have the address of a router or a resolver out there, whichever uses it first. But what any host out there says must not cost a
//! guest its own. In the words of RFC 6620, an uplink is a trusted port:
//!
//! - A host in neighbour discovery behind an uplink is on this link, and its address is the uplink's, as any address is a port's. Other packets
//!   may come from afar by way of a router. They keep an address and claim none.
//! - A guest asks whether an address is in use before it uses it (RFC 4862, section 5.4). If the question went out there and no host has answered in time,
//!   the address is the guest's. A guest that did not ask gives way to the first outside to use it.
//! - A router has its link-local address in any case, for as long as it says that it is a router: no guest can say that, and a host
//!   out there that can controls the network's packets anyway.

use core::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use policy::Time;
use wire::ethernet::{Fragment, Head, Ipv6, Layer3, Neighbour, NeighbourMessage, Transport};

use super::filter::{Arrival, TENTATIVE};
use super::owners::Owner;
use super::{Bridge, Ipv6Prefix, PortId, PortKind, Refusal};

impl Bridge {
    /// Whether a packet from behind an uplink uses no address of a port here; what it says about addresses is noted.
    pub(super) fn filter_outside(
        &mut self,
        arrival: &Arrival<'_>,
        ip: &Ipv6,
    ) -> Result<(), Refusal> {
        let Some(neighbour) = said_by_neighbour(arrival, ip)? else {
            return self.pass_from_afar(arrival, ip.source);
        };
        let lifetime = match neighbour.message {
            NeighbourMessage::RouterAdvertisement { lifetime }
                if Ipv6Prefix::LINK_LOCAL.contains(ip.source) =>
            {
                Some(Duration::from_secs(lifetime.into()))
            }
            _ => None,
        };
        if !ip.source.is_unspecified() {
            self.claim_outside(arrival, ip.source, lifetime)?;
        }
        match (neighbour.message, neighbour.target) {
            (NeighbourMessage::Advertisement, Some(target)) => {
                self.claim_outside(arrival, target, None)
            }
            (NeighbourMessage::Solicitation, Some(target)) if ip.source.is_unspecified() => {
                self.ask_from_outside(arrival, target)
            }
            _ => Ok(()),
        }
    }

    /// Whether a frame from an uplink says where an address is that was assigned to the uplink, as its gateway is. The MAC address is the uplink's
    /// then, whichever guest was first to use it: an IP address is no safer than the MAC address that it is found at.
    pub(super) fn is_reserved_outside(&self, arrival: &Arrival<'_>) -> bool {
        if arrival.kind != PortKind::Uplink {
            return false;
        }
        let said = match arrival.head.layer3(arrival.snapshot, arrival.frame_len) {
            Layer3::Arp(arp) if arp.sender_mac == arrival.head.source => {
                Some(IpAddr::V4(arp.sender))
            }
            Layer3::Ipv6(ip) => {
                let neighbour = said_by_neighbour(arrival, &ip).ok().flatten();
                neighbour.map(|_| IpAddr::V6(ip.source))
            }
            _ => None,
        };
        let assigned = said.and_then(|address| self.assigned.get(&(arrival.vlan, address)));
        assigned.is_some_and(|assigned| assigned.port == arrival.from)
    }

    fn pass_from_afar(&mut self, arrival: &Arrival<'_>, source: Ipv6Addr) -> Result<(), Refusal> {
        self.check_not_assigned(arrival, source)?;
        match self.bindings.owner(arrival.now, (arrival.vlan, source)) {
            Some(owner) if owner.port == arrival.from => self.take_outside(arrival, source),
            Some(owner) if self.is_on_link(arrival, owner, source) => {
                return Err(Refusal::Ipv6Taken);
            }
            _ => {}
        }
        Ok(())
    }

    /// Whether an address that a guest has given itself cannot be that of a host somewhere else.
    fn is_on_link(&self, arrival: &Arrival<'_>, owner: Owner, address: Ipv6Addr) -> bool {
        if self.is_same_side(arrival, owner.port) {
            return false;
        }
        let config = &self.ports[owner.port.0.into()].config;
        let prefixes = config.ipv6_guard.iter().flat_map(|guard| &guard.prefixes);
        // One of length 0 has everything, the Internet too.
        let mut known = prefixes.filter(|prefix| prefix.len > 0);
        Ipv6Prefix::LINK_LOCAL.contains(address) || known.any(|prefix| prefix.contains(address))
    }

    /// A host behind an uplink says that it has an address, a router also for how long it is one.
    fn claim_outside(
        &mut self,
        arrival: &Arrival<'_>,
        address: Ipv6Addr,
        lifetime: Option<Duration>,
    ) -> Result<(), Refusal> {
        self.check_not_assigned(arrival, address)?;
        let key = (arrival.vlan, address);
        let owner = self.bindings.owner(arrival.now, key);
        let is_guests = owner.is_some_and(|owner| {
            !self.is_same_side(arrival, owner.port) && has_asked(arrival.now, owner)
        });
        // A lifetime of zero: it is no router, or no longer (RFC 4861, section 4.2).
        if is_guests && lifetime.is_none_or(|lifetime| lifetime.is_zero()) {
            return Err(Refusal::Ipv6Taken);
        }
        self.take_outside(arrival, address);
        if let Some(lifetime) = lifetime {
            let now = arrival.now;
            self.bindings.keep(now, key, arrival.from, now + lifetime);
        }
        Ok(())
    }

    /// A host behind an uplink wants an address. If a guest has it, the question goes to that guest, unless both have only just come up.
    fn ask_from_outside(&mut self, arrival: &Arrival<'_>, target: Ipv6Addr) -> Result<(), Refusal> {
        if !self.may_ask_for(arrival, IpAddr::V6(target)) {
            return Err(Refusal::Ipv6Taken);
        }
        let owner = self.bindings.owner(arrival.now, (arrival.vlan, target));
        match owner.filter(|owner| !self.is_same_side(arrival, owner.port)) {
            Some(owner) if arrival.now.saturating_sub(owner.since) < TENTATIVE => {
                Err(Refusal::Ipv6Taken)
            }
            Some(_) => Ok(()),
            None => {
                if self.check_not_assigned(arrival, target).is_ok() {
                    self.take_outside(arrival, target);
                    let key = (arrival.vlan, target);
                    self.bindings.renew(arrival.now, key, arrival.from);
                }
                Ok(())
            }
        }
    }

    fn check_not_assigned(&self, arrival: &Arrival<'_>, address: Ipv6Addr) -> Result<(), Refusal> {
        let is_free = self.is_free(arrival, IpAddr::V6(address));
        match is_free && !self.is_made_of_another(arrival, address) {
            true => Ok(()),
            false => Err(Refusal::Ipv6Taken),
        }
    }

    fn take_outside(&mut self, arrival: &Arrival<'_>, address: Ipv6Addr) {
        let config = &self.ports[arrival.from.0.into()].config;
        let guard = &config.ipv6_guard;
        let max = guard.as_ref().map_or(0, |guard| guard.addresses_max);
        if max > 0 && !address.is_multicast() && !address.is_unspecified() {
            let key = (arrival.vlan, address);
            let bound = config.bound(max);
            self.bindings.take(arrival.now, key, arrival.from, bound);
        }
    }

    /// Says that a frame of this port has left by an uplink: it was classified and was to go there, and the host has taken it. If a guest asks
    /// by it whether its address is in use, those behind the uplink have been asked only now. `snapshot` and `frame_len` are those that were classified.
    pub fn note_sent_out(&mut self, now: Time, from: PortId, snapshot: &[u8], frame_len: usize) {
        let Some(head) = Head::parse(snapshot).filter(|head| head.destination.is_multicast())
        else {
            return;
        };
        let Some(port) = self.ports.get(from.0.into()) else {
            return;
        };
        let (Layer3::Ipv6(ip), Some(vlan)) = (
            head.layer3(snapshot, frame_len),
            port.config.vlan.admit(head.tag),
        ) else {
            return;
        };
        if let Some(target) = Neighbour::question(&head, &ip, snapshot) {
            self.bindings.ask(now, (vlan, target), from);
        }
    }
}

/// What a neighbour says. It is refused where it cannot be seen: hosts find it behind any extension header, and some in fragments (RFC 6980).
fn said_by_neighbour(arrival: &Arrival<'_>, ip: &Ipv6) -> Result<Option<Neighbour>, Refusal> {
    // What has passed a router is no neighbour's message (RFC 4861, section 3.1).
    if ip.hop_limit != 255 {
        return Ok(None);
    }
    match ip.transport {
        Transport::Icmpv6 { kind, .. } if Neighbour::has_type(kind) => {
            let message = Neighbour::parse(&arrival.head, ip, arrival.snapshot);
            let whole = message.filter(|_| ip.fragment == Fragment::Whole);
            whole.map(Some).ok_or(Refusal::HiddenHeaders)
        }
        Transport::Hidden => Err(Refusal::HiddenHeaders),
        Transport::Cut => Err(Refusal::Malformed),
        _ => Ok(None),
    }
}

/// Whether the owner of an address has asked for it so long ago that another host that has it would have answered.
fn has_asked(now: Time, owner: Owner) -> bool {
    owner
        .asked
        .is_some_and(|asked| now.saturating_sub(asked) >= TENTATIVE)
}
