//! Captures: the frames of a network or of one of its ports, copied for somebody who looks.
//!
//! A frame is seen at a port: as the guest has handed it over, also when it goes nowhere, and as the guest was given it. So a frame from
//! guest to guest is seen twice in the capture of a network, as on any host with an interface for each guest.
//!
//! While nobody looks, this costs one look at an empty list for each batch from a guest and for each destination of a batch, and for each frame
//! given a branch on what was found. While somebody does, frames are copied once more, into blocks of pcapng, and offered to the reader's
//! [`CaptureSink`] at the end of each batch. A sink that has no room loses them: the fabric counts and goes on.

use std::time::{SystemTime, UNIX_EPOCH};

use memory::guest::MemoryError;
use wire::net_header::NET_HEADER_LEN;
use wire::pcapng::{self, Direction, MAX_SNAPLEN, Packet};

use super::deliver::{Rest, Source};
use super::drain::Batch;
use super::{NetError, NetFabric};

/// The most captures at a time.
pub const MAX_CAPTURES: usize = 16;

/// How many bytes are gathered before they are offered in the middle of a batch. With the one frame that goes beyond it, and what is said of the
/// interfaces, it is the longest piece that a sink is offered.
const PIECE_LEN: usize = 64 << 10;

/// The most bytes of descriptions that wait for a sink to have room, which is those of thousands of ports that came and went meanwhile. A
/// capture that is behind by more ends.
const MAX_DESCRIBED_LEN: usize = 1 << 20;

/// Where the blocks of a capture go. The capture ends when it is dropped.
pub trait CaptureSink: Send {
    /// Takes whole blocks of pcapng, without waiting for anybody.
    ///
    /// # Errors
    /// When it does not take them.
    fn offer(&mut self, blocks: Vec<u8>) -> Result<(), NotTaken>;

    /// Nobody reads what it takes any more.
    fn is_gone(&self) -> bool;
}

/// Why a sink did not take blocks.
#[derive(Debug)]
pub enum NotTaken {
    /// It has no room for them now. Here they are.
    Full(Vec<u8>),
    /// Nobody wants them any more.
    Gone,
}

/// What a capture takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CaptureOptions {
    /// How much of each frame, in bytes, up to [`MAX_SNAPLEN`].
    pub snaplen: u32,
    /// After so many frames it ends.
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

/// All captures that are under way.
#[derive(Default)]
pub(super) struct Captures(Vec<Capture>);

struct Capture {
    /// The network's place in the table of networks.
    network: usize,
    /// The port's place in the table of ports, if it is of one port only.
    port: Option<usize>,
    snaplen: u32,
    /// So many frames are still to come.
    left: Option<u64>,
    sink: Box<dyn CaptureSink>,
    /// The ports that are there: no more than the network has.
    interfaces: Vec<Interface>,
    next_interface: u32,
    /// The place among them of the port that is looked at, if it is of this capture.
    looked_at: Option<usize>,
    /// Blocks that have to arrive, as others refer to them: descriptions of interfaces.
    described: Vec<u8>,
    /// Blocks of packets, which may be lost.
    packets: Vec<u8>,
    has_ended: bool,
}

/// A port in a capture.
struct Interface {
    port: usize,
    id: u32,
    /// Packets that have not been offered yet.
    gathered: u64,
    /// Packets that were not taken, and how many of them the reader was told of.
    lost: u64,
    told: u64,
}

/// Somebody looks at what passes a port at the moment.
pub(super) struct Watch<'a> {
    captures: &'a mut Captures,
    time_ns: u64,
}

