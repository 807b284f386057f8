//! What is over a VM's limits waits or is refused, and costs the others nothing.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bench::daemon::Daemon;
use bench::guest::{Connection, State, VirtualGuest};
use bench::host;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType as UnixSocketType, accept,
    bind, connect as dial, listen, recv, send, socket,
};
use wire::vsock::{Operation, SocketType};

use crate::support::{assert_no_violations, guest, wait_for, wait_until};

/// A daemon with the VM `small`, which has these limits, and `web`, which has those of every VM.
fn daemon_with(limits: &str) -> Daemon {
    let program = Path::new(env!("CARGO_BIN_EXE_ringdown-under-test"));
    let vm = format!("name=small,cid=9,{limits}");
    let options = ["--vm", &vm, "--allow", "from=web,to=small,port=*"];
    Daemon::start(program, &[("web", 3)], &options).expect("the daemon starts")
}

/// What the daemon says about `small`.
fn status(daemon: &Daemon) -> serde_json::Value {
    daemon.vm_status("small").unwrap()
}

fn counter(daemon: &Daemon, name: &str) -> u64 {
    status(daemon)["counters"][name].as_u64().unwrap()
}

fn in_use(daemon: &Daemon, name: &str) -> u64 {
    status(daemon)["usage"][name].as_u64().unwrap()
}

fn unix_socket() -> OwnedFd {
    socket(AddressFamily::UNIX, UnixSocketType::SEQPACKET, None).unwrap()
}

/// A program's call to the guest at port 5, with a socket of messages. The guest accepts it.
fn call_with_messages(daemon: &Daemon, guest: &mut VirtualGuest) -> (OwnedFd, Connection) {
    let mut path = daemon.host_socket("small").into_os_string();
    path.push(".seqpacket");
    let program = unix_socket();
    dial(&program, &SocketAddrUnix::new(PathBuf::from(path)).unwrap()).unwrap();
    send(&program, b"CONNECT 5\n", SendFlags::empty()).unwrap();
    let circuit = guest.accept(5).unwrap();
    let mut answer = [0; 64];
    let (len, _) = recv(&program, &mut answer[..], RecvFlags::empty()).unwrap();
    assert!(answer[..len].starts_with(b"OK "));
    (program, circuit)
}

#[test]
fn too_many_control_messages_wait_and_nobody_else_does() {
    const COUNT: u32 = 1500;
    let daemon = daemon_with("limits.control-messages-per-second=1000");
    let listener = host::listen(&daemon.listener_path("small", 80)).unwrap();
    let other = host::listen(&daemon.listener_path("web", 80)).unwrap();
    let (mut small, mut web) = (guest(&daemon, "small"), guest(&daemon, "web"));
    let circuit = small.connect(2, 80).unwrap();
    let mut program = host::accept(&listener).unwrap();
    let bystander = web.connect(2, 80).unwrap();
    let mut far = host::accept(&other).unwrap();

    let start = Instant::now();
    let (mut sent, mut meanwhile) = (0, 0);
    while sent < COUNT || small.packets_queued() > 0 {
        while sent < COUNT && small.packets_queued() == 0 {
            let header = small.header_of(circuit, Operation::CreditUpdate, 0);
            small.inject(header, b"");
            sent += 1;
        }
        web.send(bystander, b"x").unwrap();
        let mut byte = [0];
        far.read_exact(&mut byte).unwrap();
        meanwhile += 1;
        small.service();
        web.service();
    }
    small.send(circuit, b"still here").unwrap();
    wait_for("room in the ring", &mut [&mut small], |guests| {
        guests[0].packets_queued() == 0
    });
    let mut bytes = [0; 10];
    program.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"still here", "it comes behind all of them");

    // A hundred at once, a last batch of at most 256 on credit, and all the others at one in a millisecond. However busy the
    // machine is, it cannot be faster.
    let least = Duration::from_millis(u64::from(COUNT) - 100 - 256);
    assert!(start.elapsed() >= least, "{:?}", start.elapsed());
    let rests = counter(&daemon, "rests_for_control_messages");
    assert!(rests > 0);
    // If the other guest had to wait as well, it would be served as often as this one.
    assert!(meanwhile > rests + 1, "{meanwhile} in {rests} pauses");
    let report = "more packets without payload than its limit";
    daemon.wait_for_log(report, 1);
    let reports = daemon.log().matches(report).count();
    assert_eq!(reports, 1, "it is said once");
    assert_no_violations(&[&small, &web]);
}

