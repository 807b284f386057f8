use core::ops::ControlFlow;

use etherparse::{NetSlice, PacketBuilder, SlicedPacket, TcpHeader, TransportSlice, UdpHeader};
use proptest::prelude::*;

use super::*;
use crate::net_header::{
    FLAG_NEEDS_CHECKSUM, GSO_ECN, GSO_TCP4, GSO_TCP6, GSO_UDP, NetHeader, Offloads,
};

const US: [u8; 6] = [0x52, 0x54, 0, 0, 0, 1];
const THEM: [u8; 6] = [0x52, 0x54, 0, 0, 0, 2];
const FOUR: ([u8; 4], [u8; 4]) = ([10, 0, 0, 1], [10, 0, 0, 2]);
const SIX: ([u8; 16], [u8; 16]) = ([0x20; 16], [0x21; 16]);

/// What is to be sent, and how.
#[derive(Debug, Clone)]
struct Sent {
    is_ipv6: bool,
    is_tcp: bool,
    vlan: Option<u16>,
    options_len: usize,
    flags: u8,
    sequence: u32,
    /// Of its payload.
    len: usize,
    salt: u8,
}

impl Sent {
    fn payload(&self) -> Vec<u8> {
        let byte = |index: usize| (index as u8).wrapping_mul(31) ^ (index >> 8) as u8 ^ self.salt;
        (0..self.len).map(byte).collect()
    }

    /// The frame as an independent implementation makes it, with its checksum.
    fn whole(&self) -> Vec<u8> {
        let builder = PacketBuilder::ethernet2(US, THEM);
        let builder = match (self.vlan, self.is_ipv6) {
            (None, true) => builder.ipv6(SIX.0, SIX.1, 9),
            (None, false) => builder.ipv4(FOUR.0, FOUR.1, 9),
            (Some(vlan), true) => builder
                .single_vlan(vlan.try_into().unwrap())
                .ipv6(SIX.0, SIX.1, 9),
            (Some(vlan), false) => builder
                .single_vlan(vlan.try_into().unwrap())
                .ipv4(FOUR.0, FOUR.1, 9),
        };
        let mut frame = Vec::new();
        if self.is_tcp {
            let mut header = TcpHeader::new(1000, 2000, self.sequence, 512);
            header.acknowledgment_number = 77;
            header.fin = self.flags & 0x01 != 0;
            header.psh = self.flags & 0x08 != 0;
            header.ack = true;
            header.cwr = self.flags & 0x80 != 0;
            header.set_options_raw(&vec![1; self.options_len]).unwrap();
            builder
                .tcp_header(header)
                .write(&mut frame, &self.payload())
                .unwrap();
        } else {
            builder
                .udp(1000, 2000)
                .write(&mut frame, &self.payload())
                .unwrap();
        }
        frame
    }

    fn layer4(&self) -> usize {
        let tag = if self.vlan.is_some() { 4 } else { 0 };
        14 + tag + if self.is_ipv6 { 40 } else { 20 }
    }

    fn checksum(&self) -> Checksum {
        Checksum {
            start: self.layer4() as u16,
            offset: if self.is_tcp { 16 } else { 6 },
        }
    }

    /// The frame as a driver leaves it, with the sum of the pseudo-header where the checksum belongs.
    fn unfinished(&self) -> Vec<u8> {
        let mut frame = self.whole();
        let mut words = Vec::new();
        if self.is_ipv6 {
            words.extend(SIX.0);
            words.extend(SIX.1);
        } else {
            words.extend(FOUR.0);
            words.extend(FOUR.1);
        }
        let len = (frame.len() - self.layer4()) as u32;
        words.extend(len.to_be_bytes());
        words.extend([0, 0, 0, if self.is_tcp { 6 } else { 17 }]);
        let mut sum = 0;
        for word in words.chunks(2) {
            sum += u32::from(word[0]) << 8 | u32::from(word[1]);
        }
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        let place = self.layer4() + usize::from(self.checksum().offset);
        frame[place..place + 2].copy_from_slice(&(sum as u16).to_be_bytes());
        frame
    }

