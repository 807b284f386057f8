//! A guest and its VMM, which do what Linux and QEMU do: the driver looks into a ring when it is interrupted, and notifies when it is asked to.

use std::collections::VecDeque;
use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use guestmem::guest::Range;
use guestmem_driver::{Arena, DriverQueue};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};
use rustix::io::Errno;
use rustix::net::SendFlags;
use wire::vsock::HEADER_LEN;

use crate::guest::{RX, TX, quads, request};

/// Where the guest sees its memory.
const BASE: u64 = 1 << 32;
/// Entries of each ring.
pub const RING: u16 = 64;
pub const PAYLOAD: usize = 6000;
const BUFFERS: usize = 40;
const BUFFER: usize = 4096;

/// Version 1; the protocol itself; event indices; indirect tables; packed rings.
const VERSION_1: u64 = 1 << 32;
const PROTOCOL: u64 = 1 << 30;
const EVENT_INDEX: u64 = 1 << 29;
const INDIRECT: u64 = 1 << 28;
const PACKED: u64 = 1 << 34;

#[derive(Debug, Clone, Copy)]
pub struct Options {
    pub event_index: bool,
    pub indirect: bool,
    pub packed: bool,
    /// Rings are enabled by messages.
    pub protocol: bool,
    /// Where the indices of the rings begin.
    pub index: u16,
    /// Packets that the guest may have on their way, of two descriptors at most.
    pub packets: usize,
}

/// What has become of the VMM's connection.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    Nothing,
    /// The device is reset, and set up again.
    Reset,
    /// The connection was closed.
    HungUp,
}

pub struct Station {
    pub cid: u32,
    socket: PathBuf,
    options: Options,
    running: Option<Running>,
    life: u64,
    /// In which daemon's life all that was said was answered.
    answered_in: Option<u64>,
    /// A daemon has gone on with it since: so there is no reason to hang up.
    is_at_peace: bool,
    /// Where the rings were when the daemon began.
    used_before: [u16; 2],
}

struct Running {
    vmm: UnixStream,
    arena: Arc<Arena>,
    queues: [DriverQueue; 2],
    kicks: [OwnedFd; 2],
    calls: [OwnedFd; 2],
    /// Places of packets and buffers, and which of them the device does not have.
    places: [Vec<usize>; 2],
    free: [Vec<usize>; 2],
    /// Answers about the rings' bases that are still to come: the guest waits for them.
    awaits: usize,
    /// Answers that are still to come to what was asked after the rings were set up, also before they were reset.
    asked: usize,
    answers: Vec<u8>,
    backlog: VecDeque<Vec<u8>>,
    /// The guest has made its device fail.
    has_failed: bool,
}

/// Waits a moment until a guest is interrupted.
pub fn is_interrupted(stations: &[Station]) -> bool {
    let calls = stations.iter().flat_map(Station::calls);
    let mut wanted: Vec<PollFd<'_>> = calls
        .map(|call| PollFd::from_borrowed_fd(call, PollFlags::IN))
        .collect();
    let moment = Timespec {
        tv_sec: 0,
        tv_nsec: 2_000_000,
    };
    poll(&mut wanted, Some(&moment)).is_ok_and(|ready| ready > 0)
}

fn queues(arena: &Arc<Arena>, options: Options) -> [DriverQueue; 2] {
    [RX, TX].map(|_| {
        let (events, indirect) = (options.event_index, options.indirect);
        let make = match options.packed {
            true => DriverQueue::packed,
            false => DriverQueue::new,
        };
        let mut queue = make(Arc::clone(arena), BASE, RING, events, indirect);
        queue.start_at(options.index);
        queue
    })
}

impl Station {
    pub fn new(cid: u32, socket: PathBuf, options: Options) -> Station {
        Station {
            cid,
            socket,
            options,
            running: None,
            life: 0,
            answered_in: None,
            is_at_peace: false,
            used_before: [0; 2],
        }
    }

