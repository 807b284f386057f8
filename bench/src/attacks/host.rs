//! Programs of the host.

use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::event::epoll;
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType as UnixSocketType, connect,
    recv, send, socket,
};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use wire::vsock::{Operation, SocketType};

use crate::guest::{ConnectError, Connection, State, VirtualGuest, drive};
use crate::host;

use super::header::wait_for_request;
use super::scene::{ECHO_PORT, PATIENCE, SMALL, Scene, assert_works};
use super::{Attack, circuit_ends, nothing};

pub(super) const ATTACKS: &[Attack] = &[
    nothing(
        "callers-that-say-nothing",
        "1,500 connections to the host socket that say nothing",
        silent,
    ),
    nothing(
        "a-request-byte-by-byte",
        "200 requests that arrive one byte at a time and never end",
        slow,
    ),
    nothing("garbage", "requests that are none", garbage),
    nothing(
        "gone-before-the-answer",
        "programs that leave between their request and the guest's answer",
        gone,
    ),
    nothing(
        "a-listener-that-never-accepts",
        "a listener with a full backlog that is never accepted from",
        full_backlog,
    ),
    nothing(
        "a-reader-that-never-reads",
        "programs that take 40 circuits' worth of data and read none of it",
        never_reads,
    ),
    nothing(
        "listeners-that-are-none",
        "a directory, a file, and a link to nowhere where a listener belongs",
        odd_listeners,
    ),
    nothing(
        "descriptors-as-data",
        "programs that send descriptors along with their data",
        descriptors,
    ),
    circuit_ends(
        "watches-without-number",
        "a program whose socket is watched 80,000 times, so that each call on it takes long",
        "take too long, again and again",
        watched,
    ),
    nothing(
        "a-message-too-long",
        "a message of more bytes than the guest's whole buffer",
        long_message,
    ),
    nothing(
        "messages-of-no-bytes",
        "messages without a byte, over and over",
        empty_messages,
    ),
    nothing(
        "a-request-in-two-messages",
        "half a request in a message",
        half_a_message,
    ),
    nothing(
        "messages-for-a-guest-that-takes-none",
        "two messages of 100,000 bytes from each of 20 programs to a guest that does not run, where 150,000 bytes may wait: \
         the others stay in their sockets, and all arrive when it does run",
        untaken_messages,
    ),
    nothing(
        "dial-storm",
        "3,000 calls of a port that the guest refuses",
        dial_storm,
    ),
    nothing(
        "garbage-for-the-control-socket",
        "requests that are none, and 200 connections that say nothing, on the control socket",
        control,
    ),
];

fn silent(scene: &mut Scene<'_>) {
    for _ in 0..1500 {
        let stream = UnixStream::connect(scene.host_socket()).expect("it listens");
        scene.keep(stream);
    }
    // There are more than may wait: another one is refused.
    let mut stream = UnixStream::connect(scene.host_socket()).expect("it listens");
    let answer = host::read_line(&mut stream).expect("an answer");
    assert!(answer.starts_with("ERR too many programs"), "{answer:?}");
    scene.keep(stream);
}

fn slow(scene: &mut Scene<'_>) {
    let guest = scene.attach();
    let mut streams: Vec<_> = (0..200)
        .map(|_| UnixStream::connect(scene.host_socket()).expect("it listens"))
        .collect();
    for byte in b"CONNECT 1234567" {
        for stream in &mut streams {
            stream.write_all(&[*byte]).expect("it is open");
        }
    }
    scene.keep((guest, streams));
}

fn garbage(scene: &mut Scene<'_>) {
    let guest = scene.attach();
    for bytes in [
        &b"\0\0\0\0\0\0\0\0"[..],
        b"GET / HTTP/1.1\r\n\r\n",
        b"CONNECT \xff\xff\n",
        b"CONNECT 99999999999999999999\n",
        &[b'C'; 4096],
        &[b'\n'; 4096],
    ] {
        let mut stream = UnixStream::connect(scene.host_socket()).expect("it listens");
        // It may be refused before the last byte is sent.
        let _ = stream.write_all(bytes);
        let answer = host::read_line(&mut stream).expect("an answer");
        assert!(answer.starts_with("ERR "), "{answer:?}");
    }
    scene.keep(guest);
}

