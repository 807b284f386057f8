//! The whole device, from a guest's descriptors to another's, or to a socket of the host.

mod ends;

use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::time::Duration;

use device::Change;
use guestmem::queue::MAX_CHAIN_LEN;
use guestmem_driver::RawDescriptor;
use vsock::Limits;
use wire::vsock::{HEADER_LEN, HOST_CID, Header, Operation, SHUTDOWN_BOTH};

use crate::Dice;
use crate::guest::{BASE, Guest, PACKET_BYTES, RX, TX};
use crate::house::House;
use crate::tape::Tape;
use ends::{Conversation, Route};

/// Things that happen in one case, at most.
const STEPS: usize = 100;

const WEB: (&str, u32) = ("web", 3);
const DB: (&str, u32) = ("db", 4);

/// Two honest parties talk: packets cut into descriptors in any way, buffers of any size cut in any way, readers that take their time.
/// Every byte arrives once and in order, and so does the end; then nothing is left. A capture has the same bytes.
pub fn carry(input: &[u8]) {
    let mut dice = Dice::new(input);
    let mut house = House::new(&[WEB, DB], Limits::default());
    let tape = Tape::run(&mut house, input.len());
    let route = dice.pick(&[Route::ToHost, Route::FromHost, Route::ToGuest]);
    let mut talk = Conversation::begin(&mut house, route);
    for _ in 0..STEPS {
        if dice.is_empty() {
            break;
        }
        talk.step(&mut house, &mut dice);
    }
    talk.finish(&mut house);
    talk.check(&tape);
    drop(talk);
    house.until("the VMMs are gone", |house| {
        house.fabric.lines().iter().all(|line| !line.attached)
    });
    house.check_empty();
    house.close_later();
}

/// One guest does whatever it likes to its rings, its packets and its neighbour. A bystander's conversation goes on meanwhile,
/// and afterwards the hostile guest's line serves a fresh guest.
pub fn attack(input: &[u8]) {
    let mut dice = Dice::new(input);
    let limits = Limits {
        circuits: 20,
        half_open: 5,
        orphan_resets: 10,
        line_grant_bytes: 1 << 20,
        linger: Duration::from_millis(1),
        ..Limits::default()
    };
    let mut house = House::new(&[WEB, DB], limits);
    let tape = Tape::run(&mut house, input.len());
    let bystander = dice.pick(&[Route::ToHost, Route::FromHost]);
    let mut talk = Conversation::begin_with(&mut house, bystander, DB);
    let listener = UnixListener::bind(house.path("web.sock_80")).expect("a listener");
    listener.set_nonblocking(true).expect("an open socket");
    let mut programs = Vec::new();
    let mut attacker = Attacker::new(&mut house);
    for _ in 0..STEPS {
        if dice.is_empty() {
            break;
        }
        match dice.below(16) {
            0..=11 => attacker.act(&mut dice),
            12 | 13 => talk.step(&mut house, &mut dice),
            _ => house.settle(),
        }
        if let Ok((stream, _)) = listener.accept() {
            programs.push(stream);
        }
        let report = house.line(WEB.0).report;
        assert!(report.circuits <= limits.circuits, "{report:?}");
        assert!(
            report.granted_bytes
                <= limits.line_grant_bytes + 20 * u64::from(limits.min_grant_bytes)
        );
    }
    talk.finish(&mut house);
    tape.read();
    drop(attacker);
    house.until("the hostile guest's VMM is gone", |house| {
        !house.line(WEB.0).attached
    });
    drop((listener, programs));
    let _ = std::fs::remove_file(house.path("web.sock_80"));
    let mut again = Conversation::begin_with(&mut house, Route::ToHost, WEB);
    again.step(&mut house, &mut dice);
    again.finish(&mut house);
    drop((again, talk));
    house.until("the VMMs are gone", |house| {
        house.fabric.lines().iter().all(|line| !line.attached)
    });
    house.check_empty();
    house.close_later();
}

/// A packet of as many descriptors as a chain may have, each with payload and one of them across two regions, is one piece more than
/// the kernel takes in a call. It arrives nevertheless.
pub fn a_packet_in_more_pieces_than_one_call_takes() {
    let mut house = House::new(&[WEB], Limits::default());
    let mut talk = Conversation::begin(&mut house, Route::ToHost);
    talk.send_in_pieces(&mut house, MAX_CHAIN_LEN);
    talk.finish(&mut house);
}

