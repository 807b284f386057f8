//! Fabrics that end, and others that go on with the same VMMs by way of a keeper.

mod circuits;
pub mod deaths;

use std::fs;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use device::{Fabric, LineConfig, LineProspect, NOT_SHARED, NewLine};
use keeper::{Holder, Keeper, KeeperError};
use wire::vsock::Operation;

use crate::guest::{Guest, RX, TX, quads, send};
use crate::linger::{Lingering, is_closing};
use crate::turns::header;
use crate::{config_of, fabric, turn_until};

static HOSTS: AtomicU32 = AtomicU32::new(0);

/// A keeper with a directory for sockets, and a VM whose name no other test has.
pub struct Host {
    directory: tempfile::TempDir,
    pub vm: String,
}

impl Host {
    pub fn new() -> Host {
        // Where sockets are removed at once, as in the runtime directory.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        let directory = tempfile::Builder::new()
            .permissions(mode)
            .tempdir()
            .unwrap();
        let holder = Holder::listen(&directory.path().join("keeper")).unwrap();
        // It ends with the tests.
        std::thread::spawn(move || holder.run());
        let vm = format!("k{}", HOSTS.fetch_add(1, Ordering::Relaxed));
        Host { directory, vm }
    }

    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    fn attach(&self) -> Arc<Keeper> {
        loop {
            match Keeper::attach(&self.path().join("keeper")) {
                // The one before is gone, and the keeper has yet to see it.
                Err(KeeperError::Busy { .. }) => std::thread::yield_now(),
                attached => return Arc::new(attached.unwrap()),
            }
        }
    }

    /// A fabric with a line, as a daemon starts one.
    fn fabric(&self) -> (Fabric, Arc<Keeper>) {
        self.fabric_of(&[self.config()])
    }

    /// One with these lines.
    pub fn fabric_of(&self, lines: &[LineConfig]) -> (Fabric, Arc<Keeper>) {
        let (mut fabric, keeper) = (fabric(), self.attach());
        fabric.set_keeper(keeper.clone()).unwrap();
        for line in lines {
            fabric.open_line(line).unwrap();
        }
        keeper.run();
        (fabric, keeper)
    }

    pub fn config(&self) -> LineConfig {
        config_of(self.path(), &self.vm, 3)
    }

    fn socket(&self) -> PathBuf {
        self.config().vhost_user
    }
}

/// Ends as a process does: nothing is put in order. What the VMMs have said is answered and kept by then.
fn end((mut fabric, keeper): (Fabric, Arc<Keeper>), guests: &[&Guest]) {
    wait_until_kept(&mut fabric, guests);
    keeper.leave();
    drop(fabric);
    drop(keeper);
}

pub fn wait_until_kept(fabric: &mut Fabric, guests: &[&Guest]) {
    for guest in guests {
        guest.wait_for_answer(|| fabric.turn(Some(Duration::from_millis(1))).unwrap());
    }
    for line in fabric.lines() {
        wait_for_poll(&format!("vhost-{}", line.report.address.name));
    }
}

/// Waits until a thread of this name waits itself, for the next message.
fn wait_for_poll(thread: &str) {
    // poll and ppoll.
    while !is_in_call(thread, &["7 ", "271 "]) {
        std::thread::yield_now();
    }
}

/// Whether a thread of this name is in one of these system calls. One that has just begun has no name yet.
fn is_in_call(thread: &str, calls: &[&str]) -> bool {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let read = |task: &Path, file| fs::read_to_string(task.join(file)).unwrap_or_default();
    let mut threads = tasks.map(|task| task.unwrap().path());
    let found = threads.find(|task| read(task, "comm").trim_end() == thread);
    let call = found.map(|task| read(&task, "syscall")).unwrap_or_default();
    calls.iter().any(|known| call.starts_with(known))
}

fn runs(fabric: &mut Fabric) {
    turn_until(fabric, "the driver runs", |fabric| {
        fabric.lines()[0].report.up
    });
}

/// Whether the VMM's connection was closed, which may take a moment.
fn is_closed(guest: &Guest) -> bool {
    let patience = Some(Duration::from_secs(60));
    guest.vmm.set_read_timeout(patience).unwrap();
    match (&guest.vmm).read(&mut [0; 64]) {
        Ok(len) => len == 0,
        Err(error) => error.kind() == ErrorKind::ConnectionReset,
    }
}

