//! Guest memory is unmapped, and not by the worker's thread: the memory of a VMM that was killed is freed meanwhile, which takes long.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use device::net::{ModerationSetting, NetFabric, NetPortConfig};
use guestmem_driver::Arena;
use l2::bridge::{BridgeLimits, PortConfig};
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule,
};
use wire::ethernet::MacAddress;

use crate::guest::{Guest, TX, quads, request, send};
use crate::{PATIENCE, config, fabric, turn_until};

/// Of the memory of these tests' guests, in bytes.
const GUEST_BYTES: u64 = 4 << 20;

/// Runs a test on a thread that no later test gets.
fn on_own_thread(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        scope.spawn(test);
    });
}

/// From now on the system refuses to unmap a guest's memory on this thread.
fn refuse_to_unmap() {
    let (length, wide) = (1, SeccompCmpArgLen::Qword);
    let large = SeccompCondition::new(length, wide, SeccompCmpOp::Ge, GUEST_BYTES).unwrap();
    let rule = SeccompRule::new(vec![large]).unwrap();
    let filter = SeccompFilter::new(
        BTreeMap::from([(libc::SYS_munmap, vec![rule])]),
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM as u32),
        std::env::consts::ARCH.try_into().unwrap(),
    );
    let program: BpfProgram = filter.unwrap().try_into().unwrap();
    seccompiler::apply_filter(&program).unwrap();
}

/// How many times the whole of this memory is mapped.
fn mappings(arena: &Arena) -> usize {
    let file = arena.file().metadata().unwrap();
    let (device, inode) = (file.dev(), file.ino());
    let (major, minor) = (libc::major(device), libc::minor(device));
    let file = format!(" {major:02x}:{minor:02x} {inode} ");
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let of_it = |line: &&str| line.contains(&file);
    let spans = maps.lines().filter(of_it);
    let is_whole = |line: &&str| {
        let (start, rest) = line.split_once('-').unwrap();
        let (end, _) = rest.split_once(' ').unwrap();
        let [start, end] = [start, end].map(|place| u64::from_str_radix(place, 16).unwrap());
        end - start >= GUEST_BYTES
    };
    spans.filter(is_whole).count()
}

/// Has a guest, and does something that ends a mapping of its memory. So many are left then.
fn is_unmapped_elsewhere_after(left: usize, end: impl FnOnce(&mut device::Fabric, &Guest) + Send) {
    on_own_thread(|| {
        let directory = tempfile::tempdir().unwrap();
        let (mut fabric, config) = (fabric(), config(directory.path()));
        fabric.open_line(&config).unwrap();
        let guest = Guest::attach(&mut fabric, &config.vhost_user);
        // The guest's own, and ours.
        assert_eq!(mappings(&guest.arena), 2);
        refuse_to_unmap();
        end(&mut fabric, &guest);
        turn_until(&mut fabric, "the memory is unmapped", |_| {
            mappings(&guest.arena) == left
        });
    });
}

#[test]
fn when_a_vmm_goes() {
    is_unmapped_elsewhere_after(1, |_, guest| guest.hang_up());
}

#[test]
fn when_a_vmm_stops_its_rings_and_goes() {
    is_unmapped_elsewhere_after(1, |_, guest| {
        let ring = quads(&[TX as u64]);
        send(&guest.vmm, request::GET_VRING_BASE, &ring, &[]);
        guest.hang_up();
    });
}

/// The rings stay where they were in the memory, and that is mapped anew.
#[test]
fn when_a_vmm_replaces_its_memory() {
    is_unmapped_elsewhere_after(2, |_, guest| {
        guest.share();
        let until = Instant::now() + PATIENCE;
        // The VMM's thread has mapped it, and waits for a turn.
        while mappings(&guest.arena) != 3 {
            assert!(Instant::now() < until, "the memory is mapped anew");
            std::thread::yield_now();
        }
    });
}

#[test]
fn when_the_vmm_of_a_port_goes() {
    on_own_thread(unmap_of_port);
}

fn unmap_of_port() {
    let directory = tempfile::tempdir().unwrap();
    let vhost_user = directory.path().join("web.lan.vhost");
    let mut fabric = NetFabric::new().unwrap();
    fabric.add_network("lan", BridgeLimits::default()).unwrap();
    let port = NetPortConfig {
        network: "lan".to_owned(),
        vm: "web".to_owned(),
        vhost_user: vhost_user.clone(),
        bridge: PortConfig::guest(MacAddress([2, 0, 0, 0, 0, 1])),
        queue_pairs: 1,
        moderation: ModerationSetting::Off,
    };
    fabric.add_port(port).unwrap();
    let guest = Guest::connect(&vhost_user);
    let until = Instant::now() + PATIENCE;
    let mut turn = |what: &str| {
        assert!(Instant::now() < until, "{what}");
        fabric.turn(Some(Duration::from_millis(5))).unwrap();
        fabric.networks()[0].ports[0].driver_ready
    };
    while !turn("the driver runs") {}
    assert_eq!(mappings(&guest.arena), 2);
    refuse_to_unmap();
    guest.hang_up();
    while mappings(&guest.arena) > 1 {
        turn("the memory is unmapped");
    }
}
