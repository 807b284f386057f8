//! Switches that go on with the circuits of another one.

use std::collections::{BTreeMap, HashMap};

use policy::{Address, LineId};
use wire::vsock::{HOST_CID, Operation, SocketType};

use super::closing::ended_and_untaken;
use super::model::{Plan, Socket, World, reads, sends, sleeps};
use super::random::Random;
use crate::{CircuitState, Event, Inherited, Limits, Record, Side, Switch};

type Records = BTreeMap<u32, Vec<u8>>;

/// Keeps the records of the circuits that have changed.
fn record(switch: &mut Switch, records: &mut Records) {
    switch.take_changed(|index, bytes| {
        match bytes {
            [] => records.remove(&index),
            _ => records.insert(index, bytes.to_vec()),
        };
    });
}

fn list(records: &Records) -> Vec<Record<'_>> {
    records
        .iter()
        .map(|(index, bytes)| Record {
            index: *index,
            bytes,
            is_whole: true,
        })
        .collect()
}

/// A switch with the same lines and rules, which has yet to inherit.
fn successor(world: &World) -> Switch {
    let mut next = Switch::new(world.limits);
    // The audit knows circuits by their numbers.
    next.next_generation = world.switch.next_generation;
    next.keep_ended();
    next.record_changes();
    next.set_policy(world.switch.policy().clone());
    for line in world.guests.keys() {
        let address = world.switch.address(*line).unwrap().clone();
        assert_eq!(next.add_line_at(address, world.limits), Ok(*line));
    }
    next
}

fn same_lines(world: &World) -> HashMap<LineId, (LineId, u32)> {
    let epoch = |line| world.switch.epoch(line);
    let of_now = |line: &LineId| (*line, (*line, epoch(*line)));
    world.guests.keys().map(of_now).collect()
}

/// Puts another switch in place of the world's, with what was recorded.
fn hand_over(world: &mut World, records: &mut Records) -> Inherited {
    record(&mut world.switch, records);
    let mut next = successor(world);
    let mut actions = Vec::new();
    let lines = same_lines(world);
    let inherited = next.inherit(world.now, &list(records), &lines, &mut actions);
    assert_eq!(inherited.malformed, 0);
    world.switch = next;
    world.woken.extend(lines.keys());
    for line in lines.into_keys() {
        world.handle(Event::LineGoesOn {
            line,
            seqpacket: true,
        });
    }
    // Everything is written anew.
    records.clear();
    record(&mut world.switch, records);
    inherited
}

#[test]
fn circuits_between_guests_go_on_wherever_a_switch_ends() {
    let mut random = Random::new(24);
    let (mut inherited, mut bytes) = (0, 0);
    for _ in 0..60 {
        let (mut world, lines) = World::of(3, Limits::default());
        world.switch.record_changes();
        let mut records = Records::new();
        for (port, socket_type) in [(80, SocketType::Stream), (81, SocketType::SeqPacket)] {
            for line in &lines {
                let plan = Plan {
                    write_len: 1 + random.below(60_000) as u32,
                    ..sends(random.below(1_000_000))
                };
                world.guest(*line).listen(port, socket_type, plan);
            }
        }
        for _ in 0..80 {
            for _ in 0..random.below(8) {
                world.round();
            }
            if random.one_in(4) {
                let from = random.pick(&lines);
                let (port, socket_type) =
                    random.pick(&[(80, SocketType::Stream), (81, SocketType::SeqPacket)]);
                let mut socket = Socket::new(Side::Caller, socket_type, 256 * 1024);
                socket.plan = Plan {
                    write_len: 1 + random.below(60_000) as u32,
                    ..sends(random.below(1_000_000))
                };
                let other = (u64::from(from.0) + 1 + random.below(2)) % 3;
                let cid = 3 + other as u32;
                let now = world.now;
                world.guest(from).connect(now, socket, (cid, port), None);
            }
            if random.one_in(3) {
                let result = hand_over(&mut world, &mut records);
                assert_eq!(result.reset, 0);
                inherited += result.circuits.len();
            }
            record(&mut world.switch, &mut records);
        }
        world.settle();
        bytes += world.totals.bytes;
        assert_eq!(world.reasons(), []);
        world.finish();
    }
    assert!(
        inherited > 500 && bytes > 100_000_000,
        "{inherited} {bytes}"
    );
}

