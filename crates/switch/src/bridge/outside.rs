//! IPv6 addresses that are in use behind uplinks.
//!
//! No guest may have the address of a router or a resolver out there, whichever speaks first. But what any host out there says must not cost a
//! guest its own. In the words of RFC 6620, an uplink is a trusted port:
//!
//! - Who takes part in neighbour discovery behind an uplink is on this link, and its address is the uplink's, as any address is a port's. Other packets
//!   may come from afar by way of a router. They keep an address and claim none.
//! - A guest asks whether an address is in use before it uses it (RFC 4862, section 5.4). If those outside could hear that and none has answered in time,
//!   the address is the guest's. A guest that did not ask gives way to the first one outside who uses it.
//! - A router has its link-local address in any case, for as long as it says that it is a router: no guest can say that, and whoever
//!   can, out there, does with the network's packets what it likes anyway.

use core::net::{IpAddr, Ipv6Addr};
use std::time::Duration;

use wire::ethernet::{Fragment, Ipv6, Layer3, Neighbour, NeighbourMessage, Transport};

use super::filter::{Arrival, TENTATIVE};
use super::owners::Owner;
use super::{Bridge, Ipv6Prefix, PortKind, Refusal};
use crate::Time;

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
        if is_guests && lifetime.is_none() {
            return Err(Refusal::Ipv6Taken);
        }
        self.take_outside(arrival, address);
        if let Some(lifetime) = lifetime {
            let until = arrival.now + lifetime;
            self.bindings.keep(key, arrival.from, until);
        }
        Ok(())
    }

    /// A host behind an uplink wants an address. If a guest has it, that one is to hear this, unless both have only just come up.
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
        let guard = &self.ports[arrival.from.0.into()].config.ipv6_guard;
        let max = guard.as_ref().map_or(0, |guard| guard.addresses_max);
        if max > 0 && !address.is_multicast() && !address.is_unspecified() {
            let key = (arrival.vlan, address);
            self.bindings.take(arrival.now, key, arrival.from, max);
        }
    }

    /// Notes that a guest has asked for its address where those behind an uplink hear it. The frame is on its way to the ports of the flood.
    pub(super) fn note_question(&mut self, arrival: &Arrival<'_>) {
        if arrival.kind != PortKind::Guest {
            return;
        }
        let Layer3::Ipv6(ip) = arrival.head.layer3(arrival.snapshot, arrival.frame_len) else {
            return;
        };
        let goes_out = |(port, _): &(super::PortId, _)| {
            self.gates[usize::from(port.0)].place.kind == PortKind::Uplink
        };
        let question = Neighbour::question(&arrival.head, &ip, arrival.snapshot);
        if let Some(target) = question.filter(|_| self.flooded.iter().any(goes_out)) {
            let key = (arrival.vlan, target);
            self.bindings.ask(arrival.now, key, arrival.from);
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
