//! Captures: the frames of a network or of one of its ports, copied for a reader.
//!
//! A frame is seen at a port: as the guest has handed it over, also when it goes nowhere, and as the guest was given it. So a frame from
//! guest to guest is seen twice in the capture of a network, as on any host with an interface for each guest.
//!
//! Without a capture, this costs one look at an empty list for each batch from a guest and for each destination of a batch, and for each frame
//! given a branch on what was found. With one, frames are copied once more ([`crate::capture`]).

use guestmem::guest::MemoryError;
use wire::net_header::NET_HEADER_LEN;
use wire::pcapng::{Direction, Link};

use super::deliver::{Rest, Source};
use super::drain::Batch;
use super::{NetError, NetFabric};
use crate::capture::{Capture, CaptureOptions, CaptureSink, MAX_CAPTURES, Seen, now_ns};

/// All captures that are under way.
#[derive(Default)]
pub(super) struct Captures(Vec<NetCapture>);

struct NetCapture {
    /// The network's place in the table of networks.
    network: usize,
    /// The port's place in the table of ports, if it is of one port only.
    port: Option<usize>,
    /// The place among the interfaces of the port that is captured, if it is of this capture.
    looked_at: Option<usize>,
    capture: Capture,
}

/// A capture of a port is under way.
pub(super) struct Watch<'a> {
    captures: &'a mut Captures,
    time_ns: u64,
}

impl Captures {
    /// Whether a capture sees this port.
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
            capture.looked_at = is_of.then(|| capture.capture.interface(port, name));
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
                capture.capture.end();
            }
            capture.capture.forget(port);
        }
        self.drop_ended();
    }

    /// A network is removed.
    pub(super) fn forget_network(&mut self, network: usize) {
        let mut of_network = self.0.iter_mut();
        let of_network = of_network.by_ref().filter(|of| of.network == network);
        of_network.for_each(|of| of.capture.end());
        self.drop_ended();
    }

    /// All networks are.
    pub(super) fn end(&mut self) {
        self.0.iter_mut().for_each(|of| of.capture.end());
        self.0.clear();
    }

    fn drop_ended(&mut self) {
        self.0.retain(|capture| !capture.capture.has_ended());
    }
}

/// A frame that passes a port.
struct Passing<'a> {
    direction: Direction,
    head: &'a [u8],
    rest: &'a Rest<'a>,
    rest_len: usize,
    comment: Option<&'a str>,
}

impl Passing<'_> {
    /// Copies as much of it as there is room for.
    fn copy(&self, room: &mut [u8]) -> Result<(), MemoryError> {
        let (front, behind) = room.split_at_mut(self.head.len().min(room.len()));
        front.copy_from_slice(&self.head[..front.len()]);
        match self.rest {
            _ if behind.is_empty() => Ok(()),
            Rest::Guest {
                memory,
                chain,
                offset,
            } => memory.read(&chain.readable, *offset, behind),
            Rest::Private(bytes) => {
                behind.copy_from_slice(&bytes[..behind.len()]);
                Ok(())
            }
        }
    }
}

impl Watch<'_> {
    fn record(&mut self, passing: &Passing<'_>) {
        let seen = Seen {
            time_ns: self.time_ns,
            len: passing.head.len() + passing.rest_len,
            direction: passing.direction,
            comment: passing.comment,
        };
        for NetCapture {
            looked_at, capture, ..
        } in &mut self.captures.0
        {
            if let Some(place) = *looked_at {
                capture.record(place, &seen, |room| passing.copy(room));
            }
        }
    }

    /// The guest was given a frame: `front`, which begins with the virtio header, and the rest.
    pub(super) fn given(&mut self, front: &[u8], rest: &Rest<'_>, rest_len: usize) {
        self.record(&Passing {
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
            self.record(&Passing {
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
            capture.capture.offer(self.time_ns);
        }
        self.captures.drop_ended();
    }
}

impl NetFabric {
    /// Shows the frames of a network, or of one VM's port, to a sink, until its reader is gone, the network or the port is removed, or as
    /// many frames as wanted were taken.
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
        captures.retain(|capture| !capture.capture.is_over());
        if captures.len() == MAX_CAPTURES {
            return Err(NetError::TooManyCaptures);
        }
        let mut capture = Capture::new(Link::Ethernet, options, sink);
        let ports: Vec<usize> = match port {
            Some(port) => vec![port],
            None => self.ports_of(index).collect(),
        };
        for port in ports {
            capture.interface(port, &self.ports[port].vm);
        }
        // At once, so that the reader sees that it has begun.
        capture.offer(now_ns());
        if !capture.has_ended() {
            self.captures.0.push(NetCapture {
                network: index,
                port,
                looked_at: None,
                capture,
            });
        }
        Ok(())
    }
}
