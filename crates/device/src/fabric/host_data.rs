//! Bytes to and from the programs of the host: when their sockets are ready, and what is kept for them.

use std::io;
use std::os::fd::AsFd;

use guestmem::io::Gather;
use rustix::net::sockopt::set_socket_send_buffer_size;
use vsock::{CircuitId, Event, Side};
use wire::vsock::SEQPACKET_END_OF_MESSAGE;

use super::host::SOCKET_EVENTS;
use super::pass::LOOK_BYTES;
use super::{Fabric, find_circuit};
use crate::caller::Who;
use crate::host_socket::BehindRequest;
use crate::kept::Parcel;
use crate::reactor::{EventFlags, Token};

const FULL_SOCKET_EVENTS: EventFlags = SOCKET_EVENTS.union(EventFlags::OUT);

/// What a host program's socket may hold, in bytes, once it has been found too small: the credit that a guest has, so that a
/// stream whose reader keeps up never has to be stored. Linux doubles the number for its own bookkeeping, and limits it
/// (`net.core.wmem_max`); with less, more is stored and nothing is lost.
const SEND_BUFFER_BYTES: usize = 256 * 1024;

/// Calls on a suspect's socket in one turn: each may be slow, and everything else waits.
const SUSPECT_CALLS: usize = 16;

impl Fabric {
    pub(super) fn host_ready(&mut self, id: CircuitId, flags: EventFlags) {
        let Some(circuit) = self.circuit(id) else {
            return;
        };
        let speaks = circuit.who.as_ref().is_some_and(Who::speaks);
        let Some(host) = circuit.host.as_mut() else {
            return;
        };
        let hung_up = flags.intersects(EventFlags::HUP | EventFlags::ERR);
        host.ending |= hung_up || flags.contains(EventFlags::RDHUP);
        if host.unanswered {
            // A caller that awaits no answer may have sent all it had to say, and be content.
            if hung_up && (speaks || host.behind_request() != BehindRequest::Data) {
                self.tell(Event::HostGone { circuit: id });
            }
            return;
        }
        if hung_up {
            // It receives nothing any more. What it sent before is still to be read.
            host.writable = false;
            self.discard_for_host(id);
            self.tell(Event::HostRefused { circuit: id });
        } else if flags.contains(EventFlags::OUT) && !host.writable {
            host.writable = true;
            self.watch_for_room(id, SOCKET_EVENTS);
            self.schedule(id);
        }
        if flags.intersects(EventFlags::IN | EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR)
        {
            self.host_is_readable(id);
        }
    }

    /// There may be something to read from a host program. Its request, as long as it is all there is, is nothing.
    pub(super) fn host_is_readable(&mut self, id: CircuitId) {
        let host = self.circuit(id).and_then(|circuit| circuit.host.as_ref());
        let only_request = host.is_some_and(|host| {
            host.request_len > 0 && host.behind_request() == BehindRequest::Nothing
        });
        if !only_request {
            self.tell(Event::HostReadable { circuit: id });
        }
    }

    fn discard_for_host(&mut self, id: CircuitId) {
        if let Some(side) = self.guest_side(id) {
            self.discard(id, side);
        }
    }

    /// The side that sends to the host program: the one that it keeps something from.
    fn guest_side(&mut self, id: CircuitId) -> Option<Side> {
        self.switch.host_side(id).map(Side::other)
    }

    pub(super) fn host_is_ending(&mut self, id: CircuitId) -> bool {
        self.circuit(id)
            .and_then(|circuit| circuit.host.as_ref())
            .is_some_and(|host| host.ending)
    }

    /// The socket took less than it was offered. Returns whether it has been given more room, so that it may take more.
    pub(super) fn host_is_full(&mut self, id: CircuitId) -> bool {
        let Some(host) = self.circuit(id).and_then(|circuit| circuit.host.as_mut()) else {
            return false;
        };
        if !std::mem::replace(&mut host.enlarged, true) {
            let enlarged = set_socket_send_buffer_size(&host.socket, SEND_BUFFER_BYTES);
            return enlarged.is_ok();
        }
        host.writable = false;
        self.watch_for_room(id, FULL_SOCKET_EVENTS);
        false
    }

