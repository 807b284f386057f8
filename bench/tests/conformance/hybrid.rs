//! A VM whose VMM has a vsock device of its own, and a guest with rings: each calls the other, and sees the other.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use bench::daemon::Daemon;
use bench::guest::{ConnectError, Connection, Received, VirtualGuest, drive};
use bench::host::{accept, read_line};
use wire::vsock::SHUTDOWN_SEND;

use crate::support::{
    PATIENCE, assert_no_violations, guest, pattern, read_to_end, wait_for, wait_until,
};

/// The VMs `web` (3), with rings, and `fc` (9), which is hybrid. `web` may call `fc`; `fc` reaches port 80 of `web` at port 5432
/// of the host.
struct Scene {
    daemon: Daemon,
    directory: tempfile::TempDir,
}

const RULES: &str = "
[[rule]]
from = \"web\"
to = \"fc\"
action = \"allow\"

[[rule]]
from = \"fc\"
to = \"host\"
port = 5432
redirect = \"web:80\"
";

impl Scene {
    fn new() -> Scene {
        let directory = tempfile::tempdir().unwrap();
        let config = directory.path().join("ringdown.toml");
        fs::write(&config, RULES).unwrap();
        let program = Path::new(env!("CARGO_BIN_EXE_ringdown-under-test"));
        let vm = format!("name=fc,cid=9,hybrid={}", path_of(&directory).display());
        let config = config.display().to_string();
        let arguments = ["--config", &config, "--vm", &vm];
        let daemon = Daemon::start(program, &[("web", 3)], &arguments).unwrap();
        Scene { daemon, directory }
    }

    /// Where the hybrid VM's VMM listens, and calls with `_PORT` behind it.
    fn path(&self) -> PathBuf {
        path_of(&self.directory)
    }

    /// The hybrid guest calls a port of the host.
    fn call(&self, port: u32) -> std::io::Result<UnixStream> {
        let mut path = self.path().into_os_string();
        path.push(format!("_{port}"));
        let stream = UnixStream::connect(PathBuf::from(path))?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        Ok(stream)
    }

    fn ended(&self, vm: &str) -> BTreeMap<String, u64> {
        let status = self.daemon.vm_status(vm).unwrap();
        let counters = status["counters"].as_object().unwrap().iter();
        counters
            .filter_map(|(name, count)| {
                let count = count.as_u64().filter(|count| *count > 0)?;
                name.starts_with("ended_").then(|| (name.clone(), count))
            })
            .collect()
    }
}

fn path_of(directory: &tempfile::TempDir) -> PathBuf {
    directory.path().join("v.sock")
}

/// `web` dials the hybrid VM, whose VMM puts the call through.
fn connect(scene: &Scene, web: &mut VirtualGuest) -> (Connection, UnixStream) {
    let vmm = UnixListener::bind(scene.path()).unwrap();
    let near = web.dial(9, 22, wire::vsock::SocketType::Stream);
    web.service();
    let mut far = accept(&vmm).unwrap();
    assert_eq!(read_line(&mut far).unwrap(), "CONNECT 22");
    // The answer and the first bytes at once.
    far.write_all(b"OK 1073741824\nhello").unwrap();
    assert_eq!(web.receive(near, 5).unwrap(), b"hello");
    fs::remove_file(scene.path()).unwrap();
    (near, far)
}

/// The guest asks, ends its data, and is answered only then. Another thread plays the hybrid guest.
fn converse(web: &mut VirtualGuest, near: Connection, mut far: UnixStream, len: usize) {
    let (question, answer) = (pattern(len, 1), pattern(len, 2));
    let expected = question.clone();
    let reply = answer.clone();
    let callee = std::thread::spawn(move || {
        let mut bytes = Vec::new();
        far.read_to_end(&mut bytes).unwrap();
        assert!(bytes == expected, "{} bytes have arrived", bytes.len());
        far.write_all(&reply).unwrap();
        drop(far);
    });
    let mut rest = &question[..];
    wait_for("all of it", &mut [&mut *web], |guests| {
        let sent = guests[0].try_send(near, rest).expect("it can be sent");
        rest = &rest[sent..];
        rest.is_empty()
    });
    web.shutdown(near, SHUTDOWN_SEND);
    let (bytes, ended) = read_to_end(&mut [&mut *web], 0, near);
    assert_eq!(ended, Received::End);
    assert!(bytes == answer, "{} bytes have come back", bytes.len());
    callee.join().unwrap();
}