fn dial(guest: &mut Guest, port: u32) {
    let packet = guest.packet(&header(Operation::Request, port, 0));
    guest.offer(TX, packet, 1);
    guest.kick(TX);
}

#[test]
fn another_goes_on_and_resets_the_circuits_of_the_one_before() {
    let host = Host::new();
    let _listener = UnixListener::bind(host.path().join(format!("{}.sock_80", host.vm))).unwrap();
    let mut first = host.fabric();
    let mut guest = Guest::connect(&host.socket());
    runs(&mut first.0);
    let buffer = guest.buffer(4096);
    guest.offer(RX, buffer, 8);
    guest.kick(RX);
    dial(&mut guest, 80);
    turn_until(&mut first.0, "the guest is answered", |_| {
        guest.given_back(RX) == 1
    });
    // Sent while there is no daemon.
    end(first, &[&guest]);
    let mut second = host.fabric();
    runs(&mut second.0);
    turn_until(&mut second.0, "the circuit is reset", |fabric| {
        guest.given_back(RX) > 1 && fabric.lines()[0].report.circuits == 0
    });
    let given_back = guest.given_back(RX);
    dial(&mut guest, 80);
    turn_until(&mut second.0, "the guest is answered again", |_| {
        guest.given_back(RX) > given_back
    });
    assert_eq!(second.0.lines()[0].last_fault, None);
}

#[test]
fn a_guest_that_is_paused_meanwhile_has_its_circuits_reset_when_it_goes_on() {
    let host = Host::new();
    let _listener = UnixListener::bind(host.path().join(format!("{}.sock_80", host.vm))).unwrap();
    let mut first = host.fabric();
    let mut guest = Guest::connect_without_rings(&host.socket());
    guest.start_kick_first();
    runs(&mut first.0);
    let buffer = guest.buffer(4096);
    guest.offer(RX, buffer, 8);
    guest.kick(RX);
    dial(&mut guest, 80);
    turn_until(&mut first.0, "the guest is answered", |_| {
        guest.given_back(RX) == 1
    });
    guest.set_enabled(false);
    end(first, &[&guest]);
    let mut second = host.fabric();
    // When this is answered, what the first one had taken is given back.
    guest.wait_for_answer(|| second.0.turn(Some(Duration::from_millis(1))).unwrap());
    let before = guest.given_back(RX);
    let buffer = guest.buffer(4096);
    guest.offer(RX, buffer, 8);
    guest.set_enabled(true);
    turn_until(&mut second.0, "the circuit is reset", |_| {
        guest.given_back(RX) > before
    });
}

/// A guest that notifies while its rings stay blank, as they do in memory that is not shared.
#[test]
fn that_nothing_of_a_guest_is_seen_is_known_after_a_restart_and_a_pause() {
    let host = Host::new();
    let mut daemon = host.fabric();
    let mut guest = Guest::connect_without_rings(&host.socket());
    guest.start_kick_first();
    runs(&mut daemon.0);
    guest.kick(TX);
    let is_unseen = |fabric: &Fabric| {
        let line = &fabric.lines()[0];
        let prospects = fabric.line_prospects();
        line.last_fault.as_deref() == Some(NOT_SHARED)
            && !line.report.up
            && prospects.values().eq([&LineProspect::Unseen])
    };
    turn_until(&mut daemon.0, "it is found out", |fabric| is_unseen(fabric));
    let turn = |fabric: &mut Fabric| fabric.turn(Some(Duration::from_millis(1))).unwrap();
    for is_paused in [false, true, false] {
        if is_paused {
            guest.stop_rings(&mut daemon.0);
        }
        end(daemon, &[&guest]);
        daemon = host.fabric();
        guest.wait_for_answer(|| turn(&mut daemon.0));
        assert!(is_unseen(&daemon.0), "after a restart: {is_paused}");
        if !is_paused {
            guest.stop_rings(&mut daemon.0);
        }
        guest.start_kick_first();
        guest.wait_for_answer(|| turn(&mut daemon.0));
        assert!(is_unseen(&daemon.0), "after a pause: {is_paused}");
    }
    let buffer = guest.buffer(4096);
    guest.offer(RX, buffer, 1);
    guest.kick(RX);
    runs(&mut daemon.0);
    assert_eq!(daemon.0.lines()[0].last_fault, None);
    end(daemon, &[&guest]);
    let mut next = host.fabric();
    runs(&mut next.0);
    assert_eq!(next.0.lines()[0].last_fault, None);
}

