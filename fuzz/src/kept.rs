//! What a daemon has kept for the next one, changed in any way.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;

use guestmem::journal::{Journal, MAX_RECORD_BYTES};
use keeper::{Holder, Item, Keeper, KeeperError};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use tempfile::TempDir;
use vsock::Limits;
use wire::vsock::{Header, Operation, SocketType};

use crate::Dice;
use crate::guest::Guest;
use crate::house::House;

/// Things that are changed in one case, at most.
const CHANGES: usize = 4;

/// Whose line is changed, and two guests whose lines are not.
const WEB: usize = 0;
const DB: usize = 1;
const BOX: usize = 2;

/// Bytes of a packet, and packets before the daemon ends: more than the receiver has room for.
const PACKET: usize = 1000;
const PACKETS: usize = 6;

/// Where a journal says how many records it has room for, and how many are in use.
const RECORDS_AT: u64 = 8;
const WRITTEN_AT: u64 = 16;
/// Where a journal's records begin, and the length of one with both its places, in bytes.
const FIRST_AT: u64 = 4096;
const RECORD_BYTES: u64 = 640;

/// No two threads of VMMs have the same name.
static CASES: AtomicU32 = AtomicU32::new(0);

/// A daemon ends, and what it has kept of one line, or of circuits, is changed before the next one starts. That one does not fail. Where
/// only things of that line were changed, the circuit between two others goes on: no byte is lost, none comes twice. After that every line serves a fresh guest.
pub fn go_on(input: &[u8]) {
    let mut dice = Dice::new(input);
    let case = CASES.fetch_add(1, Ordering::Relaxed) % 100_000;
    let names = ["a", "b", "c"].map(|letter| format!("{letter}{case}"));
    let vms = [WEB, DB, BOX].map(|index| (names[index].as_str(), 3 + index as u32));
    let directory = Arc::new(tempfile::tempdir().expect("a directory for sockets"));
    let path = directory.path().join("keeper");
    let holder = Holder::listen(&path).expect("a keeper");
    let holder = thread::spawn(move || holder.run());

    let mut scene = Scene::new(&vms, &directory, &path);
    scene.talk();
    scene.end(&vms);
    let keeper = attach(&path);
    let is_of_line = Kept::change(&keeper, &mut dice, vms[WEB].0);
    drop(keeper);
    scene.go_on(&vms, &directory, &path, is_of_line);

    while let Err(error) = keeper::release(&path) {
        // The last daemon is gone, and the keeper has yet to see it.
        assert!(matches!(error, KeeperError::InUse { .. }), "{error}");
        thread::yield_now();
    }
    let ended = holder.join().expect("the keeper does not panic");
    ended.expect("it was released");
}

/// Attaches, once the keeper has seen that the daemon before is gone.
fn attach(path: &Path) -> Arc<Keeper> {
    loop {
        match Keeper::attach(path) {
            Err(KeeperError::Busy { .. }) => thread::yield_now(),
            attached => return Arc::new(attached.expect("the keeper answers")),
        }
    }
}

/// A daemon, and guests.
struct Scene {
    daemon: Option<(House, Arc<Keeper>)>,
    guests: [Guest; 3],
    /// Bytes that came to a guest from another, by both.
    received: BTreeMap<(usize, usize), Vec<u8>>,
}

fn byte(from: usize, place: usize) -> u8 {
    (place * 7 + from * 91) as u8 ^ (place >> 8) as u8
}

fn header(from: usize, to: usize, operation: Operation, len: usize) -> Header {
    let port = |index: usize| if from.min(to) == index { 1000 } else { 80 };
    Header {
        src_cid: 3 + from as u64,
        dst_cid: 3 + to as u64,
        src_port: port(from),
        dst_port: port(to),
        len: len as u32,
        socket_type: SocketType::Stream as u16,
        operation: operation as u16,
        flags: 0,
        buf_alloc: 262_144,
        fwd_cnt: 0,
    }
}

