//! Guests that have fallen silent beside others that send without pause: their rings are not polled for ever, and what they send at last is found.

use std::time::Duration;

use l2::bridge::PortConfig;

use super::setup::{Driver, Guest, Setup, TRANSMIT, frame, mac};
use crate::frontend::Request;
use crate::ring::VAIN_LOOKS;

/// Two guests that send each other frames without pause, and a third.
struct Scene {
    setup: Setup,
    busy: [Guest; 2],
    silent: Guest,
    /// Frames of the silent one that have arrived and have not been asked for.
    heard: usize,
}

impl Scene {
    /// `silent` has sent a frame, which has arrived.
    fn new(driver: Driver) -> Scene {
        let mut setup = Setup::new();
        let busy = [setup.guest(1), setup.guest(2)];
        let silent = setup.guest_at(3, PortConfig::guest(mac(3)), driver);
        // Longer than a sleep takes that ends at once.
        setup.fabric.set_spin(Duration::from_millis(20));
        let mut scene = Scene {
            setup,
            busy,
            silent,
            heard: 0,
        };
        scene.settle_busy();
        scene.say();
        scene.turn();
        assert_eq!(scene.heard(), 1);
        scene
    }

    /// Those at work wake the fabric until it looks before it sleeps, instead of asking to be notified in each turn.
    fn settle_busy(&mut self) {
        let mut sleeps = 0;
        while self.setup.fabric.spin.patience().is_zero() {
            self.setup.settle();
            self.turn();
            sleeps += 1;
            assert!(sleeps < 1000, "none was short");
        }
        self.turn();
    }

    /// A turn in which there is something to do.
    fn turn(&mut self) {
        for number in [0, 1] {
            let to = self.busy[1 - number].mac;
            let guest = &mut self.busy[number];
            guest.take_sent(TRANSMIT);
            let frame = frame(to, guest.mac, 60);
            guest.send(&frame);
        }
        self.setup.fabric.turn(Some(Duration::ZERO)).unwrap();
        let frames = self.busy[0].frames();
        self.busy[1].frames();
        self.heard += frames.iter().filter(|frame| frame.len() == 64).count();
    }

    /// Sends a frame to the first, with a notification only if that is asked for. Returns whether it is.
    fn say(&mut self) -> bool {
        self.silent.take_sent(TRANSMIT);
        let frame = frame(self.busy[0].mac, self.silent.mac, 64);
        self.silent.enqueue(Default::default(), &frame);
        self.silent.kick_on(TRANSMIT)
    }

    /// How many of those have arrived since the last time.
    fn heard(&mut self) -> usize {
        std::mem::take(&mut self.heard)
    }

    fn is_looked_at(&self) -> bool {
        let silent = (self.silent.number, TRANSMIT);
        self.setup.fabric.unarmed.contains(&silent)
    }
}

#[test]
fn a_silent_guest_is_asked_to_notify_after_64_turns() {
    for driver in Driver::of_each_kind() {
        let mut scene = Scene::new(driver.clone());
        let mut turns = 0;
        while scene.is_looked_at() {
            scene.turn();
            turns += 1;
        }
        assert_eq!(turns, VAIN_LOOKS, "{driver:?}");
        assert!(scene.say(), "it notifies: {driver:?}");
        scene.turn();
        assert_eq!(scene.heard(), 1, "{driver:?}");
        assert!(scene.is_looked_at(), "again, as it may have more");
        assert!(!scene.say(), "and need not notify: {driver:?}");
        scene.turn();
        assert_eq!(scene.heard(), 1, "{driver:?}");
    }
}

#[test]
fn what_is_sent_in_any_turn_before_or_after_is_found_in_the_next() {
    for driver in Driver::of_each_kind() {
        let mut scene = Scene::new(driver.clone());
        for silent_turns in (0..=VAIN_LOOKS + 2).rev() {
            for _ in 0..silent_turns {
                scene.turn();
            }
            let is_looked_at = scene.is_looked_at();
            assert_eq!(is_looked_at, silent_turns < VAIN_LOOKS, "{silent_turns}");
            assert_eq!(scene.say(), !is_looked_at, "{silent_turns} {driver:?}");
            scene.turn();
            assert_eq!(scene.heard(), 1, "after {silent_turns} turns: {driver:?}");
        }
    }
}

/// Whether its ring is polled or not when it stops.
#[test]
fn a_guest_whose_ring_stops_is_heard_when_it_runs_again() {
    for silent_turns in [1, VAIN_LOOKS - 1, VAIN_LOOKS, VAIN_LOOKS + 1] {
        for driver in Driver::of_each_kind() {
            let mut scene = Scene::new(driver.clone());
            for _ in 0..silent_turns {
                scene.turn();
            }
            // The VM is paused, with a frame in its ring of which nothing is said.
            let stop = Request::Stop { index: TRANSMIT };
            let base = scene.setup.ask(&scene.silent, stop).unwrap();
            assert!(!scene.is_looked_at());
            scene.silent.take_sent(TRANSMIT);
            let frame = frame(scene.busy[0].mac, scene.silent.mac, 64);
            scene.silent.enqueue(Default::default(), &frame);
            scene.silent.rings[TRANSMIT].kick_needed();
            scene.turn();
            assert_eq!(scene.heard(), 0);
            let memory = scene.silent.memory();
            let guest = &scene.silent;
            let started = scene.setup.start_ring(guest, TRANSMIT, base, &memory);
            started.unwrap();
            scene.turn();
            assert_eq!(scene.heard(), 1, "{silent_turns} {driver:?}");
            // The driver starts anew, with other features.
            scene.setup.ask(&scene.silent, Request::Reset).unwrap();
            assert!(!scene.is_looked_at());
            let other = Driver {
                event_index: !driver.event_index,
                packed: !driver.packed,
                ..driver.clone()
            };
            let arena = scene.silent.arena.clone();
            scene.silent = scene.setup.guest_in(3, other, arena);
            scene.turn();
            scene.say();
            scene.turn();
            assert_eq!(scene.heard(), 1, "{silent_turns} {driver:?}");
            let in_list = scene.setup.fabric.unarmed.iter();
            let silent = (scene.silent.number, TRANSMIT);
            assert_eq!(in_list.filter(|ring| **ring == silent).count(), 1);
        }
    }
}
