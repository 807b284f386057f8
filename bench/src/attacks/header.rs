//! Headers of packets.

use std::io::{Read, Write};

use wire::vsock::{
    CID_ANY, Header, Operation, SEQPACKET_END_OF_MESSAGE, SHUTDOWN_SEND, SocketType,
};

use crate::guest::{State, VirtualGuest};

use super::scene::{ECHO_PORT, Scene, assert_reset, assert_works};
use super::{Attack, circuit_ends, nothing};

const PROTOCOL: &str = "a packet broke the protocol";

pub(super) const ATTACKS: &[Attack] = &[
    nothing(
        "another-vms-source",
        "packets that say they come from another VM, from the host, and from an unknown CID",
        wrong_source,
    ),
    nothing(
        "reserved-bits-of-addresses",
        "addresses whose upper 32 bits are not zero",
        wide_addresses,
    ),
    nothing(
        "unknown-type",
        "packets of socket types that do not exist",
        |scene| {
            each_is_answered(
                scene,
                |header, value| header.socket_type = value,
                &[0, 3, 0xffff],
            )
        },
    ),
    nothing(
        "unknown-operation",
        "packets of operations that do not exist",
        |scene| {
            each_is_answered(
                scene,
                |header, value| header.operation = value,
                &[0, 8, 0xffff],
            )
        },
    ),
    nothing(
        "data-without-a-circuit",
        "data, shutdowns, responses and credit for circuits that do not exist",
        |scene| {
            each_is_answered(
                scene,
                |header, value| header.operation = value,
                &[2, 4, 5, 6, 7],
            )
        },
    ),
    nothing(
        "reset-without-a-circuit",
        "resets for circuits that do not exist are not answered",
        stray_resets,
    ),
    nothing(
        "dials-to-nowhere",
        "dials to reserved and unknown identifiers and to itself",
        nowhere,
    ),
    circuit_ends(
        "calls-of-other-vms-agents",
        "dials to ports 1005 to 1007 of VMs that a rule lets it call at any port",
        "for its host alone",
        agents_of_others,
    ),
    nothing(
        "payload-with-a-dial",
        "dials, responses and resets that bring payload along",
        payload_with_control,
    ),
    circuit_ends(
        "length-beyond-the-chain",
        "data that announces more bytes than its chain has",
        PROTOCOL,
        |scene| cut_short(scene, |header| header.len = 60_000),
    ),
    circuit_ends(
        "length-of-four-gigabytes",
        "data that announces 2^32 - 1 bytes",
        PROTOCOL,
        |scene| cut_short(scene, |header| header.len = u32::MAX),
    ),
    circuit_ends(
        "unknown-operation-in-a-circuit",
        "an operation that does not exist, on a circuit that does",
        PROTOCOL,
        |scene| cut_short(scene, |header| header.operation = 99),
    ),
    circuit_ends(
        "messages-in-a-stream",
        "a packet of a socket of messages on a stream",
        PROTOCOL,
        |scene| cut_short(scene, |header| header.socket_type = 2),
    ),
    circuit_ends(
        "flags-of-messages-in-a-stream",
        "an end of a message in a stream",
        PROTOCOL,
        |scene| cut_short(scene, |header| header.flags = SEQPACKET_END_OF_MESSAGE),
    ),
    circuit_ends(
        "unknown-flags-of-data",
        "data with every flag set",
        PROTOCOL,
        |scene| cut_short(scene, |header| header.flags = u32::MAX),
    ),
    circuit_ends(
        "response-to-an-open-circuit",
        "responses on a circuit that is open, with bytes behind them for the program",
        PROTOCOL,
        |scene| {
            cut_short(scene, |header| {
                header.operation = Operation::Response as u16
            })
        },
    ),
    circuit_ends(
        "data-behind-its-end",
        "data after the shutdown that said there would be none",
        PROTOCOL,
        data_behind_the_end,
    ),
    circuit_ends(
        "data-before-the-response",
        "a guest that is called sends data before it has accepted",
        PROTOCOL,
        data_before_response,
    ),
    circuit_ends(
        "response-to-itself",
        "a guest that calls answers its own call",
        PROTOCOL,
        response_to_itself,
    ),
    circuit_ends(
        "dial-with-used-ports",
        "a dial with the ports of a circuit that is open: the old one ends, the new one is another",
        "reset by the peer",
        dial_again,
    ),
    nothing(
        "shutdown-of-everything",
        "shutdowns with no flag, with every flag, and many of them",
        odd_shutdowns,
    ),
];

