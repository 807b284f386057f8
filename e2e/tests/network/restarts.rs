//! Guests that pause, let go of their card, or start anew.

use super::{PATIENCE, address, answers, assert_answers, assert_silent, eventually, scene};

#[test]
fn a_guest_may_pause() {
    let scene = scene();
    let (web, both) = (scene.guest("web"), scene.guest("box"));
    assert_answers(both, "web");
    web.qmp().stop().unwrap();
    assert_silent(both, "web");
    assert_answers(both, "db");
    web.qmp().cont().unwrap();
    eventually("it answers again", || answers(both, "web"));
    assert_answers(web, "db");
}

#[test]
fn a_driver_may_let_go_of_its_card_and_take_it_again() {
    let scene = scene();
    for name in ["db", "box"] {
        let guest = scene.guest(name);
        let line = "device=$(basename $(readlink /sys/class/net/eth0/device)); cd /sys/bus/virtio/drivers/virtio_net; \
                    for round in 1 2 3; do echo $device > unbind; echo $device > bind; done; [ -e /sys/class/net/eth0 ]";
        guest.shell(line).unwrap();
        address(guest, "eth0");
        assert_answers(guest, "web");
    }
}

#[test]
fn guests_start_anew() {
    let scene = scene();
    let (web, db) = (scene.guest("web"), scene.guest("db"));
    let boots = [web, db].map(e2e::Guest::boot_count);
    // One by its own will, with an end in order; the other by the reset button.
    drop(web.start("reboot").unwrap());
    db.qmp().system_reset().unwrap();
    for (guest, boots) in [web, db].into_iter().zip(boots) {
        guest.wait_for_boots(boots + 1, 3 * PATIENCE).unwrap();
        guest.shell("modprobe virtio_net").unwrap();
        address(guest, "eth0");
    }
    assert_answers(web, "db");
    // It has a route once the network has answered its router solicitation.
    eventually("db reaches web by IPv6", || answers(db, "-6 web"));
    assert_answers(scene.guest("box"), "web");
}
