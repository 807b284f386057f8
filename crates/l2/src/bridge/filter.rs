//! Filters: what a guest may say of itself and to others.
//!
//! Three questions about every frame that a guest sends. Does it fake its sender, in ARP, IPv4, IPv6 or neighbour discovery? Does it
//! play a part that is not a guest's, a DHCP server or a router? And could it be hiding either, behind a tag, an extension header or a fragment?
//! What cannot be seen is refused (in the spirit of RFC 7113 and RFC 6980; receivers that look further than filters are what
//! CVE-2021-27853 is about). An uplink is asked only whether it uses an address that belongs to a port
//! here, or could be hiding that (`outside.rs`), a station nothing.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use policy::Time;
use wire::ethernet::{
    Arp, Fragment, Head, Ipv4, Ipv6, Layer3, MacAddress, Neighbour, NeighbourMessage, Transport,
    protocol,
};

use super::owners::Claim;
use super::{Bridge, PortId, PortKind, Refusal, Vlan, VlanId, learned_key};

pub(super) const DHCP_SERVER: u16 = 67;
pub(super) const DHCP_CLIENT: u16 = 68;
const DHCPV6_SERVER: u16 = 547;
const DHCPV6_CLIENT: u16 = 546;

/// For so long a question for an address that another has just taken, or asks for again, is refused: the two would both give it up (RFC 4862,
/// section 5.4.3), so that one guest could keep another from ever having an address. Later it is passed on, so that the owner can answer.
pub(super) const TENTATIVE: Duration = Duration::from_secs(3);

/// A frame, and where it came from.
#[derive(Clone, Copy)]
pub(super) struct Arrival<'a> {
    pub(super) now: Time,
    pub(super) from: PortId,
    pub(super) kind: PortKind,
    /// The address that a guest was assigned.
    pub(super) ipv4: Option<Ipv4Addr>,
    pub(super) vlan: VlanId,
    pub(super) head: Head,
    pub(super) snapshot: &'a [u8],
    pub(super) frame_len: usize,
    /// How many frames it is to become.
    pub(super) frames: u32,
}

impl Arrival<'_> {
    fn is_guest(&self) -> bool {
        self.kind == PortKind::Guest
    }
}

impl Bridge {
    /// Whether a frame passes the filters of the port it came from, and which port alone it is for, if filters know that.
    #[inline]
    pub(super) fn filter(&mut self, arrival: &Arrival<'_>) -> Result<Option<PortId>, Refusal> {
        if arrival.kind == PortKind::Station {
            return Ok(None);
        }
        let layer3 = arrival.head.layer3(arrival.snapshot, arrival.frame_len);
        if let (Layer3::Ipv6(ip), true) = (&layer3, arrival.is_guest()) {
            return self.filter_ipv6(arrival, ip);
        }
        self.filter_others(arrival, layer3).map(|()| None)
    }

    /// What is not IPv6 of a guest's.
    #[inline]
    fn filter_others(&mut self, arrival: &Arrival<'_>, layer3: Layer3) -> Result<(), Refusal> {
        match layer3 {
            Layer3::Ipv4(ip) => self.filter_ipv4(arrival, &ip),
            Layer3::Ipv6(ip) => self.filter_outside(arrival, &ip),
            Layer3::Arp(arp) => self.filter_arp(arrival, &arp),
            Layer3::Other => Ok(()),
            // A receiver looks behind a tag for a priority alone, and some look behind SNAP.
            Layer3::Tagged(inner) if inner.vlan() == 0 => Err(Refusal::Wrapped),
            Layer3::Length { snap: true } => Err(Refusal::Wrapped),
            Layer3::Length { snap: false } => Ok(()),
            // ARP for hardware of another kind, too, which receivers take for Ethernet's.
            Layer3::Malformed => Err(Refusal::Malformed),
            _ if !arrival.is_guest() => Ok(()),
            // On a trunk, a VLAN inside a VLAN is the guest's own affair: it leaves at trunks only, and keeps its outer tag there.
            Layer3::Tagged(_) => match self.ports[arrival.from.0.into()].config.vlan {
                Vlan::Trunk { .. } => Ok(()),
                Vlan::Access(_) => Err(Refusal::Wrapped),
            },
        }
    }

    fn filter_arp(&mut self, arrival: &Arrival<'_>, arp: &Arp) -> Result<(), Refusal> {
        if arrival.is_guest() && arp.sender_mac != arrival.head.source {
            return Err(Refusal::ArpSender);
        }
        // A probe asks for an address without having one.
        let is_allowed = match arp.sender.is_unspecified() {
            true => self.may_ask_for(arrival, IpAddr::V4(arp.target)),
            false => self.may_use_ipv4(arrival, arp.sender),
        };
        match is_allowed {
            true => Ok(()),
            false => Err(Refusal::ArpSender),
        }
    }

