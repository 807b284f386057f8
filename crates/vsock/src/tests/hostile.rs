//! Guests that lie: they lose their circuit, and no other loses anything.

use std::time::Duration;

use policy::LineId;
use wire::vsock::{Header, Operation, SHUTDOWN_RECEIVE, SocketType};

use super::model::{Call, World, reads, sleeps};
use crate::{Event, Limits, Reason};

fn request(line_cid: u32, port: u32) -> Header {
    Header {
        src_cid: u64::from(line_cid),
        dst_cid: 2,
        src_port: port,
        dst_port: 80,
        socket_type: 1,
        operation: Operation::Request as u16,
        buf_alloc: 65_536,
        ..Header::default()
    }
}

/// A guest with one circuit to a program of the host.
fn connected() -> (World, LineId, Header) {
    let (mut world, lines) = World::of(1, Limits::default());
    world.listen_host(lines[0], 80, reads());
    let header = request(3, 1);
    world.inject(lines[0], header);
    assert_eq!(world.take_operations(lines[0]), [(Operation::Response, 0)]);
    (world, lines[0], header)
}

fn with(operation: Operation, header: Header) -> Header {
    Header {
        operation: operation as u16,
        ..header
    }
}

#[test]
fn a_false_source_is_dropped_and_counted() {
    let (mut world, line, header) = connected();
    for src_cid in [0, 2, 4, (1 << 32) + 3, u64::MAX] {
        let operation = Operation::Reset as u16;
        world.inject(
            line,
            Header {
                src_cid,
                operation,
                ..header
            },
        );
    }
    let counters = world.switch.lines[line.0 as usize].counters;
    assert_eq!(counters.spoofed, 5);
    assert_eq!(world.switch.circuits.len(), 1);
    assert_eq!(world.take_operations(line), []);
    world.finish();
}

#[test]
fn a_destination_of_more_than_32_bits_is_dropped_and_counted() {
    let (mut world, line, header) = connected();
    let dst_cid = (1 << 32) + 2;
    world.inject(
        line,
        Header {
            dst_cid,
            ..with(Operation::Reset, header)
        },
    );
    assert_eq!(world.switch.lines[line.0 as usize].counters.malformed, 1);
    assert_eq!(world.switch.circuits.len(), 1);
    world.finish();
}

#[test]
fn an_unknown_type_is_answered_with_a_reset() {
    let (mut world, line, header) = connected();
    let socket_type = 3;
    world.inject(
        line,
        Header {
            socket_type,
            ..header
        },
    );
    assert_eq!(world.take_operations(line), [(Operation::Reset, 0)]);
    assert_eq!(world.switch.circuits.len(), 1, "it belongs to no circuit");
    world.finish();
}

#[test]
fn an_unknown_operation_ends_its_circuit() {
    for operation in [0, 8, u16::MAX] {
        let (mut world, line, header) = connected();
        world.inject(
            line,
            Header {
                operation,
                ..header
            },
        );
        assert_eq!(world.reasons(), [Reason::ProtocolViolation]);
        assert_eq!(world.programs[&1].call, Call::Closed { reset: true });
        world.finish();
    }
}

#[test]
fn packets_that_make_no_sense_end_their_circuit() {
    let (_, _, header) = connected();
    let nonsense = [
        with(Operation::Response, header),
        Header {
            socket_type: 2,
            ..with(Operation::CreditUpdate, header)
        },
        Header {
            len: 10,
            flags: 1,
            ..with(Operation::Data, header)
        },
    ];
    for packet in nonsense {
        let (mut world, line, _) = connected();
        world.inject(line, packet);
        assert_eq!(world.reasons(), [Reason::ProtocolViolation], "{packet:?}");
        assert_eq!(world.take_operations(line), [(Operation::Reset, 0)]);
        assert!(world.switch.circuits.is_empty());
        world.finish();
    }
}

#[test]
fn data_after_the_end_of_data_ends_its_circuit() {
    let (mut world, line, header) = connected();
    world.programs.get_mut(&1).unwrap().plan = sleeps();
    world.inject(
        line,
        Header {
            flags: 2,
            ..with(Operation::Shutdown, header)
        },
    );
    world.inject(
        line,
        Header {
            len: 1,
            ..with(Operation::Data, header)
        },
    );
    assert_eq!(world.reasons(), [Reason::ProtocolViolation]);
    world.finish();
}

