//! Circuits between a guest and programs of its host: close and half-close, refusals, the handshake, bulk.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixListener;
use std::thread;
use std::time::{Duration, Instant};

use e2e::host::{self, Dialed};
use e2e::pattern::Pattern;
use e2e::{DaemonSpec, Guest, Kernel, Scene, Shared, SharedGuard, finished, step_us};

static SCENE: Shared<Scene> = Shared::new();

/// `absent` is a VM that is never started; `web` may call it and `db` may not.
fn scene() -> SharedGuard<Scene> {
    SCENE.get(|| {
        let daemon = DaemonSpec::new()
            .vm("web", 3)
            .vm("db", 4)
            .vm("absent", 5)
            .arguments(&["--allow", "from=web,to=absent,port=*"]);
        Scene::start(daemon, &[("web", Kernel::V6_1), ("db", Kernel::V6_12)]).unwrap()
    })
}

/// What a guest is shown as credit by default, in bytes.
const CREDIT_BYTES: u64 = 256 * 1024;

/// Sizes around every edge: one byte, a guest's buffer, a page, a large packet, a UNIX socket's buffer, the credit.
const SIZES: [u64; 9] = [
    1,
    3_776,
    4_096,
    28_001,
    65_536,
    212_992,
    215_000,
    260_000,
    CREDIT_BYTES,
];

/// Takes the next call of a guest.
fn accept(listener: &UnixListener) -> std::os::unix::net::UnixStream {
    let (stream, _) = listener.accept().unwrap();
    host::bound(&stream).unwrap();
    stream
}

fn listen(scene: &Scene, guest: &Guest, port: u32) -> UnixListener {
    UnixListener::bind(scene.daemon.listener_path(guest.name(), port)).unwrap()
}

// ---- Close and half-close ----

/// The reader starts when the guest's own timer for a closed socket (8 s) has long run out.
const LATE_S: u64 = 30;

#[test]
fn a_late_reader_gets_everything_that_was_written_before_the_close() {
    let scene = scene();
    let mut from_guests = Vec::new();
    let mut to_guests = Vec::new();
    for guest in &scene.guests {
        let listener = listen(&scene, guest, 1000);
        let socket = scene.daemon.host_socket(guest.name());
        for (index, size) in SIZES.into_iter().enumerate() {
            // Guest to host: written and closed, the process gone.
            guest
                .probe_to_end(&format!("connect:2:1000 send:{size} close"))
                .unwrap();
            from_guests.push((guest.name(), size, accept(&listener)));
            // Host to guest: the same the other way round, as far as the guest's kernel takes it without a reader.
            let port = 1100 + index as u32;
            let reader = guest
                .probe_listening(&format!("listen:{port} accept wait:/tmp/late drain"))
                .unwrap();
            let mut stream = host::dial(&socket, port).unwrap();
            host::send(&mut stream, &mut Pattern::new(0), size).unwrap();
            drop(stream);
            to_guests.push((guest.name(), size, reader));
        }
    }
    // No event ends this wait: that nothing happens meanwhile is the matter of the test.
    thread::sleep(Duration::from_secs(LATE_S));
    for (name, size, mut stream) in from_guests {
        let received = host::drain(&mut stream, &mut Pattern::new(0));
        assert_eq!(received.unwrap(), size, "from {name}");
    }
    for guest in &scene.guests {
        guest.shell("touch /tmp/late").unwrap();
    }
    for (name, size, reader) in to_guests {
        let printed = finished(reader).unwrap();
        assert!(
            printed.ends_with(&format!("drained {size}")),
            "to {name}: {printed} of {size}"
        );
    }
}

#[test]
fn a_reply_after_the_guests_half_close_arrives() {
    let scene = scene();
    for guest in &scene.guests {
        let listener = listen(&scene, guest, 1200);
        let probe = guest
            .probe("connect:2:1200 send:300000 shut:wr drain")
            .unwrap();
        let mut stream = accept(&listener);
        let received = host::drain(&mut stream, &mut Pattern::new(0)).unwrap();
        assert_eq!(received, 300_000);
        host::send(&mut stream, &mut Pattern::new(0), 3_000_000).unwrap();
        drop(stream);
        assert_eq!(finished(probe).unwrap(), "drained 3000000");
    }
}

#[test]
fn a_reply_after_the_hosts_half_close_arrives() {
    let scene = scene();
    for guest in &scene.guests {
        let probe = guest
            .probe_listening("listen:1201 accept drain send:3000000 close")
            .unwrap();
        let mut stream = host::dial(&scene.daemon.host_socket(guest.name()), 1201).unwrap();
        host::send(&mut stream, &mut Pattern::new(0), 300_000).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        let received = host::drain(&mut stream, &mut Pattern::new(0)).unwrap();
        assert_eq!(received, 3_000_000);
        assert_eq!(finished(probe).unwrap(), "peer 2\ndrained 300000");
    }
}

