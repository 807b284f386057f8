//! A lean guest: Linux's driver and sockets, as few instructions as can be, and programs on them.
//!
//! # Theory of operation
//!
//! One thread is the guest's only virtual processor. It takes what the device has put into the ring, then lets each program that
//! can do something do one call's worth of it, in turn, and when nothing can be done it halts: it blocks on the event counter
//! that the device's interrupts go to. What a packet costs here is what a guest must do, too: the copy between the program's
//! buffer and the packet's memory, the descriptors, and the bookkeeping of credit.
//!
//! The rules are Linux 6.12's: interrupts are off while a batch of packets is taken; the receive ring is filled when half of it is
//! empty; a packet is published as soon as it is made and the device kicked if it asked for that; room is announced
//! after a read that leaves the queue empty, or when the peer knows of less than 64 KiB
//! (`virtio_transport_stream_do_dequeue`). Credit is never asked for.

mod program;
mod stream;

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;

use guestmem_driver::Arena;
use hdrhistogram::Histogram;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use slab::Slab;
use wire::vsock::{Header, Operation, SocketType};

use super::control::Control;
use super::pattern::Pattern;
use super::ring::{GUEST_BASE, ReceiveRing, TransmitLayout, TransmitRing};
use crate::frontend::{
    FEATURE_EVENT_INDEX, FEATURE_INDIRECT, FEATURE_PROTOCOL, FEATURE_STREAM, FEATURE_VERSION_1, RX,
    TX, Vmm,
};

pub use program::Role;

use self::stream::{Key, Stream};

/// Each socket's receive buffer, in bytes: Linux's default.
const BUFFER_BYTES: u32 = 256 * 1024;

/// Length of a receive buffer in bytes, of Linux from 6.3 to 6.16: a header and 4 KiB of payload.
pub const LINUX_6_12_BUFFER_LEN: u32 = 4096 + wire::vsock::HEADER_LEN as u32;

/// Length of a receive buffer in bytes, of Linux since 6.17: what is left of a page beside what the kernel keeps in it.
pub const LINUX_6_17_BUFFER_LEN: u32 = 4096 - 320;

/// Answers that may wait for room in the transmit ring before no more packets are read, as in Linux.
const MAX_QUEUED: usize = 128;

/// The first port that a guest dials from.
const FIRST_LOCAL_PORT: u32 = 50_000;

/// The port of the first stream of a case; the others follow.
pub const FIRST_PORT: u32 = 7000;

/// What becomes of payload in the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Payload {
    /// Copied between the program's buffer and the packet's memory, as a system call does.
    #[default]
    Copied,
    /// Neither written nor read: the guest costs next to nothing.
    Untouched,
    /// Written with a pattern and compared with it.
    Checked,
}

/// How a guest is made.
#[derive(Debug, Clone)]
pub struct GuestOptions {
    /// What becomes of payload.
    pub payload: Payload,
    /// How packets to the device lie in memory.
    pub layout: TransmitLayout,
    /// Length of each receive buffer with the header, in bytes.
    pub buffer_len: u32,
    /// Length of the programs' messages, in bytes.
    pub message_len: usize,
    /// Memory of the guest, in bytes. What is not touched costs nothing.
    pub memory_bytes: usize,
}

impl GuestOptions {
    /// Linux 6.12 with programs whose messages have this length.
    pub fn new(message_len: usize) -> GuestOptions {
        GuestOptions {
            payload: Payload::Copied,
            layout: TransmitLayout::Linear,
            buffer_len: LINUX_6_12_BUFFER_LEN,
            message_len,
            memory_bytes: 64 << 20,
        }
    }
}

/// A guest.
pub struct Guest {
    options: GuestOptions,
    /// Held for the connection: its end is the guest's.
    vmm: Vmm,
    cid: u64,
    receive: ReceiveRing,
    transmit: TransmitRing,
    /// The event counter of the interrupts of both rings.
    call: Arc<OwnedFd>,
    streams: Slab<Stream>,
    by_key: HashMap<Key, usize>,
    listeners: HashMap<u32, Role>,
    next_local_port: u32,
    accepted: usize,
    /// Dials that are still to be made, each when an earlier one has been answered.
    dials_left: usize,
    /// Streams whose program can do something.
    runnable: VecDeque<usize>,
    /// Streams that found the transmit ring full.
    waiting_for_room: Vec<usize>,
    /// Packets without payload that found the transmit ring full.
    queued: VecDeque<Header>,
    /// The programs' buffers; streams beyond the last share them.
    user_buffers: Vec<Vec<u8>>,
    pattern: Pattern,
    control: Arc<Control>,
    number: usize,
    /// Round trips, or times to connect, in nanoseconds.
    latencies: Histogram<u64>,
    packets_in: u64,
    packets_out: u64,
    interrupts: u64,
}

