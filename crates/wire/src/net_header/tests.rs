use etherparse::PacketBuilder;
use proptest::prelude::*;

use super::*;
use crate::ethernet::SNAPSHOT_LEN;

const US: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
const THEM: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];

/// The layer 4 of IPv4 without options, without a tag.
const LAYER4: u16 = 34;

fn tcp4(payload_len: usize) -> Vec<u8> {
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(US, THEM)
        .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
        .tcp(1, 2, 3, 4)
        .write(&mut frame, &vec![1; payload_len])
        .unwrap();
    frame
}

fn udp4(payload_len: usize) -> Vec<u8> {
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(US, THEM)
        .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
        .udp(1, 2)
        .write(&mut frame, &vec![1; payload_len])
        .unwrap();
    frame
}

fn icmp6() -> Vec<u8> {
    let mut frame = Vec::new();
    PacketBuilder::ethernet2(US, THEM)
        .ipv6([1; 16], [2; 16], 64)
        .icmpv6_echo_request(1, 2)
        .write(&mut frame, &[1; 30])
        .unwrap();
    frame
}

fn check(header: NetHeader, frame: &[u8], negotiated: Offloads) -> Result<Offload, NetHeaderError> {
    header.check(
        &frame[..frame.len().min(SNAPSHOT_LEN)],
        frame.len(),
        negotiated,
    )
}

fn checksum_at(start: u16, offset: u16) -> NetHeader {
    NetHeader {
        flags: FLAG_NEEDS_CHECKSUM,
        checksum_start: start,
        checksum_offset: offset,
        ..NetHeader::default()
    }
}

fn tso(size: u16) -> NetHeader {
    NetHeader {
        gso_type: GSO_TCP4,
        gso_size: size,
        header_len: LAYER4 + 20,
        ..checksum_at(LAYER4, 16)
    }
}

fn is_place_error(result: Result<Offload, NetHeaderError>) -> bool {
    matches!(result, Err(NetHeaderError::ChecksumPlace { .. }))
}

#[test]
fn a_plain_header_leaves_nothing_to_do() {
    let frame = tcp4(10);
    assert_eq!(
        check(NetHeader::default(), &frame, Offloads::NONE),
        Ok(Offload::NONE)
    );
    // Without the flag the places mean nothing, and flags that are not known are ignored.
    let header = NetHeader {
        flags: 0xfe,
        gso_size: 5,
        checksum_start: 0xffff,
        checksum_offset: 0xffff,
        ..NetHeader::default()
    };
    assert_eq!(check(header, &frame, Offloads::NONE), Ok(Offload::NONE));
}

#[test]
fn headers_are_not_longer_than_their_frame() {
    let frame = tcp4(10);
    for (header_len, right) in [
        (frame.len(), true),
        (frame.len() + 1, false),
        (0xffff, false),
    ] {
        for header in [NetHeader::default(), checksum_at(LAYER4, 16), tso(5)] {
            let header = NetHeader {
                header_len: header_len as u16,
                ..header
            };
            let result = check(header, &frame, Offloads::ALL);
            let refused = matches!(result, Err(NetHeaderError::HeaderLen { .. }));
            assert_eq!(refused, !right, "{header:?}");
        }
    }
}

#[test]
fn a_checksum_is_written_only_where_the_frame_has_it() {
    let places = [(tcp4(10), 34, 16), (udp4(10), 34, 6), (icmp6(), 54, 2)];
    for (frame, start, offset) in places {
        let checksum = Some(Checksum { start, offset });
        let result = check(checksum_at(start, offset), &frame, Offloads::ALL);
        assert_eq!(
            result,
            Ok(Offload {
                checksum,
                segmentation: None
            })
        );
        for wrong in (0..offset).chain(offset + 1..40).chain([0xffff]) {
            let result = check(checksum_at(start, wrong), &frame, Offloads::ALL);
            assert!(is_place_error(result), "{start} {wrong}: {result:?}");
        }
        // Not before layer 4, whatever would then be written where.
        for before in 0..start {
            let result = check(
                checksum_at(before, start - before + offset),
                &frame,
                Offloads::ALL,
            );
            assert!(is_place_error(result), "{before}: {result:?}");
        }
    }
}

#[test]
fn a_tunnel_leaves_the_inner_checksum_alone_to_others() {
    let frame = udp4(60);
    let end = frame.len() as u16;
    for (start, offset, right) in [
        (LAYER4 + 7, 6, false),
        (LAYER4 + 8, 0, true),
        (LAYER4 + 50, 16, true),
        (end - 2, 0, true),
        (end - 1, 0, false),
        (LAYER4 + 8, end - LAYER4 - 10, true),
        (LAYER4 + 8, end - LAYER4 - 9, false),
    ] {
        let result = check(checksum_at(start, offset), &frame, Offloads::ALL);
        assert_eq!(result.is_ok(), right, "{start} {offset}: {result:?}");
    }
}

