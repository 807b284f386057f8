//! Rings that stop and start, memory that changes, ports and networks that come and go.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use guestmem_driver::Arena;
use l2::bridge::{BridgeLimits, PortConfig};
use wire::net_header::NetHeader;

use super::setup::{Driver, Guest, LAN, RECEIVE, Setup, TRANSMIT, frame, mac};
use crate::frontend::{MESSAGES_PER_TURN, Message, Request};
use crate::net::{ModerationSetting, NetError};

/// One frame from one guest arrives at another.
fn passes(setup: &mut Setup, from: &mut Guest, to: &mut Guest) {
    let sent = frame(to.mac, from.mac, 100);
    from.send(&sent);
    setup.settle();
    assert_eq!(to.frames(), [sent], "from {} to {}", from.name, to.name);
}

#[test]
fn rings_that_stop_in_any_order_go_on_where_they_were() {
    for driver in Driver::of_each_kind() {
        let mut setup = Setup::new();
        let mut web = setup.guest_with(1, driver.clone());
        let mut db = setup.guest_with(2, driver);
        for round in 0..200 {
            passes(&mut setup, &mut web, &mut db);
            let order = match round % 2 {
                0 => [RECEIVE, TRANSMIT],
                _ => [TRANSMIT, RECEIVE],
            };
            let memory = web.memory();
            let bases = order.map(|index| setup.ask(&web, Request::Stop { index }).unwrap());
            // While it is stopped something is for it, and it has something to send.
            db.send(&frame(web.mac, db.mac, 60));
            let waits = frame(db.mac, web.mac, 61);
            web.enqueue(NetHeader::default(), &waits);
            web.kick();
            setup.settle();
            assert_eq!(db.received(), []);
            for (index, base) in order.into_iter().zip(bases) {
                setup.start_ring(&web, index, base, &memory).unwrap();
            }
            setup.settle();
            assert_eq!(db.frames(), [waits], "what it was to send is sent then");
            assert_eq!(web.received(), [], "what was for it is lost");
            passes(&mut setup, &mut db, &mut web);
        }
        assert_eq!(setup.counters(&web).dropped_without_driver, 200);
    }
}

/// What is flooded in a network is for guests that are there.
#[test]
fn a_port_without_a_vmm_misses_no_frames() {
    let mut setup = Setup::new();
    let (web, mut db) = (setup.guest(1), setup.guest(2));
    let mut dropped_with = |request| {
        setup.ask(&web, request).unwrap();
        db.send(&frame(web.mac, db.mac, 60));
        db.send(&frame(wire::ethernet::MacAddress::BROADCAST, db.mac, 60));
        setup.settle();
        setup.counters(&web).dropped_without_driver
    };
    assert_eq!(dropped_with(Request::Detach { fault: None }), 0);
    assert_eq!(dropped_with(Request::Attach), 2);
    assert_eq!(dropped_with(Request::Detach { fault: None }), 2);
}

#[test]
fn a_ring_that_is_not_enabled_waits() {
    let mut setup = Setup::new();
    let (mut web, mut db) = (setup.guest(1), setup.guest(2));
    for index in [TRANSMIT, RECEIVE] {
        let set = |enabled| Request::SetEnabled { index, enabled };
        setup.ask(&web, set(false)).unwrap();
        let (from_web, from_db) = (frame(db.mac, web.mac, 60), frame(web.mac, db.mac, 60));
        web.send(&from_web);
        db.send(&from_db);
        setup.settle();
        let (at_web, at_db) = (web.frames(), db.frames());
        assert_eq!(at_web.len(), usize::from(index == TRANSMIT));
        assert_eq!(at_db.len(), usize::from(index == RECEIVE));
        setup.ask(&web, set(true)).unwrap();
        setup.settle();
        assert_eq!(db.frames().len(), usize::from(index == TRANSMIT));
        passes(&mut setup, &mut web, &mut db);
        passes(&mut setup, &mut db, &mut web);
    }
}

#[test]
fn an_interrupt_that_is_owed_when_a_ring_stops_is_sent() {
    let driver = Driver {
        moderation: ModerationSetting::Window(Duration::from_secs(3600)),
        ..Driver::default()
    };
    let mut setup = Setup::new();
    let (mut web, mut db) = (setup.guest(1), setup.guest_with(2, driver));
    passes(&mut setup, &mut web, &mut db);
    passes(&mut setup, &mut web, &mut db);
    assert_eq!(db.interrupts(), 1);
    let index = RECEIVE;
    let base = setup.ask(&db, Request::Stop { index }).unwrap();
    assert_eq!(db.interrupts(), 1, "the one that was owed");
    let memory = db.memory();
    setup.start_ring(&db, index, base, &memory).unwrap();
    passes(&mut setup, &mut web, &mut db);
    assert_eq!(db.interrupts(), 1, "a ring that begins is idle");
}

#[test]
fn a_call_that_comes_later_is_told_of_what_came_before() {
    let mut setup = Setup::new();
    let (mut web, mut db) = (setup.guest(1), setup.guest(2));
    let index = RECEIVE;
    let call = None;
    setup.ask(&db, Request::SetCall { index, call }).unwrap();
    passes(&mut setup, &mut web, &mut db);
    assert_eq!(db.interrupts(), 0);
    let call = Some(db.call(index));
    setup.ask(&db, Request::SetCall { index, call }).unwrap();
    assert_eq!(db.interrupts(), 1);
}