#[test]
fn a_vmm_that_connects_while_there_is_nobody_waits() {
    let host = Host::new();
    end(host.fabric(), &[]);
    let guest = Guest::connect(&host.socket());
    let mut next = host.fabric();
    runs(&mut next.0);
    drop(guest);
}

#[test]
fn a_line_that_is_removed_is_not_kept() {
    let host = Host::new();
    let mut first = host.fabric();
    let guest = Guest::connect(&host.socket());
    runs(&mut first.0);
    first.0.close_line(&host.vm);
    assert!(is_closed(&guest));
    assert!(!host.socket().exists());
    end(first, &[]);
    assert_eq!(host.attach().untaken(), ["journal"]);
}

#[test]
fn a_daemon_that_cannot_start_leaves_the_vmm_to_the_next() {
    let host = Host::new();
    let mut first = host.fabric();
    let guest = Guest::connect(&host.socket());
    runs(&mut first.0);
    end(first, &[&guest]);
    for _ in 0..2 {
        let (mut fabric, keeper) = (fabric(), host.attach());
        fabric.set_keeper(keeper).unwrap();
        fabric.open_line(&host.config()).unwrap();
        for _ in 0..20 {
            fabric.turn(None).unwrap();
        }
        assert!(!fabric.lines()[0].attached, "nothing is done yet");
        // As when something else cannot be opened.
        fabric.close_line(&host.vm);
    }
    let mut last = host.fabric();
    runs(&mut last.0);
}

#[test]
fn another_vm_at_the_same_socket_does_not_get_the_guest() {
    let host = Host::new();
    let mut first = host.fabric();
    let guest = Guest::connect(&host.socket());
    runs(&mut first.0);
    end(first, &[&guest]);
    let mut other = host.config();
    other.address.name = format!("{}-other", host.vm);
    let _second = host.fabric_of(&[other]);
    assert!(is_closed(&guest));
}

#[test]
fn nor_does_it_get_a_vmm_that_waits_at_that_socket() {
    let host = Host::new();
    end(host.fabric(), &[]);
    let waiting = Guest::connect(&host.socket());
    let mut other = host.config();
    other.address.name = format!("{}-other", host.vm);
    let mut second = host.fabric_of(&[other]);
    assert!(is_closed(&waiting));
    let guest = Guest::connect(&host.socket());
    runs(&mut second.0);
    drop(guest);
}

/// The files are closed by the VMM's own thread: else it could have the keeper close any number of them.
#[test]
fn files_of_a_vmm_that_were_never_received_are_not_left_to_the_keeper() {
    let host = Host::new();
    let mut first = host.fabric();
    let vmm = UnixStream::connect(host.socket()).unwrap();
    let file = Lingering::new();
    send(&vmm, 9999, &quads(&[0]), &[]);
    file.send(&vmm);
    let (port, _peer) = file.leave();
    let thread = format!("vhost-{}", host.vm);
    turn_until(&mut first.0, "the VMM's thread closes the file", |_| {
        // recvfrom.
        is_closing(port) && is_in_call(&thread, &["45 "])
    });
}

/// What a VMM repeats would have the keeper close all files of the VMM each time.
#[test]
fn what_changes_nothing_is_not_kept_anew() {
    let host = Host::new();
    let mut first = host.fabric();
    let guest = Guest::connect(&host.socket());
    runs(&mut first.0);
    guest.wait_for_answer(|| first.0.turn(Some(Duration::from_millis(1))).unwrap());
    wait_for_poll(&format!("vhost-{}", host.vm));
    // What is kept from here on is not the VMM's any more, if nothing is put.
    let key = format!("vmm:{}", host.socket().display());
    first.1.put(&key, b"older", &[]).unwrap();
    end(first, &[&guest]);
    assert_eq!(host.attach().take(&key).unwrap().value, b"older");
}

/// The thread of a VMM is held by a file when its line is closed, and ends when the next line at that path has a VMM.
#[test]
fn a_vmm_that_is_late_to_leave_does_not_take_the_next_ones_place() {
    let host = Host::new();
    let mut first = host.fabric();
    let vmm = UnixStream::connect(host.socket()).unwrap();
    let file = Lingering::new();
    file.send(&vmm);
    let (port, peer) = file.leave();
    turn_until(&mut first.0, "the VMM's thread closes the file", |_| {
        is_closing(port)
    });
    first.0.close_line(&host.vm);
    first.0.open_line(&host.config()).unwrap();
    let guest = Guest::connect(&host.socket());
    runs(&mut first.0);
    guest.wait_for_answer(|| first.0.turn(Some(Duration::from_millis(1))).unwrap());
    let thread = format!("vhost-{}", host.vm);
    assert_eq!(count(&thread), 2);
    drop((peer, vmm));
    turn_until(&mut first.0, "the late thread ends", |_| {
        count(&thread) == 1
    });
    // The VMM says nothing more, which would be kept again.
    end(first, &[]);
    let mut second = host.fabric();
    runs(&mut second.0);
}

