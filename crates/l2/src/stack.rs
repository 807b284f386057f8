//! The IP stack behind ping and DNS: `smoltcp`'s, below which there is no Ethernet.
//!
//! # Theory of operation
//!
//! To `smoltcp` this is a link on which packets of IP just arrive and leave, so that it never looks for a neighbour. What leaves while a packet is
//! worked on goes to the MAC address that this packet came from, if it is for the same IP address. Anything else can only belong to a TCP connection:
//! those are kept in [`CONNECTIONS`] slots, and a slot knows the MAC address and the port of the network that it was opened from.
//!
//! A port has [`CONNECTIONS_EACH`] of the slots at most, whatever MAC addresses are used behind it, and a connection on which nothing is asked ends after [`IDLE_TIME`]. So a guest that
//! opens connections and leaves them costs the others nothing. UDP, which is what resolvers use, has no state at all.

use core::net::IpAddr;
use std::collections::VecDeque;
use std::time::{Duration, Instant};

use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::{tcp, udp};
use smoltcp::wire::{
    HardwareAddress, IpAddress, IpCidr, IpProtocol, IpVersion, Ipv4Packet, Ipv6Cidr, Ipv6ExtHeader,
    Ipv6Packet, TcpPacket,
};
use wire::ethernet::MacAddress;

use crate::asker::Asker;
use crate::config::StationConfig;
use crate::dns::Names;

const DNS_PORT: u16 = 53;

/// How many TCP connections there can be at a time, and how many of them one port of the network may have.
pub(crate) const CONNECTIONS: usize = 8;
pub(crate) const CONNECTIONS_EACH: usize = 2;

/// How long a connection is kept on which no question comes.
pub(crate) const IDLE_TIME: Duration = Duration::from_secs(10);

/// A longer question over TCP ends its connection; with its name of 255 bytes at most none needs more.
const MAX_QUESTION_LEN: usize = 2046;
const RECEIVE_BUFFER_LEN: usize = MAX_QUESTION_LEN + 2;
const SEND_BUFFER_LEN: usize = 4096;

/// Room for the datagrams of one packet that arrived and its answer, and some to spare.
const DATAGRAMS: usize = 4;
const DATAGRAM_BUFFER_LEN: usize = 4096;

/// The shortest segments that a guest can ask for, as of Linux (`TCP_MIN_MSS` in include/net/tcp.h). With ones of a byte an answer would take a packet for each.
pub(crate) const MIN_SEGMENT_LEN: u16 = 88;

/// The most packets that leave the stack when it is called once: an answer of its own, and one of each socket.
pub(crate) const MAX_PACKETS: usize = 1 + CONNECTIONS + 1;

pub(crate) struct Stack {
    interface: Interface,
    link: Link,
    sockets: SocketSet<'static>,
    datagrams: SocketHandle,
    slots: Vec<Slot>,
    /// Whose packet is at hand.
    sender: Option<Sender>,
    out: VecDeque<(MacAddress, Vec<u8>)>,
    /// The first time: the zero of smoltcp's clock.
    epoch: Option<Instant>,
    poll_at: Option<Instant>,
}

/// A place for a TCP connection.
struct Slot {
    socket: SocketHandle,
    /// The connection's opener, and when it is given up.
    peer: Option<Peer>,
}

/// Where a packet came from, and answers go.
#[derive(Clone, Copy)]
pub(crate) struct Sender {
    pub address: IpAddr,
    pub mac: MacAddress,
    pub asker: Asker,
}

#[derive(Clone, Copy)]
struct Peer {
    sender: Sender,
    deadline: Instant,
}

