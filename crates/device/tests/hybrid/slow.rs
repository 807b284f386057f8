//! Peers at whose sockets so many wait that our calls are slow.

use std::collections::HashMap;
use std::io::{ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::time::{ClockId, clock_gettime};
use vsock::Reason;

use crate::circuits::with_registry;
use crate::house::{House, calls_services, converse};
use crate::vmm::{Manner, Vmm};
use crate::watchers::{alone, watch};

/// A program calls this VM.
fn call(house: &House, vm: &str) -> (UnixStream, String) {
    let mut program = UnixStream::connect(house.host_path(vm)).unwrap();
    program.set_read_timeout(Some(crate::PATIENCE)).unwrap();
    // A program that is refused may be so before it has said what it wants.
    let _ = program.write_all(b"CONNECT 80\n");
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

/// Whether a byte comes, and not the end.
fn byte_comes(from: &mut impl Read) -> bool {
    match from.read(&mut [0]) {
        Ok(len) => len == 1,
        Err(error) => {
            assert_ne!(error.kind(), ErrorKind::WouldBlock, "nothing comes");
            false
        }
    }
}

/// Sends bytes to a peer that is watched, until the circuit is gone.
fn send_until_cut(from: &mut impl Write, to: &mut impl Read) {
    let until = Instant::now() + crate::PATIENCE;
    while from.write_all(b"x").is_ok() && byte_comes(to) {
        assert!(Instant::now() < until, "it is not cut");
    }
}

#[test]
fn a_vmm_that_makes_calls_slow_is_cut_off_and_others_are_not() {
    let _alone = alone();
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
    assert!(!byte_comes(&mut &other));
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
    let _alone = alone();
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
    let _alone = alone();
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
    let _alone = alone();
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

/// Whether the system counts the time in which a TCP peer is woken as the caller's: it does not with `CONFIG_IRQ_TIME_ACCOUNTING`.
fn counts_softirqs() -> bool {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let (far, _) = listener.accept().unwrap();
    let _watchers = watch(&far);
    let used = || {
        let time = clock_gettime(ClockId::ThreadCPUTime);
        Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
    };
    let before = used();
    near.write_all(b"x").unwrap();
    used() - before > Duration::from_millis(2)
}

#[test]
fn a_service_that_makes_calls_slow_is_cut_off_and_called_no_more() {
    let _alone = alone();
    if !counts_softirqs() {
        return;
    }
    let (house, vmm, listener) = with_registry(calls_services("fc"));
    let mut near = vmm.dial(5000).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    let _watchers = watch(&far);
    send_until_cut(&mut near, &mut far);
    assert_eq!(ended(&house, "fc"), 1);
    let mut refused = vmm.dial(5000).unwrap();
    assert!(!byte_comes(&mut refused));
    // The VMM itself is not held to be slow.
    let program = call(&house, "fc");
    assert!(program.1.starts_with("OK"), "{}", program.1);
}

#[test]
fn callers_of_a_published_port_that_make_calls_slow_are_cut_off() {
    let _alone = alone();
    if !counts_softirqs() {
        return;
    }
    let house = House::new(HashMap::new());
    house.add("web", 3);
    let vmm = Vmm::start(&house.path("web"), Manner::Accept(b""));
    let mut client = house.publish("web", 80);
    let (_, mut far) = vmm.accept();
    let _watchers = watch(&client);
    send_until_cut(&mut far, &mut client);
    assert_eq!(ended(&house, "web"), 1);
    let mut refused = house.publish("web", 80);
    assert!(!byte_comes(&mut refused));
    assert!(!vmm.was_called());
    connected(&house, "web", &vmm);
}

/// What waits for the end of a call's socket. Its drop says on which thread it is, and then waits.
struct Place {
    ended: Sender<Option<String>>,
    go_on: Arc<Mutex<Receiver<()>>>,
}

impl Drop for Place {
    fn drop(&mut self) {
        let name = std::thread::current().name().map(str::to_owned);
        let _ = self.ended.send(name);
        // Once the sender is gone, it does not wait.
        let _ = self.go_on.lock().unwrap().recv();
    }
}

#[test]
fn what_a_refused_user_has_closed_delays_no_one_else() {
    let _alone = alone();
    const CALLS: usize = 40;
    let house = House::new(HashMap::new());
    for (name, cid) in [("web", 3), ("db", 4)] {
        house.add(name, cid);
    }
    let vmm = Vmm::start(&house.path("web"), Manner::Accept(b""));
    let db = Vmm::start(&house.path("db"), Manner::Accept(b""));
    let (mut program, mut far) = connected(&house, "web", &vmm);
    let watchers = watch(&program);
    send_until_cut(&mut far, &mut program);
    drop((watchers, program));

    // A published port's place is kept until the socket is closed, and none is closed by the worker.
    let (ended, closed) = channel();
    let (release, go_on) = channel::<()>();
    let go_on = Arc::new(Mutex::new(go_on));
    let publish = || {
        let place = Place {
            ended: ended.clone(),
            go_on: go_on.clone(),
        };
        house.publish_unix("web", 80, Box::new(place))
    };
    let _published: Vec<_> = (0..CALLS).map(|_| publish()).collect();
    let name = closed.recv_timeout(crate::PATIENCE).unwrap();
    assert_eq!(name.as_deref(), Some("closer"));
    // As many wait as a party may have: this listener stops, and what it has is refused later.
    let programs = [(); CALLS].map(|()| {
        let mut program = UnixStream::connect(house.host_path("web")).unwrap();
        let _ = program.write_all(b"CONNECT 80\n");
        program
    });
    // Other parties and other listeners go on.
    for (name, vmm) in [("web", &vmm), ("db", &db)] {
        let _tcp = house.publish(name, 80);
        vmm.accept();
    }
    assert!(closed.try_recv().is_err());

    drop((release, ended));
    let rest: Vec<_> = closed.iter().collect();
    assert_eq!(rest.len(), CALLS - 1);
    assert!(rest.iter().all(|name| name.as_deref() == Some("closer")));
    for mut program in programs {
        program.set_read_timeout(Some(crate::PATIENCE)).unwrap();
        let mut answer = String::new();
        let _ = program.read_to_string(&mut answer);
        assert!(answer.contains(&Reason::SlowPeer.to_string()), "{answer}");
    }
    assert!(!vmm.was_called());
}

/// A callee has sockets closed by the closer, too, and may have no more waiting there than a caller.
#[test]
fn a_service_with_much_to_be_closed_gets_no_circuits() {
    const PLACES: usize = 16;
    let _alone = alone();
    if !counts_softirqs() {
        eprintln!("skipped: this kernel counts softirqs apart");
        return;
    }
    let (house, vmm, listener) = with_registry(calls_services("fc"));
    let (mut program, mut far) = connected(&house, "fc", &vmm);
    let watchers = watch(&program);
    send_until_cut(&mut far, &mut program);
    drop((watchers, program));
    // Its budget is touched, and not used up.
    let mut near = vmm.dial(5000).unwrap();
    let (mut far, _) = listener.accept().unwrap();
    let watchers = watch(&far);
    for _ in 0..4 {
        near.write_all(b"x").unwrap();
        assert!(byte_comes(&mut far));
    }
    drop(watchers);
    assert_eq!(ended(&house, "fc"), 1);

    let (ended, closed) = channel();
    let (release, go_on) = channel::<()>();
    let go_on = Arc::new(Mutex::new(go_on));
    let _published = house.publish_unix("fc", 80, Box::new(Place { ended, go_on }));
    let name = closed.recv_timeout(crate::PATIENCE).unwrap();
    assert_eq!(name.as_deref(), Some("closer"));
    drop((near, far));
    house.wait_for_circuits(0);
    listener.set_nonblocking(true).unwrap();
    let is_taken = || {
        let mut near = vmm.dial(5000).unwrap();
        near.set_nonblocking(true).unwrap();
        let until = Instant::now() + crate::PATIENCE;
        loop {
            if let Ok((mut far, _)) = listener.accept() {
                // Or else the circuit may end before it has the socket, which is closed later.
                near.set_nonblocking(false).unwrap();
                far.write_all(b"x").unwrap();
                assert!(byte_comes(&mut near));
                drop((near, far));
                house.wait_for_circuits(0);
                return true;
            }
            match (&near).read(&mut [0]) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                _ => return false,
            }
            assert!(Instant::now() < until, "neither taken nor refused");
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    let taken = (0..2 * PLACES).take_while(|_| is_taken()).count();
    // The first circuit's socket waits, too.
    assert_eq!(taken, PLACES - 1);
    drop(release);
    let until = Instant::now() + crate::PATIENCE;
    while !is_taken() {
        assert!(Instant::now() < until, "still refused");
    }
}