/// A peer's daemon dies of this.
fn gone(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    for _ in 0..100 {
        let mut program = UnixStream::connect(scene.host_socket()).expect("it listens");
        program
            .write_all(b"CONNECT 99\nand data")
            .expect("it is open");
        let request = wait_for_request(&mut guest);
        drop(program);
        let header = guest.header(Operation::Response, 2, 99, request.src_port);
        guest.inject(header, b"");
        guest.service();
        guest.take_strays();
    }
    assert_works(&mut guest);
    scene.keep(guest);
}

/// A peer's whole VM stops at this.
fn full_backlog(scene: &mut Scene<'_>) {
    let address = SocketAddrUnix::new(scene.daemon.listener_path("mallory", 81)).expect("a path");
    let listener = socket(AddressFamily::UNIX, UnixSocketType::STREAM, None).expect("a socket");
    rustix::net::bind(&listener, &address).expect("the path is free");
    rustix::net::listen(&listener, 1).expect("it listens");
    let mut guest = scene.attach();
    let circuits: Vec<_> = (0..50)
        .map(|_| guest.dial(2, 81, SocketType::Stream))
        .collect();
    // Everything else goes on while they wait.
    for _ in 0..20 {
        assert_works(&mut guest);
    }
    let answered = drive(&mut [&mut guest], PATIENCE, |guests| {
        circuits
            .iter()
            .all(|circuit| guests[0].state(*circuit) != State::Connecting)
            .then_some(())
    });
    answered.expect("each is answered in the end");
    scene.wait_for_log("backlog is full").expect("it says why");
    let path = scene.daemon.listener_path("mallory", 81);
    std::fs::remove_file(path).expect("it was there");
    scene.keep((guest, listener));
}

fn never_reads(scene: &mut Scene<'_>) {
    let listener = scene.listen(80);
    let mut guest = scene.attach();
    let mut circuits = Vec::new();
    for _ in 0..40 {
        circuits.push(guest.connect(2, 80).expect("there is a listener"));
        let program = host::accept(&listener).expect("a call came");
        scene.keep(program);
    }
    let bytes = [7; 64 * 1024];
    let full = drive(&mut [&mut guest], PATIENCE, |guests| {
        for circuit in &circuits {
            guests[0].try_send(*circuit, &bytes).expect("it is open");
        }
        circuits
            .iter()
            .all(|circuit| guests[0].credit(*circuit) == 0)
            .then_some(())
    });
    full.expect("the credit ends somewhere");
    assert_works(&mut guest);
    scene.keep((guest, listener));
}

fn odd_listeners(scene: &mut Scene<'_>) {
    let path = |port| scene.daemon.listener_path("mallory", port);
    std::fs::create_dir(path(81)).expect("the path is free");
    std::fs::write(path(82), b"no socket").expect("the path is free");
    std::os::unix::fs::symlink("/nowhere/at/all", path(83)).expect("the path is free");
    let mut guest = scene.attach();
    for port in [81, 82, 83] {
        let refused = guest.connect(2, port);
        assert!(
            matches!(refused, Err(ConnectError::Refused(_))),
            "{refused:?}"
        );
    }
    assert_works(&mut guest);
    std::fs::remove_dir(path(81)).expect("it is there");
    for port in [82, 83] {
        std::fs::remove_file(path(port)).expect("it is there");
    }
    scene.keep(guest);
}

fn descriptors(scene: &mut Scene<'_>) {
    let (mut guest, circuit, program) = scene.circuit();
    send_descriptors(scene, &mut guest, circuit, program);
    guest.listen(90);
    let path = scene.host_socket();
    let caller = std::thread::spawn(move || host::call(&path, 90).expect("an answer"));
    let circuit = guest.accept(90).expect("a call comes");
    let (program, _) = drive(&mut [&mut guest], PATIENCE, |_| {
        caller.is_finished().then_some(())
    })
    .map(|()| caller.join().expect("it is answered"))
    .expect("in time");
    send_descriptors(scene, &mut guest, circuit, program);
    scene.keep(guest);
}

