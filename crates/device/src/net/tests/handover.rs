//! What a fabric knows of its ports when the one before was killed.

use std::net::Ipv6Addr;
use std::path::Path;
use std::sync::Arc;

use etherparse::PacketBuilder;
use guestmem::journal::SHAPE;
use keeper::{Holder, Keeper, KeeperError};
use l2::bridge::PortConfig;

use super::setup::{Driver, Guest, LAN, Setup, frame, mac};
use crate::net::handover::{Known, Record};

fn keeper() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let holder = Holder::listen(&directory.path().join("keeper")).unwrap();
    // It ends with the tests.
    std::thread::spawn(move || holder.run());
    directory
}

/// A fabric as the next daemon has it, once the one before is gone.
fn next(keeper: &Path) -> Setup {
    loop {
        match Keeper::attach(&keeper.join("keeper")) {
            Err(KeeperError::Busy { .. }) => std::thread::yield_now(),
            attached => {
                let keeper = Arc::new(attached.unwrap());
                let setup = Setup::kept(keeper.clone());
                keeper.run();
                return setup;
            }
        }
    }
}

fn learning(setup: &mut Setup, number: u8) -> Guest {
    setup.guest_at(number, PortConfig::learning_guest(), Driver::default())
}

/// A datagram to all nodes, from these addresses.
fn datagram(from: u8, source: Ipv6Addr) -> Vec<u8> {
    let builder = PacketBuilder::ethernet2(mac(from).0, [0x33, 0x33, 0, 0, 0, 1]);
    let to = "ff02::1".parse::<Ipv6Addr>().unwrap().octets();
    let mut packet = Vec::new();
    let builder = builder.ipv6(source.octets(), to, 64).udp(5, 5);
    builder.write(&mut packet, b"hello").unwrap();
    packet
}

fn refused(setup: &mut Setup, guest: &mut Guest, frame: &[u8]) -> u64 {
    let name = guest.name.clone();
    let of_port = |setup: &Setup| {
        let networks = setup.fabric.networks();
        let mut ports = networks[0].ports.iter();
        let port = ports.find(|port| port.vm == name).unwrap();
        port.bridge.refused_total()
    };
    let before = of_port(setup);
    guest.send(frame);
    setup.settle();
    of_port(setup) - before
}

/// Killed at any time, a daemon leaves no moment in which another guest could take an address that is in use.
#[test]
fn the_next_daemon_knows_whose_addresses_are_in_use() {
    let keeper = keeper();
    let mut setup = next(keeper.path());
    let (mut victim, _other) = (learning(&mut setup, 1), learning(&mut setup, 2));
    let address: Ipv6Addr = "fd00::50".parse().unwrap();
    victim.send(&datagram(1, address));
    setup.settle();
    drop(setup);
    // Twice: what a daemon has inherited it leaves to the next one.
    for _ in 0..2 {
        let mut setup = next(keeper.path());
        // The thief's port is there first.
        let mut thief = learning(&mut setup, 2);
        let mut victim = learning(&mut setup, 1);
        let theft = [frame(mac(9), victim.mac, 60), datagram(2, address)];
        for stolen in theft {
            assert_eq!(refused(&mut setup, &mut thief, &stolen), 1);
        }
        assert_eq!(refused(&mut setup, &mut victim, &datagram(1, address)), 0);
    }
}

#[test]
fn what_the_next_daemon_does_not_allow_is_not_inherited() {
    let keeper = keeper();
    let mut setup = next(keeper.path());
    learning(&mut setup, 1).send(&datagram(1, "fd00::50".parse().unwrap()));
    setup.settle();
    drop(setup);
    let mut setup = next(keeper.path());
    setup.guest(1);
    let bridge = &setup.fabric.networks[0].bridge;
    let learned = bridge
        .macs(setup.fabric.now)
        .filter(|entry| entry.vlan.is_some());
    assert_eq!(learned.count(), 0);
    assert_eq!(bridge.ipv6_bindings(setup.fabric.now).count(), 0);
}

#[test]
fn a_link_that_was_taken_down_stays_down() {
    let keeper = keeper();
    let mut setup = next(keeper.path());
    let _guests = (setup.guest(1), setup.guest(2));
    setup.fabric.set_link(LAN, "vm1", false).unwrap();
    setup.fabric.set_link(LAN, "vm2", false).unwrap();
    setup.fabric.set_link(LAN, "vm2", true).unwrap();
    setup.settle();
    drop(setup);
    for _ in 0..2 {
        let mut setup = next(keeper.path());
        for number in [1, 2] {
            setup.add_port(number, PortConfig::guest(mac(number)), &Driver::default());
        }
        let links: Vec<bool> = setup.fabric.networks()[0]
            .ports
            .iter()
            .map(|port| port.link)
            .collect();
        assert_eq!(links, [false, true]);
        assert!(!setup.socket_of(1).exists() && setup.socket_of(2).exists());
        setup.settle();
    }
    let mut setup = next(keeper.path());
    setup.add_port(1, PortConfig::guest(mac(1)), &Driver::default());
    setup.fabric.set_link(LAN, "vm1", true).unwrap();
    setup.settle();
    drop(setup);
    let mut setup = next(keeper.path());
    setup.add_port(1, PortConfig::guest(mac(1)), &Driver::default());
    assert!(setup.fabric.networks()[0].ports[0].link);
}

#[test]
fn a_network_that_is_removed_leaves_nothing() {
    let keeper = keeper();
    let mut setup = next(keeper.path());
    let mut victim = learning(&mut setup, 1);
    victim.send(&datagram(1, "fd00::50".parse().unwrap()));
    setup.settle();
    setup.fabric.remove_network(LAN).unwrap();
    setup.settle();
    drop(setup);
    let mut setup = next(keeper.path());
    learning(&mut setup, 1);
    let bridge = &setup.fabric.networks[0].bridge;
    assert_eq!(bridge.ipv6_bindings(setup.fabric.now).count(), 0);
}

/// What records look like in each shape: of either kind of address, and of a link.
const SHAPES: [(u8, [&str; 3]); 1] = [(
    3,
    [
        "036c616e01037765620005020000000001ac02",
        "036c616e0001ff1ffd00000000000000000000000000005000",
        "036c616e010377656202",
    ],
)];

#[test]
fn the_records_are_of_their_shape() {
    let address: Ipv6Addr = "fd00::50".parse().unwrap();
    let known = [
        (Some("web"), Known::Mac(5, mac(1).0, 300)),
        (None, Known::Ipv6(4095, address.octets(), 0)),
        (Some("web"), Known::Down),
    ];
    let bytes = known.map(|(vm, known)| {
        let network = LAN;
        let record = Record { network, vm, known };
        let bytes = postcard::to_allocvec(&record).unwrap();
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        hex
    });
    let found = (SHAPE, bytes.each_ref().map(String::as_str));
    let words = "records have changed: raise SHAPE in guestmem/src/journal.rs, and add a line to SHAPES, here and in the fabric's";
    assert_eq!(found, SHAPES[SHAPES.len() - 1], "{words}");
}
