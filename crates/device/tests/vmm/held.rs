//! Directories that others may read, or hold by their locks.

use std::fs::{Permissions, create_dir, set_permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Instant;

use device::{Bound, Change, Fabric, NewLine, Orders};
use held_directory::HeldDirectory;
use policy::Policy;
use wire::vsock::{Header, Operation};

use crate::guest::{Guest, RING, RX, TX};
use crate::turns::header;
use crate::{PATIENCE, config_of, fabric, turn_until};

const HELD: u32 = 64;

/// The directory of a VM with the next CID, which has this mode.
fn add(fabric: &mut Fabric, within: &Path, number: u32, mode: u32) -> (PathBuf, u32) {
    let directory = within.join(number.to_string());
    create_dir(&directory).unwrap();
    let cid = 3 + number;
    let config = config_of(&directory, &format!("vm{number}"), cid);
    set_permissions(&directory, Permissions::from_mode(mode)).unwrap();
    fabric.open_line(&config).unwrap();
    (directory, cid)
}

/// The VM's guest, once its rings run.
fn attach(fabric: &mut Fabric, directory: &Path, cid: u32) -> Guest {
    let socket = directory.join(format!("vm{}.vhost", cid - 3));
    let mut guest = Guest::connect(&socket);
    turn_until(fabric, "the driver runs", |fabric| {
        let lines = fabric.lines();
        let of_guest = lines.iter().find(|line| line.report.address.cid == cid);
        of_guest.unwrap().report.up
    });
    let buffer = guest.buffer(4096);
    guest.offer(RX, buffer, RING);
    guest.kick(RX);
    guest
}

fn dial(guest: &mut Guest, cid: u32, source: u32, port: u32) {
    let dial = guest.packet(&Header {
        src_cid: u64::from(cid),
        src_port: source,
        ..header(Operation::Request, port, 0)
    });
    guest.offer(TX, dial, 1);
    guest.kick(TX);
}

fn accept(listener: &UnixListener) -> UnixStream {
    listener.set_nonblocking(true).unwrap();
    let until = Instant::now() + PATIENCE;
    loop {
        match listener.accept() {
            Ok((program, _)) => return program,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
        assert!(Instant::now() < until, "the program is not called");
        std::thread::yield_now();
    }
}

/// Their holders may read them, and no more.
#[test]
fn however_many_directories_are_held_the_thread_of_all_waits_for_none() {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let (own, own_cid) = add(&mut fabric, directory.path(), 0, 0o700);
    let mut good = attach(&mut fabric, &own, own_cid);
    let mut others: Vec<_> = (1..=HELD)
        .map(|number| {
            let (directory, cid) = add(&mut fabric, directory.path(), number, 0o755);
            let guest = attach(&mut fabric, &directory, cid);
            (directory, cid, guest)
        })
        .collect();
    let listener = UnixListener::bind(own.join("vm0.sock_80")).unwrap();
    let (orders, thread) = Orders::start("fabric", fabric).unwrap();
    let mut held = Vec::new();
    for (directory, ..) in &others {
        let Some(one) = HeldDirectory::at(directory).unwrap() else {
            orders.ask(Fabric::stop);
            return;
        };
        held.push(one);
    }
    for round in 0..3 {
        for (_, cid, guest) in &mut others {
            dial(guest, *cid, 1000 + round, 80);
        }
        dial(&mut good, own_cid, 1000 + round, 80);
        drop(accept(&listener));
    }
    // Nor for a link of root's that leads into one of them, nor when lines end.
    symlink(others[0].0.join("program"), own.join("vm0.sock_81")).unwrap();
    dial(&mut good, own_cid, 2000, 81);
    orders.order(|fabric| assert!(fabric.close_line("vm1")));
    dial(&mut good, own_cid, 2001, 80);
    drop(accept(&listener));
    drop(held);
    orders.ask(Fabric::stop);
    thread.join().unwrap();
}

/// The directory of a new VM is held once its sockets are made, and its CID is another's.
#[test]
fn the_thread_of_all_does_not_wait_for_the_sockets_of_a_change_that_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let (own, own_cid) = add(&mut fabric, directory.path(), 0, 0o700);
    let mut good = attach(&mut fabric, &own, own_cid);
    let listener = UnixListener::bind(own.join("vm0.sock_80")).unwrap();
    let shared = directory.path().join("shared");
    create_dir(&shared).unwrap();
    let line = NewLine::Rings(config_of(&shared, "late", own_cid));
    set_permissions(&shared, Permissions::from_mode(0o755)).unwrap();
    let (mut bound, policy) = (Bound::default(), Arc::new(Policy::default()));
    line.make_sockets(&mut bound, &[], &policy).unwrap();
    let (orders, thread) = Orders::start("fabric", fabric).unwrap();
    let Some(held) = HeldDirectory::at(&shared).unwrap() else {
        orders.ask(Fabric::stop);
        return;
    };
    let (begin, begun) = channel();
    orders.order(move |fabric| {
        begin.send(()).unwrap();
        let refused = fabric.change(Change {
            added: vec![line],
            bound,
            leaves_out: false,
            removed: Vec::new(),
            services: Vec::new(),
            policy,
            groups: Vec::new(),
            aliases: Vec::new(),
            enforce_existing: false,
            commit: Box::new(|| ()),
        });
        assert!(refused.is_err());
    });
    begun.recv().unwrap();
    dial(&mut good, own_cid, 1000, 80);
    drop(accept(&listener));
    drop(held);
    let done = orders.ask(Fabric::all_done).unwrap();
    done.recv_timeout(PATIENCE).unwrap_err();
    assert!(!shared.join("late.vhost").exists() && !shared.join("late.sock").exists());
    orders.ask(Fabric::stop);
    thread.join().unwrap();
}

#[test]
fn a_thousand_calls_at_once_are_put_through_whatever_directory_it_is() {
    const CALLS: u16 = 1000;
    for mode in [0o700, 0o755, 0o777] {
        let directory = tempfile::tempdir().unwrap();
        let mut fabric = fabric();
        let (directory, cid) = add(&mut fabric, directory.path(), 0, mode);
        let listener = UnixListener::bind(directory.join("vm0.sock_80")).unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut guest = attach(&mut fabric, &directory, cid);
        let buffer = guest.buffer(4096);
        let (mut called, mut renewed, mut accepted) = (0, 0, 0);
        turn_until(&mut fabric, "all are put through", |_| {
            let in_ring = called - guest.given_back(TX);
            for _ in 0..(RING - in_ring).min(CALLS - called) {
                dial(&mut guest, cid, 1000 + u32::from(called), 80);
                called += 1;
            }
            let taken = guest.given_back(RX) - renewed;
            guest.offer(RX, buffer, taken);
            guest.kick(RX);
            renewed += taken;
            while listener.accept().is_ok() {
                accepted += 1;
            }
            accepted == CALLS
        });
    }
}
