//! DHCP, router advertisements and names: guests that find each other.

use super::{PATIENCE, address_of, assert_answers, network, scene};

#[test]
fn guests_that_nobody_configured_find_each_other_by_name() {
    let scene = scene();
    let station = network(&scene, "lan");
    for guest in &scene.guests {
        let name = guest.name();
        let ipv4 = address_of(&scene, "lan", name, "ipv4");
        let ipv6 = address_of(&scene, "lan", name, "ipv6");
        let shown = guest.shell("ip addr show eth0").unwrap();
        assert!(shown.contains(&format!("inet {ipv4}/24")), "{shown}");
        let line = format!("ip -6 addr show eth0 | grep -v tentative | grep -qF {ipv6}/64");
        guest.wait_until(&line, PATIENCE).unwrap();
        for own in ["ipv4", "ipv6"] {
            let own = station[own].as_str().unwrap();
            assert_answers(guest, own.split('/').next().unwrap());
        }
    }
    for guest in &scene.guests {
        for other in &scene.guests {
            assert_answers(guest, &format!("-4 {}", other.name()));
            assert_answers(guest, &format!("-6 {}.lan", other.name()));
        }
        let unknown = guest.run("nslookup nobody.lan 2>&1").unwrap();
        assert!(unknown.text().contains("NXDOMAIN"), "{}", unknown.text());
    }
}
