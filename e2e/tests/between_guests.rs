//! Circuits between guests: bulk both ways, close and half-close, refusals, messages, and a third guest that is paused meanwhile.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::time::{Duration, Instant};

use e2e::host;
use e2e::pattern::Pattern;
use e2e::{DaemonSpec, Guest, Kernel, Scene, Shared, SharedGuard, finished};

static SCENE: Shared<Scene> = Shared::new();

/// `old` and `new` may call each other and `third`, whose CIDs are 3, 4 and 5; `third` may not call. `absent` is never started.
fn scene() -> SharedGuard<Scene> {
    SCENE.get(|| {
        let mut daemon = DaemonSpec::new()
            .vm("old", 3)
            .vm("new", 4)
            .vm("third", 5)
            .vm("absent", 6);
        for rule in [
            "from=old,to=new,port=*",
            "from=new,to=old,port=*",
            "from=old,to=third,port=*",
            "from=new,to=third,port=*",
            "from=old,to=absent,port=*",
            "from=third,to=old,port=3999",
        ] {
            daemon = daemon.arguments(&["--allow", rule]);
        }
        let guests = [
            ("old", Kernel::V6_1),
            ("new", Kernel::V6_12),
            ("third", Kernel::V6_12),
        ];
        Scene::start(daemon, &guests).unwrap()
    })
}

/// Both directions: caller, callee, and the CID that is called.
const DIRECTIONS: [(&str, &str, u32); 2] = [("old", "new", 4), ("new", "old", 3)];

/// Sizes around every edge: one byte, a receiver's buffer, a page, a large packet, the credit.
const SIZES: [u64; 8] = [1, 3_776, 3_777, 4_096, 28_001, 65_536, 215_000, 262_144];

#[test]
fn bulk_both_ways_at_once_while_a_third_guest_is_paused_with_full_credit() {
    let scene = scene();
    let (old, new, third) = (scene.guest("old"), scene.guest("new"), scene.guest("third"));
    let total: u64 = match e2e::is_full() {
        true => 1 << 30,
        false => 48 << 20,
    };
    // The third guest takes one circuit from `old`, reads nothing of it, and is paused when `old` can send no more.
    let reader = third
        .probe_listening("listen:3000 accept wait:/tmp/woken drain")
        .unwrap();
    let hoarder = old
        .probe("connect:5:3000 send:200000 touch:/tmp/hoards send:2800000 close")
        .unwrap();
    old.wait_until("[ -e /tmp/hoards ]", Duration::from_secs(60))
        .unwrap();
    third.qmp().stop().unwrap();

    let started = Instant::now();
    let steps = format!("hash:send:{total} shut:wr");
    let servers = [(3001, old), (3002, new)].map(|(port, guest)| {
        guest
            .probe_listening(&format!("listen:{port} accept hash:drain"))
            .unwrap()
    });
    let clients = [
        new.probe(&format!("connect:3:3001 {steps} eof")).unwrap(),
        old.probe(&format!("connect:4:3002 {steps} eof")).unwrap(),
    ];
    let digest = host::digest_of(total);
    for client in clients {
        assert_eq!(finished(client).unwrap(), format!("sent {digest}"));
    }
    for (server, peer) in servers.into_iter().zip([4, 3]) {
        let printed = finished(server).unwrap();
        assert_eq!(printed, format!("peer {peer}\nreceived {digest}"));
    }
    eprintln!(
        "{} MiB both ways at once between guests in {:?}",
        total >> 20,
        started.elapsed()
    );

    // The paused guest wakes up and has lost nothing.
    third.qmp().cont().unwrap();
    assert!(!hoarder.has_ended(), "{:?}", finished(hoarder));
    third.shell("touch /tmp/woken").unwrap();
    finished(hoarder).unwrap();
    assert_eq!(finished(reader).unwrap(), "peer 3\ndrained 3000000");
}

/// The reader starts when the writer's own timer for a closed socket (8 s) has long run out.
const LATE_S: u64 = 30;

