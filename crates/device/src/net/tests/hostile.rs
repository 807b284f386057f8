//! Guests that lie: in headers, in chains, in rings, and between the moment they are read and the moment they are copied.

use std::sync::Arc;

use guestmem::guest::Range;
use guestmem_driver::{Arena, RawDescriptor};
use l2::bridge::PortConfig;
use wire::net_header::{
    FLAG_NEEDS_CHECKSUM, GSO_ECN, GSO_TCP6, GSO_UDP, GSO_UDP_FRAGMENTS, NET_HEADER_LEN, NetHeader,
};

use super::capture::Recorder;
use super::packets::Packet;
use super::setup::{Driver, Guest, PLAIN, RECEIVE, Setup, TRANSMIT, frame, mac};
use crate::CaptureOptions;
use crate::net::drain::MAX_FRAME_LEN;

/// A liar, and two that go on meanwhile.
struct Street {
    setup: Setup,
    liar: Guest,
    web: Guest,
    db: Guest,
}

impl Street {
    fn new() -> Street {
        Street::with(Driver::default())
    }

    fn with(driver: Driver) -> Street {
        let mut setup = Setup::new();
        Street {
            liar: setup.guest_with(1, driver),
            web: setup.guest(2),
            db: setup.guest_with(3, Driver::plain()),
            setup,
        }
    }

    /// What the other two say to each other arrives, and nothing else does.
    fn others_go_on(&mut self) {
        let (web, db) = (&mut self.web, &mut self.db);
        let (to_db, to_web) = (frame(db.mac, web.mac, 99), frame(web.mac, db.mac, 999));
        web.send(&to_db);
        db.send(&to_web);
        self.setup.settle();
        assert_eq!(db.frames(), [to_db]);
        assert_eq!(web.frames(), [to_web]);
    }

    /// The liar's port is down, until its driver begins anew.
    fn has_failed(&mut self) {
        assert!(!self.setup.runs(&self.liar), "the port should have failed");
        self.others_go_on();
        let driver = Driver::default();
        let arena = Arc::new(Arena::new(32 << 20).unwrap());
        self.liar = self.setup.guest_in(1, driver, arena);
        let sent = frame(self.web.mac, self.liar.mac, 60);
        self.liar.send(&sent);
        self.setup.settle();
        assert_eq!(self.web.frames(), [sent]);
    }
}

/// Headers that no frame can have, each for this packet.
fn lies(packet: &Packet) -> Vec<(&'static str, NetHeader)> {
    let cut = packet.to_be_cut(1000);
    let sum = packet.to_be_summed();
    let len = packet.frame.len() as u16;
    vec![
        ("segments of nothing", NetHeader { gso_size: 0, ..cut }),
        (
            "headers beyond the frame",
            NetHeader {
                header_len: len + 1,
                ..cut
            },
        ),
        (
            "headers beyond the frame, without an offload",
            NetHeader {
                header_len: len + 1,
                ..NetHeader::default()
            },
        ),
        ("segments without a checksum", NetHeader { flags: 0, ..cut }),
        (
            "another kind of segments",
            NetHeader {
                gso_type: GSO_TCP6,
                ..cut
            },
        ),
        (
            "segments of UDP",
            NetHeader {
                gso_type: GSO_UDP,
                ..cut
            },
        ),
        (
            "fragments",
            NetHeader {
                gso_type: GSO_UDP_FRAGMENTS,
                ..cut
            },
        ),
        ("a kind that there is not", NetHeader { gso_type: 2, ..cut }),
        (
            "every bit",
            NetHeader {
                gso_type: 0xff,
                ..cut
            },
        ),
        (
            "congestion alone",
            NetHeader {
                gso_type: GSO_ECN,
                ..cut
            },
        ),
        (
            "a checksum outside",
            NetHeader {
                checksum_start: len,
                ..sum
            },
        ),
        (
            "a checksum that ends outside",
            NetHeader {
                checksum_offset: len - sum.checksum_start - 1,
                ..sum
            },
        ),
        (
            "a checksum far outside",
            NetHeader {
                checksum_start: u16::MAX,
                checksum_offset: u16::MAX,
                ..sum
            },
        ),
        (
            "a checksum over an address",
            NetHeader {
                checksum_start: 0,
                checksum_offset: 6,
                ..sum
            },
        ),
        (
            "a checksum over IP",
            NetHeader {
                checksum_start: 14,
                checksum_offset: 12,
                ..sum
            },
        ),
        (
            "a checksum in the payload",
            NetHeader {
                checksum_offset: 30,
                ..sum
            },
        ),
        (
            "a checksum from elsewhere",
            NetHeader {
                checksum_start: sum.checksum_start - 1,
                ..cut
            },
        ),
    ]
}