impl Guest {
    /// Attaches a guest to the line whose vhost-user socket is at `path`. Its driver is ready when this returns.
    ///
    /// # Errors
    /// In words, when the device cannot be driven.
    pub fn attach(
        path: &Path,
        options: GuestOptions,
        control: &Arc<Control>,
        number: usize,
    ) -> Result<Guest, String> {
        let words = |error: &dyn std::fmt::Display| format!("attaching a guest: {error}");
        let arena = Arc::new(Arena::new(options.memory_bytes).map_err(|error| words(&error))?);
        let mut vmm = Vmm::connect(path).map_err(|error| words(&error))?;
        let features = vmm.offered_features()
            & (FEATURE_STREAM
                | FEATURE_INDIRECT
                | FEATURE_EVENT_INDEX
                | FEATURE_PROTOCOL
                | FEATURE_VERSION_1);
        let event_index = features & FEATURE_EVENT_INDEX != 0;
        let indirect = features & FEATURE_INDIRECT != 0;
        let receive = ReceiveRing::new(&arena, options.buffer_len, event_index)
            .map_err(|error| words(&error))?;
        let transmit = TransmitRing::new(&arena, options.layout, event_index, indirect)
            .map_err(|error| words(&error))?;
        let call = eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)
            .map_err(|error| words(&error))?;
        let region = arena.region(GUEST_BASE).map_err(|error| words(&error))?;
        vmm.set_features(features).map_err(|error| words(&error))?;
        vmm.set_memory(&[region]).map_err(|error| words(&error))?;
        vmm.start_ring(RX, &receive.setup(), receive.kick_descriptor(), &call)
            .and_then(|()| vmm.start_ring(TX, &transmit.setup(), transmit.kick_descriptor(), &call))
            .map_err(|error| words(&error))?;
        let waker = call.as_fd().try_clone_to_owned();
        control.wake_event(waker.map_err(|error| words(&error))?);
        Ok(Guest {
            cid: vmm.cid(),
            vmm,
            receive,
            transmit,
            call: Arc::new(call),
            streams: Slab::new(),
            by_key: HashMap::new(),
            listeners: HashMap::new(),
            next_local_port: FIRST_LOCAL_PORT,
            accepted: 0,
            dials_left: 0,
            runnable: VecDeque::new(),
            waiting_for_room: Vec::new(),
            queued: VecDeque::new(),
            user_buffers: Vec::new(),
            pattern: Pattern::default(),
            control: Arc::clone(control),
            number,
            latencies: super::latency::histogram(),
            packets_in: 0,
            packets_out: 0,
            interrupts: 0,
            options,
        })
    }

    /// The device's features that a guest was offered.
    pub fn offered_features(&self) -> u64 {
        self.vmm.offered_features()
    }

    /// Runs until the measurement ends. Returns the latencies in nanoseconds.
    pub fn run(mut self) -> Histogram<u64> {
        while !self.control.stopped() {
            self.step();
        }
        self.latencies
    }

    /// Runs until something is so, which is checked after every interrupt, or the measurement ends.
    pub fn run_until(&mut self, done: impl Fn() -> bool) {
        while !self.control.stopped() && !done() {
            self.step();
        }
    }

    fn step(&mut self) {
        let arrived = self.take_arrived();
        if self.transmit.has_completed() {
            self.reclaim();
        }
        let ran = self.run_programs();
        self.tell_meters();
        if !arrived && !ran && !self.receive.has_arrived() && !self.transmit.has_completed() {
            self.halt();
        }
    }

    /// Waits for an interrupt. Both rings have interrupts on.
    ///
    /// The device may have made the counter one that does not block: it is the same one for both sides.
    fn halt(&mut self) {
        let mut wanted = [PollFd::new(&*self.call, PollFlags::IN)];
        // Whatever ends it, the rings are polled next.
        let _ = poll(&mut wanted, None);
        let mut count = [0; 8];
        if rustix::io::read(&self.call, &mut count).is_ok() {
            self.interrupts += u64::from_ne_bytes(count);
        }
    }

    fn tell_meters(&self) {
        let meters = &self.control.drivers[self.number];
        meters
            .kicks
            .set(self.receive.kicks() + self.transmit.kicks());
        meters.interrupts.set(self.interrupts);
        meters.packets_in.set(self.packets_in);
        meters.packets_out.set(self.packets_out);
    }

    /// Takes back what was sent, and wakes those that waited for room.
    fn reclaim(&mut self) {
        self.transmit.reclaim();
        while self.transmit.has_room() {
            let Some(header) = self.queued.pop_front() else {
                break;
            };
            self.push(&header);
        }
        if self.transmit.has_room() {
            for index in std::mem::take(&mut self.waiting_for_room) {
                self.wake(index);
            }
        }
    }

    /// Linux's `virtio_transport_rx_work`.
    fn take_arrived(&mut self) -> bool {
        if !self.receive.has_arrived() {
            return false;
        }
        self.receive.disable_interrupts();
        loop {
            while self.queued.len() < MAX_QUEUED {
                let Some(arrived) = self.receive.take() else {
                    break;
                };
                self.packets_in += 1;
                if arrived.len > self.options.buffer_len {
                    self.control.fail(format!(
                        "{} bytes are said to have been written into a buffer of {}",
                        arrived.len, self.options.buffer_len
                    ));
                }
                let header = self.receive.header(arrived.buffer);
                if arrived.len < wire::vsock::HEADER_LEN as u32 + header.len {
                    self.control.fail(format!(
                        "{} bytes came with a header that says {}",
                        arrived.len, header.len
                    ));
                }
                self.received(&header, arrived.buffer);
            }
            self.receive.fill_if_low();
            if !self.receive.enable_interrupts() || self.queued.len() >= MAX_QUEUED {
                return true;
            }
        }
    }

    fn received(&mut self, header: &Header, buffer: u32) {
        let key = Key {
            local_port: header.dst_port,
            peer_cid: header.src_cid as u32,
            peer_port: header.src_port,
        };
        let operation = Operation::from_wire(header.operation);
        let Some(index) = self.by_key.get(&key).copied() else {
            self.receive.release(buffer);
            match operation {
                Some(Operation::Request) => self.dialled(key, header),
                Some(Operation::Reset) | None => {}
                Some(_) => self.refuse(header),
            }
            return;
        };
        let stream = &mut self.streams[index];
        stream.learn(header);
        if operation == Some(Operation::Data) && header.len > 0 {
            stream.store(buffer, header.len);
            return self.wake(index);
        }
        self.receive.release(buffer);
        match operation {
            Some(Operation::Response) => self.connected(index),
            Some(Operation::CreditUpdate) => self.wake(index),
            Some(Operation::CreditRequest) => self.send_control(index, Operation::CreditUpdate, 0),
            Some(Operation::Shutdown) => self.received_shutdown(index, header.flags),
            Some(Operation::Reset) => self.received_reset(index),
            Some(Operation::Data | Operation::Request) | None => {}
        }
    }

    fn wake(&mut self, index: usize) {
        if let Some(stream) = self.streams.get_mut(index) {
            if !stream.queued {
                stream.queued = true;
                self.runnable.push_back(index);
            }
        }
    }

    fn refuse(&mut self, header: &Header) {
        let reset = Header {
            src_cid: header.dst_cid,
            dst_cid: header.src_cid,
            src_port: header.dst_port,
            dst_port: header.src_port,
            socket_type: header.socket_type,
            operation: Operation::Reset as u16,
            ..Header::default()
        };
        self.send_or_queue(reset);
    }

    fn send_control(&mut self, index: usize, operation: Operation, flags: u32) {
        let cid = self.cid;
        let header = self.streams[index].header(cid, operation, 0, flags);
        self.send_or_queue(header);
    }

    fn send_or_queue(&mut self, header: Header) {
        if !self.transmit.has_room() {
            self.transmit.reclaim();
        }
        match self.transmit.has_room() && self.queued.is_empty() {
            true => self.push(&header),
            false => self.queued.push_back(header),
        }
    }

    fn push(&mut self, header: &Header) {
        self.transmit.push(header, &[], 0);
        self.transmit.publish();
        self.packets_out += 1;
    }

    fn insert(&mut self, key: Key, role: Role, number: usize) -> usize {
        let index = self.streams.insert(Stream::new(key, role, number));
        self.by_key.insert(key, index);
        index
    }

    fn remove(&mut self, index: usize) {
        let stream = self.streams.remove(index);
        for arrived in stream.arrived {
            self.receive.release(arrived.buffer);
        }
        self.by_key.remove(&stream.key);
    }

    /// Accepts dials to this port, and lets a program of this role have each circuit.
    pub fn listen(&mut self, port: u32, role: Role) {
        self.listeners.insert(port, role);
    }

    /// Dials. The program begins when the dial is answered.
    pub fn dial(&mut self, peer_cid: u32, port: u32, role: Role) {
        let key = Key {
            local_port: self.next_local_port,
            peer_cid,
            peer_port: port,
        };
        self.next_local_port += 1;
        let number = (key.local_port - FIRST_LOCAL_PORT) as usize;
        let index = self.insert(key, role, number);
        self.send_control(index, Operation::Request, 0);
    }

    /// Dials `count` times, with no more than `at_once` dials unanswered at any time.
    pub fn dial_many(
        &mut self,
        peer_cid: u32,
        port: u32,
        role: Role,
        count: usize,
        at_once: usize,
    ) {
        let first = count.min(at_once);
        self.dials_left = count - first;
        for _ in 0..first {
            self.dial(peer_cid, port, role);
        }
    }

    fn dialled(&mut self, key: Key, header: &Header) {
        let role = self.listeners.get(&key.local_port).copied();
        let (Some(role), Some(SocketType::Stream)) =
            (role, SocketType::from_wire(header.socket_type))
        else {
            return self.refuse(header);
        };
        let index = self.insert(key, role, self.accepted);
        self.accepted += 1;
        self.streams[index].learn(header);
        self.send_control(index, Operation::Response, 0);
        self.streams[index].connected = true;
        self.wake(index);
    }
}
