//! Rings, drivers and VMMs that come and go at the wrong moment.

use guestmem::guest::Range;
use wire::vsock::SocketType;

use crate::frontend::{FEATURE_VERSION_1, RX, TX};
use crate::guest::{GuestConfig, VirtualGuest};

use super::scene::{Scene, assert_works};
use super::{Attack, nothing, refused};

pub(super) const ATTACKS: &[Attack] = &[
    nothing(
        "gone-in-the-middle",
        "a VMM that is killed with full rings, again and again",
        gone,
    ),
    nothing(
        "reset-storm",
        "RESET_DEVICE and a new driver, with circuits and full rings, 100 times",
        |scene| storm(scene, 100, |guest| guest.reset_device().expect("it resets")),
    ),
    nothing(
        "reboot-storm",
        "rings that stop and start anew, 100 times",
        |scene| storm(scene, 100, |guest| guest.reboot().expect("it reboots")),
    ),
    nothing(
        "resets-with-many-circuits",
        "RESET_DEVICE and a new driver with 200 circuits, 5 times: they are cut in slices, and the new driver calls at once",
        many_circuits,
    ),
    nothing(
        "pause-storm",
        "rings that stop and go on where they were, 300 times under load",
        pauses,
    ),
    nothing(
        "rings-that-never-started",
        "rings are stopped that were never started, and stopped twice",
        never_started,
    ),
    nothing(
        "half-a-device",
        "the transmit ring runs and the receive ring never does",
        half_a_device,
    ),
    nothing(
        "enable-storm",
        "rings are enabled and disabled 1000 times under load",
        toggles,
    ),
    nothing(
        "a-base-that-lies",
        "rings go on from an index that is not where they were",
        lying_base,
    ),
    refused(
        "features-without-virtio-1",
        "a ring is started by a driver of before virtio 1",
        "the VMM's connection ended with an error",
        legacy,
    ),
];

/// Fills the ring and the circuits' credit as far as it goes.
fn load(guest: &mut VirtualGuest, peer_cid: u32) {
    for _ in 0..4 {
        let circuit = guest.dial(peer_cid, super::scene::ECHO_PORT, SocketType::Stream);
        guest.service();
        // Whether it is open by now is not important.
        let _ = guest.try_send(circuit, &[7; 200_000]);
    }
}

fn gone(scene: &mut Scene<'_>) {
    for round in 0..40 {
        let mut guest = scene.attach();
        let circuit = guest.connect(2, super::scene::ECHO_PORT);
        let circuit = circuit.expect("the host answers");
        let _ = guest.try_send(circuit, &[7; 200_000]);
        if round % 2 == 0 {
            load(&mut guest, 2);
        }
        guest.disconnect();
    }
}

fn storm(scene: &mut Scene<'_>, rounds: usize, restart: fn(&mut VirtualGuest)) {
    let mut guest = scene.attach();
    for _ in 0..rounds {
        load(&mut guest, 2);
        restart(&mut guest);
    }
    assert_works(&mut guest);
    scene.keep(guest);
}

fn many_circuits(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    for _ in 0..5 {
        for _ in 0..200 {
            guest
                .connect(2, super::scene::ECHO_PORT)
                .expect("the host answers");
        }
        guest.reset_device().expect("it resets");
        assert_works(&mut guest);
    }
    scene.keep(guest);
}

fn pauses(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    let circuit = guest.connect(2, super::scene::ECHO_PORT);
    let circuit = circuit.expect("the host answers");
    let mut arrived = Vec::new();
    let mut sent = 0;
    for _ in 0..300 {
        sent += guest.try_send(circuit, &[7; 5000]).expect("it is open");
        let bases = guest.stop_rings().expect("they stop");
        guest.resume_rings(bases).expect("they go on");
        guest.service();
        guest.try_receive(circuit, usize::MAX, &mut arrived);
    }
    let rest = guest.receive(circuit, sent - arrived.len());
    assert!(rest.is_ok(), "nothing is lost by it");
    scene.keep(guest);
}

fn never_started(scene: &mut Scene<'_>) {
    let config = GuestConfig {
        event_ring: true,
        ..GuestConfig::default()
    };
    let mut guest = scene.attach_with(config);
    for _ in 0..10 {
        guest.stop_rings().expect("they stop");
    }
    guest.reboot().expect("they start");
    assert_works(&mut guest);
    let raw_line = guest;
    scene.keep(raw_line);
}

fn half_a_device(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    guest.vmm().stop_ring(RX).expect("it stops");
    let bytes = [0; 44];
    let address = guest.place(&bytes);
    for _ in 0..60 {
        // The ring may be full: nothing is taken from it.
        let _ = guest.try_chain(&[Range { address, len: 44 }], &[]);
    }
    guest.notify(TX);
    scene.keep(guest);
}

fn toggles(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    load(&mut guest, 2);
    for round in 0..1000 {
        let ring = [RX, TX][round % 2];
        for enabled in [false, true] {
            guest.vmm().enable_ring(ring, enabled).expect("it does");
        }
        guest.service();
    }
    assert_works(&mut guest);
    scene.keep(guest);
}

fn lying_base(scene: &mut Scene<'_>) {
    let mut guest = scene.attach();
    assert_works(&mut guest);
    let mut bases = guest.stop_rings().expect("they stop");
    bases[TX] = (bases[TX] + 1000) & 0xffff;
    guest.resume_rings(bases).expect("a number is a number");
    scene.keep(guest);
}

fn legacy(scene: &mut Scene<'_>) {
    let path = scene.daemon.vhost_socket("mallory");
    let config = GuestConfig::default().without(FEATURE_VERSION_1);
    assert!(VirtualGuest::attach_with(&path, config).is_err());
}
