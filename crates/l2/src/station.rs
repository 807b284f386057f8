//! What a network itself answers: addresses, names and pings, so that guests find each other without any configuration.
//!
//! A network has one [`Station`]. What arrives is sorted here, and goes to the module that knows the answer. To guests it looks like one more machine on the wire, with addresses of its own, that speaks
//!
//! | protocol | what the station does |
//! | --- | --- |
//! | ARP, neighbour discovery | answers for its own addresses, also to probes whether they are free |
//! | DHCPv4 | gives every guest the address that its operator wrote down, or one of a pool |
//! | router advertisement | answers solicitations with the prefix, the MTU, the resolver and the search domain |
//! | DNS, over UDP and TCP | knows the names of the network's guests, and nothing else |
//! | ping | answers |
//!
//! # Theory of operation
//!
//! The station is a state machine without I/O: frames and times go in ([`Station::receive`], [`Station::handle_timeout`]), frames and the
//! time of the next timer come out ([`Station::transmit`], [`Station::poll_at`]). It has no thread, no socket and no clock, so that the
//! switch's worker can call it between two batches, and a test can have a year go by.
//!
//! Three ideas keep it small and calm:
//!
//! - *It answers to where the question came from.* The Ethernet source of a question is the destination of its answer; no neighbour is ever
//!   looked up, so no guest can make the station wait for another's silence, and there is no neighbour cache to fill. Only TCP, whose answers
//!   may be repeated later, remembers where a peer is, in a small table.
//! - *It keeps no state for what can be computed.* An address from the operator's list is a look-up; only addresses from the pool are leases.
//! - *It never speaks first.* No periodic router advertisement, no gratuitous ARP: what it advertises does not expire, and newcomers ask. With quiet
//!   guests [`Station::poll_at`] is `None`. (The one exception is [`Station::link_up`], which the owner calls when what it advertises has changed.)
//!
//! The formats, and the IP stack behind DNS and ping, are `smoltcp`'s; the DNS messages are `domain`'s.
//!
//! # What is expected of the caller
//!
//! Frames are untagged and whole: one that a guest left to be segmented or its checksum to be filled in has to be finished first. Who may
//! say what (source addresses, rates) is the switch's to decide, before a frame gets here; the station does not rely on it for its own
//! safety. Every table in it is bounded. Whatever a frame says, its sender gets one answer at most; beside it each open connection may send a segment, so that
//! answers have to be fetched after [`MAX_QUEUED_FRAMES`] / [`MAX_ANSWERS`] frames.

use core::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::collections::VecDeque;
use std::time::Instant;

use smoltcp::wire::{EthernetFrame, EthernetProtocol, IpProtocol, Ipv4Packet, Ipv6Packet};
use wire::ethernet::MacAddress;

use crate::advertise;
use crate::asker::Asker;
use crate::config::{Host, HostError, Ipv4Settings, StationConfig, StationConfigError, is_unicast};
use crate::dhcp::{self, Lease};
use crate::dns::{Names, Resolver};
use crate::frame::{self, MAX_FRAME_LEN, Path};
use crate::hosts::{Hosts, Use};
use crate::neighbour::{self, ALL_NODES, Solicitation};
use crate::stack::{self, Sender, Stack};

/// How many frames wait for [`Station::transmit`] at most. A caller that fetches them in time loses none, from whichever port the questions were: see [`MAX_ANSWERS`].
pub const MAX_QUEUED_FRAMES: usize = 256;

/// So many frames one call of [`Station::receive`] or [`Station::handle_timeout`] makes at most: an answer, and a segment of each connection that has something to send.
pub const MAX_ANSWERS: usize = stack::MAX_PACKETS;

/// The addresses at which a network itself answers.
pub struct Station {
    config: StationConfig,
    link_local: Ipv6Addr,
    hosts: Hosts,
    dhcp: Option<dhcp::Server>,
    resolver: Option<Resolver>,
    stack: Stack,
    queue: VecDeque<Vec<u8>>,
    counters: StationCounters,
}

