//! From guests: draining their rings, and sending on what they sent.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

use guestmem::guest::{self, GuestMemory};
use guestmem::io::{Gather, is_memory_fault};
use guestmem::queue::Chain;
use policy::LineId;
use rustix::io::Errno;
use vsock::{CircuitId, Event, Reason, Side};
use wire::pcapng::Direction;
use wire::vsock::{HEADER_LEN, Header, Operation, SEQPACKET_END_OF_MESSAGE};

use super::capture::Payload;
use super::{Fabric, TURN_DESCRIPTORS, peek_circuit};
use crate::vsock::TX;

/// Packets taken from one guest in one turn, before the others have theirs. Also by how many a guest may exceed what it
/// may send without payload.
const DRAIN_BATCH: usize = 256;

/// How often the log says that a guest sends too many packets without payload.
const THROTTLE_REPORTS: Duration = Duration::from_secs(60);

/// What is for other guests is passed on at the latest when it is so much, in bytes.
const GUEST_BATCH_BYTES: usize = 64 * 1024;

/// What a batch has at most, in bytes, and what one packet has more: some 0.1 ms of copying. Of packets of up to 4 KiB it is a whole batch, so
/// those are put together as far as they go.
const BATCH_BYTES: usize = 1 << 20;

/// Packets for one circuit that a batch waits for, on average, beyond half of the ring.
const PACKETS_TOGETHER: usize = 4;

/// Packets of one circuit that are sent to a host program in one call.
const OUTGOING_PACKETS: usize = 64;

/// Lists for such packets that are kept for use again: for as many circuits at a time nothing is allocated.
const SPARE_LISTS: usize = 64;

/// A packet that the switch is deciding about.
#[derive(Debug)]
pub(super) struct Packet {
    pub(super) line: LineId,
    pub(super) chain: Chain,
    pub(super) header: Header,
}

/// What has been taken from a guest in the batch at hand.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Batch {
    packets: usize,
    /// Descriptors of the ring that they take up.
    entries: usize,
    /// Descriptors that were read for them.
    descriptors: usize,
    /// Payload, as far as headers say.
    bytes: usize,
    /// Payload for other guests.
    bytes_for_guests: usize,
    /// Its receivers have been given what they take.
    pumped: bool,
}

/// Packets of one circuit for a program on the host, to be sent in one call.
#[derive(Debug)]
pub(super) struct Outgoing {
    circuit: CircuitId,
    from: Side,
    packets: Vec<Packet>,
}

impl Fabric {
    /// Takes what a guest has sent, up to a batch. What a guest has sent last is taken, too, unless it is throttled.
    pub(super) fn drain(&mut self, id: LineId) {
        let Some(line) = self.line(id) else { return };
        line.draining = false;
        let is_heard = line.is_running() && !self.lost_memory(id) && !self.is_throttled(id);
        if is_heard && self.drain_batch(id) {
            self.schedule_drain(id);
        } else {
            self.leave(id);
        }
    }

    /// Whether a guest is not to be heard now, as it has sent too many packets without payload. Then it will be later.
    fn is_throttled(&mut self, id: LineId) -> bool {
        let now = self.now;
        let Some(until) = self.switch.throttled_until(now, id) else {
            return false;
        };
        self.throttled_lines.insert((until, id));
        let Some(line) = self.line(id) else {
            return true;
        };
        if let Some(ring) = line.rings[TX].as_mut() {
            // Another notification would say nothing new.
            ring.queue.disable_notifications();
        }
        if line
            .throttle_reported_at
            .is_none_or(|at| now >= at + THROTTLE_REPORTS)
        {
            line.throttle_reported_at = Some(now);
            tracing::warn!(
                vm = line.name,
                "the guest sends more packets without payload than its limit allows: they have to wait"
            );
        }
        true
    }

    /// Drains again the guests that have been throttled long enough.
    pub(super) fn end_throttles(&mut self) {
        while let Some((until, id)) = self.throttled_lines.first().copied() {
            if until > self.now {
                break;
            }
            self.throttled_lines.pop_first();
            self.schedule_drain(id);
        }
    }

    /// Takes a batch of packets. Returns whether there may be more.
    fn drain_batch(&mut self, id: LineId) -> bool {
        if let Some(ring) = self.line(id).and_then(|line| line.rings[TX].as_mut()) {
            ring.queue.disable_notifications();
        }
        self.batch = Batch::default();
        let more = self.take_batch(id);
        self.flush_outgoing();
        let taken = self.batch.packets;
        match self.line(id).and_then(|line| line.leaving.as_mut()) {
            Some(leaving) => {
                leaving.left = leaving.left.saturating_sub(taken);
                more && leaving.left > 0
            }
            None => more,
        }
    }

