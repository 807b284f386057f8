//! Cards in guests that are emulated, whatever this machine can do. QEMU before 8.0 crashes there with cards that are printed for KVM.

use e2e::accelerator::Accelerator;
use e2e::{Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Scene};

use super::{address, assert_answers, ringdown};

#[test]
fn cards_printed_for_emulation_work_in_emulated_guests() {
    let daemon = Daemon::start(DaemonSpec::new().arguments(&["--network", "lan"])).unwrap();
    let added = [("one", "lan"), ("four", "lan,queue-pairs=4")];
    let specs = added.map(|(name, net)| {
        let output = daemon.run(&["vm", "add", name, "--net", net]).unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}");
        let mut spec = GuestSpec::new(name, Kernel::V6_12).attached(&daemon);
        spec.accelerator = Some(Accelerator::Tcg);
        spec.layer("lan").without_agent()
    });
    let guests = Guest::boot_all(specs.into()).unwrap();
    let scene = Scene { guests, daemon };
    for guest in &scene.guests {
        guest.shell("modprobe virtio_net").unwrap();
        address(guest, "eth0");
    }
    assert_answers(scene.guest("one"), "four");
    assert_answers(scene.guest("four"), "one");
    let shown = ringdown(&scene, &["net", "show", "lan"]);
    for guest in &scene.guests {
        // What QEMU says here, every user reads.
        assert_eq!(guest.qemu_log(), "", "{shown}");
    }
}