    /// Whether a port may ask for an address, as far as that was assigned.
    ///
    /// A host that receives a question for the address that it asks for itself gives it up (RFC 4862, section 5.4.3; RFC 5227, section 2.1.1). Those behind
    /// an uplink can use the address out there, and are to learn whose it is, but not meanwhile. A guest cannot use it: there is nothing to ask.
    pub(super) fn may_ask_for(&mut self, arrival: &Arrival<'_>, address: IpAddr) -> bool {
        let Some(assigned) = self.assigned.get_mut(&(arrival.vlan, address)) else {
            return true;
        };
        if assigned.port == arrival.from {
            assigned.asked = Some(arrival.now);
            return true;
        }
        // The network itself gives nothing up, and answers.
        if self.gates[usize::from(assigned.port.0)].place.kind == PortKind::Station {
            return true;
        }
        let is_asking = |asked| arrival.now.saturating_sub(asked) < TENTATIVE;
        !arrival.is_guest() && !assigned.asked.is_some_and(is_asking)
    }

    #[inline]
    fn filter_ipv4(&self, arrival: &Arrival<'_>, ip: &Ipv4) -> Result<(), Refusal> {
        if arrival.is_guest() {
            check_transport(ip.transport, (DHCP_SERVER, DHCP_CLIENT))?;
        }
        if self.may_use_ipv4(arrival, ip.source) {
            return Ok(());
        }
        // Before it has an address, a guest asks for one and says which groups it is in.
        let asks_for_address = matches!(
            ip.transport,
            Transport::Udp {
                source_port: DHCP_CLIENT,
                destination_port: DHCP_SERVER
            }
        );
        let without_address = ip.source.is_unspecified()
            && ip.fragment == Fragment::Whole
            && (asks_for_address || ip.protocol == protocol::IGMP);
        match without_address {
            true => Ok(()),
            false => Err(Refusal::Ipv4Source),
        }
    }

    #[inline]
    fn may_use_ipv4(&self, arrival: &Arrival<'_>, address: Ipv4Addr) -> bool {
        match arrival.ipv4 {
            Some(own) => own == address,
            None => self.is_free(arrival, IpAddr::V4(address)),
        }
    }

    /// Whether an address was assigned to no other port.
    pub(super) fn is_free(&self, arrival: &Arrival<'_>, address: IpAddr) -> bool {
        if self.assigned.is_empty() {
            return true;
        }
        let owner = self.assigned.get(&(arrival.vlan, address));
        owner.is_none_or(|owner| owner.port == arrival.from)
    }

    fn filter_ipv6(&mut self, arrival: &Arrival<'_>, ip: &Ipv6) -> Result<Option<PortId>, Refusal> {
        check_transport(ip.transport, (DHCPV6_SERVER, DHCPV6_CLIENT))?;
        let kind = match ip.transport {
            Transport::Icmpv6 { kind, .. } => Some(kind),
            _ => None,
        };
        if ip.source.is_unspecified() {
            // Before it has an address, a host asks whether it is taken, for routers, and says which groups it is in.
            if !matches!(kind, Some(131 | 132 | 133 | 135 | 143)) {
                return Err(Refusal::Ipv6Source);
            }
        } else {
            self.use_ipv6(arrival, ip.source)?;
        }
        match kind {
            Some(kind) if Neighbour::has_type(kind) => self.filter_neighbour(arrival, ip),
            _ => Ok(None),
        }
    }

    fn filter_neighbour(
        &mut self,
        arrival: &Arrival<'_>,
        ip: &Ipv6,
    ) -> Result<Option<PortId>, Refusal> {
        let message = Neighbour::parse(&arrival.head, ip, arrival.snapshot);
        let neighbour = message
            .filter(|neighbour| neighbour.complete && ip.fragment == Fragment::Whole)
            .ok_or(Refusal::HiddenHeaders)?;
        let other = |address: MacAddress| address != arrival.head.source;
        if neighbour.link_layer.is_some_and(other) {
            return Err(Refusal::NeighbourAddress);
        }
        match (neighbour.message, neighbour.target) {
            (NeighbourMessage::Advertisement, Some(target)) => {
                self.use_ipv6(arrival, target).map(|()| None)
            }
            (NeighbourMessage::Solicitation, Some(target)) if ip.source.is_unspecified() => {
                self.ask_for_ipv6(arrival, target)
            }
            _ => Ok(None),
        }
    }

