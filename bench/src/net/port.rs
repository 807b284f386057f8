//! A guest's network card, as a virtio driver in user space that does nothing else.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use guestmem::guest::Range;
use guestmem_driver::{Arena, StreamOptions, StreamQueue};
use rustix::event::{EventfdFlags, eventfd};

use super::examiner::{Examiner, SAMPLE};
use super::frame::{Address, Kind, NET_HEADER_LEN, frame};
use super::meters::Meters;
use crate::frontend::{
    FEATURE_EVENT_INDEX, FEATURE_INDIRECT, FEATURE_PROTOCOL, FEATURE_VERSION_1, FrontendError, Vmm,
};

/// Ring 0: frames to the guest.
const RX: usize = 0;
/// Ring 1: frames from the guest.
const TX: usize = 1;

/// Feature bits (virtio 1.2, sections 5.1.3 and 6).
const FEATURE_CSUM: u64 = 1 << 0;
const FEATURE_GUEST_CSUM: u64 = 1 << 1;
const FEATURE_GUEST_TSO4: u64 = 1 << 7;
const FEATURE_HOST_TSO4: u64 = 1 << 11;
const FEATURE_MERGEABLE: u64 = 1 << 15;
const FEATURE_PACKED: u64 = 1 << 34;

/// Where the guest sees its memory.
const GUEST_BASE: u64 = 0x4000_0000;

/// A receive buffer for ordinary frames: what Linux posts for them.
const BUFFER_LEN: usize = 1536 + NET_HEADER_LEN;
/// A receive buffer of a page, which Linux posts once frames are long.
const LONG_BUFFER_LEN: usize = 4096;
/// What a driver puts into one descriptor of a long frame: pages of a socket's buffer come in such pieces.
const PIECE_LEN: usize = 32 << 10;

/// What a port is like.
#[derive(Debug, Clone, Copy)]
pub struct PortOptions {
    /// What it sends.
    pub kind: Kind,
    /// How many flows that is.
    pub flows: u16,
    /// Packed rings.
    pub packed: bool,
    /// Frames are handed over as many at once as there are, and not each by itself.
    pub combining: bool,
    /// Notifications happen where they are wanted; else for everything that is handed over, and interrupts are never switched off.
    pub suppression: bool,
    /// Entries of each ring.
    pub ring_size: u16,
    /// The guest sleeps and is interrupted, and does not look all the time.
    pub interrupts: bool,
    /// Every byte of every frame is compared.
    pub checked: bool,
    /// Each frame is written before it is sent, and read when it has come, and not only its beginning.
    pub touched: bool,
}

/// One of the two rings.
struct Ring {
    queue: StreamQueue,
    kick: OwnedFd,
    call: OwnedFd,
    /// By slot: where its buffer is in the arena.
    buffers: Vec<usize>,
    /// An interrupt is asked for, and nothing is polled before it comes.
    armed: bool,
    suppression: bool,
}

/// A network card and its driver.
pub struct Port {
    options: PortOptions,
    arena: Arc<Arena>,
    rings: [Ring; 2],
    examiner: Examiner,
    meters: Meters,
    /// By slot of the sending ring: what is in its buffer.
    frames: Vec<Vec<u8>>,
    /// What was read of a buffer.
    scratch: Vec<u8>,
    /// The most frames that are under way.
    depth: u16,
    /// Keeps the device.
    _vmm: Vmm,
}

