//! The addresses at which a network itself answers, and guests that say anything to it.

use std::collections::BTreeSet;
use std::net::{Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use l2::{Asker, Host, Ipv4Settings, Station, StationConfig};

use ::wire::ethernet::MacAddress;

use crate::Dice;

const OWN_MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);
const OWN: Ipv4Addr = Ipv4Addr::new(10, 0, 0, 1);
const OWN_IPV6: Ipv6Addr = Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 1);
const POOL: (Ipv4Addr, Ipv4Addr) = (Ipv4Addr::new(10, 0, 0, 100), Ipv4Addr::new(10, 0, 0, 103));

const UDP: u8 = 17;
const TCP: u8 = 6;
const ICMP: u8 = 1;
const ICMPV6: u8 = 58;

/// However many frames a guest is answered with for one of its own: an answer, a word of TCP before and after it.
const MAX_ANSWERS: usize = 4;

/// Whatever guests send: every answer is whole and goes to its asker, no guest gets more than a few, the pool stays within its bounds, and once the
/// guests are silent the station is too.
pub fn frames(input: &[u8]) {
    let mut dice = Dice::new(input);
    let mut attack = Attack {
        station: station(&mut dice),
        now: Instant::now(),
        sequence: None,
        acknowledge: 0,
    };
    while !dice.is_empty() {
        attack.step(&mut dice);
    }
    attack.rest();
}

fn station(dice: &mut Dice<'_>) -> Station {
    let config = StationConfig {
        mac: OWN_MAC,
        ipv4: Some(Ipv4Settings {
            address: OWN,
            prefix_len: 24,
        }),
        ipv6: Some(OWN_IPV6),
        domain: "lan".into(),
        mtu: dice.pick(&[1500, 1280, 9000]),
        dhcp: true,
        advertise: !dice.one_in(8),
        dns: !dice.one_in(8),
        lease: dice.pick(&[Duration::from_secs(60), Duration::MAX]),
        gateway: Some(Ipv4Addr::new(10, 0, 0, 254)).filter(|_| dice.one_in(2)),
        pool: Some(POOL.0..=POOL.1).filter(|_| !dice.one_in(4)),
        seed: 1,
    };
    let mut station = Station::new(config).expect("a good configuration");
    let host = Host {
        name: "web".into(),
        aliases: vec!["www".into()],
        mac: guest_mac(0),
        ipv4: Some(Ipv4Addr::new(10, 0, 0, 2)),
        ipv6: Some(Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2)),
        isolated: false,
    };
    station.set_hosts(vec![host]).expect("a good list");
    station
}

fn guest_mac(number: u8) -> MacAddress {
    MacAddress([2, 0, 0, 0, 1, number])
}

struct Attack {
    station: Station,
    now: Instant,
    /// The numbers of TCP with which the last answer can be answered.
    sequence: Option<u32>,
    acknowledge: u32,
}

impl Attack {
    fn step(&mut self, dice: &mut Dice<'_>) {
        let source = guest_mac(dice.byte() % 6);
        let frame = match dice.below(16) {
            0 => arp(dice, source),
            1 => neighbour_discovery(dice, source),
            2..=4 => dhcp(dice, source),
            5..=9 => self.tcp(dice, source),
            10..=12 => {
                let question = question(dice);
                let port = dice.pick(&[53, 53, 53, 67, 9]);
                datagram(dice, source, (1000, port), &question)
            }
            13 => echo(dice, source),
            14 => {
                let wait = dice.pick(&[1, 1000, 11_000, 70_000]);
                return self.pass(Duration::from_millis(wait));
            }
            _ => {
                let len = dice.below(100);
                [&OWN_MAC.0[..], &source.0, dice.take(len)].concat()
            }
        };
        self.give(dice, source, frame);
    }

