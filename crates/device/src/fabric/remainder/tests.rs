use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use policy::{Address, Policy, Rule};
use rustix::net::sockopt::{set_tcp_user_timeout, tcp_user_timeout};
use vsock::Limits;
use wire::vsock::SocketType;

use super::*;
use crate::{CallAnswer, HybridConfig, PublishedCall, PublishedTo};

fn turn_until(fabric: &mut Fabric, what: &str, mut happened: impl FnMut(&mut Fabric) -> bool) {
    let until = Instant::now() + Duration::from_secs(60);
    while !happened(fabric) {
        assert!(Instant::now() < until, "{what}");
        fabric.turn(Some(Duration::from_millis(5))).unwrap();
    }
}

/// A caller of a published port of `web`, and the VMM's end of its connection.
fn called(fabric: &mut Fabric, directory: &std::path::Path) -> (TcpStream, UnixStream) {
    let policy = Policy::new(vec![Rule::allow_any()]);
    fabric.set_policy(Arc::new(policy), Vec::new(), false);
    let config = HybridConfig {
        address: Address::new("web", 3),
        limits: Limits::default(),
        path: directory.join("web"),
        host: directory.join("web.host"),
    };
    let vmm = UnixListener::bind(&config.path).unwrap();
    vmm.set_nonblocking(true).unwrap();
    fabric.open_hybrid_line(&config).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let caller = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let socket = listener.accept().unwrap().0;
    socket.set_nonblocking(true).unwrap();
    let call = PublishedCall {
        name: "door".into(),
        peer: None,
        outsider: vsock::Outsider::default(),
        vm: "web".to_owned(),
        to: PublishedTo::Port(80),
        answer: CallAnswer::new(|_| ()),
        socket: socket.into(),
        socket_type: SocketType::Stream,
        cut: None,
        peer_is_ours: false,
        is_published: Arc::new(true.into()),
    };
    fabric.dial_guest(call, Box::new(()));
    let mut accepted = None;
    turn_until(fabric, "the VMM is called", |_| {
        accepted = vmm.accept().ok();
        accepted.is_some()
    });
    let mut stream = accepted.unwrap().0;
    stream.set_nonblocking(true).unwrap();
    turn_until(fabric, "the VMM knows the port", |_| {
        stream.read(&mut [0; 32]).is_ok()
    });
    stream.write_all(b"OK 1\n").unwrap();
    (caller, stream)
}

/// Both ends of a published connection have ended, and the caller takes nothing of what is left. With another descriptor of our socket.
fn untaken(fabric: &mut Fabric, directory: &std::path::Path) -> (TcpStream, UnixStream, OwnedFd) {
    let (mut caller, mut vmm) = called(fabric, directory);
    // As much as the kernel takes of it, beyond what the caller has room for.
    let mut silent = 0;
    while silent < 100 {
        match vmm.write(&[1; 65536]) {
            Ok(_) => silent = 0,
            Err(_) => silent += 1,
        }
        fabric.turn(Some(Duration::ZERO)).unwrap();
    }
    caller.shutdown(Shutdown::Write).unwrap();
    vmm.shutdown(Shutdown::Write).unwrap();
    // What is not yet in the socket goes there as soon as some of it is read.
    caller.set_nonblocking(true).unwrap();
    let mut room = vec![0; 65536];
    turn_until(fabric, "both have ended", |fabric| {
        let mut circuits = fabric.circuits.iter().flatten();
        if circuits.any(|circuit| circuit.remainder.is_some()) {
            return true;
        }
        let _ = caller.read(&mut room);
        false
    });
    for _ in 0..10 {
        fabric.turn(Some(Duration::ZERO)).unwrap();
    }
    assert_eq!(fabric.lines()[0].report.circuits, 1);
    caller.set_nonblocking(false).unwrap();
    let mut circuits = fabric.circuits.iter().flatten();
    let remainder = circuits.find_map(|circuit| circuit.remainder.as_ref());
    let ours = remainder.unwrap().sockets[0].0.try_clone().unwrap();
    (caller, vmm, ours)
}

#[test]
fn a_tcp_peer_without_room_for_a_minute_is_reset() {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = Fabric::new(Limits::default(), 1007, Box::new(|_| false)).unwrap();
    let (mut caller, _vmm, ours) = untaken(&mut fabric, directory.path());
    assert_eq!(tcp_user_timeout(&ours).unwrap(), 60_000);
    set_tcp_user_timeout(&ours, 1).unwrap();
    drop(ours);
    turn_until(&mut fabric, "the place is free", |fabric| {
        fabric.lines()[0].report.circuits == 0
    });
    let ended = fabric.lines()[0].report.counters.ended;
    assert_eq!(ended[Reason::NotTaken.index()], 1);
    let error = std::io::copy(&mut caller, &mut std::io::sink()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

#[test]
fn what_is_left_goes_out_with_its_end_although_the_vm_is_removed_and_the_daemon_ends() {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = Fabric::new(Limits::default(), 1007, Box::new(|_| false)).unwrap();
    let (mut caller, _vmm, ours) = untaken(&mut fabric, directory.path());
    drop(ours);
    assert!(fabric.close_line("web"));
    for _ in 0..10 {
        fabric.turn(Some(Duration::ZERO)).unwrap();
    }
    drop(fabric);
    std::io::copy(&mut caller, &mut std::io::sink()).expect("an end");
}
