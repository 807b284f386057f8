//! Credit: what a guest says it has room for and has consumed.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use wire::vsock::{Header, Operation, SocketType};

use crate::guest::{Connection, GuestConfig, State, VirtualGuest, drive};

use super::scene::{PATIENCE, Scene, assert_reset, assert_works};
use super::{Attack, circuit_ends, nothing};

const fn ends(name: &'static str, what: &'static str, run: fn(&mut Scene<'_>)) -> Attack {
    circuit_ends(name, what, "a packet broke the rules of credit", run)
}

pub(super) const ATTACKS: &[Attack] = &[
    ends(
        "more-than-the-credit",
        "a guest sends on when its credit is used up and the program does not read",
        beyond_the_credit,
    ),
    ends(
        "more-than-the-other-guests-credit",
        "the same towards another guest that does not run",
        beyond_a_guests_credit,
    ),
    ends(
        "consumed-what-was-never-sent",
        "a guest says that it has consumed bytes that it was never sent",
        |scene| lie(scene, |header| header.fwd_cnt = 1000),
    ),
    ends(
        "consumed-two-gigabytes",
        "the same with 2^31 - 1 bytes",
        |scene| lie(scene, |header| header.fwd_cnt = i32::MAX as u32),
    ),
    nothing(
        "consumed-backwards",
        "counts of consumed bytes go back and forth",
        consumed_backwards,
    ),
    nothing(
        "no-buffer-at-all",
        "a guest without room, towards a program that writes without end",
        |scene| endless_writer(scene, 0),
    ),
    nothing(
        "an-endless-buffer",
        "a guest with room for 2^32 - 1 bytes that never reads, towards a program that writes without end",
        |scene| endless_writer(scene, u32::MAX),
    ),
    nothing(
        "a-buffer-that-shrinks",
        "announcements jump between nothing and everything while data flows",
        jumping_buffer,
    ),
    nothing(
        "one-byte-packets-to-a-paused-guest",
        "a quarter of a million packets of one byte each to a guest that does not run",
        tiny_packets,
    ),
    circuit_ends(
        "one-byte-messages-to-a-paused-guest",
        "messages of one byte each, as many as the credit has bytes, to a guest that does not run",
        "too many small messages wait",
        tiny_messages,
    ),
    nothing(
        "a-message-without-an-end",
        "a message that never ends, as long as the credit lasts",
        endless_message,
    ),
    nothing(
        "an-endless-buffer-between-guests",
        "an accomplice offers 2^32 - 1 bytes on each of 16 circuits and does not run, while the attacker fills them",
        accomplice,
    ),
];

fn beyond_the_credit(scene: &mut Scene<'_>) {
    let (mut guest, circuit, program) = scene.circuit();
    let bytes = vec![b'x'; 60_000];
    // The socket takes some of it; what is beyond that is kept, up to the credit.
    for _ in 0..40 {
        let header = guest.header_of(circuit, Operation::Data, bytes.len() as u32);
        guest.inject(header, &bytes);
    }
    assert_reset(&mut guest, circuit);
    scene.keep((guest, program));
}

fn beyond_a_guests_credit(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let mut victim = scene.victim();
    let (near, _) = pair(&mut guest, &mut victim, SocketType::Stream);
    let bytes = vec![b'x'; 60_000];
    for _ in 0..5 {
        let header = guest.header_of(near, Operation::Data, bytes.len() as u32);
        guest.inject(header, &bytes);
    }
    assert_reset(&mut guest, near);
    scene.keep((guest, victim));
}

/// A circuit from the one guest to the other. Returns both ends.
pub(super) fn pair(
    guest: &mut VirtualGuest,
    victim: &mut VirtualGuest,
    socket_type: SocketType,
) -> (Connection, Connection) {
    victim.listen_with(1, socket_type, 100);
    let near = guest.dial(4, 1, socket_type);
    let far = drive(&mut [guest, victim], PATIENCE, |guests| {
        (guests[0].state(near) == State::Connected).then(|| guests[1].try_accept(1))?
    });
    (near, far.expect("the victim answers"))
}

fn lie(scene: &mut Scene<'_>, spoil: fn(&mut Header)) {
    let (mut guest, circuit, program) = scene.circuit();
    let mut header = guest.header_of(circuit, Operation::CreditUpdate, 0);
    spoil(&mut header);
    guest.inject(header, b"");
    assert_reset(&mut guest, circuit);
    scene.keep((guest, program));
}

fn consumed_backwards(scene: &mut Scene<'_>) {
    let (mut guest, circuit, mut program) = scene.circuit();
    for round in 0..200_u32 {
        program.write_all(&[7; 100]).expect("there is room");
        guest.receive(circuit, 100).expect("it arrives");
        let mut header = guest.header_of(circuit, Operation::CreditUpdate, 0);
        header.fwd_cnt = header.fwd_cnt.wrapping_sub(round * 50);
        guest.inject(header, b"");
    }
    guest.send(circuit, b"still here").expect("there is room");
    let mut bytes = [0; 10];
    program.read_exact(&mut bytes).expect("it arrives");
    scene.keep((guest, program));
}

/// What the guest has no room for stays with the program.
fn endless_writer(scene: &mut Scene<'_>, buffer_bytes: u32) {
    let listener = scene.listen(80);
    let config = GuestConfig {
        buffer_bytes,
        packet_cost: 0,
        ..GuestConfig::default()
    };
    let mut guest = scene.attach_with(config);
    let circuit = guest.connect(2, 80).expect("there is a listener");
    let program = crate::host::accept(&listener).expect("a call came");
    program.set_nonblocking(true).expect("it is a socket");
    // The guest runs no more: its ring is not refilled.
    let written = write_until_full(&program);
    assert!(written < 4 << 20, "{written} bytes went somewhere");
    assert_eq!(guest.state(circuit), State::Connected);
    scene.keep((guest, program));
}

/// Writes until the socket has been full for a while.
pub(super) fn write_until_full(mut program: &UnixStream) -> usize {
    let bytes = vec![0; 64 * 1024];
    let mut written = 0;
    let mut refusals = 0;
    while refusals < 20 && written < 16 << 20 {
        match program.write(&bytes) {
            Ok(len) => (written, refusals) = (written + len, 0),
            Err(_) => {
                refusals += 1;
                std::thread::sleep(std::time::Duration::from_millis(1));
            }
        }
    }
    written
}

fn jumping_buffer(scene: &mut Scene<'_>) {
    let (mut guest, circuit, mut program) = scene.circuit();
    let writer = std::thread::spawn(move || {
        // It may be cut off at any time.
        let _ = program.write_all(&vec![1; 1 << 20]);
        program
    });
    let mut arrived = Vec::new();
    for round in 0..2000_u32 {
        let mut header = guest.header_of(circuit, Operation::CreditUpdate, 0);
        header.buf_alloc = if round % 2 == 0 { 0 } else { u32::MAX };
        guest.inject(header, b"");
        guest.service();
        guest.try_receive(circuit, usize::MAX, &mut arrived);
    }
    guest.abort(circuit);
    // The program gets it: its write ends, or has.
    let ended = drive(&mut [&mut guest], PATIENCE, |_| {
        writer.is_finished().then_some(())
    });
    ended.expect("the program gets the end");
    let program = writer.join().expect("it does not panic");
    assert_works(&mut guest);
    scene.keep((guest, program));
}

fn accomplice(scene: &mut Scene<'_>) {
    // What both may have together: 4 MiB a circuit, and its share of a line.
    scene.allow_memory(160 << 20);
    let mut guest = scene.attach();
    let config = GuestConfig {
        buffer_bytes: u32::MAX,
        packet_cost: 0,
        ..GuestConfig::default()
    };
    let mut victim = scene.victim_with(config);
    let circuits: Vec<_> = (0..16)
        .map(|_| pair(&mut guest, &mut victim, SocketType::Stream).0)
        .collect();
    let bytes = vec![b'x'; 64 * 1024];
    let mut sent = 0;
    let filled = drive(&mut [&mut guest], PATIENCE, |guests| {
        for circuit in &circuits {
            sent += guests[0].try_send(*circuit, &bytes).expect("it is open");
        }
        let credit: u32 = circuits.iter().map(|end| guests[0].credit(*end)).sum();
        (credit == 0 && guests[0].packets_queued() == 0).then_some(())
    });
    filled.expect("the credit ends somewhere");
    assert!(
        sent <= 16 * (4 << 20) + (1 << 20),
        "{sent} bytes were let in"
    );
    assert_works(&mut guest);
    scene.keep((guest, victim));
}

fn send_tiny(
    scene: &mut Scene<'_>,
    socket_type: SocketType,
    mut send: impl FnMut(&mut VirtualGuest, Connection) -> bool,
) {
    let mut guest = scene.attach();
    let mut victim = scene.victim();
    let (near, _) = pair(&mut guest, &mut victim, socket_type);
    let mut sent = 0;
    let done = drive(&mut [&mut guest], PATIENCE, |guests| {
        while guests[0].credit(near) > 0 && guests[0].packets_queued() == 0 {
            if guests[0].state(near) != State::Connected || !send(guests[0], near) {
                return Some(());
            }
            sent += 1;
        }
        (guests[0].credit(near) == 0).then_some(())
    });
    done.expect("the credit ends somewhere");
    assert!(sent > 100, "{sent}");
    assert_works(&mut guest);
    scene.keep((guest, victim));
}

fn tiny_packets(scene: &mut Scene<'_>) {
    scene.allow_memory(16 << 20);
    send_tiny(scene, SocketType::Stream, |guest, near| {
        guest.try_send(near, b"x").is_ok()
    });
}

fn tiny_messages(scene: &mut Scene<'_>) {
    scene.allow_memory(16 << 20);
    send_tiny(scene, SocketType::SeqPacket, |guest, near| {
        guest.send_message(near, b"x", 0).is_ok()
    });
}

fn endless_message(scene: &mut Scene<'_>) {
    scene.allow_memory(16 << 20);
    send_tiny(scene, SocketType::SeqPacket, |guest, near| {
        guest.try_send(near, &[b'x'; 1000]).is_ok()
    });
}
