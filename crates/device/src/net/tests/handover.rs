//! What a fabric knows of its ports when the one before was killed.

use std::iter::once;
use std::net::Ipv6Addr;
use std::path::Path;
use std::sync::Arc;

use etherparse::PacketBuilder;
use guestmem::journal::SHAPE;
use guestmem_driver::Arena;
use keeper::{Holder, Keeper, KeeperError};
use l2::bridge::PortConfig;

use super::setup::{ARENA_LEN, Driver, Guest, LAN, Setup, frame, mac};
use crate::net::handover::{Known, Record};
use crate::net::{NetLedger, NetPortConfig};

fn keeper() -> tempfile::TempDir {
    let directory = tempfile::tempdir().unwrap();
    let holder = Holder::listen(&directory.path().join("keeper")).unwrap();
    // It ends with the tests.
    std::thread::spawn(move || holder.run());
    directory
}

/// A fabric as the next daemon has it, once the one before is gone.
fn next(keeper: &Path) -> Setup {
    start(keeper, |ledger| Setup::kept(ledger, once(LAN)))
}

/// What the next daemon makes when it starts.
fn start<T>(keeper: &Path, make: impl FnOnce(&NetLedger) -> T) -> T {
    loop {
        match Keeper::attach(&keeper.join("keeper")) {
            Err(KeeperError::Busy { .. }) => std::thread::yield_now(),
            attached => {
                let keeper = Arc::new(attached.unwrap());
                let made = make(&NetLedger::of(keeper.clone()).unwrap());
                keeper.run();
                return made;
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
        let mut ports = networks.iter().flat_map(|network| &network.ports);
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

const NETWORKS: [&str; 3] = ["lan", "dmz", "lab"];

/// Three guests of each network have these numbers.
const VICTIM: usize = 1;
const THIEF: usize = 2;
const OFF: usize = 3;

/// The fabrics of so many threads, each with every so manieth network.
fn fabrics(ledger: &NetLedger, threads: usize) -> Vec<Setup> {
    let networks = |thread| NETWORKS.into_iter().skip(thread).step_by(threads);
    let threads = 0..threads;
    threads
        .map(|thread| Setup::kept(ledger, networks(thread)))
        .collect()
}

fn port(setup: &Setup, network: usize, which: usize) -> NetPortConfig {
    let (kind, driver) = (PortConfig::learning_guest(), Driver::default());
    NetPortConfig {
        network: NETWORKS[network].to_owned(),
        ..setup.port_config((10 * network + which) as u8, kind, &driver)
    }
}

fn guest_of(setup: &mut Setup, network: usize, which: usize) -> Guest {
    let config = port(setup, network, which);
    setup.fabric.add_port(config).unwrap();
    let arena = Arc::new(Arena::new(ARENA_LEN).unwrap());
    let (name, number) = (NETWORKS[network], (10 * network + which) as u8);
    setup.guest_of(name, number, Driver::default(), arena)
}

/// Has a guest of each network use an address, the same in all of them, and takes a link down.
fn use_addresses(setups: &mut [Setup], address: Ipv6Addr) {
    for network in 0..NETWORKS.len() {
        let setup = &mut setups[network % setups.len()];
        let mut victim = guest_of(setup, network, VICTIM);
        let off = guest_of(setup, network, OFF).name;
        let datagram = datagram(victim.mac.0[5], address);
        assert_eq!(refused(setup, &mut victim, &datagram), 0);
        let name = NETWORKS[network];
        setup.fabric.set_link(name, &off, false).unwrap();
    }
}

/// Whether a network knows what [`use_addresses`] made known.
fn assert_known(setup: &mut Setup, network: usize, address: Ipv6Addr) {
    let mut thief = guest_of(setup, network, THIEF);
    let mut victim = guest_of(setup, network, VICTIM);
    let number = |guest: &Guest| guest.mac.0[5];
    let theft = [
        frame(mac(9), victim.mac, 60),
        datagram(number(&thief), address),
    ];
    for stolen in theft {
        assert_eq!(
            refused(setup, &mut thief, &stolen),
            1,
            "{}",
            NETWORKS[network]
        );
    }
    let own = datagram(number(&victim), address);
    assert_eq!(refused(setup, &mut victim, &own), 0);
}

/// Whether a port that is added now has its link up.
fn is_link_up(setup: &mut Setup, network: usize) -> bool {
    let config = port(setup, network, OFF);
    let vm = config.vm.clone();
    setup.fabric.add_port(config).unwrap();
    let shown = setup.fabric.network(NETWORKS[network]).unwrap();
    let port = shown.ports.iter().find(|port| port.vm == vm);
    port.unwrap().link
}

#[test]
fn a_daemon_with_other_threads_knows_what_is_in_use_in_every_network() {
    let address: Ipv6Addr = "fd00::50".parse().unwrap();
    for (before, after) in [(1, 2), (2, 1), (2, 3), (3, 2)] {
        let keeper = keeper();
        let mut setups = start(keeper.path(), |ledger| fabrics(ledger, before));
        use_addresses(&mut setups, address);
        drop(setups);
        // Twice: the second goes on with what the first has inherited.
        for threads in [after, before] {
            let mut setups = start(keeper.path(), |ledger| {
                let mut setups = fabrics(ledger, threads);
                for network in 0..NETWORKS.len() {
                    let setup = &mut setups[network % threads];
                    assert_known(setup, network, address);
                    assert!(!is_link_up(setup, network));
                }
                setups
            });
            setups.iter_mut().for_each(Setup::settle);
        }
    }
}

#[test]
fn what_was_not_inherited_is_forgotten_by_all_threads() {
    let address: Ipv6Addr = "fd00::50".parse().unwrap();
    let keeper = keeper();
    let mut setups = start(keeper.path(), |ledger| fabrics(ledger, 2));
    use_addresses(&mut setups, address);
    drop(setups);
    // Without ports.
    let mut setups = start(keeper.path(), |ledger| fabrics(ledger, 2));
    setups.iter_mut().for_each(Setup::settle);
    drop(setups);
    let mut setups = start(keeper.path(), |ledger| fabrics(ledger, 1));
    for network in 0..NETWORKS.len() {
        assert!(is_link_up(&mut setups[0], network));
        let mut other = guest_of(&mut setups[0], network, THIEF);
        let datagram = datagram(other.mac.0[5], address);
        assert_eq!(refused(&mut setups[0], &mut other, &datagram), 0);
    }
}

/// What a thread has inherited counts where it was, until all of it is written anew, whatever another thread has count meanwhile.
#[test]
fn a_thread_has_nothing_count_that_another_has_half_done() {
    let address: Ipv6Addr = "fd00::50".parse().unwrap();
    let keeper = keeper();
    let mut setups = start(keeper.path(), |ledger| fabrics(ledger, 3));
    use_addresses(&mut setups, address);
    drop(setups);
    let setups = start(keeper.path(), |ledger| {
        let mut setups = fabrics(ledger, 3);
        assert!(!is_link_up(&mut setups[1], 1));
        let victim = port(&setups[1], 1, VICTIM);
        setups[1].fabric.add_port(victim).unwrap();
        assert_known(&mut setups[0], 0, address);
        setups
    });
    // Killed before the second has had a turn.
    drop(setups);
    start(keeper.path(), |ledger| {
        let mut setup = fabrics(ledger, 1).remove(0);
        for network in 0..NETWORKS.len() {
            assert!(!is_link_up(&mut setup, network));
            assert_known(&mut setup, network, address);
        }
    });
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
