//! Credit: no receiver is overrun, no sender waits for ever, and lies end the circuit.

use std::time::Duration;

use policy::LineId;
use wire::vsock::{Header, Operation, SocketType};

use super::model::socket::Kernel;
use super::model::{Plan, Socket, World, reads, sends, sleeps};
use crate::{Limits, Reason, Side};

/// Two guests with buffers of these sizes, and a circuit between them.
fn pair(buffers: [u32; 2], plans: [Plan; 2]) -> (World, Vec<LineId>, u32) {
    let (mut world, lines) = World::of(2, Limits::default());
    world
        .guest(lines[1])
        .listen(80, SocketType::Stream, plans[1]);
    let listeners = &mut world.guest(lines[1]).listeners;
    listeners.get_mut(&80).unwrap().buf_alloc = buffers[1];
    let mut socket = Socket::new(Side::Caller, SocketType::Stream, buffers[0]);
    socket.plan = plans[0];
    let id = world
        .guest(lines[0])
        .connect(Duration::ZERO, socket, (4, 80), None);
    (world, lines, id)
}

#[test]
fn windows_of_one_byte() {
    let (mut world, lines, _) = pair([1, 1], [sends(500), sends(300)]);
    for line in &lines {
        world.guest(*line).kernel = Kernel::Old;
    }
    world.settle();
    assert_eq!(world.totals.bytes, 800);
    assert!(world.totals.data_packets >= 800);
    world.listen_host(lines[0], 80, sends(400));
    let mut socket = Socket::new(Side::Caller, SocketType::Stream, 1);
    socket.plan = sends(100);
    let now = world.now;
    world.guest(lines[0]).connect(now, socket, (2, 80), None);
    world.settle();
    assert_eq!(world.totals.bytes, 1300);
    world.finish();
}

#[test]
fn a_receivers_buffers_of_every_size_are_filled_and_never_overrun() {
    for size in [
        576,
        1023,
        1024,
        4052,
        65_535,
        65_536,
        262_144,
        4_000_000,
        u32::MAX,
    ] {
        let (mut world, lines, _) = pair([262_144, size], [sends(1_000_000), reads()]);
        world.guest(lines[0]).sockets.get_mut(&0).unwrap().buf_alloc = u32::MAX;
        world.settle();
        assert_eq!(world.totals.bytes, 1_000_000, "{size}");
        world.finish();
    }
}

#[test]
fn a_stopped_reader_holds_no_more_than_its_window_and_its_circuit_no_more_than_its_grant() {
    let (mut world, lines, _) = pair([u32::MAX, u32::MAX], [sends(100_000_000), sleeps()]);
    world.guest(lines[1]).ring = 16;
    while !world.is_established(lines[0], 0) {
        world.round();
    }
    world.guest(lines[1]).paused = true;
    world.settle();
    let circuit = world.switch.circuits().next().unwrap();
    assert!(circuit.caller.kept_bytes <= Limits::default().max_grant_bytes);
    assert!(circuit.caller.kept_bytes > 3_000_000, "the grant is used");
    world.guest(lines[1]).paused = false;
    world.finish_soon(0);
}

#[test]
fn many_small_packets_do_not_overrun_a_receiver_that_counts_them() {
    let writes = Plan {
        write_len: 1,
        ..sends(5000)
    };
    for size in [1024, 65_536, 262_144] {
        let (mut world, lines, _) = pair([262_144, size], [writes, sleeps()]);
        // Each byte is a packet of its own, taken one at a time.
        for _ in 0..20_000 {
            world.take_from_guest(lines[0], 1);
            world.pump(lines[1]);
            world.round();
        }
        let receiver = world.guest(lines[1]).accepted(80).unwrap();
        world
            .guest(lines[1])
            .sockets
            .get_mut(&receiver)
            .unwrap()
            .plan = reads();
        world.finish();
        assert_eq!(world.totals.bytes, 5000, "{size}");
    }
}

#[test]
fn a_silent_receiver_is_asked_less_and_less_often() {
    let (mut world, lines, _) = pair([262_144, 4096], [sleeps(), sleeps()]);
    world.settle();
    let sender = *world.guest(lines[0]).sockets.keys().next().unwrap();
    // Four packets of one byte, which the receiver does not read, use up what a window of four packets allows.
    for _ in 0..8 {
        let plan = &mut world.guest(lines[0]).sockets.get_mut(&sender).unwrap().plan;
        plan.left = 1;
        world.settle();
    }
    assert_eq!(world.totals.data_packets, 4);
    assert_eq!(world.totals.credit_requests, 1, "asked at once");
    world.advance(Duration::from_millis(51));
    let after_one = world.totals.credit_requests;
    assert_eq!(after_one, 2);
    assert!(
        world.totals.data_packets > 4,
        "what waits goes on in few packets: {:?}",
        world.totals
    );
    world.advance(Duration::from_secs(60));
    assert!(world.totals.credit_requests < 30, "{:?}", world.totals);
    let receiver = world.guest(lines[1]).accepted(80).unwrap();
    world
        .guest(lines[1])
        .sockets
        .get_mut(&receiver)
        .unwrap()
        .plan
        .reads = true;
    world.finish();
    assert_eq!(world.totals.bytes, 8);
}

