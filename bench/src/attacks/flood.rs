//! Too much of what is allowed.

use std::io::Read;
use std::time::Instant;

use guestmem::guest::Range;
use wire::switchboard::Kind;
use wire::switchboard::link::{self, FromAgent};
use wire::vsock::{Operation, SocketType};

use crate::guest::{Connection, GUEST_BASE, SendError, State, VirtualGuest, drive};

use super::credit::pair;
use super::scene::{ECHO_PORT, PATIENCE, SHY, SMALL, Scene, TERSE, assert_works};
use super::{Attack, circuit_ends, nothing};

/// Where a program of the host listens for circuits.
const CIRCUIT_PORT: u32 = 9000;

pub(super) const ATTACKS: &[Attack] = &[
    nothing(
        "dials-that-are-refused",
        "40,000 dials to a port without a listener, none of whose answers is read",
        refused_dials,
    ),
    nothing(
        "dials-to-unknown-vms",
        "50,000 dials to a VM that does not exist",
        |scene| flood(scene, Operation::Request, 99, 9, 50_000),
    ),
    nothing("resets", "50,000 resets of nothing", |scene| {
        flood(scene, Operation::Reset, 2, 9, 50_000)
    }),
    nothing(
        "packets-without-a-circuit",
        "50,000 packets that deserve a reset, from a guest that takes none",
        |scene| flood(scene, Operation::Data, 2, 9, 50_000),
    ),
    nothing(
        "credit-requests",
        "50,000 questions for credit on one circuit",
        |scene| circuit_flood(scene, Operation::CreditRequest, 50_000),
    ),
    nothing(
        "credit-updates",
        "50,000 announcements on one circuit",
        |scene| circuit_flood(scene, Operation::CreditUpdate, 50_000),
    ),
    nothing(
        "empty-data",
        "50,000 packets of data without a byte on one circuit",
        |scene| circuit_flood(scene, Operation::Data, 50_000),
    ),
    nothing(
        "half-open-circuits",
        "5,000 dials to a VM that does not answer any",
        half_open,
    ),
    nothing(
        "circuits-to-the-host",
        "2,000 circuits to the host at once, then all of them reset",
        many_circuits,
    ),
    nothing(
        "dial-and-reset",
        "5,000 circuits that are reset as soon as they are dialled",
        dial_and_reset,
    ),
    nothing(
        "calls-of-the-agents-port",
        "2,000 dials to the port where the daemon expects the agent, from an unprivileged port",
        agent_port,
    ),
    nothing(
        "circuits-whose-other-half-never-comes",
        "64 calls that the guest's agent has announced, to a program of the host that listens for circuits, from an agent that never stops \
         talking: 16 are taken, and each of them arrives",
        half_circuits,
    ),
    nothing(
        "control-storm",
        "2,000 announcements at once from a guest that may send 1,000 in a second: it waits, and others do not",
        control_storm,
    ),
    nothing(
        "headerless-packets",
        "1,000 packets too short for a header, from the same guest: each is counted, and it waits",
        headerless_packets,
    ),
    circuit_ends(
        "dial-storm-over-quota",
        "2,000 dials at once from a guest that may make 100 in a second: each of the others is reset and counted, \
               and soon it can dial again",
        "calls are made more often than the VM's limit allows",
        dials_over_quota,
    ),
    circuit_ends(
        "messages-of-one-byte-on-many-circuits",
        "100 messages of one byte on each of 20 circuits to a guest that does not run, where 1,000 may be stored",
        "too many small messages wait",
        tiny_messages_everywhere,
    ),
];

/// Sends packets as fast as the ring takes them, and reads no answer.
fn flood(scene: &mut Scene<'_>, operation: Operation, cid: u32, port: u32, count: u32) {
    let mut guest = scene.attach();
    guest.keep_strays();
    let mut sent = 0;
    let done = drive(&mut [&mut guest], PATIENCE, |guests| {
        while sent < count && guests[0].packets_queued() == 0 {
            let header = guests[0].header(operation, cid, 10_000 + sent, port);
            guests[0].inject(header, b"");
            sent += 1;
        }
        guests[0].take_strays();
        (sent == count && guests[0].packets_queued() == 0).then_some(())
    });
    done.expect("the device takes them");
    assert_works(&mut guest);
    scene.keep(guest);
}

/// Fewer than a VM may make at once, however fast they come: each is refused for want of a listener, and for nothing else.
fn refused_dials(scene: &mut Scene<'_>) {
    let counters = ["ended_no_listener", "ended_connect_rate"];
    let before = counters.map(|name| scene.counter(name));
    flood(scene, Operation::Request, 2, 9, 40_000);
    let after = counters.map(|name| scene.counter(name));
    assert_eq!(after, [before[0] + 40_000, before[1]]);
}