#[test]
fn headers_that_lie_are_refused_and_counted() {
    for driver in Driver::of_each_kind() {
        let mut street = Street::with(driver);
        let packet = Packet::tcp4(&street.liar, &street.web, 1400);
        for (number, (name, header)) in lies(&packet).into_iter().enumerate() {
            street.liar.send_with(header, &packet.frame);
            street.setup.settle();
            assert_eq!(street.web.received(), [], "{name}");
            let counted = street.setup.counters(&street.liar).malformed_headers;
            assert_eq!(counted, number as u64 + 1, "{name}");
        }
        street.setup.rest();
        street.liar.take_sent(TRANSMIT);
        assert_eq!(street.liar.outstanding, 0, "buffers come back");
        street.others_go_on();
        let header = packet.to_be_cut(1000);
        street.liar.send_with(header, &packet.frame);
        street.setup.settle();
        assert_eq!(street.web.frames(), [packet.frame], "the truth passes");
    }
}

#[test]
fn what_was_not_negotiated_is_refused() {
    let driver = Driver {
        features: PLAIN,
        ..Driver::default()
    };
    let mut street = Street::with(driver);
    let packets = Packet::of_each_kind(&street.liar, &street.web, 1400);
    for packet in &packets {
        street.liar.send_with(packet.to_be_cut(1000), &packet.frame);
        street.liar.send_with(packet.to_be_summed(), &packet.frame);
    }
    street.setup.settle();
    assert_eq!(street.web.received(), []);
    let counted = street.setup.counters(&street.liar).malformed_headers;
    assert_eq!(counted, 2 * packets.len() as u64);
    street.others_go_on();
}

#[test]
fn flags_and_fields_that_mean_nothing_are_not_passed_on() {
    let mut street = Street::new();
    let sent = frame(street.web.mac, street.liar.mac, 200);
    let header = NetHeader {
        flags: !FLAG_NEEDS_CHECKSUM,
        gso_type: 0,
        header_len: 200,
        gso_size: 7,
        checksum_start: 65_535,
        checksum_offset: 65_535,
        buffers: 65_535,
    };
    street.liar.send_with(header, &sent);
    street.setup.settle();
    assert_eq!(street.web.received(), [(super::setup::done(1), sent)]);
}

#[test]
fn chains_without_a_frame_come_back() {
    let mut street = Street::new();
    let place = street.liar.arena.allocate(2 * MAX_FRAME_LEN, 64) as u64;
    let sent = frame(street.web.mac, street.liar.mac, 60);
    let range = |len: usize| Range {
        address: place,
        len: len as u32,
    };
    let mut refused = 0;
    for len in [
        1,
        11,
        12,
        13,
        25,
        NET_HEADER_LEN + MAX_FRAME_LEN + 1,
        2 * MAX_FRAME_LEN,
    ] {
        street.liar.enqueue_ranges(&[range(len)], &[]);
        refused += 1;
    }
    street.liar.enqueue_ranges(&[], &[range(2000)]);
    refused += 1;
    street.liar.enqueue_ranges(&[range(0)], &[]);
    refused += 1;
    street.liar.enqueue(NetHeader::default(), &sent);
    street.liar.kick();
    street.setup.settle();
    assert_eq!(street.web.frames(), [sent]);
    let counters = street.setup.counters(&street.liar);
    assert_eq!(
        (counters.malformed_headers, counters.frames_from_guest),
        (refused, 1)
    );
    street.setup.rest();
    street.liar.take_sent(TRANSMIT);
    assert_eq!(street.liar.outstanding, 0);
    street.others_go_on();
}

