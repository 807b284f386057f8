//! Guests that have fallen silent beside one that sends without pause.

use crate::guest::{Guest, TX};
use crate::turns::stray;
use crate::{config_of, fabric, turn_until};

/// Packets of a thousand descriptors each that are taken in a turn.
const PACKETS_PER_TURN: u16 = 4;

#[test]
fn a_silent_guest_is_asked_to_notify_after_64_turns() {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let configs =
        [("busy", 3), ("idle", 4)].map(|(name, cid)| config_of(directory.path(), name, cid));
    for config in &configs {
        fabric.open_line(config).unwrap();
    }
    let [mut busy, mut idle] = configs
        .each_ref()
        .map(|config| Guest::connect(&config.vhost_user));
    turn_until(&mut fabric, "the drivers run", |fabric| {
        fabric.lines().iter().all(|line| line.report.up)
    });
    let packet = busy.packet(&stray());
    let packet = busy.in_pieces(packet);
    busy.offer(TX, packet, 32 * PACKETS_PER_TURN);
    busy.kick(TX);
    let one = idle.packet(&stray());
    idle.offer(TX, one, 1);
    idle.kick(TX);
    turn_until(&mut fabric, "both have sent something", |_| {
        busy.given_back(TX) > 0 && idle.given_back(TX) > 0
    });
    let mut turns = 0;
    while !idle.is_asked_to_notify(TX) {
        busy.offer(TX, packet, PACKETS_PER_TURN);
        let before = busy.given_back(TX);
        fabric.turn(None).unwrap();
        assert_ne!(busy.given_back(TX), before, "there is work in each turn");
        turns += 1;
    }
    assert!((60..=64).contains(&turns), "{turns}");
    assert!(!busy.is_asked_to_notify(TX));
    // What it sends then is found.
    idle.offer(TX, one, 1);
    idle.kick(TX);
    turn_until(
        &mut fabric,
        "the silent one has sent something again",
        |_| idle.given_back(TX) == 2,
    );
}