#[test]
fn half_closed_circuits_stay_open_the_other_way() {
    let scene = scene();
    for guest in &scene.guests {
        let listener = listen(&scene, guest, 1202);
        let probe = guest
            .probe("connect:2:1202 shut:wr recv:1 poll:quiet touch:/tmp/quiet wait:/tmp/on eof")
            .unwrap();
        let mut stream = accept(&listener);
        assert_eq!(host::drain(&mut stream, &mut Pattern::new(0)).unwrap(), 0);
        stream.write_all(&Pattern::new(0).take(1)).unwrap();
        guest
            .wait_until("[ -e /tmp/quiet ]", Duration::from_secs(60))
            .unwrap();
        drop(stream);
        guest.shell("touch /tmp/on").unwrap();
        finished(probe).unwrap();
    }
}

#[test]
fn an_idle_circuit_shows_no_end() {
    let scene = scene();
    for guest in &scene.guests {
        let listener = listen(&scene, guest, 1203);
        let probe = guest
            .probe("connect:2:1203 touch:/tmp/idle wait:/tmp/enough poll:quiet send:1 eof")
            .unwrap();
        let mut stream = accept(&listener);
        stream
            .set_read_timeout(Some(Duration::from_secs(10)))
            .unwrap();
        let error = stream.read(&mut [0; 1]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}");
        host::bound(&stream).unwrap();
        guest.shell("touch /tmp/enough").unwrap();
        host::receive(&mut stream, &mut Pattern::new(0), 1).unwrap();
        drop(stream);
        finished(probe).unwrap();
    }
}

#[test]
fn a_guest_that_reads_no_more_stops_the_hosts_writer() {
    let scene = scene();
    for guest in &scene.guests {
        let probe = guest
            .probe_listening("listen:1204 accept shut:rd send:1 wait:/tmp/stopped")
            .unwrap();
        let mut stream = host::dial(&scene.daemon.host_socket(guest.name()), 1204).unwrap();
        host::receive(&mut stream, &mut Pattern::new(0), 1).unwrap();
        let error = write_until_it_fails(&mut stream);
        assert_eq!(error, ErrorKind::BrokenPipe);
        guest.shell("touch /tmp/stopped").unwrap();
        finished(probe).unwrap();
    }
}

#[test]
fn a_host_program_that_reads_no_more_stops_the_guests_writer() {
    let scene = scene();
    for guest in &scene.guests {
        let listener = listen(&scene, guest, 1205);
        let probe = guest
            .probe("connect:2:1205 send:1 wait:/tmp/deaf fails:EPIPE:send:100000000")
            .unwrap();
        let mut stream = accept(&listener);
        host::receive(&mut stream, &mut Pattern::new(0), 1).unwrap();
        stream.shutdown(Shutdown::Read).unwrap();
        guest.shell("touch /tmp/deaf").unwrap();
        finished(probe).unwrap();
        drop(stream);
    }
}

#[test]
fn a_program_that_leaves_with_data_unread_shows_as_an_error() {
    let scene = scene();
    for guest in &scene.guests {
        // The guest's process ends while the host's program still sends.
        let probe = guest
            .probe_listening("listen:1206 accept recv:1000 close")
            .unwrap();
        let mut stream = host::dial(&scene.daemon.host_socket(guest.name()), 1206).unwrap();
        let error = write_until_it_fails(&mut stream);
        assert!(
            matches!(error, ErrorKind::BrokenPipe | ErrorKind::ConnectionReset),
            "{error:?}"
        );
        finished(probe).unwrap();

        // The host's program ends while the guest still sends.
        let listener = listen(&scene, guest, 1207);
        let probe = guest.probe("connect:2:1207 send:100000000").unwrap();
        let mut stream = accept(&listener);
        host::receive(&mut stream, &mut Pattern::new(0), 1000).unwrap();
        drop(stream);
        let output = probe.wait().unwrap();
        let said = output.error_text();
        assert_ne!(output.code, 0);
        assert!(
            said.contains("os error 32") || said.contains("os error 104"),
            "{said}"
        );
    }
}

fn write_until_it_fails(stream: &mut impl Write) -> ErrorKind {
    let mut pattern = Pattern::new(0);
    loop {
        if let Err(error) = host::send(stream, &mut pattern, 64 * 1024) {
            return error.kind();
        }
    }
}

