//! What a packet costs in instructions of the worker: in one thread, with rings that are filled beforehand, a fixed number of turns.
//!
//! Instructions are the same on a busy machine, where times are not. Valgrind counts them, of the fabric's turns alone: neither what guests and
//! programs do, nor what the kernel does in system calls. They are compared with those that are kept in `figures.txt`.

// A bench has no documentation for others.
#![allow(missing_docs)]

mod guest;
mod lines;
mod ports;
mod report;
mod scene;

use std::io;
use std::process::ExitCode;

use self::lines::{Lines, Way};
use self::ports::Ports;
use self::scene::Scene;

/// Turns before it is counted: what grows has grown by then, and what has fallen silent should have been found out.
const WARM_TURNS: u32 = 160;

/// In which of them guests that are idle otherwise send something. No turn sleeps from then on.
const STIR_TURN: u32 = 40;

/// Turns that are counted.
const TURNS: u32 = 200;

/// A way that packets go, by its name.
const WAYS: &[(&str, Kind)] = &[
    ("to-host", Kind::Lines(Way::ToHost, false)),
    ("to-host-kept", Kind::Lines(Way::ToHost, true)),
    ("from-host", Kind::Lines(Way::FromHost, false)),
    ("from-host-kept", Kind::Lines(Way::FromHost, true)),
    ("guests", Kind::Lines(Way::BetweenGuests, false)),
    ("guests-kept", Kind::Lines(Way::BetweenGuests, true)),
    ("network", Kind::Network),
];

#[derive(Debug, Clone, Copy)]
enum Kind {
    /// Lines, and whether there is a keeper.
    Lines(Way, bool),
    Network,
}

/// The scene of a setup, `WAY/GUESTS/IDLE`.
fn scene(setup: &str) -> io::Result<Box<dyn Scene>> {
    let unknown = || io::Error::other(format!("{setup:?} is no setup"));
    let parts: Vec<&str> = setup.split('/').collect();
    let [way, busy, idle] = parts[..] else {
        return Err(unknown());
    };
    let kind = WAYS.iter().find(|(name, _)| *name == way);
    let number = |text: &str| text.parse().map_err(|_| unknown());
    let (busy, idle) = (number(busy)?, number(idle)?);
    Ok(match kind.ok_or_else(unknown)?.1 {
        Kind::Lines(way, is_kept) => Box::new(Lines::new(way, busy, idle, is_kept)?),
        Kind::Network => Box::new(Ports::new(busy, idle)?),
    })
}

/// What is counted: valgrind knows it by this name.
#[inline(never)]
fn counted_turn(scene: &mut dyn Scene) -> io::Result<()> {
    scene.turn()
}

/// Has a setup's turns, and says how many packets arrived in those that count.
fn run(setup: &str) -> io::Result<()> {
    let mut scene = scene(setup)?;
    for turn in 0..WARM_TURNS {
        scene.prepare()?;
        if turn == STIR_TURN {
            scene.stir();
        }
        scene.turn()?;
    }
    // What the last turn of these did arrives now.
    scene.prepare()?;
    let mut packets = 0;
    for _ in 0..TURNS {
        counted_turn(&mut *scene)?;
        packets += scene.prepare()?;
    }
    println!("packets {packets}");
    // What a thousand threads and mappings take to be let go of is of no interest.
    std::process::exit(0)
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments[..] {
        ["--run", setup] => run(setup),
        _ => report::report(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
