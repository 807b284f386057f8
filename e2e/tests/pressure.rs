//! One party that is slow, silent, paused or greedy, while others go on; and the effect of socket options on a circuit.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use e2e::host::{self, Dialed, MessageListener, Messages};
use e2e::pattern::Pattern;
use e2e::{
    CommandSpec, DaemonSpec, Guest, GuestSpec, Kernel, Scene, Shared, SharedGuard, finished,
};
use rustix::net::ReturnFlags;

static SCENE: Shared<Scene> = Shared::new();

fn scene() -> SharedGuard<Scene> {
    SCENE.get(|| {
        let daemon = DaemonSpec::new().vm("web", 3).vm("db", 4).vm("paused", 5);
        let guests = [
            ("web", Kernel::V6_1),
            ("db", Kernel::V6_12),
            ("paused", Kernel::V6_12),
        ];
        let guests = guests.map(|(name, kernel)| GuestSpec::new(name, kernel).with_tools());
        Scene::start_with(daemon, guests.into()).unwrap()
    })
}

/// The guests of both kernels; the third is the one that is paused, alone.
fn both(scene: &Scene) -> [&Guest; 2] {
    [scene.guest("web"), scene.guest("db")]
}

fn listen(scene: &Scene, guest: &Guest, port: u32) -> UnixListener {
    UnixListener::bind(scene.daemon.listener_path(guest.name(), port)).unwrap()
}

fn accept(listener: &UnixListener) -> UnixStream {
    let (stream, _) = listener.accept().unwrap();
    host::bound(&stream).unwrap();
    stream
}

/// A round trip through a guest's echo server.
fn ping(stream: &mut UnixStream) {
    stream.write_all(b"ping").unwrap();
    let mut answer = [0; 4];
    stream.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"ping");
}