fn wrong_source(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let mut victim = scene.victim();
    victim.keep_strays();
    guest.keep_strays();
    for source in [0, 1, 2, 4, 5, u64::from(CID_ANY), u64::MAX, 3 << 32] {
        for operation in [Operation::Request, Operation::Data, Operation::Reset] {
            let mut header = guest.header(operation, 4, 1000, 1);
            header.src_cid = source;
            guest.inject(header, b"");
            header.dst_cid = 2;
            header.dst_port = ECHO_PORT;
            guest.inject(header, b"");
        }
    }
    assert_works(&mut guest);
    victim.service();
    assert_eq!(victim.take_strays(), []);
    assert_eq!(guest.take_strays(), [], "a liar gets no answer");
    scene.keep((guest, victim));
}

fn wide_addresses(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let mut victim = scene.victim();
    victim.keep_strays();
    for upper in [1_u64 << 32, u64::MAX << 32] {
        let mut header = guest.header(Operation::Request, 4, 1000, 1);
        header.dst_cid |= upper;
        guest.inject(header, b"");
    }
    assert_works(&mut guest);
    victim.service();
    assert_eq!(victim.take_strays(), []);
    scene.keep((guest, victim));
}

/// Each of these packets is answered by a reset, and by nothing else.
fn each_is_answered(scene: &mut Scene<'_>, set: fn(&mut Header, u16), values: &[u16]) {
    let mut guest = scene.attach();
    guest.keep_strays();
    for (index, value) in values.iter().enumerate() {
        let mut header = guest.header(Operation::Data, 2, 1000, 2000 + index as u32);
        set(&mut header, *value);
        header.len = 4;
        guest.inject(header, b"data");
    }
    assert_works(&mut guest);
    let answers = guest.take_strays();
    assert_eq!(answers.len(), values.len(), "{answers:?}");
    for answer in answers {
        assert_eq!(answer.operation, Operation::Reset as u16);
    }
    scene.keep(guest);
}

fn stray_resets(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    guest.keep_strays();
    for port in 0..1000 {
        let header = guest.header(Operation::Reset, 2, port, 1);
        guest.inject(header, b"");
    }
    assert_works(&mut guest);
    assert_eq!(guest.take_strays(), []);
    scene.keep(guest);
}

fn nowhere(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    for cid in [0, 1, 3, 99, CID_ANY] {
        for port in [0, ECHO_PORT, u32::MAX] {
            let refused = guest.connect(cid, port);
            assert!(refused.is_err(), "CID {cid} port {port}");
        }
    }
    assert_works(&mut guest);
    scene.keep(guest);
}

fn agents_of_others(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    for cid in [4, 5, 6] {
        for port in [1005, 1006, 1007] {
            let refused = guest.connect(cid, port);
            assert!(refused.is_err(), "CID {cid} port {port}");
        }
    }
    assert_works(&mut guest);
    scene.keep(guest);
}

fn payload_with_control(scene: &mut Scene<'_>) {
    let listener = scene.listen(80);
    let mut guest = scene.attach();
    guest.keep_strays();
    let payload = vec![b'x'; 60_000];
    let mut header = guest.header(Operation::Request, 2, 1000, 80);
    header.len = payload.len() as u32;
    guest.inject(header, &payload);
    let mut program = crate::host::accept(&listener).expect("the call comes through");
    assert_works(&mut guest);
    // What is said and done afterwards is all that the program sees.
    let mut bye = guest.header(Operation::Shutdown, 2, 1000, 80);
    bye.flags = 3;
    bye.len = payload.len() as u32;
    guest.inject(bye, &payload);
    let mut arrived = Vec::new();
    program.read_to_end(&mut arrived).expect("a clean end");
    assert_eq!(arrived, b"");
    scene.keep(guest);
}

/// A packet of an open circuit with one thing wrong ends it, and the program sees no byte of it.
fn cut_short(scene: &mut Scene<'_>, spoil: fn(&mut Header)) {
    let (mut guest, circuit, mut program) = scene.circuit();
    let mut header = guest.header_of(circuit, Operation::Data, 5);
    spoil(&mut header);
    guest.inject(header, b"wrong");
    assert_reset(&mut guest, circuit);
    let mut arrived = Vec::new();
    // Whether the end is an error is for the kind of socket to say.
    let _ = program.read_to_end(&mut arrived);
    assert_eq!(arrived, b"");
    assert_works(&mut guest);
    scene.keep(guest);
}