#[test]
fn a_receiver_that_went_on_is_asked_at_once_when_it_stops_again() {
    let (mut world, lines, sender) = pair([262_144, 4096], [sleeps(), sleeps()]);
    world.settle();
    let receiver = world.guest(lines[1]).accepted(80).unwrap();
    for round in 1..4 {
        for _ in 0..5 {
            world
                .guest(lines[0])
                .sockets
                .get_mut(&sender)
                .unwrap()
                .plan
                .left = 1;
            world.settle();
        }
        assert_eq!(world.totals.credit_requests, round);
        while world.guest(lines[1]).read(receiver, 100) > 0 {
            world.settle();
        }
    }
    world.finish();
}

#[test]
fn questions_end_when_nothing_waits_any_more() {
    let (mut world, lines, sender) = pair([262_144, 1024], [sleeps(), sleeps()]);
    world.settle();
    for _ in 0..3 {
        world
            .guest(lines[0])
            .sockets
            .get_mut(&sender)
            .unwrap()
            .plan
            .left = 1;
        world.settle();
    }
    assert!(world.switch.poll_at().is_some());
    let receiver = world.guest(lines[1]).accepted(80).unwrap();
    world
        .guest(lines[1])
        .sockets
        .get_mut(&receiver)
        .unwrap()
        .plan
        .reads = true;
    world.advance(Duration::from_secs(20));
    assert_eq!(world.switch.poll_at(), None);
    world.finish();
}

#[test]
fn both_directions_are_asked_about_on_their_own() {
    // Found by reading: one timer was shared, and data sent one way cancelled the questions of the other.
    let (mut world, lines, caller) = pair([1024, 1024], [sleeps(), sleeps()]);
    world.settle();
    let callee = world.guest(lines[1]).accepted(80).unwrap();
    let write = |world: &mut World, line: LineId, id: u32| {
        world.guest(line).sockets.get_mut(&id).unwrap().plan.left = 1;
        world.settle();
    };
    for _ in 0..2 {
        write(&mut world, lines[0], caller);
        write(&mut world, lines[1], callee);
    }
    let flows = &world.switch.circuits.iter().next().unwrap().1.flows;
    assert!(flows.iter().all(|flow| flow.asked == 1 && flow.kept() == 1));
    // The caller reads without saying so, as if its kernel saw no need: it is asked, and the other end too.
    let before = world.totals.credit_requests;
    world.advance(Duration::from_millis(60));
    assert_eq!(world.totals.credit_requests, before + 2);
    world.finish();
}

#[test]
fn room_that_was_not_needed_when_it_was_announced_is_shown_when_it_is() {
    // A receiver says once that it has read, when its sender has plenty of room. Should it then wait for more than the
    // sender knew of, neither side would ever send again.
    let (mut world, lines, sender) = pair([262_144, 262_144], [sleeps(), sleeps()]);
    world.settle();
    let receiver = world.guest(lines[1]).accepted(80).unwrap();
    let write = |world: &mut World, line: LineId, id: u32, len: u64| {
        world.guest(line).sockets.get_mut(&id).unwrap().plan.left += len;
        world.settle();
    };
    write(&mut world, lines[0], sender, 100_000);
    assert_eq!(world.guest(lines[1]).read(receiver, 100_000), 100_000);
    let controls = world.totals.control_packets;
    world.settle();
    assert_eq!(
        world.guests[&lines[1]].socket(receiver).told_fwd_cnt,
        100_000
    );
    assert_eq!(
        world.totals.control_packets, controls,
        "the sender has plenty"
    );
    // Now the sender uses up what it knew of.
    write(&mut world, lines[0], sender, 200_000);
    let left = world.guests[&lines[0]].socket(sender).plan.left;
    assert_eq!(left, 0, "it would wait for ever for room that there is");
    world
        .guest(lines[1])
        .sockets
        .get_mut(&receiver)
        .unwrap()
        .plan
        .reads = true;
    world.finish();
}

/// A guest's socket with a buffer of this size, and a circuit to a program that sleeps. The guest's credit stays as it is.
fn circuit_with(buf_alloc: u32) -> (World, LineId, Header) {
    let limits = Limits {
        max_host_grant_bytes: Limits::default().grant_bytes,
        ..Limits::default()
    };
    let (mut world, lines) = World::of(1, limits);
    world.listen_host(lines[0], 80, sleeps());
    let header = Header {
        src_cid: 3,
        dst_cid: 2,
        src_port: 1,
        dst_port: 80,
        socket_type: 1,
        operation: Operation::Request as u16,
        buf_alloc,
        ..Header::default()
    };
    world.inject(lines[0], header);
    assert_eq!(world.take_operations(lines[0]), [(Operation::Response, 0)]);
    (world, lines[0], header)
}