#[test]
fn a_late_reader_gets_everything_that_was_written_before_the_close() {
    let scene = scene();
    let mut readers = Vec::new();
    for (from, to, cid) in DIRECTIONS {
        for (index, size) in SIZES.into_iter().enumerate() {
            let port = 3100 + index as u32;
            let steps = format!("listen:{port} accept wait:/tmp/late drain");
            let reader = scene.guest(to).probe_listening(&steps).unwrap();
            scene
                .guest(from)
                .probe_to_end(&format!("connect:{cid}:{port} send:{size} close"))
                .unwrap();
            readers.push((to, size, reader));
        }
    }
    // No event ends this wait: that nothing happens meanwhile is the matter of the test.
    std::thread::sleep(Duration::from_secs(LATE_S));
    for (_, to, _) in DIRECTIONS {
        scene.guest(to).shell("touch /tmp/late").unwrap();
    }
    for (to, size, reader) in readers {
        let printed = finished(reader).unwrap();
        let expected = format!("drained {size}");
        assert!(printed.ends_with(&expected), "to {to}: {printed} of {size}");
    }
}

#[test]
fn a_reply_after_a_half_close_arrives() {
    let scene = scene();
    for (from, to, cid) in DIRECTIONS {
        let server = scene
            .guest(to)
            .probe_listening("listen:3200 accept drain send:3000000 close")
            .unwrap();
        let printed = scene
            .guest(from)
            .probe_to_end(&format!("connect:{cid}:3200 send:300000 shut:wr drain"))
            .unwrap();
        assert_eq!(printed, "drained 3000000");
        assert!(finished(server).unwrap().ends_with("drained 300000"));
    }
}

#[test]
fn a_guest_that_reads_no_more_stops_the_others_writer() {
    let scene = scene();
    for (from, to, cid) in DIRECTIONS {
        let server = scene
            .guest(to)
            .probe_listening("listen:3201 accept shut:rd send:1 wait:/tmp/stopped")
            .unwrap();
        scene
            .guest(from)
            .probe_to_end(&format!(
                "connect:{cid}:3201 recv:1 fails:EPIPE:send:100000000"
            ))
            .unwrap();
        scene.guest(to).shell("touch /tmp/stopped").unwrap();
        finished(server).unwrap();
    }
}

#[test]
fn dials_that_nobody_takes_are_reset_at_once() {
    let scene = scene();
    let reset = |guest: &Guest, dial: &str| {
        guest
            .probe_to_end(&format!("fails:ECONNRESET:connect:{dial}"))
            .unwrap();
    };
    for (from, _, cid) in DIRECTIONS {
        reset(scene.guest(from), &format!("{cid}:9"));
        reset(scene.guest(from), &format!("{cid}:9:seqpacket"));
        reset(scene.guest(from), "99:9");
        reset(scene.guest(from), "99:9:seqpacket");
    }
    reset(scene.guest("old"), "6:9");
    reset(scene.guest("new"), "6:9");
    reset(scene.guest("third"), "3:9");
    reset(scene.guest("third"), "4:9");
    // What a rule allows is that port and no other.
    let server = scene
        .guest("old")
        .probe_listening("listen:3999 accept eof")
        .unwrap();
    scene
        .guest("third")
        .probe_to_end("connect:3:3999 close")
        .unwrap();
    assert_eq!(finished(server).unwrap(), "peer 5");
}

#[test]
fn a_full_backlog_refuses_and_takes_calls_again_when_there_is_room() {
    let scene = scene();
    for (from, to, cid) in DIRECTIONS {
        let server = scene
            .guest(to)
            .probe_listening("listen:3202:stream:0 wait:/tmp/accepting accept recv:1 close")
            .unwrap();
        let first = scene
            .guest(from)
            .probe(&format!("connect:{cid}:3202 touch:/tmp/waiting send:1 eof"))
            .unwrap();
        scene
            .guest(from)
            .wait_until("[ -e /tmp/waiting ]", Duration::from_secs(60))
            .unwrap();
        scene
            .guest(from)
            .probe_to_end(&format!("fails:ECONNRESET:connect:{cid}:3202"))
            .unwrap();
        scene.guest(to).shell("touch /tmp/accepting").unwrap();
        finished(server).unwrap();
        finished(first).unwrap();
    }
}