#[test]
fn a_guest_calls_a_hybrid_vm_by_its_identifier() {
    let scene = Scene::new();
    let mut web = guest(&scene.daemon, "web");
    for _ in 0..3 {
        let (near, far) = connect(&scene, &mut web);
        converse(&mut web, near, far, 2 << 20);
    }
    assert_no_violations(&[&web]);
}

#[test]
fn a_hybrid_vm_calls_a_guest_and_is_seen_as_itself() {
    let scene = Scene::new();
    let mut web = guest(&scene.daemon, "web");
    web.listen(80);
    let mut ports = Vec::new();
    for _ in 0..3 {
        let far = scene.call(5432).unwrap();
        let near = web.accept(80).unwrap();
        let (_, cid, port) = web.addresses(near).unwrap();
        assert_eq!(cid, 9, "the VM and not the host");
        ports.push(port);
        converse(&mut web, near, far, 2 << 20);
    }
    ports.dedup();
    assert_eq!(ports.len(), 3);
    assert_no_violations(&[&web]);
}

#[test]
fn refusals_are_resets_and_ends() {
    let scene = Scene::new();
    let mut web = guest(&scene.daemon, "web");
    // No VMM.
    assert!(matches!(web.connect(9, 22), Err(ConnectError::Refused(_))));
    // One that refuses.
    let vmm = UnixListener::bind(scene.path()).unwrap();
    let refuses = std::thread::spawn(move || {
        let mut stream = accept(&vmm).unwrap();
        read_line(&mut stream).unwrap();
    });
    assert!(matches!(web.connect(9, 22), Err(ConnectError::Refused(_))));
    refuses.join().unwrap();
    let expected = [("ended_guest_refused", 1), ("ended_not_running", 1)];
    let expected = expected.map(|(name, count)| (name.to_owned(), count));
    assert_eq!(scene.ended("web"), BTreeMap::from(expected));
    // The other guest has no listener.
    let mut far = scene.call(5432).unwrap();
    let ended = drive(&mut [&mut web], PATIENCE, |_| {
        far.set_nonblocking(true).unwrap();
        far.read(&mut [0]).ok()
    });
    assert_eq!(ended, Ok(0));
    assert_eq!(scene.ended("fc")["ended_guest_refused"], 1);
    // And nothing is on offer elsewhere.
    assert!(scene.call(5433).is_err());
}

#[test]
fn a_cut_is_no_end() {
    let scene = Scene::new();
    let mut web = guest(&scene.daemon, "web");
    // A hybrid VM that calls gets no more than the convention has answers for; one that is called does, as long as it has been sent nothing.
    let (near, mut far) = connect_silently(&scene, &mut web);
    drop(web);
    let error = far.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    let _ = near;
    wait_until("the end of the circuit", || {
        scene.daemon.vm_status("fc").unwrap()["circuits"] == 0
    });
}

fn connect_silently(scene: &Scene, web: &mut VirtualGuest) -> (Connection, UnixStream) {
    let vmm = UnixListener::bind(scene.path()).unwrap();
    let near = web.dial(9, 22, wire::vsock::SocketType::Stream);
    web.service();
    let mut far = accept(&vmm).unwrap();
    read_line(&mut far).unwrap();
    far.write_all(b"OK 1\n").unwrap();
    wait_for("the answer", &mut [&mut *web], |guests| {
        guests[0].state(near) == bench::guest::State::Connected
    });
    web.send(near, b"x").unwrap();
    let mut byte = [0];
    far.read_exact(&mut byte).unwrap();
    (near, far)
}

#[test]
fn a_policy_that_no_longer_allows_it_ends_what_is_open() {
    let scene = Scene::new();
    let mut web = guest(&scene.daemon, "web");
    let (near, mut far) = connect(&scene, &mut web);
    fs::write(scene.directory.path().join("ringdown.toml"), "").unwrap();
    assert!(
        scene
            .daemon
            .command(&["reload", "--enforce-existing"])
            .unwrap()
    );
    let (_, ended) = read_to_end(&mut [&mut web], 0, near);
    assert_eq!(ended, Received::Reset);
    assert_eq!(far.read(&mut [0]).unwrap_or(0), 0);
    // What is no longer on offer is no longer listened at.
    assert!(scene.call(5432).is_err());
    assert!(scene.call(1006).is_ok());
}