/// The daemon's own user is cut off and not refused.
fn watched(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    guest.listen(90);
    let path = scene.host_socket();
    let caller = std::thread::spawn(move || host::call(&path, 90).expect("an answer"));
    let circuit = guest.accept(90).expect("a call comes");
    let (program, _) = drive(&mut [&mut guest], PATIENCE, |_| {
        caller.is_finished().then_some(())
    })
    .map(|()| caller.join().expect("it is answered"))
    .expect("in time");
    let watches = watch(&program).expect("there are descriptors");
    let cut = drive(&mut [&mut guest], PATIENCE, |guests| {
        let _ = guests[0].try_send(circuit, b"x");
        (guests[0].state(circuit) == State::Reset).then_some(())
    });
    cut.expect("the circuit is cut");
    drop((watches, program));
    assert_works(&mut guest);
    scene.keep(guest);
}

/// Has 80 epoll instances wait for 1,000 duplicates of a socket each.
fn watch(socket: &UnixStream) -> io::Result<(Vec<UnixStream>, Vec<OwnedFd>)> {
    let limit = getrlimit(Resource::Nofile);
    let current = limit.maximum;
    setrlimit(Resource::Nofile, Rlimit { current, ..limit })?;
    let duplicates = (0..1000).map(|_| socket.try_clone());
    let duplicates = duplicates.collect::<io::Result<Vec<UnixStream>>>()?;
    let instances = (0..80).map(|_| {
        let instance = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for duplicate in &duplicates {
            let flags = epoll::EventFlags::IN | epoll::EventFlags::ET;
            epoll::add(&instance, duplicate, epoll::EventData::new_u64(0), flags)?;
        }
        Ok(instance)
    });
    let instances = instances.collect::<io::Result<Vec<OwnedFd>>>()?;
    Ok((duplicates, instances))
}

/// Since Linux 6.16 they cannot be sent; before, the daemon closes them.
fn send_descriptors(
    scene: &mut Scene<'_>,
    guest: &mut VirtualGuest,
    circuit: Connection,
    program: UnixStream,
) {
    let (probe, _other) = UnixStream::pair().expect("a pair");
    let refused = sys::peer::refuse_descriptors(probe.as_fd()).expect("a UNIX socket");
    let raw = crate::frontend::raw::RawVmm::from_stream(program).expect("it is a socket");
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC);
    let event = event.expect("a descriptor");
    let files = vec![event.as_fd(); 50];
    let before = scene.daemon.descriptor_count();
    for _ in 0..50 {
        let sent = raw.send_bytes(b"data", &files);
        if refused {
            let error = sent.expect_err("it is refused");
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied);
            raw.send_bytes(b"data", &[]).expect("it is open");
        } else {
            sent.expect("it is open");
        }
    }
    let arrived = guest.receive(circuit, 200).expect("the data arrives");
    assert_eq!(arrived.len(), 200);
    assert!(
        scene.daemon.descriptor_count() < before + 40,
        "they stay with the program"
    );
    scene.keep(raw);
}

fn call_with_messages(scene: &Scene<'_>) -> std::os::fd::OwnedFd {
    let mut path = scene.host_socket().into_os_string();
    path.push(".seqpacket");
    let program = socket(AddressFamily::UNIX, UnixSocketType::SEQPACKET, None).expect("a socket");
    connect(&program, &SocketAddrUnix::new(path).expect("a path")).expect("it listens");
    program
}

fn long_message(scene: &mut Scene<'_>) {
    let mut guest = scene.attach_with(crate::guest::GuestConfig {
        buffer_bytes: 10_000,
        ..Default::default()
    });
    guest.listen_with(80, SocketType::SeqPacket, 10);
    let program = call_with_messages(scene);
    send(&program, b"CONNECT 80\n", SendFlags::NOSIGNAL).expect("it is open");
    let far = guest.accept(80).expect("a call comes");
    send(&program, &[7; 10_001], SendFlags::NOSIGNAL).expect("it is open");
    super::scene::assert_reset(&mut guest, far);
    scene
        .wait_for_log("larger than the receiver")
        .expect("it says why");
    assert_works(&mut guest);
    scene.keep((guest, program));
}