#[test]
fn a_reader_that_stops_holds_up_only_its_own_circuit() {
    let scene = scene();
    for (from, to, cid) in DIRECTIONS {
        let (from, to) = (scene.guest(from), scene.guest(to));
        let lazy = to
            .probe_listening("listen:3203 accept wait:/tmp/eager drain")
            .unwrap();
        let blocked = from
            .probe(&format!("connect:{cid}:3203 send:5000000 close"))
            .unwrap();
        let busy = to
            .probe_listening("listen:3204 accept drain send:1 close")
            .unwrap();
        from.probe_to_end(&format!(
            "connect:{cid}:3204 send:5000000 shut:wr recv:1 eof"
        ))
        .unwrap();
        finished(busy).unwrap();
        assert!(!blocked.has_ended(), "what it sends is not read");
        to.shell("touch /tmp/eager").unwrap();
        finished(blocked).unwrap();
        assert!(finished(lazy).unwrap().ends_with("drained 5000000"));
    }
}

#[test]
fn messages_keep_their_bounds_and_marks() {
    let scene = scene();
    for (from, to, cid) in DIRECTIONS {
        // Sizes beyond a receiver's buffer and beyond the largest packet of a sender.
        let server = scene
            .guest(to)
            .probe_listening(
                "listen:3300:seqpacket accept expect:1 expect:3776:eor expect:3777 expect:65536 expect:200000:eor \
                 message:5:eor message:200000 message:1 eof",
            )
            .unwrap();
        scene
            .guest(from)
            .probe_to_end(&format!(
                "connect:{cid}:3300:seqpacket message:1 message:3776:eor message:3777 message:65536 message:200000:eor \
                 expect:5:eor expect:200000 expect:1 close"
            ))
            .unwrap();
        finished(server).unwrap();
    }
}

#[test]
fn a_thousand_small_messages_arrive_one_by_one() {
    let scene = scene();
    for (from, to, cid) in DIRECTIONS {
        let expected = "expect:10 ".repeat(1000);
        let messages = "message:10 ".repeat(1000);
        let server = scene
            .guest(to)
            .probe_listening(&format!(
                "listen:3301:seqpacket accept wait:/tmp/small {expected} eof"
            ))
            .unwrap();
        let client = scene
            .guest(from)
            .probe(&format!(
                "connect:{cid}:3301:seqpacket {messages} touch:/tmp/all-sent close"
            ))
            .unwrap();
        // The receiver begins when the sender has done what it can: all of it fits into the credit.
        scene
            .guest(from)
            .wait_until("[ -e /tmp/all-sent ]", Duration::from_secs(60))
            .unwrap();
        scene.guest(to).shell("touch /tmp/small").unwrap();
        finished(client).unwrap();
        finished(server).unwrap();
    }
}

#[test]
fn small_writes_and_small_reads_keep_every_byte() {
    let scene = scene();
    for (from, to, cid) in DIRECTIONS {
        // Packets of one byte, more than a receiver that limits packets has room for, before the first is read.
        let server = scene
            .guest(to)
            .probe_listening("listen:3302 accept wait:/tmp/crumbs recv:20000:1 drain")
            .unwrap();
        let client = scene
            .guest(from)
            .probe(&format!(
                "connect:{cid}:3302 send:20000:1 touch:/tmp/swept send:100000 close"
            ))
            .unwrap();
        scene
            .guest(from)
            .wait_until("[ -e /tmp/swept ]", Duration::from_secs(120))
            .unwrap();
        scene.guest(to).shell("touch /tmp/crumbs").unwrap();
        finished(client).unwrap();
        assert!(finished(server).unwrap().ends_with("drained 100000"));
    }
}

#[test]
fn many_circuits_between_guests_send_at_once() {
    let scene = scene();
    for (from, to, cid) in DIRECTIONS {
        let server = scene.guest(to).serve("3400", "count").unwrap();
        let printed = finished(
            scene
                .guest(from)
                .start_probe(&format!("burst {cid} 3400 200 100000"))
                .unwrap(),
        )
        .unwrap();
        eprintln!("{from} to {to}: {printed}");
        assert!(printed.ends_with("finished 200"), "{printed}");
        server.kill();
    }
}

#[test]
fn a_pattern_of_another_seed_is_told_apart() {
    // What all of these tests lean on: the probe does see a wrong byte.
    let scene = scene();
    let server = scene
        .guest("new")
        .probe_listening("listen:3500 accept seed:7 drain")
        .unwrap();
    scene
        .guest("old")
        .probe_to_end("connect:4:3500 send:100 close")
        .unwrap();
    let error = finished(server).unwrap_err().to_string();
    assert!(error.contains("wrong bytes at offset 0"), "{error}");
    assert!(Pattern::new(7).check(&Pattern::new(0).take(100)).is_err());
}
