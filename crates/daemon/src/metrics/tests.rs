//! Guests that answer, and guests that do anything else, at real sockets.

use std::io::{Read, Write};
use std::os::unix::net::UnixListener;

use wire::agent::job::{Answer, Disk};
use wire::agent::{CONNECTION_CHANNEL, Frame, Hello, OPERATION_CHANNEL};

use super::*;

mod exported;

/// What comes of asking a guest whose side of the connection says this.
fn asked(said: Vec<u8>) -> std::io::Result<Box<Stats>> {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("web.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let guest = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // The daemon may have hung up before everything is written.
        let _ = stream.write_all(&said);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let result = runtime.block_on(ask(&Gates::new(1), &path));
    guest.join().unwrap();
    result
}

fn frames(frames: &[(u16, Frame<'_>)]) -> Vec<u8> {
    let mut bytes = b"OK 1\n".to_vec();
    for (channel, frame) in frames {
        frame.encode(*channel, &mut bytes).unwrap();
    }
    bytes
}

fn hello() -> (u16, Frame<'static>) {
    (CONNECTION_CHANNEL, Frame::Hello(Hello::new("agent")))
}

#[test]
fn a_guest_tells_its_figures() {
    let stats = Stats {
        uptime_ms: 77,
        ..Stats::default()
    };
    let answer = Frame::Answer(Answer::Stats(Box::new(stats.clone())));
    assert_eq!(
        *asked(frames(&[hello(), (OPERATION_CHANNEL, answer)])).unwrap(),
        stats
    );
}

#[test]
fn whatever_else_it_says_is_an_error() {
    let done = (OPERATION_CHANNEL, Frame::Answer(Answer::Done));
    for said in [
        Vec::new(),
        b"ERR nobody listens\n".to_vec(),
        vec![b'x'; 10_000],
        b"OK 1\n".to_vec(),
        b"OK 1\ngarbage that is no frame".to_vec(),
        frames(&[hello(), done]),
    ] {
        assert!(asked(said.clone()).is_err(), "{said:?}");
    }
}

#[test]
fn a_hostile_guest_makes_a_bounded_page_with_each_series_once() {
    let disk = |name: &str| Disk {
        name: name.to_owned(),
        ..Disk::default()
    };
    let mut disks = vec![
        disk("sd\"} 9\nringdown_vm_ready{vm=\"x"),
        disk("same"),
        disk("same"),
    ];
    disks.extend((0..60).map(|number| disk(&format!("sd{number}"))));
    let mut page = Page::default();
    let stats = Stats {
        disks,
        ..Stats::default()
    };
    guest_figures(&mut page, "red/web", &stats);
    let text = page.finish();
    let series: Vec<&str> = text
        .lines()
        .filter(|line| line.starts_with("ringdown_guest_disk_reads_total"))
        .collect();
    assert_eq!(series.len(), MAX_LISTED - 1);
    assert!(
        !text
            .lines()
            .any(|line| line.starts_with("ringdown_vm_ready")),
        "{text}"
    );
    assert!(text.contains("ringdown_guest_cpu_seconds_total{vm=\"red/web\",mode=\"user\"} 0\n"));
}
