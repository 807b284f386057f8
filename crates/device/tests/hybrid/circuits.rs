//! Circuits that carry what they should, both ways, each with its own end.

use std::collections::{HashMap, HashSet};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::Ordering;

use device::{CircuitFilter, Connected, EndedFirst};
use policy::{Rule, RuleLimits, ServiceId};
use vsock::Reason;

use crate::PATIENCE;
use crate::house::{House, calls_services, converse, pattern, redirect};
use crate::vmm::{Manner, Vmm};

/// A house with the service `registry` at port 5000, and the VM `fc` that may call it.
pub fn with_registry(rule: Rule) -> (House, Vmm, TcpListener) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (house, vmm) = with_registry_at(rule, &listener);
    (house, vmm, listener)
}

fn with_registry_at(rule: Rule, listener: &TcpListener) -> (House, Vmm) {
    let address = listener.local_addr().unwrap();
    let house = House::new(HashMap::from([(ServiceId(1), address)]));
    house.set_rules(vec![rule], false);
    house.offer(&[(1, "registry", 5000)]);
    house.add("fc", 3);
    let vmm = Vmm::start(&house.path("fc"), Manner::Accept(b""));
    (house, vmm)
}

#[test]
fn a_hybrid_vm_calls_a_service() {
    let (house, vmm, listener) = with_registry(calls_services("fc"));
    for _ in 0..3 {
        let near = vmm.dial(5000).unwrap();
        let (far, _) = listener.accept().unwrap();
        converse(near, far, 4 << 20);
        assert_eq!(house.heard(), ("fc -> service registry".to_owned(), Ok(())));
    }
    house.wait_for_circuits(0);
    let line = &house.ask(|fabric| fabric.lines())[0].report;
    assert_eq!(line.counters.bytes_from_guest, 3 * (4 << 20));
    assert_eq!(line.counters.bytes_to_guest, 3 * (4 << 20));
}

#[test]
fn circuits_are_listed_and_surveyed_a_slice_at_a_time() {
    const CIRCUITS: usize = 300;
    let (house, vmm, listener) = with_registry(calls_services("fc"));
    let dial = |_| (vmm.dial(5000).unwrap(), listener.accept().unwrap());
    let _ends: Vec<_> = (0..CIRCUITS).map(dial).collect();
    house.wait_for_circuits(CIRCUITS as u32);
    let mut listed = HashSet::new();
    let mut next = Some(0);
    while let Some(from) = next {
        let room = CIRCUITS - listed.len();
        let slice =
            house.ask(move |fabric| fabric.list_circuits(&CircuitFilter::default(), from, room));
        assert!(slice.circuits.len() <= 256);
        assert_eq!(slice.more, 0);
        for circuit in slice.circuits {
            assert!(listed.insert(circuit.id), "twice: {circuit:?}");
        }
        let surveyed = house.ask(move |fabric| fabric.survey_circuits(from));
        assert_eq!(surveyed.next, slice.next);
        next = slice.next;
    }
    assert_eq!(listed.len(), CIRCUITS);
    let none = house.ask(|fabric| fabric.list_circuits(&CircuitFilter::default(), 0, 10));
    assert_eq!((none.circuits.len(), none.more), (10, 246));
}

#[test]
fn what_a_hybrid_vm_sends_with_its_call_arrives() {
    let (_house, vmm, listener) = with_registry(calls_services("fc"));
    let mut near = vmm.dial(5000).unwrap();
    near.write_all(b"at once").unwrap();
    drop(near);
    let (mut far, _) = listener.accept().unwrap();
    let mut bytes = Vec::new();
    far.read_to_end(&mut bytes).unwrap();
    assert_eq!(bytes, b"at once");
}

#[test]
fn a_rules_bytes_a_second_hold_back_and_lose_nothing() {
    let limits = RuleLimits {
        bytes_per_second: Some(8 << 20),
        ..RuleLimits::default()
    };
    let (_house, vmm, listener) = with_registry(Rule {
        limits,
        ..calls_services("fc")
    });
    let near = vmm.dial(5000).unwrap();
    let (far, _) = listener.accept().unwrap();
    converse(near, far, 1 << 20);
}

#[test]
fn two_hybrid_vms_speak_with_each_other() {
    let house = House::new(HashMap::new());
    house.set_rules(vec![redirect("fc", 5432, "db", 80)], false);
    house.add("fc", 3);
    house.add("db", 4);
    let caller = Vmm::start(&house.path("fc"), Manner::Accept(b""));
    let callee = Vmm::start(&house.path("db"), Manner::Accept(b""));
    let near = caller.dial(5432).unwrap();
    let (port, far) = callee.accept();
    assert_eq!(port, 80);
    converse(near, far, 8 << 20);
    assert_eq!(house.heard(), ("fc -> db:80".to_owned(), Ok(())));
    house.wait_for_circuits(0);
    // No rule lets db call.
    assert_eq!(callee.dial(5432).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn what_a_vmm_sends_behind_its_answer_arrives() {
    let house = House::new(HashMap::new());
    house.add("fc", 3);
    let vmm = Vmm::start(&house.path("fc"), Manner::Accept(b"220 hello"));
    let mut client = house.publish("fc", 25);
    let (port, far) = vmm.accept();
    assert_eq!(port, 25);
    let mut bytes = [0; 9];
    client.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"220 hello");
    converse(client, far, 1 << 20);
    assert_eq!(house.heard(), ("published web -> fc:25".to_owned(), Ok(())));
}

#[test]
fn the_agent_of_a_hybrid_vm_calls_in_without_a_port() {
    let house = House::new(HashMap::new());
    house.add("fc", 3);
    let vmm = Vmm::start(&house.path("fc"), Manner::Accept(b""));
    let mut near = vmm.dial(1007).unwrap();
    let arrival = house.arrivals.recv_timeout(PATIENCE).unwrap();
    assert_eq!((arrival.vm.as_str(), arrival.source_port), ("fc", 0));
    let mut far = arrival.stream;
    far.set_nonblocking(false).unwrap();
    far.write_all(b"hello").unwrap();
    let mut bytes = [0; 5];
    near.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"hello");
    assert_eq!(house.circuits(), 1);
    // It ends with its line.
    assert!(house.ask(|fabric| fabric.close_line("fc")));
    assert_eq!(far.read(&mut bytes).unwrap_or(0), 0);
    assert_eq!(near.read(&mut bytes).unwrap_or(0), 0);
}