#[test]
fn a_caller_leaves_the_host_and_the_guest_their_unanswered_dials() {
    let daemon = daemon_with("limits.half-open-circuits=8");
    let _listener = host::listen(&daemon.listener_path("small", 80)).unwrap();
    let (mut small, mut web) = (guest(&daemon, "small"), guest(&daemon, "web"));
    small.leave_dials_unanswered();
    let dials: Vec<_> = (0..9).map(|_| web.dial(9, 5, SocketType::Stream)).collect();
    wait_for("the refusals", &mut [&mut web, &mut small], |guests| {
        let is_reset = |dial: &&Connection| guests[0].state(**dial) == State::Reset;
        dials.iter().filter(is_reset).count() >= 7
    });
    let mut program = UnixStream::connect(daemon.host_socket("small")).unwrap();
    program.write_all(b"CONNECT 5\n").unwrap();
    wait_for("the host's call", &mut [&mut small], |guests| {
        guests[0].take_strays().iter().any(|call| call.src_cid == 2)
    });
    daemon.wait_for_log("this caller, or all other VMs together", 1);
    let _open = small.connect(2, 80).unwrap();
}

#[test]
fn a_caller_leaves_the_host_its_circuits() {
    let daemon = daemon_with("limits.circuits=8");
    let (mut small, mut web) = (guest(&daemon, "small"), guest(&daemon, "web"));
    small.listen(5);
    let dials: Vec<_> = (0..9).map(|_| web.dial(9, 5, SocketType::Stream)).collect();
    wait_for("the answers", &mut [&mut web, &mut small], |guests| {
        let is = |state| move |guest: &VirtualGuest, dial: &Connection| guest.state(*dial) == state;
        let count = |state| {
            dials
                .iter()
                .filter(|dial| is(state)(guests[0], dial))
                .count()
        };
        (count(State::Connected), count(State::Reset)) == (2, 7)
    });
    let path = daemon.host_socket("small");
    let caller = std::thread::spawn(move || host::call(&path, 5).unwrap().1);
    wait_for("the program", &mut [&mut small], |_| caller.is_finished());
    let answer = caller.join().unwrap();
    assert!(answer.starts_with("OK "), "{answer}");
}

#[test]
fn dials_of_the_guest_that_are_too_many_are_refused_at_once() {
    const COUNT: usize = 20;
    let daemon = daemon_with("limits.connects-per-second=1");
    let _listener = host::listen(&daemon.listener_path("small", 80)).unwrap();
    let mut small = guest(&daemon, "small");
    let start = Instant::now();
    let dials: Vec<_> = (0..COUNT)
        .map(|_| small.dial(2, 80, SocketType::Stream))
        .collect();
    let mut opened = 0;
    wait_for("all answers", &mut [&mut small], |guests| {
        let states: Vec<_> = dials.iter().map(|dial| guests[0].state(*dial)).collect();
        opened = states
            .iter()
            .filter(|state| **state == State::Connected)
            .count();
        !states.contains(&State::Connecting)
    });
    let most = 1 + start.elapsed().as_secs() as usize;
    assert!((1..=most).contains(&opened), "{opened} of {most}");
    let refused = counter(&daemon, "ended_connect_rate") as usize;
    assert_eq!(refused, COUNT - opened);
    assert_no_violations(&[&small]);
}

