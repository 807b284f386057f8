//! Every caller and every callee, in both directions, cut off in each way that the source's socket knows.

use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;
use wire::agent::{Frame, OPERATION_CHANNEL, Stream};

use crate::scene::{Callee, Caller, Cut, Dialect, End, HALF, Scene, Seen};

/// How often a reset and a write are let loose on each other.
const RACES: usize = 50;

/// Whether the receiver is a UNIX socket that the daemon can show a reset: one that has said nothing since its `CONNECT` or `OK`, which is left
/// unread for that.
fn is_silent(caller: Caller, callee: Callee, receiver_calls: bool, how: Cut) -> bool {
    let spoke = match receiver_calls {
        true => caller == Caller::Program,
        false => callee == Callee::Hybrid,
    };
    spoke && how != Cut::Unread
}

/// What the documents say that the receiver sees.
fn expected(receiver: &End, how: Cut, is_silent: bool) -> Seen {
    match receiver {
        _ if how == Cut::Close => Seen::End,
        End::Guest(..) | End::Channel(_) | End::Tcp(_) => Seen::Reset,
        End::Unix(_) if is_silent => Seen::Reset,
        End::Unix(_) => Seen::End,
    }
}

fn check(pairs: &[(Caller, Callee)]) {
    let mut scene = Scene::new();
    let mut wrong = Vec::new();
    let mut rows = 0;
    for &(caller, callee) in pairs {
        for receiver_calls in [false, true] {
            let mut index = 0;
            while let Some(how) = row(
                &mut scene,
                caller,
                callee,
                receiver_calls,
                index,
                &mut wrong,
            ) {
                let source = if receiver_calls { "callee" } else { "caller" };
                eprintln!("{caller:?} to {callee:?}, the {source} is cut off: {how:?}");
                index += 1;
                rows += 1;
            }
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {rows} rows:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

/// One row; nothing if the source knows fewer ways than that.
fn row(
    scene: &mut Scene,
    caller: Caller,
    callee: Callee,
    receiver_calls: bool,
    index: usize,
    wrong: &mut Vec<String>,
) -> Option<Cut> {
    let is_known = ways(caller, callee, receiver_calls).get(index).copied();
    let how = is_known?;
    let (near, far) = scene.connect(caller, callee);
    let (mut source, mut receiver) = match receiver_calls {
        true => (far, near),
        false => (near, far),
    };
    scene.send(&mut source, &[7; HALF]);
    // Some of it has arrived, the rest is on its way.
    scene.receive(&mut receiver, 1);
    let guest = match source {
        End::Guest(index, _) => index,
        _ => 0,
    };
    let expected = expected(
        &receiver,
        how,
        is_silent(caller, callee, receiver_calls, how),
    );
    scene.cut(source, Some(&mut receiver), how);
    let (len, seen) = scene.read_to_end(receiver);
    if seen != expected || (seen == Seen::End && how == Cut::Close && len + 1 != HALF) {
        wrong.push(format!(
            "{caller:?} to {callee:?}, the {} is cut off ({how:?}): {expected:?} expected, {seen:?} behind {} bytes",
            if receiver_calls { "callee" } else { "caller" },
            len + 1
        ));
    }
    scene.restore(how, guest);
    Some(how)
}

fn ways(caller: Caller, callee: Callee, receiver_calls: bool) -> &'static [Cut] {
    let is_channel = match receiver_calls {
        true => callee == Callee::Serial,
        false => caller == Caller::Serial,
    };
    let is_guest = match receiver_calls {
        true => callee == Callee::Guest,
        false => caller == Caller::Guest,
    };
    let is_tcp = match receiver_calls {
        true => matches!(callee, Callee::Tcp { .. } | Callee::Egress(_)),
        false => matches!(caller, Caller::Published { tcp: true, .. }),
    };
    match (is_guest, is_tcp) {
        _ if is_channel => &[Cut::Close, Cut::Reset, Cut::Agent],
        (true, _) => &[Cut::Close, Cut::Reset, Cut::Driver, Cut::Vmm],
        (_, true) => &[Cut::Close, Cut::Reset],
        _ => &[Cut::Close, Cut::Unread],
    }
}

#[test]
fn between_guests_and_programs_of_the_host() {
    check(&[
        (Caller::Guest, Callee::Guest),
        (Caller::Guest, Callee::Hybrid),
        (Caller::Guest, Callee::Listener),
        (Caller::Guest, Callee::Serial),
        (Caller::Hybrid, Callee::Guest),
        (Caller::Hybrid, Callee::Hybrid),
        (Caller::Hybrid, Callee::Serial),
        (Caller::Serial, Callee::Guest),
        (Caller::Serial, Callee::Hybrid),
        (Caller::Program, Callee::Guest),
        (Caller::Program, Callee::Serial),
    ]);
}

#[test]
fn through_services() {
    let mut pairs = Vec::new();
    for caller in [Caller::Guest, Caller::Hybrid, Caller::Serial] {
        for header in [false, true] {
            pairs.push((caller, Callee::Tcp { header }));
        }
        pairs.push((caller, Callee::Unix));
    }
    check(&pairs);
}

#[test]
fn through_published_ports() {
    let mut pairs = Vec::new();
    for callee in [Callee::Guest, Callee::Hybrid, Callee::Serial] {
        for tcp in [false, true] {
            for header in [false, true] {
                pairs.push((Caller::Published { tcp, header }, callee));
            }
        }
    }
    check(&pairs);
}

/// The bytes pass in frames, and nothing but the frame that says so is an end: not even the end of the agent's connection.
#[test]
fn through_published_ports_of_an_agent() {
    let half = |stream| Frame::Data {
        stream,
        bytes: &[7; HALF],
    };
    let half = |stream| half(stream).to_bytes(OPERATION_CHANNEL).unwrap();
    let mut scene = Scene::new();
    for how in [Cut::Close, Cut::Reset, Cut::Driver, Cut::Vmm] {
        let (tcp, header) = (true, false);
        let caller = Caller::Published { tcp, header };
        let (mut near, mut far) = scene.connect(caller, Callee::Agent);
        scene.send(&mut far, &half(Stream::Stdout));
        scene.receive(&mut near, 1);
        scene.cut(far, Some(&mut near), how);
        let (_, seen) = scene.read_to_end(near);
        assert_eq!(seen, Seen::Reset, "the agent is cut off: {how:?}");
        scene.restore(how, 1);
    }
    for header in [false, true] {
        let tcp = true;
        let caller = Caller::Published { tcp, header };
        let (mut near, mut far) = scene.connect(caller, Callee::Agent);
        scene.send(&mut near, &[7; HALF]);
        scene.receive(&mut far, 1);
        scene.cut(near, Some(&mut far), Cut::Reset);
        let (len, seen) = scene.read_to_end(far);
        assert_eq!(seen, Seen::Reset, "the caller is cut off");
        assert!(len < half(Stream::Stdin).len() + HALF, "{len}");
    }
}

#[test]
fn through_egress() {
    let mut pairs = Vec::new();
    for dialect in [
        Dialect::Socks,
        Dialect::Connect,
        Dialect::Length,
        Dialect::Chunked,
        Dialect::Get,
    ] {
        pairs.push((Caller::Guest, Callee::Egress(dialect)));
    }
    for caller in [Caller::Hybrid, Caller::Serial] {
        pairs.push((caller, Callee::Egress(Dialect::Socks)));
    }
    check(&pairs);
}

/// The system reports a reset once. If a write fails with it, the next read is an end: so the reset comes while the guest sends.
#[test]
fn a_reset_that_a_write_meets_is_no_end() {
    let mut scene = Scene::new();
    for callee in [
        Callee::Tcp { header: false },
        Callee::Egress(Dialect::Socks),
    ] {
        for _ in 0..RACES {
            let (mut near, mut far) = scene.connect(Caller::Guest, callee);
            scene.send(&mut far, b"half of it");
            scene.receive(&mut near, 10);
            let End::Tcp(stream) = far else {
                unreachable!()
            };
            let source = std::thread::spawn(move || {
                set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
            });
            while !source.is_finished() {
                scene.try_send(&near, &[7; 512]);
            }
            source.join().unwrap();
            assert_eq!(scene.read_to_end(near), (0, Seen::Reset), "{callee:?}");
        }
    }
}