    fn offload(&self, size: u16) -> Offload {
        let gso_type = match (self.is_tcp, self.is_ipv6) {
            (true, false) => GSO_TCP4,
            (true, true) => GSO_TCP6,
            (false, _) => GSO_UDP,
        };
        let ecn = if self.is_tcp && self.flags & 0x80 != 0 {
            GSO_ECN
        } else {
            0
        };
        let Checksum { start, offset } = self.checksum();
        let header = NetHeader {
            flags: FLAG_NEEDS_CHECKSUM,
            gso_type: gso_type | ecn,
            gso_size: size,
            checksum_start: start,
            checksum_offset: offset,
            ..NetHeader::default()
        };
        let frame = self.unfinished();
        header.check(&frame, frame.len(), Offloads::ALL).unwrap()
    }
}

/// Checks everything about a segment that can be checked alone, and gives its payload.
fn payload_of<'a>(
    sent: &Sent,
    segment: &'a [u8],
    index: usize,
    count: usize,
    size: usize,
) -> &'a [u8] {
    let packet = SlicedPacket::from_ethernet(segment).unwrap();
    let whole = sent.whole();
    let original = SlicedPacket::from_ethernet(&whole).unwrap();
    let layer3 = sent.layer4() - if sent.is_ipv6 { 40 } else { 20 };
    assert_eq!(segment[..layer3], whole[..layer3]);
    let (net, transport) = (packet.net.unwrap(), packet.transport.unwrap());
    match (&net, &original.net.unwrap()) {
        (NetSlice::Ipv4(ip), NetSlice::Ipv4(original)) => {
            let header = ip.header().to_header();
            assert_eq!(header.header_checksum, header.calc_header_checksum());
            let first = original.header().identification();
            assert_eq!(header.identification, first.wrapping_add(index as u16));
            assert_eq!(
                usize::from(header.total_len) + sent.layer4() - 20,
                segment.len()
            );
        }
        (NetSlice::Ipv6(ip), NetSlice::Ipv6(_)) => {
            assert_eq!(
                usize::from(ip.header().payload_length()) + sent.layer4(),
                segment.len()
            );
        }
        other => panic!("{other:?}"),
    }
    match transport {
        TransportSlice::Tcp(tcp) => {
            let header = tcp.to_header();
            let expected = match &net {
                NetSlice::Ipv4(ip) => {
                    header.calc_checksum_ipv4(&ip.header().to_header(), tcp.payload())
                }
                NetSlice::Ipv6(ip) => {
                    header.calc_checksum_ipv6(&ip.header().to_header(), tcp.payload())
                }
                NetSlice::Arp(_) => panic!(),
            };
            // Both are zero in such a sum.
            let same = |sum: u16| if sum == 0 { 0xffff } else { sum };
            assert_eq!(same(header.checksum), same(expected.unwrap()));
            let behind = (index * size) as u32;
            assert_eq!(header.sequence_number, sent.sequence.wrapping_add(behind));
            let (first, last) = (index == 0, index + 1 == count);
            assert_eq!(header.fin, last && sent.flags & 0x01 != 0);
            assert_eq!(header.psh, last && sent.flags & 0x08 != 0);
            assert_eq!(header.cwr, first && sent.flags & 0x80 != 0);
            assert!(header.ack && header.acknowledgment_number == 77);
            assert_eq!(header.options.len(), sent.options_len);
            tcp.payload()
        }
        TransportSlice::Udp(udp) => {
            let header: UdpHeader = udp.to_header();
            let expected = match &net {
                NetSlice::Ipv4(ip) => {
                    header.calc_checksum_ipv4(&ip.header().to_header(), udp.payload())
                }
                NetSlice::Ipv6(ip) => {
                    header.calc_checksum_ipv6(&ip.header().to_header(), udp.payload())
                }
                NetSlice::Arp(_) => panic!(),
            };
            assert_eq!(header.checksum, expected.unwrap());
            assert_eq!(usize::from(header.length), segment.len() - sent.layer4());
            udp.payload()
        }
        other => panic!("{other:?}"),
    }
}

fn sent() -> impl Strategy<Value = Sent> {
    (
        any::<(bool, bool, u8, u32)>(),
        prop::option::of(1..4095_u16),
        0..=10_usize,
        1..5000_usize,
        any::<u8>(),
    )
        .prop_map(
            |((is_ipv6, is_tcp, flags, sequence), vlan, options, len, salt)| Sent {
                is_ipv6,
                is_tcp,
                vlan,
                options_len: options * 4,
                flags,
                sequence,
                len,
                salt,
            },
        )
}