    /// Whether its rings are set up, as far as it knows.
    pub fn runs(&self) -> bool {
        let running = self.running.as_ref();
        running.is_some_and(|running| running.awaits == 0 && !running.has_failed)
    }

    /// Another daemon is about to begin.
    pub fn begin_life(&mut self) {
        self.note_peace();
        self.life += 1;
        if let Some(running) = &self.running {
            self.used_before = running.used();
        }
    }

    pub fn is_at_peace(&self) -> bool {
        self.is_at_peace
    }

    /// Whether this daemon has given it something, and all that was said has been answered.
    pub fn is_served(&self) -> bool {
        let running = self.running.as_ref();
        let is_used = running.is_some_and(|running| running.used() != self.used_before);
        is_used && self.answered_in.is_some()
    }

    /// Whether a daemon goes on with it that has heard nothing, as all was answered by the one before.
    fn note_peace(&mut self) {
        let is_older = self.answered_in.is_some_and(|life| life < self.life);
        // A daemon that finds its rings so may hang up.
        let has_failed = self
            .running
            .as_ref()
            .is_some_and(|running| running.has_failed);
        self.is_at_peace |= is_older && self.is_served() && !has_failed;
    }

    /// Has a VMM connect, if nothing is connected and something listens.
    pub fn connect(&mut self) -> bool {
        if self.running.is_some() {
            return false;
        }
        let Ok(vmm) = UnixStream::connect(&self.socket) else {
            return false;
        };
        let arena = Arc::new(Arena::new(8 << 20).unwrap());
        let event = || eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
        let lens = [
            (BUFFERS, BUFFER),
            (self.options.packets, HEADER_LEN + PAYLOAD),
        ];
        let places = lens.map(|(count, len)| (0..count).map(|_| arena.allocate(len, 8)).collect());
        let mut running = Running {
            vmm,
            queues: queues(&arena, self.options),
            arena,
            kicks: [event(), event()],
            calls: [event(), event()],
            free: [(0..BUFFERS).collect(), (0..self.options.packets).collect()],
            places,
            awaits: 0,
            asked: 0,
            answers: Vec::new(),
            backlog: VecDeque::new(),
            has_failed: false,
        };
        // Otherwise the daemon is gone, and so is what was said.
        let is_there = running.introduce(self.options).is_ok();
        self.answered_in = None;
        self.is_at_peace = false;
        self.running = is_there.then_some(running);
        is_there
    }

    /// The guest resets its device: it waits until the VMM has stopped the rings, and sets up new ones.
    pub fn reset_device(&mut self) -> bool {
        let Some(running) = self.running.as_mut().filter(|running| running.awaits == 0) else {
            return false;
        };
        (running.awaits, self.answered_in) = (2, None);
        self.is_at_peace = false;
        for index in [RX as u64, TX as u64] {
            let _ = running.say(request::GET_VRING_BASE, &quads(&[index]), &[]);
        }
        true
    }

    /// The driver makes available what is not in its memory. Returns whether it did.
    pub fn misbehave(&mut self, index: usize) -> bool {
        if !self.runs() {
            return false;
        }
        let Some(running) = &mut self.running else {
            return false;
        };
        let nowhere = Range { address: 0, len: 1 };
        if running.queues[index].add(&[nowhere], &[], 0).is_err() {
            return false;
        }
        running.queues[index].kick_needed();
        running.kick(index);
        running.has_failed = true;
        self.is_at_peace = false;
        true
    }

    /// Whether its device has failed, and it has yet to reset it.
    pub fn has_failed(&self) -> bool {
        let running = self.running.as_ref();
        running.is_some_and(|running| running.has_failed && running.awaits == 0)
    }

