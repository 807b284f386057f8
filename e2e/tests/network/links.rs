//! Links that go up and down, cards and networks that come and go, ports that are kept apart.

use e2e::{Card, Guest, Scene};
use serde_json::Value;

use super::{
    BAY, CONFIGURATION, PATIENCE, address, address_of, answers, assert_answers, assert_silent,
    eventually, network, port, reload, ringdown, scene,
};

fn carrier(guest: &Guest, carrier: &str) {
    let line = format!("[ $(cat /sys/class/net/eth0/carrier) = {carrier} ]");
    guest.wait_until(&line, PATIENCE).unwrap();
}

#[test]
fn the_operator_takes_a_link_down_and_up() {
    let scene = scene();
    let web = scene.guest("web");
    // Not db, whose rings are packed: QEMU does not know where those stood when its connection ends, and begins where it began before.
    let guest = scene.guest("box");
    assert_answers(web, "box");
    ringdown(&scene, &["net", "link", "box", "lan", "down"]);
    carrier(guest, "0");
    assert_eq!(port(&scene, "lan", "box")["link_up"], false);
    assert_silent(web, "box");
    ringdown(&scene, &["net", "link", "box", "lan", "up"]);
    carrier(guest, "1");
    eventually("it answers again", || answers(web, "box"));
    assert_answers(guest, "web");
}

/// A card with this address is there, or not.
fn present(guest: &Guest, card: &Card, is_there: bool) {
    let not = if is_there { "" } else { "!" };
    let line = format!("{not} grep -q {} /sys/class/net/*/address", card.mac);
    guest.wait_until(&line, PATIENCE).unwrap();
}

/// Plugs in a VM's card, has it ask for an address, and takes it out again.
fn plug_and_unplug(scene: &Scene, vm: &str, network: &str) {
    let guest = scene.guest(vm);
    let card = Card::of(&scene.daemon, vm, network).unwrap();
    card.plug(guest, BAY).unwrap();
    present(guest, &card, true);
    let line = format!(
        "basename $(dirname $(grep -l {} /sys/class/net/*/address))",
        card.mac
    );
    let interface = guest.shell(&line).unwrap();
    address(guest, &interface);
    eventually("its rings run", || {
        port(scene, network, vm)["driver_ready"] == true
    });
    let own = super::network(scene, network)["ipv4"].clone();
    let own = own.as_str().unwrap().split('/').next().unwrap();
    assert_answers(guest, own);
    card.unplug(guest).unwrap();
    eventually("the guest has let go of it", || !card.is_in(guest).unwrap());
    present(guest, &card, false);
    card.remove_back_end(guest).unwrap();
    eventually("the port is free", || {
        port(scene, network, vm)["attached"] == false
    });
}

#[test]
fn a_reload_brings_a_network_whose_cards_are_plugged_in_and_out() {
    let scene = scene();
    let web = "name = \"web\"\ncid = 3\nnetworks = [\"lan\"";
    assert!(CONFIGURATION.contains(web));
    let more = CONFIGURATION.replace(web, &format!("{web}, \"late\""));
    reload(&scene, &format!("{more}\n[[network]]\nname = \"late\"\n"));
    assert_answers(scene.guest("web"), "db");
    for _ in 0..2 {
        plug_and_unplug(&scene, "web", "late");
    }
    reload(&scene, CONFIGURATION);
    let listed: Value = serde_json::from_str(&ringdown(&scene, &["net", "ls", "--json"])).unwrap();
    let networks = listed["networks"].as_array().unwrap();
    let is_gone = networks.iter().all(|network| network["name"] != "late");
    assert!(is_gone, "{listed}");
    assert_answers(scene.guest("web"), "db");
}

#[test]
fn ports_that_are_kept_apart_reach_the_network_itself_only() {
    let scene = scene();
    let (web, db) = (scene.guest("web"), scene.guest("db"));
    let own = network(&scene, "lan")["ipv4"].clone();
    let own = own.as_str().unwrap().split('/').next().unwrap();
    // A broadcast that asks for the other's MAC address is not refused, so that has to be known before.
    assert_answers(web, &address_of(&scene, "lan", "db", "ipv4"));
    let lan = "[[network]]\nname = \"lan\"\n";
    assert!(CONFIGURATION.contains(lan));
    reload(
        &scene,
        &CONFIGURATION.replace(lan, &format!("{lan}isolated = true\n")),
    );
    assert_silent(web, &address_of(&scene, "lan", "db", "ipv4"));
    assert_answers(web, own);
    assert_answers(db, own);
    let refused = port(&scene, "lan", "web")["refused"]["isolated"].as_u64();
    assert!(refused.is_some_and(|refused| refused > 0), "{refused:?}");
    reload(&scene, CONFIGURATION);
    assert_answers(web, "db");
}