    fn give(&mut self, dice: &mut Dice<'_>, source: MacAddress, mut frame: Vec<u8>) {
        match dice.below(12) {
            0 => frame.truncate(dice.below(frame.len() + 1)),
            1 if frame.len() > 12 => {
                let at = 12 + dice.below(frame.len() - 12);
                frame[at] ^= 1 << dice.below(8);
            }
            2 => frame.extend([0; 40]),
            _ => {}
        }
        let asker = Asker {
            port: source.0[5].into(),
            guest: Some(source),
            isolated: false,
        };
        self.station.receive(self.now, &asker, &frame);
        let answers = self.answers();
        assert!(
            answers.len() <= MAX_ANSWERS,
            "{} answers to one frame",
            answers.len()
        );
        for answer in &answers {
            assert_eq!(answer[..6], source.0, "an answer to another guest");
        }
        let leases = self.station.leases(self.now);
        let addresses: BTreeSet<_> = leases.iter().map(|lease| lease.address).collect();
        let guests: BTreeSet<_> = leases.iter().map(|lease| lease.mac).collect();
        assert!(addresses.len() == leases.len() && leases.len() <= 4);
        assert_eq!(guests.len(), leases.len(), "a guest has two addresses");
        assert!(
            addresses
                .iter()
                .all(|address| (POOL.0..=POOL.1).contains(address))
        );
    }

    fn answers(&mut self) -> Vec<Vec<u8>> {
        let answers: Vec<_> = std::iter::from_fn(|| self.station.transmit()).collect();
        for answer in &answers {
            check(answer);
            self.note(answer);
        }
        answers
    }

    /// Remembers what an honest peer would say next.
    fn note(&mut self, frame: &[u8]) {
        let segment = match (&frame[12..14], frame[14] & 15) {
            ([8, 0], 5) if frame[23] == TCP => &frame[34..],
            ([0x86, 0xdd], _) if frame[20] == TCP => &frame[54..],
            _ => return,
        };
        let number =
            |at: usize| u32::from_be_bytes(segment[at..at + 4].try_into().expect("four bytes"));
        let has_syn_or_fin = segment[13] & 3 != 0;
        let payload = segment.len() - usize::from(segment[12] >> 4) * 4;
        self.acknowledge = number(4).wrapping_add(payload as u32 + u32::from(has_syn_or_fin));
        self.sequence = Some(number(8));
    }

    fn tcp(&mut self, dice: &mut Dice<'_>, source: MacAddress) -> Vec<u8> {
        let flags = dice.pick(&[0x18, 0x18, 0x02, 0x02, 0x10, 0x11, 0x04, 0x14, 0x12, 0x3f]);
        let mut sequence = self.sequence.unwrap_or(7);
        if dice.one_in(8) {
            sequence = dice.edgy();
        }
        let mut segment = Vec::new();
        segment.extend((1000 + u16::from(dice.byte() % 4)).to_be_bytes());
        segment.extend(dice.pick(&[53_u16, 53, 53, 80]).to_be_bytes());
        segment.extend(sequence.to_be_bytes());
        segment.extend(self.acknowledge.to_be_bytes());
        let offset = if dice.one_in(12) { dice.byte() } else { 0x50 };
        segment.extend([offset, flags]);
        segment.extend(dice.pick(&[1000_u16, 0, 1, 65_535]).to_be_bytes());
        segment.extend([0; 4]);
        if flags & 8 != 0 {
            let question = question(dice);
            let len = question.len() as u16 + u16::from(dice.one_in(6));
            segment.extend(len.to_be_bytes());
            segment.extend(question);
        }
        packet(dice, source, TCP, segment)
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        if self.station.poll_at().is_some_and(|at| at <= self.now) {
            self.station.handle_timeout(self.now);
            self.answers();
        }
    }

    /// Left alone, everything ends within a minute.
    fn rest(&mut self) {
        let end = self.now + Duration::from_secs(60);
        let mut turns = 0;
        while let Some(at) = self.station.poll_at() {
            assert!(at <= end, "something goes on for more than a minute");
            self.now = self.now.max(at);
            self.station.handle_timeout(self.now);
            self.answers();
            turns += 1;
            assert!(turns < 1000, "it does not come to rest");
        }
        assert_eq!(self.station.counters().frames_dropped, 0);
    }
}