impl Ring {
    fn new(
        arena: &Arc<Arena>,
        options: PortOptions,
        buffer_len: usize,
        piece_len: usize,
        writable: bool,
    ) -> io::Result<Ring> {
        // An odd number of cache lines, so that the beginnings of buffers spread over the cache's sets.
        let stride = buffer_len.next_multiple_of(128) + 64;
        let entries = usize::from(options.ring_size);
        let buffers: Vec<usize> = (0..entries)
            // The frame itself begins on a cache line's boundary, the header right before it.
            .map(|_| arena.allocate(stride, 64) + 64 - NET_HEADER_LEN)
            .collect();
        let chains: Vec<Vec<Range>> = buffers
            .iter()
            .map(|buffer| {
                let pieces = (0..buffer_len).step_by(piece_len);
                let piece = |start: usize| Range {
                    address: GUEST_BASE + (buffer + start) as u64,
                    len: piece_len.min(buffer_len - start) as u32,
                };
                pieces.map(piece).collect()
            })
            .collect();
        let stream = StreamOptions {
            packed: options.packed,
            event_index: options.suppression,
            writable,
            guest_base: GUEST_BASE,
        };
        let event = || eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC);
        Ok(Ring {
            queue: StreamQueue::new(arena, &chains, stream),
            kick: event()?,
            call: event()?,
            buffers,
            armed: false,
            suppression: options.suppression,
        })
    }

    /// Posts slots and notifies if that is wanted.
    #[inline]
    fn post(&mut self, count: u16, kicks: &mut u64) {
        if self.queue.post(count) || !self.suppression {
            *kicks += 1;
            // It cannot be full: there are never 2^64 notifications.
            let _ = rustix::io::write(&self.kick, &1_u64.to_ne_bytes());
        }
    }

    /// Asks for an interrupt. `false` if there is something to do already.
    fn arm(&mut self) -> bool {
        self.armed = !self.queue.enable_interrupts();
        if !self.armed {
            self.disarm();
        }
        self.armed
    }

    /// Is awake, and wants no interrupts.
    fn disarm(&mut self) {
        self.armed = false;
        if self.suppression {
            self.queue.disable_interrupts();
        }
    }
}

impl Port {
    /// Drives the device at the other end as `own`, to exchange frames with `partner`.
    ///
    /// # Errors
    /// When the device cannot be driven, or does not offer what it takes.
    pub fn attach(
        socket: UnixStream,
        options: PortOptions,
        own: Address,
        partner: Address,
    ) -> Result<Port, String> {
        let words = |error: FrontendError| error.to_string();
        let mut vmm = Vmm::on_net(socket).map_err(words)?;
        let features = negotiate(&options, vmm.offered_features())?;
        let io = |error: io::Error| format!("memory of a guest: {error}");
        let arena = Arc::new(Arena::new(arena_len(&options)).map_err(io)?);
        let frame_len = options.kind.len() + NET_HEADER_LEN;
        let rings = [
            Ring::new(&arena, options, receive_len(options.kind), usize::MAX, true),
            Ring::new(&arena, options, frame_len, PIECE_LEN, false),
        ];
        let [rx, tx] = rings;
        let rings = [rx.map_err(io)?, tx.map_err(io)?];
        let frames: Vec<Vec<u8>> = (0..options.ring_size)
            .map(|slot| frame(options.kind, own, partner, options.flows, slot))
            .collect();
        for (bytes, buffer) in frames.iter().zip(&rings[TX].buffers) {
            arena.write(*buffer, &options.kind.net_header());
            arena.write(buffer + NET_HEADER_LEN, bytes);
        }
        vmm.set_features(features).map_err(words)?;
        vmm.set_memory(&[arena.region(GUEST_BASE).map_err(io)?])
            .map_err(words)?;
        for (index, ring) in rings.iter().enumerate() {
            vmm.start_ring(index, &ring.queue.setup(), &ring.kick, &ring.call)
                .map_err(words)?;
        }
        let mut port = Port {
            options,
            arena,
            rings,
            examiner: Examiner::new(options.kind, options.flows, own, partner, options.checked),
            meters: Meters::default(),
            frames,
            scratch: vec![0; LONG_BUFFER_LEN],
            depth: depth(&options),
            _vmm: vmm,
        };
        for ring in &mut port.rings {
            ring.disarm();
        }
        port.rings[RX].post(options.ring_size, &mut port.meters.kicks);
        Ok(port)
    }

