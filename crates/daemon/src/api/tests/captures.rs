//! Captures over the control API, with a fake data plane behind it.

use std::os::unix::net::UnixStream;
use std::time::Instant;

use api::CAPTURE_MEDIA_TYPE;
use config::directories::control_socket;
use wire::pcapng;

use super::*;
use crate::fake_daemon::FakeCapture;

/// How long anything that must happen may take.
const PATIENCE: Duration = Duration::from_secs(20);

const FILE: &str = r#"
[[network]]
name = "lan"

[[network]]
name = "lan"
domain = "red"

[[vm]]
name = "web"
aliases = ["www"]
networks = ["lan"]
"#;

/// The one capture that was asked for, once it was.
fn asked_for(daemon: &FakeDaemon) -> FakeCapture {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let of_lines = daemon.worker().take_captures().pop();
        if let Some(capture) = of_lines.or_else(|| daemon.net().take_captures().pop()) {
            return capture;
        }
        assert!(Instant::now() < deadline, "nobody asked for a capture");
        std::thread::yield_now();
    }
}

/// Asks for a capture, and reads the answer's head.
fn begin(daemon: &FakeDaemon, target: &str) -> (FakeCapture, UnixStream, String) {
    let mut stream = UnixStream::connect(control_socket(daemon.runtime_dir())).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let request = format!("GET {target} HTTP/1.1\r\nHost: test\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let capture = asked_for(daemon);
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        let mut byte = [0];
        stream.read_exact(&mut byte).unwrap();
        head.extend(byte);
    }
    (capture, stream, String::from_utf8(head).unwrap())
}

#[test]
fn a_capture_streams_until_it_ends() {
    let daemon = FakeDaemon::with_file(FILE);
    let table = [
        (
            "/v1/networks/lan/capture?vm=www&snaplen=96&count=5",
            Some("lan"),
            None,
        ),
        (
            "/v1/capture?vm=www&snaplen=96&count=5&port=5432",
            None,
            Some(5432),
        ),
    ];
    for (target, network, port) in table {
        streams(&daemon, target, network, port);
    }
}

fn streams(daemon: &FakeDaemon, target: &str, network: Option<&str>, port: Option<u32>) {
    let (mut capture, mut stream, head) = begin(daemon, target);
    assert!(head.starts_with("HTTP/1.1 200 "), "{head}");
    assert!(head.contains(CAPTURE_MEDIA_TYPE), "{head}");
    let of = (capture.network.as_deref(), capture.vm.as_deref());
    assert_eq!((of, capture.port), ((network, Some("web")), port));
    assert_eq!(
        (capture.options.snaplen, capture.options.count),
        (96, Some(5))
    );
    // Each piece comes at once, as a chunk of its own.
    for piece in ["first", "second"] {
        assert!(capture.show(piece.as_bytes()));
        let expected = format!("{:X}\r\n{piece}\r\n", piece.len());
        let mut chunk = vec![0; expected.len()];
        stream.read_exact(&mut chunk).unwrap();
        assert_eq!(String::from_utf8(chunk).unwrap(), expected);
    }
    drop(capture);
    let mut end = [0; 5];
    stream.read_exact(&mut end).unwrap();
    assert_eq!(&end, b"0\r\n\r\n");
}

fn readers(daemon: &FakeDaemon, count: usize) -> bool {
    let (_, page) = daemon.request("GET", "/v1/metrics", "");
    page.contains(&format!("\nringdown_capture_readers {count}\n"))
}

#[test]
fn a_capture_ends_when_its_client_hangs_up() {
    let daemon = FakeDaemon::with_file(FILE);
    assert!(readers(&daemon, 0));
    let (capture, stream, _) = begin(&daemon, "/v1/capture");
    assert_eq!((&capture.vm, capture.port), (&None, None));
    assert_eq!(
        (capture.options.snaplen, capture.options.count),
        (pcapng::MAX_SNAPLEN, None)
    );
    assert!(!capture.is_gone() && readers(&daemon, 1));
    drop(stream);
    let deadline = Instant::now() + PATIENCE;
    while !capture.is_gone() {
        assert!(Instant::now() < deadline, "the capture goes on for nobody");
        std::thread::yield_now();
    }
    assert!(readers(&daemon, 0));
}

#[test]
fn a_capture_that_cannot_be_is_refused() {
    let daemon = FakeDaemon::with_file(FILE);
    let table = [
        ("/v1/networks/wan/capture", 404, "\"wan\""),
        ("/v1/networks/lan/capture?vm=db", 404, "\"db\""),
        (
            "/v1/networks/red%2Flan/capture?vm=web",
            404,
            "has no port in the network",
        ),
        (
            "/v1/networks/lan/capture?snaplen=0",
            400,
            "from 1 to 262144",
        ),
        (
            "/v1/networks/lan/capture?snaplen=262145",
            400,
            "snaplen is 262145",
        ),
        (
            "/v1/networks/lan/capture?count=0",
            400,
            "count is 0: use a whole number from 1 to 18446744073709551615",
        ),
        ("/v1/capture?vm=db", 404, "\"db\""),
        ("/v1/capture?port=4294967296", 400, "port"),
        ("/v1/capture?snaplen=0", 400, "from 1 to 262144"),
        (
            "/v1/capture?count=0",
            400,
            "count is 0: use a whole number from 1 to 18446744073709551615",
        ),
        ("/v1/capture?vn=web", 400, "\"vn\": did you mean vm?"),
        (
            "/v1/networks/lan/capture?colour=red",
            400,
            "\"colour\": it takes vm, snaplen, count",
        ),
    ];
    for (target, status, detail) in table {
        let answer = refused(&daemon, "GET", target, "");
        assert_eq!(answer.0, status, "{target}: {answer:?}");
        assert!(answer.1.contains(detail), "{target}: {answer:?}");
    }
    assert!(daemon.net().take_captures().is_empty());
    assert!(daemon.worker().take_captures().is_empty());
}