impl Scene {
    fn new(vms: &[(&str, u32)], directory: &Arc<TempDir>, path: &Path) -> Scene {
        let keeper = attach(path);
        let mut house = House::kept(vms, directory, &keeper).expect("nothing is kept yet");
        let guests =
            [WEB, DB, BOX].map(|index| Guest::attach(&mut house, vms[index].0, vms[index].1));
        Scene {
            daemon: Some((house, keeper)),
            guests,
            received: BTreeMap::new(),
        }
    }

    /// Circuits are set up, and more is sent by them than the receivers have room for.
    fn talk(&mut self) {
        for (from, to) in [(WEB, DB), (DB, BOX)] {
            let call = header(from, to, Operation::Request, 0);
            assert!(self.guests[from].send(&call, &[], &[]));
            self.next(to, from, Operation::Request);
            let answer = header(to, from, Operation::Response, 0);
            assert!(self.guests[to].send(&answer, &[], &[]));
            self.next(from, to, Operation::Response);
            self.send(from, to, 0);
            self.next(to, from, Operation::Data);
        }
    }

    /// Sends [`PACKETS`] packets, of which the first begins at this place of the stream.
    fn send(&mut self, from: usize, to: usize, place: usize) {
        for start in (0..PACKETS).map(|number| place + number * PACKET) {
            let bytes: Vec<u8> = (start..start + PACKET)
                .map(|place| byte(from, place))
                .collect();
            let header = header(from, to, Operation::Data, PACKET);
            assert!(self.guests[from].send(&header, &bytes, &[]));
        }
    }

    /// Takes what comes, a buffer at a time, until there is such a packet from that guest.
    fn next(&mut self, at: usize, from: usize, operation: Operation) {
        let guest = &mut self.guests[at];
        let received = &mut self.received;
        guest.post(PACKET + 100, &[]);
        let (house, _) = self.daemon.as_mut().expect("a daemon");
        house.until("a packet comes", |_| {
            let Some((header, payload)) = guest.receive() else {
                return false;
            };
            let peer = (header.src_cid as usize).wrapping_sub(3);
            received.entry((peer, at)).or_default().extend(payload);
            let is_it = (peer, header.operation) == (from, operation as u16);
            if !is_it {
                guest.post(PACKET + 100, &[]);
            }
            is_it
        });
    }

    /// The daemon ends as a killed process does, when all that VMMs have said is kept.
    fn end(&mut self, vms: &[(&str, u32)]) {
        for (name, _) in vms {
            while !waits_for_a_message(&format!("vhost-{name}")) {
                thread::yield_now();
            }
        }
        let (house, keeper) = self.daemon.take().expect("a daemon");
        keeper.leave();
        drop(house);
    }

    /// Another daemon goes on, and ends.
    fn go_on(
        mut self,
        vms: &[(&str, u32)],
        directory: &Arc<TempDir>,
        path: &Path,
        is_of_line: bool,
    ) {
        let keeper = attach(path);
        let house = match House::kept(vms, directory, &keeper) {
            Ok(house) => house,
            // As if a later version had written it.
            Err(error) => {
                assert!(!is_of_line, "{error}");
                return;
            }
        };
        self.daemon = Some((house, keeper));
        if is_of_line {
            self.finish(vms);
        }
        let (mut house, _keeper) = self.daemon.take().expect("a daemon");
        house.settle();
        for (name, _) in vms {
            // A thread that was left another descriptor may wait for ever.
            house.fabric.close_line(name);
        }
        // Their sockets are removed beside this thread. It ends when all are.
        let _ = house.fabric.all_done().recv();
        drop(self.guests);
        house.settle();
        for (name, cid) in vms {
            house.open_line(name, *cid, Limits::default());
            drop(Guest::attach(&mut house, name, *cid));
        }
        house.until("the VMMs are gone", |house| {
            house.fabric.lines().iter().all(|line| !line.attached)
        });
        house.check_empty();
        house.close();
    }

