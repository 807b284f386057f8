//! Captures: the packets of all lines or of one, copied for a reader.
//!
//! A packet is seen at a guest's rings: as the guest has handed it over, before anything is decided about it, and as the guest was given it,
//! by whichever side it was made. So what goes from guest to guest is seen twice in a capture of all lines, each time with the identifiers that
//! hold on that line.
//!
//! The packets of hybrid and serial lines are not seen here. What is shown of them is what must be on the guest's side of the socket: calls and their
//! answers, bytes in the pieces in which they pass, and ends; without a header of virtio's.
//!
//! Without a capture, this costs a look at an empty list for each packet and for each action.

use std::collections::BTreeMap;

use guestmem::guest::{GuestMemory, MemoryError, Range, total_len};
use policy::LineId;
use thiserror::Error;
use vsock::{Action, CallerId, CircuitId, Decided, Event, HybridView, Side};
use wire::pcapng::{Direction, Link};
use wire::vsock::{HEADER_LEN, HOST_CID, Header, Operation};
use wire::vsockmon::{Place, Purpose, plain_header, virtio_headers};

use super::Fabric;
use crate::capture::{Capture, CaptureOptions, CaptureSink, MAX_CAPTURES, Seen, now_ns};
use crate::ring::Ring;
use crate::vsock::RX;

/// Which packets a capture takes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CaptureFilter {
    /// Only those of this VM's line, by its full name.
    pub vm: Option<String>,
    /// Only those from or to this port.
    pub port: Option<u32>,
}

/// Why a capture cannot begin.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CaptureError {
    #[error("there is no VM named {0:?}")]
    NoLine(String),
    #[error("there are {MAX_CAPTURES} captures already, which is the most: end one of them first")]
    TooMany,
}

/// All captures that are under way.
#[derive(Default)]
pub(super) struct Captures {
    under_way: Vec<LineCapture>,
    /// Circuits of guests whose packets are not seen, as far as they have been shown: no more than there are.
    shown: BTreeMap<(CircuitId, Side), Shown>,
}

struct LineCapture {
    line: Option<LineId>,
    port: Option<u32>,
    capture: Capture,
}

/// What has been shown of a circuit at the side of a hybrid line.
#[derive(Debug, Clone, Copy)]
struct Shown {
    view: HybridView,
    /// Both the guest and its peer have ended this direction.
    ended: [bool; 2],
}

/// What follows the headers.
pub(super) enum Payload<'a> {
    None,
    Private(&'a [u8]),
    /// As many bytes, none of which is shown.
    Withheld(usize),
    Guest {
        memory: &'a GuestMemory,
        ranges: &'a [Range],
        offset: usize,
        len: usize,
    },
}

impl LineCapture {
    fn wants(&self, line: LineId, ports: [u32; 2]) -> bool {
        self.line.is_none_or(|wanted| wanted == line)
            && self.port.is_none_or(|wanted| ports.contains(&wanted))
    }
}

impl Captures {
    /// Whether there is a capture.
    #[inline]
    pub(super) fn are_wanted(&self) -> bool {
        !self.under_way.is_empty()
    }

    /// Offers what was gathered.
    pub(super) fn offer(&mut self) {
        if !self.are_wanted() {
            return;
        }
        let time_ns = now_ns();
        for capture in &mut self.under_way {
            capture.capture.offer(time_ns);
        }
        self.drop_ended();
    }

    /// A line is closed: its number may become another's.
    pub(super) fn forget_line(&mut self, line: LineId) {
        for capture in &mut self.under_way {
            if capture.line == Some(line) {
                capture.capture.end();
            }
            capture.capture.forget(line.0 as usize);
        }
        self.drop_ended();
    }

    /// All lines are.
    pub(super) fn end(&mut self) {
        self.under_way.iter_mut().for_each(|of| of.capture.end());
        self.drop_ended();
    }

    fn drop_ended(&mut self) {
        self.under_way
            .retain(|capture| !capture.capture.has_ended());
        if self.under_way.is_empty() {
            self.shown = BTreeMap::new();
        }
    }
}

impl Payload<'_> {
    fn len(&self) -> usize {
        match self {
            Payload::None => 0,
            Payload::Private(bytes) => bytes.len(),
            Payload::Withheld(len) => *len,
            Payload::Guest { len, .. } => *len,
        }
    }

    /// Copies as much of it as there is room for, behind as much of the headers.
    fn copy(&self, headers: &[u8], room: &mut [u8]) -> Result<(), MemoryError> {
        let (front, behind) = room.split_at_mut(headers.len().min(room.len()));
        front.copy_from_slice(&headers[..front.len()]);
        match self {
            Payload::Private(bytes) => behind.copy_from_slice(&bytes[..behind.len()]),
            Payload::Withheld(_) => behind.fill(0),
            Payload::Guest {
                memory,
                ranges,
                offset,
                ..
            } if !behind.is_empty() => memory.read(ranges, *offset, behind)?,
            Payload::Guest { .. } | Payload::None => {}
        }
        Ok(())
    }
}

