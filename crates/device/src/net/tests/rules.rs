//! What holds for rings whatever passes: what waits, is interrupted, is asked to notify.

use std::time::Duration;

use l2::bridge::{PortConfig, Rates};
use wire::net_header::NetHeader;

use super::setup::{Driver, Guest, RECEIVE, Setup, TRANSMIT, frame, mac};
use crate::net::ModerationSetting;

/// Frames that can be distinguished, from one guest to another.
fn numbered(to: &Guest, from: &Guest, numbers: std::ops::Range<u32>) -> Vec<Vec<u8>> {
    let one = |number: u32| {
        let mut frame = frame(to.mac, from.mac, 60 + number as usize % 200);
        frame[14..18].copy_from_slice(&number.to_be_bytes());
        frame
    };
    numbers.map(one).collect()
}

#[test]
fn a_full_ring_drops_and_counts_and_holds_up_nobody() {
    for driver in Driver::of_each_kind() {
        let mut setup = Setup::new();
        let large = Driver {
            ring_size: 256,
            ..driver.clone()
        };
        let mut web = setup.guest_with(1, large);
        let (mut full, mut other) = (
            setup.guest_with(2, driver.clone()),
            setup.guest_with(3, driver),
        );
        let to_full = numbered(&full, &web, 0..100);
        let to_other = numbered(&other, &web, 0..50);
        for (number, sent) in to_full.iter().enumerate() {
            web.enqueue(NetHeader::default(), sent);
            if let Some(sent) = to_other.get(number) {
                web.enqueue(NetHeader::default(), sent);
            }
        }
        web.kick();
        setup.settle();
        assert_eq!(other.frames(), to_other);
        assert_eq!(setup.counters(&full).dropped_without_buffers, 36);
        assert_eq!(full.frames(), to_full[..64]);
        web.take_sent(TRANSMIT);
        assert_eq!(web.outstanding, 0);
        web.send(&to_full[99]);
        setup.settle();
        assert_eq!(full.frames(), to_full[99..], "there is room again");
    }
}

#[test]
fn many_batches_arrive_once_and_in_order() {
    for kind in Driver::of_each_kind() {
        let driver = Driver {
            ring_size: 512,
            ..kind
        };
        let mut setup = Setup::new();
        let mut web = setup.guest_with(1, driver.clone());
        let mut db = setup.guest_with(2, driver);
        for batch in [1, 7, 128, usize::MAX] {
            setup.fabric.set_batch(batch);
            let sent = numbered(&db, &web, 0..500);
            sent.iter()
                .for_each(|frame| web.enqueue(NetHeader::default(), frame));
            web.kick();
            setup.settle();
            assert_eq!(db.frames(), sent);
        }
        assert_eq!(setup.counters(&web).frames_from_guest, 2000);
        assert_eq!(setup.counters(&db).frames_to_guest, 2000);
    }
}

#[test]
fn what_is_refused_comes_back_to_its_sender() {
    let mut setup = Setup::new();
    let (mut web, mut db) = (setup.guest(1), setup.guest(2));
    let spoofed = frame(db.mac, mac(7), 60);
    let to_itself = frame(web.mac, web.mac, 60);
    let to_nobody = frame(mac(8), web.mac, 60);
    let too_long = frame(db.mac, web.mac, 1515);
    let reserved = frame(
        wire::ethernet::MacAddress([1, 0x80, 0xc2, 0, 0, 0]),
        web.mac,
        60,
    );
    for frame in [&spoofed, &to_itself, &to_nobody, &too_long, &reserved] {
        for _ in 0..20 {
            web.send(frame);
            setup.settle();
        }
    }
    setup.rest();
    web.take_sent(TRANSMIT);
    assert_eq!((web.outstanding, db.received()), (0, vec![]));
    let counters = setup.fabric.networks()[0].ports[0].bridge.clone();
    assert_eq!(counters.refused_total(), 100);
}

