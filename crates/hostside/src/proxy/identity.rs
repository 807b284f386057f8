//! The caller, reported to the callee: as a header of the PROXY protocol, version 2, or in a program's environment.
//!
//! The header has addresses of the family AF_INET6, because nginx and HAProxy read nothing behind addresses of other families,
//! and a VM has no IPv6 address of its own. So it is given one of the discard prefix 100::/64 (RFC 6666), which no packet can
//! come from: `100::3` is the VM with CID 3, `100::2` the host. What an address cannot say stands in fields behind it.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use policy::Address;
use ppp::v2::{Addresses, Builder, Command, IPv6, Protocol, Version};

use super::program::Purpose;

/// Fields of the header, from the range that the PROXY protocol leaves to applications (0xE0 to 0xEF). All are text.
pub mod field {
    /// Name of the calling VM in its domain.
    pub const VM: u8 = 0xe0;
    /// Its domain.
    pub const DOMAIN: u8 = 0xe1;
    /// Its CID, in decimal.
    pub const CID: u8 = 0xe2;
    /// The label of the rule that allows the call; absent where none was needed.
    pub const RULE: u8 = 0xe3;
    /// The vsock port it calls from, in decimal; absent where it is not known. The port of the address is the lower half of it, or 0.
    pub const SOURCE_PORT: u8 = 0xe4;
    /// The vsock port that it called, in decimal.
    pub const PORT: u8 = 0xe5;
    /// The name of the service.
    pub const SERVICE: u8 = 0xe6;
    /// The name of the published port that the call came in by.
    pub const PUBLISHED: u8 = 0xe7;
    /// The user of the host that calls, in decimal, where it came in by a UNIX socket.
    pub const USER: u8 = 0xe8;
}

/// Whose call it is, for the log.
#[derive(Debug, Default)]
pub(crate) struct About {
    /// The service's full name.
    pub(crate) name: String,
    /// The VM's.
    pub(crate) vm: String,
}

/// The longest text of a field, in bytes. What is longer is cut.
pub const MAX_FIELD_LEN: usize = 255;

/// The CID of the host, as its guests see it.
const HOST_CID: u32 = 2;

/// How bytes travel behind the header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Transport {
    /// As a stream.
    Stream,
    /// As datagrams, each of which has a header of its own.
    Datagram,
}

/// A service's caller.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    /// The VM.
    pub(crate) vm: Address,
    /// The port that it calls from, or 0 where its line has none.
    pub(crate) source_port: u32,
    /// The port that it called.
    pub(crate) port: u32,
    /// The service's name.
    pub(crate) service: String,
    /// The label of the rule that allows the call.
    pub(crate) rule: Option<String>,
}

impl Identity {
    /// The header for the service.
    pub(crate) fn proxy_header(&self, transport: Transport) -> Vec<u8> {
        let addresses = IPv6::new(
            address_of(self.vm.cid),
            address_of(HOST_CID),
            lower_half(self.source_port),
            lower_half(self.port),
        );
        let mut fields = vec![
            (field::VM, self.vm.name.clone()),
            (field::DOMAIN, self.vm.domain.clone()),
            (field::CID, self.vm.cid.to_string()),
            (field::PORT, self.port.to_string()),
            (field::SERVICE, self.service.clone()),
        ];
        fields.extend(
            self.known_source_port()
                .map(|port| (field::SOURCE_PORT, port)),
        );
        fields.extend(self.rule.clone().map(|rule| (field::RULE, rule)));
        header(addresses.into(), transport, &fields)
    }

    /// The caller's port, if it is known. A service could take port 0 for a privileged program's.
    fn known_source_port(&self) -> Option<String> {
        (self.source_port != 0).then(|| self.source_port.to_string())
    }

    /// What a program that is the service is started for.
    pub(crate) fn purpose(&self) -> Purpose {
        Purpose {
            name: self.service.clone(),
            vm: self.vm.full_name(),
            environment: self.environment(),
        }
    }

    fn environment(&self) -> Vec<(&'static str, String)> {
        vec![
            ("RINGDOWN_VM", self.vm.name.clone()),
            ("RINGDOWN_DOMAIN", self.vm.domain.clone()),
            ("RINGDOWN_CID", self.vm.cid.to_string()),
            (
                "RINGDOWN_SOURCE_PORT",
                self.known_source_port().unwrap_or_default(),
            ),
            ("RINGDOWN_PORT", self.port.to_string()),
            ("RINGDOWN_SERVICE", self.service.clone()),
            ("RINGDOWN_RULE", self.rule.clone().unwrap_or_default()),
        ]
    }
}

/// The header for a guest's published port: the addresses of the two ends, or the host's where there are none.
pub(crate) fn published_header(
    published: &str,
    ends: Option<(SocketAddr, SocketAddr)>,
    user: Option<u32>,
    transport: Transport,
) -> Vec<u8> {
    let addresses = match ends {
        Some((SocketAddr::V4(peer), SocketAddr::V4(local))) => {
            ppp::v2::IPv4::new(*peer.ip(), *local.ip(), peer.port(), local.port()).into()
        }
        Some((peer, local)) => IPv6::new(
            as_ipv6(peer.ip()),
            as_ipv6(local.ip()),
            peer.port(),
            local.port(),
        )
        .into(),
        None => IPv6::new(address_of(HOST_CID), address_of(HOST_CID), 0, 0).into(),
    };
    let mut fields = vec![(field::PUBLISHED, published.to_owned())];
    fields.extend(user.map(|user| (field::USER, user.to_string())));
    header(addresses, transport, &fields)
}