/// Runs `meanwhile` while another thread makes round trips to every guest given, and returns how many there were. There
/// must be at least one to each after `meanwhile` has begun.
fn while_pinging<T>(scene: &Scene, guests: &[&Guest], meanwhile: impl FnOnce() -> T) -> (T, usize) {
    static PORT: AtomicUsize = AtomicUsize::new(20_000);
    let port = PORT.fetch_add(1, Ordering::Relaxed) as u32;
    let servers: Vec<_> = guests
        .iter()
        .map(|guest| guest.serve(&port.to_string(), "echo").unwrap())
        .collect();
    let mut streams: Vec<UnixStream> = guests
        .iter()
        .map(|guest| host::dial(&scene.daemon.host_socket(guest.name()), port).unwrap())
        .collect();
    let done = AtomicBool::new(false);
    let (result, rounds) = thread::scope(|scope| {
        let pinger = scope.spawn(|| {
            let mut rounds = 0;
            loop {
                streams.iter_mut().for_each(ping);
                rounds += 1;
                if done.load(Ordering::Relaxed) {
                    return rounds;
                }
            }
        });
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(meanwhile));
        done.store(true, Ordering::Relaxed);
        (result, pinger.join().unwrap())
    });
    servers.iter().for_each(e2e::Running::kill);
    match result {
        Ok(result) => (result, rounds),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

// ---- Slow and silent host programs ----

#[test]
fn a_full_backlog_of_the_host_holds_up_nobody_else() {
    let scene = scene();
    for guest in both(&scene) {
        // Nothing is accepted: the backlog holds one more than its number.
        let path = scene.daemon.listener_path(guest.name(), 1000);
        let listener = host::listen_with_backlog(&path, 0).unwrap();
        let first = guest
            .probe("connect:2:1000 touch:/tmp/in-backlog send:1 eof")
            .unwrap();
        guest
            .wait_until("[ -e /tmp/in-backlog ]", Duration::from_secs(60))
            .unwrap();
        let ((), rounds) = while_pinging(&scene, &both(&scene), || {
            guest
                .probe_to_end("fails:ECONNRESET:connect:2:1000")
                .unwrap();
        });
        eprintln!("{}: {rounds} round trips during one dial", guest.name());
        scene
            .daemon
            .wait_for_log("its backlog is full", Duration::from_secs(10))
            .unwrap();
        // A dial that waits gets in as soon as there is room.
        let second = guest.probe("connect:2:1000 send:1 eof").unwrap();
        for probe in [first, second] {
            let mut stream = accept(&listener);
            host::receive(&mut stream, &mut Pattern::new(0), 1).unwrap();
            drop(stream);
            finished(probe).unwrap();
        }
    }
}

#[test]
fn a_host_program_that_stops_reading_holds_up_only_its_own_circuit() {
    let scene = scene();
    for guest in both(&scene) {
        let lazy = listen(&scene, guest, 1002);
        let blocked = guest.probe("connect:2:1002 send:5000000 close").unwrap();
        let mut lazy = accept(&lazy);
        let busy = listen(&scene, guest, 1003);
        let ((), rounds) = while_pinging(&scene, &both(&scene), || {
            let sender = guest.probe("connect:2:1003 send:20000000 close").unwrap();
            let received = host::drain(&mut accept(&busy), &mut Pattern::new(0)).unwrap();
            assert_eq!(received, 20_000_000);
            finished(sender).unwrap();
        });
        eprintln!("{}: {rounds} round trips beside 20 MB", guest.name());
        assert!(!blocked.has_ended(), "what it sends is not read");
        let received = host::drain(&mut lazy, &mut Pattern::new(0)).unwrap();
        assert_eq!(received, 5_000_000);
        finished(blocked).unwrap();
    }
}

#[test]
fn a_guest_program_that_stops_reading_holds_up_only_its_own_circuit() {
    let scene = scene();
    for guest in both(&scene) {
        let socket = scene.daemon.host_socket(guest.name());
        let lazy = guest
            .probe_listening("listen:1005 accept wait:/tmp/lazy drain")
            .unwrap();
        let mut stream = host::dial(&socket, 1005).unwrap();
        stream.set_nonblocking(true).unwrap();
        // Until nothing more is taken: the guest's buffer, what the daemon keeps and the socket are full.
        let sent = send_until_blocked(&mut stream);
        let ((), rounds) = while_pinging(&scene, &both(&scene), || {
            let reader = guest.probe_listening("listen:1008 accept drain").unwrap();
            let mut busy = host::dial(&socket, 1008).unwrap();
            host::send(&mut busy, &mut Pattern::new(0), 20_000_000).unwrap();
            drop(busy);
            assert!(finished(reader).unwrap().ends_with("drained 20000000"));
        });
        eprintln!(
            "{}: {rounds} round trips beside 20 MB, {sent} bytes held",
            guest.name()
        );
        guest.shell("touch /tmp/lazy").unwrap();
        drop(stream);
        assert!(
            finished(lazy)
                .unwrap()
                .ends_with(&format!("drained {sent}"))
        );
    }
}

/// Sends until the socket has been full for a second, and returns how many bytes it took.
fn send_until_blocked(stream: &mut UnixStream) -> u64 {
    let mut pattern = Pattern::new(0);
    let mut sent = 0;
    let mut last = Instant::now();
    let mut chunk = Vec::new();
    while last.elapsed() < Duration::from_secs(1) {
        if chunk.is_empty() {
            chunk = pattern.take(4096);
        }
        match stream.write(&chunk) {
            Ok(count) => {
                chunk.drain(..count);
                sent += count as u64;
                last = Instant::now();
            }
            Err(error) if error.kind() == ErrorKind::WouldBlock => thread::yield_now(),
            Err(error) => panic!("{error}"),
        }
    }
    sent
}

// ---- A paused VM ----

/// How long a VM is paused.
fn pause() -> Duration {
    match e2e::is_full() {
        true => Duration::from_secs(60),
        false => Duration::from_secs(12),
    }
}

#[test]
fn a_paused_vm_keeps_its_circuits_and_holds_up_nobody() {
    let scene = scene();
    let guest = scene.guest("paused");
    let socket = scene.daemon.host_socket("paused");
    let server = guest.serve("1010", "echo").unwrap();
    let mut idle = host::dial(&socket, 1010).unwrap();
    ping(&mut idle);
    let reader = guest
        .probe_listening("listen:1011 accept touch:/tmp/reading drain")
        .unwrap();
    let mut to_guest = host::dial(&socket, 1011).unwrap();
    let listener = listen(&scene, guest, 1012);
    let sender = guest
        .probe("connect:2:1012 send:200000 wait:/tmp/resumed send:200000 close")
        .unwrap();
    let mut from_guest = accept(&listener);
    let mut received = Pattern::new(0);
    host::receive(&mut from_guest, &mut received, 1).unwrap();
    guest
        .wait_until("[ -e /tmp/reading ]", Duration::from_secs(60))
        .unwrap();

    guest.qmp().stop().unwrap();
    let feeder = thread::spawn(move || {
        // Far more than all buffers: the rest waits in this program.
        host::send(&mut to_guest, &mut Pattern::new(0), 10_000_000).unwrap();
    });
    let ((), rounds) = while_pinging(&scene, &both(&scene), || {
        // No event ends this wait: a pause that is longer than every deadline of a handshake is the matter of the test.
        thread::sleep(pause());
    });
    eprintln!("{rounds} round trips to others during the pause");
    assert!(!feeder.is_finished(), "a paused guest takes 10 MB");
    guest.qmp().cont().unwrap();

    ping(&mut idle);
    feeder.join().unwrap();
    assert!(finished(reader).unwrap().ends_with("drained 10000000"));
    guest.shell("touch /tmp/resumed").unwrap();
    host::receive(&mut from_guest, &mut received, 199_999).unwrap();
    // The guest's second piece begins its stream where the first ended.
    let rest = host::drain(&mut from_guest, &mut received).unwrap();
    assert_eq!(rest, 200_000);
    finished(sender).unwrap();
    server.kill();

    // Dials to a paused VM wait for it up to a deadline, and only so many at once.
    guest.qmp().stop().unwrap();
    let mut waiting = Vec::new();
    let refused = loop {
        assert!(waiting.len() <= HALF_OPEN_LIMIT, "there is no limit");
        let mut stream = host::connect(&socket).unwrap();
        stream.write_all(b"CONNECT 9\n").unwrap();
        if waiting.len() == HALF_OPEN_LIMIT {
            break host::read_line(&mut stream).unwrap();
        }
        waiting.push(stream);
    };
    assert!(refused.contains("unanswered dials"), "{refused}");
    let ((), _) = while_pinging(&scene, &both(&scene), || {
        for stream in &mut waiting {
            let answer = host::read_line(stream).unwrap();
            assert!(answer.contains("did not answer in time"), "{answer}");
        }
    });
    guest.qmp().cont().unwrap();
    // And the limit is free again.
    let Dialed::Refused(answer) = host::try_dial(&socket, 9).unwrap() else {
        panic!("nothing listens on port 9");
    };
    assert!(answer.contains("nothing listens"), "{answer}");
}

/// Dials of one VM that may be unanswered at once.
const HALF_OPEN_LIMIT: usize = 2048;

// ---- Crowds ----

/// How many circuits are open, or send, at once.
const CROWD: usize = 1000;

#[test]
fn a_thousand_circuits_each_way_are_open_at_once_and_all_alive() {
    let scene = scene();
    let guests = both(&scene);
    thread::scope(|scope| {
        for guest in guests {
            let scene = &scene;
            scope.spawn(move || a_thousand_each_way(scene, guest));
        }
    });
}

fn a_thousand_each_way(scene: &Scene, guest: &Guest) {
    let listener = listen(scene, guest, 1020);
    let calls = thread::spawn(move || -> Vec<UnixStream> {
        (0..CROWD).map(|_| accept(&listener)).collect()
    });
    guest.shell("mkdir -p /tmp/hold").unwrap();
    let holder = guest
        .start_probe(&format!("hold 2 1020 {CROWD} /tmp/hold"))
        .unwrap();
    let server = guest.serve("1021", "echo").unwrap();
    let socket = scene.daemon.host_socket(guest.name());
    let mut dialed: Vec<UnixStream> = (0..CROWD)
        .map(|_| host::dial(&socket, 1021).unwrap())
        .collect();
    let mut called = calls.join().unwrap();
    guest
        .wait_until("[ -e /tmp/hold/open ]", Duration::from_secs(120))
        .unwrap();

    // All are open now, both ways. Each carries a byte and its answer.
    for stream in &mut dialed {
        stream.write_all(b"ping").unwrap();
    }
    for stream in &mut dialed {
        let mut answer = [0; 4];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"ping");
    }
    guest.shell("touch /tmp/hold/go /tmp/hold/end").unwrap();
    for stream in &mut called {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        stream.write_all(&byte).unwrap();
    }
    assert_eq!(finished(holder).unwrap(), format!("alive {CROWD}"));
    server.kill();
}