impl Captures {
    /// Whether somebody looks at this port, with what passes it from now on.
    #[inline]
    pub(super) fn watch(&mut self, network: usize, port: usize, name: &str) -> Option<Watch<'_>> {
        match self.0.is_empty() {
            true => None,
            false => self.look_at(network, port, name),
        }
    }

    #[cold]
    fn look_at(&mut self, network: usize, port: usize, name: &str) -> Option<Watch<'_>> {
        for capture in &mut self.0 {
            let is_of = capture.network == network && capture.port.is_none_or(|of| of == port);
            capture.looked_at = is_of.then(|| capture.interface(port, name));
        }
        let is_seen = self.0.iter().any(|capture| capture.looked_at.is_some());
        is_seen.then_some(Watch {
            captures: self,
            time_ns: now_ns(),
        })
    }

    /// A port is closed: its number may become another's.
    pub(super) fn forget_port(&mut self, port: usize) {
        for capture in &mut self.0 {
            if capture.port == Some(port) {
                capture.end();
            }
            capture.forget(port);
        }
        self.0.retain(|capture| !capture.has_ended);
    }

    /// A network is removed.
    pub(super) fn forget_network(&mut self, network: usize) {
        let mut of_network = self.0.iter_mut();
        let of_network = of_network.by_ref().filter(|of| of.network == network);
        of_network.for_each(Capture::end);
        self.0.retain(|capture| !capture.has_ended);
    }

    /// All networks are.
    pub(super) fn end(&mut self) {
        self.0.iter_mut().for_each(Capture::end);
        self.0.clear();
    }
}

impl Capture {
    /// The place of a port among the interfaces, where it is put if it is not there yet.
    fn interface(&mut self, port: usize, name: &str) -> usize {
        if let Some(known) = self.interfaces.iter().position(|known| known.port == port) {
            return known;
        }
        pcapng::interface(&mut self.described, name, self.snaplen);
        self.interfaces.push(Interface {
            port,
            id: self.next_interface,
            gathered: 0,
            lost: 0,
            told: 0,
        });
        self.next_interface += 1;
        self.interfaces.len() - 1
    }

    fn forget(&mut self, port: usize) {
        let Some(place) = self.interfaces.iter().position(|known| known.port == port) else {
            return;
        };
        let interface = self.interfaces.swap_remove(place);
        if interface.lost > interface.told {
            pcapng::statistics(&mut self.described, interface.id, now_ns(), interface.lost);
        }
    }

    fn record(&mut self, seen: &Seen<'_>, time_ns: u64) {
        let Some(interface) = self.looked_at.map(|place| &mut self.interfaces[place]) else {
            return;
        };
        if self.has_ended {
            return;
        }
        let original_len = seen.head.len() + seen.rest_len;
        let packet = Packet {
            interface: interface.id,
            time_ns,
            original_len,
            direction: seen.direction,
            comment: seen.comment,
        };
        let len = original_len.min(self.snaplen as usize);
        let written = packet.write(&mut self.packets, len, |room| seen.copy(room));
        // What cannot be read any more was not seen.
        if written.is_err() {
            return;
        }
        interface.gathered += 1;
        self.left = self.left.map(|left| left.saturating_sub(1));
        if self.packets.len() >= PIECE_LEN || self.left == Some(0) {
            self.offer(time_ns);
        }
    }

    /// Offers what was gathered to the sink.
    fn offer(&mut self, time_ns: u64) {
        if self.has_ended || self.described.is_empty() && self.packets.is_empty() {
            return;
        }
        let mut blocks = std::mem::take(&mut self.described);
        let described_len = blocks.len();
        for interface in self
            .interfaces
            .iter()
            .filter(|known| known.lost > known.told)
        {
            pcapng::statistics(&mut blocks, interface.id, time_ns, interface.lost);
        }
        blocks.append(&mut self.packets);
        match self.sink.offer(blocks) {
            Ok(()) => {
                for interface in &mut self.interfaces {
                    interface.told = interface.lost;
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
                    self.left = self.left.map(|left| left + lost);
                }
            }
            Err(NotTaken::Gone) => self.has_ended = true,
        }
    }

