//! Captures: copies of what passes, as blocks of pcapng, for a reader. Here is what those of networks and those of lines have in common.
//!
//! What is seen is an *interface* of the capture: a port of a network, or a VM's line. Packets are gathered and offered to the reader's
//! [`CaptureSink`] at the end of each batch. A sink that has no room loses them: it is counted, by interface, and no one waits.

use std::time::{SystemTime, UNIX_EPOCH};

use wire::pcapng::{self, Direction, Link, MAX_SNAPLEN, Packet};

/// The most captures at a time in one thread: of networks, or of lines.
pub const MAX_CAPTURES: usize = 16;

/// How many bytes are gathered before they are offered in the middle of a batch. With the one packet that goes beyond it, and what is said of the
/// interfaces, it is the longest piece that a sink is offered.
const PIECE_LEN: usize = 64 << 10;

/// The most bytes of descriptions that wait for a sink to have room, which is those of thousands of ports or lines that came and went meanwhile. A
/// capture that is behind by more ends.
const MAX_DESCRIBED_LEN: usize = 1 << 20;

/// Where the blocks of a capture go. The capture ends when it is dropped.
pub trait CaptureSink: Send {
    /// Takes whole blocks of pcapng, without blocking.
    fn offer(&mut self, blocks: Vec<u8>) -> Result<(), NotTaken>;

    /// Whether it may have room, so that it is worth copying anything for it. Once it is gone it says so, too, so that it is found out.
    fn has_room(&self) -> bool;

    /// So many more packets are lost to it, as it had no room when they came.
    fn lose(&mut self, packets: u64);

    /// Its reader is gone.
    fn is_gone(&self) -> bool;
}

/// Why a sink did not take blocks.
#[derive(Debug)]
pub enum NotTaken {
    /// It has no room for them now. Here they are.
    Full(Vec<u8>),
    /// The reader is gone.
    Gone,
}

/// What a capture takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CaptureOptions {
    /// How much of each packet, in bytes, up to [`MAX_SNAPLEN`].
    pub snaplen: u32,
    /// After so many packets it ends.
    pub count: Option<u64>,
}

impl Default for CaptureOptions {
    fn default() -> Self {
        CaptureOptions {
            snaplen: MAX_SNAPLEN,
            count: None,
        }
    }
}

/// A capture that is under way.
pub(crate) struct Capture {
    link: Link,
    snaplen: u32,
    /// So many packets are still to come.
    left: Option<u64>,
    sink: Box<dyn CaptureSink>,
    /// What is seen and is still there.
    interfaces: Vec<Interface>,
    next_interface: u32,
    /// Blocks that have to arrive, as others refer to them: descriptions of interfaces.
    described: Vec<u8>,
    /// Blocks of packets, which may be lost.
    packets: Vec<u8>,
    has_ended: bool,
}

/// Something whose packets are seen.
struct Interface {
    /// Which port or line, by its number.
    of: usize,
    id: u32,
    /// Packets that have not been offered yet.
    gathered: u64,
    /// Packets that were not taken, and how many of them were reported.
    lost: u64,
    reported: u64,
}

/// What is said of a packet that is seen, beside its bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen<'a> {
    pub(crate) time_ns: u64,
    /// How long it is, in bytes, headers and all.
    pub(crate) len: usize,
    pub(crate) direction: Direction,
    pub(crate) comment: Option<&'a str>,
}

impl Capture {
    /// A capture of nothing yet.
    pub(crate) fn new(link: Link, options: CaptureOptions, sink: Box<dyn CaptureSink>) -> Capture {
        let mut capture = Capture {
            link,
            snaplen: options.snaplen.min(MAX_SNAPLEN),
            left: options.count,
            sink,
            interfaces: Vec::new(),
            next_interface: 0,
            described: Vec::new(),
            packets: Vec::new(),
            has_ended: false,
        };
        let application = concat!("ringdown ", env!("CARGO_PKG_VERSION"));
        pcapng::section(&mut capture.described, application);
        capture
    }

    /// Whether it has ended or its reader is gone.
    pub(crate) fn is_over(&self) -> bool {
        self.has_ended || self.sink.is_gone()
    }

