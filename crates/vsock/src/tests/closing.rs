//! The end of circuits: no acknowledged byte is lost, no end of data is shown that was not sent.

use std::time::Duration;

use policy::LineId;
use wire::vsock::{SHUTDOWN_RECEIVE, SHUTDOWN_SEND, SocketType};

use super::model::{After, Call, Plan, World, reads, sends, sleeps};
use crate::{CircuitId, CircuitState, Event, Limits, Reason};

/// Sends and closes at once, without waiting for anything.
fn sends_and_closes(bytes: u64) -> Plan {
    Plan {
        after: After::Close,
        ..sends(bytes)
    }
}

/// Sends, and never reads nor ends.
fn sends_only(bytes: u64) -> Plan {
    Plan {
        left: bytes,
        ..sleeps()
    }
}

/// Which two parties.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    GuestToHost,
    HostToGuest,
    GuestToGuest,
}

const WAYS: [Way; 3] = [Way::GuestToHost, Way::HostToGuest, Way::GuestToGuest];

/// A caller and a callee with these plans, a moment after the call.
fn call(way: Way, caller: Plan, callee: Plan) -> (World, Vec<LineId>) {
    let (mut world, lines) = World::of(2, Limits::default());
    match way {
        Way::GuestToHost => {
            world.listen_host(lines[0], 80, callee);
            world.connect(lines[0], 80, caller);
        }
        Way::HostToGuest => {
            world.guest(lines[1]).listen(80, SocketType::Stream, callee);
            world.dial(lines[1], 80, SocketType::Stream, caller);
        }
        Way::GuestToGuest => {
            world.guest(lines[1]).listen(80, SocketType::Stream, callee);
            world.connect_to(lines[0], 4, 80, caller);
        }
    }
    world.settle();
    (world, lines)
}

/// All read again.
fn wake_readers(world: &mut World) {
    for guest in world.guests.values_mut() {
        for socket in guest.sockets.values_mut() {
            socket.plan.reads = true;
            socket.plan.closes = true;
        }
    }
    for program in world.programs.values_mut() {
        program.plan.reads = true;
        program.plan.closes = true;
    }
    world.settle();
}

#[test]
fn every_combination_of_ends_with_every_amount() {
    let sizes = [0, 1, 4052, 70_000, 262_144, 1_000_000];
    for way in WAYS {
        for size in sizes {
            for reply in [0, 1, 300_000] {
                // What is closed at once takes no reply: then the reply is refused, and nothing else.
                let plans = [sends(size), sends_and_closes(size)];
                for (caller, callee) in [(plans[0], sends(reply)), (plans[1], reads())] {
                    let (mut world, _) = call(way, caller, callee);
                    world.finish();
                    let expected = size
                        + if caller.after == After::Close {
                            0
                        } else {
                            reply
                        };
                    assert_eq!(world.totals.bytes, expected, "{way:?} {size} {reply}");
                    assert_eq!(world.reasons(), []);
                }
            }
        }
    }
}

#[test]
fn a_reply_after_the_half_close_arrives() {
    for way in WAYS {
        let waits = Plan {
            reads: true,
            ..sleeps()
        };
        let (mut world, _) = call(way, sends(1000), waits);
        world.advance(Duration::from_secs(20));
        // Twenty seconds after the caller's end the callee answers.
        for guest in world.guests.values_mut() {
            for socket in guest
                .sockets
                .values_mut()
                .filter(|socket| socket.port == 80)
            {
                socket.plan = sends(500_000);
            }
        }
        for program in world
            .programs
            .values_mut()
            .filter(|_| way == Way::GuestToHost)
        {
            program.plan = sends(500_000);
        }
        world.settle();
        assert_eq!(world.totals.bytes, 501_000, "{way:?}");
        world.finish();
        assert_eq!(world.reasons(), []);
    }
}