/// The station's frame is well-formed.
fn check(frame: &[u8]) {
    assert!(
        frame.len() >= 42 && frame.len() <= 9014,
        "a frame of {} bytes",
        frame.len()
    );
    assert_eq!(frame[6..12], OWN_MAC.0);
    match frame[12..14] {
        [8, 6] => assert_eq!(frame.len(), 42),
        [8, 0] => {
            let packet = &frame[14..];
            assert_eq!(
                usize::from(u16::from_be_bytes([packet[2], packet[3]])),
                packet.len()
            );
            assert_eq!(sum(&packet[..20], 0), 0xffff, "the header's checksum");
            let pseudo = match packet[9] {
                ICMP => 0,
                protocol => {
                    u32::from(protocol) + packet.len() as u32 - 20
                        + u32::from(sum(&packet[12..20], 0))
                }
            };
            assert_eq!(sum(&packet[20..], pseudo), 0xffff, "the payload's checksum");
        }
        [0x86, 0xdd] => {
            let packet = &frame[14..];
            let len = packet.len() - 40;
            assert_eq!(usize::from(u16::from_be_bytes([packet[4], packet[5]])), len);
            let pseudo = u32::from(packet[6]) + len as u32 + u32::from(sum(&packet[8..40], 0));
            assert_eq!(sum(&packet[40..], pseudo), 0xffff, "the payload's checksum");
        }
        _ => panic!("an unknown kind of frame"),
    }
}

/// The sum of RFC 1071, not inverted.
fn sum(bytes: &[u8], start: u32) -> u16 {
    let words = bytes
        .chunks(2)
        .map(|pair| u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)));
    let mut sum: u32 = start + words.sum::<u32>();
    while sum > 0xffff {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum as u16
}

fn ethernet(destination: MacAddress, source: MacAddress, kind: u16, payload: &[u8]) -> Vec<u8> {
    [&destination.0[..], &source.0, &kind.to_be_bytes(), payload].concat()
}

fn arp(dice: &mut Dice<'_>, source: MacAddress) -> Vec<u8> {
    let mut packet = vec![0, 1, 8, 0, 6, 4, 0, dice.pick(&[1, 2, 3])];
    packet.extend(dice.pick(&[source, OWN_MAC, guest_mac(0)]).0);
    packet.extend(dice.pick(&[[10, 0, 0, 2], [0; 4], [10, 0, 0, 1], [255; 4]]));
    packet.extend([0; 6]);
    packet.extend(dice.pick(&[[10, 0, 0, 1], [10, 0, 0, 3]]));
    ethernet(
        dice.pick(&[MacAddress::BROADCAST, OWN_MAC]),
        source,
        0x0806,
        &packet,
    )
}

/// An IP packet of either version around what is said, with its checksum filled in.
fn packet(dice: &mut Dice<'_>, source: MacAddress, protocol: u8, payload: Vec<u8>) -> Vec<u8> {
    let is_new = protocol == ICMPV6 || (protocol != ICMP && dice.one_in(2));
    let own: MacAddress = if dice.one_in(10) {
        MacAddress::BROADCAST
    } else {
        OWN_MAC
    };
    match is_new {
        false => {
            let from = dice.pick(&[
                [10, 0, 0, 2],
                [10, 0, 0, 3],
                [10, 0, 0, 100],
                [0; 4],
                [10, 0, 0, 1],
                [10, 0, 0, 255],
                [192, 168, 1, 1],
            ]);
            let to = dice.pick(&[
                [10, 0, 0, 1],
                [10, 0, 0, 1],
                [255; 4],
                [10, 0, 0, 255],
                [224, 0, 0, 1],
            ]);
            ethernet(own, source, 0x0800, &ipv4(from, to, protocol, payload))
        }
        true => {
            let from = dice.pick(&[
                Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 2),
                Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 2),
                Ipv6Addr::UNSPECIFIED,
                OWN_IPV6,
            ]);
            let to = dice.pick(&[
                OWN_IPV6,
                Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0xff, 0xfe00, 1),
                Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1),
            ]);
            ethernet(
                own,
                source,
                0x86dd,
                &ipv6(dice, from, to, protocol, payload),
            )
        }
    }
}

