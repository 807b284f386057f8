//! Circuits between guests, which go on.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use device::{CircuitFilter, Fabric, LineConfig, Observation};
use guestmem_driver::RawDescriptor;
use keeper::Keeper;
use vsock::CircuitState;
use wire::vsock::{HEADER_LEN, Header, Operation};

use super::{Host, end, wait_until_kept};
use crate::guest::{Guest, RX, TX};
use crate::turns::{allow_everyone, header};
use crate::{config_of, turn_until};

/// Where guests see their memory.
const BASE: u64 = 1 << 32;
const PACKET: u32 = 10_000;
const BUFFER: usize = 4096;
/// Where a header has its length (virtio 1.2, section 5.10.6).
const LEN_AT: usize = 24;

/// Two VMs with a circuit, on a host with a keeper. The receiver has no buffers.
struct Scene {
    host: Host,
    running: Option<(Fabric, Arc<Keeper>)>,
    sender: Guest,
    receiver: Guest,
    /// Buffers of the receiver's that may have something in them.
    buffers: Vec<RawDescriptor>,
    /// Bytes that were sent, and the packet of the last of them.
    sent: u32,
    last_packet: RawDescriptor,
}

fn configs(host: &Host) -> [LineConfig; 2] {
    let db = config_of(host.path(), &format!("{}b", host.vm), 4);
    [host.config(), db]
}

/// A fabric with both lines, in one order or the other.
fn start(host: &Host, is_reversed: bool) -> (Fabric, Arc<Keeper>) {
    let mut configs = configs(host);
    if is_reversed {
        configs.reverse();
    }
    let (mut fabric, keeper) = host.fabric_of(&configs);
    // Before its first turn, in which the circuits go on.
    allow_everyone(&mut fabric);
    (fabric, keeper)
}

/// The byte at this place of what is sent.
fn byte(place: u32) -> u8 {
    (place.wrapping_mul(2_654_435_761) >> 13) as u8
}

impl Scene {
    fn new() -> Scene {
        Scene::with(Guest::connect)
    }

    /// The guests can be paused.
    fn of_guests_that_pause() -> Scene {
        Scene::with(|socket| {
            let guest = Guest::connect_without_rings(socket);
            guest.start_kick_first();
            guest
        })
    }

    fn with(connect: impl Fn(&Path) -> Guest) -> Scene {
        let host = Host::new();
        let mut running = start(&host, false);
        let [web, db] = configs(&host);
        let (sender, receiver) = (connect(&web.vhost_user), connect(&db.vhost_user));
        turn_until(&mut running.0, "both run", |fabric| {
            fabric.lines().iter().all(|line| line.report.up)
        });
        let last_packet = sender.buffer(0);
        let mut scene = Scene {
            host,
            running: Some(running),
            sender,
            receiver,
            buffers: Vec::new(),
            sent: 0,
            last_packet,
        };
        scene.connect();
        scene
    }

    fn fabric(&mut self) -> &mut Fabric {
        &mut self.running.as_mut().unwrap().0
    }

    fn connect(&mut self) {
        let buffer = self.sender.buffer(BUFFER);
        self.sender.offer(RX, buffer, 64);
        let buffer = self.receiver.buffer(BUFFER);
        self.receiver.offer(RX, buffer, 1);
        self.receiver.kick(RX);
        self.send(Operation::Request, 0);
        self.until("the receiver is called", |scene| {
            scene.receiver.given_back(RX) == 1
        });
        self.answer(Operation::Response);
        self.until("the sender is answered", |scene| {
            scene.sender.given_back(RX) > 0
        });
    }

    fn until(&mut self, what: &str, happened: impl Fn(&Scene) -> bool) {
        let mut running = self.running.take().unwrap();
        turn_until(&mut running.0, what, |_| happened(self));
        self.running = Some(running);
    }

    /// The sender sends this, with so many bytes.
    fn send(&mut self, operation: Operation, len: u32) {
        let header = Header {
            dst_cid: 4,
            ..header(operation, 80, len)
        };
        let packet = self.sender.packet(&header);
        let bytes: Vec<u8> = (self.sent..self.sent + len).map(byte).collect();
        let place = (packet.address - BASE) as usize + HEADER_LEN;
        self.sender.arena.write(place, &bytes);
        self.sent += len;
        self.last_packet = packet;
        self.sender.offer(TX, packet, 1);
        self.sender.kick(TX);
    }