    /// Says what was lost of each interface, and nothing more.
    fn end(&mut self) {
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

/// A frame that passes a port.
struct Seen<'a> {
    direction: Direction,
    head: &'a [u8],
    rest: &'a Rest<'a>,
    rest_len: usize,
    comment: Option<&'a str>,
}

impl Seen<'_> {
    /// Copies as much of it as there is room for.
    fn copy(&self, room: &mut [u8]) -> Result<(), MemoryError> {
        let (front, behind) = room.split_at_mut(self.head.len().min(room.len()));
        front.copy_from_slice(&self.head[..front.len()]);
        match self.rest {
            _ if behind.is_empty() => Ok(()),
            Rest::Guest {
                memory,
                ranges,
                offset,
            } => memory.read(ranges, *offset, behind),
            Rest::Private(bytes) => {
                behind.copy_from_slice(&bytes[..behind.len()]);
                Ok(())
            }
        }
    }
}

impl Watch<'_> {
    fn record(&mut self, seen: &Seen<'_>) {
        for capture in &mut self.captures.0 {
            capture.record(seen, self.time_ns);
        }
    }

    /// The guest was given a frame: `front`, which begins with the virtio header, and the rest.
    pub(super) fn given(&mut self, front: &[u8], rest: &Rest<'_>, rest_len: usize) {
        self.record(&Seen {
            direction: Direction::Outbound,
            head: &front[NET_HEADER_LEN..],
            rest,
            rest_len,
            comment: None,
        });
    }

    /// The guest has sent the frames of this batch.
    pub(super) fn taken(&mut self, batch: &Batch, source: &Source<'_>) {
        let mut refused = batch.refused.iter().peekable();
        for (index, frame) in batch.taken_frames().iter().enumerate() {
            let reason = refused.next_if(|(refused, _)| *refused == index);
            // A chain that holds no frame.
            if frame.len == 0 {
                continue;
            }
            let comment =
                reason.map(|(_, reason)| format!("refused: {}", reason.replace('_', " ")));
            self.record(&Seen {
                direction: Direction::Inbound,
                head: frame.head(),
                rest: &source.rest(&batch.chains, index, frame),
                rest_len: frame.rest_len(),
                comment: comment.as_deref(),
            });
        }
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        for capture in &mut self.captures.0 {
            capture.offer(self.time_ns);
        }
        self.captures.0.retain(|capture| !capture.has_ended);
    }
}

impl NetFabric {
    /// Shows the frames of a network, or of one VM's port, to a sink, until nobody reads there, the network or the port is removed, or as
    /// many frames as wanted were taken.
    ///
    /// # Errors
    /// When there is no such network or port, or there are [`MAX_CAPTURES`] already.
    pub fn capture(
        &mut self,
        network: &str,
        vm: Option<&str>,
        options: CaptureOptions,
        sink: Box<dyn CaptureSink>,
    ) -> Result<(), NetError> {
        let index = self.network_named(network)?;
        let port = match vm {
            Some(vm) => Some(self.port_named(network, vm)?.1),
            None => None,
        };
        let captures = &mut self.captures.0;
        captures.retain(|capture| !capture.sink.is_gone());
        if captures.len() == MAX_CAPTURES {
            return Err(NetError::TooManyCaptures);
        }
        let mut capture = Capture {
            network: index,
            port,
            snaplen: options.snaplen.min(MAX_SNAPLEN),
            left: options.count,
            sink,
            interfaces: Vec::new(),
            next_interface: 0,
            looked_at: None,
            described: Vec::new(),
            packets: Vec::new(),
            has_ended: false,
        };
        let application = concat!("ringdown ", env!("CARGO_PKG_VERSION"));
        pcapng::section(&mut capture.described, application);
        let ports: Vec<usize> = match port {
            Some(port) => vec![port],
            None => self.ports_of(index).collect(),
        };
        for port in ports {
            capture.interface(port, &self.ports[port].vm);
        }
        // At once, so that whoever reads sees that it has begun.
        capture.offer(now_ns());
        if !capture.has_ended {
            self.captures.0.push(capture);
        }
        Ok(())
    }
}

/// Nanoseconds since 1970, until the year 2554.
fn now_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_nanos() as u64)
}
