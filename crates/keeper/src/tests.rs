#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;
use std::time::Duration;

use super::*;

/// A keeper on a thread of its own.
struct Running {
    directory: tempfile::TempDir,
    thread: Option<JoinHandle<Result<(), HoldError>>>,
}

impl Running {
    fn start() -> Running {
        let directory = tempfile::tempdir().unwrap();
        let holder = Holder::listen(&directory.path().join("keeper")).unwrap();
        let thread = Some(std::thread::spawn(move || holder.run()));
        Running { directory, thread }
    }

    fn path(&self) -> PathBuf {
        self.directory.path().join("keeper")
    }

    fn attach(&self) -> Keeper {
        attach(&self.path())
    }
}

/// The one before may be gone, and the keeper not have seen it yet.
fn attach(path: &Path) -> Keeper {
    loop {
        match Keeper::attach(path) {
            Err(KeeperError::Busy { .. }) => std::thread::yield_now(),
            attached => return attached.unwrap(),
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        while let Err(KeeperError::InUse { .. }) = release(&self.path()) {
            std::thread::yield_now();
        }
        self.thread.take().unwrap().join().unwrap().unwrap();
        assert!(!self.path().exists());
    }
}

fn file(text: &str) -> File {
    let mut file = tempfile::tempfile().unwrap();
    file.write_all(text.as_bytes()).unwrap();
    file
}

#[test]
fn the_next_daemon_gets_what_was_kept_last() {
    let running = Running::start();
    let first = running.attach();
    let (one, two) = (file("one"), file("two"));
    first.put("a", b"old", &[one.as_fd()]).unwrap();
    first.put("b", b"gone", &[one.as_fd()]).unwrap();
    first.put("a", b"new", &[one.as_fd(), two.as_fd()]).unwrap();
    first.drop_item("b");
    drop((first, one, two));

    let second = running.attach();
    assert_eq!(second.untaken(), ["a"]);
    let item = second.take("a").unwrap();
    assert_eq!(item.value, b"new");
    let mut texts = Vec::new();
    for descriptor in item.descriptors {
        let (mut file, mut text) = (File::from(descriptor), String::new());
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        texts.push(text);
    }
    assert_eq!(texts, ["one", "two"]);
    assert!(second.take("a").is_none() && second.untaken().is_empty());
    drop(second);
    // It was taken and not dropped.
    assert_eq!(running.attach().untaken(), ["a"]);
}

#[test]
fn one_daemon_has_it_at_a_time() {
    let running = Running::start();
    let first = running.attach();
    let refused = Keeper::attach(&running.path()).unwrap_err();
    assert!(matches!(refused, KeeperError::Busy { .. }), "{refused}");
    let refused = release(&running.path()).unwrap_err();
    assert!(matches!(refused, KeeperError::InUse { .. }), "{refused}");
    first.put("a", b"1", &[]).unwrap();
    drop(first);
    assert_eq!(running.attach().untaken(), ["a"]);
}

#[test]
fn a_daemon_that_leaves_changes_nothing_any_more() {
    let running = Running::start();
    let first = running.attach();
    first.put("a", b"1", &[]).unwrap();
    first.leave();
    first.put("a", b"2", &[]).unwrap_err();
    first.drop_item("a");
    drop(first);
    assert_eq!(running.attach().take("a").unwrap().value, b"1");
}

#[test]
fn a_second_keeper_is_refused_and_a_dead_ones_place_taken() {
    let running = Running::start();
    let refused = Holder::listen(&running.path()).unwrap_err();
    assert!(matches!(refused, HoldError::InUse { .. }), "{refused}");
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("keeper");
    let holder = Holder::listen(&path).unwrap();
    let moved = directory.path().join("moved");
    std::fs::rename(&path, &moved).unwrap();
    drop(holder);
    std::fs::rename(&moved, &path).unwrap();
    Holder::listen(&path).unwrap();
}

#[test]
fn callers_that_say_nothing_or_nonsense_hold_up_nobody() {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketType, connect, send, socket};
    let running = Running::start();
    let address = SocketAddrUnix::new(running.path()).unwrap();
    let callers: Vec<_> = (0..20)
        .map(|number| {
            let caller = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            connect(&caller, &address).unwrap();
            if number % 2 == 0 {
                // The keeper may have hung up.
                let _ = send(&caller, b"nonsense", rustix::net::SendFlags::NOSIGNAL);
            }
            caller
        })
        .collect();
    running.attach().put("a", b"1", &[]).unwrap();
    drop(callers);
}

/// A TCP socket whose last descriptor takes ten minutes to close, or until its peer, the listener, goes.
fn lingering() -> (TcpStream, TcpListener) {
    let peer = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut stream = TcpStream::connect(peer.local_addr().unwrap()).unwrap();
    let long = Some(Duration::from_secs(600));
    rustix::net::sockopt::set_socket_linger(&stream, long).unwrap();
    stream.set_nonblocking(true).unwrap();
    while stream.write(&[0; 65536]).is_ok() {}
    (stream, peer)
}

#[test]
fn what_takes_for_ever_to_close_holds_up_nobody() {
    use rustix::net::SendFlags;
    let running = Running::start();
    let first = running.attach();
    let mut peers = Vec::new();
    for key in ["replaced", "dropped"] {
        let (vmm, ours) = UnixStream::pair().unwrap();
        first.put(key, b"1", &[ours.as_fd()]).unwrap();
        let (file, peer) = lingering();
        sys::descriptors::send(&vmm, b"x", &[file.as_fd()], SendFlags::empty()).unwrap();
        peers.push(peer);
    }
    first.put("replaced", b"2", &[]).unwrap();
    first.drop_item("dropped");
    drop(first);
    assert_eq!(running.attach().untaken(), ["replaced"]);
    drop(peers);
}

#[test]
fn a_daemon_hears_for_how_long_there_was_none() {
    let keeper = Running::start();
    let first = keeper.attach();
    assert_eq!(first.unattended(), None);
    drop(first);
    std::thread::sleep(Duration::from_millis(20));
    let gone = keeper.attach().unattended();
    // The keeper may see its end late.
    assert!(
        gone.is_some_and(|gone| gone < Duration::from_secs(60)),
        "{gone:?}"
    );
}

#[test]
fn what_is_no_socket_stays_where_a_keeper_is_to_listen() {
    let directory = tempfile::tempdir().unwrap();
    let (file, link) = (directory.path().join("file"), directory.path().join("link"));
    std::fs::write(&file, "precious").unwrap();
    std::os::unix::fs::symlink(&file, &link).unwrap();
    for path in [&file, &link] {
        Holder::listen(path).unwrap_err();
    }
    assert_eq!(std::fs::read_to_string(&link).unwrap(), "precious");
}

#[test]
fn a_keeper_answers_its_daemon_and_another_one_does_not_do_for_it() {
    let running = Running::start();
    let daemon = running.attach();
    daemon.ask().unwrap();
    let moved = running.directory.path().join("moved");
    std::fs::rename(running.path(), &moved).unwrap();
    let another = Holder::listen(&running.path()).unwrap();
    let thread = std::thread::spawn(move || another.run());
    let refused = daemon.ask().unwrap_err();
    assert!(matches!(refused, KeeperError::Ended { .. }), "{refused}");
    while let Err(KeeperError::InUse { .. }) = release(&running.path()) {
        std::thread::yield_now();
    }
    thread.join().unwrap().unwrap();
    std::fs::rename(&moved, running.path()).unwrap();
    daemon.ask().unwrap();
}
