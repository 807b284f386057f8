//! A guest in memory: smoltcp's IP stack and clients on an Ethernet card, on a wire with a station.

use std::collections::VecDeque;

use smoltcp::iface::{Config, Interface, SocketHandle, SocketSet};
use smoltcp::phy::{Device, DeviceCapabilities, Medium, RxToken, TxToken};
use smoltcp::socket::{AnySocket, dhcpv4, dns, icmp, tcp};
use smoltcp::time::Instant as SmolInstant;
use smoltcp::wire::{
    DnsQueryType, EthernetAddress, Icmpv4Packet, Icmpv4Repr, Icmpv6Packet, Icmpv6Repr, IpAddress,
    IpCidr,
};

use super::*;

pub(super) struct Guest {
    pub mac: MacAddress,
    card: Card,
    interface: Interface,
    sockets: SocketSet<'static>,
}

/// One station, and some guests, and the time that all have.
pub(super) struct Wire {
    pub station: Station,
    pub now: Instant,
    /// The port by which all frames come; without one each guest has its own.
    pub port: Option<Asker>,
    start: Instant,
    /// What the station has sent, oldest first.
    pub sent: Vec<Vec<u8>>,
}

impl Wire {
    pub fn new(config: StationConfig, hosts: Vec<Host>) -> Self {
        let mut station = Station::new(config).unwrap();
        station.set_hosts(hosts).unwrap();
        let now = Instant::now();
        Self {
            station,
            now,
            port: None,
            start: now,
            sent: Vec::new(),
        }
    }

    /// Gives a frame to the station. Answers that come at once.
    pub fn say(&mut self, frame: &[u8]) -> Vec<Vec<u8>> {
        let source = frame.get(11).copied().unwrap_or_default();
        let asker = self.port.unwrap_or(asker(source));
        self.station.receive(self.now, &asker, frame);
        let answers: Vec<_> = std::iter::from_fn(|| self.station.transmit()).collect();
        self.sent.extend(answers.clone());
        answers
    }

    /// Lets a guest and the station talk until both have nothing more to say at this time.
    pub fn settle(&mut self, guest: &mut Guest) {
        loop {
            let time = SmolInstant::from_micros((self.now - self.start).as_micros() as i64);
            guest
                .interface
                .poll(time, &mut guest.card, &mut guest.sockets);
            let spoken: Vec<_> = guest.card.leaving.drain(..).collect();
            if spoken.is_empty() && guest.card.arriving.is_empty() {
                return;
            }
            for frame in spoken {
                for answer in self.say(&frame) {
                    let destination = MacAddress(answer[..6].try_into().unwrap());
                    if destination == guest.mac || destination.is_multicast() {
                        guest.card.arriving.push_back(answer);
                    }
                }
            }
        }
    }

    /// Lets time pass, in steps in which timers of both are served, until this is so.
    pub fn until<T>(
        &mut self,
        guest: &mut Guest,
        most: Duration,
        mut is_so: impl FnMut(&mut Guest) -> Option<T>,
    ) -> Option<T> {
        let end = self.now + most;
        loop {
            if self.station.poll_at().is_some_and(|at| at <= self.now) {
                self.station.handle_timeout(self.now);
                while let Some(frame) = self.station.transmit() {
                    guest.card.arriving.push_back(frame);
                }
            }
            self.settle(guest);
            if let Some(so) = is_so(guest) {
                return Some(so);
            }
            if self.now >= end {
                return None;
            }
            self.now += Duration::from_millis(100);
        }
    }
}

impl Guest {
    /// A guest without any address.
    pub fn new(mac: MacAddress) -> Self {
        Self::with_link(mac, 9000)
    }

    /// One whose packets have so many bytes.
    pub fn with_link(mac: MacAddress, mtu: usize) -> Self {
        let mut card = Card {
            mtu,
            arriving: VecDeque::new(),
            leaving: VecDeque::new(),
        };
        let mut config = Config::new(EthernetAddress(mac.0).into());
        config.random_seed = mac.to_u64();
        let interface = Interface::new(config, &mut card, SmolInstant::ZERO);
        Self {
            mac,
            card,
            interface,
            sockets: SocketSet::new(Vec::new()),
        }
    }

    /// A guest that has the address of the host with this number, and the IPv6 addresses that it makes for itself.
    pub fn with_addresses(number: u8) -> Self {
        let host = host(number);
        let mut guest = Self::new(host.mac);
        let link_local = slaac_address("fe80::".parse().unwrap(), host.mac);
        guest.add(IpCidr::new(host.ipv4.unwrap().into(), 24));
        guest.add(IpCidr::new(host.ipv6.unwrap().into(), 64));
        guest.add(IpCidr::new(link_local.into(), 64));
        guest
    }

    pub fn add(&mut self, address: IpCidr) {
        self.interface
            .update_ip_addrs(|addresses| addresses.push(address).unwrap());
    }