    /// What was sent between guests whose lines were not changed arrives, and more.
    fn finish(&mut self, vms: &[(&str, u32)]) {
        let (house, _) = self.daemon.as_mut().expect("a daemon");
        house.until("the others go on", |house| {
            let mut others = [DB, BOX].iter().map(|index| house.line(vms[*index].0));
            others.all(|line| line.report.up && line.last_fault.is_none())
        });
        for _ in 1..PACKETS {
            self.next(BOX, DB, Operation::Data);
        }
        self.send(DB, BOX, PACKETS * PACKET);
        self.send(BOX, DB, 0);
        for _ in 0..PACKETS {
            self.next(BOX, DB, Operation::Data);
            self.next(DB, BOX, Operation::Data);
        }
        for ((from, to), expected) in [
            ((DB, BOX), 2 * PACKETS * PACKET),
            ((BOX, DB), PACKETS * PACKET),
        ] {
            let sent: Vec<u8> = (0..expected).map(|place| byte(from, place)).collect();
            assert!(self.received[&(from, to)] == sent, "{from} to {to}");
        }
    }
}

/// Whether the thread of this name has carried out all that its VMM has said.
fn waits_for_a_message(thread: &str) -> bool {
    let read = |task: &Path, file| fs::read_to_string(task.join(file)).unwrap_or_default();
    let tasks = fs::read_dir("/proc/self/task").expect("the threads of this process");
    let mut tasks = tasks.filter_map(|task| Some(task.ok()?.path()));
    let found = tasks.find(|task| read(task, "comm").trim_end() == thread);
    let call = found.map(|task| read(&task, "syscall")).unwrap_or_default();
    // poll and ppoll.
    call.starts_with("7 ") || call.starts_with("271 ")
}

/// What is kept, by its keys.
struct Kept(BTreeMap<String, Item>);

impl Kept {
    /// Changes something, and says whether all of it is this line's own.
    fn change(keeper: &Keeper, dice: &mut Dice<'_>, name: &str) -> bool {
        let mut kept = Kept(BTreeMap::new());
        let keys = keeper.untaken();
        let is_vmm = |key: &&String| key.starts_with("vmm:") && key.contains(name);
        let vmm = keys.iter().find(is_vmm).expect("it is kept");
        let mut is_of_line = true;
        for _ in 0..1 + dice.below(CHANGES) {
            match dice.below(6) {
                0 | 1 => change_text(&mut kept.item(keeper, vmm).value, dice),
                2 => change_descriptors(&mut kept.item(keeper, vmm).descriptors, dice),
                3 => {
                    let ledger = kept.item(keeper, vmm).descriptors.get(1);
                    change_file(ledger, dice);
                }
                4 => {
                    is_of_line = false;
                    change_record(&kept.item(keeper, "journal").descriptors[0], dice);
                }
                _ => {
                    is_of_line = false;
                    change_journal(&kept.item(keeper, "journal").descriptors[0], dice);
                }
            }
        }
        for (key, item) in &kept.0 {
            let descriptors: Vec<_> = item.descriptors.iter().map(AsFd::as_fd).collect();
            let put = keeper.put(key, &item.value, &descriptors);
            put.expect("the keeper takes it");
        }
        is_of_line
    }

    fn item(&mut self, keeper: &Keeper, key: &str) -> &mut Item {
        let item = || keeper.take(key).expect("it is kept");
        self.0.entry(key.to_owned()).or_insert_with(item)
    }
}

/// A number of a text is another one, or a byte is; or it ends early, or is another text.
fn change_text(text: &mut Vec<u8>, dice: &mut Dice<'_>) {
    let is_digit = |place: &usize| text[*place].is_ascii_digit();
    let digits: Vec<usize> = (0..text.len()).filter(is_digit).collect();
    match dice.below(6) {
        0..=2 if !digits.is_empty() => {
            let start = dice.pick(&digits);
            let end = (start..text.len()).find(|place| !text[*place].is_ascii_digit());
            let number = match dice.one_in(3) {
                true => u64::from(dice.edgy()),
                false => u64::MAX >> dice.below(64),
            };
            let number = number.to_string().into_bytes();
            text.splice(start..end.unwrap_or(text.len()), number);
        }
        3 => text.truncate(dice.below(text.len() + 1)),
        4 => *text = dice.take(64).to_vec(),
        _ if text.is_empty() => {}
        _ => {
            let place = dice.below(text.len());
            text[place] = dice.byte();
        }
    }
}