fn circuit_flood(scene: &mut Scene<'_>, operation: Operation, count: u32) {
    let (mut guest, circuit, mut program) = scene.circuit();
    let mut sent = 0;
    let done = drive(&mut [&mut guest], PATIENCE, |guests| {
        while sent < count && guests[0].packets_queued() == 0 {
            let header = guests[0].header_of(circuit, operation, 0);
            guests[0].inject(header, b"");
            sent += 1;
        }
        (sent == count && guests[0].packets_queued() == 0).then_some(())
    });
    done.expect("the device takes them");
    guest.send(circuit, b"still here").expect("it is open");
    let sent = drive(&mut [&mut guest], PATIENCE, |guests| {
        (guests[0].packets_queued() == 0).then_some(())
    });
    sent.expect("the ring has room again");
    let mut bytes = [0; 10];
    program.read_exact(&mut bytes).expect("it arrives");
    scene.keep((guest, program));
}

fn half_open(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let mut victim = scene.victim();
    victim.leave_dials_unanswered();
    let circuits: Vec<_> = (0..5000)
        .map(|_| guest.dial(4, 1, SocketType::Stream))
        .collect();
    let refused = drive(&mut [&mut guest, &mut victim], PATIENCE, |guests| {
        let refused = circuits
            .iter()
            .filter(|circuit| guests[0].state(**circuit) == State::Reset)
            .count();
        // Resets are a courtesy: the guest cannot take all of them so fast, and the device keeps no more than some.
        (refused >= 1000 && guests[0].packets_queued() == 0).then_some(())
    });
    refused.expect("what is over the limit is refused");
    let heard = victim.take_strays().len();
    // A quarter of the victim's limit.
    assert!((256..=512).contains(&heard), "{heard} dials came through");
    scene.wait_for_log("unanswered dials").expect("it says why");
    scene.keep((guest, victim));
}

fn many_circuits(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let circuits: Vec<_> = (0..2000)
        .map(|_| guest.dial(2, ECHO_PORT, SocketType::Stream))
        .collect();
    let open = drive(&mut [&mut guest], PATIENCE, |guests| {
        circuits
            .iter()
            .all(|circuit| guests[0].state(*circuit) != State::Connecting)
            .then_some(())
    });
    open.expect("each is answered, one way or the other");
    for circuit in circuits {
        guest.abort(circuit);
    }
    assert_works(&mut guest);
    scene.keep(guest);
}

fn dial_and_reset(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    guest.keep_strays();
    for _ in 0..5000 {
        let circuit = guest.dial(2, ECHO_PORT, SocketType::Stream);
        guest.abort(circuit);
        guest.service();
        guest.take_strays();
    }
    assert_works(&mut guest);
    scene.keep(guest);
}

fn agent_port(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let circuits: Vec<_> = (0..2000)
        .map(|_| guest.dial(2, wire::agent::PORT, SocketType::Stream))
        .collect();
    let answered = drive(&mut [&mut guest], PATIENCE, |guests| {
        circuits
            .iter()
            .all(|circuit| guests[0].state(*circuit) != State::Connecting)
            .then_some(())
    });
    answered.expect("each is answered");
    assert_works(&mut guest);
    scene.keep(guest);
}

fn half_circuits(scene: &mut Scene<'_>) {
    let mut listener = scene.listen_for_circuits(CIRCUIT_PORT);
    let mut guest = scene.attach();
    let session = guest.dial_from(1000, 2, link::PORT, SocketType::Stream);
    let connected = drive(&mut [&mut guest], PATIENCE, |guests| {
        (guests[0].state(session) == State::Connected).then_some(())
    });
    connected.expect("the agent has a session");
    let mut words = FromAgent::Hello {
        version: link::VERSION,
    }
    .to_string();
    let ports = 40_000..40_064;
    words.extend(ports.clone().map(|port| {
        let (id, kind, ring) = (port.into(), Kind::Bytes, 1 << 20);
        FromAgent::Dial {
            id,
            port,
            kind,
            ring,
        }
        .to_string()
    }));
    guest.send(session, words.as_bytes()).expect("it is sent");
    let calls: Vec<_> = ports
        .map(|port| guest.dial_from(port, 2, CIRCUIT_PORT, SocketType::Stream))
        .collect();
    let words = FromAgent::Unlisten { port: 1 }.to_string().repeat(4096);
    let (mut said, mut taken) = (0, Vec::new());
    let arrived = drive(&mut [&mut guest], PATIENCE, |guests| {
        let sent = guests[0].try_send(session, &words.as_bytes()[said..]);
        said = (said + sent.expect("the session goes on")) % words.len();
        taken.extend(listener.try_accept());
        let is_answered = |call: &Connection| guests[0].state(*call) != State::Connecting;
        (taken.len() == 16 && calls.iter().all(is_answered)).then_some(())
    });
    arrived.expect("a quarter of the places, and a call that has one is not held up");
    // Each that was taken has left its place to another, if that one called late enough.
    let is_open = |call: &&Connection| guest.state(**call) == State::Connected;
    let open = calls.iter().filter(is_open).count();
    assert!((taken.len()..=2 * taken.len()).contains(&open), "{open}");
    assert_works(&mut guest);
    scene.keep((guest, listener, taken));
}

