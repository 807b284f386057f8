//! Guests that have fallen silent beside one that sends without pause.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use device::{Fabric, LineConfig};
use guestmem_driver::RawDescriptor;
use wire::vsock::Header;

use crate::guest::{Guest, RX, TX, quads, request, send};
use crate::keeper::deaths::Dice;
use crate::keeper::{Host, wait_until_kept};
use crate::turns::stray;
use crate::{config_of, fabric, turn_until};

/// In so many turns a ring is polled in vain before its guest is asked to notify.
const VAIN_LOOKS: u16 = 64;

/// Payload of a packet that is as much as a turn takes of a guest.
const TURN_BYTES: u32 = 4 << 20;

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
        Scene::of(fabric, &configs, connect)
    }

    fn of(fabric: Fabric, lines: &[LineConfig; 2], connect: fn(&Path) -> Guest) -> Scene {
        let [busy, idle] = lines.each_ref().map(|line| connect(&line.vhost_user));
        // Of packets without payload a guest may send so many a second.
        let packets = [(&busy, TURN_BYTES), (&idle, 1)]
            .map(|(guest, len)| guest.packet(&Header { len, ..stray() }));
        let mut scene = Scene {
            fabric,
            busy,
            idle,
            packets,
        };
        scene.begin();
        scene
    }

    /// The rings run, and both have sent something.
    fn begin(&mut self) {
        turn_until(&mut self.fabric, "the drivers run", |fabric| {
            fabric.lines().iter().all(|line| line.report.up)
        });
        let [work, word] = self.packets;
        for (guest, packet, count) in [(&mut self.idle, word, 1), (&mut self.busy, work, 32)] {
            let before = guest.given_back(TX);
            guest.offer(TX, packet, count);
            guest.kick(TX);
            turn_until(&mut self.fabric, "it has sent something", |_| {
                guest.given_back(TX) != before
            });
        }
        // Again, as all are asked to notify before there is work.
        self.say();
        self.turn();
    }

    /// A turn with work.
    fn turn(&mut self) {
        self.busy.offer(TX, self.packets[0], 1);
        let before = self.busy.given_back(TX);
        self.fabric.turn(None).unwrap();
        assert_ne!(self.busy.given_back(TX), before, "there is work in each");
    }

    /// Has turns with work until the idle one's VMM has been answered.
    fn answer(&mut self) {
        let (fabric, busy, work) = (&mut self.fabric, &mut self.busy, self.packets[0]);
        self.idle.wait_for_answer(|| {
            busy.offer(TX, work, 1);
            fabric.turn(None).unwrap();
        });
    }

    /// The idle one sends something, and notifies only if it is asked to.
    fn say(&mut self) {
        self.idle.say(TX, self.packets[1]);
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

/// Lets the other thread go on to its end, whatever becomes of this one.
struct LetGo<'a>(&'a AtomicU32);

impl Drop for LetGo<'_> {
    fn drop(&mut self) {
        self.0.store(u32::MAX, Ordering::Release);
    }
}

/// What it has sent when a turn begins is found in that turn, in whichever instruction of the turns before it was sent: the device asks for a
/// notification and then looks once more, the driver shows what it has and then looks whether it is asked.
#[test]
fn what_is_sent_just_when_it_is_asked_to_notify_is_found_in_the_next_turn() {
    const ROUNDS: u32 = 1000;
    for (seed, connect) in (1..).zip(CONNECT) {
        let directory = tempfile::tempdir().unwrap();
        let Scene {
            mut fabric,
            mut busy,
            idle,
            packets: [work, word],
        } = Scene::new(directory.path(), connect);
        let first = idle.given_back(TX);
        let idle = Mutex::new(idle);
        let (asked, said) = (AtomicU32::new(0), AtomicU32::new(0));
        let mut turn = || {
            busy.offer(TX, work, 1);
            fabric.turn(None).unwrap();
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                let mut dice = Dice::new(seed);
                for round in 1..=ROUNDS {
                    while asked.load(Ordering::Acquire) < round {
                        std::hint::spin_loop();
                    }
                    for _ in 0..dice.below(100) {
                        std::hint::spin_loop();
                    }
                    idle.lock().unwrap().say(TX, word);
                    said.store(round, Ordering::Release);
                }
            });
            let _let_go = LetGo(&asked);
            let mut dice = Dice::new(seed + 100);
            for round in 1..=ROUNDS {
                // The next turn or the one behind it asks it.
                for _ in 0..usize::from(VAIN_LOOKS) - 2 + dice.below(2) {
                    turn();
                }
                asked.store(round, Ordering::Release);
                while said.load(Ordering::Acquire) < round {
                    turn();
                }
                turn();
                let heard = idle.lock().unwrap().given_back(TX).wrapping_sub(first);
                assert_eq!(u32::from(heard), round, "{seed}");
            }
        });
    }
}

