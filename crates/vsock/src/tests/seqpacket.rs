//! Messages: their bounds are kept, their flags too, and none is ever half delivered to the host.

use std::time::Duration;

use policy::LineId;
use wire::vsock::{
    Header, Operation, SEQPACKET_END_OF_MESSAGE, SEQPACKET_END_OF_RECORD, SocketType,
};

use super::model::{After, Call, Plan, Socket, World, reads, sends, sleeps};
use crate::{Limits, Reason, Side};

fn messages(bytes: u64, len: u32) -> Plan {
    Plan {
        write_len: len,
        ..sends(bytes)
    }
}

/// A guest calls the host, or the other guest, over a socket of messages.
fn call(cid: u32, caller: Plan, callee: Plan, buffer: u32) -> (World, Vec<LineId>, u32) {
    let (mut world, lines) = World::of(2, Limits::default());
    world.listen_host(lines[0], 80, callee);
    world
        .guest(lines[1])
        .listen(80, SocketType::SeqPacket, callee);
    world
        .guest(lines[1])
        .listeners
        .get_mut(&80)
        .unwrap()
        .buf_alloc = buffer;
    let mut socket = Socket::new(Side::Caller, SocketType::SeqPacket, 262_144);
    socket.plan = caller;
    let id = world
        .guest(lines[0])
        .connect(Duration::ZERO, socket, (cid, 80), None);
    world.settle();
    (world, lines, id)
}

#[test]
fn messages_of_every_size_keep_their_bounds() {
    for cid in [2, 4] {
        for len in [1, 128, 4052, 4053, 65_536, 65_537, 200_000] {
            let bytes = u64::from(len) * 7;
            let (mut world, _, _) = call(cid, messages(bytes, len), messages(bytes, len), 262_144);
            world.finish();
            assert_eq!(world.totals.bytes, 2 * bytes, "{cid} {len}");
            assert_eq!(world.reasons(), []);
        }
    }
}

#[test]
fn a_program_of_the_host_sends_messages() {
    for len in [1, 4052, 4053, 100_000] {
        let (mut world, lines) = World::of(1, Limits::default());
        let plan = messages(u64::from(len) * 3, len);
        world
            .guest(lines[0])
            .listen(80, SocketType::SeqPacket, plan);
        world.dial(lines[0], 80, SocketType::SeqPacket, plan);
        world.settle();
        world.finish();
        assert_eq!(world.totals.bytes, u64::from(len) * 6);
    }
}

#[test]
fn a_message_larger_than_the_receivers_buffer_ends_the_circuit() {
    let (mut world, lines) = World::of(1, Limits::default());
    world
        .guest(lines[0])
        .listen(80, SocketType::SeqPacket, reads());
    world
        .guest(lines[0])
        .listeners
        .get_mut(&80)
        .unwrap()
        .buf_alloc = 5000;
    for (len, fits) in [(4999, true), (5000, true), (5001, false)] {
        let plan = messages(u64::from(len), len);
        let token = world.dial(lines[0], 80, SocketType::SeqPacket, plan);
        world.settle();
        let expected = Call::Closed { reset: !fits };
        assert_eq!(world.programs[&token].call, expected, "{len}");
    }
    assert_eq!(world.reasons(), [Reason::MessageTooLong]);
    world.finish();
}

#[test]
fn a_long_message_behind_many_short_ones_gets_through() {
    // Found by reading: packets of messages that were read, and a part of one that could not be read before the rest
    // had come, were counted together, so that the rest never came.
    let short = Plan {
        reads: false,
        ..messages(255 * 10, 10)
    };
    let plan = Plan {
        after: After::Wait,
        ..short
    };
    let (mut world, lines, id) = call(4, plan, sleeps(), 262_144);
    let socket = world.guest(lines[0]).sockets.get_mut(&id).unwrap();
    socket.plan = messages(200_000, 200_000);
    world.settle();
    let receiver = world.guest(lines[1]).accepted(80).unwrap();
    world
        .guest(lines[1])
        .sockets
        .get_mut(&receiver)
        .unwrap()
        .plan = reads();
    world.advance(Duration::from_secs(5));
    assert_eq!(world.totals.bytes, 202_550);
    world.finish();
}

#[test]
fn small_parts_of_a_message_travel_together() {
    // The sender's window opens by a few bytes at a time, and so its long message comes in hundreds of parts. Each
    // would be a packet at the receiver, which counts packets and can read none before the last has come.
    let plan = Plan {
        after: After::Wait,
        ..messages(1000 * 4, 4)
    };
    let (mut world, lines, id) = call(4, plan, sleeps(), 4000);
    let socket = world.guest(lines[0]).sockets.get_mut(&id).unwrap();
    socket.plan = messages(4000, 4000);
    socket.plan.left = 4000;
    for _ in 0..1000 {
        world.settle();
        let receiver = world.guest(lines[1]).accepted(80).unwrap();
        world.guest(lines[1]).read(receiver, 0);
    }
    let receiver = world.guest(lines[1]).accepted(80).unwrap();
    world
        .guest(lines[1])
        .sockets
        .get_mut(&receiver)
        .unwrap()
        .plan = reads();
    world.advance(Duration::from_secs(5));
    assert_eq!(world.totals.bytes, 8000);
    world.finish();
}