proptest! {
    #[test]
    fn a_checksum_is_what_others_compute(sent in sent()) {
        let mut frame = sent.unfinished();
        complete_checksum(&mut frame, sent.checksum()).unwrap();
        let whole = sent.whole();
        let place = sent.layer4() + usize::from(sent.checksum().offset);
        let same = |bytes: &[u8]| if bytes == [0, 0] { [0xff, 0xff] } else { [bytes[0], bytes[1]] };
        prop_assert_eq!(same(&frame[place..place + 2]), same(&whole[place..place + 2]));
        frame[place..place + 2].copy_from_slice(&whole[place..place + 2]);
        prop_assert_eq!(frame, whole);
    }

    #[test]
    fn segments_are_right_each_and_together(sent in sent(), size in 1..3000_u16) {
        let size = size.max((sent.len / 100) as u16 + 1);
        let offload = sent.offload(size);
        let count = sent.len.div_ceil(usize::from(size));
        let mut payload = Vec::<u8>::new();
        let mut index = 0;
        let done = segment(&mut sent.unfinished(), &offload, |piece| {
            assert!(piece.len() <= offload.longest_segment_len(usize::MAX));
            payload.extend(payload_of(&sent, piece, index, count, size.into()));
            index += 1;
            ControlFlow::Continue(())
        });
        prop_assert_eq!(done, Ok(count));
        prop_assert_eq!(index, count);
        prop_assert_eq!(payload, sent.payload());
    }

    /// An offload that belongs to another frame writes nothing and hands out nothing.
    #[test]
    fn another_frame_is_refused(sent in sent(), other in sent(), size in 200..3000_u16) {
        let offload = sent.offload(size);
        let header_len = |sent: &Sent| sent.whole().len() - sent.len;
        let fits = sent.is_tcp == other.is_tcp && sent.is_ipv6 == other.is_ipv6 && header_len(&sent) == header_len(&other);
        let mut frame = other.unfinished();
        let before = frame.clone();
        let done = segment(&mut frame, &offload, |_| ControlFlow::Continue(()));
        prop_assert_eq!(done.is_ok(), fits);
        prop_assert!(fits || frame == before);
    }
}

fn small() -> Sent {
    Sent {
        is_ipv6: false,
        is_tcp: true,
        vlan: None,
        options_len: 12,
        flags: 0x89,
        sequence: u32::MAX - 10,
        len: 100,
        salt: 5,
    }
}

#[test]
fn the_longest_frame_is_cut() {
    // As long as the length of an IPv4 packet allows.
    let sent = Sent {
        len: 65_535 - 20 - 32,
        ..small()
    };
    let mut count = 0;
    let done = segment(&mut sent.unfinished(), &sent.offload(1448), |piece| {
        payload_of(&sent, piece, count, 46, 1448);
        count += 1;
        ControlFlow::Continue(())
    });
    assert_eq!((done, count), (Ok(46), 46));
}

#[test]
fn who_takes_no_more_is_given_no_more() {
    let sent = Sent {
        len: 65_535 - 20 - 32,
        ..small()
    };
    let mut count = 0;
    let done = segment(&mut sent.unfinished(), &sent.offload(1448), |_| {
        count += 1;
        match count {
            3 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    });
    assert_eq!((done, count), (Ok(3), 3));
}

#[test]
fn one_segment_is_the_frame_itself() {
    let sent = small();
    let mut seen = Vec::new();
    segment(&mut sent.unfinished(), &sent.offload(100), |piece| {
        seen.push(piece.to_vec());
        ControlFlow::Continue(())
    })
    .unwrap();
    assert_eq!(seen, [sent.whole()]);
}

#[test]
fn places_outside_the_frame_are_refused() {
    let mut frame = small().unfinished();
    let end = frame.len() as u16;
    for (start, offset, right) in [
        (end - 2, 0, true),
        (end - 1, 0, false),
        (34, end - 36, true),
        (34, end - 35, false),
        (u16::MAX, u16::MAX, false),
    ] {
        let done = complete_checksum(&mut frame, Checksum { start, offset });
        assert_eq!(done.is_ok(), right, "{start} {offset}");
    }
    assert_eq!(
        segment(&mut frame, &Offload::NONE, |_| panic!()),
        Err(WrongFrame)
    );
    assert_eq!(
        segment(&mut [], &small().offload(50), |_| panic!()),
        Err(WrongFrame)
    );
}