#[test]
fn dials_of_programs_that_are_too_many_are_refused_with_the_reason() {
    const COUNT: usize = 20;
    // The guest may not dial at all, which is nothing to the programs that dial it.
    let daemon = daemon_with("limits.connects-per-second=0,limits.host-connects-per-second=1");
    let mut small = guest(&daemon, "small");
    small.listen(5);
    let path = daemon.host_socket("small");
    let start = Instant::now();
    let caller = std::thread::spawn(move || {
        let call = |_| host::call(&path, 5).unwrap().1;
        (0..COUNT).map(call).collect::<Vec<_>>()
    });
    wait_for("the programs", &mut [&mut small], |_| caller.is_finished());
    let most = 1 + start.elapsed().as_secs() as usize;
    let answers = caller.join().unwrap();
    let opened = |answer: &&String| answer.starts_with("OK ");
    let refused = |answer: &&String| answer.starts_with("ERR calls are made more often");
    let opened = answers.iter().filter(opened).count();
    let refused = answers.iter().filter(refused).count();
    assert!((1..=most).contains(&opened), "{answers:?}");
    assert_eq!(opened + refused, COUNT, "{answers:?}");
    assert_eq!(counter(&daemon, "ended_connect_rate") as usize, refused);
    assert_no_violations(&[&small]);
}

#[test]
fn more_stored_messages_than_allowed_end_the_circuit() {
    let daemon = daemon_with("limits.buffered-messages=10");
    let listener = unix_socket();
    let address = SocketAddrUnix::new(daemon.listener_path("small", 80)).unwrap();
    bind(&listener, &address).unwrap();
    listen(&listener, 16).unwrap();
    let mut small = guest(&daemon, "small");
    let circuit = small.connect_with(2, 80, SocketType::SeqPacket).unwrap();
    // The program takes none: some find room in its socket, and the next ones are stored.
    let program = accept(&listener).unwrap();
    let mut most = 0;
    wait_for("the end of the circuit", &mut [&mut small], |guests| {
        // What cannot be sent any more is what is waited for.
        let _ = guests[0].send_message(circuit, b"x", 0);
        most = most.max(in_use(&daemon, "buffered_messages"));
        guests[0].state(circuit) != State::Connected
    });
    assert!((1..=10).contains(&most), "{most} were stored");
    assert_eq!(counter(&daemon, "ended_too_many_messages"), 1);
    assert_eq!(in_use(&daemon, "buffered_messages"), 0);
    daemon.wait_for_log("too many small messages wait", 1);
    drop(program);
}

#[test]
fn messages_for_a_guest_that_takes_none_stay_where_they_are() {
    const LEN: usize = 100_000;
    let daemon = daemon_with("limits.buffered-bytes=150000");
    let mut small = guest(&daemon, "small");
    small.listen_with(5, SocketType::SeqPacket, 64);
    let calls: Vec<_> = (0..20)
        .map(|_| call_with_messages(&daemon, &mut small))
        .collect();
    let message = |call: usize, index: usize| vec![(call * 2 + index) as u8; LEN];
    for (call, (program, _)) in calls.iter().enumerate() {
        for index in 0..2 {
            let sent = send(program, &message(call, index), SendFlags::empty());
            assert_eq!(sent, Ok(LEN));
        }
    }
    let mut most = 0;
    // One of the two that wait may be on its way already but for a few bytes.
    wait_until("messages that wait", || {
        most = most.max(in_use(&daemon, "buffered_bytes"));
        most > LEN as u64
    });
    // Every question is a turn of the worker, in which it could take more.
    for _ in 0..100 {
        most = most.max(in_use(&daemon, "buffered_bytes"));
    }
    assert!(most <= 150_000 + LEN as u64, "{most} bytes were stored");
    // When the guest runs again, all of them arrive.
    for (call, (_, circuit)) in calls.iter().enumerate() {
        for index in 0..2 {
            let mut arrived = None;
            wait_for("the message", &mut [&mut small], |guests| {
                arrived = guests[0].try_receive_message(*circuit).ok();
                arrived.is_some()
            });
            let (bytes, _) = arrived.unwrap();
            assert!(bytes == message(call, index), "message {index} of {call}");
        }
    }
    assert_eq!(in_use(&daemon, "buffered_bytes"), 0);
    assert_no_violations(&[&small]);
}