/// Whether its ring is polled or not when the VM is paused.
#[test]
fn a_guest_that_was_paused_is_heard() {
    for silent_turns in [1, VAIN_LOOKS - 1, VAIN_LOOKS, VAIN_LOOKS + 1] {
        let directory = tempfile::tempdir().unwrap();
        let mut scene = Scene::new(directory.path(), |socket| {
            let guest = Guest::connect_without_rings(socket);
            guest.start_kick_first();
            guest
        });
        for _ in 0..silent_turns {
            scene.turn();
        }
        let heard = |scene: &Scene| scene.idle.given_back(TX);
        let before = heard(&scene);
        scene.idle.set_enabled(false);
        scene.answer();
        // Without a notification: the processor stood still in between.
        scene.idle.offer(TX, scene.packets[1], 1);
        scene.turn();
        assert_eq!(heard(&scene), before, "{silent_turns}");
        scene.idle.set_enabled(true);
        scene.answer();
        scene.turn();
        assert_eq!(heard(&scene), before + 1, "{silent_turns}");
        for said in 2..VAIN_LOOKS {
            scene.say();
            scene.turn();
            assert_eq!(heard(&scene), before + said, "{silent_turns}");
        }
    }
}

/// Whether the daemon before polled its ring or not, and whether there is a daemon when it speaks or not.
#[test]
fn the_next_daemon_hears_a_silent_guest() {
    for connect in CONNECT {
        for (silent_turns, speaks_between) in [
            (1, true),
            (1, false),
            (VAIN_LOOKS, true),
            (VAIN_LOOKS, false),
        ] {
            let host = Host::new();
            let other = config_of(host.path(), &format!("{}-idle", host.vm), 4);
            let lines = [host.config(), other];
            let (fabric, keeper) = host.fabric_of(&lines);
            let mut scene = Scene::of(fabric, &lines, connect);
            wait_until_kept(&mut scene.fabric, &[&scene.busy, &scene.idle]);
            scene.begin();
            for _ in 0..silent_turns {
                scene.turn();
            }
            let is_asked = scene.idle.is_asked_to_notify(TX);
            assert_eq!(is_asked, silent_turns == VAIN_LOOKS);
            keeper.leave();
            drop((
                std::mem::replace(&mut scene.fabric, crate::fabric()),
                keeper,
            ));
            let before = scene.idle.given_back(TX);
            if speaks_between {
                scene.say();
            }
            let (fabric, _keeper) = host.fabric_of(&lines);
            scene.fabric = fabric;
            if speaks_between {
                let idle = &scene.idle;
                turn_until(&mut scene.fabric, "it is heard", |_| {
                    idle.given_back(TX) != before
                });
            }
            scene.begin();
            for said in 1..VAIN_LOOKS + 2 {
                let before = scene.idle.given_back(TX);
                for _ in 0..said {
                    scene.turn();
                }
                scene.say();
                scene.turn();
                assert_eq!(scene.idle.given_back(TX), before + 1, "{said}");
            }
        }
    }
}
