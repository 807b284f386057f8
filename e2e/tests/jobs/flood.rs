//! Programs of a guest that call its agent, where its kernel lets it call itself.

use e2e::probe::PROGRAM;

use super::{ringdown, scene_alone};

/// How often the host calls meanwhile.
const CALLS: usize = 20;

#[test]
fn a_guest_that_calls_its_own_agent_without_pause_leaves_it_to_the_host() {
    let scene = scene_alone();
    let guest = scene.guests.iter().find(|guest| guest.name() == "web");
    let guest = guest.unwrap();
    guest
        .shell("modprobe vsock_loopback && mkdir /tmp/flood")
        .unwrap();
    let flood = guest
        .start(&format!("{PROGRAM} assault flood-of-the-agent /tmp/flood"))
        .unwrap();
    guest
        .wait_until("test -e /tmp/flood/done", super::PATIENCE)
        .unwrap();
    for _ in 0..CALLS {
        ringdown(&scene, &["exec", "web", "--", "true"]);
    }
    guest.shell("touch /tmp/flood/judged").unwrap();
    assert_eq!(flood.wait().unwrap().code, 0);
    guest.shell("rm -r /tmp/flood").unwrap();
}