#[test]
fn a_thousand_circuits_that_send_at_once_share_and_hold_up_nobody() {
    let scene = scene();
    for guest in both(&scene) {
        let listener = listen(&scene, guest, 1030);
        let total = 60_000;
        let counted = AtomicUsize::new(0);
        let (printed, rounds) = while_pinging(&scene, &both(&scene), || {
            thread::scope(|scope| {
                let burst = guest
                    .start_probe(&format!("burst 2 1030 {CROWD} {total}"))
                    .unwrap();
                // One reader for all, which is slower than a thousand writers: so all of them are blocked most of the time.
                let counted = &counted;
                scope.spawn(move || {
                    let streams: Vec<UnixStream> = (0..CROWD).map(|_| accept(&listener)).collect();
                    for mut stream in streams {
                        let received = host::drain(&mut stream, &mut Pattern::new(0)).unwrap();
                        stream.write_all(&received.to_le_bytes()).unwrap();
                        counted.fetch_add(1, Ordering::Relaxed);
                    }
                });
                finished(burst).unwrap()
            })
        });
        eprintln!(
            "{}: {printed}; {rounds} round trips meanwhile",
            guest.name()
        );
        assert!(printed.ends_with(&format!("finished {CROWD}")), "{printed}");
        assert_eq!(counted.load(Ordering::Relaxed), CROWD);
    }
}

