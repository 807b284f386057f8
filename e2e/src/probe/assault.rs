//! What root in a guest may do with the kernel's own AF_VSOCK sockets: too many, too fast, too slow, too odd.
//!
//! `probe assault NAME DIRECTORY` does it, makes the file `done` in the directory, keeps what it holds until the file `judged` is there, and ends.
//! What becomes of its own sockets does not matter, as long as others are not harmed: the scenario judges that.

use std::os::fd::OwnedFd;
use std::path::Path;

use anyhow::{Result, bail, ensure};
use nix::sys::socket::SockType;
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, Shutdown};

use super::socket;
use crate::hostile::{
    BYSTANDER_CID, CHATTY_PORT, ECHO_PORT, FULL_PORT, MESSAGES_PORT, SILENT_PORT,
};

/// The host as every guest sees it.
const HOST: u32 = 2;

/// Ports from here on have no listener.
const NOBODY: u32 = 100_000;

/// Does one of the assaults and holds what it has until it was judged.
pub(super) fn main(name: &str, directory: &Path) -> Result<()> {
    let held = match name {
        "connect-and-close" => connect_and_close(1500)?,
        "half-open" => half_open()?,
        "dials-to-nowhere" => nowhere()?,
        "thousands-of-sockets" => thousands()?,
        "never-reading" => never_reading()?,
        "writing-to-the-deaf" => writing_to_the_deaf()?,
        "shutdowns" => shutdowns()?,
        "messages-to-the-deaf" => messages_to_the_deaf()?,
        "the-same-port-again" => same_port()?,
        "flood-of-the-bystander" => flood_of_the_bystander()?,
        other => bail!("there is no assault {other}"),
    };
    std::fs::write(directory.join("done"), "")?;
    super::wait_for_file(&directory.join("judged"));
    drop(held);
    Ok(())
}

type Held = Vec<OwnedFd>;

fn stream(port: u32) -> Result<OwnedFd> {
    Ok(socket::connect(HOST, port, SockType::Stream)?)
}

fn connect_and_close(count: usize) -> Result<Held> {
    for _ in 0..count {
        drop(stream(ECHO_PORT)?);
    }
    Ok(Vec::new())
}

/// Dials that are neither accepted nor refused.
fn half_open() -> Result<Held> {
    let dial = |_| socket::dial(HOST, FULL_PORT, SockType::Stream, None).ok();
    let held: Held = (0..3000).filter_map(dial).collect();
    ensure!(held.len() == 3000, "the guest itself refused");
    Ok(held)
}

fn nowhere() -> Result<Held> {
    for round in 0..300 {
        // 1 is the guest itself, and its own kernel's affair.
        for cid in [0, 99, 1 << 31, u32::MAX - 1, HOST] {
            let refused = socket::connect(cid, NOBODY + round, SockType::Stream);
            ensure!(refused.is_err(), "CID {cid} answers");
        }
    }
    Ok(Vec::new())
}

fn thousands() -> Result<Held> {
    (0..2000).map(|_| stream(SILENT_PORT)).collect()
}

fn never_reading() -> Result<Held> {
    (0..50).map(|_| stream(CHATTY_PORT)).collect()
}

/// Writes as much as is taken.
fn fill(socket: &OwnedFd, bytes: &[u8]) -> Result<usize> {
    let mut taken = 0;
    loop {
        match rustix::net::send(socket, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
            Ok(count) => taken += count,
            Err(Errno::AGAIN | Errno::NOBUFS | Errno::NOMEM) => return Ok(taken),
            Err(error) => return Err(error.into()),
        }
        ensure!(taken < 64 << 20, "{taken} bytes went somewhere");
    }
}

fn writing_to_the_deaf() -> Result<Held> {
    let bytes = vec![b'x'; 64 * 1024];
    let held: Held = (0..50)
        .map(|_| stream(SILENT_PORT))
        .collect::<Result<_>>()?;
    for socket in &held {
        fill(socket, &bytes)?;
    }
    Ok(held)
}

fn shutdowns() -> Result<Held> {
    let orders: [&[Shutdown]; 5] = [
        &[Shutdown::Read],
        &[Shutdown::Write, Shutdown::Write, Shutdown::Read],
        &[Shutdown::Read, Shutdown::Write],
        &[Shutdown::Both, Shutdown::Both],
        &[Shutdown::Write],
    ];
    for round in 0..200 {
        for order in orders {
            let socket = stream(if round % 2 == 0 {
                ECHO_PORT
            } else {
                CHATTY_PORT
            })?;
            // Whatever a call says, the next one follows.
            let _ = rustix::net::send(&socket, b"hello", SendFlags::NOSIGNAL);
            for how in order {
                let _ = rustix::net::shutdown(&socket, *how);
                let _ = rustix::net::send(&socket, b"more", SendFlags::NOSIGNAL);
                let _ = rustix::net::recv(&socket, &mut [0; 16][..], RecvFlags::DONTWAIT);
            }
        }
    }
    Ok(Vec::new())
}

/// Messages of a byte and of all the credit, towards a program that reads none.
fn messages_to_the_deaf() -> Result<Held> {
    let mut held = Vec::new();
    for len in [1, 1000, 60_000] {
        let socket = socket::connect(HOST, MESSAGES_PORT, SockType::SeqPacket)?;
        // Its circuit may be ended for it.
        let _ = fill(&socket, &vec![b'x'; len]);
        let _ = rustix::net::send(
            &socket,
            &vec![b'x'; 4 << 20],
            SendFlags::DONTWAIT | SendFlags::NOSIGNAL,
        );
        held.push(socket);
    }
    Ok(held)
}

/// The same pair of ports again while the old circuit is still ending.
fn same_port() -> Result<Held> {
    let mut dialled = 0;
    for _ in 0..3000 {
        // The kernel may refuse the port as long as it holds it.
        if let Ok(socket) = socket::dial(HOST, ECHO_PORT, SockType::Stream, Some(5555)) {
            let _ = rustix::net::send(&socket, b"hello", SendFlags::NOSIGNAL);
            dialled += 1;
        }
    }
    ensure!(dialled > 10, "the kernel let only {dialled} dials out");
    Ok(Vec::new())
}

fn flood_of_the_bystander() -> Result<Held> {
    let mut held = Vec::new();
    for round in 0..1000 {
        let port = if round % 2 == 0 { ECHO_PORT } else { NOBODY };
        if let Ok(socket) = socket::dial(BYSTANDER_CID, port, SockType::Stream, None) {
            held.push(socket);
        }
    }
    Ok(held)
}
