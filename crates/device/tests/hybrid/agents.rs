//! A guest's agent: its host's programs reach it, with the proof that it has asked for, and no other caller does.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};

use device::{AgentSecret, CallAnswer, PublishedTo};
use policy::{CalleePattern, CallerPattern, Redirect, Rule, Verdict, VmPattern};
use vsock::Reason;
use wire::agent::{CONNECTION_CHANNEL, Frame, Secret};

use crate::PATIENCE;
use crate::house::{House, redirect, rule};
use crate::vmm::{Manner, Vmm};

const AGENT: u32 = 1007;

fn given(byte: u8) -> AgentSecret {
    AgentSecret::Given(Secret::new([byte; 32]))
}

fn proof(byte: u8) -> Vec<u8> {
    let frame = Frame::Secret(Secret::new([byte; 32]));
    frame.to_bytes(CONNECTION_CHANNEL).unwrap()
}

fn set_secret(house: &House, vm: &'static str, secret: AgentSecret) {
    house.ask(move |fabric| fabric.set_agent_secret(vm, secret));
}

fn program(host_socket: &Path, request: &[u8]) -> UnixStream {
    let mut program = UnixStream::connect(host_socket).unwrap();
    program.set_read_timeout(Some(PATIENCE)).unwrap();
    program.write_all(request).unwrap();
    program
}

fn answer(program: &mut UnixStream) -> String {
    let mut text = Vec::new();
    let mut byte = [0];
    while program.read(&mut byte).unwrap() == 1 && byte != *b"\n" {
        text.push(byte[0]);
    }
    String::from_utf8(text).unwrap()
}

/// All that the guest is sent until the other end.
fn all(mut far: UnixStream) -> Vec<u8> {
    far.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut bytes = Vec::new();
    far.read_to_end(&mut bytes).unwrap();
    bytes
}

fn db() -> CalleePattern {
    CalleePattern::Vms(VmPattern::One {
        domain: policy::DEFAULT_DOMAIN.to_owned(),
        name: "db".to_owned(),
    })
}

#[test]
fn a_program_of_the_host_is_announced_by_the_agents_secret_and_by_nothing_at_other_ports() {
    let house = House::new(HashMap::new());
    house.add("fc", 3);
    let dials = house.add_serial("old", 4);
    house.set_guest("old", true);
    let vmm = Vmm::start(&house.path("fc"), Manner::Accept(b""));
    set_secret(&house, "fc", given(7));
    set_secret(&house, "old", given(8));
    let at = |vm| match vm {
        "fc" => house.host_path(vm),
        _ => house.path(vm),
    };
    for (vm, secret) in [("fc", 7), ("old", 8)] {
        for (port, before) in [(AGENT, proof(secret)), (22, Vec::new())] {
            let request = format!("CONNECT {port}\nhello");
            let mut near = program(&at(vm), request.as_bytes());
            let far = match vm {
                "fc" => vmm.accept().1,
                _ => {
                    let (guest, ours) = UnixStream::pair().unwrap();
                    ours.set_nonblocking(true).unwrap();
                    let (_, reply) = dials.recv_timeout(PATIENCE).unwrap();
                    reply.connected(ours.into(), None);
                    guest
                }
            };
            assert!(answer(&mut near).starts_with("OK "));
            near.write_all(b" there").unwrap();
            near.shutdown(std::net::Shutdown::Write).unwrap();
            assert_eq!(all(far), [&before[..], b"hello there"].concat());
        }
    }
    house.wait_for_circuits(0);
}

#[test]
fn an_agent_that_has_given_nothing_is_not_called() {
    let house = House::new(HashMap::new());
    house.add("fc", 3);
    let dials = house.add_serial("old", 4);
    house.set_guest("old", true);
    let _vmm = Vmm::start(&house.path("fc"), Manner::Accept(b""));
    for (vm, path) in [("fc", house.host_path("fc")), ("old", house.path("old"))] {
        let refusal = || answer(&mut program(&path, b"CONNECT 1007\n"));
        assert_eq!(refusal(), format!("ERR {}", Reason::AgentAway));
        set_secret(&house, vm, AgentSecret::NotGiven);
        assert_eq!(refusal(), format!("ERR {}", Reason::AgentTooOld));
        set_secret(&house, vm, AgentSecret::Absent);
        assert_eq!(refusal(), format!("ERR {}", Reason::AgentAway));
    }
    assert!(dials.try_recv().is_err(), "no guest has heard of it");
}

