//! Networks of other shapes: long frames, several queues, VLANs.

use super::{PATIENCE, address, address_of, assert_answers, assert_silent, counted, scene};
use crate::transfer::{fetch, offer};

#[test]
fn a_network_may_have_long_frames_and_a_guest_several_queues() {
    let scene = scene();
    let (web, db) = (scene.guest("web"), scene.guest("db"));
    for guest in [web, db] {
        address(guest, "eth1");
        assert_eq!(guest.shell("cat /sys/class/net/eth1/mtu").unwrap(), "9000");
    }
    let of = |vm| address_of(&scene, "jumbo", vm, "ipv4");
    assert_answers(web, &of("db"));
    let count = |counter| counted(&scene, "jumbo", "web", counter);
    let before = [count("received_frames"), count("received_bytes")];
    // With its headers of 8 and 20 bytes it fills the MTU.
    web.shell(&format!("ping -c 3 -W 5 -s 8972 {}", of("db")))
        .unwrap();
    let frames = count("received_frames") - before[0];
    let bytes = count("received_bytes") - before[1];
    assert!(bytes >= 3 * 9014, "{bytes} bytes in {frames} frames");
    assert!(frames < 3 * 4, "they were not cut: {frames}");

    let queues = || {
        let shown = db.shell("ethtool -S eth1").unwrap();
        let of = |queue: u8| {
            let names = [
                format!("tx{queue}_kicks:"),
                format!("tx_queue_{queue}_kicks:"),
            ];
            let mut lines = shown.lines().map(str::trim);
            let count = lines.find_map(|line| {
                names
                    .iter()
                    .find_map(|name| line.strip_prefix(name.as_str()))
            });
            count
                .unwrap_or_else(|| panic!("{shown}"))
                .trim()
                .parse::<u64>()
                .unwrap()
        };
        [of(0), of(1)]
    };
    // The driver takes as many as there are processors, by default.
    db.shell("ethtool -L eth1 combined 2").unwrap();
    let before = queues();
    for [used, other] in [[0, 1], [1, 0]] {
        let line = format!(
            "cd /sys/class/net/eth1/queues; echo 1 > tx-{used}/xps_cpus; echo 0 > tx-{other}/xps_cpus; ping -c 3 -W 5 {}",
            of("web")
        );
        db.shell(&line).unwrap();
    }
    let after = queues();
    assert!(
        after[0] > before[0] && after[1] > before[1],
        "both queues send: {before:?} {after:?}"
    );
    for (from, to) in [(web, db), (db, web)] {
        let expected = offer(from, 4);
        assert_eq!(fetch(to, &of(from.name())), expected, "{}", from.name());
    }
}

#[test]
fn vlans_are_networks_of_their_own() {
    let scene = scene();
    let [web, db, both] = ["web", "db", "box"].map(|name| scene.guest(name));
    for guest in [web, db] {
        guest.shell("ip link set eth2 up").unwrap();
    }
    web.shell("ip addr add 10.10.0.1/16 dev eth2").unwrap();
    db.shell("ip addr add 10.20.0.2/16 dev eth2 && ip addr add 10.10.0.2/16 dev eth2")
        .unwrap();
    both.shell("modprobe 8021q && ip link set eth1 up").unwrap();
    for vlan in ["10", "20"] {
        let line = format!(
            "ip link add link eth1 name eth1.{vlan} type vlan id {vlan} && ip link set eth1.{vlan} up && \
             ip addr add 10.{vlan}.0.3/16 dev eth1.{vlan}"
        );
        both.shell(&line).unwrap();
    }
    assert_answers(both, "10.10.0.1");
    assert_answers(both, "10.20.0.2");
    assert_answers(web, "10.10.0.3");
    // In the other VLAN, with an address of this one.
    assert_silent(web, "10.10.0.2");
    assert_silent(both, "10.10.0.2");
    let expected = offer(web, 1);
    assert_eq!(fetch(both, "10.10.0.1"), expected);
    both.shell("ip link del eth1.10 && ip link del eth1.20")
        .unwrap();
    for guest in [web, db] {
        guest
            .shell("ip addr flush dev eth2 && ip link set eth2 down")
            .unwrap();
    }
    both.wait_until("! ip link show eth1.10 2> /dev/null", PATIENCE)
        .unwrap();
}