    /// A port asks whether another has an address, as it wants it itself. If one has it the question is for that one alone: the rest, the network itself above
    /// all, take the address of a question for the sender's.
    fn ask_for_ipv6(
        &mut self,
        arrival: &Arrival<'_>,
        target: Ipv6Addr,
    ) -> Result<Option<PortId>, Refusal> {
        if !self.may_ask_for(arrival, IpAddr::V6(target)) {
            return Err(Refusal::Ipv6Taken);
        }
        let key = (arrival.vlan, target);
        let taken = self.bindings.owner(arrival.now, key);
        match taken.filter(|owner| owner.port != arrival.from) {
            // No host asks for what is made of another's MAC address.
            Some(_) if self.is_made_of_another(arrival, target) => Err(Refusal::Ipv6Taken),
            Some(owner) if arrival.now.saturating_sub(owner.since) < TENTATIVE => {
                Err(Refusal::Ipv6Taken)
            }
            Some(owner) => Ok(Some(owner.port)),
            // The network itself has it, and will say so.
            None if !self.is_free(arrival, IpAddr::V6(target)) => Ok(None),
            None => {
                self.use_ipv6(arrival, target)?;
                self.bindings.renew(arrival.now, key, arrival.from);
                Ok(None)
            }
        }
    }

    /// A port uses an address as its own.
    fn use_ipv6(&mut self, arrival: &Arrival<'_>, address: Ipv6Addr) -> Result<(), Refusal> {
        if !self.is_free(arrival, IpAddr::V6(address)) {
            return Err(Refusal::Ipv6Taken);
        }
        let key = (arrival.vlan, address);
        let config = &self.ports[arrival.from.0.into()].config;
        let Some(guard) = &config.ipv6_guard else {
            let is_taken = self.bindings.owner(arrival.now, key).is_some()
                || self.is_made_of_another(arrival, address);
            return match is_taken {
                true => Err(Refusal::Ipv6Taken),
                false => Ok(()),
            };
        };
        if config.addresses.contains(&IpAddr::V6(address)) {
            return Ok(());
        }
        if address.is_multicast() || address.is_loopback() {
            return Err(Refusal::Ipv6Source);
        }
        if !guard.allows(address) || guard.addresses_max == 0 {
            return Err(Refusal::Ipv6Source);
        }
        // An address that a host would make of another port's MAC address is that port's, also before it has started.
        let bound = config.bound(guard.addresses_max);
        if self.is_made_of_another(arrival, address) {
            return Err(Refusal::Ipv6Taken);
        }
        match self.bindings.claim(arrival.now, key, arrival.from, bound) {
            Claim::Own => Ok(()),
            Claim::Taken => Err(Refusal::Ipv6Taken),
        }
    }

    /// Whether a host would make the address of a MAC address that is another port's, or known to be behind one.
    pub(super) fn is_made_of_another(&self, arrival: &Arrival<'_>, address: Ipv6Addr) -> bool {
        let Some(mac) = made_of(address) else {
            return false;
        };
        let learned = || {
            let key = learned_key(arrival.vlan, mac);
            Some(self.learned.owner(arrival.now, key)?.port)
        };
        let assigned = self.stations.get(&mac.to_u64()).copied();
        let owner = assigned.or_else(learned);
        owner.is_some_and(|owner| !self.is_same_side(arrival, owner))
    }
}

/// The MAC address of which a host would make this IPv6 address by itself.
pub(super) fn made_of(address: Ipv6Addr) -> Option<MacAddress> {
    let identifier = address.octets().last_chunk::<8>().copied()?;
    MacAddress::from_interface_identifier(identifier)
}

/// Refuses what a filter would have to see and cannot, servers' answers, and what only routers say.
#[inline]
fn check_transport(transport: Transport, (server, client): (u16, u16)) -> Result<(), Refusal> {
    match transport {
        // A client takes an answer from any port (RFC 2131, section 4.1; RFC 8415, section 7.2).
        Transport::Udp {
            source_port,
            destination_port,
        } if source_port == server || destination_port == client => Err(Refusal::RogueDhcp),
        Transport::Icmpv6 {
            kind: 134 | 137, ..
        } => Err(Refusal::RogueRouter),
        Transport::Hidden => Err(Refusal::HiddenHeaders),
        Transport::Cut => Err(Refusal::Malformed),
        _ => Ok(()),
    }
}