// ---- What options make of a socket ----

/// socat sets options that the probe has no safe way to, and hands the socket over as standard input and output.
fn with_options(address: &str, steps: &str) -> CommandSpec {
    // In a file of their own, because colons part the words of socat's addresses.
    static COUNTER: AtomicUsize = AtomicUsize::new(0);
    let file = format!("/tmp/.steps-{}", COUNTER.fetch_add(1, Ordering::Relaxed));
    CommandSpec::new(format!(
        "printf '#!/bin/sh\nexec {} run inherit {steps} >&2\n' > {file} && chmod 755 {file} && \
         exec socat {address} EXEC:{file},nofork",
        e2e::probe::PROGRAM
    ))
}

/// `SO_VM_SOCKETS_BUFFER_MIN_SIZE` and `SO_VM_SOCKETS_BUFFER_SIZE` as 64-bit numbers, in socat's words.
fn buffer_options(bytes: u64) -> String {
    let number: String = bytes
        .to_le_bytes()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    format!("setsockopt=40:2:x{number},setsockopt=40:1:x{number},setsockopt=40:0:x{number}")
}

#[test]
fn receivers_with_large_buffers_get_every_byte() {
    let scene = scene();
    for guest in both(&scene) {
        // Only larger ones than usual: socat sets the option on a socket that is connected, and Linux resets a connection whose
        // buffer shrinks below what is on its way.
        for (bytes, total) in [(1 << 20, 5_000_000), (8 << 20, 20_000_000)] {
            let listener = listen(&scene, guest, 1040);
            let address = format!("VSOCK-CONNECT:2:1040,{}", buffer_options(bytes));
            let spec = with_options(&address, &format!("drain send:{total} close"));
            let probe = guest.start_spec(spec).unwrap();
            let mut stream = accept(&listener);
            host::send(&mut stream, &mut Pattern::new(0), total).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let received = host::drain(&mut stream, &mut Pattern::new(0)).unwrap();
            let output = probe.wait().unwrap();
            assert_eq!(output.code, 0, "{bytes}: {}", output.error_text());
            assert_eq!(received, total);
            let drained = format!("drained {total}");
            assert!(output.error_text().contains(&drained), "{bytes}");
            std::fs::remove_file(scene.daemon.listener_path(guest.name(), 1040)).unwrap();
        }
    }
}

