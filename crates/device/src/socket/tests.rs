//! Descriptors that a program sends with its data.

use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{SendFlags, SocketAddrUnix, acceptfrom, bind, connect, send};

use super::*;
use crate::connect::{Callee, Dial};

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
        let mut callee = Callee::at(path, "web".to_owned());
        let Dial::Reached(dialled) = callee.dial(of_guest) else {
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

/// What another user may exchange for a link leads to no other directory: neither when the socket is made nor when it is removed.
#[test]
fn the_socket_file_stays_in_its_directory_and_goes_alone() {
    use std::os::unix::fs::symlink;
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    for name in ["shared/own", "other"] {
        fs::create_dir_all(path(name)).unwrap();
    }
    fs::set_permissions(path("shared"), fs::Permissions::from_mode(0o777)).unwrap();
    let own = path("shared/own/socket");
    let listen = || listen_for(None, &own, SocketType::STREAM);
    let listener = listen().unwrap();
    assert!(program(&own, SocketType::STREAM).as_raw_fd() > 0);
    fs::rename(path("shared/own"), path("shared/moved")).unwrap();
    symlink(path("other"), path("shared/own")).unwrap();
    let refused = listen().unwrap_err();
    assert_eq!(refused.raw_os_error(), None, "{refused}");
    assert!(!path("other/socket").exists());
    // Another socket, and a stale one, of the same name.
    drop(UnixListener::bind(path("other/socket")).unwrap());
    assert!(listen().is_err());
    drop(listener);
    assert!(path("other/socket").exists());
    assert!(!path("shared/moved/socket").exists());
    // Where the name has become another file's, that one stays.
    fs::remove_file(path("shared/own")).unwrap();
    fs::rename(path("shared/moved"), path("shared/own")).unwrap();
    let listener = listen().unwrap();
    fs::rename(&own, path("shared/own/before")).unwrap();
    fs::write(&own, b"").unwrap();
    assert!(listener.file.set_mode(0o666).is_err());
    drop(listener);
    assert!(own.exists());
}

#[test]
fn the_file_of_a_socket_goes_and_that_of_another_stays() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("s");
    for is_replaced in [false, true] {
        let Listener { socket, mut file } = listen_for_vmm(&path).unwrap();
        file.stay();
        let another = is_replaced.then(|| {
            std::fs::remove_file(&path).unwrap();
            listen_for_vmm(&path).unwrap()
        });
        remove_file_of(socket, &path).unwrap();
        assert_eq!(path.exists(), another.is_some());
    }
}
