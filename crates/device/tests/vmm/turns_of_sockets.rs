//! What of a turn goes to sockets of the host's that pass bytes without a guest's ring having its turn.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use device::{Fabric, HybridConfig, LineSnapshot};
use policy::Address;
use vsock::Limits;
use wire::vsock::{Header, Operation};

use crate::guest::TX;
use crate::turns::{MOST_BYTES, ONE_MORE, count_bytes, header, with_circuits};
use crate::{fabric, turn_until};

/// What a poll of a socket counts, in bytes.
const LOOK_BYTES: u64 = 8 << 10;

/// A hybrid line: its VMM, and its host socket.
fn hybrid(fabric: &mut Fabric, directory: &Path, name: &str, cid: u32) -> (UnixListener, PathBuf) {
    let path = directory.join(format!("{name}.vmm"));
    let listener = UnixListener::bind(&path).unwrap();
    listener.set_nonblocking(true).unwrap();
    let config = HybridConfig {
        address: Address::new(name, cid),
        limits: Limits::default(),
        path,
        host: directory.join(name),
    };
    fabric.open_hybrid_line(&config).unwrap();
    let _ = fabric.all_done().recv();
    (listener, config.host)
}

/// A relayed call of a program to a hybrid VM: the program's end, and the VMM's.
fn relayed(fabric: &mut Fabric, vmm: &UnixListener, host: &Path) -> (UnixStream, UnixStream) {
    let mut program = UnixStream::connect(host).unwrap();
    program.write_all(b"CONNECT 80\n").unwrap();
    program.set_nonblocking(true).unwrap();
    let mut accepted = None;
    turn_until(fabric, "the VMM is called", |_| {
        accepted = vmm.accept().ok();
        accepted.is_some()
    });
    let mut socket = accepted.unwrap().0;
    socket.set_nonblocking(true).unwrap();
    turn_until(fabric, "the VMM knows the port", |_| {
        socket.read(&mut [0; 32]).is_ok()
    });
    socket.write_all(b"OK 1\n").unwrap();
    turn_until(fabric, "the program is answered", |_| {
        program.read(&mut [0; 32]).is_ok()
    });
    (program, socket)
}

#[test]
fn a_turn_relays_so_many_bytes_of_a_line_and_then_those_of_another() {
    const CIRCUITS: usize = 64;
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let many = hybrid(&mut fabric, directory.path(), "many", 3);
    let one = hybrid(&mut fabric, directory.path(), "one", 4);
    let mut ends = Vec::new();
    for _ in 0..CIRCUITS {
        ends.push(relayed(&mut fabric, &many.0, &many.1));
    }
    let mut other = relayed(&mut fabric, &one.0, &one.1);
    let mut all = 0;
    for (program, _) in &mut ends {
        while let Ok(len) = program.write(&[0; 65536]) {
            all += len as u64;
        }
    }
    assert!(all > 2 * MOST_BYTES);
    fabric.turn(Some(Duration::ZERO)).unwrap();
    other.0.write_all(b"x").unwrap();
    let given = |line: &LineSnapshot| line.report.counters.bytes_to_guest;
    for _ in 0..2 {
        fabric.turn(Some(Duration::ZERO)).unwrap();
    }
    let lines = fabric.lines();
    assert_eq!(given(&lines[1]), 1, "the other line has its turn");
    assert!(given(&lines[0]) <= 3 * (MOST_BYTES + ONE_MORE));
    count_bytes(&mut fabric, given, "many", all, MOST_BYTES);
}

#[test]
fn a_turn_looks_at_so_many_relayed_circuits_of_a_line() {
    const CIRCUITS: usize = 600;
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let (vmm, host) = hybrid(&mut fabric, directory.path(), "many", 3);
    let mut ends: Vec<_> = (0..CIRCUITS)
        .map(|_| relayed(&mut fabric, &vmm, &host))
        .collect();
    fabric.turn(Some(Duration::ZERO)).unwrap();
    for (program, _) in &mut ends {
        program.write_all(b"x").unwrap();
    }
    let given = |fabric: &Fabric| fabric.lines()[0].report.counters.bytes_to_guest;
    let mut before = 0;
    turn_until(&mut fabric, "all have passed", |fabric| {
        let after = given(fabric);
        // Each is polled for its byte, once more, and for what comes back.
        assert!(
            after - before <= MOST_BYTES / (3 * LOOK_BYTES) + 1,
            "{before} to {after}"
        );
        before = after;
        after == CIRCUITS as u64
    });
}

/// Programs that have read nothing until now, and all at once read everything.
#[test]
fn a_turn_sends_programs_so_many_bytes_that_were_kept_for_them() {
    const CIRCUITS: u16 = 36;
    const LEN: u32 = 256 << 10;
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let (mut guest, mut programs) = with_circuits(&mut fabric, directory.path(), CIRCUITS);
    let sent = |line: &LineSnapshot| line.report.counters.bytes_from_guest;
    let kept = |fabric: &mut Fabric| {
        let kept = fabric.survey_circuits(0).kept_bytes;
        kept.into_iter().map(|(_, kept)| kept).sum::<u64>()
    };
    let packets: Vec<_> = (0..CIRCUITS)
        .map(|number| {
            guest.packet(&Header {
                src_port: 1000 + u32::from(number),
                ..header(Operation::Data, 80, LEN / 2)
            })
        })
        .collect();
    let mut all = 0;
    // The sockets take some of it, and the ring's entries are used once.
    while kept(&mut fabric) < u64::from(CIRCUITS) * u64::from(LEN) / 2 {
        for packet in &packets {
            guest.offer(TX, *packet, 1);
        }
        guest.kick(TX);
        all += u64::from(CIRCUITS) * u64::from(LEN / 2);
        count_bytes(&mut fabric, sent, "web", all, MOST_BYTES);
    }
    let mut buffer = vec![0; 1 << 20];
    for program in &mut programs {
        while program.read(&mut buffer).is_ok_and(|len| len > 0) {}
    }
    let mut before = kept(&mut fabric);
    turn_until(&mut fabric, "all is sent", |fabric| {
        let after = kept(fabric);
        assert!(
            before - after <= MOST_BYTES + u64::from(LEN),
            "{before} to {after}"
        );
        before = after;
        for program in &mut programs {
            let read = program.read(&mut buffer);
            let nothing = |error: &std::io::Error| error.kind() == ErrorKind::WouldBlock;
            assert!(read.as_ref().is_ok_and(|len| *len > 0) || read.as_ref().is_err_and(nothing));
        }
        after == 0
    });
}
