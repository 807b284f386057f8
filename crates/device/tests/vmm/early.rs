//! What a guest is given back is published before others have theirs of the same turn.

use std::io::Write;
use std::sync::{Arc, Mutex};

use device::Fabric;
use vsock::Limits;
use wire::vsock::{Header, Operation};

use crate::guest::{Guest, RX, TX};
use crate::turns::{allow_everyone, call, header, stray, with_circuits};
use crate::{attach_all, config_of, turn_until};

/// The port of the daemon's own.
const AGENT_PORT: u32 = 1007;

type Counts = [[u16; 2]; 2];

fn counts(guests: &[Guest]) -> Counts {
    [0, 1].map(|guest: usize| [RX, TX].map(|ring| guests[guest].given_back(ring)))
}

/// The last of three guests calls the daemon, which looks at the rings of the others then: in the middle of the turn.
#[test]
fn a_guest_sees_what_it_gets_before_the_next_guests_packets_are_taken() {
    let directory = tempfile::tempdir().unwrap();
    let guests: Arc<Mutex<Vec<Guest>>> = Arc::default();
    let seen: Arc<Mutex<Vec<Counts>>> = Arc::default();
    let (looked_at, sees) = (Arc::clone(&guests), Arc::clone(&seen));
    let arrivals = move |_| {
        sees.lock()
            .unwrap()
            .push(counts(&looked_at.lock().unwrap()));
        false
    };
    let mut fabric = Fabric::new(Limits::default(), AGENT_PORT, Box::new(arrivals)).unwrap();
    let mut attached = attach_all(&mut fabric, directory.path(), ["web", "db", "late"]);
    allow_everyone(&mut fabric);
    let [web, db, late] = &mut attached;
    let to_db = call(&mut fabric, web, db, 1000, 4);
    for guest in [&mut *web, db] {
        let buffer = guest.buffer(4096);
        guest.offer(RX, buffer, 8);
        guest.kick(RX);
    }
    // Without work all are asked to notify.
    fabric.turn(Some(std::time::Duration::ZERO)).unwrap();
    let before = [
        [web.given_back(RX), web.given_back(TX)],
        [db.given_back(RX), db.given_back(TX)],
    ];
    let (data, answered) = (to_db(Operation::Data, 100), stray());
    for packet in [web.packet(&data), web.packet(&answered)] {
        web.offer(TX, packet, 1);
    }
    web.kick(TX);
    let dial = late.packet(&Header {
        src_cid: 5,
        ..header(Operation::Request, AGENT_PORT, 0)
    });
    late.offer(TX, dial, 1);
    late.kick(TX);
    guests.lock().unwrap().extend(attached);
    fabric.turn(None).unwrap();
    let after = counts(&guests.lock().unwrap());
    let [[web_received, web_sent], [db_received, db_sent]] = before;
    // The reset of what belongs to no circuit, both packets, and the data.
    let all = [[web_received + 1, web_sent + 2], [db_received + 1, db_sent]];
    assert_eq!(after, all, "in one turn");
    assert_eq!(*seen.lock().unwrap(), [all], "and before the next guest's");
}

/// How often the guest was interrupted, and how often not though something was published, by a turn that gives it so much of each of some programs.
fn publications(sleeps: bool, programs: u16, bytes: usize) -> (u64, u64) {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = crate::fabric();
    let (mut guest, mut writers) = with_circuits(&mut fabric, directory.path(), programs);
    // What it has sent is news by then.
    std::thread::sleep(std::time::Duration::from_millis(5));
    fabric.turn(Some(std::time::Duration::ZERO)).unwrap();
    if !sleeps {
        guest.want_no_interrupts(RX);
    }
    let counts = |fabric: &Fabric| fabric.lines()[0].notified;
    let (before, given_back) = (counts(&fabric), guest.given_back(RX));
    for program in &mut writers {
        program.write_all(&vec![1; bytes]).unwrap();
    }
    fabric.turn(None).unwrap();
    let after = counts(&fabric);
    let packets = bytes.div_ceil(4096 - wire::vsock::HEADER_LEN) * usize::from(programs);
    assert_eq!(usize::from(guest.given_back(RX) - given_back), packets);
    (
        after.interrupts - before.interrupts,
        after.interrupts_saved - before.interrupts_saved,
    )
}

#[test]
fn a_sleeping_guest_is_woken_while_the_rest_is_copied() {
    // 32 KiB are the least that it is worth for.
    assert_eq!(publications(true, 1, 20_000), (1, 0));
    assert_eq!(publications(true, 3, 60_000), (2, 0), "once early");
    assert_eq!(
        publications(true, 10, 20_000),
        (2, 0),
        "of all programs together"
    );
}

#[test]
fn a_guest_that_looks_by_itself_is_shown_everything_at_once() {
    assert_eq!(publications(false, 3, 60_000), (0, 1));
}

/// Each is served in a turn, whatever wakes it: what is drained before it, what is drained after it, or its own ring.
#[test]
fn guests_that_send_to_each_other_have_everything_in_one_turn() {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = crate::fabric();
    let mut guests: Vec<Guest> = (3..6)
        .map(|cid| {
            let config = config_of(directory.path(), &format!("g{cid}"), cid);
            fabric.open_line(&config).unwrap();
            Guest::attach(&mut fabric, &config.vhost_user)
        })
        .collect();
    allow_everyone(&mut fabric);
    let (first, others) = guests.split_at_mut(1);
    let (second, third) = others.split_at_mut(1);
    let [first, second, third] = [&mut first[0], &mut second[0], &mut third[0]];
    let to_second = call(&mut fabric, first, second, 1000, 4);
    let to_third = call(&mut fabric, first, third, 1001, 5);
    for guest in [&mut *first, second, third] {
        let buffer = guest.buffer(4096);
        guest.offer(RX, buffer, 16);
        guest.kick(RX);
    }
    turn_until(&mut fabric, "buffers are known", |_| true);
    let before = [
        second.given_back(RX),
        third.given_back(RX),
        first.given_back(RX),
    ];
    let backwards = second.packet(&Header {
        src_cid: 4,
        dst_cid: 3,
        src_port: 80,
        dst_port: 1000,
        buf_alloc: 1 << 20,
        ..header(Operation::Data, 0, 10)
    });
    for packet in [
        to_second(Operation::Data, 10),
        to_third(Operation::Data, 10),
    ] {
        let packet = first.packet(&packet);
        first.offer(TX, packet, 1);
    }
    second.offer(TX, backwards, 1);
    second.kick(TX);
    first.kick(TX);
    fabric.turn(None).unwrap();
    let after = [
        second.given_back(RX),
        third.given_back(RX),
        first.given_back(RX),
    ];
    assert_eq!(after, before.map(|count| count + 1));
}
