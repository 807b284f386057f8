//! No guest and no VMM has more of a turn than its share: counted in descriptors that are read, and not in packets, which may
//! have a thousand of them.

use std::io::Read;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::{Duration, Instant};

use device::{CircuitFilter, Fabric};
use wire::vsock::{Header, Operation, SocketType};

use crate::guest::{Guest, RING, RX, TABLE, TX, quads, request, send};
use crate::{PATIENCE, config, config_of, fabric, turn_until};

/// What docs/threat-model.md says: so many descriptors of a ring are read in one turn, and at most one chain more.
const MOST_DESCRIPTORS: u16 = 4096;
const MOST_CHAINS: u16 = MOST_DESCRIPTORS / TABLE + 1;

/// Of a circuit that does not exist.
fn stray() -> Header {
    header(Operation::Data, 5000, 0)
}

pub fn header(operation: Operation, port: u32, len: u32) -> Header {
    Header {
        src_cid: 3,
        dst_cid: 2,
        src_port: 1000,
        dst_port: port,
        len,
        socket_type: SocketType::Stream as u16,
        operation: operation as u16,
        flags: 0,
        buf_alloc: 65536,
        fwd_cnt: 0,
    }
}

/// Has turns until this ring has given back `count` chains, never too many at a time.
fn count_turns(fabric: &mut Fabric, guest: &Guest, ring: usize, count: u16) {
    let until = Instant::now() + PATIENCE;
    let mut before = guest.given_back(ring);
    while before < count {
        assert!(Instant::now() < until, "{before} of {count}");
        fabric.turn(Some(Duration::from_millis(5))).unwrap();
        let after = guest.given_back(ring);
        assert!(after - before <= MOST_CHAINS, "{before} to {after}");
        before = after;
    }
}

#[test]
fn a_turn_reads_so_many_descriptors_of_what_a_guest_sends() {
    let directory = tempfile::tempdir().unwrap();
    let (mut fabric, config) = (fabric(), config(directory.path()));
    fabric.open_line(&config).unwrap();
    let mut guest = Guest::attach(&mut fabric, &config.vhost_user);
    let packet = guest.in_pieces(guest.packet(&stray()));
    guest.offer(TX, packet, RING);
    guest.kick(TX);
    count_turns(&mut fabric, &guest, TX, RING);
}

#[test]
fn a_turn_reads_so_many_descriptors_of_a_guests_buffers() {
    let directory = tempfile::tempdir().unwrap();
    let (mut fabric, config) = (fabric(), config(directory.path()));
    fabric.open_line(&config).unwrap();
    let mut guest = Guest::attach(&mut fabric, &config.vhost_user);
    let buffer = guest.in_pieces(guest.buffer(2048));
    guest.offer(RX, buffer, RING);
    // Each is answered with a reset.
    let packet = guest.packet(&stray());
    guest.offer(TX, packet, 100);
    guest.kick(TX);
    count_turns(&mut fabric, &guest, RX, 100);
}

#[test]
fn a_ring_that_stops_is_answered_for_without_being_emptied() {
    let directory = tempfile::tempdir().unwrap();
    let (mut fabric, config) = (fabric(), config(directory.path()));
    fabric.open_line(&config).unwrap();
    let mut guest = Guest::attach(&mut fabric, &config.vhost_user);
    let packet = guest.in_pieces(guest.packet(&stray()));
    guest.offer(TX, packet, RING);
    send(
        &guest.vmm,
        request::GET_VRING_BASE,
        &quads(&[TX as u64]),
        &[],
    );
    guest.vmm.set_nonblocking(true).unwrap();
    // Header, number of the ring, where it would go on.
    let mut answer = [0; 20];
    let mut before = guest.given_back(TX);
    turn_until(&mut fabric, "the ring stops", |_| {
        let after = guest.given_back(TX);
        assert!(after - before <= MOST_CHAINS, "{before} to {after}");
        before = after;
        (&guest.vmm).read_exact(&mut answer).is_ok()
    });
    let base = u32::from_le_bytes(answer[16..].try_into().unwrap());
    assert_eq!(base, u32::from(guest.given_back(TX)));
}

#[test]
fn what_a_guest_sent_before_its_vmm_went_is_delivered_in_many_turns() {
    const PACKETS: u16 = 200;
    const PAYLOAD: u32 = TABLE as u32 - 1;
    let directory = tempfile::tempdir().unwrap();
    let (mut fabric, config) = (fabric(), config(directory.path()));
    fabric.open_line(&config).unwrap();
    let listener = UnixListener::bind(directory.path().join("web.sock_80")).unwrap();
    let mut guest = Guest::attach(&mut fabric, &config.vhost_user);
    let buffer = guest.buffer(4096);
    guest.offer(RX, buffer, 64);
    guest.kick(RX);
    let dial = guest.packet(&header(Operation::Request, 80, 0));
    guest.offer(TX, dial, 1);
    guest.kick(TX);
    turn_until(&mut fabric, "the guest is answered", |_| {
        guest.given_back(RX) == 1
    });
    let (program, _) = listener.accept().unwrap();
    program.set_nonblocking(true).unwrap();

    let data = guest.in_pieces(guest.packet(&header(Operation::Data, 80, PAYLOAD)));
    guest.offer(TX, data, PACKETS);
    let shutdown = guest.packet(&Header {
        flags: 3,
        ..header(Operation::Shutdown, 80, 0)
    });
    guest.offer(TX, shutdown, 1);
    guest.hang_up();
    count_turns(&mut fabric, &guest, TX, 1 + PACKETS + 1);

    let mut arrived = Vec::new();
    turn_until(&mut fabric, "the program has everything", |_| {
        (&program).read_to_end(&mut arrived).is_ok()
    });
    assert_eq!(arrived.len(), usize::from(PACKETS) * PAYLOAD as usize);
    turn_until(&mut fabric, "the VMM is gone", |fabric| {
        !fabric.lines()[0].attached
    });
}

