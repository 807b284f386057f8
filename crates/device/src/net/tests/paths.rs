//! The ways of frames from guest to guest: of every length, from buffers and into buffers of every form.

use l2::bridge::PortConfig;
use wire::ethernet::MacAddress;
use wire::net_header::{NET_HEADER_LEN, NetHeader};

use super::packets::Packet;
use super::setup::{Driver, LINUX, MERGEABLE, PLAIN, RECEIVE, Setup, TRANSMIT, done, frame, mac};
use crate::frontend::Request;
use crate::net::deliver::MAX_MERGED;

/// Lengths around those at which something changes: the shortest frame, a tag, what a wire would pad to, the snapshot, the longest.
const LENS: [usize; 22] = [
    14, 15, 16, 17, 18, 59, 60, 61, 64, 115, 116, 117, 126, 127, 128, 129, 130, 140, 141, 512,
    1513, 1514,
];

#[test]
fn a_frame_arrives_as_it_was_sent() {
    for driver in Driver::of_each_kind() {
        let mut setup = Setup::new();
        let mut web = setup.guest_with(1, driver.clone());
        let mut db = setup.guest_with(2, driver.clone());
        for len in LENS {
            let sent = frame(db.mac, web.mac, len);
            web.send(&sent);
            setup.settle();
            assert_eq!(db.received(), [(done(1), sent)], "{len} bytes, {driver:?}");
            assert!(db.interrupts() > 0);
        }
        assert_eq!(web.received(), [], "nothing comes back");
    }
}

#[test]
fn a_sender_may_cut_its_frames_anywhere() {
    let cuts: [&[usize]; 9] = [
        &[NET_HEADER_LEN],
        &[6],
        &[11, 1, 1],
        &[11, 2, 1],
        &[NET_HEADER_LEN, 14],
        &[NET_HEADER_LEN, 128],
        &[NET_HEADER_LEN + 128],
        &[NET_HEADER_LEN + 127, 1, 1],
        &[1; 40],
    ];
    for driver in Driver::of_each_kind() {
        let mut setup = Setup::new();
        let mut web = setup.guest_with(1, driver.clone());
        let mut db = setup.guest_with(2, driver.clone());
        for cut in cuts {
            for len in LENS {
                let sent = frame(db.mac, web.mac, len);
                assert!(web.try_enqueue(TRANSMIT, NetHeader::default(), &sent, cut));
                web.kick();
                setup.settle();
                assert_eq!(db.frames(), [sent], "{len} bytes cut {cut:?}, {driver:?}");
            }
        }
    }
}

#[test]
fn a_table_may_have_a_descriptor_for_each_byte() {
    for packed in [false, true] {
        let driver = Driver {
            packed,
            indirect: true,
            ..Driver::default()
        };
        let mut setup = Setup::new();
        let mut web = setup.guest_with(1, driver.clone());
        let mut db = setup.guest_with(2, driver);
        let sent = frame(db.mac, web.mac, 1000);
        assert!(web.try_enqueue(TRANSMIT, NetHeader::default(), &sent, &[1; 1012]));
        web.kick();
        setup.settle();
        assert_eq!(db.frames(), [sent]);
    }
}

#[test]
fn a_receiver_may_cut_its_buffers_anywhere() {
    let buffers: [&[u32]; 7] = [
        &[1536],
        &[12, 1536],
        &[5, 7, 14, 1536],
        &[12, 14, 128, 1400],
        &[140, 1, 1400],
        &[65_562],
        &[128],
    ];
    for kind in Driver::of_each_kind() {
        for buffer in buffers {
            let driver = Driver {
                buffer: buffer.to_vec(),
                ..kind.clone()
            };
            let capacity = buffer.iter().sum::<u32>() as usize;
            let mut setup = Setup::new();
            let mut web = setup.guest(1);
            let mut db = setup.guest_with(2, driver.clone());
            for len in LENS {
                let sent = frame(db.mac, web.mac, len);
                web.send(&sent);
                setup.settle();
                let count = (NET_HEADER_LEN + len).div_ceil(capacity) as u16;
                assert_eq!(db.received(), [(done(count), sent)], "{len}, {driver:?}");
            }
        }
    }
}

#[test]
fn a_frame_lies_across_as_many_buffers_as_are_allowed_and_no_more() {
    let room = 20;
    for kind in Driver::of_each_kind() {
        let driver = Driver {
            buffer: vec![room],
            ring_size: 256,
            ..kind
        };
        let mut setup = Setup::new();
        let (mut web, mut db) = (setup.guest(1), setup.guest_with(2, driver));
        let most = MAX_MERGED * room as usize - NET_HEADER_LEN;
        for len in [most - room as usize, most - 1, most] {
            let sent = frame(db.mac, web.mac, len);
            web.send(&sent);
            setup.settle();
            assert_eq!(db.frames(), [sent], "{len} bytes");
        }
        // More often than the ring would last if buffers were lost with the frame.
        for _ in 0..20 {
            web.send(&frame(db.mac, web.mac, most + 1));
            setup.settle();
        }
        assert_eq!(db.received(), []);
        assert_eq!(setup.counters(&db).dropped_without_buffers, 20);
        let sent = frame(db.mac, web.mac, most);
        web.send(&sent);
        setup.settle();
        assert_eq!(db.frames(), [sent]);
    }
}

