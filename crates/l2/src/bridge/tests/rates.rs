//! How much a port may send.

use super::*;

/// How many frames are taken before one is refused, at one moment.
fn taken(world: &mut World, from: PortId, frame: &[u8], refusal: Refusal) -> u32 {
    for count in 0..1_000_000 {
        match world.send(from, frame) {
            Verdict::Drop(found) => {
                assert_eq!(found, refusal);
                return count;
            }
            _ => continue,
        }
    }
    panic!("it never ends");
}

/// Of a large frame to a group each receiver may have to be given every segment.
#[test]
fn a_frame_that_is_to_be_cut_is_a_storm_of_its_segments() {
    for (to, rate) in [(BROADCAST, 1000), (group(), 2000), (mac(99), 1000)] {
        let mut world = World::guests(1);
        world.add(PortConfig::learning_guest());
        let head = udp4(to, mac(1), ipv4(1), (5, 5));
        let mut passed = 0;
        while let Verdict::Flood | Verdict::Port(..) =
            world
                .bridge
                .classify(world.now, A, &head, 42 + 100 * 1000, 42 + 1000)
        {
            passed += 100;
        }
        assert_eq!(passed, rate, "{to}");
    }
}

#[test]
fn storms_end_at_their_rate_and_leave_the_rest_alone() {
    let mut world = World::new();
    let rates = Rates {
        broadcasts_per_second: 10,
        multicasts_per_second: 20,
        unknown_per_second: 30,
        ..Rates::guest()
    };
    world.add(PortConfig {
        rates,
        ..PortConfig::guest(mac(1))
    });
    world.add(PortConfig::guest(mac(2)));
    world.add(PortConfig::uplink());
    let storms = [
        (plain(BROADCAST, mac(1)), Refusal::BroadcastRate, 10),
        (plain(group(), mac(1)), Refusal::MulticastRate, 20),
        (plain(mac(99), mac(1)), Refusal::UnknownRate, 30),
    ];
    for (frame, refusal, rate) in &storms {
        assert_eq!(taken(&mut world, A, frame, *refusal), *rate);
    }
    assert_eq!(
        world.receivers(A, &plain(mac(2), mac(1))),
        [B],
        "known addresses have no such rate"
    );
    assert_eq!(
        world.receivers(B, &plain(BROADCAST, mac(2))),
        [A, C],
        "nor has another port this one's"
    );
    world.now += SECOND / 2;
    for (frame, refusal, rate) in &storms {
        assert_eq!(taken(&mut world, A, frame, *refusal), rate / 2);
    }
}

#[test]
fn a_rate_of_none_lets_none_pass() {
    let mut world = World::guests(1);
    let rates = Rates {
        broadcasts_per_second: 0,
        ..Rates::guest()
    };
    world
        .bridge
        .configure_port(
            world.now,
            A,
            PortConfig {
                rates,
                ..PortConfig::guest(mac(1))
            },
        )
        .unwrap();
    world.add(PortConfig::guest(mac(2)));
    assert_eq!(
        world.refusal(A, &plain(BROADCAST, mac(1))),
        Some(Refusal::BroadcastRate)
    );
}

#[test]
fn a_port_that_sends_too_much_rests_and_loses_nothing() {
    let mut world = World::guests(2);
    let rates = Rates {
        frames_per_second: Some(1000),
        ..Rates::guest()
    };
    world
        .bridge
        .configure_port(
            world.now,
            A,
            PortConfig {
                rates,
                ..PortConfig::guest(mac(1))
            },
        )
        .unwrap();
    let frame = plain(mac(2), mac(1));
    // What comes in 50 ms may come at once.
    for _ in 0..50 {
        assert_eq!(world.bridge.throttled_until(world.now, A), None);
        assert_eq!(world.receivers(A, &frame), [B]);
    }
    for behind in 1..=100 {
        assert_eq!(world.receivers(A, &frame), [B]);
        let until = world.now + Duration::from_millis(behind);
        assert_eq!(world.bridge.throttled_until(world.now, A), Some(until));
    }
    assert_eq!(world.bridge.throttled_until(world.now, B), None);
    world.now += Duration::from_millis(100);
    assert_eq!(world.bridge.throttled_until(world.now, A), None);
}

#[test]
fn bytes_have_a_rate_of_their_own_and_refused_frames_cost_as_much() {
    let mut world = World::guests(2);
    let rates = Rates {
        bytes_per_second: Some(1_000_000),
        ..Rates::guest()
    };
    world
        .bridge
        .configure_port(
            world.now,
            A,
            PortConfig {
                rates,
                ..PortConfig::guest(mac(1))
            },
        )
        .unwrap();
    let mut spoofed = plain(mac(2), mac(9));
    spoofed.resize(1000, 0);
    for _ in 0..50 {
        assert_eq!(world.refusal(A, &spoofed), Some(Refusal::OtherSource));
    }
    assert_eq!(world.bridge.throttled_until(world.now, A), None);
    let _ = world.send(A, &spoofed);
    let until = world.now + Duration::from_millis(1);
    assert_eq!(world.bridge.throttled_until(world.now, A), Some(until));
    // Over any time no more passes than the rate, and no less.
    let (start, mut bytes) = (world.now, 0);
    while world.now < start + 10 * SECOND {
        match world.bridge.throttled_until(world.now, A) {
            Some(until) => world.now = until,
            None => {
                let _ = world.send(A, &spoofed);
                bytes += 1000;
            }
        }
    }
    assert!((9_990_000..=10_010_000).contains(&bytes), "{bytes}");
}

#[test]
fn a_change_of_other_things_does_not_pay_a_debt() {
    let mut world = World::guests(2);
    let rates = Rates {
        broadcasts_per_second: 5,
        ..Rates::guest()
    };
    let config = PortConfig {
        rates,
        ..PortConfig::guest(mac(1))
    };
    world
        .bridge
        .configure_port(world.now, A, config.clone())
        .unwrap();
    let frame = plain(BROADCAST, mac(1));
    assert_eq!(taken(&mut world, A, &frame, Refusal::BroadcastRate), 5);
    world
        .bridge
        .configure_port(
            world.now,
            A,
            PortConfig {
                ipv4: Some(ipv4(1)),
                ..config.clone()
            },
        )
        .unwrap();
    assert_eq!(taken(&mut world, A, &frame, Refusal::BroadcastRate), 0);
    // Each rate by itself.
    let rates = Rates {
        frames_per_second: Some(1000),
        multicasts_per_second: 7,
        ..rates
    };
    world
        .bridge
        .configure_port(
            world.now,
            A,
            PortConfig {
                rates,
                ..config.clone()
            },
        )
        .unwrap();
    assert_eq!(taken(&mut world, A, &frame, Refusal::BroadcastRate), 0);
    let rates = Rates {
        broadcasts_per_second: 6,
        ..rates
    };
    world
        .bridge
        .configure_port(world.now, A, PortConfig { rates, ..config })
        .unwrap();
    assert_eq!(taken(&mut world, A, &frame, Refusal::BroadcastRate), 6);
}