    /// Whether it has ended, as far as that is known without asking the sink.
    pub(crate) fn has_ended(&self) -> bool {
        self.has_ended
    }

    /// The place of a port or a line among the interfaces, where it is put if it is not there yet.
    pub(crate) fn interface(&mut self, of: usize, name: &str) -> usize {
        if let Some(known) = self.interfaces.iter().position(|known| known.of == of) {
            return known;
        }
        pcapng::interface(&mut self.described, self.link, name, self.snaplen);
        self.interfaces.push(Interface {
            of,
            id: self.next_interface,
            gathered: 0,
            lost: 0,
            reported: 0,
        });
        self.next_interface += 1;
        self.interfaces.len() - 1
    }

    /// A port or a line is closed: its number may become another's.
    pub(crate) fn forget(&mut self, of: usize) {
        let Some(place) = self.interfaces.iter().position(|known| known.of == of) else {
            return;
        };
        // What was gathered of it is taken or lost by then.
        self.offer(now_ns());
        let interface = self.interfaces.swap_remove(place);
        if interface.lost > interface.reported {
            pcapng::statistics(&mut self.described, interface.id, now_ns(), interface.lost);
        }
    }

    /// Takes a packet of the interface at this place, of which `fill` copies the beginning. If it cannot be read any more,
    /// it was not seen.
    pub(crate) fn record<E>(
        &mut self,
        place: usize,
        seen: &Seen<'_>,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) {
        if self.has_ended {
            return;
        }
        let interface = &mut self.interfaces[place];
        if self.packets.is_empty() && !self.sink.has_room() {
            interface.lost += 1;
            self.sink.lose(1);
            return;
        }
        let packet = Packet {
            interface: interface.id,
            time_ns: seen.time_ns,
            original_len: seen.len,
            direction: seen.direction,
            comment: seen.comment,
        };
        let len = seen.len.min(self.snaplen as usize);
        if packet.write(&mut self.packets, len, fill).is_err() {
            return;
        }
        interface.gathered += 1;
        self.left = self.left.map(|left| left.saturating_sub(1));
        if self.packets.len() >= PIECE_LEN || self.left == Some(0) {
            self.offer(seen.time_ns);
        }
    }

    /// Offers what was gathered to the sink.
    pub(crate) fn offer(&mut self, time_ns: u64) {
        if self.has_ended || self.described.is_empty() && self.packets.is_empty() {
            return;
        }
        let mut blocks = std::mem::take(&mut self.described);
        let described_len = blocks.len();
        for interface in self
            .interfaces
            .iter()
            .filter(|known| known.lost > known.reported)
        {
            pcapng::statistics(&mut blocks, interface.id, time_ns, interface.lost);
        }
        blocks.append(&mut self.packets);
        match self.sink.offer(blocks) {
            Ok(()) => {
                for interface in &mut self.interfaces {
                    interface.reported = interface.lost;
                    interface.gathered = 0;
                }
                // With the last one it has said everything.
                if self.left == Some(0) {
                    self.end();
                }
            }
            Err(NotTaken::Full(mut blocks)) => {
                self.has_ended = described_len > MAX_DESCRIBED_LEN;
                blocks.truncate(described_len);
                self.described = blocks;
                for interface in &mut self.interfaces {
                    let lost = std::mem::take(&mut interface.gathered);
                    interface.lost += lost;
                    self.sink.lose(lost);
                    self.left = self.left.map(|left| left + lost);
                }
            }
            Err(NotTaken::Gone) => self.has_ended = true,
        }
    }

    /// Says what was lost of each interface, and nothing more.
    pub(crate) fn end(&mut self) {
        if self.has_ended {
            return;
        }
        let time_ns = now_ns();
        self.left = None;
        self.offer(time_ns);
        self.has_ended = true;
        let mut blocks = std::mem::take(&mut self.described);
        for interface in &self.interfaces {
            pcapng::statistics(&mut blocks, interface.id, time_ns, interface.lost);
        }
        // A reader without room for it reads the end of the stream.
        let _ = self.sink.offer(blocks);
    }
}

/// Nanoseconds since 1970, until the year 2554.
pub(crate) fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}
