//! Guests whose memory is not shared: what they write is not seen here.

use std::sync::Arc;

use guestmem::guest::{GuestMemory, RegionSpec};
use guestmem_driver::Arena;

use super::setup::{Driver, Guest, RECEIVE, Setup, TRANSMIT, frame};
use crate::fault::NOT_SHARED;
use crate::frontend::Request;

impl Setup {
    /// A guest whose VMM has handed over what the guest does not write to: with a private mapping, each page that it writes becomes a copy.
    fn unseen(&mut self, number: u8, driver: Driver) -> Guest {
        let guest = self.guest_with(number, driver);
        self.restart(&guest, &elsewhere(&guest));
        guest
    }

    /// The guest's driver begins anew, with the rings as they are.
    fn restart(&mut self, guest: &Guest, memory: &Arc<GuestMemory>) {
        self.ask(guest, Request::Reset).unwrap();
        for ring in 0..guest.rings.len() {
            let base = guest.rings[ring].setup().ring_base;
            self.start_ring(guest, ring, base, memory).unwrap();
        }
        self.settle();
    }

    /// What is said of a guest's port, and whether its driver seems to run.
    fn seen(&self, guest: &Guest) -> (Option<String>, bool) {
        let networks = self.fabric.networks();
        let mut ports = networks.iter().flat_map(|network| &network.ports);
        let port = ports.find(|port| port.vm == guest.name).unwrap();
        (port.last_fault.clone(), port.driver_ready)
    }
}

/// Blank memory at the addresses of a guest's.
fn elsewhere(guest: &Guest) -> Arc<GuestMemory> {
    let region = guest.arena.region(0).unwrap();
    let other = Arena::new(region.size as usize).unwrap();
    let file = other.file().try_clone().unwrap();
    guest.memory_of(vec![RegionSpec { file, ..region }])
}

fn unseen() -> (Option<String>, bool) {
    (Some(NOT_SHARED.to_owned()), false)
}

const SEEN: (Option<String>, bool) = (None, true);

#[test]
fn a_guest_that_kicks_rings_that_stay_blank_is_told_of_until_one_is_seen() {
    for driver in Driver::of_each_kind() {
        for ring in [RECEIVE, TRANSMIT] {
            let mut setup = Setup::new();
            let mut db = setup.guest(2);
            let mut web = setup.unseen(1, driver.clone());
            assert_eq!(setup.seen(&web), SEEN, "it has not kicked");
            web.kick_anyway(ring);
            setup.settle();
            assert_eq!(setup.seen(&web), unseen(), "{driver:?} {ring}");
            assert_eq!(setup.seen(&db), SEEN);
            // It is not forgotten with the next ring that is started, nor with the VMM.
            let memory = elsewhere(&web);
            setup
                .start_ring(
                    &web,
                    1 - ring,
                    web.rings[1 - ring].setup().ring_base,
                    &memory,
                )
                .unwrap();
            assert_eq!(setup.seen(&web), unseen());
            setup.ask(&web, Request::Detach { fault: None }).unwrap();
            assert_eq!(setup.seen(&web), unseen());
            // It is of that VMM, and not of the next one.
            setup.ask(&web, Request::Attach).unwrap();
            assert_eq!(setup.seen(&web), unseen());
            setup.ask(&web, Request::Speak).unwrap();
            assert_eq!(setup.seen(&web).0, None);
            setup.restart(&web, &web.memory());
            assert_eq!(setup.seen(&web), SEEN);
            let sent = frame(db.mac, web.mac, 60);
            web.send(&sent);
            setup.settle();
            assert_eq!(db.frames(), [sent]);
        }
    }
}

/// QEMU hands every kick descriptor over signalled, and a card's rings are empty until the guest brings it up.
#[test]
fn a_signal_from_before_the_ring_came_is_not_the_guests() {
    for signals in [0, 1, 2] {
        let mut setup = Setup::new();
        let mut web = setup.guest(1);
        setup.ask(&web, Request::Reset).unwrap();
        for _ in 0..signals {
            web.kick_anyway(TRANSMIT);
        }
        setup.restart(&web, &elsewhere(&web));
        let expected = match signals {
            2 => unseen(),
            _ => SEEN,
        };
        assert_eq!(setup.seen(&web), expected, "{signals}");
    }
}

#[test]
fn a_kick_too_many_says_nothing_if_one_of_the_rings_is_seen() {
    for ring in [RECEIVE, TRANSMIT] {
        let mut setup = Setup::new();
        // Its receive ring has buffers, the other was never written to.
        let mut web = setup.guest(1);
        web.kick_anyway(ring);
        setup.settle();
        assert_eq!(setup.seen(&web), SEEN);
    }
}

#[test]
fn what_is_seen_later_ends_the_fault() {
    let mut setup = Setup::new();
    let (mut web, mut db) = (setup.unseen(1, Driver::default()), setup.guest(2));
    web.kick_anyway(TRANSMIT);
    setup.settle();
    assert_eq!(setup.seen(&web), unseen());
    let memory = web.memory();
    setup.ask(&web, Request::ReplaceMemory { memory }).unwrap();
    let sent = frame(db.mac, web.mac, 60);
    web.send(&sent);
    setup.settle();
    assert_eq!(setup.seen(&web), SEEN);
    assert_eq!(db.frames(), [sent]);
}

#[test]
fn a_port_keeps_why_its_vmm_was_cut_off_until_a_driver_runs() {
    let mut setup = Setup::new();
    let web = setup.guest(1);
    let fault = Some("a word".to_owned());
    let request = Request::Detach {
        fault: fault.clone(),
    };
    setup.ask(&web, request).unwrap();
    assert_eq!(setup.seen(&web), (fault, false));
    setup.start(&web);
    assert_eq!(setup.seen(&web), SEEN);
}
