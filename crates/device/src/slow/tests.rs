use std::cell::Cell;
use std::rc::Rc;

use super::*;

#[derive(Debug, Default, Clone)]
struct Told {
    wall: Rc<Cell<Duration>>,
    processor: Rc<Cell<Duration>>,
    /// What each loop loses, and how long all loops were.
    loses: Rc<Cell<Duration>>,
    looped: Rc<Cell<Duration>>,
}

impl Clock for Told {
    fn wall(&self) -> Duration {
        self.wall.get()
    }

    fn processor(&self) -> Duration {
        self.processor.get()
    }

    fn stolen_within(&self, len: Duration) -> Duration {
        self.looped.set(self.looped.get() + len);
        self.loses.get()
    }
}

const MS: Duration = Duration::from_millis(1);
const MINUTE: Duration = Duration::from_secs(60);
const WEB: Party = Party::User(1000);
/// Calls after which the next uses up the budget: each takes 20 ms, of which 2 ms are allowed, and 1 ms comes back meanwhile.
const CALLS: usize = 29;

struct World {
    clock: Told,
    slow: Slow<Told>,
}

impl World {
    /// A world on alert: something has taken long.
    fn new() -> World {
        let mut world = World::calm();
        world.slow_calls(Party::User(99), 1);
        world.turn();
        world
    }

    fn calm() -> World {
        let clock = Told::default();
        let slow = Slow {
            clock: clock.clone(),
            own_user: Some(7),
            ..Slow::default()
        };
        let mut world = World { clock, slow };
        world.turn();
        world
    }

    fn turn(&mut self) {
        self.slow.begin_turn();
    }

    fn pass(&mut self, time: Duration) {
        self.clock.wall.set(self.clock.wall.get() + time);
        self.turn();
    }

    /// A call that takes this long, of which the thread has had a processor for the second time.
    fn call(&mut self, party: Party, bytes: usize, took: Duration, used: Duration) {
        let Told {
            wall, processor, ..
        } = self.clock.clone();
        let moved = self.slow.timed(Some(party), None, || {
            wall.set(wall.get() + took);
            processor.set(processor.get() + used);
            Ok::<usize, ()>(bytes)
        });
        assert_eq!(moved, Ok(bytes));
    }

    fn slow_calls(&mut self, party: Party, count: usize) {
        for _ in 0..count {
            self.call(party, 1, 20 * MS, 20 * MS);
        }
    }
}

#[test]
fn who_has_used_up_its_budget_is_barred_and_others_are_not() {
    let mut world = World::new();
    world.slow_calls(WEB, 1);
    assert!(world.slow.is_suspect(Some(WEB)) && !world.slow.closes_elsewhere(WEB));
    world.slow_calls(WEB, CALLS);
    assert!(world.slow.closes_elsewhere(WEB));
    assert!(!world.slow.is_barred(Some(WEB)));
    assert_eq!(world.slow.take_overrun(), None);
    world.slow_calls(WEB, 1);
    assert!(world.slow.is_barred(Some(WEB)));
    let overrun = world.slow.take_overrun().unwrap();
    assert_eq!((overrun.party, overrun.all), (WEB, true));
    let other = Some(Party::User(1001));
    assert!(!world.slow.is_barred(other) && !world.slow.is_suspect(other));
    assert_eq!(world.slow.piece(other), usize::MAX);
}

#[test]
fn one_call_that_uses_the_whole_budget_is_enough() {
    let mut world = World::new();
    world.slow_calls(WEB, 1);
    world.call(WEB, 1, 510 * MS, 510 * MS);
    assert!(world.slow.is_barred(Some(WEB)));
}

#[test]
fn a_call_of_a_barred_party_that_is_slow_ends_its_circuit_alone() {
    let mut world = World::new();
    world.slow_calls(WEB, CALLS + 2);
    assert!(world.slow.take_overrun().unwrap().all);
    world.slow_calls(WEB, 1);
    assert!(!world.slow.take_overrun().unwrap().all);
}

