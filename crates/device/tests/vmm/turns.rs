//! No guest and no VMM has more of a turn than its share: counted in descriptors that are read, and not in packets, which may
//! have a thousand of them.

use std::fs::{Permissions, set_permissions};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use device::{CircuitFilter, Fabric, LineSnapshot};
use policy::{
    CalleePattern, CallerPattern, DEFAULT_DOMAIN, Policy, Rule, RuleLimits, Verdict, VmPattern,
};
use rustix::io::write;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType as Kind, accept, bind, listen,
    socket_with,
};
use wire::vsock::{HEADER_LEN, Header, Operation, SocketType};

use crate::guest::{Guest, RING, RX, TABLE, TX, quads, request, send};
use crate::{PATIENCE, attach_all, config, config_of, fabric, turn_until};

/// What docs/threat-model.md says: so many descriptors of a ring are read in one turn, and at most one chain more.
const MOST_DESCRIPTORS: u16 = 4096;
const MOST_CHAINS: u16 = MOST_DESCRIPTORS / TABLE + 1;

/// Of a circuit that does not exist.
pub fn stray() -> Header {
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

pub fn allow_everyone(fabric: &mut Fabric) {
    let domain = || DEFAULT_DOMAIN.to_owned();
    let anyone = Rule {
        from: vec![CallerPattern::Vms(VmPattern::Any { domain: domain() })],
        to: vec![CalleePattern::Vms(VmPattern::Any { domain: domain() })],
        ports: Vec::new(),
        verdict: Verdict::Allow,
        limits: RuleLimits::default(),
        label: "rule".to_owned(),
        is_named: true,
    };
    fabric.set_policy(Arc::new(Policy::new(vec![anyone])), Vec::new(), false);
}

/// A circuit from `web` to a guest that offers 1 MiB and gives a buffer for the dial, and nothing else. Returns what makes headers of it.
pub fn call(
    fabric: &mut Fabric,
    sender: &mut Guest,
    receiver: &mut Guest,
    port: u32,
    cid: u32,
) -> impl Fn(Operation, u32) -> Header + use<> {
    let from_web = move |operation, len| Header {
        src_port: port,
        dst_cid: cid.into(),
        ..header(operation, 80, len)
    };
    let before = [sender.given_back(RX), receiver.given_back(RX)];
    for guest in [&mut *sender, &mut *receiver] {
        let buffer = guest.buffer(4096);
        guest.offer(RX, buffer, 1);
        guest.kick(RX);
    }
    let dial = sender.packet(&from_web(Operation::Request, 0));
    sender.offer(TX, dial, 1);
    sender.kick(TX);
    turn_until(fabric, "the receiver is called", |_| {
        receiver.given_back(RX) > before[1]
    });
    let answer = receiver.packet(&Header {
        src_cid: cid.into(),
        dst_cid: 3,
        src_port: 80,
        dst_port: port,
        buf_alloc: 1 << 20,
        ..header(Operation::Response, 0, 0)
    });
    receiver.offer(TX, answer, 1);
    receiver.kick(TX);
    turn_until(fabric, "the sender is answered", |_| {
        sender.given_back(RX) > before[0]
    });
    from_web
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

/// Those that wait for room in a backlog are tried one after the other; by the line's own thread, where others may read or write the directory.
#[test]
fn calls_to_a_full_listener_go_through_when_it_accepts() {
    for mode in [0o700, 0o755, 0o777] {
        fill_a_listener(mode);
    }
}

fn fill_a_listener(mode: u32) {
    const CALLS: u16 = 40;
    let directory = tempfile::tempdir().unwrap();
    let (mut fabric, config) = (fabric(), config(directory.path()));
    set_permissions(directory.path(), Permissions::from_mode(mode)).unwrap();
    fabric.open_line(&config).unwrap();
    let listener = UnixListener::bind(directory.path().join("web.sock_80")).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    listener.set_nonblocking(true).unwrap();
    let mut guest = Guest::attach(&mut fabric, &config.vhost_user);
    let buffer = guest.buffer(4096);
    guest.offer(RX, buffer, RING);
    guest.kick(RX);
    for number in 0..CALLS {
        let dial = guest.packet(&Header {
            src_port: 1000 + u32::from(number),
            ..header(Operation::Request, 80, 0)
        });
        guest.offer(TX, dial, 1);
    }
    guest.kick(TX);
    turn_until(&mut fabric, "all have called", |_| {
        guest.given_back(TX) == CALLS
    });
    let mut programs = Vec::new();
    turn_until(&mut fabric, "all are accepted", |_| {
        programs.extend(listener.accept());
        programs.len() == usize::from(CALLS)
    });
    turn_until(&mut fabric, "all are answered", |_| {
        guest.given_back(RX) == CALLS
    });
    let lines = fabric.lines();
    assert_eq!(lines[0].report.counters.ended.iter().sum::<u64>(), 0);
}

/// What docs/threat-model.md says: so much payload of a guest's ring in one turn, so much for a line, and what one packet or one circuit's turn has more.
const MOST_BYTES_SENT: u64 = 1 << 20;
pub const MOST_BYTES: u64 = 4 << 20;
pub const ONE_MORE: u64 = 512 << 10;

/// Has turns until this count of bytes, of one line, is complete, with so many in each at most, and one more.
pub fn count_bytes(
    fabric: &mut Fabric,
    count: impl Fn(&LineSnapshot) -> u64,
    line: &str,
    all: u64,
    most: u64,
) {
    let until = Instant::now() + PATIENCE;
    let bytes_now = |fabric: &Fabric| {
        let lines = fabric.lines();
        let line = lines.iter().find(|each| each.report.address.name == line);
        count(line.unwrap())
    };
    let mut before = bytes_now(fabric);
    while before < all {
        assert!(Instant::now() < until, "{before} of {all}");
        fabric.turn(Some(Duration::from_millis(5))).unwrap();
        let after = bytes_now(fabric);
        assert!(after - before <= most + ONE_MORE, "{before} to {after}");
        before = after;
    }
}

#[test]
fn a_turn_takes_so_many_bytes_of_what_a_guest_sends() {
    const CIRCUITS: u16 = 64;
    const LEN: u32 = 256 << 10;
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let (mut guest, _programs) = with_circuits(&mut fabric, directory.path(), CIRCUITS);
    for number in 0..CIRCUITS {
        let data = guest.packet(&Header {
            src_port: 1000 + u32::from(number),
            ..header(Operation::Data, 80, LEN)
        });
        guest.offer(TX, data, 1);
    }
    guest.kick(TX);
    let sent = |line: &LineSnapshot| line.report.counters.bytes_from_guest;
    let all = u64::from(CIRCUITS) * u64::from(LEN);
    count_bytes(&mut fabric, sent, "web", all, MOST_BYTES_SENT);
}

/// Also where its sender may park no more, so that each of its packets is a reason to give the receiver what waits.
#[test]
fn a_turn_gives_a_guest_so_many_bytes() {
    const CIRCUITS: u32 = 8;
    const LEN: u32 = (1 << 20) - 1024;
    const MORE: u16 = 90;
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let guests = attach_all(&mut fabric, directory.path(), ["web", "db", "paused"]);
    let [mut sender, mut receiver, mut paused] = guests;
    allow_everyone(&mut fabric);
    let to_paused = call(&mut fabric, &mut sender, &mut paused, 999, 5);
    let mut circuits = Vec::new();
    for port in 1000..1000 + CIRCUITS {
        circuits.push(call(&mut fabric, &mut sender, &mut receiver, port, 4));
    }
    let byte = sender.packet(&to_paused(Operation::Data, 1));
    sender.offer(TX, byte, RING / 2);
    sender.kick(TX);
    let half = usize::from(RING / 2);
    turn_until(&mut fabric, "half of the ring is parked", |fabric| {
        fabric.lines()[0].parked_descriptors == half
    });
    for circuit in &circuits {
        let data = sender.packet(&circuit(Operation::Data, LEN));
        sender.offer(TX, data, 1);
    }
    sender.kick(TX);
    let all = u64::from(CIRCUITS) * u64::from(LEN);
    let sent = |line: &LineSnapshot| line.report.counters.bytes_from_guest;
    count_bytes(&mut fabric, sent, "web", half as u64 + all, MOST_BYTES_SENT);

    let buffer = receiver.buffer((128 << 10) + HEADER_LEN);
    receiver.offer(RX, buffer, 200);
    let byte = sender.packet(&circuits[0](Operation::Data, 1));
    sender.offer(TX, byte, MORE);
    sender.kick(TX);
    receiver.kick(RX);
    let given = |line: &LineSnapshot| line.report.counters.bytes_to_guest;
    count_bytes(&mut fabric, given, "db", all + u64::from(MORE), MOST_BYTES);
}

/// A program that listens for messages of the guest of `web`.
pub fn listen_for_messages(directory: &Path, port: u32, backlog: u32) -> OwnedFd {
    let listener = socket_with(
        AddressFamily::UNIX,
        Kind::SEQPACKET,
        SocketFlags::NONBLOCK,
        None,
    );
    let listener = listener.unwrap();
    let path = directory.join(format!("web.sock_{port}"));
    bind(&listener, &SocketAddrUnix::new(&path).unwrap()).unwrap();
    listen(&listener, backlog as i32).unwrap();
    listener
}

/// A message is read before the guest has a buffer for it.
#[test]
fn a_turn_reads_so_many_bytes_of_messages_for_a_guest() {
    const CIRCUITS: u32 = 64;
    const LEN: usize = 128 << 10;
    let directory = tempfile::tempdir().unwrap();
    let mut fabric = fabric();
    let web = config(directory.path());
    fabric.open_line(&web).unwrap();
    let listener = listen_for_messages(directory.path(), 80, CIRCUITS);
    let mut guest = Guest::attach(&mut fabric, &web.vhost_user);
    let buffer = guest.buffer(4096);
    guest.offer(RX, buffer, CIRCUITS as u16);
    guest.kick(RX);
    for port in 1000..1000 + CIRCUITS {
        let dial = guest.packet(&Header {
            src_port: port,
            socket_type: SocketType::SeqPacket as u16,
            buf_alloc: 1 << 20,
            ..header(Operation::Request, 80, 0)
        });
        guest.offer(TX, dial, 1);
    }
    guest.kick(TX);
    let mut programs = Vec::new();
    turn_until(&mut fabric, "every call is accepted and answered", |_| {
        programs.extend(accept(&listener));
        programs.len() == CIRCUITS as usize && guest.given_back(RX) == CIRCUITS as u16
    });
    for program in &programs {
        assert_eq!(write(program, &[0; LEN]), Ok(LEN));
    }
    // One buffer is enough for all to be read.
    guest.offer(RX, buffer, 1);
    guest.kick(RX);
    let kept = |fabric: &mut Fabric| {
        let kept = fabric.survey_circuits(0).kept_bytes;
        kept.into_iter().map(|(_, kept)| kept).sum::<u64>()
    };
    let mut before = 0;
    turn_until(&mut fabric, "messages are read", |fabric| {
        let after = kept(fabric);
        let read = after.saturating_sub(before);
        assert!(read <= MOST_BYTES + LEN as u64, "{before} to {after}");
        before = after;
        after > 0
    });
}