impl Fabric {
    /// Shows what passes the lines to a sink, until its reader is gone, the line of the one VM that it is about is closed, or as many packets as
    /// wanted were taken.
    pub fn capture(
        &mut self,
        filter: &CaptureFilter,
        options: CaptureOptions,
        sink: Box<dyn CaptureSink>,
    ) -> Result<(), CaptureError> {
        let line = match &filter.vm {
            Some(vm) => {
                let line = self.line_named(vm);
                Some(line.ok_or_else(|| CaptureError::NoLine(vm.clone()))?)
            }
            None => None,
        };
        let under_way = &mut self.captures.under_way;
        under_way.retain(|capture| !capture.capture.is_over());
        if under_way.len() == MAX_CAPTURES {
            return Err(CaptureError::TooMany);
        }
        let mut capture = Capture::new(Link::Vsock, options, sink);
        for (number, io) in self.lines.iter() {
            let Some(io) = io else { continue };
            if line.is_none_or(|line| line.0 as usize == number) {
                capture.interface(number, &io.name);
            }
        }
        // At once, so that the reader sees that it has begun.
        capture.offer(now_ns());
        if !capture.has_ended() {
            self.captures.under_way.push(LineCapture {
                line,
                port: filter.port,
                capture,
            });
        }
        Ok(())
    }

    fn show(
        &mut self,
        line: LineId,
        direction: Direction,
        ports: [u32; 2],
        headers: &[u8],
        payload: &Payload<'_>,
    ) {
        let io = self.lines.get(line.0 as usize).and_then(Option::as_ref);
        let Some(io) = io else { return };
        let seen = Seen {
            time_ns: now_ns(),
            len: headers.len() + payload.len(),
            direction,
            comment: None,
        };
        for capture in &mut self.captures.under_way {
            if capture.wants(line, ports) {
                let place = capture.capture.interface(line.0 as usize, &io.name);
                let fill = |room: &mut [u8]| payload.copy(headers, room);
                capture.capture.record(place, &seen, fill);
            }
        }
    }

    // ---- Packets ----

    /// A guest has sent a packet (inbound), or is given one; `ranges` hold it with its header.
    #[cold]
    pub(super) fn show_packet(
        &mut self,
        line: LineId,
        direction: Direction,
        header: &Header,
        memory: &GuestMemory,
        ranges: &[Range],
    ) {
        let there = total_len(ranges).saturating_sub(HEADER_LEN);
        let payload = match header.operation == Operation::Data as u16 {
            true => Payload::Guest {
                memory,
                ranges,
                offset: HEADER_LEN,
                len: there.min(header.len as usize),
            },
            false => Payload::None,
        };
        let ports = [header.src_port, header.dst_port];
        self.show(line, direction, ports, &virtio_headers(header), &payload);
    }

    // ---- Guests whose packets are not seen ----

    fn shown(&mut self, circuit: CircuitId, side: Side) -> Option<&mut Shown> {
        use std::collections::btree_map::Entry;
        match self.captures.shown.entry((circuit, side)) {
            Entry::Occupied(known) => Some(known.into_mut()),
            Entry::Vacant(place) => {
                let view = self.switch.hybrid_view(circuit, side)?;
                Some(place.insert(Shown {
                    view,
                    ended: [false; 2],
                }))
            }
        }
    }

    fn show_plain(
        &mut self,
        view: &HybridView,
        direction: Direction,
        purpose: Purpose,
        payload: &Payload<'_>,
    ) {
        let place = |(cid, port): (u32, u32)| Place {
            cid: u64::from(cid),
            port,
        };
        let (own, peer) = (place(view.own), place(view.peer));
        let header = match direction {
            Direction::Inbound => plain_header(own, peer, purpose),
            Direction::Outbound => plain_header(peer, own, purpose),
        };
        self.show(
            view.line,
            direction,
            [own.port, peer.port],
            &header,
            payload,
        );
    }

    fn show_connect(&mut self, circuit: CircuitId, side: Side, direction: Direction) {
        if let Some(view) = self.shown(circuit, side).map(|shown| shown.view) {
            self.show_plain(&view, direction, Purpose::Connect, &Payload::None);
        }
    }

    fn show_end(&mut self, circuit: CircuitId, side: Side, direction: Direction, of_both: bool) {
        let Some(shown) = self.shown(circuit, side) else {
            return;
        };
        let view = shown.view;
        let was_ended =
            std::mem::replace(&mut shown.ended[usize::from(is_outbound(direction))], true);
        if of_both {
            shown.ended = [true; 2];
        }
        if !was_ended {
            self.show_plain(&view, direction, Purpose::Disconnect, &Payload::None);
        }
    }