#[test]
fn a_sender_with_a_buffer_of_one_byte_gets_everything_out() {
    let scene = scene();
    for guest in both(&scene) {
        // With such a buffer Linux receives nothing at all (ENOMEM), but it sends; since 6.12.92 no more at once than the buffer is.
        let listener = listen(&scene, guest, 1046);
        let address = format!("VSOCK-CONNECT:2:1046,{}", buffer_options(1));
        let probe = guest
            .start_spec(with_options(&address, "fails:ENOMEM:eof send:3000 close"))
            .unwrap();
        let received = host::drain(&mut accept(&listener), &mut Pattern::new(0)).unwrap();
        let output = probe.wait().unwrap();
        assert_eq!(output.code, 0, "{}", output.error_text());
        assert_eq!(received, 3000);
    }
}

#[test]
fn a_look_at_what_comes_takes_nothing() {
    let scene = scene();
    for guest in both(&scene) {
        let probe = guest
            .probe_listening("listen:1041 accept await peek:10 peek:1 recv:5 peek:3 recv:99995 eof")
            .unwrap();
        let mut stream = host::dial(&scene.daemon.host_socket(guest.name()), 1041).unwrap();
        host::send(&mut stream, &mut Pattern::new(0), 100_000).unwrap();
        drop(stream);
        finished(probe).unwrap();
    }
}

#[test]
fn a_low_water_mark_is_kept() {
    let scene = scene();
    for guest in both(&scene) {
        let listener = listen(&scene, guest, 1042);
        let spec = with_options(
            "VSOCK-CONNECT:2:1042,rcvlowat=100000",
            "send:1 wait:/tmp/little poll:quiet send:1 await poll:ready recv:100000 eof",
        );
        let probe = guest.start_spec(spec).unwrap();
        let mut stream = accept(&listener);
        let (mut sent, mut received) = (Pattern::new(0), Pattern::new(0));
        host::receive(&mut stream, &mut received, 1).unwrap();
        host::send(&mut stream, &mut sent, 99_999).unwrap();
        guest.shell("touch /tmp/little").unwrap();
        host::receive(&mut stream, &mut received, 1).unwrap();
        host::send(&mut stream, &mut sent, 1).unwrap();
        drop(stream);
        let output = probe.wait().unwrap();
        assert_eq!(output.code, 0, "{}", output.error_text());
        guest.shell("rm /tmp/little").unwrap();
    }
}

#[test]
fn zero_copy_senders_and_large_packets_arrive_whole() {
    let scene = scene();
    // Linux has MSG_ZEROCOPY for vsock since 6.7; SO_ZEROCOPY is option 60 of level 1.
    let guest = scene.guest("db");
    let listener = listen(&scene, guest, 1043);
    for chunk in [4096, 65_536, 1_000_000] {
        let spec = with_options(
            "VSOCK-CONNECT:2:1043,setsockopt-int=1:60:1",
            &format!("zerocopy:8000000:{chunk} close"),
        );
        let probe = guest.start_spec(spec).unwrap();
        let mut stream = accept(&listener);
        let received = host::drain(&mut stream, &mut Pattern::new(0)).unwrap();
        let output = probe.wait().unwrap();
        assert_eq!(output.code, 0, "{chunk}: {}", output.error_text());
        assert_eq!(received, 8_000_000, "{chunk}");
    }
    for guest in both(&scene) {
        let listener = listen(&scene, guest, 1044);
        for chunk in [1_000_000, 65_536, 28_001] {
            let probe = guest
                .probe(&format!("connect:2:1044 send:8000000:{chunk} close"))
                .unwrap();
            let mut stream = accept(&listener);
            let received = host::drain(&mut stream, &mut Pattern::new(0)).unwrap();
            finished(probe).unwrap();
            assert_eq!(received, 8_000_000, "{chunk}");
        }
    }
}

