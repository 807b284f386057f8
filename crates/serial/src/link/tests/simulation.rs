//! Random schedules with virtual time: two links over a line that loses, damages and breaks, and that restart themselves. Every step is decided by
//! the seed, so that a failure can be run again: `RINGDOWN_SIM_SEED=<seed>`. The duration in seconds is `RINGDOWN_SIM_SECONDS`; without it
//! a few hundred worlds are simulated.

use std::time::{Duration, Instant};

use super::world::World;

/// Steps in one world, before it comes to its end.
const STEPS: usize = 4000;

/// Worlds, unless a duration is asked for.
const WORLDS: u64 = 150;

/// The steps, and the virtual time, within which a line that works again must have healed all.
const HEALING_STEPS: usize = 200_000;

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(
        value
            .parse()
            .unwrap_or_else(|_| panic!("{name} is a whole number, not {value:?}")),
    )
}

fn step(world: &mut World, faults: usize, restarts: usize) {
    let who = world.random.below(2);
    match world.random.below(40) {
        0..12 => world.write(who),
        12..24 => world.deliver(who),
        24..34 => world.act(who),
        34..36 => world.open(who),
        36 => world.pass_time(Duration::from_millis(20)),
        37 => world.pass_time(Duration::from_secs(2)),
        38 if faults > 0 && world.random.one_in(faults) => world.damage(),
        39 if faults > 0 && world.random.one_in(faults) => break_line(world),
        38 if restarts > 0 && world.random.one_in(restarts) => world.restart(who),
        _ => {}
    }
}

/// The line breaks, and comes back: one end notices, or both, or one is gone for a while.
fn break_line(world: &mut World) {
    for pipe in &mut world.pipes {
        let kept = world.random.below(pipe.len() + 1);
        match world.random.below(3) {
            0 => pipe.clear(),
            1 => pipe.truncate(kept),
            _ => {}
        }
    }
    let host = 0;
    if world.ends[host].is_connected {
        world.disconnect(host);
    } else {
        world.connect(host);
    }
    // A guest sees that the host has gone, or it is too slow to see it.
    let guest = 1;
    if world.random.one_in(2) {
        if world.ends[guest].is_connected {
            world.disconnect(guest);
        } else {
            world.connect(guest);
        }
    }
}

fn heal(world: &mut World) {
    for who in 0..2 {
        if !world.ends[who].is_connected {
            world.connect(who);
        }
    }
    for _ in 0..HEALING_STEPS {
        for who in 0..2 {
            world.write(who);
            world.deliver(who);
        }
        let is_quiet = world.pipes.iter().all(|pipe| pipe.is_empty())
            && (0..2).all(|who| world.ends[who].link.output().is_empty());
        if is_quiet {
            if world.ends.iter().all(|end| end.link.poll_at().is_none()) {
                return;
            }
            world.pass_time(Duration::from_secs(100));
        }
    }
    for end in &world.ends {
        eprintln!("{:?}", end.link.counters());
        eprintln!("{:?} peer {:?}", end.link.timers, end.link.peer);
        eprintln!(
            "{:?} expected {}",
            end.link.outgoing.len(),
            end.link.expected
        );
    }
    panic!(
        "it does not come to rest: {:?}",
        world.pipes.each_ref().map(|pipe| pipe.len())
    );
}

fn simulate(seed: u64) -> World {
    let run = std::panic::catch_unwind(|| {
        let mut world = World::new(seed);
        let faults = world.random.pick(&[0, 1, 5, 20]);
        let restarts = world.random.pick(&[0, 0, 5, 20]);
        world.connect(0);
        world.connect(1);
        for _ in 0..STEPS {
            step(&mut world, faults, restarts);
        }
        heal(&mut world);
        world.check_rest();
        world
    });
    match run {
        Ok(world) => world,
        Err(failure) => {
            eprintln!("seed {seed} fails; run it alone with RINGDOWN_SIM_SEED={seed}");
            std::panic::resume_unwind(failure);
        }
    }
}

#[test]
fn every_schedule_keeps_every_promise() {
    if let Some(seed) = number("RINGDOWN_SIM_SEED") {
        simulate(seed);
        return;
    }
    let seconds = number("RINGDOWN_SIM_SECONDS");
    let first = number("RINGDOWN_SIM_FIRST").unwrap_or(0);
    let start = Instant::now();
    let (mut worlds, mut bytes, mut channels, mut restarts, mut replayed, mut gaps) =
        (0, 0, 0, 0, 0, 0);
    loop {
        let world = simulate(first + worlds);
        worlds += 1;
        bytes += world.bytes;
        channels += world.book.len();
        restarts += world.restarts;
        for end in &world.ends {
            replayed += end.link.counters().replayed_frames;
            gaps += end.link.counters().gaps;
        }
        let over = match seconds {
            Some(seconds) => start.elapsed() >= Duration::from_secs(seconds),
            None => worlds >= WORLDS,
        };
        if over {
            break;
        }
    }
    println!(
        "seeds {first} to {}: {channels} channels, {bytes} bytes, {restarts} restarts, {replayed} frames sent again, {gaps} gaps",
        first + worlds - 1
    );
    if seconds.is_none() {
        assert!(restarts > 0 && replayed > 0 && gaps > 0 && channels > 0 && bytes > 1_000_000);
    }
}
