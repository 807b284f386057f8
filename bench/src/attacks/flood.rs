//! Too much of what is allowed.

use std::io::Read;

use wire::vsock::{Operation, SocketType};

use crate::guest::{State, drive};

use super::scene::{ECHO_PORT, PATIENCE, Scene, assert_works};
use super::{Attack, Group, Outcome};

const fn nothing(name: &'static str, what: &'static str, run: fn(&mut Scene<'_>)) -> Attack {
    Attack {
        group: Group::Flood,
        name,
        what,
        outcome: Outcome::Nothing,
        run,
    }
}

pub(super) const ATTACKS: &[Attack] = &[
    nothing(
        "dials-that-are-refused",
        "50,000 dials to a port that nobody listens on, none of whose answers is read",
        |scene| flood(scene, Operation::Request, 2, 9, 50_000),
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
        |scene| circuit_flood(scene, Operation::CreditRequest),
    ),
    nothing(
        "credit-updates",
        "50,000 announcements on one circuit",
        |scene| circuit_flood(scene, Operation::CreditUpdate),
    ),
    nothing(
        "empty-data",
        "50,000 packets of data without a byte on one circuit",
        |scene| circuit_flood(scene, Operation::Data),
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
];

/// Sends packets as fast as the ring takes them, and looks at no answer.
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

fn circuit_flood(scene: &mut Scene<'_>, operation: Operation) {
    let (mut guest, circuit, mut program) = scene.circuit();
    let mut sent = 0;
    let done = drive(&mut [&mut guest], PATIENCE, |guests| {
        while sent < 50_000 && guests[0].packets_queued() == 0 {
            let header = guests[0].header_of(circuit, operation, 0);
            guests[0].inject(header, b"");
            sent += 1;
        }
        (sent == 50_000 && guests[0].packets_queued() == 0).then_some(())
    });
    done.expect("the device takes them");
    guest.send(circuit, b"still here").expect("it is open");
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
    assert!((1000..=2048).contains(&heard), "{heard} dials came through");
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
