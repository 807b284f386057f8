use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::channel;
use std::time::Instant;

use policy::{Address, Policy, Rule};
use vsock::Limits;

use super::*;
use crate::{HybridConfig, LineConfig};

/// Programs that have yet to name a callee keep out no caller that need not name one.
#[test]
fn a_published_port_needs_no_place_of_the_host_socket() {
    let directory = tempfile::tempdir().unwrap();
    let host = directory.path().join("web.host");
    let mut fabric = Fabric::new(Limits::default(), 1007, Box::new(|_| false)).unwrap();
    let policy = Policy::new(vec![Rule::allow_any()]);
    fabric.set_policy(Arc::new(policy), Vec::new(), false);
    let config = HybridConfig {
        address: Address::new("web", 3),
        limits: Limits::default(),
        path: directory.path().join("web"),
        host: host.clone(),
    };
    fabric.open_hybrid_line(&config).unwrap();
    let _ = fabric.all_done().recv();
    let id = fabric.line_named("web").unwrap();
    let own = rustix::process::geteuid().as_raw();
    fabric.line(id).unwrap().handshakes.fill(own);

    let mut program = UnixStream::connect(&host).unwrap();
    let (sender, outcomes) = channel();
    let (_caller, socket) = UnixStream::pair().unwrap();
    socket.set_nonblocking(true).unwrap();
    let call = PublishedCall {
        name: "door".into(),
        peer: None,
        outsider: vsock::Outsider::default(),
        vm: "web".to_owned(),
        to: PublishedTo::Port(80),
        answer: CallAnswer::new(move |outcome| sender.send(outcome).unwrap()),
        socket: socket.into(),
        socket_type: SocketType::Stream,
        cut: None,
        peer_is_ours: false,
        is_published: Arc::new(true.into()),
    };
    fabric.dial_guest(call, Box::new(()));
    let deadline = Instant::now() + Duration::from_secs(20);
    let outcome = loop {
        match outcomes.try_recv() {
            Ok(outcome) => break outcome,
            Err(_) => fabric.turn(Some(Duration::from_millis(1))).unwrap(),
        }
        assert!(Instant::now() < deadline, "no outcome");
    };
    assert!(
        !matches!(outcome, Err(Reason::CircuitLimit | Reason::HostFailed)),
        "{outcome:?}"
    );
    program.set_nonblocking(true).unwrap();
    let mut words = Vec::new();
    while program
        .read_to_end(&mut words)
        .is_err_and(|error| error.kind() == std::io::ErrorKind::WouldBlock)
    {
        fabric.turn(Some(Duration::from_millis(1))).unwrap();
        assert!(Instant::now() < deadline, "the program is not answered");
    }
    let words = String::from_utf8(words).unwrap();
    assert!(words.contains(crate::handshakes::FULL), "{words}");
}

/// The log names the socket where the VMM belongs; the VMM gets the answer of every program that asks for nothing.
#[test]
fn a_vmm_at_the_socket_of_programs_is_sent_to_its_own() {
    let directory = tempfile::tempdir().unwrap();
    let [host, vhost_user] = ["web.sock", "web.vhost"].map(|name| directory.path().join(name));
    let mut fabric = Fabric::new(Limits::default(), 1007, Box::new(|_| false)).unwrap();
    let config = LineConfig {
        address: Address::new("web", 3),
        limits: Limits::default(),
        vhost_user: vhost_user.clone(),
        host: host.clone(),
    };
    fabric.open_line(&config).unwrap();
    let id = fabric.line_named("web").unwrap();
    assert_eq!(
        fabric.line(id).unwrap().wrong_socket(),
        format!(
            "a VMM speaks vhost-user at web's socket for programs ({}): it belongs at {}",
            host.display(),
            vhost_user.display()
        )
    );

    let mut vmm = UnixStream::connect(&host).unwrap();
    vmm.set_nonblocking(true).unwrap();
    vmm.write_all(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0])
        .unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    let mut words = Vec::new();
    while vmm.read_to_end(&mut words).is_err() {
        fabric.turn(Some(Duration::from_millis(1))).unwrap();
        assert!(Instant::now() < deadline, "no answer");
    }
    assert_eq!(words, b"ERR expected \"CONNECT <port>\"\n");
}