    /// Takes packets until it is enough. Returns whether there may be more.
    fn take_batch(&mut self, id: LineId) -> bool {
        while !self.batch_is_full(id) {
            let mut chain = self.spare_chains.pop().unwrap_or_default();
            let is_first = self.batch.packets == 0;
            let Some(ring) = self.line(id).and_then(|line| line.rings[TX].as_mut()) else {
                return false;
            };
            match ring.queue.pop(&mut chain) {
                Ok(true) => {
                    if is_first {
                        ring.found();
                        // Another line may fail, and all be written down, while a packet is neither parked nor given back.
                        self.note_line(id);
                    }
                    self.batch.packets += 1;
                    self.batch.entries += usize::from(chain.entries);
                    self.batch.descriptors += usize::from(chain.descriptors);
                    self.take_packet(id, chain);
                }
                Ok(false) => {
                    self.spare_chains.push(chain);
                    self.leave_unarmed(id);
                    return false;
                }
                Err(error) => {
                    self.fail_line(id, &error);
                    return false;
                }
            }
        }
        true
    }

    /// Whether enough has been taken from a guest for the next step. The guest and its receivers are to be at work while we are,
    /// so half of its ring is enough, unless that is of so many circuits that hardly two packets could be sent
    /// together; and what is for other guests goes on sooner, as their credit does not reach far.
    fn batch_is_full(&self, id: LineId) -> bool {
        let Batch {
            packets,
            entries,
            descriptors,
            bytes,
            bytes_for_guests,
            ..
        } = self.batch;
        let line = self.lines.get(id.0 as usize).and_then(Option::as_ref);
        let half = line.map_or(0, |line| line.half_of_ring());
        let together = self.outgoing.len() * PACKETS_TOGETHER;
        // An empty batch is not full, even where the ring has a single entry and no half.
        packets >= DRAIN_BATCH
            || descriptors >= TURN_DESCRIPTORS
            || bytes >= BATCH_BYTES
            || bytes_for_guests >= GUEST_BATCH_BYTES
            || (packets > 0 && entries >= half && packets >= together)
    }

    fn take_packet(&mut self, id: LineId, chain: Chain) {
        let Some(memory) = self.memory(id, TX) else {
            return;
        };
        let mut bytes = [0; HEADER_LEN];
        if let Err(error) = memory.read(&chain.readable, 0, &mut bytes) {
            tracing::debug!(line = id.0, %error, "dropped a packet without a whole header");
            self.switch.malformed(self.now, id);
            return self.complete(id, TX, chain, 0);
        }
        let mut header = Header::from_bytes(&bytes);
        if self.captures.are_wanted() {
            self.show_packet(id, Direction::Inbound, &header, &memory, &chain.readable);
        }
        let payload = guest::total_len(&chain.readable) - HEADER_LEN;
        self.batch.bytes += payload.min(header.len as usize);
        if header.operation == Operation::Data as u16 && header.len as usize > payload {
            // It announces bytes that are not there. No operation has this number: its circuit is cut short.
            header.operation = 0;
        }
        self.packet = Some(Packet {
            line: id,
            chain,
            header,
        });
        self.tell(Event::Packet { line: id, header });
        if let Some(packet) = self.packet.take() {
            self.complete(packet.line, TX, packet.chain, 0);
        }
    }

    /// The payload of the packet being decided about goes to the other side of `circuit`.
    pub(super) fn forward(&mut self, id: CircuitId, from: Side) {
        let Some(packet) = self.packet.take() else {
            return;
        };
        if self.captures.are_wanted() {
            self.show_forwarded(id, from, &packet);
        }
        let Some(circuit) = self.circuit(id) else {
            // Between two guests there is nothing to hold on to until something has to be kept.
            self.install(crate::circuit::CircuitIo::new(
                id,
                socket_type(&packet.header),
            ));
            return self.keep(id, from, packet);
        };
        let straight = circuit.host.as_ref().is_some_and(|host| host.writable)
            && !circuit.keeps_something(from)
            && (circuit.is_stream() || packet.header.flags & SEQPACKET_END_OF_MESSAGE != 0);
        if !straight {
            return self.keep(id, from, packet);
        }
        let alone = !circuit.is_stream();
        let party = circuit.host.as_ref().and_then(|host| host.party);
        if self.slow.is_suspect(party) {
            // What has been gathered before goes first.
            self.send_gathered(id);
            return self.keep(id, from, packet);
        }
        let position = self.gather(id, from, packet);
        if alone || self.outgoing[position].packets.len() >= OUTGOING_PACKETS {
            let outgoing = self.outgoing.swap_remove(position);
            self.send_outgoing(outgoing);
        }
    }