#[test]
fn the_longest_frame_arrives_in_the_smallest_buffers_that_linux_posts() {
    let driver = Driver {
        buffer: vec![1536],
        ..Driver::default()
    };
    let mut setup = Setup::new();
    let (mut web, mut db) = (setup.guest(1), setup.guest_with(2, driver));
    let packet = Packet::tcp4(&web, &db, 65_535 - 40);
    web.send_with(packet.to_be_cut(1448), &packet.frame);
    setup.settle();
    let received = db.received();
    assert_eq!(received.len(), 1, "{:?}", setup.counters(&db));
    assert_eq!(received[0].0.buffers, 43);
    assert_eq!(received[0].1, packet.frame);
}

#[test]
fn buffers_that_do_not_merge_take_what_fits_into_one() {
    let driver = Driver {
        features: PLAIN,
        buffer: vec![12, 500],
        ..Driver::default()
    };
    let mut setup = Setup::new();
    let (mut web, mut db) = (setup.guest(1), setup.guest_with(2, driver));
    for len in [500, 501, 1514, 60] {
        let sent = frame(db.mac, web.mac, len);
        web.send(&sent);
        setup.settle();
        let expected = if len <= 500 { vec![sent] } else { vec![] };
        assert_eq!(db.frames(), expected, "{len} bytes");
    }
    assert_eq!(setup.counters(&db).dropped_without_buffers, 2);
    assert_eq!(LINUX & MERGEABLE, MERGEABLE, "the others merge theirs");
}

#[test]
fn what_is_for_everybody_reaches_everybody_but_its_sender() {
    let mut setup = Setup::new();
    let mut guests: Vec<_> = Driver::of_each_kind()
        .into_iter()
        .zip(1..)
        .map(|(driver, number)| setup.guest_with(number, driver))
        .collect();
    for to in [MacAddress::BROADCAST, MacAddress([0x33, 0x33, 0, 0, 0, 1])] {
        for sender in 0..guests.len() {
            let sent = frame(to, guests[sender].mac, 200);
            guests[sender].send(&sent);
            setup.settle();
            for (number, guest) in guests.iter_mut().enumerate() {
                let expected = if number == sender {
                    vec![]
                } else {
                    vec![sent.clone()]
                };
                assert_eq!(guest.frames(), expected, "from {sender} to {number}");
            }
        }
    }
}

#[test]
fn nobody_hears_what_is_for_another_or_for_nobody() {
    let mut setup = Setup::new();
    let (mut web, mut db, mut spy) = (setup.guest(1), setup.guest(2), setup.guest(3));
    let learning = Driver::default();
    let mut late = setup.guest_at(4, PortConfig::learning_guest(), learning);
    for to in [db.mac, mac(99)] {
        web.send(&frame(to, web.mac, 100));
    }
    setup.settle();
    assert_eq!(db.frames().len(), 1);
    assert_eq!(spy.received(), []);
    assert_eq!(
        late.frames(),
        [frame(mac(99), web.mac, 100)],
        "it may be there"
    );
    late.send(&frame(web.mac, mac(99), 60));
    web.send(&frame(mac(99), web.mac, 60));
    setup.settle();
    assert_eq!(late.frames().len(), 1, "learned");
    assert_eq!((spy.received(), db.received()), (vec![], vec![]));
}

#[test]
fn a_flow_is_given_to_the_queue_that_its_guest_answers_on() {
    let driver = Driver {
        queue_pairs: 4,
        ..Driver::default()
    };
    let mut setup = Setup::new();
    let (mut web, mut db) = (setup.guest(1), setup.guest_with(2, driver));
    let to_db = Packet::udp4(&web, &db, 100).frame;
    let to_web = Packet::udp4(&db, &web, 100).frame;
    for pair in [0, 3, 1, 2] {
        assert!(db.try_enqueue(2 * pair + 1, NetHeader::default(), &to_web, &[]));
        db.kick_on(2 * pair + 1);
        setup.settle();
        assert_eq!(web.frames().len(), 1);
        web.send(&to_db);
        setup.settle();
        for other in 0..4 {
            let expected = usize::from(other == pair);
            assert_eq!(db.received_on(2 * other).len(), expected, "pair {other}");
        }
        assert!(db.interrupts_on(2 * pair) > 0);
    }
    let disable = Request::SetEnabled {
        index: 4,
        enabled: false,
    };
    setup.ask(&db, disable).unwrap();
    web.send(&to_db);
    setup.settle();
    assert_eq!(db.received_on(4), [], "that pair does not run");
    assert_eq!(db.received_on(RECEIVE).len(), 1);
}

#[test]
fn a_chain_without_a_frame_teaches_nothing_of_flows() {
    let driver = Driver {
        queue_pairs: 2,
        ..Driver::default()
    };
    let mut setup = Setup::new();
    let (mut web, mut db) = (setup.guest(1), setup.guest_with(2, driver));
    let to_db = Packet::udp4(&web, &db, 100).frame;
    web.send(&to_db);
    setup.settle();
    assert_eq!(db.received_on(0).len(), 1);
    // Its place in the batch is that of the frame before, which another guest has sent.
    assert!(db.try_enqueue(3, NetHeader::default(), &[0; 13], &[]));
    db.kick_on(3);
    setup.settle();
    web.send(&to_db);
    setup.settle();
    assert_eq!(db.received_on(0).len(), 1, "as before");
    assert_eq!(db.received_on(2), []);
}
