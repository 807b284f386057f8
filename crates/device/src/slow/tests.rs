use std::cell::Cell;
use std::rc::Rc;

use super::*;

#[derive(Debug, Default, Clone)]
struct Told {
    wall: Rc<Cell<Duration>>,
    processor: Rc<Cell<Duration>>,
}

impl Clock for Told {
    fn wall(&self) -> Duration {
        self.wall.get()
    }

    fn processor(&self) -> Duration {
        self.processor.get()
    }
}

const MS: Duration = Duration::from_millis(1);
const WEB: Party = Party::User(1000);

struct World {
    clock: Told,
    slow: Slow<Told>,
}

impl World {
    /// A world on alert: something has taken long.
    fn new() -> World {
        let mut world = World::calm();
        world.clock.wall.set(20 * MS);
        world.slow.after(None, 1, None);
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
        self.slow.before(Some(party));
        let Told { wall, processor } = &self.clock;
        wall.set(wall.get() + took);
        processor.set(processor.get() + used);
        self.slow.after(Some(party), bytes, None);
    }

    fn slow_calls(&mut self, party: Party, count: usize) {
        for _ in 0..count {
            self.call(party, 1, 20 * MS, 20 * MS);
        }
    }
}

#[test]
fn who_is_slow_again_and_again_is_barred_and_others_are_not() {
    let mut world = World::new();
    world.slow_calls(WEB, 3);
    assert!(world.slow.is_on_probation(Some(WEB)));
    assert!(!world.slow.is_barred(Some(WEB)));
    assert_eq!(world.slow.take_overrun(), None);
    world.slow_calls(WEB, 1);
    assert!(world.slow.is_barred(Some(WEB)));
    let overrun = world.slow.take_overrun().unwrap();
    assert_eq!((overrun.party, overrun.barred), (WEB, true));
    let other = Some(Party::User(1001));
    assert!(!world.slow.is_barred(other) && !world.slow.is_on_probation(other));
    assert_eq!(world.slow.piece(other), usize::MAX);
}

#[test]
fn a_call_of_a_barred_party_that_is_slow_ends_its_circuit_at_once() {
    let mut world = World::new();
    world.slow_calls(WEB, 4);
    world.slow.take_overrun();
    world.slow_calls(WEB, 1);
    assert!(world.slow.take_overrun().is_some());
}

#[test]
fn time_without_a_processor_does_not_count() {
    let mut world = World::new();
    for _ in 0..100 {
        world.call(WEB, 1, 20 * MS, MS / 10);
        world.turn();
    }
    assert!(!world.slow.is_barred(Some(WEB)));
    assert_eq!(world.slow.take_overrun(), None);
    // Outside of calls, too: it cannot be told apart.
    let before = world.clock.wall.get();
    world.clock.wall.set(before + 50 * MS);
    world.call(Party::User(3), 1, 20 * MS, 20 * MS);
    assert!(!world.slow.is_on_probation(Some(Party::User(3))));
}

#[test]
fn many_bytes_may_take_long() {
    let mut world = World::new();
    for _ in 0..100 {
        world.call(WEB, 1 << 20, 4 * MS, 4 * MS);
        world.turn();
    }
    assert!(!world.slow.is_on_probation(Some(WEB)));
    world.call(WEB, 1 << 20, 7 * MS, 7 * MS);
    assert!(world.slow.is_on_probation(Some(WEB)));
}

#[test]
fn a_slow_call_now_and_then_is_not_enough() {
    let mut world = World::new();
    for _ in 0..100 {
        world.slow_calls(WEB, 1);
        world.pass(MINUTE);
    }
    assert!(!world.slow.is_barred(Some(WEB)));
    assert_eq!(world.slow.take_overrun(), None);
}

#[test]
fn many_calls_that_are_a_little_slow_are_too_much() {
    let mut world = World::new();
    let mut calls = 0;
    while world.slow.take_overrun().is_none() {
        world.call(WEB, 1, 5 * MS / 2, 5 * MS / 2);
        calls += 1;
        assert!(calls < 20);
    }
    // The first puts it on probation, and each that follows owes half a millisecond.
    assert_eq!(calls, 12);
}