impl Stack {
    pub fn new(config: &StationConfig) -> Self {
        let mut link = Link {
            mtu: config.mtu.into(),
            arrived: None,
            left: VecDeque::new(),
        };
        let mut settings = Config::new(HardwareAddress::Ip);
        settings.random_seed = config.seed;
        let mut interface = Interface::new(settings, &mut link, smoltcp::time::Instant::ZERO);
        let ipv4 = config.ipv4.map(|ipv4| IpCidr::Ipv4(ipv4.cidr()));
        let ipv6 = config.ipv6.map(|address| [address, config.link_local()]);
        let ipv6 = ipv6
            .into_iter()
            .flatten()
            .map(|address| IpCidr::Ipv6(Ipv6Cidr::new(address, 64)));
        interface.update_ip_addrs(|addresses| {
            for address in ipv4.into_iter().chain(ipv6) {
                // Three, and the feature of smoltcp that was chosen has room for four.
                let _ = addresses.push(address);
            }
        });
        let mut sockets = SocketSet::new(Vec::new());
        let buffer = || {
            udp::PacketBuffer::new(
                vec![udp::PacketMetadata::EMPTY; DATAGRAMS],
                vec![0; DATAGRAM_BUFFER_LEN],
            )
        };
        let mut socket = udp::Socket::new(buffer(), buffer());
        let mut slots = Vec::new();
        if config.dns {
            socket
                .bind(DNS_PORT)
                .expect("a new socket, and a port that is not zero");
            slots = (0..CONNECTIONS).map(|_| Slot::new(&mut sockets)).collect();
        }
        Self {
            interface,
            link,
            datagrams: sockets.add(socket),
            sockets,
            slots,
            sender: None,
            out: VecDeque::new(),
            epoch: None,
            poll_at: None,
        }
    }

    /// Takes a packet that is for the station.
    pub fn receive(&mut self, now: Instant, sender: Sender, packet: &[u8], names: &mut Names<'_>) {
        let mut packet = packet.to_vec();
        // What is no such packet stays as it is.
        let _ = raise_segment_len(&mut packet);
        self.link.arrived = Some(packet);
        self.sender = Some(sender);
        // What a port may know can have changed since a connection was opened from there.
        let peers = self.slots.iter_mut().filter_map(|slot| slot.peer.as_mut());
        for peer in peers.filter(|peer| peer.sender.asker.port == sender.asker.port) {
            peer.sender.asker = sender.asker;
        }
        self.poll(now, names);
        self.sender = None;
    }

    /// Does what is due.
    pub fn poll(&mut self, now: Instant, names: &mut Names<'_>) {
        let epoch = *self.epoch.get_or_insert(now);
        let time = smoltcp::time::Instant::from_micros(
            i64::try_from(now.saturating_duration_since(epoch).as_micros()).unwrap_or(i64::MAX),
        );
        // One packet at most has arrived. What it is answered is said in the same breath, so that each socket sends once.
        let _ = self
            .interface
            .poll_ingress_single(time, &mut self.link, &mut self.sockets);
        self.answer_datagrams(names);
        self.answer_connections(now, names);
        let _ = self
            .interface
            .poll_egress(time, &mut self.link, &mut self.sockets);
        self.address();
        self.renew();
        let next = self.interface.poll_at(time, &self.sockets);
        let next =
            next.map(|at| epoch + Duration::from_micros(at.total_micros().max(0).unsigned_abs()));
        let deadline = self
            .slots
            .iter()
            .filter_map(|slot| Some(slot.peer?.deadline))
            .min();
        self.poll_at = next.into_iter().chain(deadline).min();
    }

    /// The next packet of IP, and where it goes.
    pub fn transmit(&mut self) -> Option<(MacAddress, Vec<u8>)> {
        self.out.pop_front()
    }

    pub fn poll_at(&self) -> Option<Instant> {
        self.poll_at
    }

    /// Addresses what smoltcp says.
    fn address(&mut self) {
        while let Some(packet) = self.link.left.pop_front() {
            let Some(destination) = destination(&packet) else {
                continue;
            };
            let peers = self.slots.iter().filter_map(|slot| slot.peer);
            let peers = peers.map(|peer| peer.sender);
            let mut senders = self.sender.into_iter().chain(peers);
            if let Some(to) = senders.find(|sender| sender.address == destination) {
                self.out.push_back((to.mac, packet));
            }
        }
    }

    fn answer_datagrams(&mut self, names: &mut Names<'_>) {
        let socket = self.sockets.get_mut::<udp::Socket>(self.datagrams);
        // They are read with the packet that brings them.
        let Some(Sender { asker, .. }) = self.sender else {
            return;
        };
        while let Ok((question, from)) = socket.recv() {
            let Some(answer) = names.answer(&asker, question) else {
                continue;
            };
            // Goes back from the address that was asked. If there is no room it is lost, as datagrams are.
            let _ = socket.send_slice(&answer, from);
        }
    }