#[test]
fn a_frame_with_room_for_an_answer_is_sent_and_nothing_is_written_there() {
    let mut street = Street::new();
    let sent = frame(street.web.mac, street.liar.mac, 60);
    let place = street.liar.arena.allocate(200, 64);
    street.liar.arena.write(place, &[0; NET_HEADER_LEN]);
    street.liar.arena.write(place + NET_HEADER_LEN, &sent);
    street.liar.arena.write(place + 100, &[7; 100]);
    let range = |from: usize, len: usize| Range {
        address: (place + from) as u64,
        len: len as u32,
    };
    street
        .liar
        .enqueue_ranges(&[range(0, 72)], &[range(100, 100)]);
    street.liar.kick();
    street.setup.settle();
    assert_eq!(street.web.frames(), [sent]);
    let mut after = [0; 100];
    street.liar.arena.read(place + 100, &mut after);
    assert_eq!(after, [7; 100]);
}

/// Does something to this ring of a guest.
type Corruption = fn(&mut Guest, usize);

#[test]
fn rings_that_make_no_sense_cost_their_own_port() {
    for ring in [TRANSMIT, RECEIVE] {
        let corrupt: [(&str, Corruption); 6] = [
            ("a chain that bites its tail", |liar, ring| {
                let descriptor = RawDescriptor {
                    address: 4096,
                    len: 64,
                    flags: RawDescriptor::NEXT
                        | if ring == RECEIVE {
                            RawDescriptor::WRITE
                        } else {
                            0
                        },
                    next: 5,
                };
                liar.rings[ring].write_descriptor(5, descriptor);
                liar.rings[ring].publish_head(5);
            }),
            ("a head outside of the table", |liar, ring| {
                liar.rings[ring].publish_head(64);
            }),
            ("an index that jumps", |liar, ring| {
                let index = liar.rings[ring].available_index();
                liar.rings[ring].set_available_index(index.wrapping_add(65));
            }),
            ("an index that goes back", |liar, ring| {
                let index = liar.rings[ring].available_index();
                liar.rings[ring].set_available_index(index.wrapping_sub(1 + 64));
            }),
            ("memory that is not there", |liar, ring| {
                let descriptor = RawDescriptor {
                    address: 1 << 50,
                    len: 64,
                    flags: if ring == RECEIVE {
                        RawDescriptor::WRITE
                    } else {
                        0
                    },
                    next: 0,
                };
                liar.rings[ring].write_descriptor(6, descriptor);
                liar.rings[ring].publish_head(6);
            }),
            ("all memory and more", |liar, ring| {
                let descriptor = RawDescriptor {
                    address: 0,
                    len: u32::MAX,
                    flags: if ring == RECEIVE {
                        RawDescriptor::WRITE
                    } else {
                        0
                    },
                    next: 0,
                };
                liar.rings[ring].write_descriptor(7, descriptor);
                liar.rings[ring].publish_head(7);
            }),
        ];
        for (name, corrupt) in corrupt {
            let mut street = Street::new();
            // A ring of which nothing was used comes to the lie only behind all that was posted.
            corrupt(&mut street.liar, ring);
            if ring == TRANSMIT {
                street.liar.kick_anyway(TRANSMIT);
            }
            for _ in 0..70 {
                street.web.send(&frame(street.liar.mac, street.web.mac, 60));
                street.others_go_on();
            }
            println!("{name} in ring {ring}");
            street.has_failed();
        }
    }
}

/// So many buffers that hold next to nothing are not checked again for each frame.
#[test]
fn buffers_that_hold_next_to_nothing_cost_their_own_frames_only() {
    for kind in Driver::of_each_kind() {
        for buffer in [vec![1], vec![1; 4]] {
            let mut street = Street::with(Driver {
                buffer,
                ring_size: 256,
                ..kind.clone()
            });
            for _ in 0..20 {
                let lost = frame(street.liar.mac, street.web.mac, 1400);
                street.web.enqueue(NetHeader::default(), &lost);
            }
            street.web.kick();
            street.others_go_on();
            let counters = street.setup.counters(&street.liar);
            assert_eq!(
                (counters.dropped_without_buffers, counters.frames_to_guest),
                (20, 0)
            );
            assert!(street.setup.runs(&street.liar));
        }
    }
}

