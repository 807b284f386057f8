//! VMMs that speak vhost-user and mean harm.

#![allow(clippy::unwrap_used)] // This is a test.

mod guest;
mod turns;
mod unmapping;

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use device::{Fabric, LineConfig};
use switch::{Address, Limits};

use crate::guest::{quads, request, send};

const PATIENCE: Duration = Duration::from_secs(60);

fn fabric() -> Fabric {
    Fabric::new(Limits::default(), 1007, Box::new(|_| false)).unwrap()
}

fn config(directory: &Path) -> LineConfig {
    config_of(directory, "web", 3)
}

fn config_of(directory: &Path, name: &str, cid: u32) -> LineConfig {
    LineConfig {
        address: Address::new(name, cid),
        limits: Limits::default(),
        vhost_user: directory.join(format!("{name}.vhost")),
        host: directory.join(format!("{name}.sock")),
    }
}

fn turn_until(fabric: &mut Fabric, what: &str, mut happened: impl FnMut(&mut Fabric) -> bool) {
    let until = Instant::now() + PATIENCE;
    while !happened(fabric) {
        assert!(Instant::now() < until, "{what}");
        fabric.turn(Some(Duration::from_millis(5))).unwrap();
    }
}

/// A TCP connection of this process from this port is being closed by whoever had it last.
fn is_closing(port: u16) -> bool {
    let connections = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let local = format!(":{port:04X}");
    connections.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields.len() > 3 && fields[1].ends_with(&local) && fields[3] == "04"
    })
}

/// A file whose closing takes as long as its maker likes: a TCP socket that lingers, with bytes that its peer does not take.
#[test]
fn a_thread_that_closes_a_file_of_its_vmms_for_ever_holds_up_nobody() {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    fabric.open_line(&config(directory.path())).unwrap();

    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stream = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let port = stream.local_addr().unwrap().port();
    rustix::net::sockopt::set_socket_linger(&stream, Some(Duration::from_secs(600))).unwrap();
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 65536]).is_ok() {}

    let vmm = UnixStream::connect(directory.path().join("web.vhost")).unwrap();
    send(
        &vmm,
        request::SET_VRING_ERR,
        &quads(&[0]),
        &[stream.as_fd()],
    );
    drop(stream);
    turn_until(&mut fabric, "the VMM's thread closes the socket", |_| {
        is_closing(port)
    });

    let (done, wait) = channel();
    std::thread::spawn(move || {
        assert!(fabric.close_line("web"));
        done.send(fabric).unwrap();
    });
    let closed = wait.recv_timeout(PATIENCE);
    let mut fabric = closed.expect("a line is closed without waiting for its VMM's thread");

    // The name and the path are free at once.
    fabric.open_line(&config(directory.path())).unwrap();
    let _vmm = UnixStream::connect(directory.path().join("web.vhost")).unwrap();
    turn_until(&mut fabric, "the next VMM is attached", |fabric| {
        fabric.lines()[0].attached
    });
    assert!(is_closing(port));
    drop(listener);
}