    /// How many frames came.
    pub fn received(&self) -> u64 {
        self.meters.received
    }

    /// What has happened so far, with interrupts that were not taken.
    pub fn meters(&mut self) -> Meters {
        for ring in &self.rings {
            let mut count = [0; 8];
            if !ring.armed && rustix::io::read(&ring.call, &mut count).is_ok() {
                self.meters.interrupts += u64::from_ne_bytes(count);
            }
        }
        self.meters
    }

    /// The descriptors that interrupts come by.
    pub fn calls(&self) -> [&OwnedFd; 2] {
        [&self.rings[RX].call, &self.rings[TX].call]
    }

    /// An interrupt came by the descriptor of this index.
    pub fn interrupted(&mut self, index: usize) {
        let ring = &mut self.rings[index];
        let mut count = [0; 8];
        if rustix::io::read(&ring.call, &mut count).is_ok() {
            self.meters.interrupts += u64::from_ne_bytes(count);
        }
        ring.disarm();
    }

    /// Takes what has come, and sends what there is room for. `false` if there was nothing to do.
    ///
    /// # Errors
    /// A frame that is not what was sent.
    #[inline]
    pub fn turn(&mut self) -> Result<bool, String> {
        let received = !self.rings[RX].armed && self.receive()?;
        let sent = !self.rings[TX].armed && self.send();
        Ok(received | sent)
    }

    /// Whether both rings wait for an interrupt.
    pub fn is_asleep(&self) -> bool {
        self.rings.iter().all(|ring| ring.armed)
    }

    fn send(&mut self) -> bool {
        let ring = &mut self.rings[TX];
        ring.queue.take();
        let room = self.depth - ring.queue.out();
        if room == 0 {
            return self.options.interrupts && !ring.arm();
        }
        let mask = ring.queue.size() - 1;
        let first = ring.queue.next_slot();
        let place = NET_HEADER_LEN + self.options.kind.number_place();
        for step in 0..room {
            let slot = first.wrapping_add(step) & mask;
            self.meters.sent += 1;
            let buffer = ring.buffers[usize::from(slot)];
            if self.options.touched {
                self.arena
                    .write(buffer + NET_HEADER_LEN, &self.frames[usize::from(slot)]);
            }
            self.arena
                .write(buffer + place, &self.meters.sent.to_le_bytes());
        }
        match self.options.combining {
            true => ring.post(room, &mut self.meters.kicks),
            false => (0..room).for_each(|_| ring.post(1, &mut self.meters.kicks)),
        }
        true
    }

    fn receive(&mut self) -> Result<bool, String> {
        let ring = &mut self.rings[RX];
        let returned = ring.queue.take();
        if returned.count == 0 {
            return Ok(self.options.interrupts && !ring.arm());
        }
        let mask = ring.queue.size() - 1;
        let mut step = 0;
        while step < returned.count {
            let slot = returned.first.wrapping_add(step) & mask;
            let buffer = self.rings[RX].buffers[usize::from(slot)];
            let mut field = [0; 2];
            self.arena.read(buffer + 10, &mut field);
            let buffers = u16::from_le_bytes(field);
            if buffers == 0 || buffers > returned.count - step {
                return Err(format!(
                    "a frame says that it takes {buffers} buffers, of {} that came",
                    returned.count - step
                ));
            }
            self.count(slot, buffers)?;
            step += buffers;
        }
        self.rings[RX].post(returned.count, &mut self.meters.kicks);
        Ok(true)
    }

    /// Counts a frame, and reads it if it is its turn.
    #[inline]
    fn count(&mut self, slot: u16, buffers: u16) -> Result<(), String> {
        let queue = &self.rings[RX].queue;
        let mask = queue.size() - 1;
        let written: u32 = (0..buffers)
            .map(|step| queue.written(slot.wrapping_add(step) & mask))
            .sum();
        let len = (written as usize).wrapping_sub(NET_HEADER_LEN);
        if len != self.options.kind.len() {
            return self.foreign(slot, len);
        }
        self.meters.received += 1;
        self.meters.bytes += len as u64;
        if self.options.touched {
            self.read_frame(slot, buffers);
        }
        if self.options.checked || self.meters.received % SAMPLE == 0 {
            self.examine(slot, buffers)?;
        }
        Ok(())
    }