    fn watch_for_room(&mut self, id: CircuitId, events: EventFlags) {
        let host = self
            .peek_circuit(id)
            .and_then(|circuit| circuit.host.as_ref());
        // It fails only when the kernel has no memory, and then only for a descriptor that is not yet watched.
        let _ = host.map(|host| self.reactor.retag(&host.socket, Token::Circuit(id), events));
    }

    /// Sends a host program what is kept for it, as far as its socket takes it, and a suspect only some of it now. Returns what
    /// that counts of a turn, in bytes.
    pub(super) fn send_kept(&mut self, id: CircuitId) -> usize {
        let Some(from) = self.guest_side(id) else {
            return 0;
        };
        let (mut delivered, mut calls) = (0, 0);
        while let Some((offered, result)) = self.offer_kept(id, from) {
            calls += 1;
            match result {
                Ok(sent) => {
                    delivered += sent;
                    self.drop_sent(id, from, sent);
                    if sent < offered && !self.host_is_full(id) {
                        break;
                    }
                    // The overrun may be another party's: then this circuit goes on in the next turn.
                    let is_suspect = calls >= SUSPECT_CALLS && self.host_is_suspect(id);
                    if is_suspect || self.slow.has_overrun() {
                        self.schedule(id);
                        break;
                    }
                }
                Err(error) => {
                    self.host_write_failed(id, &error);
                    return delivered + calls * LOOK_BYTES;
                }
            }
        }
        if delivered > 0 {
            self.tell(Event::Delivered {
                circuit: id,
                len: delivered as u32,
            });
        }
        self.act_on_overruns();
        delivered + calls.max(1) * LOOK_BYTES
    }

    fn host_is_suspect(&self, id: CircuitId) -> bool {
        let host = self
            .peek_circuit(id)
            .and_then(|circuit| circuit.host.as_ref());
        self.slow.is_suspect(host.and_then(|host| host.party))
    }

    /// Offers what is kept to the host program's socket: for a stream as much as one call takes, else one message.
    /// Returns how many bytes were offered and how many taken; nothing when there is nothing whole to offer.
    fn offer_kept(&mut self, id: CircuitId, from: Side) -> Option<(usize, io::Result<usize>)> {
        let circuit = find_circuit(&mut self.circuits, id)?;
        let is_stream = circuit.is_stream();
        if !circuit.keeps_something(from) || !circuit.host.as_ref()?.writable {
            return None;
        }
        let party = circuit.host.as_ref()?.party;
        let piece = self.slow.piece(party);
        let kept = circuit.take_kept(from)?;
        let mut gather = Gather::new();
        let mut whole = is_stream;
        for parcel in kept.iter() {
            let Parcel::Stored {
                bytes,
                offset,
                flags,
                ..
            } = parcel
            else {
                break;
            };
            let mut rest = &bytes[*offset..];
            if is_stream {
                rest = &rest[..rest.len().min(piece - gather.len())];
            }
            if gather.push_bytes(rest).is_err() || is_stream && gather.len() >= piece {
                break;
            }
            if !is_stream && flags & SEQPACKET_END_OF_MESSAGE != 0 {
                whole = true;
                break;
            }
        }
        let offered = gather.len();
        let socket = circuit.host.as_ref()?.socket.as_fd();
        let send = || gather.send(socket, !is_stream);
        let result = (whole && offered > 0).then(|| self.slow.timed(party, Some(id), send));
        drop(gather);
        circuit.put_kept(from, kept);
        match result? {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Some((offered, Ok(0))),
            other => Some((offered, other)),
        }
    }

    fn drop_sent(&mut self, id: CircuitId, from: Side, sent: usize) {
        let Some(kept) = self.circuit(id).and_then(|circuit| circuit.kept(from)) else {
            return;
        };
        let mut left = sent;
        while let Some(parcel) = kept.front() {
            let part = parcel.left().min(left);
            parcel.advance(part);
            left -= part;
            if parcel.left() > 0 {
                break;
            }
            kept.pop();
        }
    }
}