/// One is missing, comes twice, is another's place, or is something else.
fn change_descriptors(descriptors: &mut Vec<OwnedFd>, dice: &mut Dice<'_>) {
    if descriptors.is_empty() {
        return;
    }
    let [first, second] = [0, 1].map(|_| dice.below(descriptors.len()));
    match dice.below(5) {
        0 => drop(descriptors.remove(first)),
        1 => descriptors.swap(first, second),
        2 => {
            let copy = descriptors[first].try_clone();
            descriptors[second] = copy.expect("a descriptor");
        }
        3 => {
            let other = memfd_create("other", MemfdFlags::CLOEXEC).expect("a file");
            let len = u64::from(dice.word()) * 64;
            File::from(other.try_clone().expect("a descriptor"))
                .set_len(len)
                .expect("room");
            descriptors[first] = other;
        }
        _ => descriptors[first] = eventfd(0, EventfdFlags::NONBLOCK).expect("an eventfd"),
    }
}

/// Some bytes of a file are others, if it is one.
fn change_file(file: Option<&OwnedFd>, dice: &mut Dice<'_>) {
    let Some(copy) = file.and_then(|file| file.try_clone().ok()) else {
        return;
    };
    let file = File::from(copy);
    let len = file.metadata().map_or(0, |metadata| metadata.len());
    if len > 0 {
        let at = dice.double() as usize % len as usize;
        let bytes = dice.take(8);
        // Where it is none, nothing happens.
        let _ = file.write_all_at(&bytes[..bytes.len().min(len as usize - at)], at as u64);
    }
}

/// A record of a line or a circuit is another one, as if it had been written so.
fn change_record(file: &OwnedFd, dice: &mut Dice<'_>) {
    let file = File::from(file.try_clone().expect("a descriptor"));
    let mut records = [0; 8];
    if file.read_exact_at(&mut records, RECORDS_AT).is_err() {
        return;
    }
    let Ok(mut journal) = Journal::open(file, u64::from_le_bytes(records) as usize) else {
        return;
    };
    // Far behind what is written there are too many to check in each case.
    let index = dice.below(journal.written() + 4);
    let mut bytes = journal.read(index).unwrap_or_default();
    match dice.below(4) {
        0 => bytes.truncate(dice.below(bytes.len() + 1)),
        1 => bytes = dice.take(MAX_RECORD_BYTES).to_vec(),
        _ => {
            for _ in 0..1 + dice.below(4) {
                let place = dice.below(bytes.len().max(1));
                if let Some(byte) = bytes.get_mut(place) {
                    *byte = dice.byte();
                }
            }
        }
    }
    journal.write(index, &bytes);
    journal.commit();
}

/// Bytes of the journal's file are others, or it ends early.
fn change_journal(file: &OwnedFd, dice: &mut Dice<'_>) {
    let file = File::from(file.try_clone().expect("a descriptor"));
    match dice.below(4) {
        0 => {
            let len = dice.pick(&[0, 8, FIRST_AT - 1, FIRST_AT, FIRST_AT + RECORD_BYTES]);
            file.set_len(len).expect("a shorter file");
        }
        1 => {
            let written = u64::from(dice.byte());
            let written = file.write_all_at(&written.to_le_bytes(), WRITTEN_AT);
            written.expect("room");
        }
        2 => {
            let at = dice.pick(&[0, 7, RECORDS_AT, 24]);
            file.write_all_at(&[dice.byte()], at).expect("room");
        }
        _ => {
            let at = FIRST_AT + dice.below(16 * RECORD_BYTES as usize) as u64;
            file.write_all_at(dice.take(8), at).expect("room");
        }
    }
}
