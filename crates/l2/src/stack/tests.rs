use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    Ipv4Address, Ipv4Repr, Ipv6Address, Ipv6Repr, TcpControl, TcpRepr, TcpSeqNumber,
};

use super::*;

/// The first packet of a connection, with the segments that it asks for.
fn first(asked: u16) -> TcpRepr<'static> {
    TcpRepr {
        src_port: 2000,
        dst_port: 53,
        control: TcpControl::Syn,
        seq_number: TcpSeqNumber(1),
        ack_number: None,
        window_len: 1000,
        window_scale: Some(2),
        max_seg_size: Some(asked),
        sack_permitted: true,
        sack_ranges: [None; 3],
        timestamp: None,
        payload: &[],
    }
}

fn over_ipv4(segment: &TcpRepr<'_>) -> Vec<u8> {
    let (source, destination) = (Ipv4Address::new(10, 0, 0, 2), Ipv4Address::new(10, 0, 0, 1));
    let header = Ipv4Repr {
        src_addr: source,
        dst_addr: destination,
        next_header: IpProtocol::Tcp,
        payload_len: segment.buffer_len(),
        hop_limit: 64,
    };
    let sums = ChecksumCapabilities::default();
    let mut packet = vec![0; header.buffer_len() + segment.buffer_len()];
    header.emit(&mut Ipv4Packet::new_unchecked(&mut packet), &sums);
    let mut place = TcpPacket::new_unchecked(&mut packet[header.buffer_len()..]);
    segment.emit(&mut place, &source.into(), &destination.into(), &sums);
    packet
}

/// With an extension header before the segment, if one is asked for.
fn over_ipv6(segment: &TcpRepr<'_>, is_extended: bool) -> Vec<u8> {
    let address = |last| Ipv6Address::new(0xfe80, 0, 0, 0, 0, 0, 0, last);
    let (source, destination) = (address(2), address(1));
    let (next_header, extension): (_, &[u8]) = match is_extended {
        // Of padding.
        true => (IpProtocol::HopByHop, &[6, 0, 1, 4, 0, 0, 0, 0]),
        false => (IpProtocol::Tcp, &[]),
    };
    let header = Ipv6Repr {
        src_addr: source,
        dst_addr: destination,
        next_header,
        payload_len: extension.len() + segment.buffer_len(),
        hop_limit: 64,
    };
    let start = header.buffer_len() + extension.len();
    let mut packet = vec![0; start + segment.buffer_len()];
    header.emit(&mut Ipv6Packet::new_unchecked(&mut packet));
    packet[header.buffer_len()..start].copy_from_slice(extension);
    let mut place = TcpPacket::new_unchecked(&mut packet[start..]);
    let sums = ChecksumCapabilities::default();
    segment.emit(&mut place, &source.into(), &destination.into(), &sums);
    packet
}

#[test]
fn segments_are_as_long_as_they_are_asked_for_or_as_the_shortest() {
    for (asked, expected) in [
        (1, MIN_SEGMENT_LEN),
        (MIN_SEGMENT_LEN, MIN_SEGMENT_LEN),
        (1460, 1460),
    ] {
        for packet in [
            over_ipv4,
            |segment: &TcpRepr<'_>| over_ipv6(segment, false),
            |segment: &TcpRepr<'_>| over_ipv6(segment, true),
        ] {
            let mut raised = packet(&first(asked));
            assert_eq!(raise_segment_len(&mut raised), Some(()));
            assert_eq!(raised, packet(&first(expected)));
        }
    }
}

#[test]
fn what_is_damaged_or_no_first_packet_stays_as_it_is() {
    let mut damaged = over_ipv4(&first(1));
    *damaged.last_mut().unwrap() ^= 1;
    let mut later = first(1);
    later.control = TcpControl::None;
    for packet in [damaged, over_ipv4(&later), vec![0x45]] {
        let mut kept = packet.clone();
        let _ = raise_segment_len(&mut kept);
        assert_eq!(kept, packet);
    }
}