#[test]
fn frames_that_do_not_show_layer_4_have_no_offloads() {
    let mut arp = tcp4(10);
    arp[12..14].copy_from_slice(&[8, 6]);
    let mut fragment = tcp4(10);
    fragment[20] = 0x20;
    let mut cut = tcp4(10);
    cut[17] = 39;
    let mut options = tcp4(10);
    options[34 + 12] = 0xf0;
    for frame in [arp, fragment, cut, options] {
        for header in [checksum_at(LAYER4, 16), tso(5)] {
            let result = check(header, &frame, Offloads::ALL);
            assert_eq!(result, Err(NetHeaderError::Unreadable));
        }
    }
}

#[test]
fn only_what_was_negotiated_is_done() {
    let frame = tcp4(100);
    let refused = |negotiated| {
        let result = check(tso(50), &frame, negotiated);
        matches!(result, Err(NetHeaderError::NotNegotiated { .. }))
    };
    assert!(!refused(Offloads::ALL));
    assert!(refused(Offloads {
        tso4: false,
        ..Offloads::ALL
    }));
    assert!(refused(Offloads {
        checksum: false,
        ..Offloads::ALL
    }));
    assert!(!refused(Offloads {
        checksum: true,
        tso4: true,
        ..Offloads::NONE
    }));
    let ecn = NetHeader {
        gso_type: GSO_TCP4 | GSO_ECN,
        ..tso(50)
    };
    assert!(
        check(ecn, &frame, Offloads::ALL)
            .unwrap()
            .segmentation
            .unwrap()
            .ecn
    );
    let without = check(
        ecn,
        &frame,
        Offloads {
            ecn: false,
            ..Offloads::ALL
        },
    );
    assert_eq!(
        without,
        Err(NetHeaderError::NotNegotiated { gso_type: 0x81 })
    );
    let checksum = check(checksum_at(LAYER4, 16), &frame, Offloads::NONE);
    assert_eq!(checksum, Err(NetHeaderError::NotNegotiated { gso_type: 0 }));
}

#[test]
fn a_type_fits_what_the_frame_carries() {
    let wrong = |header: NetHeader, frame: &[u8]| {
        let result = check(header, frame, Offloads::ALL);
        matches!(result, Err(NetHeaderError::WrongType { .. }))
    };
    for gso_type in [
        GSO_UDP_FRAGMENTS,
        GSO_TCP6,
        GSO_UDP,
        GSO_UDP | GSO_ECN,
        GSO_ECN,
        2,
        6,
        0x7f,
    ] {
        assert!(
            wrong(
                NetHeader {
                    gso_type,
                    ..tso(50)
                },
                &tcp4(100)
            ),
            "{gso_type:#x}"
        );
    }
    let uso = NetHeader {
        gso_type: GSO_UDP,
        gso_size: 50,
        ..checksum_at(LAYER4, 6)
    };
    assert!(check(uso, &udp4(100), Offloads::ALL).is_ok());
    for gso_type in [GSO_TCP4, GSO_TCP6, GSO_UDP | GSO_ECN] {
        assert!(
            wrong(NetHeader { gso_type, ..uso }, &udp4(100)),
            "{gso_type:#x}"
        );
    }
    // Of a packet inside UDP there is nothing that could be cut.
    let inner = NetHeader {
        checksum_start: LAYER4 + 20,
        ..uso
    };
    assert_eq!(
        check(inner, &udp4(100), Offloads::ALL),
        Err(NetHeaderError::Unreadable)
    );
}

#[test]
fn segments_have_payload_and_a_bound() {
    let no_payload = |size: u16, len: usize| {
        matches!(
            check(tso(size), &tcp4(len), Offloads::ALL),
            Err(NetHeaderError::NoPayload { .. })
        )
    };
    assert!(no_payload(0, 100) && no_payload(50, 0) && !no_payload(1, 1));
    let whole = check(tso(48), &tcp4(48 * MAX_SEGMENTS - 48 * 2), Offloads::ALL);
    assert!(whole.is_ok(), "{whole:?}");
    for (len, size, right) in [
        (MAX_SEGMENTS - 1, 1, true),
        (MAX_SEGMENTS, 1, true),
        (MAX_SEGMENTS + 1, 1, false),
        (2 * MAX_SEGMENTS, 2, true),
        (2 * MAX_SEGMENTS + 1, 2, false),
    ] {
        let result = check(tso(size), &tcp4(len), Offloads::ALL);
        assert_eq!(result.is_ok(), right, "{len} by {size}: {result:?}");
    }
    for (len, right) in [(MAX_UDP_SEGMENTS, true), (MAX_UDP_SEGMENTS + 1, false)] {
        let cut = NetHeader {
            gso_type: GSO_UDP,
            gso_size: 1,
            ..checksum_at(LAYER4, 6)
        };
        let result = check(cut, &udp4(len), Offloads::ALL);
        assert_eq!(result.is_ok(), right, "{len}: {result:?}");
    }
    let without = NetHeader {
        flags: 0,
        ..tso(50)
    };
    let result = check(without, &tcp4(100), Offloads::ALL);
    assert_eq!(result, Err(NetHeaderError::SegmentsWithoutChecksum));
}

