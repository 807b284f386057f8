//! A guest whose ring makes no sense, behind packets that do; and a VMM that pauses its guest, or quits.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;

use device::{CircuitFilter, Fabric};
use wire::vsock::{Header, Operation};

use crate::guest::{Guest, RX, TX, quads, request, send};
use crate::turns::{header, with_circuits};
use crate::{config, fabric, turn_until};

const CIRCUITS: u16 = 20;
const BYTES: u32 = 5;

/// Sends some bytes on each circuit, and an end if there is to be one. What follows fails the device, in the same batch.
fn send_and_fail(guest: &mut Guest, ends: bool) {
    for number in 0..CIRCUITS {
        let of_circuit = |header| Header {
            src_port: 1000 + u32::from(number),
            ..header
        };
        let data = guest.packet(&of_circuit(header(Operation::Data, 80, BYTES)));
        guest.offer(TX, data, 1);
        if ends {
            let end = of_circuit(header(Operation::Shutdown, 80, 0));
            let end = guest.packet(&Header { flags: 3, ..end });
            guest.offer(TX, end, 1);
        }
    }
    guest.offer_what_is_not_there(TX);
    guest.kick(TX);
}

/// Everything that a program reads up to the end, which comes.
fn read_all(fabric: &mut Fabric, mut program: UnixStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    turn_until(fabric, "the program has an end", |_| {
        let read = program.read_to_end(&mut bytes);
        !read.is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
    });
    bytes
}

fn every_circuit_ends(ends: bool) {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let (mut guest, programs) = with_circuits(&mut fabric, directory.path(), CIRCUITS);
    send_and_fail(&mut guest, ends);
    for program in programs {
        let bytes = read_all(&mut fabric, program);
        assert_eq!(bytes.len(), BYTES as usize, "sent before the ring broke");
    }
    turn_until(&mut fabric, "no circuit is left", |fabric| {
        let circuits = fabric.list_circuits(&CircuitFilter::default(), 0, 1);
        circuits.circuits.is_empty()
    });
}

#[test]
fn what_was_finished_before_a_ring_broke_arrives_and_ends() {
    every_circuit_ends(true);
}

#[test]
fn what_was_sent_before_a_ring_broke_arrives_and_is_cut() {
    every_circuit_ends(false);
}

/// A question of vhost-user that has an answer: GET_FEATURES.
const QUESTION: [u8; 12] = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];

#[test]
fn a_vmm_that_quits_before_it_reads_an_answer_is_no_fault() {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let config = config(directory.path());
    let socket = config.vhost_user.clone();
    fabric.open_line(&config).unwrap();
    let mut vmm = UnixStream::connect(socket).unwrap();
    turn_until(&mut fabric, "the VMM is there", |fabric| {
        fabric.lines()[0].attached
    });
    vmm.write_all(&QUESTION.repeat(100)).unwrap();
    drop(vmm);
    turn_until(&mut fabric, "the VMM is gone", |fabric| {
        !fabric.lines()[0].attached
    });
    assert_eq!(fabric.lines()[0].last_fault, None);
}

#[test]
fn a_fault_is_of_the_vmm_that_had_it_and_not_of_the_next_one() {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let (mut guest, _programs) = with_circuits(&mut fabric, directory.path(), 1);
    send_and_fail(&mut guest, true);
    turn_until(&mut fabric, "the device fails", |fabric| {
        fabric.lines()[0].last_fault.is_some()
    });
    drop(guest);
    turn_until(&mut fabric, "the VMM is gone", |fabric| {
        !fabric.lines()[0].attached
    });
    assert!(fabric.lines()[0].last_fault.is_some());
    let mut next = UnixStream::connect(config(directory.path()).vhost_user).unwrap();
    turn_until(&mut fabric, "something is there", |fabric| {
        fabric.lines()[0].attached
    });
    assert!(fabric.lines()[0].last_fault.is_some());
    next.write_all(&QUESTION).unwrap();
    turn_until(&mut fabric, "it is a VMM", |fabric| {
        fabric.lines()[0].last_fault.is_none()
    });
    assert!(fabric.lines()[0].attached);
}

/// As QEMU does with a guest that it pauses.
#[test]
fn a_guest_whose_rings_are_stopped_while_it_has_circuits_is_paused() {
    for circuits in [0, 1] {
        let directory = tempfile::tempdir().unwrap();
        let mut fabric = fabric();
        let (guest, _programs) = with_circuits(&mut fabric, directory.path(), circuits);
        assert!(!fabric.lines()[0].paused);
        for (ring, is_last) in [(RX, false), (TX, true)] {
            let mut answer = [0; 20];
            let ring = quads(&[ring as u64]);
            send(&guest.vmm, request::GET_VRING_BASE, &ring, &[]);
            guest.vmm.set_nonblocking(true).unwrap();
            turn_until(&mut fabric, "the ring stops", |_| {
                (&guest.vmm).read(&mut answer).is_ok()
            });
            guest.vmm.set_nonblocking(false).unwrap();
            assert_eq!(fabric.lines()[0].paused, is_last && circuits > 0);
        }
        guest.hang_up();
        turn_until(&mut fabric, "the VMM is gone", |fabric| {
            !fabric.lines()[0].attached
        });
        assert!(!fabric.lines()[0].paused);
    }
}