fn data_behind_the_end(scene: &mut Scene<'_>) {
    let (mut guest, circuit, mut program) = scene.circuit();
    guest.send(circuit, b"right").expect("there is room");
    guest.shutdown(circuit, SHUTDOWN_SEND);
    let header = guest.header_of(circuit, Operation::Data, 5);
    guest.inject(header, b"wrong");
    assert_reset(&mut guest, circuit);
    let mut arrived = Vec::new();
    let _ = program.read_to_end(&mut arrived);
    // It broke the protocol: what had not been delivered by then is lost.
    assert!(b"right".starts_with(&arrived[..]), "{arrived:?}");
    scene.keep(guest);
}

fn data_before_response(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    guest.keep_strays();
    let mut program =
        std::os::unix::net::UnixStream::connect(scene.host_socket()).expect("it listens");
    // Nothing listens in the guest, and its driver says nothing by itself.
    program.write_all(b"CONNECT 99\n").expect("it is open");
    let request = wait_for_request(&mut guest);
    let mut header = guest.header(Operation::Data, 2, 99, request.src_port);
    header.len = 5;
    guest.inject(header, b"wrong");
    let answer = crate::host::read_line(&mut program).expect("an answer");
    assert!(answer.starts_with("ERR "), "{answer:?}");
    scene.keep(guest);
}

/// A dial of a program of the host, which the guest's driver has left unanswered.
pub(super) fn wait_for_request(guest: &mut VirtualGuest) -> Header {
    guest.leave_dials_unanswered();
    let patience = guest.config().patience;
    crate::guest::drive(&mut [guest], patience, |guests| {
        guests[0].take_strays().pop()
    })
    .expect("a dial comes")
}

fn response_to_itself(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let mut victim = scene.victim();
    victim.keep_strays();
    victim.leave_dials_unanswered();
    let circuit = guest.dial(4, 1, SocketType::Stream);
    let header = guest.header_of(circuit, Operation::Response, 0);
    guest.inject(header, b"");
    assert_reset(&mut guest, circuit);
    scene.keep((guest, victim));
}

fn dial_again(scene: &mut Scene<'_>) {
    let listener = scene.listen(80);
    let mut guest = scene.attach();
    let circuit = guest.connect(2, 80).expect("there is a listener");
    let mut first = crate::host::accept(&listener).expect("a call came");
    guest.send(circuit, b"first").expect("there is room");
    let header = guest.header_of(circuit, Operation::Request, 0);
    guest.forget(circuit);
    guest.keep_strays();
    guest.inject(header, b"");
    let mut second = crate::host::accept(&listener).expect("another call came");
    let mut arrived = Vec::new();
    let _ = first.read_to_end(&mut arrived);
    assert_eq!(arrived, b"first");
    second.set_nonblocking(true).expect("it is a socket");
    assert!(
        second.read(&mut [0; 8]).is_err(),
        "nothing is in the new one"
    );
    assert_works(&mut guest);
    scene.keep((guest, second));
}

fn odd_shutdowns(scene: &mut Scene<'_>) {
    let (mut guest, circuit, mut program) = scene.circuit();
    for flags in [0, 4, u32::MAX << 2] {
        let mut header = guest.header_of(circuit, Operation::Shutdown, 0);
        header.flags = flags;
        guest.inject(header, b"");
    }
    guest.send(circuit, b"right").expect("nothing is shut down");
    let mut bytes = [0; 5];
    program.read_exact(&mut bytes).expect("it arrives");
    for _ in 0..500 {
        let mut header = guest.header_of(circuit, Operation::Shutdown, 0);
        header.flags = u32::MAX;
        guest.inject(header, b"");
    }
    let mut rest = Vec::new();
    program.read_to_end(&mut rest).expect("a clean end");
    assert_eq!(rest, b"");
    let ended = guest.receive_to_end(circuit).1;
    assert_ne!(ended, crate::guest::Received::Nothing);
    assert_ne!(guest.state(circuit), State::Connected);
    scene.keep(guest);
}
