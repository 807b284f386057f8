//! VMMs that say what there is to say of a ring in an order of their own.

use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;

use device::Fabric;
use wire::vsock::Operation;

use crate::guest::{Guest, RX, TX, quads, request, send};
use crate::turns::header;
use crate::{config, fabric, turn_until};

/// vhost-user, "Protocol features".
const PROTOCOL_FEATURE_RESET_DEVICE: u64 = 1 << 13;

/// The VMM reads the guest's CID.
const PROTOCOL_FEATURE_CONFIG: u64 = 1 << 9;

/// Runs a scene with a VMM that has connected and set up no ring.
fn with_guest(scene: impl FnOnce(&mut Fabric, &mut Guest, &Path)) {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let config = config(directory.path());
    fabric.open_line(&config).unwrap();
    let mut guest = Guest::connect_without_rings(&config.vhost_user);
    scene(&mut fabric, &mut guest, directory.path());
}

fn runs(fabric: &mut Fabric) {
    turn_until(fabric, "the driver runs", |fabric| {
        fabric.lines()[0].report.up
    });
}

/// The guest calls and is answered, so that both rings work.
fn calls(fabric: &mut Fabric, guest: &mut Guest, directory: &Path) {
    let _listener = UnixListener::bind(directory.join("web.sock_80")).unwrap();
    let buffer = guest.buffer(4096);
    guest.offer(RX, buffer, 1);
    guest.kick(RX);
    let dial = guest.packet(&header(Operation::Request, 80, 0));
    guest.offer(TX, dial, 1);
    guest.kick(TX);
    turn_until(fabric, "the guest is answered", |_| {
        guest.given_back(RX) > 0
    });
    assert_eq!(fabric.lines()[0].last_fault, None);
}

#[test]
fn a_ring_that_is_kicked_before_it_is_set_up_starts_when_it_is_enabled() {
    with_guest(|fabric, guest, directory| {
        guest.start_kick_first();
        runs(fabric);

        // Stopped rings are set up anew.
        guest.stop_rings(fabric);
        guest.start_kick_first();
        calls(fabric, guest, directory);
    });
}

#[test]
fn rings_of_a_device_that_was_reset_are_set_up_anew() {
    with_guest(|fabric, guest, directory| {
        let none: [BorrowedFd<'_>; 0] = [];
        let features = quads(&[PROTOCOL_FEATURE_RESET_DEVICE | PROTOCOL_FEATURE_CONFIG]);
        send(&guest.vmm, request::SET_PROTOCOL_FEATURES, &features, &none);
        guest.start_kick_first();
        runs(fabric);
        send(&guest.vmm, request::RESET_DEVICE, &[], &none);
        turn_until(fabric, "the driver is gone", |fabric| {
            !fabric.lines()[0].report.up
        });
        guest.renew_rings();
        guest.start_kick_first();
        runs(fabric);
        calls(fabric, guest, directory);
    });
}

#[test]
fn the_last_kick_is_the_one_that_counts() {
    with_guest(|fabric, guest, directory| {
        for index in [RX, TX] {
            guest.send_kick(index);
            guest.set_up(index);
        }
        guest.renew_kicks();
        for index in [RX, TX] {
            guest.send_kick(index);
        }
        guest.enable();
        runs(fabric);
        calls(fabric, guest, directory);
    });
}

#[test]
fn a_ring_that_is_enabled_first_starts_when_it_is_set_up() {
    with_guest(|fabric, guest, directory| {
        guest.enable();
        for index in [RX, TX] {
            guest.send_kick(index);
            guest.set_up(index);
        }
        runs(fabric);
        calls(fabric, guest, directory);
    });
}