    /// Hears what the VMM is answered, in a scene of which these words tell.
    pub fn hear(&mut self, words: &str) -> Heard {
        self.note_peace();
        let Some(running) = &mut self.running else {
            return Heard::Nothing;
        };
        running.vmm.set_nonblocking(true).unwrap();
        let mut bytes = [0; 64];
        let read = (&running.vmm).read(&mut bytes);
        running.vmm.set_nonblocking(false).unwrap();
        match read {
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Heard::Nothing,
            Ok(0) | Err(_) => {
                let cid = self.cid;
                assert!(
                    !self.is_at_peace,
                    "{words}: {cid} is hung up on for nothing"
                );
                self.running = None;
                return Heard::HungUp;
            }
            Ok(len) => running.answers.extend(&bytes[..len]),
        }
        let mut is_reset = false;
        // Header, number of the ring, where it would go on.
        while running.answers.len() >= 20 {
            match running.answers[0] {
                code if u32::from(code) == request::GET_FEATURES => {
                    running.asked -= 1;
                    if running.asked + running.awaits == 0 {
                        self.answered_in = Some(self.life);
                    }
                }
                _ => {
                    running.awaits -= 1;
                    is_reset = running.awaits == 0;
                }
            }
            running.answers.drain(..20);
        }
        if !is_reset {
            return Heard::Nothing;
        }
        let options = Options {
            index: 0,
            ..self.options
        };
        running.queues = queues(&running.arena, options);
        running.free = [(0..BUFFERS).collect(), (0..options.packets).collect()];
        running.backlog.clear();
        running.has_failed = false;
        let _ = running.set_up(options);
        Heard::Reset
    }

    /// Sends a header without payload, as soon as there is room.
    pub fn send_later(&mut self, header: &[u8]) {
        if let Some(running) = &mut self.running {
            running.backlog.push_back(header.to_vec());
        }
    }

    /// Whether data may be sent now.
    pub fn has_room(&self) -> bool {
        let running = self.running.as_ref().filter(|_| self.runs());
        running.is_some_and(|running| running.backlog.is_empty() && running.free[TX].len() > 3)
    }

    /// Whether the device has none of its packets.
    pub fn has_all_packets(&self) -> bool {
        let running = self.running.as_ref();
        running.is_some_and(|running| running.free[TX].len() == self.options.packets)
    }

    pub fn send(&mut self, header: &[u8], payload: &[u8]) {
        if let Some(running) = &mut self.running {
            running.send(header, payload);
        }
    }

    /// Gives the device up to so many buffers.
    pub fn offer(&mut self, count: usize) {
        if !self.runs() {
            return;
        }
        let Some(running) = &mut self.running else {
            return;
        };
        for _ in 0..count {
            let Some(slot) = running.free[RX].pop() else {
                break;
            };
            // Some are short.
            let len = [BUFFER, 700][slot % 2] as u32;
            let address = BASE + running.places[RX][slot] as u64;
            let buffer = Range { address, len };
            let added = running.queues[RX].add(&[], &[buffer], slot as u64);
            added.unwrap();
        }
        running.notify(RX);
    }

    /// What the device has given since it interrupted the guest last, buffer by buffer; and what waited is sent.
    pub fn service(&mut self) -> Vec<Vec<u8>> {
        let mut received = Vec::new();
        if !self.runs() {
            return received;
        }
        let Some(running) = &mut self.running else {
            return received;
        };
        for index in [TX, RX] {
            if !is_signalled(&running.calls[index]) {
                continue;
            }
            running.queues[index].disable_interrupts();
            loop {
                while let Some((slot, written)) = running.queues[index].take_used() {
                    running.free[index].push(slot as usize);
                    if index == RX {
                        received.push(running.read(slot as usize, written as usize));
                    }
                }
                if !running.queues[index].enable_interrupts() {
                    break;
                }
            }
        }
        while !running.free[TX].is_empty() {
            let Some(header) = running.backlog.pop_front() else {
                break;
            };
            running.send(&header, &[]);
        }
        received
    }