#[test]
fn data_before_the_answer_ends_the_call() {
    let (mut world, lines) = World::of(2, Limits::default());
    world
        .guest(lines[1])
        .listen(80, SocketType::Stream, reads());
    world.guest(lines[1]).paused = true;
    let header = Header {
        dst_cid: 4,
        ..request(3, 1)
    };
    world.inject(lines[0], header);
    world.pump(lines[1]);
    world.inject(
        lines[0],
        Header {
            len: 1,
            ..with(Operation::Data, header)
        },
    );
    assert_eq!(world.reasons(), [Reason::ProtocolViolation]);
    assert_eq!(world.take_operations(lines[0]), [(Operation::Reset, 0)]);
    let expected = [(Operation::Request, 0), (Operation::Reset, 0)];
    assert_eq!(
        world.take_operations(lines[1]),
        expected,
        "the innocent one is notified"
    );
    world.finish();
}

#[test]
fn packets_without_a_circuit_are_answered_with_resets_and_resets_are_not() {
    let (mut world, lines) = World::of(1, Limits::default());
    for operation in 0..10 {
        let header = Header {
            operation,
            ..request(3, 7)
        };
        if operation != Operation::Request as u16 {
            world.inject(lines[0], header);
        }
    }
    let answers = world.take_operations(lines[0]);
    assert_eq!(answers, [(Operation::Reset, 0); 8]);
    world.finish();
}

#[test]
fn empty_packets_of_data_are_not_kept() {
    // Seed 1 of the first simulation: they were forwarded, and took room without ever using up credit.
    let (mut world, line, header) = connected();
    for _ in 0..100 {
        world.inject(line, with(Operation::Data, header));
    }
    assert_eq!(world.reasons(), []);
    assert!(world.stores.is_empty());
    world.finish();
}

#[test]
fn a_length_of_anything_else_but_data_means_nothing() {
    let (mut world, line, header) = connected();
    world.inject(
        line,
        Header {
            len: u32::MAX,
            ..with(Operation::CreditUpdate, header)
        },
    );
    world.inject(
        line,
        Header {
            len: 5,
            flags: 2,
            ..with(Operation::Shutdown, header)
        },
    );
    assert_eq!(world.reasons(), []);
    assert_eq!(world.totals.bytes, 0);
    world.finish();
}

#[test]
fn more_delivered_than_was_kept_ends_the_circuit() {
    let (mut world, line, _) = connected();
    let circuit = world.programs[&1].circuit.unwrap();
    world.handle(Event::Delivered { circuit, len: 1 });
    assert_eq!(world.reasons(), [Reason::HostFailed]);
    assert_eq!(world.take_operations(line), [(Operation::Reset, 0)]);
    world.finish();
}

#[test]
fn more_passed_straight_than_was_sent_ends_the_circuit() {
    let (mut world, _, _) = connected();
    let circuit = world.programs[&1].circuit.unwrap();
    let sent = crate::Sent {
        circuit,
        from: crate::Side::Callee,
        len: 1,
        straight: 2,
        packets: 1,
    };
    let mut actions = Vec::new();
    world.switch.transmitted(Duration::ZERO, sent, &mut actions);
    assert!(
        actions
            .iter()
            .any(|action| matches!(action, crate::Action::HostClose { .. }))
    );
}

#[test]
fn a_message_read_too_late_is_thrown_away() {
    // Found by reading: its receiver had stopped to read in the meantime, and it was kept for ever.
    let (mut world, lines) = World::of(1, Limits::default());
    world
        .guest(lines[0])
        .listen(80, SocketType::SeqPacket, sleeps());
    let token = world.dial(lines[0], 80, SocketType::SeqPacket, sleeps());
    world.settle();
    let circuit = world.programs[&token].circuit.unwrap();
    let socket = world.guest(lines[0]).accepted(80).unwrap();
    let guest = world.guests.get_mut(&lines[0]).unwrap();
    guest.shutdown(socket, SHUTDOWN_RECEIVE, &mut world.audit);
    world.settle();
    world.handle(Event::HostStored { circuit, len: 10 });
    world.check_tables();
    world.finish();
}

#[test]
fn a_reset_of_the_other_type_is_about_something_else() {
    // Seed 35601: a guest answered an earlier packet of the same ports, and the answer ended a call that it accepted.
    let (mut world, line, header) = connected();
    let socket_type = 2;
    world.inject(
        line,
        Header {
            socket_type,
            ..with(Operation::Reset, header)
        },
    );
    assert_eq!(world.switch.circuits.len(), 1);
    assert_eq!(world.programs[&1].call, Call::Open);
    world.inject(line, with(Operation::Reset, header));
    assert_eq!(world.switch.circuits.len(), 0);
    world.finish();
}
