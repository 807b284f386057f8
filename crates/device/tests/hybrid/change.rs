//! A configuration that follows another, step by step: every call belongs to one of them.

use std::collections::HashMap;
use std::io::{ErrorKind, Read};
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use device::{Bound, Change, Fabric, HybridConfig, NewLine, PublishedTo};
use policy::{
    Address, CalleePattern, CallerPattern, DEFAULT_DOMAIN, NamePattern, Policy, Rule, ServiceEntry,
    ServiceId, Verdict, VmPattern,
};
use vsock::Limits;

use crate::PATIENCE;
use crate::house::{House, calls_services};

const PUBLIC: ServiceId = ServiceId(1);
const SECRET: ServiceId = ServiceId(2);

/// The service `x` at port 4000, and its callers.
fn change(service: ServiceId, rules: Vec<Rule>) -> Change {
    Change {
        added: Vec::new(),
        bound: Bound::default(),
        leaves_out: false,
        removed: Vec::new(),
        services: vec![ServiceEntry {
            id: service,
            domain: DEFAULT_DOMAIN.to_owned(),
            name: "x".to_owned(),
            port: 4000,
        }],
        policy: Arc::new(Policy::new(rules)),
        groups: Vec::new(),
        aliases: Vec::new(),
        enforce_existing: false,
        commit: Box::new(|| ()),
    }
}

fn denied(from: &str) -> Rule {
    Rule {
        verdict: Verdict::Deny,
        ..calls_services(from)
    }
}

fn everybody() -> Rule {
    let from = vec![CallerPattern::Vms(VmPattern::Any {
        domain: DEFAULT_DOMAIN.to_owned(),
    })];
    let to = vec![CalleePattern::Service {
        domain: DEFAULT_DOMAIN.to_owned(),
        name: NamePattern::Any,
    }];
    Rule {
        from,
        to,
        ..calls_services("anybody")
    }
}

/// A house whose service leads to the first of these listeners, or to the second.
fn house() -> (House, TcpListener, TcpListener) {
    let listeners = [PUBLIC, SECRET].map(|id| (id, TcpListener::bind("127.0.0.1:0").unwrap()));
    let addresses = listeners
        .iter()
        .map(|(id, at)| (*id, at.local_addr().unwrap()));
    let house = House::new(addresses.collect::<HashMap<_, _>>());
    let [(_, public), (_, secret)] = listeners;
    secret.set_nonblocking(true).unwrap();
    (house, public, secret)
}

/// Calls the service, which waits until the fabric turns.
fn call(path: &PathBuf) -> UnixStream {
    let stream = UnixStream::connect(path).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    stream
}

fn is_cut(mut stream: UnixStream) -> bool {
    stream.read(&mut [0]).map_or_else(
        |error| error.kind() == ErrorKind::ConnectionReset,
        |read| read == 0,
    )
}