#[test]
fn who_put_a_call_through_hears_whether_it_was_ended_here_first() {
    let (house, vmm, listener) = with_registry(calls_services("fc"));
    let address = listener.local_addr().unwrap();
    let (told, flags) = std::sync::mpsc::channel();
    house.ask(move |fabric| {
        fabric.set_dialer(Box::new(move |call| {
            let stream = TcpStream::connect(address).unwrap();
            stream.set_nonblocking(true).unwrap();
            let mut connected = Connected::new(stream.into(), None);
            let ended_first = EndedFirst::default();
            connected.ended_first = Some(ended_first.clone());
            told.send(ended_first).unwrap();
            call.reply.put_through(connected);
        }));
    });
    for guest_is_first in [true, false] {
        let near = vmm.dial(5000).unwrap();
        let (far, _) = listener.accept().unwrap();
        let ended_first = flags.recv_timeout(PATIENCE).unwrap();
        match guest_is_first {
            true => {
                near.shutdown(Shutdown::Write).unwrap();
                assert_eq!((&far).read(&mut [0]).unwrap(), 0);
                drop((far, near));
            }
            false => {
                far.shutdown(Shutdown::Write).unwrap();
                assert_eq!((&near).read(&mut [0]).unwrap(), 0);
                drop((near, far));
            }
        }
        house.wait_for_circuits(0);
        assert_eq!(ended_first.load(Ordering::Acquire), guest_is_first);
    }
}

#[test]
fn a_policy_that_no_longer_allows_it_resets_a_service() {
    let (house, vmm, listener) = with_registry(calls_services("fc"));
    let mut near = vmm.dial(5000).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    near.write_all(b"x").unwrap();
    let mut byte = [0];
    far.read_exact(&mut byte).unwrap();
    assert_eq!(house.set_rules(Vec::new(), true), 1);
    let error = far.read(&mut byte).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert_eq!(near.read(&mut byte).unwrap_or(0), 0);
    assert_eq!(house.circuits(), 0);
}

#[test]
fn a_reset_of_a_service_is_no_end_of_data() {
    let (house, vmm, listener) = with_registry(calls_services("fc"));
    let mut near = vmm.dial(5000).unwrap();
    let (far, _) = listener.accept().unwrap();
    assert_eq!(house.heard().1, Ok(()));
    // Something unread makes the socket's end an error.
    near.write_all(&pattern(1000, 1)).unwrap();
    rustix::net::sockopt::set_socket_linger(&far, Some(std::time::Duration::ZERO)).unwrap();
    drop(far);
    house.wait_for_circuits(0);
    let ended = house.ask(|fabric| fabric.lines())[0].report.counters.ended;
    assert_eq!(ended[Reason::PeerReset.index()], 1);
}

/// What is left when both directions have ended is in the host's memory.
const LEFT: usize = 64 << 10;

fn keeps_its_place(house: &House) {
    for _ in 0..200 {
        assert_eq!(house.circuits(), 1);
    }
}

fn reads_all(mut reader: impl Read) {
    let mut bytes = Vec::new();
    reader.read_to_end(&mut bytes).unwrap();
    assert!(bytes == pattern(LEFT, 1), "{} bytes", bytes.len());
}

#[test]
fn a_circuit_keeps_its_place_until_a_service_has_taken_everything() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    rustix::net::sockopt::set_socket_recv_buffer_size(&listener, 16384).unwrap();
    let (house, vmm) = with_registry_at(calls_services("fc"), &listener);
    let mut near = vmm.dial(5000).unwrap();
    let (far, _) = listener.accept().unwrap();
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    far.shutdown(Shutdown::Write).unwrap();
    near.write_all(&pattern(LEFT, 1)).unwrap();
    near.shutdown(Shutdown::Write).unwrap();
    assert_eq!(near.read(&mut [0]).unwrap(), 0);
    keeps_its_place(&house);
    reads_all(far);
    house.wait_for_circuits(0);
}

#[test]
fn a_circuit_keeps_its_place_until_a_vmm_has_read_everything() {
    let (house, vmm, listener) = with_registry(calls_services("fc"));
    let near = vmm.dial(5000).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    near.shutdown(Shutdown::Write).unwrap();
    far.write_all(&pattern(LEFT, 1)).unwrap();
    far.shutdown(Shutdown::Write).unwrap();
    assert_eq!(far.read(&mut [0]).unwrap(), 0);
    keeps_its_place(&house);
    reads_all(near);
    house.wait_for_circuits(0);
}