#[test]
fn circuits_with_the_host_are_reset_at_the_guest() {
    let (mut world, lines) = World::of(2, Limits::default());
    world.switch.record_changes();
    world.listen_host(lines[0], 80, sleeps());
    let socket = world.connect_to(lines[0], HOST_CID, 80, sleeps());
    world.settle();
    assert!(world.is_established(lines[0], socket));
    let mut records = Records::new();
    let result = hand_over(&mut world, &mut records);
    assert_eq!((result.circuits.len(), result.reset), (0, 1));
    // Not even a second one forgets it.
    let result = hand_over(&mut world, &mut records);
    assert_eq!((result.circuits.len(), result.reset), (1, 0));
    let sent = world.switch.next_for(world.now, lines[0], &mut Vec::new());
    assert!(matches!(sent, Some(crate::Transmit::Control(header))
        if header.operation == Operation::Reset as u16 && header.src_port == 80));
    assert_eq!(world.switch.circuits.len(), 0);
}

/// Two VMs with a circuit, and its records.
fn two_with_a_circuit() -> (World, Vec<LineId>, Records) {
    let (mut world, lines) = World::of(2, Limits::default());
    world.switch.record_changes();
    world
        .guest(lines[1])
        .listen(80, SocketType::Stream, reads());
    world.connect_to(lines[0], 4, 80, sleeps());
    world.settle();
    let mut records = Records::new();
    record(&mut world.switch, &mut records);
    assert_eq!(records.len(), 1);
    (world, lines, records)
}

#[test]
fn lines_may_have_other_numbers() {
    let (world, lines, records) = two_with_a_circuit();
    let mut next = Switch::new(Limits::default());
    next.set_policy(world.switch.policy().clone());
    let swapped = HashMap::from([(lines[0], (lines[1], 1)), (lines[1], (lines[0], 1))]);
    next.add_line_at(Address::new("vm1", 4), Limits::default())
        .unwrap();
    next.add_line_at(Address::new("vm0", 3), Limits::default())
        .unwrap();
    let now = world.now;
    let inherited = next.inherit(now, &list(&records), &swapped, &mut Vec::new());
    let circuit = next.circuit(inherited.circuits[0]).unwrap();
    assert_eq!(circuit.state, CircuitState::Open);
    assert_eq!(
        (circuit.caller.line, circuit.caller.cid),
        (Some(lines[1]), 3)
    );
    for line in lines {
        assert_eq!(next.circuits_of(line), 1);
    }
}

#[test]
fn what_does_not_fit_is_reset() {
    let (world, lines, records) = two_with_a_circuit();
    let inherit = |records: &[Record<'_>], lines: HashMap<LineId, (LineId, u32)>| {
        let mut next = successor(&world);
        let inherited = next.inherit(world.now, records, &lines, &mut Vec::new());
        (
            inherited.circuits.len(),
            inherited.reset,
            inherited.malformed,
        )
    };
    let all = same_lines(&world);
    let known = list(&records)[0];
    assert_eq!(inherit(&[known], all.clone()), (1, 0, 0));
    // A line does not go on; it is another VM's; bytes were lost.
    assert_eq!(
        inherit(&[known], HashMap::from([(lines[0], (lines[0], 1))])),
        (0, 1, 0)
    );
    let others = HashMap::from([(lines[0], (lines[1], 1)), (lines[1], (lines[0], 1))]);
    assert_eq!(inherit(&[known], others), (0, 1, 0));
    let part = Record {
        is_whole: false,
        ..known
    };
    assert_eq!(inherit(&[part], all.clone()), (0, 1, 0));
    // It stands at another index; it is cut; the same ends twice.
    let elsewhere = Record { index: 7, ..known };
    assert_eq!(inherit(&[elsewhere], all.clone()), (0, 0, 1));
    let short = Record {
        bytes: &known.bytes[..known.bytes.len() - 1],
        ..known
    };
    assert_eq!(inherit(&[short], all.clone()), (0, 0, 1));
    assert_eq!(inherit(&[known, known], all.clone()), (1, 0, 1));
    // Any byte may be another.
    for place in 0..known.bytes.len() {
        for byte in [0, 1, 0x7f, 0xff] {
            let mut bytes = known.bytes.to_vec();
            bytes[place] = byte;
            let changed = Record {
                bytes: &bytes,
                ..known
            };
            inherit(&[changed], all.clone());
        }
    }
}

