//! Captures of what passes the lines of real guests, which tshark reads while they talk.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs::File;
use std::io::{Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::Stdio;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use e2e::pattern::Pattern;
use e2e::{
    DaemonSpec, GuestSpec, Kernel, LiveCapture, Meeting, Row, Scene, Shared, SharedGuard, finished,
    host, is_full, read_capture,
};
use rustix::process::{Pid, Signal, kill_process};
use wire::pcapng::BlockReader;

const FIELDS: [&str; 10] = [
    "frame.interface_name",
    "frame.len",
    "vsock.src_cid",
    "vsock.src_port",
    "vsock.dst_cid",
    "vsock.dst_port",
    "vsock.op",
    "vsock.trans",
    "vsock.virtio.op",
    "vsock.payload",
];

// What a packet is for, as vsockmon has it, and by virtio's own numbers.
const CONNECT: &str = "1";
const DISCONNECT: &str = "2";
const PAYLOAD: &str = "4";
const REQUEST: &str = "1";
const RESPONSE: &str = "2";
const RESET: &str = "3";

/// How long anything that must happen may take.
const PATIENCE: Duration = Duration::from_secs(120);

static SCENE: Shared<Scene> = Shared::new();

/// One test at a time: what one says, another would capture.
static ALONE: Mutex<()> = Mutex::new(());

/// A file with the rules: its path.
fn configuration() -> String {
    let path = e2e::spawn::scratch_directory()
        .unwrap()
        .join("ringdown.toml");
    let text = r#"
        [[allow]]
        from = "web"
        to = "db"
        port = 7000

        [[rule]]
        from = "box"
        to = "host"
        port = 7001
        redirect = "web:7001"
    "#;
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

fn scene() -> (MutexGuard<'static, ()>, SharedGuard<Scene>) {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let scene = SCENE.get(|| {
        let daemon = DaemonSpec::new()
            .vm("web", 3)
            .vm("db", 4)
            .serial_vm("box", Meeting::QemuConnects)
            .arguments(&["--config", &configuration()]);
        let guests = vec![
            GuestSpec::new("web", Kernel::V6_1),
            GuestSpec::new("db", Kernel::V6_12),
            GuestSpec::new("box", Kernel::V6_1).with_tools(),
        ];
        Scene::start_with(daemon, guests).unwrap()
    });
    (alone, scene)
}

fn has(row: &Row, wanted: &[(&str, &str)]) -> bool {
    wanted.iter().all(|(field, value)| row.get(field) == *value)
}

fn any(wanted: &[(&str, &str)]) -> impl Fn(&[Row]) -> bool {
    |rows: &[Row]| rows.iter().any(|row| has(row, wanted))
}