/// What a station has done so far.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub struct StationCounters {
    /// Frames that were given to the station.
    pub frames_received: u64,
    /// Frames that it has sent.
    pub frames_sent: u64,
    /// Frames that were not for it, or said nothing that it answers.
    pub frames_ignored: u64,
    /// Answers that were lost because they were not fetched.
    pub frames_dropped: u64,
    /// Answers to ARP and neighbour solicitations.
    pub neighbour_answers: u64,
    /// Router advertisements.
    pub advertisements: u64,
    /// Addresses that were offered.
    pub dhcp_offers: u64,
    /// Addresses that were given, or given again.
    pub dhcp_acknowledgements: u64,
    /// Addresses that were refused.
    pub dhcp_refusals: u64,
    /// Messages of DHCP that got no answer: nonsense, or from a client that is not on the list.
    pub dhcp_ignored: u64,
    /// Addresses that a guest found in use by another.
    pub dhcp_declined: u64,
    /// Questions of DNS that were answered, in whatever way.
    pub dns_answers: u64,
}

impl Station {
    /// A station before its first frame.
    pub fn new(config: StationConfig) -> Result<Self, StationConfigError> {
        config.check()?;
        let dhcp = match (config.dhcp, config.ipv4) {
            (true, Some(ipv4)) => Some(dhcp::Server::new(&config, ipv4)),
            _ => None,
        };
        Ok(Self {
            link_local: config.link_local(),
            hosts: Hosts::default(),
            dhcp,
            resolver: config.dns.then(|| Resolver::new(&config)),
            stack: Stack::new(&config),
            queue: VecDeque::new(),
            counters: StationCounters::default(),
            config,
        })
    }

    /// Goes on with what the station before this one has leased, as far as it is in this one's pool, too.
    pub fn inherit_leases(&mut self, before: &Station) {
        if let (Some(dhcp), Some(before)) = (&mut self.dhcp, &before.dhcp) {
            dhcp.inherit(before);
        }
    }

    /// Replaces the list of hosts, as a whole or not at all. Leases of addresses that now belong to a host are not renewed.
    pub fn set_hosts(&mut self, hosts: Vec<Host>) -> Result<(), HostError> {
        let hosts = Hosts::new(hosts, &self.config)?;
        let before = std::mem::replace(&mut self.hosts, hosts);
        self.hosts.remember(before);
        if let Some(resolver) = &mut self.resolver {
            resolver.hosts_have_changed();
        }
        if let Some(dhcp) = &mut self.dhcp {
            dhcp.hosts_have_changed();
        }
        Ok(())
    }

    /// Advertises to all guests once: for when the network has just come up, or its configuration has changed.
    pub fn link_up(&mut self) {
        if let Some(own) = self.advertised() {
            self.advertise(ALL_NODES, neighbour::group_mac(ALL_NODES), own);
        }
    }

    /// Takes a frame that a guest sent: an Ethernet header and its payload, without a VLAN tag, with checksums filled in. It came by the port of `asker`. `now` never goes back.
    pub fn receive(&mut self, now: Instant, asker: &Asker, frame: &[u8]) {
        self.counters.frames_received += 1;
        if self.sort(now, asker, frame).is_none() {
            self.counters.frames_ignored += 1;
        }
    }