#[test]
fn a_reader_thirty_seconds_late_gets_all_that_a_closed_guest_wrote() {
    let sizes = [
        1, 4051, 4052, 4053, 65_536, 65_537, 212_992, 212_993, 262_143, 262_144,
    ];
    for size in sizes {
        let (mut world, lines) = call(Way::GuestToHost, sends_and_closes(size), sleeps());
        world.advance(Duration::from_secs(30));
        // Eight seconds after its close the guest has sent its reset and forgotten everything.
        assert!(world.guest(lines[0]).sockets.is_empty());
        wake_readers(&mut world);
        assert_eq!(world.programs[&1].read, size);
        assert!(world.programs[&1].end_shown);
        assert_eq!(world.programs[&1].call, Call::Closed { reset: false });
        assert_eq!(world.reasons(), []);
        world.finish();
    }
}

#[test]
fn a_guest_thirty_seconds_late_gets_all_that_a_closed_guest_wrote() {
    // More than the receiver's buffer takes cannot have been written before the close.
    for size in [1, 65_537, 262_144] {
        let (mut world, lines) = call(Way::GuestToGuest, sends_and_closes(size), sleeps());
        world.advance(Duration::from_secs(30));
        assert!(world.guest(lines[0]).sockets.is_empty());
        wake_readers(&mut world);
        world.finish();
        assert_eq!(world.totals.bytes, size);
    }
}

#[test]
fn a_paused_guest_gets_all_that_a_closed_guest_wrote() {
    let (mut world, lines) = call(Way::GuestToGuest, sleeps(), reads());
    world.guest(lines[1]).paused = true;
    world.guest(lines[1]).ring = 8;
    let socket = *world.guest(lines[0]).sockets.keys().next().unwrap();
    world.guest(lines[0]).sockets.get_mut(&socket).unwrap().plan = sends_and_closes(200_000);
    world.advance(Duration::from_secs(60));
    assert!(world.guest(lines[0]).sockets.is_empty());
    let circuit = world.switch.circuits().next().unwrap();
    assert!(
        circuit.caller.kept_bytes > 0,
        "its ring is full, the rest is kept"
    );
    world.guest(lines[1]).paused = false;
    world.finish();
    assert_eq!(world.totals.bytes, 200_000);
}

#[test]
fn a_host_program_that_closes_has_sent_all_it_wrote() {
    for size in [1, 100_000, 200_000] {
        let (mut world, lines) = call(Way::HostToGuest, sends_and_closes(size), sleeps());
        world.advance(Duration::from_secs(30));
        wake_readers(&mut world);
        assert!(world.guest(lines[1]).sockets.is_empty());
        assert_eq!(world.totals.bytes, size);
        world.finish();
        assert_eq!(world.reasons(), []);
    }
}

#[test]
fn a_reader_that_goes_stops_its_sender() {
    for way in WAYS {
        let (mut world, _) = call(way, sends_only(10_000_000), sleeps());
        let now = world.now;
        for guest in world.guests.values_mut() {
            let callee = guest.sockets.iter().find(|(_, socket)| socket.port == 80);
            if let Some(id) = callee.map(|(id, _)| *id) {
                guest.close(now, id, &mut world.audit);
            }
        }
        for program in world
            .programs
            .values_mut()
            .filter(|_| way == Way::GuestToHost)
        {
            program.close(&mut world.audit);
        }
        world.settle();
        let left = world
            .guests
            .values()
            .flat_map(|guest| guest.sockets.values());
        for socket in left.filter(|socket| socket.port != 80) {
            assert!(!socket.may_write(), "{way:?}: {socket:?}");
        }
        for program in world.programs.values() {
            assert!(program.released || program.cannot_write, "{way:?}");
        }
        world.finish();
        assert_eq!(world.reasons(), [], "{way:?}: a close is no fault");
    }
}