    pub fn socket<T: AnySocket<'static>>(&mut self, handle: SocketHandle) -> &mut T {
        self.sockets.get_mut(handle)
    }

    pub fn dhcp(&mut self) -> SocketHandle {
        let mut socket = dhcpv4::Socket::new();
        // Else it believes smoltcp's own longest lease.
        socket.set_max_lease_duration(None);
        self.sockets.add(socket)
    }

    /// What DNS says about a name: addresses, or nothing after a clear answer.
    pub fn resolve(
        &mut self,
        wire: &mut Wire,
        server: IpAddr,
        name: &str,
        kind: DnsQueryType,
    ) -> Option<Vec<IpAddr>> {
        let socket = dns::Socket::new(&[server.into()], vec![]);
        let handle = self.sockets.add(socket);
        let context = self.interface.context();
        let query = self
            .sockets
            .get_mut::<dns::Socket>(handle)
            .start_query(context, name, kind)
            .unwrap();
        let addresses = wire.until(self, Duration::from_secs(5), |guest| {
            match guest.socket::<dns::Socket>(handle).get_query_result(query) {
                Ok(addresses) => Some(Some(addresses.into_iter().map(IpAddr::from).collect())),
                Err(dns::GetQueryResultError::Pending) => None,
                Err(dns::GetQueryResultError::Failed) => Some(None),
            }
        });
        self.sockets.remove(handle);
        addresses.expect("an answer")
    }

    /// A ping's answerer.
    pub fn ping(&mut self, wire: &mut Wire, target: IpAddr, len: usize) -> Option<IpAddr> {
        let buffer = || icmp::PacketBuffer::new(vec![icmp::PacketMetadata::EMPTY], vec![0; 16_384]);
        let mut socket = icmp::Socket::new(buffer(), buffer());
        socket.bind(icmp::Endpoint::Ident(7)).unwrap();
        let (ident, seq_no, data) = (7, 1, &vec![b'x'; len][..]);
        let checksums = smoltcp::phy::ChecksumCapabilities::default();
        match target {
            IpAddr::V4(_) => {
                let echo = Icmpv4Repr::EchoRequest {
                    ident,
                    seq_no,
                    data,
                };
                let space = socket.send(echo.buffer_len(), target.into()).unwrap();
                echo.emit(&mut Icmpv4Packet::new_unchecked(space), &checksums);
            }
            IpAddr::V6(address) => {
                let echo = Icmpv6Repr::EchoRequest {
                    ident,
                    seq_no,
                    data,
                };
                let source = self.interface.get_source_address_ipv6(&address);
                let space = socket.send(echo.buffer_len(), target.into()).unwrap();
                echo.emit(
                    &source,
                    &address,
                    &mut Icmpv6Packet::new_unchecked(space),
                    &checksums,
                );
            }
        }
        let handle = self.sockets.add(socket);
        let answer = wire.until(self, Duration::from_secs(3), |guest| {
            let (answer, from): (&[u8], IpAddress) =
                guest.socket::<icmp::Socket>(handle).recv().ok()?;
            assert_eq!(answer[8..], vec![b'x'; len]);
            Some(from.into())
        });
        self.sockets.remove(handle);
        answer
    }

    pub fn connect(&mut self, server: IpAddr, port: u16) -> SocketHandle {
        let buffer = || tcp::SocketBuffer::new(vec![0; 8192]);
        let handle = self.sockets.add(tcp::Socket::new(buffer(), buffer()));
        let context = self.interface.context();
        let socket = self.sockets.get_mut::<tcp::Socket>(handle);
        socket
            .connect(context, (IpAddress::from(server), 53), port)
            .unwrap();
        handle
    }
}

struct Card {
    mtu: usize,
    arriving: VecDeque<Vec<u8>>,
    leaving: VecDeque<Vec<u8>>,
}

impl Device for Card {
    type RxToken<'a> = Arriving;
    type TxToken<'a> = Leaving<'a>;

    fn receive(&mut self, _now: SmolInstant) -> Option<(Arriving, Leaving<'_>)> {
        Some((
            Arriving(self.arriving.pop_front()?),
            Leaving(&mut self.leaving),
        ))
    }

    fn transmit(&mut self, _now: SmolInstant) -> Option<Leaving<'_>> {
        Some(Leaving(&mut self.leaving))
    }

    fn capabilities(&self) -> DeviceCapabilities {
        let mut capabilities = DeviceCapabilities::default();
        capabilities.medium = Medium::Ethernet;
        capabilities.max_transmission_unit = 14 + self.mtu;
        capabilities
    }
}

struct Arriving(Vec<u8>);

impl RxToken for Arriving {
    fn consume<R, F: FnOnce(&[u8]) -> R>(self, consume: F) -> R {
        consume(&self.0)
    }
}

struct Leaving<'a>(&'a mut VecDeque<Vec<u8>>);

impl TxToken for Leaving<'_> {
    fn consume<R, F: FnOnce(&mut [u8]) -> R>(self, len: usize, fill: F) -> R {
        let mut frame = vec![0; len];
        let result = fill(&mut frame);
        self.0.push_back(frame);
        result
    }
}