fn ipv4(from: [u8; 4], to: [u8; 4], protocol: u8, mut payload: Vec<u8>) -> Vec<u8> {
    let pseudo = match protocol {
        ICMP => 0,
        _ => u32::from(protocol) + payload.len() as u32 + u32::from(sum(&[from, to].concat(), 0)),
    };
    fill_checksum(&mut payload, protocol, pseudo);
    let len = (20 + payload.len() as u16).to_be_bytes();
    let mut header = vec![0x45, 0, len[0], len[1], 0, 0, 0, 0, 64, protocol, 0, 0];
    header.extend(from);
    header.extend(to);
    let checksum = !sum(&header, 0);
    header[10..12].copy_from_slice(&checksum.to_be_bytes());
    header.extend(payload);
    header
}

fn ipv6(
    dice: &mut Dice<'_>,
    from: Ipv6Addr,
    to: Ipv6Addr,
    protocol: u8,
    mut payload: Vec<u8>,
) -> Vec<u8> {
    let pseudo = u32::from(protocol)
        + payload.len() as u32
        + u32::from(sum(&[from.octets(), to.octets()].concat(), 0));
    fill_checksum(&mut payload, protocol, pseudo);
    let mut next = protocol;
    if dice.one_in(12) {
        // Options from hop to hop before it: padding, or an unknown one.
        payload.splice(..0, [protocol, 0, dice.pick(&[1, 0xc2, 5]), 4, 0, 0, 0, 0]);
        next = 0;
    }
    let len = (payload.len() as u16).to_be_bytes();
    let mut header = vec![0x60, 0, 0, 0, len[0], len[1], next, 255];
    header.extend(from.octets());
    header.extend(to.octets());
    header.extend(payload);
    header
}

fn fill_checksum(payload: &mut [u8], protocol: u8, pseudo: u32) {
    let at = match protocol {
        TCP => 16,
        UDP => 6,
        _ => 2,
    };
    if payload.len() >= at + 2 {
        let checksum = !sum(payload, pseudo);
        payload[at..at + 2].copy_from_slice(&checksum.to_be_bytes());
    }
}

fn neighbour_discovery(dice: &mut Dice<'_>, source: MacAddress) -> Vec<u8> {
    let mut message = vec![
        dice.pick(&[133, 135, 135, 136, 134, 137]),
        u8::from(dice.one_in(10)),
        0,
        0,
        0,
        0,
        0,
        0,
    ];
    if message[0] != 133 {
        message.extend(
            dice.pick(&[
                OWN_IPV6,
                Ipv6Addr::new(0xff02, 0, 0, 0, 0, 0, 0, 1),
                Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, 9),
            ])
            .octets(),
        );
    }
    if dice.one_in(2) {
        message.extend([
            dice.pick(&[1, 2, 3, 4, 5, 14]),
            dice.pick(&[1, 1, 0, 2, 255]),
        ]);
        let len = dice.pick(&[6, 6, 0, 3, 14, 30]);
        message.extend(vec![source.0[5]; len]);
    }
    packet(dice, source, ICMPV6, message)
}

fn echo(dice: &mut Dice<'_>, source: MacAddress) -> Vec<u8> {
    let (protocol, kind) = dice.pick(&[
        (ICMP, 8),
        (ICMPV6, 128),
        (ICMP, 3),
        (ICMPV6, 1),
        (ICMPV6, 131),
        (ICMP, 13),
        (99, 0),
    ]);
    let mut message = vec![kind, 0, 0, 0, 0, 1, 0, 1];
    message.extend(vec![7; dice.pick(&[0, 56, 1400, 3])]);
    packet(dice, source, protocol, message)
}