#[test]
fn padding_does_not_become_payload() {
    let mut frame = tcp4(100);
    assert!(check(tso(50), &frame, Offloads::ALL).is_ok());
    frame.push(0);
    assert_eq!(
        check(tso(50), &frame, Offloads::ALL),
        Err(NetHeaderError::Unreadable)
    );
}

#[test]
fn the_length_of_headers_is_taken_from_the_frame() {
    for header_len in [0, 1, 54, 100] {
        let offload = check(
            NetHeader {
                header_len,
                ..tso(50)
            },
            &tcp4(100),
            Offloads::ALL,
        )
        .unwrap();
        assert_eq!(offload.segmentation.unwrap().header_len, 54);
        assert_eq!(offload.longest_segment_len(154), 104);
        assert_eq!(offload.header(3).header_len, 54);
    }
    assert_eq!(Offload::NONE.longest_segment_len(1514), 1514);
}

#[test]
fn a_receiver_gets_what_it_takes() {
    let offload = check(tso(50), &tcp4(100), Offloads::ALL).unwrap();
    assert_eq!(offload.finish_for(Offloads::ALL), Finish::Nothing);
    assert_eq!(
        offload.finish_for(Offloads {
            tso4: false,
            ..Offloads::ALL
        }),
        Finish::Segments
    );
    assert_eq!(
        offload.finish_for(Offloads {
            checksum: false,
            ..Offloads::ALL
        }),
        Finish::Segments
    );
    let offload = check(checksum_at(LAYER4, 16), &tcp4(100), Offloads::ALL).unwrap();
    assert_eq!(
        offload.finish_for(Offloads {
            checksum: true,
            ..Offloads::NONE
        }),
        Finish::Nothing
    );
    let checksum = offload.checksum.unwrap();
    assert_eq!(
        offload.finish_for(Offloads::NONE),
        Finish::Checksum(checksum)
    );
    assert_eq!(Offload::NONE.finish_for(Offloads::NONE), Finish::Nothing);
}

#[test]
fn a_tag_moves_the_places() {
    let offload = check(tso(50), &tcp4(100), Offloads::ALL).unwrap();
    let tagged = offload.shifted(4);
    assert_eq!(tagged.checksum.unwrap().start, LAYER4 + 4);
    assert_eq!(tagged.segmentation.unwrap().header_len, 58);
    assert_eq!(tagged.shifted(-4), offload);
    // What a tag makes of the frame checks out with the header that is made of it.
    let mut frame = tcp4(100);
    frame.splice(12..12, [0x81, 0, 0, 10]);
    assert_eq!(check(tagged.header(1), &frame, Offloads::ALL), Ok(tagged));
}

proptest! {
    #[test]
    fn a_header_survives_its_bytes(bytes: [u8; NET_HEADER_LEN]) {
        let header = NetHeader::decode(&bytes);
        prop_assert_eq!(header.encode(), bytes);
    }

    /// The header that a receiver gets passes the same check again, with the same result.
    #[test]
    fn what_is_told_is_what_was_checked(
        flags in 0..4_u8, gso in 0..8_usize, header_len in 0..200_u16, gso_size in 0..200_u16, start in 30..60_u16, offset in 0..20_u16, which in 0..3_usize,
    ) {
        let gso_type = [0, 0, 0, GSO_TCP4, GSO_TCP4 | GSO_ECN, GSO_UDP, GSO_TCP6, 3][gso];
        let frame = [tcp4(140), udp4(140), icmp6()][which].clone();
        // Half of all places are right ones.
        let (start, offset) = match (offset % 2, which) {
            (0, 0) => (LAYER4, 16),
            (0, 1) => (LAYER4, 6),
            _ => (start, offset),
        };
        let header = NetHeader { flags, gso_type, header_len, gso_size, checksum_start: start, checksum_offset: offset, buffers: 9 };
        if let Ok(offload) = check(header, &frame, Offloads::ALL) {
            prop_assert_eq!(check(offload.header(1), &frame, Offloads::ALL), Ok(offload));
            prop_assert_eq!(offload.segmentation.is_some(), gso_type != 0);
            prop_assert!(offload.longest_segment_len(frame.len()) <= frame.len());
        }
    }
}

#[test]
fn no_checksum_is_left_to_be_done_in_neighbour_discovery() {
    let mut frame = icmp6();
    let kind_at = 14 + 40;
    for kind in [128, 132, 133, 135, 137, 138] {
        frame[kind_at] = kind;
        let result = check(checksum_at(54, 2), &frame, Offloads::ALL);
        assert_eq!(result.is_err(), (133..=137).contains(&kind), "{kind}");
    }
}