#[test]
fn a_guest_may_stop_reading_and_go_on_sending() {
    let (mut world, lines) = call(Way::GuestToHost, sleeps(), sends_only(100_000));
    // Its ring is full of data that it has not read when it shuts down reading.
    let socket = *world.guest(lines[0]).sockets.keys().next().unwrap();
    let guest = world.guests.get_mut(&lines[0]).unwrap();
    guest.shutdown(socket, SHUTDOWN_RECEIVE, &mut world.audit);
    world.settle();
    assert!(
        world.programs[&1].cannot_write,
        "the host program is notified"
    );
    let guest = world.guests.get_mut(&lines[0]).unwrap();
    guest.sockets.get_mut(&socket).unwrap().plan.left = 50_000;
    world.programs.get_mut(&1).unwrap().plan = reads();
    world.settle();
    assert_eq!(world.programs[&1].read, 50_000);
    world.finish();
}

#[test]
fn a_guest_that_stops_reading_is_said_to_have_done_so_even_if_data_was_kept_for_it() {
    let (mut world, lines) = call(Way::GuestToGuest, sleeps(), sleeps());
    world.guest(lines[1]).ring = 4;
    world.guest(lines[1]).paused = true;
    let sender = *world.guest(lines[0]).sockets.keys().next().unwrap();
    world
        .guest(lines[0])
        .sockets
        .get_mut(&sender)
        .unwrap()
        .plan
        .left = 100_000;
    world.settle();
    let receiver = world.guest(lines[1]).accepted(80).unwrap();
    let guest = world.guests.get_mut(&lines[1]).unwrap();
    guest.shutdown(receiver, SHUTDOWN_RECEIVE, &mut world.audit);
    guest.paused = false;
    world.take_from_guest(lines[1], usize::MAX);
    world.guest(lines[1]).paused = true;
    world.settle();
    let circuit = world.switch.circuits().next().unwrap();
    assert!(circuit.caller.kept_bytes > 0);
    // Seed 20210: the sender was notified only when everything kept had been delivered, which need not ever happen.
    let socket = world.guests[&lines[0]].socket(sender);
    assert_eq!(socket.peer_shutdown, SHUTDOWN_RECEIVE);
    world.guest(lines[1]).paused = false;
    world.finish();
}

#[test]
fn a_reset_without_a_shutdown_is_an_error_behind_the_last_byte() {
    let (mut world, lines) = call(Way::GuestToHost, sends_only(250_000), sleeps());
    let socket = *world.guest(lines[0]).sockets.keys().next().unwrap();
    let guest = world.guests.get_mut(&lines[0]).unwrap();
    guest.send(socket, wire::vsock::Operation::Reset, 0, None);
    world.take_from_guest(lines[0], usize::MAX);
    world.guest(lines[0]).forget();
    world.settle();
    assert_eq!(world.programs[&1].call, Call::Open, "there is more to read");
    wake_readers(&mut world);
    assert_eq!(world.programs[&1].read, 250_000);
    assert_eq!(world.programs[&1].call, Call::Closed { reset: true });
    assert!(!world.programs[&1].end_shown);
    assert_eq!(world.reasons(), [Reason::PeerReset]);
    world.finish();
}

#[test]
fn the_time_to_confirm_an_end_begins_when_the_guest_has_heard_of_it() {
    // Seed 0 of the first simulation: the guest's ring was full for longer than the time it has to confirm, and it saw
    // a reset in place of the end of the data.
    let (mut world, lines) = call(Way::HostToGuest, sleeps(), reads());
    world.guest(lines[1]).paused = true;
    world.guest(lines[1]).ring = 0;
    let token = *world.programs.keys().next().unwrap();
    world.programs.get_mut(&token).unwrap().plan = sends_and_closes(0);
    world.settle();
    world.advance(Duration::from_secs(60));
    world.guest(lines[1]).ring = 4;
    world.guest(lines[1]).paused = false;
    world.finish();
    assert_eq!(world.reasons(), []);
}

#[test]
fn a_guest_that_does_not_confirm_is_reset_after_eight_seconds() {
    let (mut world, lines) = call(Way::HostToGuest, sends_and_closes(100), sleeps());
    assert_eq!(
        world.switch.circuits.len(),
        1,
        "unread data: no confirmation"
    );
    world.advance(Duration::from_secs(7));
    assert_eq!(world.switch.circuits.len(), 1);
    world.advance(Duration::from_secs(2));
    assert_eq!(world.switch.circuits.len(), 0);
    // What it has it can still read.
    let socket = world.guest(lines[1]).accepted(80).unwrap();
    assert_eq!(world.guest(lines[1]).read(socket, 1000), 100);
    world.finish();
}

