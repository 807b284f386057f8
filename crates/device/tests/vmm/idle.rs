//! Guests that have fallen silent beside one that sends without pause.

use std::path::Path;

use device::Fabric;
use guestmem_driver::RawDescriptor;

use crate::guest::{Guest, RX, TX, quads, request, send};
use crate::turns::stray;
use crate::{config_of, fabric, turn_until};

/// Packets of a thousand descriptors each that are taken in a turn.
const PACKETS_PER_TURN: u16 = 4;

/// In so many turns a ring is polled in vain before its guest is asked to notify.
const VAIN_LOOKS: u16 = 64;

struct Scene {
    fabric: Fabric,
    busy: Guest,
    idle: Guest,
    /// What they send.
    packets: [RawDescriptor; 2],
}

impl Scene {
    /// Both have sent something.
    fn new(directory: &Path, connect: fn(&Path) -> Guest) -> Scene {
        let mut fabric = fabric();
        let configs = [("busy", 3), ("idle", 4)].map(|(name, cid)| config_of(directory, name, cid));
        for config in &configs {
            fabric.open_line(config).unwrap();
        }
        let [busy, idle] = configs.each_ref().map(|config| connect(&config.vhost_user));
        turn_until(&mut fabric, "the drivers run", |fabric| {
            fabric.lines().iter().all(|line| line.report.up)
        });
        let packets = [busy.in_pieces(busy.packet(&stray())), idle.packet(&stray())];
        let mut scene = Scene {
            fabric,
            busy,
            idle,
            packets,
        };
        scene
            .busy
            .offer(TX, scene.packets[0], 32 * PACKETS_PER_TURN);
        scene.busy.kick(TX);
        scene.idle.offer(TX, scene.packets[1], 1);
        scene.idle.kick(TX);
        let (busy, idle) = (&scene.busy, &scene.idle);
        turn_until(&mut scene.fabric, "both have sent something", |_| {
            busy.given_back(TX) > 0 && idle.given_back(TX) > 0
        });
        scene
    }

    /// A turn with work.
    fn turn(&mut self) {
        self.busy.offer(TX, self.packets[0], PACKETS_PER_TURN);
        let before = self.busy.given_back(TX);
        self.fabric.turn(None).unwrap();
        assert_ne!(self.busy.given_back(TX), before, "there is work in each");
    }

    /// The idle one sends something, and notifies only if it is asked to.
    fn say(&mut self) {
        let notifies = self.idle.is_asked_to_notify(TX);
        self.idle.offer(TX, self.packets[1], 1);
        if notifies {
            self.idle.kick(TX);
        }
    }
}

const CONNECT: [fn(&Path) -> Guest; 2] = [Guest::connect, Guest::connect_with_event_indices];

#[test]
fn a_silent_guest_is_asked_to_notify_after_64_turns() {
    for connect in CONNECT {
        let directory = tempfile::tempdir().unwrap();
        let mut scene = Scene::new(directory.path(), connect);
        let mut turns = 0;
        while !scene.idle.is_asked_to_notify(TX) {
            scene.turn();
            turns += 1;
        }
        assert!((VAIN_LOOKS - 4..=VAIN_LOOKS).contains(&turns), "{turns}");
        assert!(!scene.busy.is_asked_to_notify(TX));
        // What it sends then is found.
        let before = scene.idle.given_back(TX);
        scene.say();
        let idle = &scene.idle;
        turn_until(&mut scene.fabric, "it has sent something again", |_| {
            idle.given_back(TX) == before + 1
        });
    }
}

#[test]
fn what_is_sent_in_any_turn_before_or_after_is_found_in_the_next() {
    for connect in CONNECT {
        let directory = tempfile::tempdir().unwrap();
        let mut scene = Scene::new(directory.path(), connect);
        for silent_turns in (0..=VAIN_LOOKS + 2).rev() {
            for _ in 0..silent_turns {
                scene.turn();
            }
            let is_armed = scene.idle.is_asked_to_notify(TX);
            assert!(
                !is_armed || silent_turns + 4 >= VAIN_LOOKS,
                "{silent_turns}"
            );
            assert!(is_armed || silent_turns <= VAIN_LOOKS, "{silent_turns}");
            let before = scene.idle.given_back(TX);
            scene.say();
            scene.turn();
            assert_eq!(scene.idle.given_back(TX), before + 1, "{silent_turns}");
        }
    }
}

/// Whether its ring is polled or not when it stops.
#[test]
fn a_guest_that_starts_anew_is_heard() {
    for connect in CONNECT {
        for silent_turns in [1, VAIN_LOOKS - 1, VAIN_LOOKS, VAIN_LOOKS + 1] {
            let directory = tempfile::tempdir().unwrap();
            let mut scene = Scene::new(directory.path(), connect);
            for _ in 0..silent_turns {
                scene.turn();
            }
            // Its VMM stops the rings, and sets others up. What it is answered does not matter.
            for ring in [RX, TX] {
                let ring = quads(&[ring as u64]);
                send(&scene.idle.vmm, request::GET_VRING_BASE, &ring, &[]);
            }
            scene.idle.renew_rings();
            scene.idle.renew_kicks();
            // Sent before its rings run, without a notification.
            scene.idle.offer(TX, scene.packets[1], 1);
            for ring in [RX, TX] {
                scene.idle.set_up(ring);
                scene.idle.send_kick(ring);
            }
            for sent in 1..=VAIN_LOOKS + 2 {
                let until = std::time::Instant::now() + crate::PATIENCE;
                while scene.idle.given_back(TX) < sent {
                    assert!(std::time::Instant::now() < until, "{sent}");
                    scene.turn();
                }
                scene.say();
            }
        }
    }
}
