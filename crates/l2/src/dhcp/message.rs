//! The messages of DHCP: what is read of a client's, and what a server's says.

use core::net::Ipv4Addr;
use std::time::Duration;

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    DhcpFlags, DhcpMessageType, DhcpOption, DhcpPacket, DhcpRepr, EthernetAddress, IpProtocol,
    Ipv4Packet, UdpPacket, UdpRepr,
};
use wire::ethernet::MacAddress;

use super::{CLIENT_PORT, SERVER_PORT};
use crate::advertise::encoded_domain;
use crate::config::{Host, Ipv4Settings, StationConfig};

const MAGIC: u32 = 0x6382_5363;
const BOOT_REQUEST: u8 = 1;

/// BOOTP's size of a message, below which some clients drop it.
const MIN_MESSAGE_LEN: usize = 300;
/// What every client takes (RFC 2131, section 2): an IP packet of 576 bytes.
const MIN_PACKET_LEN: u16 = 576;
const IP_AND_UDP_LEN: usize = 28;

mod code {
    pub const SUBNET_MASK: u8 = 1;
    pub const ROUTER: u8 = 3;
    pub const DNS_SERVER: u8 = 6;
    pub const HOST_NAME: u8 = 12;
    pub const DOMAIN_NAME: u8 = 15;
    pub const MTU: u8 = 26;
    pub const BROADCAST_ADDRESS: u8 = 28;
    pub const REQUESTED_ADDRESS: u8 = 50;
    pub const MESSAGE_TYPE: u8 = 53;
    pub const SERVER_IDENTIFIER: u8 = 54;
    pub const PARAMETER_LIST: u8 = 55;
    pub const MAX_MESSAGE_SIZE: u8 = 57;
    pub const RENEWAL_TIME: u8 = 58;
    pub const REBINDING_TIME: u8 = 59;
    pub const CLIENT_IDENTIFIER: u8 = 61;
    pub const DOMAIN_SEARCH: u8 = 119;
    pub const CLASSLESS_ROUTES: u8 = 121;
}

/// What a client says.
#[derive(Clone, Debug)]
pub(crate) struct Request {
    pub kind: DhcpMessageType,
    pub transaction: u32,
    pub seconds: u16,
    pub wants_broadcast: bool,
    pub is_relayed: bool,
    /// The client's word on itself.
    pub mac: MacAddress,
    /// The address that it has.
    pub client: Option<Ipv4Addr>,
    /// The address that it wants.
    pub wanted: Option<Ipv4Addr>,
    /// The server that it has chosen.
    pub server: Option<Ipv4Addr>,
    /// The options it asks for; everything, if it does not say.
    pub parameters: Option<Vec<u8>>,
    pub identifier: Option<Vec<u8>>,
    pub max_packet_len: u16,
}

impl Request {
    /// The message in a packet whose header was checked, if it is from a client to a server, and reaches this one.
    pub fn parse(packet: &Ipv4Packet<&[u8]>, own: Ipv4Settings) -> Option<Self> {
        let (source, destination) = (packet.src_addr(), packet.dst_addr());
        let reaches = destination.is_broadcast()
            || destination == own.address
            || Some(destination) == own.cidr().broadcast();
        if packet.next_header() != IpProtocol::Udp || !reaches {
            return None;
        }
        let datagram = UdpPacket::new_checked(packet.payload()).ok()?;
        UdpRepr::parse(
            &datagram,
            &source.into(),
            &destination.into(),
            &ChecksumCapabilities::default(),
        )
        .ok()?;
        if datagram.src_port() != CLIENT_PORT || datagram.dst_port() != SERVER_PORT {
            return None;
        }
        let message = DhcpPacket::new_checked(datagram.payload()).ok()?;
        let is_ethernet = u16::from(message.hardware_type()) == 1 && message.hardware_len() == 6;
        if u8::from(message.opcode()) != BOOT_REQUEST
            || !is_ethernet
            || message.magic_number() != MAGIC
        {
            return None;
        }
        Self::read(&message)
    }

    fn read(message: &DhcpPacket<&[u8]>) -> Option<Self> {
        let first = |code: u8| {
            message
                .options()
                .find(|option| option.kind == code)
                .map(|option| option.data)
        };
        let address = |code: u8| {
            first(code)
                .and_then(|data| <[u8; 4]>::try_from(data).ok())
                .map(Ipv4Addr::from)
        };
        let [kind] = first(code::MESSAGE_TYPE)? else {
            return None;
        };
        let max_packet_len = match first(code::MAX_MESSAGE_SIZE) {
            Some(&[high, low]) => u16::from_be_bytes([high, low]).max(MIN_PACKET_LEN),
            _ => MIN_PACKET_LEN,
        };
        Some(Self {
            kind: DhcpMessageType::from(*kind),
            transaction: message.transaction_id(),
            seconds: message.secs(),
            wants_broadcast: message.flags().contains(DhcpFlags::BROADCAST),
            is_relayed: !message.relay_agent_ip().is_unspecified(),
            mac: MacAddress(message.client_hardware_address().0),
            client: Some(message.client_ip()).filter(|address| !address.is_unspecified()),
            wanted: address(code::REQUESTED_ADDRESS).filter(|address| !address.is_unspecified()),
            server: address(code::SERVER_IDENTIFIER),
            parameters: first(code::PARAMETER_LIST).map(<[u8]>::to_vec),
            identifier: first(code::CLIENT_IDENTIFIER).map(<[u8]>::to_vec),
            max_packet_len,
        })
    }

