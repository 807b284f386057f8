//! Sockets of a process that was noted to have ended: this one, so that the test has a program to itself.

#![allow(clippy::unwrap_used)] // This is a test.

use std::os::unix::net::{UnixDatagram, UnixListener, UnixStream};
use std::path::Path;

use sys::links::{Entry, Fuse};
use sys::socket_file::Occupant;

fn is_stale(path: &Path) -> bool {
    let entry = Entry::at(path, Fuse::Refused).unwrap();
    matches!(Occupant::of(&entry).unwrap(), Occupant::Stale(_))
}

#[test]
fn listeners_of_a_process_that_was_noted_are_stale() {
    let directory = tempfile::tempdir().unwrap();
    let at = |name: &str| directory.path().join(name);
    let _listener = UnixListener::bind(at("own")).unwrap();
    let full = UnixListener::bind(at("full")).unwrap();
    rustix::net::listen(&full, 0).unwrap();
    let _caller = UnixStream::connect(at("full")).unwrap();
    let _datagrams = UnixDatagram::bind(at("datagrams")).unwrap();
    let names = ["own", "full", "datagrams"];
    let stale = || names.map(|name| is_stale(&at(name)));
    assert_eq!(stale(), [false; 3]);
    // Another process than the one that listens.
    sys::ended::note(1);
    assert!(!is_stale(&at("own")));
    sys::ended::note(i32::try_from(std::process::id()).unwrap());
    assert_eq!(stale(), [true, true, false]);
}
