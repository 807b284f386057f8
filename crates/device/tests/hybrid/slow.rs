//! Peers at whose sockets so many wait that our calls are slow.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use vsock::Reason;

use crate::house::{House, converse};
use crate::vmm::{Manner, Vmm};
use crate::watchers::watch;

/// A program calls this VM.
fn call(house: &House, vm: &str) -> (UnixStream, String) {
    let mut program = UnixStream::connect(house.host_path(vm)).unwrap();
    program.set_read_timeout(Some(crate::PATIENCE)).unwrap();
    program.write_all(b"CONNECT 80\n").unwrap();
    let mut answer = Vec::new();
    let mut byte = [0];
    while !answer.ends_with(b"\n") && program.read(&mut byte).unwrap_or(0) == 1 {
        answer.push(byte[0]);
    }
    (program, String::from_utf8(answer).unwrap())
}

fn connected(house: &House, name: &str, vmm: &Vmm) -> (UnixStream, UnixStream) {
    let (program, answer) = call(house, name);
    assert!(answer.starts_with("OK"), "{answer}");
    (program, vmm.accept().1)
}

fn ended(house: &House, vm: &str) -> u64 {
    let vm = vm.to_owned();
    house.ask(move |fabric| {
        let lines = fabric.lines();
        let line = lines.iter().find(|line| line.report.address.name == vm);
        line.unwrap().report.counters.ended[Reason::SlowPeer.index()]
    })
}

/// Sends bytes to a peer that is watched, until the circuit is gone.
fn send_until_cut(from: &mut UnixStream, to: &mut UnixStream) {
    let until = Instant::now() + crate::PATIENCE;
    while from.write_all(b"x").is_ok() && to.read(&mut [0]).unwrap_or(0) == 1 {
        assert!(Instant::now() < until, "it is not cut");
    }
}

#[test]
fn a_vmm_that_makes_calls_slow_is_cut_off_and_others_are_not() {
    let house = House::new(HashMap::new());
    let vmms = [("bad", 3), ("good", 4)].map(|(name, cid)| {
        house.add(name, cid);
        Vmm::start(&house.path(name), Manner::Accept(b""))
    });
    let [bad, good] = vmms;
    let (mut to_bad, mut of_bad) = connected(&house, "bad", &bad);
    let (other, _at_bad) = connected(&house, "bad", &bad);
    let (near, far) = connected(&house, "good", &good);
    let _watchers = watch(&of_bad);
    send_until_cut(&mut to_bad, &mut of_bad);
    // With the one circuit all of this VMM end.
    assert_eq!((&other).read(&mut [0]).unwrap_or(0), 0);
    assert_eq!(ended(&house, "bad"), 2);
    let (_, answer) = call(&house, "bad");
    assert!(answer.contains(&Reason::SlowPeer.to_string()), "{answer}");
    assert!(!bad.was_called());
    assert_eq!(ended(&house, "good"), 0);
    converse(near, far, 1 << 20);
    connected(&house, "good", &good);
}

#[test]
fn a_user_whose_programs_make_calls_slow_is_cut_off_and_others_are_not() {
    let house = House::new(HashMap::new());
    house.add("web", 3);
    let vmm = Vmm::start(&house.path("web"), Manner::Accept(b""));
    let (mut program, mut far) = connected(&house, "web", &vmm);
    let mut other = house.publish("web", 80);
    let (_, mut of_other) = vmm.accept();
    let _watchers = watch(&program);
    send_until_cut(&mut far, &mut program);
    assert_eq!(ended(&house, "web"), 1);
    let (_, answer) = call(&house, "web");
    assert!(answer.contains(&Reason::SlowPeer.to_string()), "{answer}");
    other.write_all(b"x").unwrap();
    assert_eq!(of_other.read(&mut [0]).unwrap(), 1);
}

#[test]
fn a_user_that_is_own_or_root_is_cut_and_not_refused() {
    let house = House::new(HashMap::new());
    let own = rustix::process::geteuid().as_raw();
    house.ask(move |fabric| fabric.set_own_user(Some(own)));
    house.add("web", 3);
    let vmm = Vmm::start(&house.path("web"), Manner::Accept(b""));
    let (mut program, mut far) = connected(&house, "web", &vmm);
    let (near, still) = connected(&house, "web", &vmm);
    let _watchers = watch(&program);
    send_until_cut(&mut far, &mut program);
    converse(near, still, 1 << 20);
    connected(&house, "web", &vmm);
}

/// The first slow calls may have been anything's fault.
#[test]
fn a_peer_that_is_slow_twice_loses_nothing() {
    let house = House::new(HashMap::new());
    house.add("web", 3);
    let vmm = Vmm::start(&house.path("web"), Manner::Accept(b""));
    let (mut program, mut far) = connected(&house, "web", &vmm);
    let watchers = watch(&program);
    for _ in 0..2 {
        far.write_all(b"x").unwrap();
        assert_eq!(program.read(&mut [0]).unwrap(), 1);
    }
    drop(watchers);
    converse(program, far, 1 << 20);
    assert_eq!(ended(&house, "web"), 0);
}
