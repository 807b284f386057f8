//! The vhost-user control protocol, with descriptors, from a VMM that says anything.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use guestmem::queue::QueueSetup;
use guestmem_driver::Arena;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::pipe::{PipeFlags, pipe_with};
use vsock::Limits;

use crate::Dice;
use crate::guest::Guest;
use crate::house::House;
use crate::vmm::{
    FEATURES, NEED_REPLY, PROTOCOL_FEATURES, VERSION, address_payload, message, quads, request,
    send_bytes, words,
};

/// Messages in one case, at most.
const MESSAGES: usize = 40;

const NAME: &str = "web";
const CID: u32 = 3;

/// How long the threads of a closed instance may take to end.
const PATIENCE: Duration = Duration::from_secs(30);

/// In bytes.
const ARENA_BYTES: usize = 64 * 1024;

/// A VMM says anything, hands over any descriptors, and goes away in the middle. Its line survives, and serves an honest VMM
/// afterwards; no descriptor and no mapping is left behind.
pub fn converse(input: &[u8]) {
    let before = (open_descriptors(), shared_mappings());
    {
        let mut dice = Dice::new(input);
        let mut house = House::new(&[(NAME, CID)], Limits::default());
        let stream = house.connect_vmm(NAME);
        house.until("the VMM is noticed", |house| house.line(NAME).attached);
        Liar::new(&stream).talk(&mut house, &mut dice);
        drop(stream);
        house.until("the VMM's end is noticed", |house| {
            !house.line(NAME).attached
        });
        house.check_empty();
        let guest = Guest::attach(&mut house, NAME, CID);
        drop(guest);
        house.until("the honest VMM's end is noticed", |house| {
            !house.line(NAME).attached
        });
        house.close();
    }
    // The thread of a closed line is not joined: it may still be about to end.
    let until = Instant::now() + PATIENCE;
    while (open_descriptors(), shared_mappings()) != before {
        assert!(
            Instant::now() < until,
            "descriptors or mappings are left behind"
        );
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// How many descriptors this process has open. The targets of this module have a process of their own.
fn open_descriptors() -> usize {
    let entries = std::fs::read_dir("/proc/self/fd").expect("there is /proc");
    entries.count()
}

/// How many mappings of memfds there are.
fn shared_mappings() -> usize {
    let maps = std::fs::read_to_string("/proc/self/maps").expect("there is /proc");
    maps.lines().filter(|line| line.contains("memfd:")).count()
}

struct Liar<'a> {
    stream: &'a UnixStream,
    arena: Arena,
    /// Things that a VMM can have open, of which few are what the device expects.
    descriptors: Vec<OwnedFd>,
    hung_up: bool,
}

impl<'a> Liar<'a> {
    fn new(stream: &'a UnixStream) -> Liar<'a> {
        let arena = Arena::new(ARENA_BYTES).expect("an arena");
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK);
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
        let short = memfd_create("short", MemfdFlags::CLOEXEC).expect("a memfd");
        rustix::fs::ftruncate(&short, 100).expect("it is fresh");
        let (near, _) = UnixStream::pair().expect("a pair of sockets");
        let null = File::open("/dev/null").expect("a null device");
        let directory = File::open("/").expect("a directory");
        let epoll = rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC);
        let descriptors = vec![
            event().expect("an eventfd"),
            event().expect("an eventfd"),
            arena.file().try_clone().expect("a descriptor").into(),
            short,
            writer,
            reader,
            near.into(),
            null.into(),
            directory.into(),
            epoll.expect("an epoll"),
        ];
        Liar {
            stream,
            arena,
            descriptors,
            hung_up: false,
        }
    }

    fn talk(&mut self, house: &mut House, dice: &mut Dice<'_>) {
        // Most requests want this to have been said.
        if !dice.one_in(8) {
            for (number, payload) in [
                (request::SET_OWNER, Vec::new()),
                (request::GET_FEATURES, Vec::new()),
                (request::SET_FEATURES, quads(&[FEATURES])),
                (request::GET_PROTOCOL_FEATURES, Vec::new()),
                (request::SET_PROTOCOL_FEATURES, quads(&[PROTOCOL_FEATURES])),
            ] {
                let bytes = message(number, VERSION, payload.len() as u32, &payload);
                self.send(house, &bytes, &[]);
            }
        }
        for _ in 0..MESSAGES {
            if dice.is_empty() || self.hung_up {
                return;
            }
            let (bytes, files) = self.any_message(dice);
            self.send(house, &bytes, &files);
            if dice.one_in(4) {
                house.turn();
            }
        }
    }

    /// Sends all of it, unless the device hangs up or takes no more.
    fn send(&mut self, house: &mut House, bytes: &[u8], files: &[usize]) {
        let mut rest = bytes;
        let mut files: Vec<BorrowedFd<'_>> = files
            .iter()
            .map(|index| self.descriptors[index % self.descriptors.len()].as_fd())
            .collect();
        for _ in 0..100 {
            if rest.is_empty() {
                break;
            }
            match send_bytes(self.stream, rest, &files) {
                Ok(sent) => {
                    rest = &rest[sent..];
                    files.clear();
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => house.turn(),
                Err(_) => {
                    self.hung_up = true;
                    return;
                }
            }
        }
        // What it answers is not checked, but must not stop it from answering.
        let mut answers = [0; 4096];
        let mut stream = self.stream;
        while stream.read(&mut answers).is_ok_and(|len| len > 0) {}
    }

    fn any_message(&self, dice: &mut Dice<'_>) -> (Vec<u8>, Vec<usize>) {
        let (number, payload, files) = self.any_request(dice);
        let flags = match dice.below(8) {
            0 => dice.double(),
            1..=4 => VERSION | NEED_REPLY,
            _ => VERSION,
        };
        let len = match dice.below(24) {
            0 => dice.edgy(),
            1 => payload.len() as u32 + 1,
            _ => payload.len() as u32,
        };
        let mut bytes = message(number, flags, len, &payload);
        if dice.one_in(32) {
            bytes.truncate(dice.below(bytes.len()));
        }
        (bytes, files)
    }

    /// Number, payload and files of a request.
    fn any_request(&self, dice: &mut Dice<'_>) -> (u32, Vec<u8>, Vec<usize>) {
        let index = dice.pick(&[0, 1, 2, 0, 1, 3, u32::MAX]);
        match dice.below(16) {
            0..=2 => self.memory_message(dice),
            3 => {
                let size = match dice.below(4) {
                    0 => dice.edgy(),
                    _ => 1 << dice.below(9),
                };
                (request::SET_VRING_NUM, words(&[index, size]), vec![])
            }
            4 | 5 => (
                request::SET_VRING_ADDR,
                self.any_addresses(index, dice),
                vec![],
            ),
            6 => (
                request::SET_VRING_BASE,
                words(&[index, dice.edgy() & 0x1_ffff]),
                vec![],
            ),
            7 => (request::GET_VRING_BASE, words(&[index, 0]), vec![]),
            8 | 9 => {
                let number = dice.pick(&[request::SET_VRING_KICK, request::SET_VRING_CALL]);
                // Bit 8 says that there is no descriptor.
                let no_descriptor = dice.one_in(8);
                let word = u64::from(index & 0xff) | u64::from(no_descriptor) << 8;
                let files = if no_descriptor {
                    vec![]
                } else {
                    vec![dice.pick(&[0, 1, 0, 1, 2, 4, 5, 6, 7, 8, 9])]
                };
                (number, quads(&[word]), files)
            }
            10 => (
                request::SET_VRING_ENABLE,
                words(&[index, dice.below(3) as u32]),
                vec![],
            ),
            11 => (
                request::SET_FEATURES,
                quads(&[FEATURES ^ dice.quad()]),
                vec![],
            ),
            12 => {
                let config = [
                    words(&[dice.edgy(), dice.edgy(), 0]),
                    vec![0; dice.below(16)],
                ];
                (request::GET_CONFIG, config.concat(), vec![])
            }
            13 => (request::RESET_DEVICE, vec![], vec![]),
            _ => {
                let number = dice.below(request::BEHIND_LAST as usize + 1) as u32;
                let len = dice.below(64);
                let payload = dice.take(len).to_vec();
                let files = (0..dice.below(12)).map(|_| dice.below(10)).collect();
                (number, payload, files)
            }
        }
    }

    /// Regions that are nearly right, or not at all.
    fn memory_message(&self, dice: &mut Dice<'_>) -> (u32, Vec<u8>, Vec<usize>) {
        let region = |dice: &mut Dice<'_>| {
            let page = 4096;
            let size = match dice.below(6) {
                0 => u64::from(dice.edgy()),
                1 => dice.quad(),
                _ => page * (1 + dice.below(17) as u64),
            };
            let guest_address = match dice.below(6) {
                0 => dice.quad(),
                _ => page * dice.below(64) as u64,
            };
            let offset = page * dice.pick(&[0, 0, 1, 15, 16]);
            let frontend_address = match dice.below(6) {
                0 => dice.quad(),
                _ => self.arena.base().wrapping_add(guest_address),
            };
            quads(&[guest_address, size, frontend_address, offset])
        };
        let file = |dice: &mut Dice<'_>| match dice.below(4) {
            0 => dice.below(10),
            _ => 2,
        };
        if dice.one_in(2) {
            let number = dice.pick(&[request::ADD_MEM_REG, request::REM_MEM_REG]);
            let payload = [vec![0; 8], region(dice)].concat();
            let files = if number == request::ADD_MEM_REG {
                vec![file(dice)]
            } else {
                vec![]
            };
            return (number, payload, files);
        }
        let count = dice.pick(&[1, 1, 2, 8, 0, 9]);
        let regions: Vec<u8> = (0..count).flat_map(|_| region(dice)).collect();
        let said = if dice.one_in(8) { dice.double() } else { count };
        let payload = [words(&[said, 0]), regions].concat();
        let files = (0..count).map(|_| file(dice)).collect();
        (request::SET_MEM_TABLE, payload, files)
    }

    fn any_addresses(&self, index: u32, dice: &mut Dice<'_>) -> Vec<u8> {
        let mut place = || match dice.below(6) {
            0 => dice.quad(),
            _ => self.arena.base() + 16 * dice.below(ARENA_BYTES / 16 + 2) as u64,
        };
        let setup = QueueSetup {
            size: 0,
            descriptors: place(),
            available: place(),
            used: place(),
            ring_base: 0,
            event_index: true,
            indirect: true,
            packed: false,
        };
        address_payload(index, &setup)
    }
}