#[test]
fn memory_is_replaced_under_rings_that_run() {
    let mut setup = Setup::new();
    let (mut web, mut db) = (setup.guest(1), setup.guest(2));
    let more = Arena::new(1 << 20).unwrap();
    for round in 0..20 {
        let mut regions = vec![db.arena.region(0).unwrap()];
        if round % 2 == 0 {
            regions.push(more.region(1 << 40).unwrap());
        }
        let memory = db.memory_of(regions);
        // Frames wait for the sender's turn, and for the receiver's.
        let sent = frame(db.mac, web.mac, 200);
        web.send(&sent);
        setup.ask(&db, Request::ReplaceMemory { memory }).unwrap();
        setup.settle();
        assert_eq!(db.frames(), [sent]);
        passes(&mut setup, &mut db, &mut web);
    }
}

#[test]
fn a_region_that_goes_from_under_posted_buffers_costs_that_port_alone() {
    let mut setup = Setup::new();
    let (mut web, mut other) = (setup.guest(1), setup.guest(3));
    let arena = Arc::new(Arena::new(32 << 20).unwrap());
    setup.add_port(2, PortConfig::guest(mac(2)), &Driver::default());
    // The rings are in the first page or two; buffers far behind.
    let mut db = setup.guest_in(2, Driver::default(), Arc::clone(&arena));
    passes(&mut setup, &mut web, &mut db);
    let memory = db.memory_of(vec![arena.part(0, 0, 32 << 10).unwrap()]);
    setup.ask(&db, Request::ReplaceMemory { memory }).unwrap();
    for _ in 0..80 {
        web.send(&frame(db.mac, web.mac, 60));
        web.send(&frame(other.mac, web.mac, 60));
        setup.settle();
        assert_eq!(other.frames().len(), 1, "others go on");
    }
    assert!(!setup.runs(&db), "its buffers are nowhere");
    // The driver begins anew, in memory that is there.
    let mut db = setup.guest_in(
        2,
        Driver::default(),
        Arc::new(Arena::new(32 << 20).unwrap()),
    );
    passes(&mut setup, &mut web, &mut db);
    passes(&mut setup, &mut db, &mut web);
}

#[test]
fn rings_that_are_not_in_the_new_memory_are_refused_and_keep_the_old() {
    let mut setup = Setup::new();
    let (mut web, mut db) = (setup.guest(1), setup.guest(2));
    let elsewhere = Arena::new(1 << 20).unwrap();
    let memory = db.memory_of(vec![elsewhere.region(0).unwrap()]);
    assert!(setup.ask(&db, Request::ReplaceMemory { memory }).is_err());
    passes(&mut setup, &mut web, &mut db);
}

#[test]
fn a_reset_and_a_vmm_that_goes_leave_nothing_behind() {
    for request in [|| Request::Reset, || Request::Detach { fault: None }] {
        let mut setup = Setup::new();
        let (mut web, mut db) = (setup.guest(1), setup.guest(2));
        for round in 0..20 {
            passes(&mut setup, &mut web, &mut db);
            // In the middle: it has sent, and something is for it.
            web.enqueue(NetHeader::default(), &frame(db.mac, web.mac, 60));
            db.enqueue(NetHeader::default(), &frame(web.mac, db.mac, 60));
            web.kick();
            db.kick();
            setup.ask(&db, request()).unwrap();
            setup.settle();
            assert_eq!((web.received(), db.received()), (vec![], vec![]));
            let driver = Driver::of_each_kind()[round % 8].clone();
            db = setup.guest_in(2, driver, Arc::new(Arena::new(32 << 20).unwrap()));
            passes(&mut setup, &mut db, &mut web);
        }
        assert!(setup.fabric.unarmed.len() <= 4 && setup.fabric.ready.is_empty());
    }
}

#[test]
fn a_port_that_is_removed_takes_what_waits_with_it() {
    let mut setup = Setup::new();
    let (mut web, mut other) = (setup.guest(1), setup.guest(3));
    for round in 0..10 {
        let driver = Driver {
            moderation: ModerationSetting::Window(Duration::from_secs(3600)),
            ..Driver::of_each_kind()[round % 8].clone()
        };
        let mut db = setup.guest_with(2, driver);
        passes(&mut setup, &mut web, &mut db);
        passes(&mut setup, &mut web, &mut db);
        let generation = setup.fabric.ports[db.number].generation;
        for _ in 0..20 {
            web.enqueue(NetHeader::default(), &frame(db.mac, web.mac, 60));
            db.enqueue(NetHeader::default(), &frame(web.mac, db.mac, 60));
        }
        web.enqueue(NetHeader::default(), &frame(other.mac, web.mac, 60));
        web.kick();
        db.kick();
        setup.fabric.remove_port(LAN, &db.name).unwrap();
        setup.settle();
        assert_eq!(other.frames().len(), 1);
        assert_eq!((web.received(), db.received()), (vec![], vec![]));
        web.take_sent(TRANSMIT);
        assert_eq!(web.outstanding, 0);
        assert!(!setup.socket_of(2).exists());
        // Its number goes to another, with which its VMM does not speak.
        let mut next = setup.guest(4);
        assert_eq!(next.number, db.number);
        let refused = setup.ask_as(&db, generation, Request::Reset);
        assert!(refused.is_err() && setup.runs(&next));
        db.kick_anyway(TRANSMIT);
        passes(&mut setup, &mut next, &mut web);
        passes(&mut setup, &mut web, &mut next);
        setup.fabric.remove_port(LAN, &next.name).unwrap();
    }
    let gone = setup.fabric.remove_port(LAN, "vm2");
    assert!(matches!(gone, Err(NetError::NoPort { .. })));
}