#[test]
fn time_without_a_processor_does_not_count() {
    let mut world = World::new();
    for _ in 0..100 {
        world.call(WEB, 1, 20 * MS, MS / 10);
        world.turn();
    }
    assert!(!world.slow.is_suspect(Some(WEB)));
    // Outside of calls, too: it cannot be distinguished.
    let before = world.clock.wall.get();
    world.clock.wall.set(before + 50 * MS);
    world.call(Party::User(3), 1, 20 * MS, 20 * MS);
    assert!(!world.slow.is_suspect(Some(Party::User(3))));
    // Of a suspect it is known exactly.
    world.turn();
    world.slow_calls(WEB, 1);
    for _ in 0..1000 {
        world.call(WEB, 1, 20 * MS, 2 * MS);
    }
    assert!(world.slow.is_suspect(Some(WEB)) && !world.slow.closes_elsewhere(WEB));
}

#[test]
fn what_a_hypervisor_takes_from_calls_and_loops_alike_does_not_count() {
    let mut world = World::new();
    // One call in ten loses 20 ms to other virtual machines, and so does one loop in ten.
    for _ in 0..1000 {
        world.slow_calls(WEB, 1);
        for call in 0..9 {
            world
                .clock
                .loses
                .set(if call == 5 { 20 * MS } else { Duration::ZERO });
            world.call(WEB, 1, MS / 50, MS / 50);
        }
    }
    assert!(!world.slow.is_barred(Some(WEB)));
    assert_eq!(world.slow.take_overrun(), None);
    // Its calls alone: that is its own doing, however many fast ones it makes beside them.
    world.clock.loses.set(Duration::ZERO);
    for _ in 0..CALLS + 2 {
        world.slow_calls(WEB, 1);
        (0..9).for_each(|_| world.call(WEB, 1, MS / 50, MS / 50));
    }
    assert!(world.slow.is_barred(Some(WEB)));
}

#[test]
fn loops_are_short_and_only_for_a_party_that_has_used_much() {
    let mut world = World::new();
    let looped = |world: &World| world.clock.looped.replace(Duration::ZERO);
    world.slow_calls(WEB, 1);
    // 18 ms of each count, so less than 100 ms by now.
    world.slow_calls(WEB, 5);
    world.call(WEB, 1, MS, MS);
    assert_eq!(looped(&world), Duration::ZERO);
    world.slow_calls(WEB, 2);
    for (used, expected) in [(MS / 1000, MS / 50), (MS / 40, MS / 10), (2 * MS, MS / 5)] {
        world.call(WEB, 1, used, used);
        assert_eq!(looped(&world), expected);
    }
    world.call(Party::User(3), 1, MS, MS);
    assert_eq!(looped(&world), Duration::ZERO);
}

#[test]
fn the_systems_loop_uses_the_processor_for_so_long() {
    let begin = System.processor();
    let stolen = System.stolen_within(5 * MS);
    assert!(System.processor() - begin >= stolen + 5 * MS);
}

#[test]
fn many_bytes_may_take_long() {
    let mut world = World::new();
    for _ in 0..100 {
        world.call(WEB, 1 << 20, 4 * MS, 4 * MS);
        world.turn();
    }
    assert!(!world.slow.is_suspect(Some(WEB)));
    world.call(WEB, 1 << 20, 7 * MS, 7 * MS);
    assert!(world.slow.is_suspect(Some(WEB)));
}

#[test]
fn what_comes_back_may_be_used_again() {
    let mut world = World::new();
    for _ in 0..1000 {
        // 18 ms beyond what is allowed, in 380 ms.
        world.slow_calls(WEB, 1);
        world.pass(360 * MS);
    }
    assert_eq!(world.slow.take_overrun(), None);
    for _ in 0..100 {
        world.slow_calls(WEB, 1);
        world.pass(100 * MS);
    }
    assert!(world.slow.take_overrun().is_some());
}

