//! Programs of the host that send descriptors with their data.

use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};

use config::{PublishListen, ServiceTarget};
use rustix::io::Errno;
use rustix::net::SendFlags;

use crate::publish::{publish, set};
use crate::support::*;

fn send_descriptor(socket: &UnixStream) -> Result<usize, Errno> {
    let file = std::io::stdin();
    sys::descriptors::send(socket, b"data", &[file.as_fd()], SendFlags::empty())
}

/// What a send of a descriptor is to come to on this system: it fails since Linux 6.16.
fn refused() -> Result<usize, Errno> {
    let (one, _other) = UnixStream::pair().expect("two sockets");
    match sys::peer::refuse_descriptors(one.as_fd()).expect("a UNIX socket") {
        true => Err(Errno::PERM),
        false => Ok(4),
    }
}

#[test]
fn callers_of_a_published_socket_cannot_send_descriptors() {
    let stand = Stand::new();
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("web.sock");
    let listen = PublishListen::Unix {
        path: path.clone(),
        mode: 0o600,
    };
    set(&stand, vec![publish(listen)]);
    let client = UnixStream::connect(&path).expect("connected");
    assert_eq!(send_descriptor(&client), refused(), "as soon as connected");
    let call = stand.exchange.next_call();
    assert_eq!(send_descriptor(&client), refused(), "once accepted");
    let guest: UnixStream = blocking(call.socket);
    write(&client, b"hello");
    if refused().is_err() {
        assert_eq!(read_some(&guest, 5), b"hello");
    }
}

#[test]
fn a_unix_service_cannot_send_descriptors() {
    let stand = Stand::new();
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("service.sock");
    let listener = UnixListener::bind(&path).expect("a listener");
    let id = stand.offer(service(ServiceTarget::Unix(path)));
    let (_guest, _hold) = stand.stream(id).expect("connected");
    let (server, _) = listener.accept().expect("a call");
    assert_eq!(send_descriptor(&server), refused());
}

/// The program is this test itself, which finds itself started as a service.
#[test]
fn a_program_that_is_started_cannot_send_descriptors() {
    let refused_words = format!("send: {:?};", refused());
    if std::env::var_os("RINGDOWN_SERVICE").is_some() {
        let circuit = std::io::stdin().as_fd().try_clone_to_owned();
        let circuit = UnixStream::from(circuit.expect("a circuit"));
        let sent = send_descriptor(&circuit);
        return write(&circuit, format!("send: {sent:?};").as_bytes());
    }
    let stand = Stand::new();
    let own = std::env::current_exe().expect("a path");
    let name = "descriptors::a_program_that_is_started_cannot_send_descriptors";
    let words = [own.to_str().expect("text"), "--exact", name, "--nocapture"];
    let command = ServiceTarget::Command(words.map(str::to_owned).to_vec());
    let id = stand.offer(service(command));
    let (guest, _hold) = stand.stream(id).expect("started");
    let said = String::from_utf8(read_all(&guest)).expect("text");
    assert!(said.contains(&refused_words), "{said}");
}