fn empty_messages(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    guest.listen_with(80, SocketType::SeqPacket, 10);
    let program = call_with_messages(scene);
    send(&program, b"CONNECT 80\n", SendFlags::NOSIGNAL).expect("it is open");
    guest.accept(80).expect("a call comes");
    for _ in 0..1000 {
        // What an empty message means is for the device to say; it must not be a loop.
        let _ = send(&program, b"", SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
    }
    guest.service();
    assert_works(&mut guest);
    scene.keep((guest, program));
}

fn half_a_message(scene: &mut Scene<'_>) {
    let guest = scene.attach();
    for bytes in [&b"CONN"[..], b"", b"CONNECT 80"] {
        let program = call_with_messages(scene);
        let _ = send(&program, bytes, SendFlags::NOSIGNAL);
        scene.keep(program);
    }
    scene.keep(guest);
}

/// What may wait of them is what the line's share is, and one message more.
fn untaken_messages(scene: &mut Scene<'_>) {
    const LEN: usize = 100_000;
    const MOST: u64 = 150_000 + LEN as u64;
    scene.attack_from(SMALL);
    let mut guest = scene.attach();
    guest.listen_with(80, SocketType::SeqPacket, 10);
    let mut calls = Vec::new();
    for _ in 0..20 {
        let program = call_with_messages(scene);
        send(&program, b"CONNECT 80\n", SendFlags::NOSIGNAL).expect("it is open");
        calls.push((guest.accept(80).expect("a call comes"), program));
    }
    for (_, program) in &calls {
        // The guest has answered, and so will the device.
        let mut answer = [0; 64];
        let (len, _) = recv(program, &mut answer[..], RecvFlags::empty()).expect("an answer");
        assert!(answer[..len].starts_with(b"OK "));
    }
    let message = |call: usize, index: usize| vec![(call * 2 + index) as u8; LEN];
    for (call, (_, program)) in calls.iter().enumerate() {
        for index in 0..2 {
            let sent = send(program, &message(call, index), SendFlags::NOSIGNAL);
            assert_eq!(sent, Ok(LEN));
        }
    }
    let waiting = || {
        let usage = &scene.status()["usage"];
        usage["buffered_bytes"].as_u64().expect("it is a number")
    };
    let mut most = 0;
    let until = Instant::now() + PATIENCE;
    // One of the two that wait may be on its way already but for a few bytes.
    while most <= LEN as u64 {
        most = most.max(waiting());
        assert!(Instant::now() < until, "{most} bytes wait");
    }
    // Every question is a turn of the worker, in which it could take more.
    for _ in 0..100 {
        most = most.max(waiting());
    }
    assert!(most <= MOST, "{most} bytes wait");
    for (call, (circuit, _)) in calls.iter().enumerate() {
        for index in 0..2 {
            let arrived = drive(&mut [&mut guest], PATIENCE, |guests| {
                guests[0].try_receive_message(*circuit).ok()
            });
            let (bytes, _) = arrived.expect("it arrives");
            assert!(bytes == message(call, index), "message {index} of {call}");
        }
    }
    assert_eq!(waiting(), 0);
    scene.keep((guest, calls));
}

fn dial_storm(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let path = scene.host_socket();
    // Each hundred has its own time: on a busy machine all of them together take long.
    for _ in 0..30 {
        let path = path.clone();
        let caller = std::thread::spawn(move || {
            for _ in 0..100 {
                let (_, answer) = host::call(&path, 99).expect("an answer");
                assert!(answer.starts_with("ERR "), "{answer:?}");
            }
        });
        let done = drive(&mut [&mut guest], PATIENCE, |_| {
            caller.is_finished().then_some(())
        });
        done.expect("they are answered");
        caller.join().expect("each is refused");
    }
    assert_works(&mut guest);
    scene.keep(guest);
}

fn control(scene: &mut Scene<'_>) {
    let path = scene.daemon.control_socket();
    for bytes in [
        &b"\0\0\0\0"[..],
        b"GET /nothing HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n",
        &[b'A'; 100_000],
    ] {
        let mut stream = UnixStream::connect(&path).expect("it listens");
        // It may be hung up on before the end.
        let _ = stream.write_all(bytes);
        scene.keep(stream);
    }
    for _ in 0..200 {
        // More than it takes are refused.
        if let Ok(stream) = UnixStream::connect(&path) {
            scene.keep(stream);
        }
    }
    let mut guest = scene.attach();
    let circuit = guest.connect(2, ECHO_PORT).expect("the data plane works");
    guest.close(circuit);
    scene.keep(guest);
}