fn open(world: &mut World, line: LineId, cid: u64) -> Header {
    let header = Header {
        src_cid: 3,
        dst_cid: cid,
        src_port: 1,
        dst_port: 80,
        socket_type: 2,
        operation: Operation::Request as u16,
        buf_alloc: 65_536,
        ..Header::default()
    };
    world.inject(line, header);
    world.settle();
    Header {
        operation: Operation::Data as u16,
        ..header
    }
}

#[test]
fn the_flags_of_messages_are_passed_on() {
    let (mut world, lines) = World::of(2, Limits::default());
    world
        .guest(lines[1])
        .listen(80, SocketType::SeqPacket, sleeps());
    let data = open(&mut world, lines[0], 4);
    world.settle();
    world.guest(lines[1]).paused = true;
    let both = SEQPACKET_END_OF_MESSAGE | SEQPACKET_END_OF_RECORD;
    for flags in [SEQPACKET_END_OF_MESSAGE, both] {
        world.inject(
            lines[0],
            Header {
                len: 3,
                flags,
                ..data
            },
        );
    }
    let expected = [
        (Operation::Data, SEQPACKET_END_OF_MESSAGE),
        (Operation::Data, both),
    ];
    assert_eq!(world.take_operations(lines[1]), expected);
    world.inject(
        lines[0],
        Header {
            len: 3,
            flags: 4,
            ..data
        },
    );
    assert_eq!(
        world.reasons(),
        [Reason::ProtocolViolation],
        "an unknown flag"
    );
    world.line_down(lines[1]);
    world.finish();
}

#[test]
fn an_empty_message_ends_the_circuit() {
    let (mut world, lines) = World::of(1, Limits::default());
    world.listen_host(lines[0], 80, reads());
    let data = open(&mut world, lines[0], 2);
    let flags = SEQPACKET_END_OF_MESSAGE;
    world.inject(
        lines[0],
        Header {
            len: 0,
            flags,
            ..data
        },
    );
    assert_eq!(world.reasons(), [Reason::ProtocolViolation]);
    world.finish();
}

#[test]
fn a_message_without_an_end_is_an_error_to_the_host() {
    // Found by reading the device: it delivers whole messages, so that the part was kept for ever, and its circuit too.
    for shuts_down in [true, false] {
        let (mut world, lines) = World::of(1, Limits::default());
        world.listen_host(lines[0], 80, sleeps());
        let data = open(&mut world, lines[0], 2);
        let flags = SEQPACKET_END_OF_MESSAGE;
        world.inject(
            lines[0],
            Header {
                len: 30,
                flags,
                ..data
            },
        );
        world.inject(lines[0], Header { len: 5, ..data });
        let operation = if shuts_down {
            Operation::Shutdown
        } else {
            Operation::Reset
        };
        let operation = operation as u16;
        world.inject(
            lines[0],
            Header {
                operation,
                flags: 2,
                ..data
            },
        );
        let program = &world.programs[&1];
        assert_eq!(program.incoming.len(), 30, "what was whole is delivered");
        assert_eq!(program.call, Call::Closed { reset: true });
        assert!(!program.end_shown);
        assert_eq!(world.reasons(), [Reason::PeerReset]);
        world.finish();
    }
}

#[test]
fn a_message_is_not_begun_before_the_receiver_has_room_for_all_of_it() {
    // Seed 2250: the credit left took a part of the sixth message, which the receiver could not read. Counted together
    // with the five that it had read, that part used up the packets that the rest would have needed.
    let (mut world, lines) = World::of(1, Limits::default());
    let waits = Plan {
        reads: false,
        ..sleeps()
    };
    world
        .guest(lines[0])
        .listen(80, SocketType::SeqPacket, waits);
    world
        .guest(lines[0])
        .listeners
        .get_mut(&80)
        .unwrap()
        .buf_alloc = 4096;
    let token = world.dial(lines[0], 80, SocketType::SeqPacket, sleeps());
    world.settle();
    for _ in 0..6 {
        let plan = &mut world.programs.get_mut(&token).unwrap().plan;
        (plan.left, plan.write_len) = (777, 777);
        world.settle();
        world.advance(Duration::from_secs(1));
    }
    let receiver = world.guest(lines[0]).accepted(80).unwrap();
    assert_eq!(world.guests[&lines[0]].socket(receiver).unread, 5 * 777);
    world
        .guest(lines[0])
        .sockets
        .get_mut(&receiver)
        .unwrap()
        .plan
        .reads = true;
    world.settle();
    assert_eq!(world.guests[&lines[0]].socket(receiver).fwd_cnt, 6 * 777);
    world.finish();
}

#[test]
fn the_beginning_of_a_message_does_not_go_along_with_whole_ones() {
    // Seed 12654: the sender's window ended in the middle of the sixth message, whose beginning went along with the
    // fifth. Counted together with messages that were read, it used up the packets that the rest would have needed.
    let plan = Plan {
        after: After::Wait,
        ..messages(20 * 777, 777)
    };
    let (mut world, lines, id) = call(4, plan, sleeps(), 4096);
    world.advance(Duration::from_secs(1));
    assert_eq!(world.guests[&lines[0]].socket(id).tx_cnt, 4096);
    let receiver = world.guest(lines[1]).accepted(80).unwrap();
    assert_eq!(world.guests[&lines[1]].socket(receiver).unread, 5 * 777);
    let socket = world.guest(lines[1]).sockets.get_mut(&receiver).unwrap();
    socket.plan.reads = true;
    world.settle();
    assert_eq!(world.guests[&lines[1]].socket(receiver).fwd_cnt, 20 * 777);
    world.finish();
}
