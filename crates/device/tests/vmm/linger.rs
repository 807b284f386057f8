//! Files of a VMM's whose closing takes as long as their maker likes: TCP sockets that linger, with bytes that their peer does not take.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Duration;

use device::Fabric;

use crate::guest::{quads, request, send};
use crate::{PATIENCE, config, fabric, turn_until};

/// Such a file. It is closed when its peer, the listener, goes.
pub struct Lingering {
    stream: TcpStream,
    _peer: TcpListener,
}

impl Lingering {
    pub fn new() -> Lingering {
        let peer = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut stream = TcpStream::connect(peer.local_addr().unwrap()).unwrap();
        let long = Some(Duration::from_secs(600));
        rustix::net::sockopt::set_socket_linger(&stream, long).unwrap();
        stream.set_nonblocking(true).unwrap();
        while stream.write(&[0; 65536]).is_ok() {}
        Lingering {
            stream,
            _peer: peer,
        }
    }

    pub fn send(&self, vmm: &UnixStream) {
        let file = [self.stream.as_fd()];
        send(vmm, request::SET_VRING_ERR, &quads(&[0]), &file);
    }

    /// Closes the VMM's own descriptor. Returns the connection's port, and its peer.
    pub fn leave(self) -> (u16, TcpListener) {
        (self.stream.local_addr().unwrap().port(), self._peer)
    }
}

/// A TCP connection of this process from this port is being closed by its last user.
pub fn is_closing(port: u16) -> bool {
    let connections = std::fs::read_to_string("/proc/self/net/tcp").unwrap();
    let local = format!(":{port:04X}");
    connections.lines().any(|line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        fields.len() > 3 && fields[1].ends_with(&local) && fields[3] == "04"
    })
}

fn connect(directory: &Path) -> UnixStream {
    UnixStream::connect(directory.join("web.vhost")).unwrap()
}

/// Closes the line on a thread of its own, which has to be done with that although the file lingers.
fn close_line(mut fabric: Fabric) -> Fabric {
    let (done, wait) = channel();
    std::thread::spawn(move || {
        assert!(fabric.close_line("web"));
        done.send(fabric).unwrap();
    });
    let closed = wait.recv_timeout(PATIENCE);
    closed.expect("a line is closed without waiting for its VMM's thread")
}

/// The name and the path are free at once.
fn is_free(mut fabric: Fabric, directory: &Path) {
    fabric.open_line(&config(directory)).unwrap();
    let _vmm = connect(directory);
    turn_until(&mut fabric, "the next VMM is attached", |fabric| {
        fabric.lines()[0].attached
    });
}

/// The VMM's thread closes the file, after the VMM has said this, and the line is closed meanwhile.
fn close_line_after(say: impl FnOnce(&UnixStream, &Lingering)) {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    fabric.open_line(&config(directory.path())).unwrap();
    let (vmm, file) = (connect(directory.path()), Lingering::new());
    say(&vmm, &file);
    let (port, _peer) = file.leave();
    turn_until(&mut fabric, "the VMM's thread closes the file", |_| {
        is_closing(port)
    });
    let fabric = close_line(fabric);
    is_free(fabric, directory.path());
    assert!(is_closing(port));
}

#[test]
fn a_thread_that_closes_a_file_of_its_vmms_for_ever_holds_up_nobody() {
    close_line_after(|vmm, file| file.send(vmm));
}

/// The file is closed with the VMM's socket.
#[test]
fn nor_does_one_that_closes_a_file_that_it_never_received() {
    close_line_after(|vmm, file| {
        send(vmm, 9999, &quads(&[0]), &[]);
        file.send(vmm);
    });
}

/// The file is closed with the socket at which VMMs are accepted.
#[test]
fn nor_does_a_file_of_a_vmm_that_was_never_accepted() {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    fabric.open_line(&config(directory.path())).unwrap();
    let _vmm = connect(directory.path());
    turn_until(&mut fabric, "a VMM is attached", |fabric| {
        fabric.lines()[0].attached
    });
    let (waiting, file) = (connect(directory.path()), Lingering::new());
    file.send(&waiting);
    let (port, _peer) = file.leave();
    let mut fabric = close_line(fabric);
    turn_until(&mut fabric, "the VMM's thread closes the file", |_| {
        is_closing(port)
    });
    is_free(fabric, directory.path());
}
