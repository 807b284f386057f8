//! Packets for another guest, which takes none: they are parked with their sender.

use std::path::Path;

use device::Fabric;
use vsock::Reason;
use wire::vsock::{Header, Operation, SEQPACKET_END_OF_MESSAGE, SocketType};

use crate::guest::{Guest, RX, TABLE, TX};
use crate::turns::{allow_everyone, header};
use crate::{config, config_of, fabric, turn_until};

/// Messages of one sender that may be stored.
const KEPT_MESSAGES: u32 = 8;

/// A circuit between two guests.
struct Scene {
    fabric: Fabric,
    sender: Guest,
    receiver: Guest,
    socket_type: SocketType,
}

impl Scene {
    fn new(directory: &Path, socket_type: SocketType) -> Scene {
        let mut fabric = fabric();
        let mut web = config(directory);
        web.limits.kept_messages = KEPT_MESSAGES;
        fabric.open_line(&web).unwrap();
        let sender = Guest::attach(&mut fabric, &web.vhost_user);
        let db = config_of(directory, "db", 4);
        fabric.open_line(&db).unwrap();
        let receiver = Guest::attach(&mut fabric, &db.vhost_user);
        allow_everyone(&mut fabric);
        let mut scene = Scene {
            fabric,
            sender,
            receiver,
            socket_type,
        };
        scene.connect();
        scene
    }

    fn header(&self, operation: Operation, len: u32) -> Header {
        Header {
            dst_cid: 4,
            socket_type: self.socket_type as u16,
            ..header(operation, 80, len)
        }
    }

    fn connect(&mut self) {
        let dial = self.header(Operation::Request, 0);
        let answer = Header {
            src_cid: 4,
            dst_cid: 3,
            src_port: 80,
            dst_port: 1000,
            buf_alloc: 1 << 20,
            operation: Operation::Response as u16,
            ..dial
        };
        let (fabric, sender, receiver) = (&mut self.fabric, &mut self.sender, &mut self.receiver);
        let buffers = [sender.buffer(4096), receiver.buffer(4096)];
        sender.offer(RX, buffers[0], 64);
        // For the dial, and nothing else.
        receiver.offer(RX, buffers[1], 1);
        let dial = sender.packet(&dial);
        sender.offer(TX, dial, 1);
        sender.kick(TX);
        turn_until(fabric, "the receiver is called", |_| {
            receiver.given_back(RX) == 1
        });
        let answer = receiver.packet(&answer);
        receiver.offer(TX, answer, 1);
        receiver.kick(TX);
        turn_until(fabric, "the sender is answered", |_| {
            sender.given_back(RX) > 0
        });
    }

    fn kept_bytes(fabric: &mut Fabric) -> u64 {
        let kept = fabric.survey_circuits(0).kept_bytes;
        kept.into_iter().map(|(_, kept)| kept).sum()
    }
}

/// What a guest may park weighs 16 MiB, a piece of a packet 1 KiB beside its bytes (`PARKED_WEIGHT`, `PIECE_WEIGHT`).
#[test]
fn pieces_of_parked_packets_are_counted() {
    const PACKETS: u16 = 100;
    const PAYLOAD: u32 = TABLE as u32 - 1;
    let directory = tempfile::tempdir().unwrap();
    let mut scene = Scene::new(directory.path(), SocketType::Stream);
    let data = scene.header(Operation::Data, PAYLOAD);
    let data = scene.sender.in_pieces(scene.sender.packet(&data));
    scene.sender.offer(TX, data, PACKETS);
    scene.sender.kick(TX);
    let bytes = u64::from(PACKETS) * u64::from(PAYLOAD);
    turn_until(&mut scene.fabric, "everything is kept", |fabric| {
        Scene::kept_bytes(fabric) == bytes
    });
    let weight = usize::from(TABLE) * 1024 + PAYLOAD as usize;
    let parked = scene.fabric.lines()[0].parked_descriptors;
    assert_eq!(parked, (16 << 20) / weight);
}

/// The VMM hands over the same memory once more, so that what is parked has to be stored.
#[test]
fn messages_that_are_unparked_are_counted() {
    for (count, fits) in [(KEPT_MESSAGES, true), (KEPT_MESSAGES + 1, false)] {
        let directory = tempfile::tempdir().unwrap();
        let mut scene = Scene::new(directory.path(), SocketType::SeqPacket);
        let data = Header {
            flags: SEQPACKET_END_OF_MESSAGE,
            ..scene.header(Operation::Data, 1)
        };
        let data = scene.sender.packet(&data);
        scene.sender.offer(TX, data, count as u16);
        scene.sender.kick(TX);
        turn_until(&mut scene.fabric, "everything is parked", |fabric| {
            fabric.lines()[0].parked_descriptors == count as usize
        });
        scene.sender.share();
        turn_until(&mut scene.fabric, "nothing is parked", |fabric| {
            fabric.lines()[0].parked_descriptors == 0
        });
        let line = &scene.fabric.lines()[0];
        let ended = line.report.counters.ended[Reason::TooManyMessages.index()];
        let expected = if fits {
            (KEPT_MESSAGES.into(), 0)
        } else {
            (0, 1)
        };
        assert_eq!((line.kept_messages, ended), expected);
    }
}