#[test]
fn calls_of_a_suspect_are_small_and_grow_while_they_are_fast() {
    let mut world = World::new();
    world.slow_calls(WEB, 1);
    assert_eq!(world.slow.piece(Some(WEB)), FIRST_PIECE);
    for _ in 0..3 * CALLS_OF_A_PIECE {
        world.call(WEB, 1, MS / 100, MS / 100);
    }
    assert_eq!(world.slow.piece(Some(WEB)), 8 * FIRST_PIECE);
    world.slow_calls(WEB, 1);
    assert_eq!(world.slow.piece(Some(WEB)), FIRST_PIECE);
    world.pass(SUSPICION);
    assert_eq!(world.slow.piece(Some(WEB)), usize::MAX);
}

#[test]
fn each_time_is_twice_as_long_up_to_an_hour() {
    let mut world = World::new();
    for (index, minutes) in [1, 2, 4, 8, 16, 32, 60, 60].into_iter().enumerate() {
        let mut calls = 0;
        while world.slow.take_overrun().is_none() {
            world.slow_calls(WEB, 1);
            calls += 1;
        }
        // After the first time it has half of the budget.
        assert_eq!(calls < CALLS, index > 0, "{index}");
        world.pass(MINUTE * minutes - MS);
        assert!(world.slow.is_barred(Some(WEB)), "{minutes}");
        world.pass(MS);
        assert!(!world.slow.is_barred(Some(WEB)), "{minutes}");
    }
    world.pass(LONGEST_TERM + MEMORY);
    world.slow_calls(Party::User(99), 1);
    world.turn();
    world.slow_calls(WEB, CALLS + 2);
    world.pass(MINUTE);
    assert!(!world.slow.is_barred(Some(WEB)), "it is forgotten");
}

#[test]
fn the_first_slow_call_is_charged_to_no_party() {
    let mut world = World::calm();
    world.slow_calls(WEB, 1);
    assert!(!world.slow.is_suspect(Some(WEB)));
    world.turn();
    world.slow_calls(WEB, 1);
    assert!(world.slow.is_suspect(Some(WEB)));
}

#[test]
fn an_alert_ends_and_a_suspicion_too() {
    let mut world = World::new();
    world.slow_calls(WEB, 1);
    world.pass(SUSPICION - MS);
    assert!(world.slow.is_suspect(Some(WEB)) && world.slow.turn.is_some());
    world.pass(MS);
    assert!(!world.slow.is_suspect(Some(WEB)) && world.slow.turn.is_none());
}

#[test]
fn root_and_the_own_user_are_cut_and_not_barred() {
    let mut world = World::new();
    for user in [0, 7] {
        let party = Party::User(user);
        world.slow_calls(party, CALLS + 2);
        let overrun = world.slow.take_overrun().unwrap();
        assert!(!overrun.all && !world.slow.is_barred(Some(party)));
    }
}

#[test]
fn as_many_parties_are_known_as_there_is_room_for() {
    let mut world = World::new();
    for user in 0..MAX_PARTIES as u32 + 10 {
        world.slow_calls(Party::User(10_000 + user), 1);
    }
    assert_eq!(world.slow.known.len(), MAX_PARTIES);
    let last = Party::User(10_000 + MAX_PARTIES as u32 + 9);
    assert!(world.slow.is_suspect(Some(last)));
}

#[test]
fn callers_of_a_published_port_are_told_apart_by_their_network() {
    let party = |from: &str| Party::published("web", from.parse().ok());
    assert_eq!(party("fd00::1"), party("fd00::2"));
    assert_eq!(party("10.0.0.1"), party("::ffff:10.0.0.1"));
    let different = ["", "fd00::1", "fd00:0:0:1::1", "10.0.0.1", "10.0.0.2"].map(party);
    for (index, one) in different.iter().enumerate() {
        assert!(!different[..index].contains(one));
    }
    assert_ne!(party(""), Party::published("other", None));
}