fn nobody_came(listener: &TcpListener) -> bool {
    listener
        .accept()
        .is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

fn turn(fabric: &mut Fabric) {
    for _ in 0..3 {
        fabric.turn(Some(Duration::ZERO)).unwrap();
    }
}

#[test]
fn a_call_is_judged_and_put_through_by_one_configuration() {
    let (house, public, secret) = house();
    house.add("web", 3);
    house.add("admin", 4);
    house
        .ask(|fabric| fabric.change(change(PUBLIC, vec![calls_services("web")])))
        .unwrap();
    let path = house.port_path("web", 4000);
    for is_judged_before in [true, false] {
        let path = path.clone();
        let guest = house.ask(move |fabric| {
            let guest = call(&path);
            if is_judged_before {
                turn(fabric);
            }
            let next = change(SECRET, vec![calls_services("admin")]);
            fabric.change(next).map_err(|(vm, _)| vm).unwrap();
            guest
        });
        if is_judged_before {
            // What had begun goes on.
            drop(public.accept().unwrap());
        }
        assert!(is_cut(guest));
        house.ask(|fabric| {
            let back = change(PUBLIC, vec![calls_services("web")]);
            fabric.change(back).map_err(|(vm, _)| vm).unwrap();
        });
    }
    // Had a peer come for a call that only the rules of before allow, or to a target that only those of after lead to, it would be there by now.
    assert!(nobody_came(&secret));
    public.set_nonblocking(true).unwrap();
    assert!(nobody_came(&public));
}

#[test]
fn a_target_that_changes_ends_what_exists_when_that_is_wanted() {
    let (house, public, secret) = house();
    house.add("web", 3);
    let rules = || vec![calls_services("web")];
    house
        .ask(move |fabric| fabric.change(change(PUBLIC, rules())))
        .unwrap();
    let guest = call(&house.port_path("web", 4000));
    let (far, _) = public.accept().unwrap();
    let ended = house.ask(move |fabric| fabric.change(change(SECRET, rules())));
    assert_eq!(ended.unwrap().ended, 0);
    let ended = house.ask(move |fabric| {
        fabric.change(Change {
            enforce_existing: true,
            ..change(SECRET, rules())
        })
    });
    assert_eq!(ended.unwrap().ended, 1);
    assert!(is_cut(guest));
    drop(far);
    assert!(nobody_came(&secret));
}

#[test]
fn who_puts_a_call_through_sees_that_a_policy_or_its_caller_has_ended_it() {
    let (house, _public, _secret) = house();
    house.add("web", 3);
    let (taken, calls) = std::sync::mpsc::channel();
    house.ask(move |fabric| {
        fabric.set_dialer(Box::new(move |call| taken.send(call).unwrap()));
        let rules = vec![calls_services("web")];
        fabric
            .change(change(PUBLIC, rules))
            .map_err(|(vm, _)| vm)
            .unwrap();
    });
    for is_ended_by_policy in [true, false] {
        let guest = call(&house.port_path("web", 4000));
        let taken = calls.recv_timeout(PATIENCE).unwrap();
        assert!(taken.reply.is_awaited());
        if is_ended_by_policy {
            let ended = house.ask(|fabric| {
                fabric.change(Change {
                    enforce_existing: true,
                    ..change(PUBLIC, vec![denied("web")])
                })
            });
            assert_eq!(ended.unwrap().ended, 1);
            assert!(is_cut(guest));
            let back = change(PUBLIC, vec![calls_services("web")]);
            house.ask(|fabric| fabric.change(back).unwrap());
        } else {
            drop(guest);
            let until = std::time::Instant::now() + PATIENCE;
            while taken.reply.is_awaited() {
                assert!(std::time::Instant::now() < until);
                std::thread::yield_now();
            }
        }
        assert!(!taken.reply.is_awaited());
    }
}

#[test]
fn a_vm_comes_and_goes_with_its_rules() {
    let (house, _public, secret) = house();
    let alone = || change(SECRET, vec![everybody()]);
    house.ask(move |fabric| fabric.change(alone())).unwrap();
    let config = HybridConfig {
        address: Address::new("evil", 3),
        limits: Limits::default(),
        path: house.path("evil"),
        host: house.host_path("evil"),
    };
    let path = house.port_path("evil", 4000);
    for _ in 0..2 {
        let (config, path) = (config.clone(), path.clone());
        let (first, second) = house.ask(move |fabric| {
            let coming = Change {
                added: vec![NewLine::Hybrid(config)],
                ..change(SECRET, vec![denied("evil"), everybody()])
            };
            fabric.change(coming).map_err(|(vm, _)| vm).unwrap();
            let _ = fabric.all_done().recv();
            let first = call(&path);
            turn(fabric);
            // This one waits while the VM goes.
            let second = call(&path);
            let going = Change {
                removed: vec!["evil".to_owned()],
                ..alone()
            };
            fabric.change(going).map_err(|(vm, _)| vm).unwrap();
            (first, second)
        });
        assert!(is_cut(first) && is_cut(second));
    }
    assert!(nobody_came(&secret));
    assert!(house.ask(|fabric| fabric.lines()).is_empty());
}

#[test]
fn a_change_that_cannot_be_made_changes_nothing() {
    let (house, public, _secret) = house();
    house.add("web", 3);
    house
        .ask(|fabric| fabric.change(change(PUBLIC, vec![calls_services("web")])))
        .unwrap();
    let line = |name: &str, cid, directory: &str| {
        NewLine::Hybrid(HybridConfig {
            address: Address::new(name, cid),
            limits: Limits::default(),
            path: house.path(name),
            host: house.host_path(name).with_file_name(directory).join("host"),
        })
    };
    std::fs::create_dir(house.path("web").with_file_name("there")).unwrap();
    let added = vec![line("good", 4, "there"), line("bad", 5, "nowhere")];
    let is_committed = Arc::new(AtomicBool::new(false));
    let commit = is_committed.clone();
    let refused = house.ask(move |fabric| {
        fabric.change(Change {
            added,
            removed: vec!["web".to_owned()],
            enforce_existing: true,
            commit: Box::new(move || commit.store(true, Ordering::Relaxed)),
            ..change(SECRET, Vec::new())
        })
    });
    assert_eq!(refused.unwrap_err().0, "bad");
    assert!(!is_committed.load(Ordering::Relaxed));
    let lines = house.ask(|fabric| fabric.lines());
    let names: Vec<_> = lines.iter().map(|line| &line.report.address.name).collect();
    assert_eq!(names, ["web"]);
    let _guest = call(&house.port_path("web", 4000));
    assert!(public.accept().is_ok());
}

#[test]
fn who_came_in_by_a_port_that_is_no_longer_published_reaches_nobody() {
    let house = House::new(HashMap::new());
    let dials = house.add_serial("web", 3);
    house.set_guest("web", true);
    let is_published = Arc::new(AtomicBool::new(true));
    let _first = house.publish_while("web", PublishedTo::Port(80), &is_published);
    assert_eq!(dials.recv_timeout(PATIENCE).map(|(port, _)| port), Ok(80));
    is_published.store(false, Ordering::Relaxed);
    let mut client = house.publish_while("web", PublishedTo::Port(80), &is_published);
    let error = client.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(dials.try_recv().is_err());
}