    /// The receiver says this.
    fn answer(&mut self, operation: Operation) {
        let header = Header {
            src_cid: 4,
            dst_cid: 3,
            src_port: 80,
            dst_port: 1000,
            operation: operation as u16,
            buf_alloc: 1 << 20,
            ..header(operation, 80, 0)
        };
        let packet = self.receiver.packet(&header);
        self.receiver.offer(TX, packet, 1);
        self.receiver.kick(TX);
    }

    fn offer_buffers(&mut self, count: usize) {
        for _ in 0..count {
            let buffer = self.receiver.buffer(BUFFER);
            self.receiver.offer(RX, buffer, 1);
            self.buffers.push(buffer);
        }
        self.receiver.kick(RX);
    }

    /// The payload of what the receiver has got, behind the dial.
    fn received(&self) -> Vec<u8> {
        let count = usize::from(self.receiver.given_back(RX)) - 1;
        let mut received = Vec::new();
        for buffer in &self.buffers[..count] {
            let place = (buffer.address - BASE) as usize;
            let mut bytes = [0; BUFFER];
            self.receiver.arena.read(place, &mut bytes);
            let header = Header::from_bytes(bytes[..HEADER_LEN].try_into().unwrap());
            if header.operation == Operation::Data as u16 {
                received.extend(&bytes[HEADER_LEN..][..header.len as usize]);
            }
        }
        received
    }

    /// The daemon ends as a process does, and another follows.
    fn hand_over(&mut self, is_reversed: bool) {
        let running = self.running.take().unwrap();
        end(running, &[&self.sender, &self.receiver]);
        self.running = Some(start(&self.host, is_reversed));
    }

    fn receive_all(&mut self) {
        self.offer_buffers(24);
        self.until("everything arrives", |scene| {
            scene.received().len() == scene.sent as usize
        });
        let expected: Vec<u8> = (0..self.sent).map(byte).collect();
        assert!(self.received() == expected);
    }

    fn circuits(&mut self) -> Vec<CircuitState> {
        let listed = self
            .fabric()
            .list_circuits(&CircuitFilter::default(), 0, 10);
        let states = listed.circuits.iter().map(|circuit| circuit.state);
        states.collect()
    }
}

#[test]
fn what_is_parked_arrives_by_another_fabric() {
    let mut scene = Scene::new();
    for _ in 0..3 {
        scene.send(Operation::Data, PACKET);
    }
    // Two buffers: a part of the first packet.
    scene.offer_buffers(2);
    scene.until("a part arrives", |scene| !scene.received().is_empty());
    for is_reversed in [true, true, false] {
        scene.hand_over(is_reversed);
        scene.offer_buffers(1);
        let before = scene.received().len();
        scene.until("more arrives", |scene| scene.received().len() > before);
        assert_eq!(scene.circuits(), [CircuitState::Open]);
    }
    scene.receive_all();
    assert_eq!(scene.sender.given_back(TX), 4);
    // In both directions, and to its end.
    scene.answer(Operation::CreditUpdate);
    scene.send(Operation::Data, PACKET);
    scene.receive_all();
    scene.send(Operation::Reset, 0);
    let mut running = scene.running.take().unwrap();
    turn_until(&mut running.0, "the circuit ends", |fabric| {
        fabric.lines().iter().all(|line| line.report.circuits == 0)
    });
}

#[test]
fn what_is_sent_while_there_is_no_fabric_arrives() {
    let mut scene = Scene::new();
    scene.offer_buffers(24);
    let running = scene.running.take().unwrap();
    end(running, &[&scene.sender, &scene.receiver]);
    scene.send(Operation::Data, PACKET);
    scene.running = Some(start(&scene.host, false));
    scene.receive_all();
}