    /// Bytes of a circuit have passed, of which a guest without rings is at one end, or at both. What an agent says in its own call to the host is not shown: there
    /// is the secret among it by which calls to it prove that they come from the host.
    #[cold]
    pub(super) fn show_passed(&mut self, circuit: CircuitId, from: Side, payload: &Payload<'_>) {
        let agents_port = (HOST_CID, self.agent_port);
        let caller = self.shown(circuit, Side::Caller);
        let is_agents = caller.is_some_and(|shown| shown.view.peer == agents_port);
        let withheld = Payload::Withheld(payload.len());
        let payload = match is_agents && from == Side::Caller {
            true => &withheld,
            false => payload,
        };
        for side in [from, from.other()] {
            let direction = match side == from {
                true => Direction::Inbound,
                false => Direction::Outbound,
            };
            if let Some(view) = self.shown(circuit, side).map(|shown| shown.view) {
                self.show_plain(&view, direction, Purpose::Payload, payload);
            }
        }
    }

    /// The same of bytes that lie in the buffers held for the guest on `to`, behind the room for headers.
    #[cold]
    pub(super) fn show_received(
        &mut self,
        circuit: CircuitId,
        from: Side,
        to: LineId,
        memory: &GuestMemory,
        len: usize,
    ) {
        fn ring(fabric: &mut Fabric, line: LineId) -> Option<&mut Ring> {
            fabric.line(line)?.rings[RX].as_mut()
        }
        // Taken out, so that it can be read while it is shown.
        let held = ring(self, to).map(|ring| std::mem::take(&mut ring.held));
        let Some(held) = held else { return };
        let mut left = len;
        for chain in &held {
            let part = (total_len(&chain.writable) - HEADER_LEN).min(left);
            if part == 0 {
                break;
            }
            let payload = Payload::Guest {
                memory,
                ranges: &chain.writable,
                offset: HEADER_LEN,
                len: part,
            };
            self.show_passed(circuit, from, &payload);
            left -= part;
        }
        if let Some(ring) = ring(self, to) {
            ring.held = held;
        }
    }

    /// One direction of a relay is over.
    #[cold]
    pub(super) fn show_relay_end(&mut self, circuit: CircuitId, from: Side) {
        self.show_end(circuit, from, Direction::Inbound, false);
        self.show_end(circuit, from.other(), Direction::Outbound, false);
    }

    /// Events of circuits with a guest without rings.
    #[cold]
    pub(super) fn show_event(&mut self, event: &Event) {
        match *event {
            Event::HostDialed { circuit, result } => match result {
                Ok(()) => self.show_connect(circuit, Side::Callee, Direction::Inbound),
                Err(_) => self.show_end(circuit, Side::Callee, Direction::Inbound, true),
            },
            Event::HostFinished { circuit } => {
                for side in [Side::Caller, Side::Callee] {
                    self.show_end(circuit, side, Direction::Inbound, false);
                }
            }
            _ => {}
        }
    }

    /// What the switch wants done about such circuits.
    #[cold]
    pub(super) fn show_action(&mut self, action: &Action) {
        match action {
            Action::HostDialing { circuit, .. } => {
                self.show_connect(*circuit, Side::Caller, Direction::Inbound);
            }
            Action::DialHybrid { circuit, .. } => {
                self.show_connect(*circuit, Side::Callee, Direction::Outbound);
            }
            Action::Relay { circuit, .. } | Action::HostAccepted { circuit, .. } => {
                self.show_connect(*circuit, Side::Caller, Direction::Outbound);
            }
            Action::HostRejected { circuit, .. } => {
                self.show_end(*circuit, Side::Caller, Direction::Outbound, true);
            }
            Action::Decided(decided) => self.show_refusal(decided),
            Action::HostShutdown {
                circuit,
                direction: vsock::Direction::Write,
            } => {
                for side in [Side::Caller, Side::Callee] {
                    self.show_end(*circuit, side, Direction::Outbound, false);
                }
            }
            Action::Released { circuit } => {
                for side in [Side::Caller, Side::Callee] {
                    let shown = self.captures.shown.remove(&(*circuit, side));
                    if let Some(shown) = shown.filter(|shown| shown.ended != [true; 2]) {
                        let direction = Direction::Outbound;
                        self.show_plain(
                            &shown.view,
                            direction,
                            Purpose::Disconnect,
                            &Payload::None,
                        );
                    }
                }
            }
            _ => {}
        }
    }

    /// A call that was refused at once, before there was a circuit: the port it came from is not known.
    fn show_refusal(&mut self, decided: &Decided) {
        let CallerId::Guest { line, port: 0 } = decided.caller else {
            return;
        };
        let has_rings = self.line(line).is_none_or(|line| line.frontend.is_some());
        let cid = self.switch.address(line).map(|address| address.cid);
        let Some(cid) = cid.filter(|_| !has_rings && decided.result.is_err()) else {
            return;
        };
        let view = HybridView {
            line,
            own: (cid, 0),
            peer: (decided.dialled_cid, decided.dialled_port),
        };
        for (direction, purpose) in [
            (Direction::Inbound, Purpose::Connect),
            (Direction::Outbound, Purpose::Disconnect),
        ] {
            self.show_plain(&view, direction, purpose, &Payload::None);
        }
    }
}

fn is_outbound(direction: Direction) -> bool {
    direction == Direction::Outbound
}

#[cfg(test)]
mod tests;