/// How many threads have this name.
fn count(thread: &str) -> usize {
    let tasks = fs::read_dir("/proc/self/task").unwrap();
    let name = |task: PathBuf| fs::read_to_string(task.join("comm")).unwrap_or_default();
    let names = tasks.map(|task| name(task.unwrap().path()));
    names.filter(|name| name.trim_end() == thread).count()
}

/// As when a VM cannot be added again: nothing serves its VMM, which has to see that.
#[test]
fn what_was_taken_for_a_line_that_did_not_open_is_let_go_with_the_rest() {
    let host = Host::new();
    let mut first = host.fabric();
    let guest = Guest::connect(&host.socket());
    runs(&mut first.0);
    end(first, &[&guest]);
    let (mut second, keeper) = (fabric(), host.attach());
    second.set_keeper(keeper.clone()).unwrap();
    second.open_line(&host.config()).unwrap();
    second.close_line(&host.vm);
    let untaken = keeper.untaken();
    assert_eq!(untaken.len(), 2, "{untaken:?}");
    for key in untaken {
        keeper.drop_item(&key);
    }
    keeper.run();
    guest.vmm.set_nonblocking(true).unwrap();
    turn_until(&mut second, "the VMM is hung up on", |_| {
        let read = (&guest.vmm).read(&mut [0; 64]);
        read.map_or_else(
            |error| error.kind() == ErrorKind::ConnectionReset,
            |len| len == 0,
        )
    });
    // The path is free, once the keeper has closed the socket.
    while second.open_line(&host.config()).is_err() {
        std::thread::yield_now();
    }
}

#[test]
fn a_vmm_in_whose_message_a_daemon_was_killed_is_hung_up_on() {
    let host = Host::new();
    let mut first = host.fabric();
    let guest = Guest::connect(&host.socket());
    runs(&mut first.0);
    end(first, &[&guest]);
    // The flag that is set while a message is answered is the first number of the ledgers' file.
    let keeper = host.attach();
    let key = format!("vmm:{}", host.socket().display());
    let item = keeper.take(&key).unwrap();
    rustix::io::pwrite(&item.descriptors[1], &1u32.to_ne_bytes(), 0).unwrap();
    drop((item, keeper));
    let _second = host.fabric();
    assert!(is_closed(&guest));
}