    fn answer_connections(&mut self, now: Instant, names: &mut Names<'_>) {
        for index in 0..self.slots.len() {
            self.enter(index, now);
            let slot = &mut self.slots[index];
            let socket = self.sockets.get_mut::<tcp::Socket>(slot.socket);
            let Some(peer) = &mut slot.peer else {
                continue;
            };
            // Each step takes bytes out of a buffer of limited size.
            let end = loop {
                match answer_next(socket, &peer.sender.asker, names) {
                    Step::Answered => peer.deadline = now + IDLE_TIME,
                    end => break end,
                }
            };
            match end {
                // The guest has said all that it wanted to.
                Step::Nothing if socket.state() == tcp::State::CloseWait => socket.close(),
                Step::Nonsense => socket.abort(),
                _ => {}
            }
            if peer.deadline <= now {
                socket.abort();
            }
        }
    }

    /// Notices a connection that has just been opened, by this asker.
    fn enter(&mut self, index: usize, now: Instant) {
        let socket = self
            .sockets
            .get_mut::<tcp::Socket>(self.slots[index].socket);
        let (None, Some(remote), Some(sender)) = (
            self.slots[index].peer,
            socket.remote_endpoint(),
            self.sender,
        ) else {
            return;
        };
        if IpAddr::from(remote.addr) != sender.address {
            return;
        }
        let others = self
            .slots
            .iter()
            .filter_map(|slot| slot.peer)
            .filter(|peer| peer.sender.asker.port == sender.asker.port)
            .count();
        if others >= CONNECTIONS_EACH {
            socket.abort();
        }
        self.slots[index].peer = Some(Peer {
            sender,
            deadline: now + IDLE_TIME,
        });
    }

    /// A slot whose connection is over, and whose last word is said, is for the next.
    fn renew(&mut self) {
        for slot in &mut self.slots {
            let socket = self.sockets.get_mut::<tcp::Socket>(slot.socket);
            if socket.remote_endpoint().is_none() {
                slot.peer = None;
                socket
                    .listen(DNS_PORT)
                    .expect("a socket without a peer, and a port that is not zero");
            }
        }
    }
}

impl Slot {
    fn new(sockets: &mut SocketSet<'static>) -> Self {
        let buffer = |len| tcp::SocketBuffer::new(vec![0; len]);
        let mut socket = tcp::Socket::new(buffer(RECEIVE_BUFFER_LEN), buffer(SEND_BUFFER_LEN));
        // Everything is said at once: what would be saved by waiting is not worth a timer.
        socket.set_ack_delay(None);
        socket.set_nagle_enabled(false);
        socket
            .listen(DNS_PORT)
            .expect("a new socket, and a port that is not zero");
        Self {
            socket: sockets.add(socket),
            peer: None,
        }
    }
}

/// What became of the next question on a connection.
enum Step {
    Answered,
    /// There is none, or not all of it.
    Nothing,
    /// There is no room for the answer before the guest takes the ones before.
    Full,
    /// That is not DNS.
    Nonsense,
}

/// Answers a question, which has its length in two bytes before it (RFC 1035, 4.2.2), as has the answer.
fn answer_next(socket: &mut tcp::Socket<'_>, asker: &Asker, names: &mut Names<'_>) -> Step {
    let mut len = [0; 2];
    if !matches!(socket.peek_slice(&mut len), Ok(2)) {
        return Step::Nothing;
    }
    let len = usize::from(u16::from_be_bytes(len));
    if len > MAX_QUESTION_LEN {
        return Step::Nonsense;
    }
    let mut question = vec![0; 2 + len];
    if socket.recv_queue() < question.len() {
        return Step::Nothing;
    }
    // No answer is longer than that, so that there is room for one at last.
    if socket.send_capacity() - socket.send_queue() < SEND_BUFFER_LEN / 2 {
        return Step::Full;
    }
    if socket.recv_slice(&mut question) != Ok(question.len()) {
        return Step::Nonsense;
    }
    let Some(answer) = names.answer(asker, &question[2..]) else {
        return Step::Nonsense;
    };
    let Ok(answer_len) = u16::try_from(answer.len()) else {
        return Step::Nonsense;
    };
    let framed = [&answer_len.to_be_bytes()[..], &answer].concat();
    match socket.send_slice(&framed) == Ok(framed.len()) {
        true => Step::Answered,
        false => Step::Nonsense,
    }
}