    /// What an interrupt is seen by.
    fn calls(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        let running = self.running.iter().filter(|_| self.runs());
        let calls = running.flat_map(|running| &running.calls);
        calls.map(AsFd::as_fd)
    }
}

impl Running {
    fn say(
        &self,
        request: u32,
        payload: &[u8],
        descriptors: &[BorrowedFd<'_>],
    ) -> Result<(), Errno> {
        let mut bytes = [request, 1, payload.len() as u32]
            .map(u32::to_le_bytes)
            .concat();
        bytes.extend_from_slice(payload);
        let sent = sys::descriptors::send(&self.vmm, &bytes, descriptors, SendFlags::NOSIGNAL);
        sent.map(|_| ())
    }

    fn introduce(&mut self, options: Options) -> Result<(), Errno> {
        let offered = [
            (PROTOCOL, options.protocol),
            (EVENT_INDEX, options.event_index),
            (INDIRECT, options.indirect),
            (PACKED, options.packed),
        ];
        let agreed = offered.iter().filter(|(_, is_wanted)| *is_wanted);
        let features = agreed.fold(VERSION_1, |features, (bit, _)| features | bit);
        self.say(request::SET_OWNER, &[], &[])?;
        self.say(request::SET_FEATURES, &quads(&[features]), &[])?;
        let region = self.arena.region(BASE).unwrap();
        let table = quads(&[1, BASE, region.size, region.frontend_address, 0]);
        self.say(request::SET_MEM_TABLE, &table, &[region.file.as_fd()])?;
        self.set_up(options)
    }

    fn set_up(&mut self, options: Options) -> Result<(), Errno> {
        for index in [RX, TX] {
            let setup = self.queues[index].setup();
            let number = |value: u64| quads(&[index as u64 | value << 32]);
            self.say(request::SET_VRING_NUM, &number(RING.into()), &[])?;
            let places = [setup.descriptors, setup.used, setup.available, 0];
            let places = [number(0), quads(&places)].concat();
            self.say(request::SET_VRING_ADDR, &places, &[])?;
            let base = number(setup.ring_base.into());
            self.say(request::SET_VRING_BASE, &base, &[])?;
            let kick = [self.kicks[index].as_fd()];
            self.say(request::SET_VRING_KICK, &number(0), &kick)?;
            let call = [self.calls[index].as_fd()];
            self.say(request::SET_VRING_CALL, &number(0), &call)?;
            if options.protocol {
                self.say(request::SET_VRING_ENABLE, &number(1), &[])?;
            }
        }
        self.asked += 1;
        self.say(request::GET_FEATURES, &[], &[])
    }

    fn send(&mut self, header: &[u8], payload: &[u8]) {
        let slot = self.free[TX].pop().unwrap();
        let place = self.places[TX][slot];
        self.arena.write(place, header);
        self.arena.write(place + header.len(), payload);
        let address = BASE + place as u64;
        let len = header.len() as u32;
        let parts = [
            Range { address, len },
            Range {
                address: address + u64::from(len),
                len: payload.len() as u32,
            },
        ];
        let parts = &parts[..1 + usize::from(!payload.is_empty())];
        let added = self.queues[TX].add(parts, &[], slot as u64);
        added.unwrap();
        self.notify(TX);
    }

    fn read(&self, slot: usize, written: usize) -> Vec<u8> {
        let mut bytes = vec![0; written];
        self.arena.read(self.places[RX][slot], &mut bytes);
        bytes
    }

    fn used(&self) -> [u16; 2] {
        [RX, TX].map(|index| self.queues[index].used_index())
    }

    fn notify(&mut self, index: usize) {
        if self.queues[index].kick_needed() {
            self.kick(index);
        }
    }

    fn kick(&self, index: usize) {
        rustix::io::write(&self.kicks[index], &1u64.to_ne_bytes()).unwrap();
    }
}

fn is_signalled(event: &OwnedFd) -> bool {
    rustix::io::read(event, &mut [0; 8]).is_ok()
}