/// A guest with circuits to programs of the host.
pub fn with_circuits(
    fabric: &mut Fabric,
    directory: &Path,
    count: u16,
) -> (Guest, Vec<UnixStream>) {
    let config = config(directory);
    fabric.open_line(&config).unwrap();
    let listener = UnixListener::bind(directory.join("web.sock_80")).unwrap();
    let mut guest = Guest::attach(fabric, &config.vhost_user);
    let buffer = guest.buffer(4096);
    guest.offer(RX, buffer, RING);
    guest.kick(RX);
    let mut programs = Vec::new();
    for number in 0..count {
        let dial = guest.packet(&Header {
            src_port: 1000 + u32::from(number),
            ..header(Operation::Request, 80, 0)
        });
        guest.offer(TX, dial, 1);
        guest.kick(TX);
        turn_until(fabric, "the guest is answered", |_| {
            guest.given_back(RX) > number
        });
        let (program, _) = listener.accept().unwrap();
        program.set_nonblocking(true).unwrap();
        programs.push(program);
    }
    (guest, programs)
}

/// Of what a guest leaves behind, so many circuits are cut in one turn (`CUTS_AT_ONCE`).
#[test]
fn a_turn_cuts_so_many_circuits_of_a_guest_that_is_gone() {
    const MOST: usize = 64;
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let (guest, mut programs) = with_circuits(&mut fabric, directory.path(), 200);
    guest.hang_up();
    turn_until(&mut fabric, "all are cut", |_| {
        let before = programs.len();
        // Those that are not cut have nothing to read.
        programs.retain_mut(|program| program.read(&mut [0]).is_err());
        let cut = before - programs.len();
        assert!(cut <= MOST, "{cut} circuits of {before} in one turn");
        programs.is_empty()
    });
    assert_eq!(
        fabric
            .list_circuits(&CircuitFilter::default(), 0, 1)
            .circuits,
        []
    );
}

#[test]
fn a_fabric_that_stops_has_cut_every_circuit() {
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let (_guest, mut programs) = with_circuits(&mut fabric, directory.path(), 200);
    fabric.stop();
    assert_eq!(
        fabric
            .list_circuits(&CircuitFilter::default(), 0, 1)
            .circuits,
        []
    );
    programs.retain_mut(|program| program.read(&mut [0]).is_err());
    assert_eq!(programs.len(), 0);
}

/// Each VMM waits for its answer before it says more, but the others have said something by then.
#[test]
fn a_turn_takes_so_many_messages_of_vmms() {
    const MESSAGES: usize = 8;
    const VMMS: usize = 5 * MESSAGES;
    if let Err(error) = std::fs::read("/proc/thread-self/syscall") {
        eprintln!("skipped: what threads wait for cannot be read: {error}");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let configs: Vec<_> = (0..VMMS)
        .map(|index| config_of(directory.path(), &format!("said{index}"), 3 + index as u32))
        .collect();
    for config in &configs {
        fabric.open_line(config).unwrap();
    }
    let vmms = configs.iter().map(|config| &config.vhost_user);
    let _vmms: Vec<_> = vmms
        .map(|path| UnixStream::connect(path).unwrap())
        .collect();
    let until = Instant::now() + PATIENCE;
    while waiting_threads("vhost-said") < VMMS {
        assert!(Instant::now() < until, "all have said that they are there");
        std::thread::yield_now();
    }
    let mut before = 0;
    while before < VMMS {
        assert!(Instant::now() < until, "{before} of {VMMS}");
        fabric.turn(Some(PATIENCE)).unwrap();
        let lines = fabric.lines();
        let after = lines.iter().filter(|line| line.attached).count();
        assert!(after - before <= MESSAGES, "{before} to {after}");
        before = after;
    }
}

/// How many threads of such a name wait for another thread.
fn waiting_threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let waits = |task: &std::path::PathBuf| {
        // A thread that has ended has no files.
        let read = |file| std::fs::read_to_string(task.join(file)).unwrap_or_default();
        let call = read("syscall");
        let call = call.split_whitespace().next();
        read("comm").starts_with(name) && call == Some(&libc::SYS_futex.to_string())
    };
    tasks.map(|task| task.unwrap().path()).filter(waits).count()
}
