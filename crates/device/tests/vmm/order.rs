//! VMMs that say what there is to say of a ring in an order of their own.

use std::io::Read;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixListener;

use wire::vsock::Operation;

use crate::guest::{Guest, RX, TX, quads, request, send};
use crate::turns::header;
use crate::{config, fabric, turn_until};

/// A header of three numbers of 32 bits, and where a ring would go on.
const REPLY_LEN: usize = 20;

#[test]
fn a_ring_that_is_kicked_before_it_is_set_up_starts_when_it_is_enabled() {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let config = config(directory.path());
    fabric.open_line(&config).unwrap();
    let mut guest = Guest::connect_and_kick_first(&config.vhost_user);
    turn_until(&mut fabric, "the driver runs", |fabric| {
        fabric.lines()[0].report.up
    });

    // Stopped rings are set up anew.
    let none: [BorrowedFd<'_>; 0] = [];
    for index in [RX, TX] {
        let ring = quads(&[index as u64]);
        send(&guest.vmm, request::GET_VRING_BASE, &ring, &none);
    }
    let mut replies = Vec::new();
    guest.vmm.set_nonblocking(true).unwrap();
    turn_until(&mut fabric, "the rings are stopped", |_| {
        let _ = (&guest.vmm).take(64).read_to_end(&mut replies);
        replies.len() == 2 * REPLY_LEN
    });
    guest.start_kick_first();

    let _listener = UnixListener::bind(directory.path().join("web.sock_80")).unwrap();
    let buffer = guest.buffer(4096);
    guest.offer(RX, buffer, 1);
    guest.kick(RX);
    let dial = guest.packet(&header(Operation::Request, 80, 0));
    guest.offer(TX, dial, 1);
    guest.kick(TX);
    turn_until(&mut fabric, "the guest is answered", |_| {
        guest.given_back(RX) > 0
    });
    assert_eq!(fabric.lines()[0].last_fault, None);
}