#[test]
fn a_guest_that_is_paused_meanwhile_goes_on() {
    for is_sender in [true, false] {
        let mut scene = Scene::of_guests_that_pause();
        scene.send(Operation::Data, PACKET);
        scene.offer_buffers(24);
        scene.until("it arrives", |scene| {
            scene.received().len() == PACKET as usize
        });
        let pauses = |scene: &Scene, enabled| match is_sender {
            true => scene.sender.set_enabled(enabled),
            false => scene.receiver.set_enabled(enabled),
        };
        pauses(&scene, false);
        scene.hand_over(false);
        pauses(&scene, true);
        scene.send(Operation::Data, PACKET);
        scene.receive_all();
    }
}

#[test]
fn a_circuit_whose_parked_packet_has_changed_is_reset() {
    let mut scene = Scene::new();
    scene.send(Operation::Data, PACKET);
    let running = scene.running.as_mut().unwrap();
    turn_until(&mut running.0, "it is parked", |fabric| {
        fabric
            .lines()
            .iter()
            .any(|line| line.parked_descriptors > 0)
    });
    let running = scene.running.take().unwrap();
    end(running, &[&scene.sender, &scene.receiver]);
    // Another length, in the header that was read before.
    let len_at = (scene.last_packet.address - BASE) as usize + LEN_AT;
    scene.sender.arena.write(len_at, &1u32.to_le_bytes());
    scene.running = Some(start(&scene.host, false));
    scene.offer_buffers(4);
    let mut running = scene.running.take().unwrap();
    turn_until(&mut running.0, "the circuit is reset", |fabric| {
        fabric.lines().iter().all(|line| line.report.circuits == 0)
    });
}

/// Else what a guest may park would be bounded by nothing, and all of it be read in one turn.
#[test]
fn a_guest_whose_parked_packets_have_grown_fails() {
    let mut scene = Scene::new();
    for _ in 0..100 {
        scene.send(Operation::Data, 16);
    }
    let running = scene.running.as_mut().unwrap();
    turn_until(&mut running.0, "they are parked", |fabric| {
        let lines = fabric.lines();
        lines.iter().any(|line| line.parked_descriptors == 100)
    });
    let running = scene.running.take().unwrap();
    end(running, &[&scene.sender, &scene.receiver]);
    let table = scene.sender.in_pieces(scene.last_packet);
    // The first chain was the call.
    for index in 1..=100 {
        scene.sender.replace(TX, index, table);
    }
    scene.running = Some(start(&scene.host, false));
    scene.offer_buffers(4);
    let mut running = scene.running.take().unwrap();
    turn_until(&mut running.0, "the line fails", |fabric| {
        let lines = fabric.lines();
        let mut faults = lines.iter().filter_map(|line| line.last_fault.as_ref());
        faults.any(|fault| fault.contains("descriptors that the device has were changed"))
    });
    turn_until(&mut running.0, "its circuit is reset", |fabric| {
        fabric.lines().iter().all(|line| line.report.circuits == 0)
    });
}

#[test]
fn what_had_to_be_stored_costs_its_circuit() {
    let mut scene = Scene::new();
    // More descriptors than half of the ring: the last are stored.
    for _ in 0..150 {
        scene.send(Operation::Data, 16);
    }
    scene.until("some are stored", |scene| scene.sender.given_back(TX) > 1);
    scene.hand_over(false);
    scene.offer_buffers(4);
    let given_back = |scene: &Scene| (scene.sender.given_back(RX), scene.receiver.given_back(RX));
    let (sender, receiver) = given_back(&scene);
    scene.until("both ends are reset", |scene| {
        let (sender_now, receiver_now) = given_back(scene);
        sender_now > sender && receiver_now > receiver
    });
    assert_eq!(scene.circuits(), []);
}

#[test]
fn a_fabric_that_ends_before_rings_run_again_has_lost_nothing() {
    let mut scene = Scene::new();
    for _ in 0..3 {
        scene.send(Operation::Data, PACKET);
    }
    scene.offer_buffers(2);
    scene.until("a part arrives", |scene| !scene.received().is_empty());
    let running = scene.running.take().unwrap();
    end(running, &[&scene.sender, &scene.receiver]);
    for turns in 0..12 {
        let (mut fabric, keeper) = start(&scene.host, turns % 2 == 0);
        for _ in 0..turns % 6 {
            fabric.turn(Some(Duration::ZERO)).unwrap();
        }
        keeper.leave();
        drop((fabric, keeper));
    }
    scene.running = Some(start(&scene.host, false));
    scene.receive_all();
    assert_eq!(scene.circuits(), [CircuitState::Open]);
}