    #[cold]
    fn show_forwarded(&mut self, id: CircuitId, from: Side, packet: &Packet) {
        if let Some(memory) = self.memory(packet.line, TX) {
            let payload = Payload::Guest {
                memory: &memory,
                ranges: &packet.chain.readable,
                offset: HEADER_LEN,
                len: packet.header.len as usize,
            };
            self.show_passed(id, from, &payload);
        }
    }

    fn send_gathered(&mut self, id: CircuitId) {
        let position = self
            .outgoing
            .iter()
            .rposition(|outgoing| outgoing.circuit == id);
        if let Some(position) = position {
            let outgoing = self.outgoing.swap_remove(position);
            self.send_outgoing(outgoing);
        }
    }

    /// Puts a packet to the others of its circuit, which may lie among those of any number of other circuits in the guest's
    /// ring: so a hundred streams of small packets cost as few system calls as one. Returns their position.
    fn gather(&mut self, id: CircuitId, from: Side, packet: Packet) -> usize {
        let known = self
            .outgoing
            .iter()
            .rposition(|outgoing| outgoing.circuit == id);
        let position = known.unwrap_or_else(|| {
            self.outgoing.push(Outgoing {
                circuit: id,
                from,
                packets: self.spare_packets.pop().unwrap_or_default(),
            });
            self.outgoing.len() - 1
        });
        self.outgoing[position].packets.push(packet);
        position
    }

    /// Keeps a packet until its destination takes it: parked where it is, if that is another guest and the sender has
    /// not parked too much already; else stored.
    fn keep(&mut self, id: CircuitId, from: Side, packet: Packet) {
        let line = packet.line;
        let for_guest = self
            .circuit(id)
            .is_some_and(|circuit| circuit.host.is_none());
        if for_guest {
            self.batch.bytes_for_guests += packet.header.len as usize;
        }
        if for_guest && !self.batch.pumped && !self.may_park(&packet) {
            // The receivers may have room; what is parked first goes first.
            self.batch.pumped = true;
            self.pump_woken();
        }
        if for_guest && self.may_park(&packet) && self.circuit(id).is_some() {
            self.park(id, from, packet);
        } else {
            self.store(id, from, &packet, 0);
            self.complete(line, TX, packet.chain, 0);
        }
    }

    /// Copies a packet's payload from `offset` on into memory of our own.
    fn store(&mut self, id: CircuitId, from: Side, packet: &Packet, offset: usize) {
        let Some(memory) = self.memory(packet.line, TX) else {
            return self.lose(id);
        };
        let Some(circuit) = self.circuit(id) else {
            return;
        };
        let len = packet.header.len as usize - offset;
        let is_stream = circuit.is_stream();
        // Everything may have been written down since the packet came, when another line failed.
        self.switch.note_changed(id);
        let messages = self.messages_of(packet.line).filter(|_| !is_stream);
        let Some(circuit) = self.circuit(id) else {
            return;
        };
        if !circuit.kept_or_new(from).may_store(len, messages.as_ref()) {
            return self.end_for_messages(id);
        }
        let entry = messages.map(|messages| messages.tally.enter(1));
        let room = circuit
            .kept_or_new(from)
            .store(len, packet.header.flags, entry);
        if let Err(error) = memory.read(&packet.chain.readable, HEADER_LEN + offset, room) {
            self.tell(Event::Kill {
                circuit: id,
                reason: Reason::MemoryFault,
            });
            self.fail_line(packet.line, &error);
        } else if self.circuit(id).is_some_and(|circuit| {
            let takes = circuit.host.as_ref().is_some_and(|host| host.writable);
            takes && !circuit.scheduled
        }) {
            // A message has just become whole. What was kept before has a turn of its own.
            self.send_kept(id);
        }
    }

    /// Ends a circuit of which bytes count as kept that cannot be had any more: it would wait for them for ever.
    fn lose(&mut self, id: CircuitId) {
        self.tell(Event::Kill {
            circuit: id,
            reason: Reason::LineDown,
        });
    }

    /// Sends on all packets that have been put together.
    pub(super) fn flush_outgoing(&mut self) {
        while let Some(outgoing) = self.outgoing.pop() {
            self.send_outgoing(outgoing);
        }
    }