    /// Takes all of a frame out of the ring's buffers.
    fn read_frame(&mut self, slot: u16, buffers: u16) {
        let mask = self.options.ring_size - 1;
        for step in 0..buffers {
            let slot = slot.wrapping_add(step) & mask;
            let buffer = self.rings[RX].buffers[usize::from(slot)];
            let written = self.rings[RX].queue.written(slot) as usize;
            let len = written.min(self.scratch.len());
            self.arena.read(buffer, &mut self.scratch[..len]);
        }
    }

    /// A frame of another length: from the switch itself, or damaged.
    #[cold]
    fn foreign(&mut self, slot: u16, len: usize) -> Result<(), String> {
        let mut head = [0; 12];
        let buffer = self.rings[RX].buffers[usize::from(slot)];
        self.arena.read(buffer + NET_HEADER_LEN, &mut head);
        self.meters.foreign += 1;
        self.examiner.examine_foreign(&head, len)
    }

    #[cold]
    fn examine(&mut self, slot: u16, buffers: u16) -> Result<(), String> {
        let kind = self.options.kind;
        let mut bytes = vec![0; self.examiner.len()];
        let mut header = [0; NET_HEADER_LEN];
        let mask = self.options.ring_size - 1;
        let mut done = 0;
        for step in 0..buffers {
            let slot = usize::from(slot.wrapping_add(step) & mask);
            let (mut start, mut len) = (self.rings[RX].buffers[slot], receive_len(kind));
            if step == 0 {
                self.arena.read(start, &mut header);
                start += NET_HEADER_LEN;
                len -= NET_HEADER_LEN;
            }
            let len = len.min(bytes.len() - done);
            self.arena.read(start, &mut bytes[done..done + len]);
            done += len;
        }
        self.examiner.examine(&header, &mut bytes)
    }
}

/// All that the ring has room for; of long frames what fits twice into the receiver's ring, as a window of TCP would have it.
fn depth(options: &PortOptions) -> u16 {
    let long = options.kind.len() + NET_HEADER_LEN;
    match long.div_ceil(receive_len(options.kind)) as u16 {
        1 => options.ring_size,
        buffers => (options.ring_size / buffers / 2).max(1),
    }
}

/// The features to ask for.
fn negotiate(options: &PortOptions, offered: u64) -> Result<u64, String> {
    let mut needed = FEATURE_VERSION_1
        | FEATURE_PROTOCOL
        | FEATURE_MERGEABLE
        | FEATURE_INDIRECT
        | FEATURE_CSUM
        | FEATURE_GUEST_CSUM;
    if options.packed {
        needed |= FEATURE_PACKED;
    }
    if options.suppression {
        needed |= FEATURE_EVENT_INDEX;
    }
    if options.kind == Kind::Segmented {
        needed |= FEATURE_GUEST_TSO4 | FEATURE_HOST_TSO4;
    }
    match needed & !offered {
        0 => Ok(needed),
        lacking => Err(format!(
            "the device offers {offered:#x}, which lacks {lacking:#x}"
        )),
    }
}

/// Length of a receive buffer, its header included.
fn receive_len(kind: Kind) -> usize {
    match kind.len() + NET_HEADER_LEN <= BUFFER_LEN {
        true => BUFFER_LEN,
        false => LONG_BUFFER_LEN,
    }
}

/// Room for both rings, their buffers and tables.
fn arena_len(options: &PortOptions) -> usize {
    let each = receive_len(options.kind) + options.kind.len() + 1024;
    (usize::from(options.ring_size) * each + (64 << 10)).next_multiple_of(4096)
}