/// A call that waits in the ring of a VM that is removed is not judged: not by the rules of after, in which the VM is not, and not by those of before.
pub fn a_call_in_the_ring_of_a_vm_that_goes() {
    let mut house = House::new(&[WEB, DB], Limits::default());
    let [from_web, from_db] = [WEB, DB].map(|(name, _)| {
        let listener = UnixListener::bind(house.path(&format!("{name}.sock_80")));
        let listener = listener.expect("a listener");
        listener.set_nonblocking(true).expect("an open socket");
        listener
    });
    let mut guests = [WEB, DB].map(|(name, cid)| Guest::attach(&mut house, name, cid));
    for guest in &mut guests {
        let header = Header {
            src_cid: guest.cid.into(),
            dst_cid: HOST_CID.into(),
            src_port: 1000,
            dst_port: 80,
            len: 0,
            socket_type: 1,
            operation: Operation::Request as u16,
            flags: 0,
            buf_alloc: 262_144,
            fwd_cnt: 0,
        };
        assert!(guest.send(&header, &[], &[]));
    }
    let changed = house.fabric.change(Change {
        added: Vec::new(),
        bound: device::Bound::default(),
        leaves_out: false,
        removed: vec![WEB.0.to_owned()],
        services: Vec::new(),
        policy: Arc::default(),
        groups: Vec::new(),
        aliases: Vec::new(),
        enforce_existing: false,
        commit: Box::new(|| ()),
    });
    assert_eq!(
        changed.map(|changed| changed.ended).map_err(|(vm, _)| vm),
        Ok(0)
    );
    house.until("the other's call comes", |_| from_db.accept().is_ok());
    assert!(from_web.accept().is_err(), "there is no caller");
    drop(guests);
}

struct Attacker {
    guest: Guest,
    /// It has written into its rings: what comes back may be anything, and is not read.
    wild: bool,
}

impl Attacker {
    fn new(house: &mut House) -> Attacker {
        Attacker {
            guest: Guest::attach(house, WEB.0, WEB.1),
            wild: false,
        }
    }

    fn act(&mut self, dice: &mut Dice<'_>) {
        match dice.below(16) {
            0..=6 if !self.wild => self.packet(dice),
            0..=9 if !self.wild => {
                let len = dice.pick(&[HEADER_LEN + 1, 4096, 300, HEADER_LEN, 1, PACKET_BYTES]);
                let cuts = [dice.below(60), dice.below(3), dice.below(3)];
                self.guest.post(len, &cuts);
            }
            10 if !self.wild => while self.guest.receive().is_some() {},
            11 | 12 => {
                // Anywhere in the two rings and their tables.
                self.wild = true;
                let bytes = dice.take(8);
                let offset = dice.below(8192);
                let rings = self.guest.queues[RX].setup().descriptors - self.guest.arena.base();
                self.guest.arena.write(rings as usize + offset, bytes);
            }
            13 => {
                self.wild = true;
                let ring = dice.pick(&[TX, RX]);
                let queue = &mut self.guest.queues[ring];
                let descriptor = RawDescriptor {
                    address: BASE + u64::from(dice.edgy()),
                    len: dice.edgy(),
                    flags: dice.word() & 7,
                    next: dice.word() % 34,
                };
                queue.write_descriptor(dice.word() % 32, descriptor);
            }
            14 => {
                self.wild = true;
                let ring = dice.pick(&[TX, RX]);
                let queue = &mut self.guest.queues[ring];
                let ahead = dice.word() % 40;
                queue.set_available_entry(queue.available_index(), dice.word() % 34);
                queue.set_available_index(queue.available_index().wrapping_add(ahead));
            }
            _ => {
                self.guest.notify(RX);
                self.guest.notify(TX);
            }
        }
    }

    fn packet(&mut self, dice: &mut Dice<'_>) {
        let payload = [b'!'; 5000];
        let len = match dice.below(4) {
            0 => dice.below(payload.len()),
            _ => dice.below(100),
        };
        let operation = match dice.below(8) {
            0..=3 => Operation::Data as u16,
            4 => Operation::Request as u16,
            5 => Operation::Response as u16,
            _ => dice.below(9) as u16,
        };
        let header = Header {
            src_cid: if dice.one_in(16) {
                DB.1.into()
            } else {
                WEB.1.into()
            },
            dst_cid: u64::from(dice.pick(&[HOST_CID, DB.1, DB.1, WEB.1, 99])),
            src_port: 1000 + dice.below(3) as u32,
            dst_port: dice.pick(&[80, 80, 80, 81, 5000]),
            len: match dice.below(8) {
                0 => dice.edgy(),
                _ => len as u32,
            },
            socket_type: dice.pick(&[1, 1, 1, 2, 9]),
            operation,
            flags: match dice.below(4) {
                0 => dice.double(),
                1 => dice.below(SHUTDOWN_BOTH as usize + 1) as u32,
                _ => 0,
            },
            buf_alloc: dice.pick(&[262_144, 4096, 0, u32::MAX]),
            fwd_cnt: match dice.below(4) {
                0 => dice.edgy(),
                _ => 0,
            },
        };
        let cuts = [dice.below(60), dice.below(60), dice.below(3)];
        self.guest.send(&header, &payload[..len], &cuts);
    }
}