#[test]
fn both_ends_close_at_once() {
    for way in WAYS {
        for size in [0, 100_000] {
            let (mut world, _) = call(way, sends_and_closes(size), sends_and_closes(size));
            world.finish();
            assert_eq!(world.reasons(), [], "{way:?} {size}");
        }
    }
}

#[test]
fn half_closes_from_both_ends_end_the_circuit() {
    for way in WAYS {
        let half = Plan {
            closes: false,
            ..sends(10)
        };
        let (mut world, _) = call(way, half, half);
        world.advance(Duration::from_secs(10));
        let hosts = way != Way::GuestToGuest;
        assert_eq!(world.switch.circuits.is_empty(), hosts, "{way:?}");
        world.finish();
    }
}

#[test]
fn a_shutdown_of_nothing_changes_nothing() {
    let (mut world, lines) = call(Way::GuestToHost, sleeps(), reads());
    let socket = *world.guest(lines[0]).sockets.keys().next().unwrap();
    let guest = world.guests.get_mut(&lines[0]).unwrap();
    guest.shutdown(socket, 0, &mut world.audit);
    world.settle();
    assert!(!world.programs[&1].end_shown && !world.programs[&1].cannot_write);
    let guest = world.guests.get_mut(&lines[0]).unwrap();
    guest.shutdown(socket, SHUTDOWN_SEND, &mut world.audit);
    guest.shutdown(socket, SHUTDOWN_SEND, &mut world.audit);
    world.settle();
    assert!(world.programs[&1].end_shown);
    world.finish();
}

/// A call of the guest's that has ended in order, and whose program has yet to take something, at a line with room for one.
pub(super) fn ended_and_untaken() -> (World, LineId, CircuitId) {
    let limits = Limits {
        circuits: 1,
        ..Limits::default()
    };
    let (mut world, lines) = World::of(1, limits);
    world.takes = false;
    world.listen_host(lines[0], 80, reads());
    let socket = world.connect(lines[0], 80, sleeps());
    world.settle();
    let circuit = world.switch.circuits.iter().next().unwrap().1.id;
    let now = world.now;
    let guest = world.guests.get_mut(&lines[0]).unwrap();
    guest.close(now, socket, &mut world.audit);
    world.settle();
    assert!(!world.guest(lines[0]).sockets.contains_key(&socket));
    let closed = Call::Closed { reset: false };
    assert_eq!(world.programs[&1].call, closed);
    (world, lines[0], circuit)
}

/// What the program has yet to take of a circuit that is over for its guest is the host's memory, whatever the guest does.
#[test]
fn a_circuit_keeps_its_place_until_its_program_has_taken_everything() {
    let (mut world, line, circuit) = ended_and_untaken();
    let state = world.switch.circuit(circuit).unwrap().state;
    assert_eq!(state, CircuitState::Closing);
    for _ in 0..2 {
        let refused = world.connect(line, 80, sleeps());
        world.settle();
        assert!(!world.is_established(line, refused));
        world.line_up(line);
    }
    assert_eq!(world.reasons(), [Reason::CircuitLimit; 2]);

    world.handle(Event::Taken { circuit });
    let next = world.connect(line, 80, sleeps());
    world.settle();
    assert!(world.is_established(line, next));
    world.takes = true;
    world.finish();
}

/// A guest that breaks the protocol, for one, gets no place back by that.
#[test]
fn a_circuit_that_is_cut_after_its_end_keeps_its_place_as_long() {
    let (mut world, line, circuit) = ended_and_untaken();
    let reason = Reason::NotTaken;
    world.handle(Event::Kill { circuit, reason });
    let refused = world.connect(line, 80, sleeps());
    world.settle();
    assert!(!world.is_established(line, refused));
    world.handle(Event::Taken { circuit });
    assert!(world.switch.circuit(circuit).is_none());
}