    /// Does what is due, when [`poll_at`](Self::poll_at) has come.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.stack.poll(
            now,
            &mut Names::new(&self.resolver, &self.hosts, &mut self.counters.dns_answers),
        );
        self.collect();
    }

    /// The next frame that the station sends.
    pub fn transmit(&mut self) -> Option<Vec<u8>> {
        let frame = self.queue.pop_front()?;
        self.counters.frames_sent += 1;
        Some(frame)
    }

    /// When [`handle_timeout`](Self::handle_timeout) is to be called: only while there is a connection to the station.
    pub fn poll_at(&self) -> Option<Instant> {
        self.stack.poll_at()
    }

    /// What the station has done so far.
    pub fn counters(&self) -> StationCounters {
        self.counters
    }

    /// The addresses of the pool that are in use at `now`.
    pub fn leases(&self, now: Instant) -> Vec<Lease> {
        self.dhcp
            .as_ref()
            .map_or_else(Vec::new, |dhcp| dhcp.leases(now))
    }

    /// `None` if the frame was ignored.
    fn sort(&mut self, now: Instant, asker: &Asker, bytes: &[u8]) -> Option<()> {
        let frame = EthernetFrame::new_checked(bytes).ok()?;
        let (source, destination) = (
            MacAddress(frame.src_addr().0),
            MacAddress(frame.dst_addr().0),
        );
        let path = Path {
            source: self.config.mac,
            destination: source,
        };
        let is_for_station = destination == self.config.mac || destination.is_multicast();
        let is_from_guest = source.is_assignable() && source != self.config.mac;
        if bytes.len() > MAX_FRAME_LEN || !is_for_station || !is_from_guest {
            return None;
        }
        match frame.ethertype() {
            EthernetProtocol::Arp => {
                let answer =
                    neighbour::answer_arp(frame.payload(), path, self.config.ipv4?.address)?;
                self.counters.neighbour_answers += 1;
                self.send(answer);
            }
            EthernetProtocol::Ipv4 => {
                self.sort_ipv4(now, frame.payload(), (path, asker), self.config.ipv4?)?
            }
            EthernetProtocol::Ipv6 => {
                self.sort_ipv6(now, frame.payload(), (path, asker), self.config.ipv6?)?
            }
            EthernetProtocol::Unknown(_) => return None,
        }
        Some(())
    }

    fn sort_ipv4(
        &mut self,
        now: Instant,
        payload: &[u8],
        (path, asker): (Path, &Asker),
        own: Ipv4Settings,
    ) -> Option<()> {
        let packet = Ipv4Packet::new_checked(payload).ok()?;
        // Beside an Ethernet frame's minimum of 60 bytes, what comes after the packet is padding.
        let packet = Ipv4Packet::new_checked(&payload[..packet.total_len().into()]).ok()?;
        let is_fragment = packet.more_frags() || packet.frag_offset() != 0;
        let is_whole = packet.header_len() >= 20 && !is_fragment;
        if packet.version() != 4 || !packet.verify_checksum() || !is_whole {
            return None;
        }
        let (source, destination) = (packet.src_addr(), packet.dst_addr());
        if let Some(request) = dhcp::Request::parse(&packet, own) {
            return self.answer_dhcp(now, &request, (path, asker));
        }
        // One to which no answer can go, or posing as the station, gets none.
        if destination != own.address || !is_unicast(source) || source == own.address {
            return None;
        }
        self.pass_on(now, IpAddr::V4(source), (path, asker), packet.into_inner());
        Some(())
    }

    fn sort_ipv6(
        &mut self,
        now: Instant,
        payload: &[u8],
        (path, asker): (Path, &Asker),
        own: Ipv6Addr,
    ) -> Option<()> {
        let packet = Ipv6Packet::new_checked(payload).ok()?;
        let packet = Ipv6Packet::new_checked(&payload[..packet.total_len()]).ok()?;
        if packet.version() != 6 {
            return None;
        }
        let (source, destination) = (packet.src_addr(), packet.dst_addr());
        let is_own = |address: Ipv6Addr| address == own || address == self.link_local;
        let is_icmp = packet.next_header() == IpProtocol::Icmpv6;
        if is_icmp && neighbour::is_neighbour_discovery(packet.payload()) {
            return self.answer_solicitation(&packet, path, own);
        }
        // Of what goes to a group, only pings are answered. Anything else would have each guest's chatter answered with an error.
        let is_ping = is_icmp && packet.payload().first() == Some(&128);
        let is_group_ping = destination == ALL_NODES && is_ping;
        if !is_own(destination) && !is_group_ping {
            return None;
        }
        if source.is_unspecified()
            || source.is_multicast()
            || source.is_loopback()
            || is_own(source)
        {
            return None;
        }
        self.hosts.hear(path.destination, source, Use::Speaks, own);
        self.pass_on(now, IpAddr::V6(source), (path, asker), packet.into_inner());
        Some(())
    }

    /// Solicitations are heard also where they are for others.
    fn answer_solicitation(
        &mut self,
        packet: &Ipv6Packet<&[u8]>,
        path: Path,
        own: Ipv6Addr,
    ) -> Option<()> {
        let solicitation = neighbour::parse_solicitation(packet)?;
        match solicitation {
            Solicitation::Router { source } | Solicitation::Neighbour { source, .. }
                if !source.is_unspecified() =>
            {
                self.hosts.hear(path.destination, source, Use::Speaks, own);
            }
            Solicitation::Neighbour { target, .. } => {
                self.hosts.hear(path.destination, target, Use::Probes, own);
            }
            Solicitation::Router { .. } => {}
        }
        match solicitation {
            Solicitation::Router { source } => {
                let own = self.advertised()?;
                // The answer is for the asker. RFC 4861, 6.2.6 would have it wait up to half a second, lest several routers talk
                // at once; here is one.
                let destination = if source.is_unspecified() {
                    ALL_NODES
                } else {
                    source
                };
                self.advertise(destination, path.destination, own);
            }
            Solicitation::Neighbour { source, target } => {
                if target != own && target != self.link_local {
                    return None;
                }
                let answer = neighbour::advertise(path, source, target, self.config.advertise);
                self.counters.neighbour_answers += 1;
                self.send(answer);
            }
        }
        Some(())
    }

    /// The address whose prefix is advertised, if any is.
    fn advertised(&self) -> Option<Ipv6Addr> {
        self.config.ipv6.filter(|_| self.config.advertise)
    }

    fn advertise(&mut self, destination: Ipv6Addr, mac: MacAddress, own: Ipv6Addr) {
        let path = Path {
            source: self.config.mac,
            destination: mac,
        };
        let message = advertise::message(&self.config, own);
        let answer = frame::neighbour_discovery(path, self.link_local, destination, &message);
        self.counters.advertisements += 1;
        self.send(answer);
    }

    fn answer_dhcp(
        &mut self,
        now: Instant,
        request: &dhcp::Request,
        (path, asker): (Path, &Asker),
    ) -> Option<()> {
        let answer =
            self.dhcp
                .as_mut()?
                .answer(now, request, (path.destination, asker), &self.hosts);
        let counters = &mut self.counters;
        match answer.outcome {
            dhcp::Outcome::Offered => counters.dhcp_offers += 1,
            dhcp::Outcome::Acknowledged => counters.dhcp_acknowledgements += 1,
            dhcp::Outcome::Refused => counters.dhcp_refusals += 1,
            dhcp::Outcome::Declined => counters.dhcp_declined += 1,
            dhcp::Outcome::Released => {}
            dhcp::Outcome::Ignored => counters.dhcp_ignored += 1,
        }
        let (destination, message): (Ipv4Addr, Vec<u8>) = answer.message?;
        let own = self.config.ipv4?.address;
        let answer = frame::udp(
            path,
            (own, dhcp::SERVER_PORT),
            (destination, dhcp::CLIENT_PORT),
            &message,
        );
        self.send(answer);
        Some(())
    }

    /// Gives a packet to the IP stack, whose answers go to where it came from.
    fn pass_on(
        &mut self,
        now: Instant,
        address: IpAddr,
        (path, asker): (Path, &Asker),
        packet: &[u8],
    ) {
        let mut names = Names::new(&self.resolver, &self.hosts, &mut self.counters.dns_answers);
        let sender = Sender {
            address,
            mac: path.destination,
            asker: *asker,
        };
        self.stack.receive(now, sender, packet, &mut names);
        self.collect();
    }

    fn collect(&mut self) {
        while let Some((mac, packet)) = self.stack.transmit() {
            let protocol = match packet.first() {
                Some(first) if first >> 4 == 4 => EthernetProtocol::Ipv4,
                _ => EthernetProtocol::Ipv6,
            };
            let path = Path {
                source: self.config.mac,
                destination: mac,
            };
            let frame = frame::ethernet(path, protocol, &packet);
            self.send(frame);
        }
    }

    fn send(&mut self, frame: Vec<u8>) {
        if self.queue.len() == MAX_QUEUED_FRAMES {
            self.counters.frames_dropped += 1;
            return;
        }
        self.queue.push_back(frame);
    }
}

#[cfg(test)]
mod tests;
