//! Guests that poll their rings only when they are notified, and a network that polls theirs only when it is: none may sleep
//! for ever beside something that is there.

use std::sync::Arc;
use std::time::Duration;

use guestmem_driver::Arena;
use l2::bridge::PortConfig;
use wire::net_header::NetHeader;

#[path = "../../../../vsock/src/tests/random.rs"]
mod random;

use self::random::Random;
use super::setup::{Driver, Guest, LAN, RECEIVE, Setup, TRANSMIT, frame, mac};
use crate::frontend::Request;
use crate::net::ModerationSetting;

/// Schedules in one run. `RINGDOWN_TEST_SEEDS` says another number.
const SEEDS: u64 = 300;

/// Steps of one schedule.
const STEPS: usize = 60;

/// A guest that sleeps until its call event wakes it up, as Linux does with NAPI.
struct Sleeper {
    guest: Guest,
    /// It has been woken and looks; it asks for interrupts when it finds nothing more.
    is_awake: bool,
    /// Its ring was full, and it sends nothing until it is interrupted for that.
    waits_for_room: bool,
    /// By peer: the next number to send.
    next: Vec<u32>,
    /// By peer: the number after the last that came.
    seen: Vec<u32>,
    came: u64,
    sent: u64,
}

impl Sleeper {
    fn step(&mut self, number: usize, others: &[wire::ethernet::MacAddress], random: &mut Random) {
        if self.guest.interrupts_on(TRANSMIT) > 0 {
            self.waits_for_room = false;
        }
        if self.guest.interrupts_on(RECEIVE) > 0 && !self.is_awake {
            self.guest.rings[RECEIVE].disable_interrupts();
            self.is_awake = true;
        }
        if random.one_in(2) && self.is_awake {
            self.look();
        }
        if random.one_in(2) && !self.waits_for_room {
            self.send(number, others, random);
        }
    }

    /// Takes what is there, and goes back to sleep if nothing came in between.
    fn look(&mut self) {
        for frame in self.guest.frames() {
            let from = usize::from(frame[11]) - 1;
            let number = u32::from_be_bytes(frame[14..18].try_into().unwrap());
            assert!(number >= self.seen[from], "out of order, or twice");
            self.seen[from] = number + 1;
            self.came += 1;
        }
        self.is_awake = self.guest.rings[RECEIVE].enable_interrupts();
        if self.is_awake {
            self.guest.rings[RECEIVE].disable_interrupts();
        }
    }

    fn send(&mut self, number: usize, others: &[wire::ethernet::MacAddress], random: &mut Random) {
        for _ in 0..random.below(12) {
            let to = random.below(others.len() as u64) as usize;
            if to == number {
                continue;
            }
            let mut frame = frame(others[to], self.guest.mac, 60 + random.below(300) as usize);
            frame[14..18].copy_from_slice(&self.next[to].to_be_bytes());
            self.guest.rings[TRANSMIT].disable_interrupts();
            let mut is_added = self
                .guest
                .try_enqueue(TRANSMIT, NetHeader::default(), &frame, &[]);
            if !is_added {
                self.guest.kick();
                self.waits_for_room =
                    self.guest.outstanding > 0 && !self.guest.rings[TRANSMIT].enable_interrupts();
                if self.waits_for_room {
                    return;
                }
                is_added = self
                    .guest
                    .try_enqueue(TRANSMIT, NetHeader::default(), &frame, &[]);
            }
            if is_added {
                self.next[to] += 1;
                self.sent += 1;
            }
        }
        self.guest.kick();
    }
}

fn any_driver(random: &mut Random) -> Driver {
    let kinds = Driver::of_each_kind();
    Driver {
        ring_size: [4, 8, 16][random.below(3) as usize],
        moderation: any_moderation(random),
        ..kinds[random.below(kinds.len() as u64) as usize].clone()
    }
}

fn any_moderation(random: &mut Random) -> ModerationSetting {
    match random.below(4) {
        0 => ModerationSetting::Off,
        1 => ModerationSetting::Adaptive,
        2 => ModerationSetting::Window(Duration::from_micros(50)),
        _ => ModerationSetting::Window(Duration::from_millis(1)),
    }
}

/// Stops one of a guest's rings and lets it go on where it was, as a VMM does with a VM that it pauses.
fn pause(setup: &mut Setup, guest: &Guest, random: &mut Random) {
    let index = random.below(2) as usize;
    let base = setup.ask(guest, Request::Stop { index }).unwrap();
    if random.one_in(2) {
        setup.settle();
    }
    let memory = guest.memory();
    setup.start_ring(guest, index, base, &memory).unwrap();
}

