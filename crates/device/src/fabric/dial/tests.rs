use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::mpsc::channel;
use std::time::Instant;

use policy::{Policy, Rule, ServiceEntry, ServiceId};
use vsock::Limits;

use super::*;
use crate::HybridConfig;

/// Until what does not come is given up.
const PATIENCE: Duration = Duration::from_secs(60);

fn turn_until(fabric: &mut Fabric, what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !is_so() {
        assert!(Instant::now() < deadline, "{what}");
        fabric.turn(Some(Duration::from_millis(1))).unwrap();
    }
}

/// A hybrid VM of this name, and the socket of its VMM.
fn add(fabric: &mut Fabric, directory: &Path, name: &str, cid: u32) -> UnixListener {
    let path = directory.join(name);
    let vmm = UnixListener::bind(&path).unwrap();
    vmm.set_nonblocking(true).unwrap();
    let config = HybridConfig {
        address: Address::new(name, cid),
        limits: Limits::default(),
        host: directory.join(format!("{name}.sock")),
        path,
    };
    fabric.open_hybrid_line(&config).unwrap();
    let _ = fabric.all_done().recv();
    vmm
}

/// A program of the host that calls this VM.
fn call(directory: &Path, name: &str) -> UnixStream {
    let mut program = UnixStream::connect(directory.join(format!("{name}.sock"))).unwrap();
    program.write_all(b"CONNECT 5000\n").unwrap();
    program.set_nonblocking(true).unwrap();
    program
}

/// What a program is answered.
fn answer(fabric: &mut Fabric, mut program: &UnixStream) -> String {
    let mut answer = Vec::new();
    turn_until(fabric, "the program is answered", || {
        let mut bytes = [0; 256];
        if let Ok(len) = program.read(&mut bytes) {
            answer.extend(&bytes[..len]);
        }
        answer.ends_with(b"\n")
    });
    String::from_utf8(answer).unwrap()
}

#[test]
fn who_looks_for_a_vmm_in_vain_holds_up_its_own_callers_alone() {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric =
        Fabric::new(Limits::default(), wire::agent::PORT, Box::new(|_| false)).unwrap();
    fabric.set_policy(Arc::new(Policy::new(Vec::<Rule>::new())), Vec::new(), false);
    let slow = add(&mut fabric, directory.path(), "slow", 3);
    let other = add(&mut fabric, directory.path(), "other", 4);
    // As long as the directory of its VMM has it.
    let (release, held) = channel::<()>();
    let id = fabric.line_named("slow").unwrap();
    let aside = fabric.line(id).unwrap().aside_thread().unwrap();
    aside.push(move || {
        let _ = held.recv();
    });
    let callers = [0; 3].map(|_| call(directory.path(), "slow"));
    let _beside = call(directory.path(), "other");
    // Nor is a socket made there by the common thread.
    fabric.set_services(vec![ServiceEntry {
        id: ServiceId(1),
        domain: policy::DEFAULT_DOMAIN.to_owned(),
        name: "x".to_owned(),
        port: 7000,
    }]);
    let port_of = |vm: &str| directory.path().join(format!("{vm}_7000"));
    turn_until(
        &mut fabric,
        "the other VM has a socket for its calls",
        || port_of("other").exists(),
    );
    assert!(!port_of("slow").exists());
    let mut accepted = None;
    turn_until(&mut fabric, "the other VMM is called", || {
        accepted = accepted.take().or_else(|| other.accept().ok());
        accepted.is_some()
    });
    for caller in &callers {
        let refused = answer(&mut fabric, caller);
        assert!(refused.starts_with("ERR "), "{refused}");
    }
    drop(release);
    let _ = fabric.all_done().recv();
    assert!(port_of("slow").exists());
    // Calls given up are not put through.
    let _late = call(directory.path(), "slow");
    turn_until(&mut fabric, "the VMM is called", || slow.accept().is_ok());
    fabric.turn(Some(Duration::ZERO)).unwrap();
    assert!(slow.accept().is_err(), "for a caller that has gone");
}