#[test]
fn a_guest_that_only_sends_is_not_held_up_by_a_program_that_only_listens() {
    let scene = scene();
    for guest in &scene.guests {
        // The program says nothing behind its request, so there is never data to carry the guest's credit along.
        let probe = guest
            .probe_listening("listen:1208 accept send:5000000:8192 close")
            .unwrap();
        let mut stream = host::dial(&scene.daemon.host_socket(guest.name()), 1208).unwrap();
        let received = host::drain(&mut stream, &mut Pattern::new(0)).unwrap();
        assert_eq!(received, 5_000_000);
        finished(probe).unwrap();
    }
}

// ---- Refusals ----

/// Runs a dial in a guest that must be reset, and finds the reason in the daemon's log.
fn is_reset(scene: &Scene, guest: &Guest, dial: &str, reason: &str) {
    let steps = format!("fails:ECONNRESET:connect:{dial}");
    let output = guest.probe(&steps).unwrap().wait().unwrap();
    assert_eq!(output.code, 0, "{}: {}", guest.name(), output.error_text());
    eprintln!(
        "{}: {dial} ({reason}) is refused after {} us of the guest's clock",
        guest.name(),
        step_us(&output, &steps).unwrap()
    );
    let mut words = dial.split(':');
    let (cid, port) = (words.next().unwrap(), words.next().unwrap());
    let (vm, name) = (format!("vm=\"{}\"", guest.name()), guest.name());
    let address = format!("destination_cid={cid} destination_port={port} ");
    // The answer may reach the guest before the line is in the log.
    let until = Instant::now() + Duration::from_secs(10);
    let is_logged = |line: &str| {
        [&vm, &address, reason]
            .iter()
            .all(|word| line.contains(*word))
    };
    while !scene.daemon.log_text().lines().any(is_logged) {
        assert!(Instant::now() < until, "{name}: {dial} is not in the log");
        thread::yield_now();
    }
}

#[test]
fn a_guests_dial_that_nobody_takes_is_reset_at_once() {
    let scene = scene();
    for guest in &scene.guests {
        is_reset(&scene, guest, "2:10", "no listener on the host");
        is_reset(&scene, guest, "2:11:seqpacket", "no listener on the host");
        is_reset(&scene, guest, "777:12", "no VM has this context identifier");
        is_reset(
            &scene,
            guest,
            "777:13:seqpacket",
            "no VM has this context identifier",
        );
    }
    let (web, db) = (scene.guest("web"), scene.guest("db"));
    is_reset(&scene, web, "5:14", "the VM is not running");
    is_reset(&scene, db, "5:15", "no rule allows it");
    is_reset(&scene, web, "4:16", "no rule allows it");
}

#[test]
fn a_listener_of_the_other_type_refuses_with_the_reason() {
    let scene = scene();
    for guest in &scene.guests {
        let _stream = listen(&scene, guest, 1300);
        is_reset(
            &scene,
            guest,
            "2:1300:seqpacket",
            "stream and seqpacket do not mix",
        );
    }
}

#[test]
fn a_hosts_dial_that_nobody_takes_says_why_at_once() {
    let scene = scene();
    let why = |name: &str, port: u32| {
        let started = Instant::now();
        match host::try_dial(&scene.daemon.host_socket(name), port).unwrap() {
            Dialed::Refused(answer) => {
                eprintln!(
                    "{name}: port {port}: {answer:?} after {:?}",
                    started.elapsed()
                );
                answer
            }
            Dialed::Open(_) => panic!("port {port} of {name} is open"),
        }
    };
    for guest in &scene.guests {
        let answer = why(guest.name(), 9);
        assert!(answer.starts_with("ERR "), "{answer}");
        assert!(answer.contains("nothing listens"), "{answer}");
        // A listener with its backlog full, in the guest.
        let hoarder = guest
            .probe_listening("listen:1301:stream:0 wait:/tmp/hoarded")
            .unwrap();
        let mut kept = Vec::new();
        let socket = scene.daemon.host_socket(guest.name());
        let refused = loop {
            match host::try_dial(&socket, 1301).unwrap() {
                Dialed::Open(stream) => kept.push(stream),
                Dialed::Refused(answer) => break answer,
            }
            assert!(kept.len() < 10, "a backlog of none takes every call");
        };
        assert!(refused.contains("refused"), "{refused}");
        guest.shell("touch /tmp/hoarded").unwrap();
        finished(hoarder).unwrap();
    }
    let answer = why("absent", 9);
    assert!(answer.contains("not running"), "{answer}");
}

// ---- The handshake ----