#[test]
fn a_rate_makes_frames_wait_and_loses_none() {
    let mut setup = Setup::new();
    let slow = PortConfig {
        rates: Rates {
            frames_per_second: Some(2000),
            ..Rates::guest()
        },
        ..PortConfig::guest(mac(1))
    };
    let driver = Driver {
        ring_size: 1024,
        ..Driver::default()
    };
    let mut web = setup.guest_at(1, slow, driver.clone());
    let mut db = setup.guest_with(2, driver);
    let sent = numbered(&db, &web, 0..600);
    sent.iter()
        .for_each(|frame| web.enqueue(NetHeader::default(), frame));
    web.kick();
    setup.settle();
    let first = db.frames();
    assert!(first.len() < 600, "some wait");
    // A guest that notifies all the time does not pile up anything here.
    for _ in 0..1000 {
        setup.fabric.make_ready(web.number, TRANSMIT);
        setup.settle();
    }
    assert!(
        setup.fabric.throttled.len() <= 1,
        "{:?}",
        setup.fabric.throttled
    );
    setup.rest();
    let all: Vec<_> = first.into_iter().chain(db.frames()).collect();
    assert_eq!(all, sent);
}

#[test]
fn a_rate_makes_frames_wait_that_are_none() {
    let lie = NetHeader {
        gso_type: 0xff,
        ..NetHeader::default()
    };
    for (header, len) in [(lie, 60), (NetHeader::default(), 1)] {
        let mut setup = Setup::new();
        let slow = PortConfig {
            rates: Rates {
                frames_per_second: Some(2000),
                ..Rates::guest()
            },
            ..PortConfig::guest(mac(1))
        };
        let driver = Driver {
            ring_size: 1024,
            ..Driver::default()
        };
        let mut web = setup.guest_at(1, slow, driver);
        for _ in 0..600 {
            web.enqueue(header, &frame(mac(2), mac(1), 60)[..len]);
        }
        web.kick();
        setup.settle();
        assert!(setup.counters(&web).malformed_headers < 600, "some wait");
        setup.rest();
        assert_eq!(setup.counters(&web).malformed_headers, 600);
    }
}

#[test]
fn interrupts_are_held_back_after_the_first_and_sent_in_the_end() {
    let hour = Duration::from_secs(3600);
    for kind in Driver::of_each_kind() {
        let driver = Driver {
            moderation: ModerationSetting::Window(hour),
            ..kind
        };
        let mut setup = Setup::new();
        let (mut web, mut db) = (setup.guest(1), setup.guest_with(2, driver));
        // Less than a quarter of its ring, with which a guest is interrupted in any case.
        let sent = numbered(&db, &web, 0..12);
        for (number, frame) in sent.iter().enumerate() {
            web.send(frame);
            setup.settle();
            assert_eq!(db.frames().len(), 1, "shown at once, interrupt or not");
            assert_eq!(db.interrupts(), u64::from(number == 0), "frame {number}");
        }
        let counters = setup.counters(&db);
        assert_eq!(
            (counters.interrupts, counters.interrupts_moderated),
            (1, 11)
        );
        let owed = setup.fabric.owed.iter();
        let owed = owed.filter(|(_, number, ring)| (*number, *ring) == (db.number, RECEIVE));
        assert_eq!(owed.count(), 1, "all in one");

        let window = Duration::from_millis(1);
        let setting = ModerationSetting::Window(window);
        let bridge = PortConfig::guest(mac(2));
        let name = db.name.clone();
        let lan = super::setup::LAN;
        setup
            .fabric
            .configure_port(lan, &name, bridge, setting)
            .unwrap();
        // A pending one stays for the time that was said; a ring that stops is paid at once.
        setup
            .ask(&db, crate::frontend::Request::Stop { index: 0 })
            .unwrap();
        assert_eq!(db.interrupts(), 1, "the one that was owed");
        setup
            .ask(&db, crate::frontend::Request::Stop { index: 0 })
            .unwrap();
        assert_eq!(db.interrupts(), 0);
    }
}