#[test]
fn one_byte_at_a_time_both_ways() {
    let scene = scene();
    for guest in both(&scene) {
        // More packets than a receiver that limits their number (Linux since 6.12.92) has room for, before the first is read.
        let probe = guest
            .probe_listening("listen:1045 accept wait:/tmp/specks recv:20000:1 send:20000:1 close")
            .unwrap();
        let mut stream = host::dial(&scene.daemon.host_socket(guest.name()), 1045).unwrap();
        let mut pattern = Pattern::new(0);
        for _ in 0..20_000 {
            host::send(&mut stream, &mut pattern, 1).unwrap();
        }
        guest.shell("touch /tmp/specks").unwrap();
        let received = host::drain(&mut stream, &mut Pattern::new(0)).unwrap();
        assert_eq!(received, 20_000);
        finished(probe).unwrap();
    }
}

// ---- Messages ----

#[test]
fn messages_between_guest_and_host_keep_their_bounds() {
    let scene = scene();
    let sizes = [1, 3776, 3777, 65_536, 200_000];
    let say = |word: &str| -> String {
        let words = sizes.iter().map(|size| format!("{word}:{size} "));
        words.collect()
    };
    for guest in both(&scene) {
        // The guest calls.
        let path = scene.daemon.listener_path(guest.name(), 1050);
        let listener = MessageListener::bind(&path).unwrap();
        let steps = format!(
            "connect:2:1050:seqpacket {} {} eof",
            say("message"),
            say("expect")
        );
        let probe = guest.probe(&steps).unwrap();
        exchange(&listener.accept().unwrap(), &sizes);
        finished(probe).unwrap();

        // The host calls.
        let steps = format!(
            "listen:1051:seqpacket accept {} {} eof",
            say("message"),
            say("expect")
        );
        let probe = guest.probe_listening(&steps).unwrap();
        let messages = Messages::dial(&scene.daemon.host_socket(guest.name()), 1051).unwrap();
        exchange(&messages, &sizes);
        drop(messages);
        finished(probe).unwrap();
    }
}

/// Receives a message of each size and sends one of each back.
fn exchange(messages: &Messages, sizes: &[usize]) {
    let (mut received, mut sent) = (Pattern::new(0), Pattern::new(0));
    for size in sizes {
        let (message, flags) = messages.receive().unwrap();
        assert_eq!(message.len(), *size);
        received.check(&message).unwrap();
        assert!(!flags.contains(ReturnFlags::TRUNC));
    }
    for size in sizes {
        messages.send(&sent.take(*size), false).unwrap();
    }
    messages.finish().unwrap();
}

#[test]
fn a_message_that_can_never_arrive_ends_its_circuit() {
    let scene = scene();
    for guest in both(&scene) {
        let probe = guest
            .probe_listening("listen:1052:seqpacket accept eof fails:EPIPE:message:1")
            .unwrap();
        let messages = Messages::dial(&scene.daemon.host_socket(guest.name()), 1052).unwrap();
        // Larger than the guest's whole buffer. Linux shows a reader the reset as an end, and only a writer the error.
        messages.send(&vec![0; 300_000], false).unwrap();
        finished(probe).unwrap();
        scene
            .daemon
            .wait_for_log("larger than the receiver's buffer", Duration::from_secs(10))
            .unwrap();
    }
}