/// The payload of these packets, one behind the other.
fn payload(rows: &[Row], wanted: &[(&str, &str)]) -> String {
    let of_interest = rows.iter().filter(|row| has(row, wanted));
    of_interest.map(|row| row.get("vsock.payload")).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A guest calls a port of the host: it sends so many bytes, and is sent as many.
fn talk(scene: &Scene, guest: &str, port: u32, len: usize) {
    let listener = UnixListener::bind(scene.daemon.listener_path(guest, port)).unwrap();
    let steps = format!("connect:2:{port} send:{len} recv:{len} shut:wr eof");
    let probe = scene.guest(guest).probe(&steps).unwrap();
    let (mut stream, _) = listener.accept().unwrap();
    host::bound(&stream).unwrap();
    host::receive(&mut stream, &mut Pattern::new(0), len as u64).unwrap();
    host::send(&mut stream, &mut Pattern::new(0), len as u64).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    finished(probe).unwrap();
    std::fs::remove_file(scene.daemon.listener_path(guest, port)).unwrap();
}

#[test]
fn tshark_shows_a_conversation_with_the_host_while_it_goes() {
    let (_alone, scene) = scene();
    let mut capture =
        LiveCapture::begin(&scene.daemon, &["capture", "--vm", "web"], &FIELDS).unwrap();
    talk(&scene, "web", 5432, 9000);
    let from_guest = |port| {
        [
            ("frame.interface_name", "web"),
            ("vsock.src_cid", "3"),
            ("vsock.dst_cid", "2"),
            ("vsock.dst_port", port),
        ]
    };
    let to_guest = |port| {
        [
            ("frame.interface_name", "web"),
            ("vsock.src_cid", "2"),
            ("vsock.dst_cid", "3"),
            ("vsock.src_port", port),
        ]
    };
    for (direction, operation) in [(from_guest("5432"), REQUEST), (to_guest("5432"), RESPONSE)] {
        let what = [("vsock.op", CONNECT), ("vsock.virtio.op", operation)];
        let wanted = [&direction[..], &what].concat();
        capture.wait_for("the handshake", any(&wanted)).unwrap();
    }
    let expected = hex(&Pattern::new(0).take(9000));
    for direction in [from_guest("5432"), to_guest("5432")] {
        let wanted = [&direction[..], &[("vsock.op", PAYLOAD)]].concat();
        let rows = capture.wait_for("the bytes", |rows| {
            payload(rows, &wanted).len() >= expected.len()
        });
        assert_eq!(payload(rows.unwrap(), &wanted), expected);
        let wanted = [&direction[..], &[("vsock.op", DISCONNECT)]].concat();
        capture.wait_for("the end", any(&wanted)).unwrap();
    }
    // No listener: the daemon itself answers.
    let probe = scene.guest("web").probe("fails:ECONNRESET:connect:2:9999");
    finished(probe.unwrap()).unwrap();
    let wanted = [&to_guest("9999")[..], &[("vsock.virtio.op", RESET)]].concat();
    capture.wait_for("the refusal", any(&wanted)).unwrap();
    let (rows, said) = capture.end().unwrap();
    assert_eq!(said, format!("{} packets captured, 0 lost\n", rows.len()));
    assert!(
        rows.iter()
            .all(|row| row.get("frame.interface_name") == "web")
    );
}

#[test]
fn a_packet_between_two_guests_is_there_on_both_lines() {
    let (_alone, scene) = scene();
    let mut capture =
        LiveCapture::begin(&scene.daemon, &["capture", "--port", "7000"], &FIELDS).unwrap();
    let server = scene
        .guest("db")
        .probe_listening("listen:7000 accept recv:100 eof");
    let server = server.unwrap();
    talk(&scene, "web", 6000, 100);
    let client = scene
        .guest("web")
        .probe("connect:4:7000 send:100 shut:wr eof");
    finished(client.unwrap()).unwrap();
    finished(server).unwrap();
    let expected = hex(&Pattern::new(0).take(100));
    for line in ["web", "db"] {
        let wanted = [
            ("frame.interface_name", line),
            ("vsock.src_cid", "3"),
            ("vsock.dst_cid", "4"),
            ("vsock.dst_port", "7000"),
            ("vsock.op", PAYLOAD),
            ("vsock.payload", &expected),
        ];
        capture.wait_for(line, any(&wanted)).unwrap();
    }
    let (rows, _) = capture.end().unwrap();
    let is_wanted =
        |row: &Row| [row.get("vsock.src_port"), row.get("vsock.dst_port")].contains(&"7000");
    assert!(
        rows.iter().all(is_wanted),
        "only what was asked for: {rows:#?}"
    );
}

#[test]
fn of_a_guest_without_vsock_it_shows_what_passes() {
    let (_alone, scene) = scene();
    let mut capture =
        LiveCapture::begin(&scene.daemon, &["capture", "--vm", "box"], &FIELDS).unwrap();
    let said = scene
        .daemon
        .run(&["exec", "box", "--", "echo", "a word of the guest's"])
        .unwrap();
    assert_eq!(said.stdout, b"a word of the guest's\n");
    // `exec` calls the agent's port.
    let plain = [("frame.interface_name", "box"), ("vsock.trans", "1")];
    let to_agent = [
        &plain[..],
        &[("vsock.src_cid", "2"), ("vsock.dst_port", "1007")],
    ]
    .concat();
    let from_agent = [
        &plain[..],
        &[("vsock.dst_cid", "2"), ("vsock.src_port", "1007")],
    ]
    .concat();
    for direction in [&to_agent, &from_agent] {
        for purpose in [CONNECT, PAYLOAD, DISCONNECT] {
            let wanted = [&direction[..], &[("vsock.op", purpose)]].concat();
            capture
                .wait_for(&format!("{wanted:?}"), any(&wanted))
                .unwrap();
        }
    }
    let (rows, _) = capture.end().unwrap();
    let shown = payload(&rows, &from_agent);
    assert!(shown.contains(&hex(b"a word of the guest's\n")), "{shown}");
}

#[test]
fn what_passes_between_a_guest_with_vsock_and_one_without_is_the_same_on_both_lines() {
    let (_alone, scene) = scene();
    let mut capture =
        LiveCapture::begin(&scene.daemon, &["capture", "--port", "7001"], &FIELDS).unwrap();
    let listening = scene
        .guest("web")
        .probe_listening("listen:7001 accept drain send:100 close")
        .unwrap();
    let guest = scene.guest("box");
    guest
        .wait_until("test -S /run/ringdown/host.sock", PATIENCE)
        .unwrap();
    let bytes: Vec<u8> = Pattern::new(0).take(100);
    let escapes: String = bytes.iter().map(|byte| format!("\\{byte:03o}")).collect();
    let line = format!(
        "(echo 'CONNECT 7001'; printf '{escapes}') | socat -t 60 - UNIX-CONNECT:/run/ringdown/host.sock | wc -c"
    );
    let len: usize = guest.run(&line).unwrap().text().trim().parse().unwrap();
    assert!(len > 100, "{len} bytes, with the answer to CONNECT");
    finished(listening).unwrap();
    let expected = hex(&bytes);
    // `box` called a port of the host, `web` is called by `box`.
    for (line, callee) in [("box", "2"), ("web", "3")] {
        let there = [
            ("frame.interface_name", line),
            ("vsock.src_cid", "5"),
            ("vsock.dst_cid", callee),
            ("vsock.dst_port", "7001"),
        ];
        let back = [
            ("frame.interface_name", line),
            ("vsock.src_cid", callee),
            ("vsock.dst_cid", "5"),
            ("vsock.src_port", "7001"),
        ];
        for purpose in [CONNECT, DISCONNECT] {
            let wanted = [&there[..], &[("vsock.op", purpose)]].concat();
            let what = format!("{wanted:?}");
            capture.wait_for(&what, any(&wanted)).unwrap();
        }
        for direction in [there, back] {
            let wanted = [&direction[..], &[("vsock.op", PAYLOAD)]].concat();
            let what = format!("{wanted:?}");
            let rows =
                capture.wait_for(&what, |rows| payload(rows, &wanted).len() >= expected.len());
            assert_eq!(payload(rows.unwrap(), &wanted), expected, "{what}");
        }
    }
}

/// The guest is sent so much, in MiB, by a host program.
fn flood(scene: &Scene, mib: u64) {
    let len = mib << 20;
    let probe = scene
        .guest("web")
        .probe_listening(&format!("listen:7001 accept recv:{len} eof"));
    let probe = probe.unwrap();
    let mut stream: UnixStream =
        host::dial_when_open(&scene.daemon.host_socket("web"), 7001, PATIENCE).unwrap();
    host::send(&mut stream, &mut Pattern::new(0), len).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    finished(probe).unwrap();
}

/// Reads a capture to its end, and says as it goes how much of it is missing.
fn read_on(mut out: impl Read, first: &[u8], lost: &AtomicU64) -> Vec<u8> {
    let (mut blocks, mut all) = (BlockReader::default(), Vec::new());
    let mut piece = vec![0; 1 << 16];
    let mut bytes = first.to_vec();
    while !bytes.is_empty() {
        blocks.push(&bytes).unwrap();
        lost.store(blocks.lost(), Ordering::Relaxed);
        all.extend(bytes);
        let len = out.read(&mut piece).unwrap();
        bytes = piece[..len].to_vec();
    }
    all
}

#[test]
fn a_reader_that_stalls_loses_packets_and_nobody_waits_for_it() {
    let (_alone, scene) = scene();
    // More than waits for the reader, in the daemon and in the system.
    let mib = if is_full() { 256 } else { 24 };
    let mut ringdown = scene.daemon.command(&["capture", "--vm", "web"]).unwrap();
    let mut ringdown = ringdown
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = ringdown.stdout.take().unwrap();
    // It has begun.
    let mut first = [0; 4];
    out.read_exact(&mut first).unwrap();
    flood(&scene, mib);
    let lost = Arc::new(AtomicU64::new(0));
    let told = Arc::clone(&lost);
    let reader = thread::spawn(move || read_on(out, &first, &told));
    // The reader goes on: the next packets come with the count of what is missing.
    let deadline = Instant::now() + PATIENCE;
    while lost.load(Ordering::Relaxed) == 0 {
        assert!(
            Instant::now() < deadline,
            "the count of missing packets does not come"
        );
        talk(&scene, "web", 5432, 100);
    }
    kill_process(Pid::from_child(&ringdown), Signal::INT).unwrap();
    let output = ringdown.wait_with_output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{said}");
    let words: Vec<&str> = said.split_whitespace().collect();
    let (captured, lost): (usize, u64) = (words[0].parse().unwrap(), words[3].parse().unwrap());
    eprintln!("of {mib} MiB: {said}");
    assert!(lost > 0, "{said}");
    let file = scene.daemon.runtime_directory().join("stalled.pcapng");
    File::create(&file)
        .unwrap()
        .write_all(&reader.join().unwrap())
        .unwrap();
    assert_eq!(read_capture(&file, &FIELDS).unwrap().len(), captured);
}

#[test]
fn a_ring_of_files_keeps_the_last_ones() {
    let (_alone, scene) = scene();
    let directory = scene.daemon.runtime_directory();
    let name = directory.join("ring.pcapng").display().to_string();
    let arguments = [
        "capture",
        "--vm",
        "web",
        "-w",
        &name,
        "--files",
        "3",
        "--file-size",
        "1M",
    ];
    let capture = LiveCapture::begin_to_file(&scene.daemon, &arguments).unwrap();
    flood(&scene, 6);
    let (_, said) = capture.end().unwrap();
    eprintln!("{said}");
    let mut packets = 0;
    for number in 1..=3 {
        let file = directory.join(format!("ring.{number}.pcapng"));
        assert!(file.metadata().unwrap().len() <= 1 << 20);
        let rows = read_capture(&file, &FIELDS).unwrap();
        assert!(!rows.is_empty());
        packets += rows.len();
        assert!(
            rows.iter()
                .all(|row| row.get("frame.interface_name") == "web")
        );
    }
    let captured: usize = said.split_whitespace().next().unwrap().parse().unwrap();
    assert!(
        packets < captured,
        "{packets} of {captured} are in the files"
    );
    assert!(!directory.join("ring.4.pcapng").exists());
}
