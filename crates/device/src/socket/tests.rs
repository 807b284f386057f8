//! Descriptors that a program sends with its data.

use std::os::unix::net::UnixStream;

use rustix::net::{SendFlags, acceptfrom, send};

use super::*;
use crate::connect::{Dial, dial};

fn send_descriptor(socket: impl AsFd) -> Result<usize, Errno> {
    let file = std::io::stdin();
    sys::descriptors::send(socket, b"data", &[file.as_fd()], SendFlags::empty())
}

/// What a send of a descriptor is to come to on this system: it fails since Linux 6.16.
fn refused() -> Result<usize, Errno> {
    let (one, _other) = UnixStream::pair().unwrap();
    match refuse_descriptors(one.as_fd()).unwrap() {
        true => Err(Errno::PERM),
        false => Ok(4),
    }
}

fn program(path: &Path, socket_type: SocketType) -> OwnedFd {
    let program = any_socket(socket_type).unwrap();
    connect(&program, &SocketAddrUnix::new(path).unwrap()).unwrap();
    program
}

#[test]
fn callers_of_a_host_socket_cannot_send_descriptors() {
    let directory = tempfile::tempdir().unwrap();
    for socket_type in [SocketType::STREAM, SocketType::SEQPACKET] {
        let path = directory.path().join(format!("{socket_type:?}"));
        let listener = listen_for(None, &path, socket_type).unwrap();
        let waiting = program(&path, socket_type);
        assert_eq!(
            send_descriptor(&waiting),
            refused(),
            "before it is accepted"
        );
        let accepted = acceptfrom(&listener.socket).unwrap().0;
        assert_eq!(send_descriptor(&waiting), refused(), "afterwards");
        assert_eq!(send(&waiting, b"data", SendFlags::NOSIGNAL), Ok(4));
        drop(accepted);
    }
}

#[test]
fn a_program_that_a_guest_dials_cannot_send_descriptors() {
    let directory = tempfile::tempdir().unwrap();
    let types = [
        (wire::vsock::SocketType::Stream, SocketType::STREAM),
        (wire::vsock::SocketType::SeqPacket, SocketType::SEQPACKET),
    ];
    for (of_guest, socket_type) in types {
        let path = directory.path().join(format!("{socket_type:?}"));
        let listener = any_socket(socket_type).unwrap();
        bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
        listen(&listener, 1).unwrap();
        let Dial::Reached(dialled) = dial(&path, of_guest, "web") else {
            panic!("it listens");
        };
        let program = acceptfrom(&listener).unwrap().0;
        assert_eq!(send_descriptor(&program), refused());
        assert_eq!(send(&program, b"data", SendFlags::NOSIGNAL), Ok(4));
        drop(dialled);
    }
}

#[test]
fn a_vmm_can_send_descriptors() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.vhost");
    let _listener = listen_for_vmm(&path).unwrap();
    assert_eq!(send_descriptor(program(&path, SocketType::STREAM)), Ok(4));
}