fn datagram(
    dice: &mut Dice<'_>,
    source: MacAddress,
    (from, to): (u16, u16),
    payload: &[u8],
) -> Vec<u8> {
    let len = (8 + payload.len() as u16 + u16::from(dice.one_in(12))).to_be_bytes();
    let header = [from.to_be_bytes(), to.to_be_bytes(), len, [0, 0]].concat();
    packet(dice, source, UDP, [&header[..], payload].concat())
}

fn question(dice: &mut Dice<'_>) -> Vec<u8> {
    let mut message = vec![1, 2, dice.pick(&[1, 1, 0x81, 0x10]), 0];
    let count = dice.pick(&[1, 1, 1, 0, 2, 255]);
    message.extend([0, count, 0, 0, 0, 0, 0, dice.pick(&[0, 1, 2])]);
    for _ in 0..count.min(2) {
        match dice.below(5) {
            0 => message.extend(b"\x03www\x03LAN\x00"),
            1 => message.extend(b"\x012\x010\x010\x0210\x07in-addr\x04arpa\x00"),
            2 => message.extend([0xc0, dice.pick(&[12, 13, 0, 255])]),
            3 => {
                for _ in 0..dice.below(8) {
                    let len = dice.pick(&[1, 3, 63, 40]);
                    message.push(len as u8);
                    message.extend(vec![dice.byte(); len]);
                }
                message.push(dice.pick(&[0, 0, 64]));
            }
            _ => message.extend(b"\x03web\x00"),
        }
        message.extend([
            0,
            dice.pick(&[1, 28, 12, 255, 6, 2, 41]),
            0,
            dice.pick(&[1, 255, 3]),
        ]);
    }
    for _ in 0..dice.below(3) {
        message.extend([
            0,
            0,
            41,
            dice.byte(),
            0,
            0,
            u8::from(dice.one_in(8)),
            0,
            0,
            0,
            0,
        ]);
    }
    message
}

fn dhcp(dice: &mut Dice<'_>, source: MacAddress) -> Vec<u8> {
    let mut message = vec![
        dice.pick(&[1, 1, 1, 2]),
        1,
        6,
        0,
        9,
        9,
        9,
        9,
        0,
        0,
        dice.pick(&[0, 0x80]),
        0,
    ];
    message.extend(dice.pick(&[[0; 4], [10, 0, 0, 2], [10, 0, 0, 101], [255; 4]]));
    message.extend([0; 8]);
    message.extend([0, 0, 0, u8::from(dice.one_in(12))]);
    message.extend(if dice.one_in(12) {
        guest_mac(0).0
    } else {
        source.0
    });
    message.resize(236, 0);
    message.extend([0x63, 0x82, 0x53, 0x63]);
    message.extend([53, 1, dice.pick(&[1, 3, 1, 3, 4, 7, 8, 2, 13])]);
    for _ in 0..dice.below(5) {
        match dice.below(6) {
            0 => message.extend([50, 4, 10, 0, 0, dice.pick(&[100, 101, 102, 103, 104, 2, 1])]),
            1 => message.extend([54, 4, 10, 0, 0, dice.pick(&[1, 1, 9])]),
            2 => message.extend([55, 6, 1, 6, 15, 119, 26, 121]),
            3 => message.extend([57, 2, dice.byte(), dice.byte()]),
            4 => {
                let len = dice.byte();
                message.extend([61, len]);
                message.extend(vec![1; len.into()]);
            }
            _ => message.extend([dice.byte(), dice.byte()]),
        }
    }
    message.push(255);
    let header = [
        &[0, 68, 0, 67][..],
        &(8 + message.len() as u16).to_be_bytes(),
        &[0, 0],
    ]
    .concat();
    let to = dice.pick(&[[255; 4], [10, 0, 0, 1]]);
    let packet = ipv4([0; 4], to, UDP, [header, message].concat());
    ethernet(MacAddress::BROADCAST, source, 0x0800, &packet)
}
