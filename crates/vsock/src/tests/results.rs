//! Simulated results of a few named scenarios, kept in `results.txt`: a change of behaviour is a difference there.
//! `RINGDOWN_UPDATE_RESULTS=1 cargo test -p ringdown-vsock results` writes the file anew.

use std::fmt::Write;
use std::time::Duration;

use policy::LineId;
use wire::vsock::SocketType;

use super::model::{After, Plan, Socket, World, reads, sends, sleeps};
use crate::{Limits, Side};

const MEBIBYTE: u64 = 1024 * 1024;

type Scenario = fn(&mut World, &[LineId]);

const SCENARIOS: [(&str, Scenario); 13] = [
    ("8 MiB guest to host", |world, lines| {
        world.listen_host(lines[0], 80, reads());
        world.connect(lines[0], 80, sends(8 * MEBIBYTE));
    }),
    ("8 MiB host to guest", |world, lines| {
        world
            .guest(lines[0])
            .listen(80, SocketType::Stream, reads());
        world.dial(lines[0], 80, SocketType::Stream, sends(8 * MEBIBYTE));
    }),
    ("8 MiB guest to guest", |world, lines| {
        world
            .guest(lines[1])
            .listen(80, SocketType::Stream, reads());
        world.connect_to(lines[0], 4, 80, sends(8 * MEBIBYTE));
    }),
    ("8 MiB both ways between guests", |world, lines| {
        let plan = sends(8 * MEBIBYTE);
        world.guest(lines[1]).listen(80, SocketType::Stream, plan);
        world.connect_to(lines[0], 4, 80, plan);
    }),
    ("8 MiB guest to guest, 8 buffers", |world, lines| {
        world.guest(lines[1]).ring = 8;
        world
            .guest(lines[1])
            .listen(80, SocketType::Stream, reads());
        world.connect_to(lines[0], 4, 80, sends(8 * MEBIBYTE));
    }),
    ("8 MiB guest to guest, 4 KiB window", |world, lines| {
        world
            .guest(lines[1])
            .listen(80, SocketType::Stream, reads());
        window(world, lines[1], 4096);
        world.connect_to(lines[0], 4, 80, sends(8 * MEBIBYTE));
    }),
    (
        "100 kB in writes of one byte to the host",
        |world, lines| {
            world.listen_host(lines[0], 80, reads());
            world.connect(lines[0], 80, writes(100_000, 1));
        },
    ),
    ("100 kB in writes of one byte to a guest", |world, lines| {
        world
            .guest(lines[1])
            .listen(80, SocketType::Stream, reads());
        world.connect_to(lines[0], 4, 80, writes(100_000, 1));
    }),
    ("1000 messages of 1000 bytes to a guest", |world, lines| {
        world
            .guest(lines[1])
            .listen(80, SocketType::SeqPacket, reads());
        let mut socket = Socket::new(Side::Caller, SocketType::SeqPacket, 262_144);
        socket.plan = writes(1_000_000, 1000);
        world
            .guest(lines[0])
            .connect(Duration::ZERO, socket, (4, 80), None);
    }),
    (
        "1000 messages of 100 bytes from the host",
        |world, lines| {
            world
                .guest(lines[0])
                .listen(80, SocketType::SeqPacket, reads());
            world.dial(lines[0], 80, SocketType::SeqPacket, writes(100_000, 100));
        },
    ),
    (
        "1000 round trips of 64 bytes with the host",
        |world, lines| {
            let waits = Plan {
                reads: true,
                ..sleeps()
            };
            world.listen_host(lines[0], 80, waits);
            let socket = world.connect(lines[0], 80, waits);
            world.settle();
            for _ in 0..1000 {
                world
                    .guest(lines[0])
                    .sockets
                    .get_mut(&socket)
                    .expect("open")
                    .plan
                    .left = 64;
                world.settle();
                world.program(1).plan.left = 64;
                world.settle();
            }
        },
    ),
    (
        "1000 round trips of 64 bytes between guests",
        |world, lines| {
            let waits = Plan {
                reads: true,
                ..sleeps()
            };
            world.guest(lines[1]).listen(80, SocketType::Stream, waits);
            let near = world.connect_to(lines[0], 4, 80, waits);
            world.settle();
            let far = world.guest(lines[1]).accepted(80).expect("accepted");
            for _ in 0..1000 {
                for (line, id) in [(lines[0], near), (lines[1], far)] {
                    world
                        .guest(line)
                        .sockets
                        .get_mut(&id)
                        .expect("open")
                        .plan
                        .left = 64;
                    world.settle();
                }
            }
        },
    ),
    (
        "1000 calls to the host, each with 100 bytes",
        |world, lines| {
            world.listen_host(lines[0], 80, sends(100));
            for _ in 0..1000 {
                world.connect(
                    lines[0],
                    80,
                    Plan {
                        after: After::HalfClose,
                        ..sends(100)
                    },
                );
            }
        },
    ),
];

fn writes(bytes: u64, write_len: u32) -> Plan {
    Plan {
        write_len,
        ..sends(bytes)
    }
}

fn window(world: &mut World, line: LineId, bytes: u32) {
    let listener = world
        .guest(line)
        .listeners
        .get_mut(&80)
        .expect("it listens");
    listener.buf_alloc = bytes;
}

#[test]
fn results_are_as_they_were() {
    let mut table = String::from(
        "scenario                                       data   control  questions      bytes  time in ms\n",
    );
    for (name, scenario) in SCENARIOS {
        let (mut world, lines) = World::of(2, Limits::default());
        scenario(&mut world, &lines);
        world.settle();
        let (totals, time) = (world.totals, world.now);
        world.finish();
        let _ = writeln!(
            table,
            "{name:44} {:7} {:9} {:10} {:10} {:11.2}",
            totals.data_packets,
            totals.control_packets,
            totals.credit_requests,
            totals.bytes,
            time.as_secs_f64() * 1000.0
        );
    }
    if std::env::var_os("RINGDOWN_UPDATE_RESULTS").is_some() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/src/tests/results.txt");
        std::fs::write(path, &table).expect("the file can be written");
        return;
    }
    let kept = include_str!("results.txt");
    assert!(table == kept, "results have changed; now they are\n{table}");
}
