//! A guest that lets go of its device and takes it again at once: the moment at which the daemon finds out about the first must not be
//! the end of the second.

use std::path::Path;

use bench::daemon::Daemon;
use bench::frontend::{RX, TX};
use bench::guest::VirtualGuest;
use bench::host;
use rustix::event::{EventfdFlags, eventfd};
use wire::vsock::Operation;

const RUNNING: &str = "the guest's driver is running";
const LET_GO: &str = "the guest has let go";

#[test]
fn a_ring_of_the_next_driver_survives_the_end_of_the_last() {
    let program = Path::new(env!("CARGO_BIN_EXE_ringdown-under-test"));
    let daemon = Daemon::start(program, &[("web", 3)], &[]).expect("the daemon starts");
    let listener = host::listen(&daemon.listener_path("web", 80)).expect("the path is free");
    let mut guest = VirtualGuest::attach(&daemon.vhost_socket("web")).expect("it attaches");
    guest.connect(2, 80).expect("there is a listener");
    let _program = host::accept(&listener).expect("a call came");
    daemon.wait_for_log(RUNNING, 1);

    let bases = guest.stop_rings().expect("they stop");
    let start = |guest: &mut VirtualGuest, ring: usize| {
        let mut setup = guest.tamper(ring).setup();
        setup.ring_base = bases[ring];
        let event = || eventfd(0, EventfdFlags::NONBLOCK).expect("there is a descriptor");
        let (kick, call) = (event(), event());
        let started = guest.vmm().start_ring(ring, &setup, &kick, &call);
        started.expect("it starts");
    };
    // The receive ring is back when the transmit ring's memory shows that the guest runs on without it.
    start(&mut guest, RX);
    let header = guest.header(Operation::CreditUpdate, 2, 1, 1);
    guest.inject(header, b"");
    daemon.wait_for_log(LET_GO, 1);
    start(&mut guest, TX);
    daemon.wait_for_log(RUNNING, 2);
}