#[test]
fn nothing_passes_while_the_link_is_down() {
    let mut setup = Setup::new();
    let (mut web, mut db, mut other) = (setup.guest(1), setup.guest(2), setup.guest(3));
    for _ in 0..5 {
        passes(&mut setup, &mut web, &mut db);
        let generation = setup.fabric.ports[db.number].generation;
        db.enqueue(NetHeader::default(), &frame(web.mac, db.mac, 60));
        db.kick();
        setup.fabric.set_link(LAN, "vm2", false).unwrap();
        setup.fabric.set_link(LAN, "vm2", false).unwrap();
        web.send(&frame(db.mac, web.mac, 60));
        web.send(&frame(wire::ethernet::MacAddress::BROADCAST, web.mac, 60));
        setup.settle();
        assert_eq!((web.received(), db.received()), (vec![], vec![]));
        assert_eq!(other.frames().len(), 1, "others go on");
        assert!(!setup.socket_of(2).exists(), "no VMM finds it");
        assert!(setup.ask_as(&db, generation, Request::Attach).is_err());
        setup.fabric.set_link(LAN, "vm2", true).unwrap();
        setup.fabric.set_link(LAN, "vm2", true).unwrap();
        assert!(setup.socket_of(2).exists());
        db = setup.guest_in(
            2,
            Driver::default(),
            Arc::new(Arena::new(32 << 20).unwrap()),
        );
        passes(&mut setup, &mut db, &mut web);
    }
}

#[test]
fn a_network_that_is_removed_is_gone_with_all_that_waits() {
    let mut setup = Setup::new();
    for _ in 0..3 {
        let (mut web, mut db) = (setup.guest(1), setup.guest(2));
        passes(&mut setup, &mut web, &mut db);
        for _ in 0..20 {
            web.enqueue(NetHeader::default(), &frame(db.mac, web.mac, 60));
        }
        web.kick();
        setup.fabric.remove_network(LAN).unwrap();
        setup.settle();
        assert_eq!(db.received(), []);
        assert!(setup.fabric.ports.is_empty() && setup.fabric.networks().is_empty());
        assert!(matches!(
            setup.fabric.remove_network(LAN),
            Err(NetError::NoNetwork(_))
        ));
        setup
            .fabric
            .add_network(LAN, BridgeLimits::default())
            .unwrap();
    }
}

#[test]
fn networks_do_not_hear_each_other() {
    let mut setup = Setup::new();
    let (mut web, mut db) = (setup.guest(1), setup.guest(2));
    setup
        .fabric
        .add_network("other", BridgeLimits::default())
        .unwrap();
    let port = setup.port_config(3, PortConfig::guest(mac(2)), &Driver::default());
    let port = crate::net::NetPortConfig {
        network: "other".to_owned(),
        ..port
    };
    setup.fabric.add_port(port).unwrap();
    let arena = Arc::new(Arena::new(32 << 20).unwrap());
    let mut stranger = setup.guest_of("other", 3, Driver::default(), arena);
    passes(&mut setup, &mut web, &mut db);
    web.send(&frame(wire::ethernet::MacAddress::BROADCAST, web.mac, 60));
    stranger.send(&frame(wire::ethernet::MacAddress::BROADCAST, mac(2), 60));
    setup.settle();
    assert_eq!(stranger.received(), []);
    assert_eq!(web.received(), []);
    assert_eq!(db.frames().len(), 1);
}

#[test]
fn a_turn_takes_so_many_messages_of_vmms() {
    let mut setup = Setup::new();
    let web = setup.guest(1);
    let generation = setup.fabric.ports[web.number].generation;
    let ask = |_| {
        let (answer, wait) = sync_channel(1);
        let message = Message {
            device: web.number as u32,
            generation,
            request: Request::Attach,
            answer,
        };
        let mailbox = &setup.fabric.mailbox;
        mailbox.messages.send(message).unwrap();
        mailbox.waker.wake();
        wait
    };
    let mut waiting: Vec<_> = (0..3 * MESSAGES_PER_TURN).map(ask).collect();
    while !waiting.is_empty() {
        let before = waiting.len();
        setup.fabric.turn(None).unwrap();
        waiting.retain(|wait| wait.try_recv().is_err());
        assert!(before - waiting.len() <= MESSAGES_PER_TURN);
    }
}