fn run(setup: &mut Setup, arenas: &[Arc<Arena>], count: usize, random: &mut Random) {
    let before: Vec<_> = (0..count)
        .map(|port| setup.fabric.ports[port].counters)
        .collect();
    let mut sleepers: Vec<Sleeper> = (0..count)
        .map(|number| {
            // Each time from the beginning, in memory that has served others.
            let driver = any_driver(random);
            let arena = Arc::clone(&arenas[number]);
            let bridge = PortConfig::guest(mac(number as u8 + 1));
            let name = format!("vm{}", number + 1);
            setup
                .fabric
                .configure_port(LAN, &name, bridge, driver.moderation)
                .unwrap();
            Sleeper {
                guest: setup.guest_in(number as u8 + 1, driver, arena),
                is_awake: false,
                waits_for_room: false,
                next: vec![0; count],
                seen: vec![0; count],
                came: 0,
                sent: 0,
            }
        })
        .collect();
    let macs: Vec<_> = (0..count).map(|number| mac(number as u8 + 1)).collect();
    setup.fabric.set_batch(1 + random.below(10) as usize);
    setup
        .fabric
        .set_spin(Duration::from_micros(if random.one_in(4) { 20 } else { 0 }));
    for _ in 0..STEPS {
        let number = random.below(count as u64) as usize;
        sleepers[number].step(number, &macs, random);
        if random.one_in(3) {
            setup.fabric.turn(Some(Duration::ZERO)).unwrap();
        }
        if random.one_in(40) {
            pause(setup, &sleepers[number].guest, random);
        }
    }
    // Nothing new is sent. A notified guest looks; when none is notified any more, nothing may be left.
    loop {
        setup.rest();
        let mut is_quiet = true;
        for sleeper in &mut sleepers {
            let is_woken = sleeper.guest.interrupts_on(RECEIVE) > 0;
            if is_woken || sleeper.is_awake {
                is_quiet = false;
                sleeper.guest.rings[RECEIVE].disable_interrupts();
                sleeper.look();
            }
            if sleeper.guest.interrupts_on(TRANSMIT) > 0 {
                sleeper.waits_for_room = false;
            }
        }
        if is_quiet {
            break;
        }
    }
    let (mut sent, mut came) = (0, 0);
    for (number, sleeper) in sleepers.iter_mut().enumerate() {
        assert!(!sleeper.waits_for_room, "guest {number} waits for room");
        sleeper.guest.take_sent(TRANSMIT);
        assert_eq!(
            sleeper.guest.outstanding, 0,
            "guest {number}'s kick was lost"
        );
        let port = sleeper.guest.number;
        let (now, before) = (setup.fabric.ports[port].counters, before[port]);
        let given = now.frames_to_guest - before.frames_to_guest;
        assert_eq!(sleeper.came, given, "guest {number} sleeps beside frames");
        sent += sleeper.sent;
        came += sleeper.came + now.dropped_without_buffers - before.dropped_without_buffers;
        came += now.dropped_without_driver - before.dropped_without_driver;
    }
    assert_eq!(came, sent, "each frame arrives or is counted");
}

#[test]
fn nobody_sleeps_beside_frames() {
    let number = |name| {
        std::env::var(name)
            .ok()
            .and_then(|value| value.parse().ok())
    };
    let first: u64 = number("RINGDOWN_TEST_SEED").unwrap_or(0);
    let seeds = number("RINGDOWN_TEST_SEEDS").unwrap_or(SEEDS);
    let mut setup = None;
    for seed in first..first + seeds {
        // Few fabrics, as each port has a thread.
        if seed % 50 == 0 || setup.is_none() {
            setup = Some(begin());
        }
        let (setup, arenas) = setup.as_mut().unwrap();
        let mut random = Random::new(seed);
        println!("RINGDOWN_TEST_SEED={seed}");
        let count = 2 + random.below(2) as usize;
        run(setup, arenas, count, &mut random);
        for arena in arenas {
            *arena = Arc::new(Arena::new(4 << 20).unwrap());
        }
    }
}

fn begin() -> (Setup, Vec<Arc<Arena>>) {
    let mut setup = Setup::new();
    for number in 1..=3 {
        setup.add_port(number, PortConfig::guest(mac(number)), &Driver::default());
    }
    let arena = |_| Arc::new(Arena::new(4 << 20).unwrap());
    (setup, (0..3).map(arena).collect())
}