    fn send_outgoing(&mut self, outgoing: Outgoing) {
        let Outgoing {
            circuit: id,
            from,
            mut packets,
        } = outgoing;
        let Some(memory) = packets
            .first()
            .and_then(|packet| self.memory(packet.line, TX))
        else {
            packets.clear();
            return self.lose(id);
        };
        let mut sent = 0;
        let mut next = 0;
        let mut failed = None;
        while next < packets.len() {
            let (count, step) = self.send_packets(id, &memory, &packets[next..]);
            let offered: usize = packets[next..next + count]
                .iter()
                .map(|packet| packet.header.len as usize)
                .sum();
            let Some(step) = step else {
                // From memory of our own it takes fewer pieces, and the socket has room.
                self.delivered(id, from, std::mem::take(&mut sent));
                for packet in &packets[next..] {
                    self.store(id, from, packet, 0);
                }
                break;
            };
            match step {
                Ok(step) => {
                    sent += step;
                    next += count;
                    if step < offered {
                        self.host_is_full(id);
                        self.delivered(id, from, std::mem::take(&mut sent));
                        let mut skip = step;
                        for packet in &packets[next - count..] {
                            let len = packet.header.len as usize;
                            if skip < len {
                                self.store(id, from, packet, skip);
                            }
                            skip = skip.saturating_sub(len);
                        }
                        break;
                    }
                }
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        for packet in packets.drain(..) {
            self.complete(packet.line, TX, packet.chain, 0);
        }
        if self.spare_packets.len() < SPARE_LISTS {
            self.spare_packets.push(packets);
        }
        self.delivered(id, from, sent);
        if let Some(error) = failed {
            self.host_write_failed(id, &error);
        }
        self.act_on_overruns();
    }

    /// A host program's socket has taken this much from the guest's memory. To be said before anything that may find that socket gone: then all
    /// that counts as kept is given up.
    fn delivered(&mut self, id: CircuitId, from: Side, sent: usize) {
        if sent > 0 {
            let credit = self.switch.window_towards(id, from.other());
            self.nap.carried(sent, id, credit);
            self.tell(Event::Delivered {
                circuit: id,
                len: sent as u32,
            });
        }
    }

    /// Sends as many of the packets as one call takes. Returns how many were offered, and how many bytes were taken; nothing
    /// when the first packet alone has more pieces than one call takes.
    fn send_packets(
        &mut self,
        id: CircuitId,
        memory: &GuestMemory,
        packets: &[Packet],
    ) -> (usize, Option<io::Result<usize>>) {
        let circuit = peek_circuit(&self.circuits, id);
        let Some((host, is_stream)) =
            circuit.and_then(|circuit| Some((circuit.host.as_ref()?, circuit.is_stream())))
        else {
            return (packets.len(), Some(Err(io::ErrorKind::BrokenPipe.into())));
        };
        let mut gather = Gather::new();
        let mut count = 0;
        for packet in packets {
            let len = packet.header.len as usize;
            if gather
                .push(memory, &packet.chain.readable, HEADER_LEN, len)
                .is_err()
            {
                break;
            }
            count += 1;
        }
        if count == 0 {
            return (0, None);
        }
        let send = || gather.send(host.socket.as_fd(), !is_stream);
        match self.slow.timed(host.party, Some(id), send) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => (count, Some(Ok(0))),
            other => (count, Some(other)),
        }
    }

    pub(super) fn host_write_failed(&mut self, id: CircuitId, error: &io::Error) {
        let reason = match Errno::from_io_error(error) {
            _ if is_memory_fault(error) => Reason::MemoryFault,
            Some(Errno::MSGSIZE) => Reason::MessageTooLong,
            error => return self.host_takes_no_more(id, error != Some(Errno::PIPE)),
        };
        self.tell(Event::Kill {
            circuit: id,
            reason,
        });
    }

    /// Discards what was kept for a program, which has nowhere to go. What it sent before a reset is still to be read.
    fn host_takes_no_more(&mut self, id: CircuitId, was_reset: bool) {
        if let Some(host) = self.circuit(id).and_then(|circuit| circuit.host.as_mut()) {
            host.broken |= was_reset;
        }
        for side in [Side::Caller, Side::Callee] {
            self.discard(id, side);
        }
        self.tell(Event::HostRefused { circuit: id });
    }

    /// Fails the line of a guest whose memory was taken away under it, and under us. Returns whether it did.
    pub(super) fn lost_memory(&mut self, id: LineId) -> bool {
        let lost = self
            .memory(id, TX)
            .is_some_and(|memory| memory.is_poisoned());
        if lost {
            self.fail_line(id, &guestmem::guest::MemoryError::Poisoned);
        }
        lost
    }

    pub(super) fn memory(&mut self, id: LineId, index: usize) -> Option<Arc<GuestMemory>> {
        let ring = self.line(id)?.rings[index].as_ref()?;
        Some(Arc::clone(ring.queue.memory()))
    }
}

pub(super) fn socket_type(header: &Header) -> wire::vsock::SocketType {
    wire::vsock::SocketType::from_wire(header.socket_type)
        .unwrap_or(wire::vsock::SocketType::Stream)
}
