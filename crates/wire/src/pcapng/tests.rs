use std::convert::Infallible;

use pcap_parser::pcapng::{Block, OptionCode, PcapNGOption};
use pcap_parser::traits::PcapNGPacketBlock;
use pcap_parser::{Linktype, PcapBlockOwned, PcapNGSlice};
use proptest::prelude::*;

use super::*;

const TIME_NS: u64 = 1_795_000_000_123_456_789;

fn packet(bytes: &[u8], comment: Option<&str>, direction: Direction) -> Vec<u8> {
    let mut out = Vec::new();
    let packet = Packet {
        interface: 1,
        time_ns: TIME_NS,
        original_len: bytes.len() + 3,
        direction,
        comment,
    };
    let written = packet.write(&mut out, bytes.len(), |room| {
        room.copy_from_slice(bytes);
        Ok::<(), Infallible>(())
    });
    written.unwrap();
    out
}

fn capture(bytes: &[u8], comment: Option<&str>) -> Vec<u8> {
    let mut out = Vec::new();
    section(&mut out, "ringdown 0");
    interface(&mut out, Link::Ethernet, "web", 96);
    interface(&mut out, Link::Vsock, "red/db", MAX_SNAPLEN);
    out.extend(packet(bytes, comment, Direction::Inbound));
    statistics(&mut out, 1, TIME_NS, 7);
    out
}

fn option<'a>(options: &'a [PcapNGOption<'_>], number: u16) -> Option<&'a [u8]> {
    let found = options
        .iter()
        .find(|known| known.code == OptionCode(number));
    found.map(|known| &known.value[..usize::from(known.len)])
}

#[test]
fn blocks_in_a_row_are_told_apart() {
    let written = capture(&[1, 2, 3], None);
    let found: Vec<(BlockKind, usize)> = blocks(&written)
        .map(|(kind, block)| (kind, block.len()))
        .collect();
    let kinds: Vec<BlockKind> = found.iter().map(|(kind, _)| *kind).collect();
    use BlockKind::{Description, Other, Packet};
    assert_eq!(
        kinds,
        [Description, Description, Description, Packet, Other]
    );
    assert_eq!(
        found.iter().map(|(_, len)| len).sum::<usize>(),
        written.len()
    );
    // What is not whole is left out.
    assert_eq!(blocks(&written[..written.len() - 1]).count(), 4);
    assert_eq!(blocks(&[]).count(), 0);
}

#[test]
fn another_reader_reads_what_was_written() {
    for comment in [None, Some(""), Some("refused: other source")] {
        for len in [0, 1, 2, 3, 4, 60, 1514, 65_549] {
            let bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
            let written = capture(&bytes, comment);
            let mut blocks = PcapNGSlice::from_slice(&written).unwrap();
            let mut next = || match blocks.next().unwrap().unwrap() {
                PcapBlockOwned::NG(block) => block,
                _ => panic!("no pcapng"),
            };
            let Block::SectionHeader(section) = next() else {
                panic!("no section")
            };
            assert_eq!(option(&section.options, 4), Some(b"ringdown 0".as_slice()));
            let interfaces = [
                ("web", 96, Linktype::ETHERNET),
                ("red/db", MAX_SNAPLEN, Linktype(271)),
            ];
            for (name, snaplen, link) in interfaces {
                let Block::InterfaceDescription(interface) = next() else {
                    panic!("no interface")
                };
                assert_eq!(interface.linktype, link);
                assert_eq!(interface.snaplen, snaplen);
                assert_eq!(interface.ts_resolution(), Some(1_000_000_000));
                assert_eq!(option(&interface.options, 2), Some(name.as_bytes()));
            }
            let Block::EnhancedPacket(packet) = next() else {
                panic!("no packet")
            };
            assert_eq!(packet.packet_data(), bytes);
            assert_eq!((packet.if_id, packet.origlen), (1, len + 3));
            assert_eq!(
                u64::from(packet.ts_high) << 32 | u64::from(packet.ts_low),
                TIME_NS
            );
            assert_eq!(option(&packet.options, 2), Some(&[1, 0, 0, 0][..]));
            assert_eq!(option(&packet.options, 1), comment.map(str::as_bytes));
            let Block::InterfaceStatistics(statistics) = next() else {
                panic!("no statistics")
            };
            assert_eq!(statistics.if_id, 1);
            assert_eq!(
                option(&statistics.options, 5),
                Some(&7_u64.to_le_bytes()[..])
            );
            assert!(blocks.next().is_none());
        }
    }
}

#[test]
fn a_packet_that_cannot_be_read_is_not_there() {
    let mut out = vec![1, 2, 3, 4];
    let packet = Packet {
        interface: 0,
        time_ns: 0,
        original_len: 60,
        direction: Direction::Outbound,
        comment: None,
    };
    assert_eq!(packet.write(&mut out, 60, |_| Err("gone")), Err("gone"));
    assert_eq!(out, [1, 2, 3, 4]);
}

#[test]
fn an_option_is_cut_to_what_fits() {
    let mut out = Vec::new();
    interface(&mut out, Link::Vsock, &"n".repeat(100_000), 96);
    let mut reader = BlockReader::default();
    assert_eq!(reader.push(&out).unwrap().len(), out.len());
}

proptest! {
    #[test]
    fn blocks_are_found_however_the_stream_is_cut(cuts in prop::collection::vec(1_usize..80, 1..40)) {
        let mut stream = capture(&[7; 61], None);
        stream.extend(packet(&[8; 9], None, Direction::Outbound));
        let mut reader = BlockReader::default();
        let (mut whole, mut rest, mut cuts) = (Vec::new(), &stream[..], cuts.iter().cycle());
        while !rest.is_empty() {
            let (piece, behind) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
            whole.extend(reader.push(piece).unwrap());
            rest = behind;
        }
        prop_assert_eq!(whole, stream);
        prop_assert_eq!((reader.packets(), reader.lost()), (2, 7));
    }

    #[test]
    fn anything_may_be_read(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut reader = BlockReader::default();
        if let Ok(whole) = reader.push(&bytes) {
            prop_assert!(bytes.starts_with(&whole));
        }
    }
}

#[test]
fn a_block_is_as_long_as_a_block_may_be() {
    let mut block = vec![0; 12];
    for (len, is_right) in [
        (0, false),
        (8, false),
        (11, false),
        (12, true),
        (13, false),
        (16, true),
        (MAX_BLOCK_LEN as u32, true),
        (MAX_BLOCK_LEN as u32 + 1, false),
        (MAX_BLOCK_LEN as u32 + 4, false),
        (u32::MAX, false),
    ] {
        block[4..8].copy_from_slice(&len.to_le_bytes());
        let read = BlockReader::default().push(&block);
        assert_eq!(read.is_ok(), is_right, "{len}");
    }
}