fn header(addresses: Addresses, transport: Transport, fields: &[(u8, String)]) -> Vec<u8> {
    let protocol = match transport {
        Transport::Stream => Protocol::Stream,
        Transport::Datagram => Protocol::Datagram,
    };
    let builder = Builder::with_addresses(Version::Two | Command::Proxy, protocol, addresses);
    let built = fields
        .iter()
        .try_fold(builder, |builder, (kind, text)| {
            builder.write_tlv(*kind, cut(text).as_bytes())
        })
        .and_then(Builder::build);
    // It fails only for more than 65,535 bytes, and there are at most nine fields of 255.
    built.expect("a header of a few short fields fits")
}

fn cut(text: &str) -> &str {
    let mut end = text.len().min(MAX_FIELD_LEN);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}

fn address_of(cid: u32) -> Ipv6Addr {
    Ipv6Addr::from((0x100_u128 << 112) | u128::from(cid))
}

fn lower_half(port: u32) -> u16 {
    port as u16
}

fn as_ipv6(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proxy_header::{ParseConfig, Protocol as Parsed, ProxyHeader, Tlv};

    fn identity() -> Identity {
        Identity {
            vm: Address {
                domain: "red".to_owned(),
                name: "web".to_owned(),
                cid: 70_000,
                groups: Vec::new(),
            },
            source_port: 65_536 + 7,
            port: 5000,
            service: "registry".to_owned(),
            rule: Some("let them".to_owned()),
        }
    }

    fn fields(header: &ProxyHeader<'_>) -> Vec<(u8, String)> {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("text");
        header
            .tlvs()
            .map(|tlv| match tlv.expect("a whole field") {
                Tlv::Custom(kind, bytes) => (kind, text(&bytes)),
                other => panic!("an unexpected field {other:?}"),
            })
            .collect()
    }

    #[test]
    fn another_parser_reads_who_calls() {
        let bytes = identity().proxy_header(Transport::Stream);
        let mut followed = bytes.clone();
        followed.extend(b"payload");
        let (header, len) =
            ProxyHeader::parse(&followed, ParseConfig::default()).expect("a header");
        assert_eq!(len, bytes.len());
        let proxied = header.proxied_address().expect("addresses");
        assert_eq!(proxied.protocol, Parsed::Stream);
        assert_eq!(proxied.source.to_string(), "[100::1:1170]:7");
        assert_eq!(proxied.destination.to_string(), "[100::2]:5000");
        let expected = [
            (field::VM, "web"),
            (field::DOMAIN, "red"),
            (field::CID, "70000"),
            (field::PORT, "5000"),
            (field::SERVICE, "registry"),
            (field::SOURCE_PORT, "65543"),
            (field::RULE, "let them"),
        ];
        assert_eq!(
            fields(&header),
            expected.map(|(kind, text)| (kind, text.to_owned()))
        );
    }

    #[test]
    fn a_port_that_is_not_known_is_not_told() {
        let caller = Identity {
            source_port: 0,
            ..identity()
        };
        let bytes = caller.proxy_header(Transport::Stream);
        let (header, _) = ProxyHeader::parse(&bytes, ParseConfig::default()).expect("a header");
        let told = fields(&header).into_iter().map(|(kind, _)| kind);
        assert!(!told.into_iter().any(|kind| kind == field::SOURCE_PORT));
        let environment = caller.environment();
        assert!(environment.contains(&("RINGDOWN_SOURCE_PORT", String::new())));
    }

    #[test]
    fn a_long_label_is_cut_between_characters() {
        let mut caller = identity();
        caller.rule = Some("\u{e9}".repeat(200));
        let bytes = caller.proxy_header(Transport::Datagram);
        let (header, _) = ProxyHeader::parse(&bytes, ParseConfig::default()).expect("a header");
        assert_eq!(
            header.proxied_address().expect("addresses").protocol,
            Parsed::Datagram
        );
        let (_, rule) = fields(&header).pop().expect("a rule");
        assert_eq!(rule, "\u{e9}".repeat(127));
        caller.rule = None;
        let bytes = caller.proxy_header(Transport::Stream);
        let (header, _) = ProxyHeader::parse(&bytes, ParseConfig::default()).expect("a header");
        assert!(fields(&header).iter().all(|(kind, _)| *kind != field::RULE));
    }

    #[test]
    fn a_published_port_tells_where_its_caller_is() {
        let address = |text: &str| text.parse::<SocketAddr>().expect("an address");
        for (peer, local, source) in [
            ("192.0.2.1:4000", "192.0.2.2:80", "192.0.2.1:4000"),
            (
                "[2001:db8::1]:4000",
                "[2001:db8::2]:80",
                "[2001:db8::1]:4000",
            ),
        ] {
            let ends = Some((address(peer), address(local)));
            let bytes = published_header("front", ends, None, Transport::Stream);
            let (header, _) = ProxyHeader::parse(&bytes, ParseConfig::default()).expect("a header");
            assert_eq!(
                header.proxied_address().expect("addresses").source,
                address(source)
            );
            assert_eq!(fields(&header), [(field::PUBLISHED, "front".to_owned())]);
        }
        let bytes = published_header("front", None, Some(1000), Transport::Stream);
        let (header, _) = ProxyHeader::parse(&bytes, ParseConfig::default()).expect("a header");
        let source = header.proxied_address().expect("addresses").source;
        assert_eq!(source, address("[100::2]:0"));
        assert_eq!(fields(&header)[1], (field::USER, "1000".to_owned()));
    }
}