fn destination(packet: &[u8]) -> Option<IpAddr> {
    match IpVersion::of_packet(packet).ok()? {
        IpVersion::Ipv4 => Some(Ipv4Packet::new_checked(packet).ok()?.dst_addr().into()),
        IpVersion::Ipv6 => Some(Ipv6Packet::new_checked(packet).ok()?.dst_addr().into()),
    }
}

/// Has the first packet of a TCP connection ask for segments of [`MIN_SEGMENT_LEN`] at least, since smoltcp sends as short ones as it is asked for.
fn raise_segment_len(packet: &mut [u8]) -> Option<()> {
    let (source, destination, start): (IpAddress, IpAddress, usize) =
        match IpVersion::of_packet(packet).ok()? {
            IpVersion::Ipv4 => {
                let header = Ipv4Packet::new_checked(&packet).ok()?;
                let is_tcp = header.next_header() == IpProtocol::Tcp;
                let start = is_tcp.then_some(header.header_len().into())?;
                (header.src_addr().into(), header.dst_addr().into(), start)
            }
            IpVersion::Ipv6 => {
                let header = Ipv6Packet::new_checked(&packet).ok()?;
                let (mut next, mut start) = (header.next_header(), header.header_len());
                // The one extension header behind which smoltcp looks for TCP.
                if next == IpProtocol::HopByHop {
                    let extension = Ipv6ExtHeader::new_checked(header.payload()).ok()?;
                    next = extension.next_header();
                    start += 8 * (1 + usize::from(extension.header_len()));
                }
                let start = (next == IpProtocol::Tcp).then_some(start)?;
                (header.src_addr().into(), header.dst_addr().into(), start)
            }
        };
    let mut segment = TcpPacket::new_checked(packet.get_mut(start..)?).ok()?;
    if !segment.syn() || !segment.verify_checksum(&source, &destination) {
        return None;
    }
    let mut options = segment.options_mut();
    while let [kind, rest @ ..] = options {
        options = match (*kind, rest) {
            (0, _) => break,
            (1, rest) => rest,
            (kind, [len, rest @ ..]) => {
                let (value, behind) =
                    rest.split_at_mut_checked(usize::from(*len).checked_sub(2)?)?;
                if let (2, Ok(value)) = (kind, <&mut [u8; 2]>::try_from(value)) {
                    *value = u16::from_be_bytes(*value)
                        .max(MIN_SEGMENT_LEN)
                        .to_be_bytes();
                }
                behind
            }
            _ => break,
        };
    }
    segment.fill_checksum(&source, &destination);
    Some(())
}

/// What smoltcp takes for a link: one packet that has arrived, and those that leave.
struct Link {
    mtu: usize,
    arrived: Option<Vec<u8>>,
    left: VecDeque<Vec<u8>>,
}

impl Device for Link {
    type RxToken<'a> = Arrived;
    type TxToken<'a> = Leaving<'a>;

    fn receive(&mut self, _now: smoltcp::time::Instant) -> Option<(Arrived, Leaving<'_>)> {
        let packet = self.arrived.take()?;
        Some((Arrived(packet), Leaving(&mut self.left)))
    }

    fn transmit(&mut self, _now: smoltcp::time::Instant) -> Option<Leaving<'_>> {
        (self.left.len() < MAX_PACKETS).then_some(Leaving(&mut self.left))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ip;
        capabilities.max_transmission_unit = self.mtu;
        capabilities
    }
}

struct Arrived(Vec<u8>);

impl RxToken for Arrived {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, consume: F) -> R {
        consume(&self.0)
    }
}

struct Leaving<'a>(&'a mut VecDeque<Vec<u8>>);

impl TxToken for Leaving<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, fill: F) -> R {
        let mut packet = vec![0; len];
        let result = fill(&mut packet);
        self.0.push_back(packet);
        result
    }
}

#[cfg(test)]
mod tests;
