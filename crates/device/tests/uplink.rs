//! A network's way out, with the kernel's own stack at its other end: in a network namespace of its own, so that nothing of the host is touched.

#![allow(clippy::unwrap_used)]

use std::net::{Ipv4Addr, Ipv6Addr};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use device::net::{NetFabric, UplinkDevice};
use station::{Ipv4Settings, StationConfig};
use switch::bridge::{BridgeLimits, PortConfig};
use wire::ethernet::MacAddress;

const NETWORK: &str = "lan";
const OWN: Ipv4Addr = Ipv4Addr::new(10, 99, 0, 1);
const OWN6: Ipv6Addr = Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 0, 1);
const MAC: MacAddress = MacAddress([2, 0, 0, 0, 0, 1]);

/// Says inside the namespace what to test.
const WHAT: &str = "RINGDOWN_TEST_UPLINK";

#[test]
fn the_host_reaches_a_network_through_a_tap() {
    in_namespace("tap");
}

#[test]
fn the_host_reaches_a_network_through_an_interface() {
    in_namespace("interface");
}

/// Runs [`inside`] in a new network namespace.
fn in_namespace(what: &str) {
    let may = Command::new("unshare").args(["--net", "true"]).output();
    if !may.is_ok_and(|output| output.status.success()) {
        println!("skipped: this user may not make a network namespace");
        return;
    }
    let output = Command::new("unshare")
        .arg("--net")
        .arg(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "inside", "--nocapture"])
        .env(WHAT, what)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}\n{complained}");
    assert!(said.contains("1 passed"), "{said}");
}

#[test]
#[ignore = "the others run it, in a network namespace"]
fn inside() {
    let Ok(what) = std::env::var(WHAT) else {
        return;
    };
    let device = match what.as_str() {
        "tap" => UplinkDevice::Tap("rdtap0".to_owned()),
        _ => {
            ip("link add rdouter type veth peer name rdinner");
            ip("link set rdinner up");
            UplinkDevice::Interface("rdinner".to_owned())
        }
    };
    let mut fabric = NetFabric::new().unwrap();
    fabric
        .add_network(NETWORK, BridgeLimits::default())
        .unwrap();
    let config = station();
    let port = PortConfig {
        ipv4: Some(OWN),
        ipv6: vec![OWN6],
        ..PortConfig::station(MAC)
    };
    fabric.set_station(NETWORK, (port, config)).unwrap();
    fabric
        .set_uplink(NETWORK, &device, PortConfig::uplink())
        .unwrap();
    let waker = fabric.waker();
    let is_over = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&is_over);
    let thread = std::thread::spawn(move || {
        while !told.load(Ordering::Relaxed) {
            fabric.turn(Some(Duration::from_secs(1))).unwrap();
        }
        fabric
    });
    let host = if what == "tap" { "rdtap0" } else { "rdouter" };
    ip(&format!("link set {host} address 02:00:00:00:00:02 up"));
    ip(&format!("addr add 10.99.0.2/24 dev {host}"));
    ip(&format!("addr add fd99::2/64 dev {host} nodad"));
    run("ping -c 3 -W 10 10.99.0.1");
    run("ping -c 3 -W 10 fd99::1");
    // Longer than a snapshot, and with the longest payload that the MTU allows.
    run("ping -c 3 -W 10 -s 1472 10.99.0.1");
    is_over.store(true, Ordering::Relaxed);
    waker.wake();
    let fabric = thread.join().unwrap();
    let uplink = fabric.networks().remove(0).uplink.unwrap();
    assert!(uplink.counters.sent_frames >= 9, "{:?}", uplink.counters);
    assert_eq!(uplink.counters.malformed_headers, 0);
}

fn station() -> StationConfig {
    StationConfig {
        mac: MAC,
        ipv4: Some(Ipv4Settings {
            address: OWN,
            prefix_len: 24,
        }),
        ipv6: Some(OWN6),
        domain: NETWORK.to_owned(),
        mtu: 1500,
        dhcp: false,
        advertise: false,
        dns: false,
        lease: Duration::from_secs(3600),
        gateway: None,
        pool: None,
        seed: 1,
    }
}

fn ip(arguments: &str) {
    run(&format!("ip {arguments}"));
}

fn run(command: &str) {
    let mut words = command.split(' ');
    let output = Command::new(words.next().unwrap()).args(words).output();
    let output = output.unwrap_or_else(|error| panic!("{command}: {error}"));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command}: {said}{complained}");
}