#[test]
fn interrupts_that_were_held_back_come_when_their_time_has() {
    for setting in [
        ModerationSetting::Adaptive,
        ModerationSetting::Window(Duration::from_millis(1)),
        ModerationSetting::Off,
    ] {
        let driver = Driver {
            moderation: setting,
            ..Driver::default()
        };
        let mut setup = Setup::new();
        let (mut web, mut db) = (setup.guest(1), setup.guest_with(2, driver));
        for number in 0..50 {
            web.send(&frame(db.mac, web.mac, 60 + number));
            setup.settle();
            setup.rest();
            assert!(db.interrupts() > 0, "frame {number}, {setting:?}");
            assert_eq!(db.frames().len(), 1);
        }
    }
}

#[test]
fn a_guest_that_wants_no_interrupt_gets_none() {
    for driver in Driver::of_each_kind() {
        let mut setup = Setup::new();
        let (mut web, mut db) = (setup.guest(1), setup.guest_with(2, driver));
        // The very first publication always interrupts.
        web.send(&frame(db.mac, web.mac, 60));
        setup.settle();
        assert_eq!((db.frames().len(), db.interrupts()), (1, 1));
        db.rings[0].disable_interrupts();
        for _ in 0..40 {
            web.send(&frame(db.mac, web.mac, 60));
            setup.settle();
        }
        assert_eq!(db.interrupts(), 0);
        assert_eq!(setup.counters(&db).interrupts_unwanted, 40);
        assert!(db.rings[0].enable_interrupts(), "they are there");
        assert_eq!(db.frames().len(), 40);
        web.send(&frame(db.mac, web.mac, 60));
        setup.settle();
        assert_eq!(db.interrupts(), 1);
    }
}

#[test]
fn nobody_is_asked_to_notify_while_there_is_work() {
    for driver in Driver::of_each_kind() {
        let mut setup = Setup::new();
        setup.fabric.set_batch(8);
        let mut web = setup.guest_with(1, driver.clone());
        let mut db = setup.guest_with(2, driver.clone());
        setup.settle();
        for _ in 0..3 {
            let sent = frame(db.mac, web.mac, 60);
            for _ in 0..48 {
                web.enqueue(NetHeader::default(), &sent);
            }
            assert!(web.kick_on(TRANSMIT), "asleep, {driver:?}");
            for turn in 0..3 {
                setup.fabric.turn(Some(Duration::ZERO)).unwrap();
                for _ in 0..8 {
                    web.enqueue(NetHeader::default(), &sent);
                }
                assert!(!web.kick_on(TRANSMIT), "busy in turn {turn}, {driver:?}");
            }
            setup.settle();
            assert_eq!(db.frames().len(), 64);
            // Asleep again.
            setup.settle();
        }
        assert!(setup.counters(&web).kicks <= 3);
        assert_eq!(
            setup.counters(&db).kicks,
            0,
            "what is posted is not waited for"
        );
    }
}

#[test]
fn a_guest_whose_ring_is_full_hears_that_there_is_room() {
    for driver in Driver::of_each_kind() {
        let mut setup = Setup::new();
        let mut web = setup.guest_with(1, driver);
        web.interrupts_on(TRANSMIT);
        let sent = frame(mac(9), web.mac, 60);
        for round in 0..5 {
            while web.try_enqueue(TRANSMIT, NetHeader::default(), &sent, &[]) {}
            web.rings[TRANSMIT].enable_interrupts();
            web.kick();
            setup.rest();
            assert!(web.interrupts_on(TRANSMIT) > 0, "round {round}");
            web.take_sent(TRANSMIT);
            assert_eq!(web.outstanding, 0);
        }
    }
}

#[test]
fn a_guest_that_waits_for_a_few_frames_to_leave_hears_that_they_have() {
    for driver in Driver::of_each_kind() {
        let mut setup = Setup::new();
        let mut web = setup.guest_with(1, driver);
        for round in 0..5 {
            for _ in 0..3 {
                web.send(&frame(mac(9), web.mac, 60));
            }
            setup.rest();
            assert!(web.interrupts_on(TRANSMIT) > 0, "round {round}");
            web.take_sent(TRANSMIT);
            assert_eq!(web.outstanding, 0);
        }
    }
}
