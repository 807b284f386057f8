//! What the tests share.

use std::path::Path;
use std::time::{Duration, Instant};

use bench::daemon::Daemon;
use bench::guest::{Connection, GuestConfig, Received, VirtualGuest, drive};

/// How long anything may take. Nothing here waits that long unless it is broken.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A daemon with the VMs `web` (3), `db` (4) and `ci` (5), of which web may call db and ci, and db may call web.
pub fn daemon() -> Daemon {
    let allow = [
        "--allow",
        "from=web,to=db,port=*",
        "--allow",
        "from=web,to=ci,port=*",
        "--allow",
        "from=db,to=web,port=*",
    ];
    let vms = [("web", 3), ("db", 4), ("ci", 5)];
    let program = Path::new(env!("CARGO_BIN_EXE_ringdown-under-test"));
    let daemon = Daemon::start(program, &vms, &allow).expect("the daemon starts");
    settle(&daemon);
    daemon
}

/// A daemon may still open descriptors when it has said that it is ready: waits until a guest's visit changes nothing.
fn settle(daemon: &Daemon) {
    let mut before = 0;
    for visits in 1.. {
        guest(daemon, "ci").disconnect();
        wait_until("the end of the visit", || {
            daemon.log().matches("VMM disconnected").count() == visits
        });
        let after = daemon.descriptor_count();
        if after == before {
            return;
        }
        before = after;
    }
}

/// A guest of today's Linux.
pub fn guest(daemon: &Daemon, name: &str) -> VirtualGuest {
    guest_with(daemon, name, GuestConfig::default())
}

pub fn guest_with(daemon: &Daemon, name: &str, config: GuestConfig) -> VirtualGuest {
    VirtualGuest::attach_with(&daemon.vhost_socket(name), config).expect("the guest attaches")
}

/// Bytes that are different everywhere, so that any loss, double or exchange shows.
pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// The device has done nothing that a device never does.
pub fn assert_no_violations(guests: &[&VirtualGuest]) {
    for guest in guests {
        assert_eq!(guest.violations(), &[] as &[String], "CID {}", guest.cid());
    }
}

/// Waits until a condition of something else than a guest holds.
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < until, "it never came: {what}");
        std::thread::yield_now();
    }
}

/// Services guests until a condition holds.
pub fn wait_for(
    what: &str,
    guests: &mut [&mut VirtualGuest],
    mut holds: impl FnMut(&mut [&mut VirtualGuest]) -> bool,
) {
    let held = drive(guests, PATIENCE, |guests| holds(guests).then_some(()));
    assert!(held.is_ok(), "it never came: {what}");
}

/// Dials from the first guest to a listener of the second. Returns both ends.
pub fn connect(
    caller: &mut VirtualGuest,
    callee: &mut VirtualGuest,
    port: u32,
) -> (Connection, Connection) {
    let socket_type = wire::vsock::SocketType::Stream;
    connect_with(caller, callee, port, socket_type)
}

pub fn connect_with(
    caller: &mut VirtualGuest,
    callee: &mut VirtualGuest,
    port: u32,
    socket_type: wire::vsock::SocketType,
) -> (Connection, Connection) {
    let near = caller.dial(callee.cid(), port, socket_type);
    let far = drive(&mut [caller, callee], PATIENCE, |guests| {
        let far = guests[1].try_accept(port)?;
        Some(far)
    })
    .expect("the callee gets the call");
    wait_for("the answer", &mut [caller, callee], |guests| {
        guests[0].state(near) == bench::guest::State::Connected
    });
    (near, far)
}

/// Moves everything in `bytes` from one guest to the other, reading as it arrives.
pub fn transfer(
    from: &mut VirtualGuest,
    sender: Connection,
    to: &mut VirtualGuest,
    receiver: Connection,
    bytes: &[u8],
) {
    let mut rest = bytes;
    let mut arrived = Vec::new();
    wait_for("all of it", &mut [from, to], |guests| {
        let sent = guests[0].try_send(sender, rest).expect("it can be sent");
        rest = &rest[sent..];
        while let Received::Bytes(_) = guests[1].try_receive(receiver, usize::MAX, &mut arrived) {}
        arrived.len() >= bytes.len()
    });
    assert!(arrived == bytes, "what arrived is not what was sent");
}

/// Reads to the end of data on a guest, while others are serviced too.
pub fn read_to_end(
    guests: &mut [&mut VirtualGuest],
    index: usize,
    connection: Connection,
) -> (Vec<u8>, Received) {
    let mut bytes = Vec::new();
    let ended = drive(guests, PATIENCE, |guests| {
        loop {
            match guests[index].try_receive(connection, usize::MAX, &mut bytes) {
                Received::Bytes(_) => {}
                Received::Nothing => return None,
                other => return Some(other),
            }
        }
    });
    (bytes, ended.unwrap_or(Received::Nothing))
}