/// Changes what is kept of a VMM: the key, the value, and how many descriptors there are.
type Change = fn(&Keeper, &str, &[u8], &[BorrowedFd<'_>]);

const CHANGES: [Change; 7] = [
    |keeper, key, _, descriptors| keeper.put(key, b"", descriptors).unwrap(),
    |keeper, key, _, descriptors| keeper.put(key, b"{}", descriptors).unwrap(),
    |keeper, key, _, descriptors| keeper.put(key, b"\xff\0", descriptors).unwrap(),
    |keeper, key, value, descriptors| {
        let text = std::str::from_utf8(value).unwrap();
        let newer = text.replace("\"version\":2", "\"version\":3");
        assert_ne!(newer, text);
        keeper.put(key, newer.as_bytes(), descriptors).unwrap();
    },
    // Descriptors are missing, or are something else.
    |keeper, key, value, descriptors| keeper.put(key, value, &descriptors[..1]).unwrap(),
    |keeper, key, value, descriptors| keeper.put(key, value, &descriptors[..3]).unwrap(),
    |keeper, key, value, descriptors| {
        let mut others = descriptors.to_vec();
        others[1..].reverse();
        keeper.put(key, value, &others).unwrap();
    },
];

#[test]
fn what_was_kept_otherwise_costs_its_own_line() {
    for change in CHANGES {
        let host = Host::new();
        let db_config = config_of(host.path(), &format!("{}b", host.vm), 4);
        let mut first = host.fabric();
        first.0.open_line(&db_config).unwrap();
        let (web, db) = (
            Guest::connect(&host.socket()),
            Guest::connect(&db_config.vhost_user),
        );
        turn_until(&mut first.0, "both run", |fabric| {
            fabric.lines().iter().all(|line| line.report.up)
        });
        end(first, &[&web, &db]);

        let keeper = host.attach();
        let key = format!("vmm:{}", host.socket().display());
        let item = keeper.take(&key).unwrap();
        let descriptors: Vec<_> = item.descriptors.iter().map(AsFd::as_fd).collect();
        change(&keeper, &key, &item.value, &descriptors);
        drop((item, keeper));

        let (mut second, _keeper) = host.fabric_of(&[host.config(), db_config.clone()]);
        turn_until(&mut second, "the other line goes on", |fabric| {
            let lines = fabric.lines();
            let is_up = |name: &str| {
                let line = lines.iter().find(|line| line.report.address.name == *name);
                line.is_some_and(|line| line.report.up)
            };
            is_up(&db_config.address.name) && !is_up(&host.vm)
        });
        // Its thread may have yet to ask the fabric something.
        web.vmm.set_nonblocking(true).unwrap();
        turn_until(&mut second, "the VMM is hung up on", |_| is_closed(&web));
        drop(db);
    }
}

const LISTENER_CHANGES: [Change; 3] = [
    |keeper, key, _, descriptors| keeper.put(key, b"", descriptors).unwrap(),
    |keeper, key, _, descriptors| keeper.put(key, b"{}", descriptors).unwrap(),
    |keeper, key, value, descriptors| {
        let text = std::str::from_utf8(value).unwrap();
        // Another file's number.
        let other = text.replace("\"file\":[", "\"file\":[9");
        assert_ne!(other, text);
        keeper.put(key, other.as_bytes(), descriptors).unwrap();
    },
];

#[test]
fn a_socket_that_was_kept_otherwise_is_made_anew() {
    let moved_aside: Change = |_, key, _, _| {
        let path = key.strip_prefix("listener:").unwrap();
        fs::rename(path, format!("{path}.aside")).unwrap();
    };
    for change in LISTENER_CHANGES.into_iter().chain([moved_aside]) {
        let host = Host::new();
        let mut first = host.fabric();
        let guest = Guest::connect(&host.socket());
        runs(&mut first.0);
        end(first, &[&guest]);

        let keeper = host.attach();
        let key = format!("listener:{}", host.socket().display());
        let item = keeper.take(&key).unwrap();
        let descriptors: Vec<_> = item.descriptors.iter().map(AsFd::as_fd).collect();
        change(&keeper, &key, &item.value, &descriptors);
        drop((item, keeper));

        // The guest goes on, and another VMM finds a socket when it has gone.
        let (mut second, _keeper) = host.fabric();
        runs(&mut second);
        drop(guest);
        turn_until(&mut second, "the VMM has gone", |fabric| {
            !fabric.lines()[0].report.up
        });
        let _another = Guest::connect(&host.socket());
        runs(&mut second);
    }
}

/// It costs itself: a VMM that waits for the next daemon is not hung up on for another VM's sake.
#[test]
fn a_line_that_cannot_be_opened_is_left_out_and_the_others_go_on() {
    let host = Host::new();
    let mut first = host.fabric();
    let guest = Guest::connect(&host.socket());
    runs(&mut first.0);
    end(first, &[&guest]);
    let (mut fabric, keeper) = (fabric(), host.attach());
    fabric.set_keeper(keeper.clone()).unwrap();
    let poor = config_of(host.path(), "poor", 4);
    fs::write(&poor.vhost_user, "no socket").unwrap();
    let changed = fabric.change(device::Change {
        added: vec![NewLine::Rings(host.config()), NewLine::Rings(poor)],
        bound: device::Bound::default(),
        leaves_out: true,
        removed: Vec::new(),
        services: Vec::new(),
        policy: Arc::default(),
        groups: Vec::new(),
        aliases: Vec::new(),
        enforce_existing: false,
        commit: Box::new(|| ()),
    });
    let left_out = changed.unwrap().left_out;
    assert_eq!(left_out.len(), 1);
    assert_eq!(left_out[0].0, "poor");
    keeper.run();
    runs(&mut fabric);
    end((fabric, keeper), &[&guest]);
    guest.vmm.set_nonblocking(true).unwrap();
    let said = (&guest.vmm).read(&mut [0; 64]);
    assert_eq!(said.unwrap_err().kind(), ErrorKind::WouldBlock);
}