    fn asks_for(&self, code: u8) -> bool {
        self.parameters
            .as_ref()
            .is_none_or(|list| list.contains(&code))
    }
}

/// What is the same in every answer.
pub(super) struct Facts {
    own: Ipv4Addr,
    /// Options that are the same for every client, in the order of their importance.
    network: Vec<(u8, Vec<u8>)>,
    lease_seconds: u32,
    mtu: u16,
}

impl Facts {
    pub fn new(config: &StationConfig, ipv4: Ipv4Settings) -> Self {
        let mut network = vec![(code::SUBNET_MASK, ipv4.cidr().netmask().octets().to_vec())];
        if let Some(gateway) = config.gateway {
            network.push((code::ROUTER, gateway.octets().to_vec()));
            // Zero leading bits that matter, so no byte of the destination: the default route. A client of this ignores the router (RFC 3442).
            network.push((
                code::CLASSLESS_ROUTES,
                [&[0][..], &gateway.octets()].concat(),
            ));
        }
        if config.dns {
            network.push((code::DNS_SERVER, ipv4.address.octets().to_vec()));
            network.push((code::DOMAIN_NAME, config.domain.clone().into_bytes()));
            network.push((code::DOMAIN_SEARCH, encoded_domain(&config.domain)));
        }
        network.push((code::MTU, config.mtu.to_be_bytes().to_vec()));
        if let Some(broadcast) = ipv4.cidr().broadcast() {
            network.push((code::BROADCAST_ADDRESS, broadcast.octets().to_vec()));
        }
        Self {
            own: ipv4.address,
            network,
            lease_seconds: seconds(config.lease),
            mtu: config.mtu,
        }
    }

    /// An offer, or an acknowledgement. Without an address the client has one already, and gets no times.
    pub fn message(
        &self,
        kind: DhcpMessageType,
        request: &Request,
        host: Option<&Host>,
        address: Option<Ipv4Addr>,
    ) -> Vec<u8> {
        let mut options = Vec::new();
        if address.is_some() && self.lease_seconds != u32::MAX {
            let seven_eighths = self.lease_seconds - self.lease_seconds / 8;
            options.push((
                code::RENEWAL_TIME,
                (self.lease_seconds / 2).to_be_bytes().to_vec(),
            ));
            options.push((code::REBINDING_TIME, seven_eighths.to_be_bytes().to_vec()));
        }
        let wanted = |(code, _): &&(u8, Vec<u8>)| request.asks_for(*code);
        options.extend(self.network.iter().filter(wanted).cloned());
        if let Some(host) = host.filter(|_| request.asks_for(code::HOST_NAME)) {
            options.push((code::HOST_NAME, host.name.clone().into_bytes()));
        }
        self.write(kind, request, address, &options)
    }

    pub fn refusal(&self, request: &Request) -> Vec<u8> {
        self.write(DhcpMessageType::Nak, request, None, &[])
    }

    fn write(
        &self,
        kind: DhcpMessageType,
        request: &Request,
        address: Option<Ipv4Addr>,
        options: &[(u8, Vec<u8>)],
    ) -> Vec<u8> {
        let max_len = usize::from(request.max_packet_len.min(self.mtu)) - IP_AND_UDP_LEN;
        let identifier = request.identifier.iter().map(|data| DhcpOption {
            kind: code::CLIENT_IDENTIFIER,
            data,
        });
        let options = options
            .iter()
            .map(|(kind, data)| DhcpOption { kind: *kind, data });
        let options: Vec<_> = identifier.chain(options).collect();
        let is_refusal = kind == DhcpMessageType::Nak;
        let mut message = DhcpRepr {
            message_type: kind,
            transaction_id: request.transaction,
            secs: request.seconds,
            client_hardware_address: EthernetAddress(request.mac.0),
            client_ip: request
                .client
                .filter(|_| !is_refusal)
                .unwrap_or(Ipv4Addr::UNSPECIFIED),
            your_ip: address.unwrap_or(Ipv4Addr::UNSPECIFIED),
            server_ip: Ipv4Addr::UNSPECIFIED,
            router: None,
            subnet_mask: None,
            relay_agent_ip: Ipv4Addr::UNSPECIFIED,
            broadcast: request.wants_broadcast || is_refusal,
            requested_ip: None,
            client_identifier: None,
            server_identifier: Some(self.own),
            parameter_request_list: None,
            dns_servers: None,
            max_size: None,
            lease_duration: address.map(|_| self.lease_seconds),
            renew_duration: None,
            rebind_duration: None,
            additional_options: &[],
        };
        // What does not fit is left out, the least important first; the client's identifier and the times always fit.
        let mut count = options.len();
        message.additional_options = &options;
        while message.buffer_len() > max_len && count > 0 {
            count -= 1;
            message.additional_options = &options[..count];
        }
        let mut bytes = vec![0; message.buffer_len().max(MIN_MESSAGE_LEN)];
        message
            .emit(&mut DhcpPacket::new_unchecked(&mut bytes[..]))
            .expect("a buffer of the length that was computed");
        bytes
    }
}

/// A lease in whole seconds, where the largest number is "for ever".
fn seconds(lease: Duration) -> u32 {
    u32::try_from(lease.as_secs()).unwrap_or(u32::MAX)
}