/// The last packet that a guest was given in this buffer, which was offered alone.
fn read_header(guest: &Guest, buffer: RawDescriptor) -> Header {
    let mut bytes = [0; HEADER_LEN];
    guest
        .arena
        .read((buffer.address - BASE) as usize, &mut bytes);
    Header::from_bytes(&bytes)
}

#[test]
fn a_call_to_a_guest_that_has_yet_to_go_on_is_not_refused() {
    let mut scene = Scene::of_guests_that_pause();
    scene.receiver.set_enabled(false);
    scene.hand_over(false);
    let answered = scene.sender.given_back(RX);
    let call = Header {
        dst_cid: 4,
        src_port: 1001,
        ..header(Operation::Request, 80, 0)
    };
    let packet = scene.sender.packet(&call);
    let sent = scene.sender.given_back(TX);
    scene.sender.offer(TX, packet, 1);
    scene.sender.kick(TX);
    scene.until("the call is taken", |scene| {
        scene.sender.given_back(TX) > sent
    });
    let before = scene.receiver.given_back(RX);
    let buffer = scene.receiver.buffer(BUFFER);
    scene.receiver.offer(RX, buffer, 1);
    scene.receiver.set_enabled(true);
    scene.until("the guest is called", |scene| {
        scene.receiver.given_back(RX) > before
    });
    let called = read_header(&scene.receiver, buffer);
    assert_eq!(
        (called.operation, called.src_port),
        (Operation::Request as u16, 1001)
    );
    assert_eq!(scene.sender.given_back(RX), answered);
}

#[test]
fn a_guest_without_room_hears_of_a_refusal_by_another_fabric() {
    let host = Host::new();
    let mut running = start(&host, false);
    let [web, db] = configs(&host);
    let mut guest = Guest::connect(&web.vhost_user);
    let other = Guest::connect(&db.vhost_user);
    turn_until(&mut running.0, "both run", |fabric| {
        fabric.lines().iter().all(|line| line.report.up)
    });
    // To a VM that is not there.
    let call = Header {
        dst_cid: 9,
        ..header(Operation::Request, 80, 0)
    };
    let packet = guest.packet(&call);
    guest.offer(TX, packet, 1);
    guest.kick(TX);
    turn_until(&mut running.0, "the call is taken", |_| {
        guest.given_back(TX) == 1
    });
    for is_reversed in [true, false] {
        end(running, &[&guest, &other]);
        running = start(&host, is_reversed);
    }
    let buffer = guest.buffer(BUFFER);
    guest.offer(RX, buffer, 1);
    guest.kick(RX);
    turn_until(&mut running.0, "it is refused", |_| {
        guest.given_back(RX) == 1
    });
    let refusal = Header {
        src_cid: 9,
        dst_cid: 3,
        src_port: 80,
        dst_port: 1000,
        socket_type: call.socket_type,
        operation: Operation::Reset as u16,
        ..Header::default()
    };
    assert_eq!(read_header(&guest, buffer), refusal);
}

/// As a daemon ends that was asked to.
#[test]
fn nothing_is_said_of_the_end_of_what_goes_on() {
    let mut scene = Scene::new();
    let (sender, ended) = std::sync::mpsc::channel();
    scene.fabric().set_observer(Box::new(move |observation| {
        // None receives once the test is over.
        let is_end = matches!(observation, Observation::CircuitEnded { .. });
        let _ = sender.send(is_end);
    }));
    let (mut fabric, keeper) = scene.running.take().unwrap();
    wait_until_kept(&mut fabric, &[&scene.sender, &scene.receiver]);
    keeper.leave();
    fabric.stop();
    assert!(!ended.try_iter().any(|is_end| is_end));
    drop((fabric, keeper));
    scene.running = Some(start(&scene.host, false));
    turn_until(scene.fabric(), "it goes on", |fabric| {
        fabric.taken_over().is_some()
    });
    let cost = scene.fabric().taken_over().unwrap();
    assert_eq!((cost.circuits, cost.reset), (1, 0));
}
