use std::net::{Ipv4Addr, Ipv6Addr};

use etherparse::{PacketBuilder, SlicedPacket, TransportSlice};
use proptest::prelude::*;

use super::*;

const US: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
const THEM: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];
const V6: [u8; 16] = [0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1];

fn parse(frame: &[u8]) -> (Head, Layer3) {
    let snapshot = &frame[..frame.len().min(SNAPSHOT_LEN)];
    let head = Head::parse(snapshot).unwrap();
    (head, head.layer3(snapshot, frame.len()))
}

/// A frame with this type and payload.
fn frame(ethertype: u16, payload: &[u8]) -> Vec<u8> {
    [&THEM[..], &US, &ethertype.to_be_bytes(), payload].concat()
}

/// An IPv6 packet whose payload begins with a header of this number.
fn ipv6(next_header: u8, payload: &[u8]) -> Vec<u8> {
    let mut packet = vec![0x60, 0, 0, 0];
    packet.extend((payload.len() as u16).to_be_bytes());
    packet.extend([next_header, 64]);
    packet.extend(V6);
    packet.extend(V6);
    packet.extend(payload);
    frame(EtherType::IPV6.0, &packet)
}

fn ipv6_of(frame: &[u8]) -> Ipv6 {
    match parse(frame).1 {
        Layer3::Ipv6(ip) => ip,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_mac_address_is_read_as_it_is_written() {
    let address: MacAddress = "52:54:00:Ab:cD:0f".parse().unwrap();
    assert_eq!(address, MacAddress([0x52, 0x54, 0, 0xab, 0xcd, 0x0f]));
    assert_eq!(address.to_string(), "52:54:00:ab:cd:0f");
    assert_eq!("52-54-00-ab-cd-0f".parse(), Ok(address));
    assert_eq!(MacAddress::from_u64(address.to_u64()), address);
    let wrong = [
        "",
        "52:54:00:ab:cd",
        "52:54:00:ab:cd:0f:00",
        "52:54:00:ab:cd:f",
        "52:54:00:ab:cd:+f",
        "52:54:00:ab:cd:0g",
        "525400abcd0f",
    ];
    for text in wrong {
        assert_eq!(text.parse::<MacAddress>(), Err(InvalidMacAddress), "{text}");
    }
}

#[test]
fn a_mac_address_says_what_it_is() {
    assert!(MacAddress::BROADCAST.is_multicast() && MacAddress::BROADCAST.is_broadcast());
    let group = MacAddress([0x33, 0x33, 0, 0, 0, 1]);
    assert!(group.is_multicast() && !group.is_broadcast() && !group.is_assignable());
    assert!(!MacAddress::ZERO.is_assignable() && MacAddress(US).is_assignable());
    assert!(MacAddress(US).is_local() && !MacAddress([0, 0x1b, 0x21, 0, 0, 1]).is_local());
    for (last, reserved) in [(0, true), (0x0e, true), (0x0f, true), (0x10, false)] {
        let address = MacAddress([0x01, 0x80, 0xc2, 0, 0, last]);
        assert_eq!(address.is_link_local(), reserved, "{address}");
    }
}

#[test]
fn an_interface_identifier_leads_back_to_its_address() {
    // The example of RFC 2464, section 4.
    let address = MacAddress([0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde]);
    let identifier = [0x36, 0x56, 0x78, 0xff, 0xfe, 0x9a, 0xbc, 0xde];
    assert_eq!(address.interface_identifier(), identifier);
    assert_eq!(
        MacAddress::from_interface_identifier(identifier),
        Some(address)
    );
    assert_eq!(MacAddress::from_interface_identifier([1; 8]), None);
}

#[test]
fn a_header_needs_all_of_its_bytes() {
    let plain = frame(0x9000, &[]);
    assert!(Head::parse(&plain[..HEADER_LEN - 1]).is_none());
    let head = Head::parse(&plain).unwrap();
    assert_eq!(
        (head.destination, head.source),
        (MacAddress(THEM), MacAddress(US))
    );
    assert_eq!(
        (head.tag, head.ethertype.0, head.layer3),
        (None, 0x9000, HEADER_LEN)
    );
    let tagged = frame(EtherType::VLAN.0, &[0x60, 0x0a, 0x90, 0x00]);
    assert!(Head::parse(&tagged[..HEADER_LEN + TAG_LEN - 1]).is_none());
    let head = Head::parse(&tagged).unwrap();
    assert_eq!(head.tag, Some(TagControl(0x600a)));
    assert_eq!(head.tag.unwrap().vlan(), 10);
    assert_eq!(head.tag.unwrap().with_vlan(4094), TagControl(0x6ffe));
    assert_eq!(head.tag.unwrap().to_bytes(), [0x81, 0x00, 0x60, 0x0a]);
    assert_eq!(
        (head.ethertype.0, head.layer3),
        (0x9000, HEADER_LEN + TAG_LEN)
    );
}

#[test]
fn arp_says_who_asks_for_what() {
    let mut packet = vec![0, 1, 8, 0, 6, 4, 0, 2];
    packet.extend(US);
    packet.extend([10, 0, 0, 1]);
    packet.extend(THEM);
    packet.extend([10, 0, 0, 2]);
    let expected = Arp {
        operation: 2,
        sender_mac: MacAddress(US),
        sender: Ipv4Addr::new(10, 0, 0, 1),
        target: Ipv4Addr::new(10, 0, 0, 2),
    };
    assert_eq!(
        parse(&frame(EtherType::ARP.0, &packet)).1,
        Layer3::Arp(expected)
    );
    assert_eq!(
        parse(&frame(EtherType::ARP.0, &packet[..27])).1,
        Layer3::Malformed
    );
    for index in [0, 2, 4, 5] {
        let mut other = packet.clone();
        other[index] ^= 0x10;
        assert_eq!(
            parse(&frame(EtherType::ARP.0, &other)).1,
            Layer3::Malformed,
            "{index}"
        );
    }
}

#[test]
fn what_is_wrapped_is_called_so() {
    let inner = parse(&frame(EtherType::VLAN.0, &[0, 10, 0x81, 0, 0, 20, 8, 0])).1;
    assert_eq!(inner, Layer3::Tagged(TagControl(20)));
    let provider = parse(&frame(EtherType::PROVIDER_VLAN.0, &[0, 30, 8, 0])).1;
    assert_eq!(provider, Layer3::Tagged(TagControl(30)));
    let snap = frame(0x05ff, &[0xaa, 0xaa, 3, 0, 0, 0, 8, 0]);
    assert_eq!(parse(&snap).1, Layer3::Length { snap: true });
    let spanning_tree = frame(38, &[0x42, 0x42, 3]);
    assert_eq!(parse(&spanning_tree).1, Layer3::Length { snap: false });
    assert_eq!(parse(&frame(0x0600, &[])).1, Layer3::Other);
}

#[test]
fn an_ipv4_header_agrees_with_its_frame() {
    let builder = PacketBuilder::ethernet2(US, THEM).ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64);
    let mut whole = Vec::new();
    builder.udp(67, 68).write(&mut whole, &[7; 9]).unwrap();
    let Layer3::Ipv4(ip) = parse(&whole).1 else {
        panic!()
    };
    assert_eq!((ip.header_len, ip.total_len), (20, 37));
    assert_eq!(
        ip.transport,
        Transport::Udp {
            source_port: 67,
            destination_port: 68
        }
    );
    // Padding is allowed, a packet longer than its frame is not.
    whole.push(0);
    assert!(matches!(parse(&whole).1, Layer3::Ipv4(_)));
    assert_eq!(parse(&whole[..whole.len() - 2]).1, Layer3::Malformed);
    for (offset, value) in [(0, 0x65), (0, 0x44), (3, 19)] {
        let mut wrong = whole.clone();
        wrong[HEADER_LEN + offset] = value;
        assert_eq!(parse(&wrong).1, Layer3::Malformed, "{offset} {value}");
    }
}

#[test]
fn ipv4_fragments_show_their_header_once() {
    let mut packet = vec![
        0x45,
        0,
        0,
        28,
        0,
        0,
        0,
        0,
        64,
        protocol::UDP,
        0,
        0,
        1,
        1,
        1,
        1,
        2,
        2,
        2,
        2,
    ];
    packet.extend([0, 67, 0, 68, 0, 8, 0, 0]);
    for (place, expected) in [
        (0x0000, Fragment::Whole),
        (0x4000, Fragment::Whole),
        (0x2000, Fragment::First),
        (0x2001, Fragment::Later),
        (0x0001, Fragment::Later),
        (0x1fff, Fragment::Later),
    ] {
        packet[6..8].copy_from_slice(&u16::to_be_bytes(place));
        let Layer3::Ipv4(ip) = parse(&frame(EtherType::IPV4.0, &packet)).1 else {
            panic!()
        };
        assert_eq!(ip.fragment, expected, "{place:#x}");
        let seen = matches!(ip.transport, Transport::Udp { .. });
        assert_eq!(seen, expected != Fragment::Later);
    }
}

#[test]
fn a_header_that_the_packet_is_too_short_for_is_cut() {
    let lens = [
        (protocol::TCP, 20),
        (protocol::UDP, 8),
        (protocol::ICMPV6, 4),
    ];
    for (protocol, len) in lens {
        let mut header = vec![0; len];
        if protocol == protocol::TCP {
            header[12] = 0x50;
        }
        assert!(!matches!(
            ipv6_of(&ipv6(protocol, &header)).transport,
            Transport::Cut
        ));
        assert_eq!(
            ipv6_of(&ipv6(protocol, &header[1..])).transport,
            Transport::Cut
        );
    }
    // A TCP header may not be shorter than its fixed part nor longer than the packet.
    for (offset, cut) in [(0x40, true), (0x50, false), (0x60, false), (0x70, true)] {
        let mut header = [0; 24];
        header[12] = offset;
        let transport = ipv6_of(&ipv6(protocol::TCP, &header)).transport;
        assert_eq!(transport == Transport::Cut, cut, "{offset:#x}");
    }
}

#[test]
fn extension_headers_are_walked_up_to_a_bound() {
    let message = [134, 0, 0, 0, 0, 0, 0, 0];
    for count in 0..=MAX_EXTENSION_HEADERS + 1 {
        let mut payload = Vec::new();
        for index in 0..count {
            let next = if index + 1 == count {
                protocol::ICMPV6
            } else {
                protocol::DESTINATION_OPTIONS
            };
            payload.extend([next, 0, 1, 4, 0, 0, 0, 0]);
        }
        payload.extend(message);
        let first = if count == 0 {
            protocol::ICMPV6
        } else {
            protocol::HOP_BY_HOP
        };
        let frame = ipv6(first, &payload);
        // A snapshot of everything, so that the bound is the one that decides.
        let head = Head::parse(&frame).unwrap();
        let Layer3::Ipv6(ip) = head.layer3(&frame, frame.len()) else {
            panic!()
        };
        let expected = match count <= MAX_EXTENSION_HEADERS {
            true => Transport::Icmpv6 { kind: 134, code: 0 },
            false => Transport::Hidden,
        };
        assert_eq!(ip.transport, expected, "{count}");
        // The usual snapshot shows as many as fit.
        let seen = HEADER_LEN + Ipv6::HEADER_LEN + 8 * count + 2 <= SNAPSHOT_LEN;
        let shown = ipv6_of(&frame).transport != Transport::Hidden;
        assert_eq!(shown, seen && count <= MAX_EXTENSION_HEADERS, "{count}");
    }
}

#[test]
fn an_extension_header_does_not_reach_beyond_its_packet() {
    let fits = ipv6(
        protocol::HOP_BY_HOP,
        &[protocol::UDP, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0],
    );
    assert_eq!(ipv6_of(&fits).transport, Transport::Cut, "no room for UDP");
    assert_eq!(ipv6_of(&fits).header_len, 56);
    let beyond = ipv6(protocol::HOP_BY_HOP, &[59, 1, 0, 0, 0, 0, 0, 0]);
    assert_eq!(ipv6_of(&beyond).transport, Transport::Cut);
    let none = ipv6(protocol::ROUTING, &[1, 2, 3]);
    assert_eq!(ipv6_of(&none).transport, Transport::Cut);
}

#[test]
fn ipv6_fragments_are_known_even_alone() {
    for (place, expected) in [
        (0_u16, Fragment::First),
        (1, Fragment::First),
        (8, Fragment::Later),
        (9, Fragment::Later),
    ] {
        let [high, low] = place.to_be_bytes();
        let ip = ipv6_of(&ipv6(
            protocol::FRAGMENT,
            &[protocol::ICMPV6, 0, high, low, 0, 0, 0, 1, 134, 0, 0, 0],
        ));
        assert_eq!(ip.fragment, expected);
        let seen = ip.transport == Transport::Icmpv6 { kind: 134, code: 0 };
        assert_eq!(seen, expected == Fragment::First);
    }
}

fn neighbour_of(kind: u8, body: &[u8]) -> Option<Neighbour> {
    let mut payload = vec![kind, 0, 0, 0];
    payload.extend(body);
    let frame = ipv6(protocol::ICMPV6, &payload);
    let (head, layer3) = parse(&frame);
    let Layer3::Ipv6(ip) = layer3 else { panic!() };
    Neighbour::parse(&head, &ip, &frame[..frame.len().min(SNAPSHOT_LEN)])
}

#[test]
fn neighbour_messages_name_target_and_address() {
    let with_option = |body: &[u8], kind: u8| [body, &[kind, 1], &US[..]].concat();
    let mut target = vec![0; 4];
    target.extend(V6);
    let solicited = neighbour_of(135, &with_option(&target, 1)).unwrap();
    assert_eq!(solicited.message, NeighbourMessage::Solicitation);
    assert_eq!(solicited.target, Some(Ipv6Addr::from(V6)));
    assert_eq!(solicited.link_layer, Some(MacAddress(US)));
    assert!(solicited.complete);
    let plain = neighbour_of(136, &target).unwrap();
    assert_eq!((plain.link_layer, plain.complete), (None, true));
    // A fixed part that is not all there.
    assert_eq!(neighbour_of(136, &target[1..]), None);
    assert_eq!(neighbour_of(128, &target), None);
    let asks = neighbour_of(133, &with_option(&[0; 4], 1)).unwrap();
    assert_eq!((asks.target, asks.link_layer), (None, Some(MacAddress(US))));
}

#[test]
fn options_that_cannot_be_read_are_not_passed_over() {
    let mut target = vec![0; 4];
    target.extend(V6);
    let complete = |options: &[u8]| {
        neighbour_of(136, &[&target, options].concat())
            .unwrap()
            .complete
    };
    assert!(complete(&[14, 1, 0, 0, 0, 0, 0, 0]));
    assert!(
        !complete(&[14, 0, 0, 0, 0, 0, 0, 0]),
        "an option of no length"
    );
    assert!(
        !complete(&[14, 2, 0, 0, 0, 0, 0, 0]),
        "an option beyond the packet"
    );
    assert!(!complete(&[2]), "half an option");
    let named = |last: u8| [2, 1, 1, 1, 1, 1, 1, last];
    assert!(complete(&[named(1), named(1)].concat()));
    assert!(!complete(&[named(1), named(2)].concat()), "two addresses");
    let many = |count: usize| [14, 1, 0, 0, 0, 0, 0, 0].repeat(count);
    // What lies beyond the snapshot was not read either.
    let inside = (SNAPSHOT_LEN - HEADER_LEN - Ipv6::HEADER_LEN - 24) / 8;
    assert!(complete(&many(inside.min(Neighbour::MAX_OPTIONS))));
    assert!(!complete(&many(inside.max(Neighbour::MAX_OPTIONS) + 1)));
}

proptest! {
    /// Nothing panics, and nothing that is said lies outside the frame.
    #[test]
    fn any_bytes_mean_something(mut bytes in prop::collection::vec(any::<u8>(), 0..160), kind in 0..4_usize, more in 0..2000_usize) {
        if let Some(place) = bytes.get_mut(12..14) {
            let ethertype = [EtherType::IPV4, EtherType::IPV6, EtherType::ARP, EtherType::VLAN][kind];
            place.copy_from_slice(&ethertype.0.to_be_bytes());
        }
        bytes.truncate(SNAPSHOT_LEN);
        let frame_len = bytes.len() + more;
        if let Some(head) = Head::parse(&bytes) {
            match head.layer3(&bytes, frame_len) {
                Layer3::Ipv4(ip) => prop_assert!(head.layer3 + ip.total_len <= frame_len && ip.header_len <= ip.total_len),
                Layer3::Ipv6(ip) => {
                    prop_assert!(head.layer3 + ip.total_len <= frame_len && ip.header_len <= ip.total_len);
                    let _ = Neighbour::parse(&head, &ip, &bytes);
                }
                _ => {}
            }
        }
    }

    /// An independent implementation finds the same in what it has built.
    #[test]
    fn headers_are_read_as_others_write_them(
        is_ipv6: bool, is_tcp: bool, vlan in prop::option::of(1..4095_u16), ports: (u16, u16), len in 0..1400_usize, addresses: ([u8; 16], [u8; 16]),
    ) {
        let four = |address: [u8; 16]| [address[0], address[1], address[2], address[3]];
        let builder = PacketBuilder::ethernet2(US, THEM);
        let builder = match (vlan, is_ipv6) {
            (None, true) => builder.ipv6(addresses.0, addresses.1, 9),
            (None, false) => builder.ipv4(four(addresses.0), four(addresses.1), 9),
            (Some(vlan), true) => builder.single_vlan(vlan.try_into().unwrap()).ipv6(addresses.0, addresses.1, 9),
            (Some(vlan), false) => builder.single_vlan(vlan.try_into().unwrap()).ipv4(four(addresses.0), four(addresses.1), 9),
        };
        let mut frame = Vec::new();
        let payload = vec![3; len];
        match is_tcp {
            true => builder.tcp(ports.0, ports.1, 1, 2).write(&mut frame, &payload).unwrap(),
            false => builder.udp(ports.0, ports.1).write(&mut frame, &payload).unwrap(),
        }
        let (head, layer3) = parse(&frame);
        prop_assert_eq!(head.tag.map(TagControl::vlan), vlan);
        let sliced = SlicedPacket::from_ethernet(&frame).unwrap();
        let (layer4, transport) = match layer3 {
            Layer3::Ipv4(ip) => {
                prop_assert_eq!(ip.source.octets(), four(addresses.0));
                prop_assert_eq!(ip.destination.octets(), four(addresses.1));
                (head.layer3 + ip.header_len, ip.transport)
            }
            Layer3::Ipv6(ip) => {
                prop_assert_eq!(ip.source.octets(), addresses.0);
                prop_assert_eq!(ip.destination.octets(), addresses.1);
                (head.layer3 + ip.header_len, ip.transport)
            }
            other => panic!("{other:?}"),
        };
        match (transport, sliced.transport.unwrap()) {
            (Transport::Tcp { source_port, destination_port, header_len }, TransportSlice::Tcp(tcp)) => {
                prop_assert_eq!((source_port, destination_port), ports);
                prop_assert_eq!(header_len, tcp.header_len());
                prop_assert_eq!(layer4 + header_len + len, frame.len());
            }
            (Transport::Udp { source_port, destination_port }, TransportSlice::Udp(_)) => {
                prop_assert_eq!((source_port, destination_port), ports);
                prop_assert_eq!(layer4 + 8 + len, frame.len());
            }
            other => panic!("{other:?}"),
        }
    }
}