#[test]
fn the_request_may_come_in_any_pieces_and_with_the_first_data_behind_it() {
    let scene = scene();
    for guest in &scene.guests {
        let server = guest.serve("1400", "echo").unwrap();
        let socket = scene.daemon.host_socket(guest.name());
        let data = Pattern::new(4).take(20_000);

        // Byte by byte. The pauses let the daemon see each piece by itself.
        let mut stream = host::connect(&socket).unwrap();
        for byte in b"CONNECT 1400\n" {
            stream.write_all(&[*byte]).unwrap();
            thread::sleep(Duration::from_millis(5));
        }
        assert!(host::read_line(&mut stream).unwrap().starts_with("OK "));
        stream.write_all(&data).unwrap();
        host::receive(&mut stream, &mut Pattern::new(4), data.len() as u64).unwrap();

        // Everything in one write, and the end of the data behind it.
        let mut stream = host::connect(&socket).unwrap();
        let mut all = b"CONNECT 1400\n".to_vec();
        all.extend(&data);
        stream.write_all(&all).unwrap();
        stream.shutdown(Shutdown::Write).unwrap();
        assert!(host::read_line(&mut stream).unwrap().starts_with("OK "));
        let received = host::drain(&mut stream, &mut Pattern::new(4)).unwrap();
        assert_eq!(received, data.len() as u64);
        server.kill();
    }
}

#[test]
fn a_request_that_makes_no_sense_is_refused_with_a_reason() {
    let scene = scene();
    let socket = scene.daemon.host_socket("web");
    let long = format!("CONNECT {}\n", "1".repeat(5000));
    for request in [
        "GET / HTTP/1.1\r\n",
        "CONNECT\n",
        "CONNECT web\n",
        "CONNECT -1\n",
        "CONNECT 4294967296\n",
        "connect 22\n",
        "\n",
        "\0\0\0\0\n",
        long.as_str(),
        // No end of the line in sight.
        &"C".repeat(100),
    ] {
        let mut stream = host::connect(&socket).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let answer = host::read_line(&mut stream).unwrap();
        assert!(answer.starts_with("ERR "), "{request:?}: {answer:?}");
        assert!(answer.len() > 10, "{request:?}: {answer:?}");
    }
}

#[test]
fn a_program_that_never_asks_is_sent_away() {
    let scene = scene();
    let socket = scene.daemon.host_socket("web");
    let mut silent = host::connect(&socket).unwrap();
    let mut halfway = host::connect(&socket).unwrap();
    halfway.write_all(b"CONNEC").unwrap();
    for stream in [&mut silent, &mut halfway] {
        let answer = host::read_line(stream).unwrap();
        assert!(answer.contains("10 seconds"), "{answer}");
    }
}

#[test]
fn programs_that_give_up_between_request_and_answer_leave_nothing_behind() {
    let scene = scene();
    for guest in &scene.guests {
        let server = guest.serve("1401", "echo").unwrap();
        let socket = scene.daemon.host_socket(guest.name());
        for _ in 0..200 {
            let mut stream = host::connect(&socket).unwrap();
            stream.write_all(b"CONNECT 1401\n").unwrap();
            drop(stream);
        }
        let mut stream = host::dial(&socket, 1401).unwrap();
        stream.write_all(&Pattern::new(0).take(10)).unwrap();
        host::receive(&mut stream, &mut Pattern::new(0), 10).unwrap();
        server.kill();
    }
}

// ---- Bulk ----

/// How much goes each way: 1 GiB in the full form.
fn bulk_bytes() -> u64 {
    match e2e::is_full() {
        true => 1 << 30,
        false => 64 << 20,
    }
}

#[test]
fn bulk_keeps_its_checksum_each_way() {
    let scene = scene();
    for guest in &scene.guests {
        let total = bulk_bytes();
        let listener = listen(&scene, guest, 1500);
        let started = Instant::now();
        let probe = guest
            .probe(&format!("connect:2:1500 hash:send:{total} shut:wr eof"))
            .unwrap();
        let (received, digest) = host::drain_digest(&mut accept(&listener)).unwrap();
        assert_eq!(received, total);
        assert_eq!(finished(probe).unwrap(), format!("sent {digest}"));
        let to_host = started.elapsed();

        let probe = guest
            .probe_listening("listen:1501 accept hash:drain")
            .unwrap();
        let started = Instant::now();
        let mut stream = host::dial(&scene.daemon.host_socket(guest.name()), 1501).unwrap();
        host::send(&mut stream, &mut Pattern::new(0), total).unwrap();
        drop(stream);
        let expected = host::digest_of(total);
        assert_eq!(
            finished(probe).unwrap(),
            format!("peer 2\nreceived {expected}")
        );
        eprintln!(
            "{}: {} MiB to the host in {to_host:?}, to the guest in {:?}",
            guest.name(),
            total >> 20,
            started.elapsed()
        );
    }
}