/// The storm lasts as long as it is rested from, and the bystanders do not stop for it.
fn control_storm(scene: &mut Scene<'_>) {
    scene.attack_from(TERSE);
    let rests = scene.counter("rests_for_control_messages");
    let rounds = scene.bystanders_rounds();
    circuit_flood(scene, Operation::CreditUpdate, 2000);
    let rounds = scene.bystanders_rounds() - rounds;
    let rests = scene.counter("rests_for_control_messages") - rests;
    assert!(rests > 0, "the guest was served all the time");
    // If they had to wait with the attacker, there would be at most one exchange for each of its turns.
    assert!(rounds > rests + 1, "{rounds} exchanges in {rests} pauses");
    scene
        .wait_for_log("more packets without payload than its limit")
        .expect("it says why");
}

fn headerless_packets(scene: &mut Scene<'_>) {
    scene.attack_from(TERSE);
    let counters = ["malformed_packets", "rests_for_control_messages"];
    let before = counters.map(|name| scene.counter(name));
    let mut guest = scene.attach();
    let short = Range {
        address: GUEST_BASE,
        len: 43,
    };
    let mut sent = 0;
    let done = drive(&mut [&mut guest], PATIENCE, |guests| {
        while sent < 1000 && guests[0].try_chain(&[short], &[]) {
            sent += 1;
        }
        (sent == 1000).then_some(())
    });
    done.expect("the device gives them back");
    // What it sends now comes behind all of them.
    assert_works(&mut guest);
    let after = counters.map(|name| scene.counter(name));
    assert_eq!(after[0], before[0] + 1000);
    assert!(after[1] > before[1], "the guest was served all the time");
    scene.keep(guest);
}

fn dials_over_quota(scene: &mut Scene<'_>) {
    scene.attack_from(SHY);
    let refusals = scene.counter("ended_connect_rate");
    let mut guest = scene.attach();
    let start = Instant::now();
    let mut circuits = Vec::new();
    let states = drive(&mut [&mut guest], PATIENCE, |guests| {
        // As fast as the ring takes them, and no faster: a guest with more packets on its hands than that takes no answers.
        while circuits.len() < 2000 && guests[0].packets_queued() == 0 {
            circuits.push(guests[0].dial(2, ECHO_PORT, SocketType::Stream));
        }
        let states: Vec<_> = circuits.iter().map(|end| guests[0].state(*end)).collect();
        (states.len() == 2000 && !states.contains(&State::Connecting)).then_some(states)
    });
    let states = states.expect("each is answered, one way or the other");
    // A second's worth at once, and then what has come back meanwhile.
    let most = 101 + start.elapsed().as_millis() as usize / 10;
    let open = |state: &&State| **state == State::Connected;
    let opened = states.iter().filter(open).count();
    assert!((1..=most).contains(&opened), "{opened} of {most}");
    let refused = scene.counter("ended_connect_rate") - refusals;
    assert_eq!(refused as usize, 2000 - opened, "each is counted");
    for circuit in circuits {
        guest.abort(circuit);
    }
    let until = Instant::now() + PATIENCE;
    while let Err(error) = guest.connect(2, ECHO_PORT) {
        assert!(Instant::now() < until, "it cannot dial again: {error}");
    }
    scene.keep(guest);
}

/// No circuit has as many as one circuit may: it is the line that has too many.
fn tiny_messages_everywhere(scene: &mut Scene<'_>) {
    scene.attack_from(SMALL);
    let mut guest = scene.attach();
    let mut victim = scene.victim();
    let circuits: Vec<_> = (0..20)
        .map(|_| pair(&mut guest, &mut victim, SocketType::SeqPacket).0)
        .collect();
    let mut most = 0;
    for circuit in &circuits {
        send_tiny_messages(&mut guest, *circuit, 100);
        let stored = scene.status()["usage"]["buffered_messages"].as_u64();
        most = most.max(stored.expect("it is a number"));
    }
    assert!((500..=1000).contains(&most), "{most} were stored");
    assert!(scene.counter("ended_too_many_messages") > 0);
    let open = |end: &&Connection| guest.state(**end) == State::Connected;
    let open = circuits.iter().filter(open).count();
    assert!(open >= 5, "{open} circuits of 20 are left");
    assert_works(&mut guest);
    scene.keep((guest, victim));
}

fn send_tiny_messages(guest: &mut VirtualGuest, circuit: Connection, count: u32) {
    for _ in 0..count {
        match guest.send_message(circuit, b"x", 0) {
            Ok(()) => {}
            Err(SendError::Over) => return,
            Err(error) => panic!("{error}"),
        }
    }
    let taken = drive(&mut [guest], PATIENCE, |guests| {
        (guests[0].packets_queued() == 0).then_some(())
    });
    taken.expect("the device takes them");
}