#[test]
fn what_was_sent_before_the_lie_arrives() {
    let mut street = Street::new();
    let sent = frame(street.web.mac, street.liar.mac, 60);
    for _ in 0..5 {
        street.liar.enqueue(NetHeader::default(), &sent);
    }
    street.liar.rings[TRANSMIT].kick_needed();
    street.liar.rings[TRANSMIT].publish_head(64);
    street.liar.kick_anyway(TRANSMIT);
    street.setup.settle();
    assert_eq!(street.web.frames().len(), 5);
    street.has_failed();
}

#[test]
fn a_vmm_that_takes_its_memory_away_costs_its_own_port() {
    for ring in [TRANSMIT, RECEIVE] {
        let mut street = Street::new();
        for _ in 0..5 {
            let sent = frame(street.web.mac, street.liar.mac, 1000);
            street.liar.enqueue(NetHeader::default(), &sent);
        }
        street.liar.kick();
        street.liar.arena.file().set_len(0).unwrap();
        if ring == RECEIVE {
            street
                .web
                .send(&frame(street.liar.mac, street.web.mac, 1000));
        }
        street.setup.settle();
        street.web.received();
        street.others_go_on();
        street.has_failed();
    }
}

/// Two that agreed to share memory, as two VMs of one VMM could: while a batch is passed on, what one of them is given is written over
/// what the other has sent and was not copied yet.
#[test]
fn a_header_that_is_changed_after_it_was_judged_does_not_get_through() {
    for len in [60, 127, 128, 129, 1000] {
        let mut setup = Setup::new();
        let shared = Arc::new(Arena::new(32 << 20).unwrap());
        for number in [1, 2] {
            setup.add_port(number, PortConfig::guest(mac(number)), &Driver::default());
        }
        let mut liar = setup.guest_in(1, Driver::default(), Arc::clone(&shared));
        let friend = setup.guest_in(2, Driver::default(), Arc::clone(&shared));
        let mut victim = setup.guest_with(3, Driver::plain());
        let capture = Recorder::of(&mut setup, Some("vm3"), CaptureOptions::default());
        let honest = frame(victim.mac, liar.mac, len);
        // Behind it in the batch, and delivered before it, as what came last is still in the cache.
        let place = shared.allocate(NET_HEADER_LEN + len, 64);
        shared.write(place, &NetHeader::default().encode());
        shared.write(place + NET_HEADER_LEN, &honest);
        let range = Range {
            address: place as u64,
            len: (NET_HEADER_LEN + len) as u32,
        };
        liar.enqueue_ranges(&[range], &[]);
        liar.enqueue(NetHeader::default(), &forged(&friend, &liar, len));
        // The friend's next buffer is where the frame for the victim lies.
        let descriptor = RawDescriptor {
            address: place as u64,
            len: (NET_HEADER_LEN + len) as u32,
            flags: RawDescriptor::WRITE,
            next: 0,
        };
        friend.rings[RECEIVE].write_descriptor(0, descriptor);
        liar.kick();
        setup.settle();
        let mut now = vec![0; len];
        shared.read(place + NET_HEADER_LEN, &mut now);
        assert_eq!(now, forged(&friend, &liar, len), "the frame was changed");
        assert_eq!(setup.counters(&friend).frames_to_guest, 1);
        let judged = len.min(wire::ethernet::SNAPSHOT_LEN);
        let received = victim.received();
        assert_eq!(received.len(), 1);
        let (header, frame) = &received[0];
        assert_eq!(*header, super::setup::done(1));
        assert_eq!(frame[..judged], honest[..judged], "{len} bytes");
        assert_eq!(
            frame[judged..],
            now[judged..],
            "so it was changed before it was copied"
        );
        assert_eq!(capture.frames(), std::slice::from_ref(frame));
    }
}

/// A frame that says it is for the friend, with bytes of its own.
fn forged(to: &Guest, from: &Guest, len: usize) -> Vec<u8> {
    let mut forged = frame(to.mac, from.mac, len);
    forged[14..].fill(0x55);
    forged
}