#[test]
fn a_circuit_that_the_rules_do_not_allow_any_more_is_cut() {
    let (world, lines, records) = two_with_a_circuit();
    let mut next = successor(&world);
    next.set_policy(Default::default());
    let inherited = next.inherit(
        world.now,
        &list(&records),
        &same_lines(&world),
        &mut Vec::new(),
    );
    let circuit = next.circuit(inherited.circuits[0]).unwrap();
    assert!(circuit.is_cut_short);
    let sent = next.next_for(world.now, lines[0], &mut Vec::new());
    assert!(matches!(sent, Some(crate::Transmit::Control(header))
        if header.operation == Operation::Reset as u16));
}

#[test]
fn circuits_of_a_driver_that_has_started_anew_are_reset_though_they_were_not_cut_yet() {
    let (mut world, lines) = World::of(2, Limits::default());
    world.switch.record_changes();
    world.switch.cuts_at_once = 1;
    world
        .guest(lines[1])
        .listen(80, SocketType::Stream, reads());
    for _ in 0..3 {
        world.connect_to(lines[0], 4, 80, sleeps());
    }
    world.settle();
    let mut records = Records::new();
    record(&mut world.switch, &mut records);
    world.switch.handle(
        world.now,
        Event::LineUp {
            line: lines[1],
            seqpacket: true,
        },
        &mut Vec::new(),
    );
    let result = hand_over(&mut world, &mut records);
    // One was cut, of which the caller has yet to hear.
    assert_eq!((result.circuits.len(), result.reset), (1, 2));
    let mut resets = 0;
    while let Some(sent) = world.switch.next_for(world.now, lines[0], &mut Vec::new()) {
        let crate::Transmit::Control(header) = sent else {
            panic!("{sent:?}");
        };
        resets += usize::from(header.operation == Operation::Reset as u16);
    }
    assert_eq!(resets, 2);
}

/// The largest numbers that a circuit between guests can have.
#[test]
fn any_circuit_fits_its_record() {
    let (mut world, _, _) = two_with_a_circuit();
    let circuit = world.switch.circuits.get_mut(0).unwrap();
    circuit.id.index = 1 << 18;
    circuit.id.generation = u32::MAX;
    circuit.passed = [u64::MAX; 2];
    circuit.call.dialled_port = u32::MAX;
    for end in &mut circuit.ends {
        end.party = crate::end::Party::Guest {
            line: LineId(1 << 18),
            cid: u32::MAX,
        };
        (end.port, end.seen, end.epoch) = (u32::MAX, (u32::MAX, u32::MAX), u32::MAX);
        (end.heard, end.announced, end.outbox.shutdown) = (3, 3, 3);
    }
    for flow in &mut circuit.flows {
        *flow = crate::flow::Flow::largest();
    }
    let len = postcard::to_allocvec(circuit).unwrap().len();
    assert!(len <= crate::inherit::RECORD_BYTES, "{len}");
}

#[test]
fn what_only_a_program_has_yet_to_take_is_not_inherited() {
    let (mut world, line, circuit) = ended_and_untaken();
    let mut records = Records::new();
    world.switch.record_changes();
    world.switch.note_changed(circuit);
    record(&mut world.switch, &mut records);
    assert_eq!(records.len(), 1);
    let inherited = hand_over(&mut world, &mut records);
    assert_eq!(inherited, Inherited::default());
    // Its end went unreported with the switch before.
    world.ended += 1;
    let socket = world.connect(line, 80, sleeps());
    world.settle();
    assert!(world.is_established(line, socket), "its place is free");
}