#[test]
fn an_acknowledgement_of_nothing_is_a_lie() {
    let (mut world, line, header) = circuit_with(1000);
    let operation = Operation::CreditUpdate as u16;
    world.inject(
        line,
        Header {
            operation,
            fwd_cnt: 1,
            ..header
        },
    );
    assert_eq!(world.reasons(), [Reason::CreditViolation]);
    assert_eq!(world.take_operations(line), [(Operation::Reset, 0)]);
    assert!(world.switch.circuits.is_empty());
    world.finish();
}

#[test]
fn data_beyond_the_credit_is_a_lie_and_up_to_it_is_none() {
    let operation = Operation::Data as u16;
    let granted = Limits::default().grant_bytes;
    let (mut world, line, header) = circuit_with(1000);
    world.inject(
        line,
        Header {
            operation,
            len: granted,
            ..header
        },
    );
    assert_eq!(world.reasons(), []);
    // What the host's socket took was announced to the guest: there is room again, and no more than that.
    let room = world.programs[&1].incoming.len();
    world.pump(line);
    world.inject(
        line,
        Header {
            operation,
            len: room,
            ..header
        },
    );
    assert_eq!(world.reasons(), []);
    world.inject(
        line,
        Header {
            operation,
            len: 1,
            ..header
        },
    );
    assert_eq!(world.reasons(), [Reason::CreditViolation]);
    assert!(world.programs[&1].incoming.len() > 0);
    world.finish();
}

#[test]
fn an_announcement_that_comes_late_is_no_lie() {
    let (mut world, line, header) = circuit_with(1000);
    world.programs.get_mut(&1).unwrap().plan.left = 600;
    world.settle();
    let update = Header {
        operation: Operation::CreditUpdate as u16,
        ..header
    };
    for fwd_cnt in [300, 600, 300, 0] {
        world.inject(line, Header { fwd_cnt, ..update });
    }
    assert_eq!(world.reasons(), []);
    let circuit = world.switch.circuits().next().unwrap();
    assert_eq!(circuit.caller.credit_bytes, 1000);
    world.finish();
}

#[test]
fn a_guest_that_asks_is_answered_and_so_is_its_question_to_the_other_guest() {
    let (mut world, line, header) = circuit_with(1000);
    let operation = Operation::CreditRequest as u16;
    world.inject(
        line,
        Header {
            operation,
            ..header
        },
    );
    assert_eq!(world.take_operations(line), [(Operation::CreditUpdate, 0)]);
    world.finish();

    let (mut world, lines, socket) = pair([65_536, 65_536], [sleeps(), sleeps()]);
    world.settle();
    world.guest(lines[1]).paused = true;
    world
        .guest(lines[0])
        .send(socket, Operation::CreditRequest, 0, None);
    world.round();
    let operations = world.take_operations(lines[1]);
    assert_eq!(operations, [(Operation::CreditRequest, 0)]);
    world.guest(lines[1]).paused = false;
    world.finish();
}

#[test]
fn a_caller_hears_nothing_of_credit_before_it_has_its_answer() {
    let (mut world, lines) = World::of(2, Limits::default());
    world.guest(lines[1]).hostile = true;
    let socket = world.connect_to(lines[0], 4, 80, sleeps());
    world.settle();
    let port = world.guests[&lines[0]].socket(socket).port;
    for operation in [Operation::CreditUpdate, Operation::CreditRequest] {
        let header = Header {
            src_cid: 4,
            dst_cid: 3,
            src_port: 80,
            dst_port: port,
            socket_type: 1,
            operation: operation as u16,
            buf_alloc: 5000,
            ..Header::default()
        };
        world.inject(lines[1], header);
    }
    world.guest(lines[0]).paused = true;
    assert_eq!(world.take_operations(lines[0]), []);
    world.guest(lines[0]).paused = false;
    world.finish();
}

#[test]
fn a_window_beyond_two_gigabytes_does_not_make_new_counts_old() {
    let (mut world, line, header) = circuit_with(u32::MAX);
    let circuit = world.switch.circuits().next().unwrap();
    assert_eq!(circuit.caller.credit_bytes, i32::MAX as u32);
    let operation = Operation::CreditUpdate as u16;
    world.inject(
        line,
        Header {
            operation,
            ..header
        },
    );
    assert_eq!(world.reasons(), []);
    world.finish();
}

#[test]
fn a_sender_with_a_small_buffer_of_its_own_is_told_of_room_in_time() {
    // Found by reading Linux: since 6.12.92 a guest has no more in flight than its own buffer holds, however large its
    // receiver's is. Half of the receiver's window was never used up, and so new room was never announced to the guest.
    for (cid, size) in [(2, 4096), (2, 1), (4, 4096)] {
        let (mut world, lines) = World::of(2, Limits::default());
        let waits = Plan {
            reads: true,
            ..sleeps()
        };
        world.listen_host(lines[0], 80, waits);
        world.guest(lines[1]).listen(80, SocketType::Stream, waits);
        let mut socket = Socket::new(Side::Caller, SocketType::Stream, size);
        socket.plan.left = 20_000;
        world
            .guest(lines[0])
            .connect(Duration::ZERO, socket, (cid, 80), None);
        world.settle();
        assert_eq!(world.totals.bytes, 20_000, "{cid} {size}");
        world.finish();
    }
}