#[test]
fn on_probation_calls_are_small_and_grow_while_they_are_fast() {
    let mut world = World::new();
    world.slow_calls(WEB, 1);
    assert_eq!(world.slow.piece(Some(WEB)), FIRST_PIECE);
    for _ in 0..3 * CALLS_OF_A_PIECE {
        world.call(WEB, 1, MS / 100, MS / 100);
    }
    assert_eq!(world.slow.piece(Some(WEB)), 8 * FIRST_PIECE);
    world.slow_calls(WEB, 1);
    assert_eq!(world.slow.piece(Some(WEB)), FIRST_PIECE);
    world.pass(FIRST_TERM);
    assert_eq!(world.slow.piece(Some(WEB)), usize::MAX);
}

#[test]
fn each_time_is_twice_as_long_up_to_an_hour() {
    let mut world = World::new();
    for minutes in [1, 2, 4, 8, 16, 32, 60, 60] {
        while world.slow.take_overrun().is_none() {
            world.slow_calls(WEB, 1);
        }
        world.pass(MINUTE * minutes - MS);
        assert!(world.slow.is_barred(Some(WEB)), "{minutes}");
        world.pass(MS);
        assert!(!world.slow.is_barred(Some(WEB)), "{minutes}");
    }
    world.pass(LONGEST_TERM + MEMORY);
    world.slow_calls(WEB, 5);
    world.pass(MINUTE);
    assert!(!world.slow.is_barred(Some(WEB)), "it is forgotten");
}

#[test]
fn the_first_long_interval_is_charged_to_no_party() {
    let mut world = World::calm();
    let Told { wall, processor } = &world.clock;
    // Other work of the turn, before a call that is fast.
    wall.set(wall.get() + 20 * MS);
    processor.set(processor.get() + 20 * MS);
    world.call(WEB, 1, MS / 100, MS / 100);
    assert!(!world.slow.is_on_probation(Some(WEB)));
    assert!(world.slow.alert_until.is_some());
    world.slow_calls(WEB, 1);
    assert!(world.slow.is_on_probation(Some(WEB)));
}

#[test]
fn an_alert_ends_when_no_probation_and_no_bar_lasts() {
    let mut world = World::new();
    world.pass(ALERT);
    assert_eq!(world.slow.alert_until, None);
    let mut bars = 0;
    let mut last_bar = MINUTE;
    while last_bar <= ALERT {
        world.slow_calls(WEB, 1);
        if world.slow.take_overrun().is_some() {
            bars += 1;
            last_bar = MINUTE * (1 << (bars - 1));
            world.pass(last_bar - MS);
            assert!(world.slow.alert_until.is_some());
            world.pass(ALERT);
            assert_eq!(world.slow.alert_until, None);
            assert_eq!(world.slow.known.len(), 1);
        }
    }
}

#[test]
fn root_and_the_own_user_are_cut_and_not_barred() {
    let mut world = World::new();
    for user in [0, 7] {
        let party = Party::User(user);
        world.slow_calls(party, 4);
        let overrun = world.slow.take_overrun().unwrap();
        assert!(!overrun.barred && !world.slow.is_barred(Some(party)));
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
    assert!(world.slow.is_on_probation(Some(last)));
}

#[test]
fn a_line_that_is_gone_leaves_nothing_to_the_next_with_its_number() {
    let mut world = World::new();
    let (vmm, listener) = (Party::Vmm(LineId(3)), Party::Listener(LineId(3), 80));
    let other = Party::Vmm(LineId(4));
    for party in [vmm, listener, other] {
        world.slow_calls(party, 1);
    }
    world.slow.forget_line(LineId(3));
    assert_eq!(world.slow.known.len(), 1);
    assert!(world.slow.is_on_probation(Some(other)));
}