#[test]
fn nobody_but_a_program_that_calls_directly_reaches_an_agent() {
    let house = House::new(HashMap::new());
    house.add("fc", 3);
    house.add("db", 4);
    let dials = house.add_serial("old", 5);
    house.set_guest("old", true);
    let callee = Vmm::start(&house.path("db"), Manner::Accept(b"never"));
    let caller = Vmm::start(&house.path("fc"), Manner::Accept(b""));
    set_secret(&house, "db", given(7));
    set_secret(&house, "old", given(8));
    let by_program = |to| Rule {
        from: vec![CallerPattern::Host],
        ports: vec![80..=80],
        ..rule(
            "fc",
            db(),
            Verdict::Redirect(Redirect::Vm {
                domain: policy::DEFAULT_DOMAIN.to_owned(),
                name: to,
                port: Some(AGENT),
            }),
        )
    };
    house.set_rules(
        vec![
            redirect("fc", 5000, "db", AGENT),
            redirect("fc", 5001, "old", AGENT),
            redirect("old", 5000, "db", AGENT),
            by_program("old".to_owned()),
        ],
        false,
    );
    let refused = || assert_eq!(house.heard().1, Err(Reason::OwnPort));
    // A hybrid guest: its VMM's call is taken and closed.
    for port in [5000, 5001] {
        let mut near = caller.dial(port).unwrap();
        refused();
        let mut byte = [0];
        assert_eq!(near.read(&mut byte).unwrap_or(0), 0);
    }
    // A serial guest.
    let error = house.guest_calls("old", 5000).err();
    assert_eq!(error, Some(Reason::OwnPort));
    refused();
    // Published ports.
    for vm in ["db", "old"] {
        let mut client = house.publish(vm, AGENT);
        refused();
        let error = client.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
    // A program of the host that a rule leads there from another port of another VM.
    let mut redirected = program(&house.host_path("db"), b"CONNECT 80\n");
    refused();
    assert_eq!(answer(&mut redirected), format!("ERR {}", Reason::OwnPort));
    assert!(dials.try_recv().is_err(), "the serial guest heard of it");
    assert_eq!(house.circuits(), 0);
    // The agent behind the VMM has received nothing: the first call that arrives is this one.
    let _near = program(&house.host_path("db"), b"CONNECT 22\n");
    assert_eq!(callee.accept().0, 22);
}

/// The daemon calls a VM's agent for a caller of a published port: the caller's end, and the report of the call.
fn for_published(house: &House, vm: &str) -> (TcpStream, Receiver<Result<(), Reason>>) {
    published(house, vm, PublishedTo::Agent)
}

fn published(
    house: &House,
    vm: &str,
    to: PublishedTo,
) -> (TcpStream, Receiver<Result<(), Reason>>) {
    let (tell, told) = channel();
    let answer = CallAnswer::new(move |result| {
        let _ = tell.send(result.map(|_| ()));
    });
    let client = house.publish_answered(vm, to, answer, &Arc::new(true.into()));
    (client, told)
}

#[test]
fn the_daemon_calls_an_agent_for_a_published_port_as_a_program_would() {
    let house = House::new(HashMap::new());
    house.add("fc", 3);
    house.add("db", 4);
    let vmm = Vmm::start(&house.path("fc"), Manner::Accept(b""));
    let told = |told: Receiver<_>| told.recv_timeout(PATIENCE).unwrap();
    let (_near, answer) = for_published(&house, "fc");
    assert_eq!(told(answer), Err(Reason::AgentAway));
    let (_near, answer) = for_published(&house, "nowhere");
    assert_eq!(told(answer), Err(Reason::UnknownCid));
    set_secret(&house, "fc", given(7));
    let (mut near, answer) = for_published(&house, "fc");
    let (port, far) = vmm.accept();
    assert_eq!((port, told(answer)), (AGENT, Ok(())));
    near.write_all(b"hello").unwrap();
    near.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(all(far), [&proof(7)[..], b"hello"].concat());
    drop(near);
    // Rules about published ports hold, and no redirection takes it elsewhere.
    let host = |verdict| Rule {
        from: vec![CallerPattern::Host],
        ports: vec![AGENT..=AGENT],
        ..rule(
            "fc",
            CalleePattern::Vms(VmPattern::Any {
                domain: policy::DEFAULT_DOMAIN.to_owned(),
            }),
            verdict,
        )
    };
    let to_db = Verdict::Redirect(Redirect::Vm {
        domain: policy::DEFAULT_DOMAIN.to_owned(),
        name: "db".to_owned(),
        port: Some(80),
    });
    for (verdict, reason) in [(Verdict::Deny, Reason::Denied), (to_db, Reason::OwnPort)] {
        house.set_rules(vec![host(verdict)], false);
        let (mut near, answer) = for_published(&house, "fc");
        assert_eq!(told(answer), Err(reason));
        let error = near.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    }
}

#[test]
fn that_a_caller_of_a_published_port_is_refused_is_told() {
    let house = House::new(HashMap::new());
    house.add("fc", 3);
    let told = |vm| {
        let (_client, told) = published(&house, vm, PublishedTo::Port(80));
        told.recv_timeout(PATIENCE).unwrap()
    };
    assert_eq!(told("fc"), Err(Reason::NotRunning));
    assert_eq!(told("gone"), Err(Reason::UnknownCid));
    let _vmm = Vmm::start(&house.path("fc"), Manner::Say(b""));
    house.set_guest("fc", true);
    assert_eq!(told("fc"), Err(Reason::GuestRefused));
}
