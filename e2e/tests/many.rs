//! Ten thousand circuits at once across four guests: all alive, and what each costs the daemon.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use e2e::{DaemonSpec, GuestSpec, Kernel, Scene, finished, host};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The guests, and which one each of them calls.
const GUESTS: [(&str, u64, Kernel); 4] = [
    ("north", 3, Kernel::V6_1),
    ("east", 4, Kernel::V6_12),
    ("south", 5, Kernel::V6_1),
    ("west", 6, Kernel::V6_12),
];

/// Circuits from each guest to the next one.
const TO_NEXT: usize = 1500;

/// Circuits from the host to each guest.
const FROM_HOST: usize = 1000;

/// What an idle circuit may cost the daemon, in bytes.
const LIMIT_BYTES: u64 = 2048;

#[test]
fn ten_thousand_circuits_are_open_at_once_and_all_alive() {
    more_descriptors();
    let mut daemon = DaemonSpec::new();
    for (index, (name, cid, _)) in GUESTS.into_iter().enumerate() {
        let (next, ..) = GUESTS[(index + 1) % GUESTS.len()];
        let rule = format!("from={name},to={next},port=700");
        daemon = daemon.vm(name, cid).arguments(&["--allow", &rule]);
    }
    let specs = GUESTS.map(|(name, _, kernel)| GuestSpec::new(name, kernel).memory_mib(384));
    let scene = Scene::start_with(daemon, specs.into()).unwrap();
    let servers: Vec<_> = scene
        .guests
        .iter()
        .map(|guest| guest.serve("700", "echo").unwrap())
        .collect();
    // What the first circuits make grow once and for all is not theirs alone.
    let mut streams: Vec<UnixStream> = Vec::new();
    open_from_host(&scene, 10, &mut streams);
    ping_all(&mut streams);
    let before = scene.daemon.own_bytes().unwrap();

    let holders: Vec<_> = scene
        .guests
        .iter()
        .enumerate()
        .map(|(index, guest)| {
            let (_, cid, _) = GUESTS[(index + 1) % GUESTS.len()];
            guest.shell("mkdir -p /tmp/hold").unwrap();
            guest
                .start_probe(&format!("hold {cid} 700 {TO_NEXT} /tmp/hold"))
                .unwrap()
        })
        .collect();
    open_from_host(&scene, FROM_HOST, &mut streams);
    for guest in &scene.guests {
        guest
            .wait_until("[ -e /tmp/hold/open ]", Duration::from_secs(300))
            .unwrap();
    }
    let count = (TO_NEXT + FROM_HOST) * GUESTS.len();
    assert_eq!(count, 10_000);
    cost(&scene, before, "open");

    // All are alive: each carries something there and back.
    ping_all(&mut streams);
    for guest in &scene.guests {
        guest.shell("touch /tmp/hold/go").unwrap();
    }
    for guest in &scene.guests {
        guest
            .wait_until("[ -e /tmp/hold/alive ]", Duration::from_secs(300))
            .unwrap();
    }
    cost(&scene, before, "idle after use");
    for guest in &scene.guests {
        guest.shell("touch /tmp/hold/end").unwrap();
    }
    for holder in holders {
        assert_eq!(finished(holder).unwrap(), format!("alive {TO_NEXT}"));
    }
    ping_all(&mut streams);
    for server in servers {
        server.kill();
    }
}

/// Says what each of ten thousand circuits costs, and holds it against the limit.
fn cost(scene: &Scene, before: u64, state: &str) {
    let grown = scene.daemon.own_bytes().unwrap().saturating_sub(before);
    let each = grown / 10_000;
    eprintln!("10,000 circuits, {state}: {each} bytes of the daemon's memory for each");
    assert!(each < LIMIT_BYTES, "{grown} bytes in all");
}

fn open_from_host(scene: &Scene, count: usize, streams: &mut Vec<UnixStream>) {
    thread::scope(|scope| {
        let dialers: Vec<_> = scene
            .guests
            .iter()
            .map(|guest| {
                let socket = scene.daemon.host_socket(guest.name());
                scope.spawn(move || -> Vec<UnixStream> {
                    (0..count)
                        .map(|_| host::dial(&socket, 700).unwrap())
                        .collect()
                })
            })
            .collect();
        for dialer in dialers {
            streams.extend(dialer.join().unwrap());
        }
    });
}

fn ping_all(streams: &mut [UnixStream]) {
    for stream in streams.iter_mut() {
        stream.write_all(b"ping").unwrap();
    }
    for stream in streams {
        let mut answer = [0; 4];
        stream.read_exact(&mut answer).unwrap();
        assert_eq!(&answer, b"ping");
    }
}

/// The usual soft limit of descriptors is for interactive programs.
fn more_descriptors() {
    let hard = getrlimit(Resource::Nofile).maximum;
    let wanted = Rlimit {
        current: hard,
        maximum: hard,
    };
    setrlimit(Resource::Nofile, wanted).unwrap();
}
