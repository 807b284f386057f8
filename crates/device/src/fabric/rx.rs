//! To guests: filling their rings.

use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

use guestmem::guest::{self, GuestMemory};
use guestmem::io::{Received, Scatter, is_memory_fault};
use policy::LineId;
use vsock::{CircuitId, Event, Reason, Sent, Side, Transmit};
use wire::pcapng::Direction;
use wire::vsock::{HEADER_LEN, Header, Operation};

use super::{Fabric, TURN_BYTES, TURN_DESCRIPTORS, peek_circuit};
use crate::host_socket::{BehindRequest, HostSocket, is_broken};
use crate::kept::Parcel;
use crate::vsock::{RX, TX};

/// Turns of circuits that one line has before the other lines have theirs.
const PUMP_TURNS: usize = 256;

/// What a sleeping guest gets before it is woken, in bytes, if there is more; and what one circuit's turn has beyond it. Turns are not cut for that: a
/// program's socket would have to be asked twice.
const EARLY_BYTES: usize = 32 * 1024;

/// Buffers that one read of a host program's socket may fill.
const SCATTER_BUFFERS: usize = 64;

/// A turn of data, as the switch asked for it.
#[derive(Debug, Clone, Copy)]
pub(super) struct Turn {
    pub(super) line: LineId,
    pub(super) circuit: CircuitId,
    pub(super) from: Side,
    budget: usize,
    packets: usize,
    header: Header,
}

impl Fabric {
    /// Pumps every line that waits for it, now instead of after the batch.
    pub(super) fn pump_woken(&mut self) {
        for _ in 0..self.woken.len() {
            if let Some(line) = self.woken.pop_front() {
                self.pump(line);
            }
        }
    }

    /// Sends to a guest what there is for it, while its ring has room.
    pub(super) fn pump(&mut self, id: LineId) {
        self.give(id, None);
    }

    /// The same, and a guest that sleeps is shown the first of it while the rest is copied. Not to be called in the middle of a batch.
    pub(super) fn pump_early(&mut self, id: LineId) {
        let ring = self.line(id).and_then(|line| line.rings[RX].as_ref());
        let sleeps = ring.is_some_and(|ring| ring.queue.awaits_interrupt());
        let early = sleeps.then(|| self.bytes_had(id) + EARLY_BYTES);
        self.give(id, early);
    }

    /// `early`: when it has had so many bytes of this turn, what there is until then is published.
    #[inline(never)]
    fn give(&mut self, id: LineId, mut early: Option<usize>) {
        let Some(line) = self.line(id) else { return };
        line.woken = false;
        if self.lost_memory(id) {
            return;
        }
        for _ in 0..PUMP_TURNS {
            if self.has_had_enough(id) {
                break;
            }
            if !self.switch.has_work(id) || !self.has_buffers(id, 1) {
                return;
            }
            if early.is_some_and(|early| self.bytes_had(id) >= early) {
                early = None;
                self.publish();
            }
            match self.switch.next_for(self.now, id, &mut self.actions) {
                None => return self.carry_out(),
                Some(Transmit::Control(header)) => self.send_control(id, &header),
                Some(Transmit::Data {
                    circuit,
                    from,
                    budget,
                    packets,
                    header,
                }) => self.send_data(Turn {
                    line: id,
                    circuit,
                    from,
                    budget: budget as usize,
                    packets: packets as usize,
                    header,
                }),
            }
            self.carry_out();
        }
        self.wake(id);
    }

    /// What this guest has had of this turn, in bytes.
    fn bytes_had(&mut self, id: LineId) -> usize {
        let turn = self.turn;
        self.line(id).map_or(0, |line| line.had.of(turn).bytes)
    }

    /// Whether this guest has had so much of this turn that it is the others' turn.
    fn has_had_enough(&mut self, id: LineId) -> bool {
        let turn = self.turn;
        self.line(id).is_some_and(|line| {
            let had = line.had.of(turn);
            had.descriptors >= TURN_DESCRIPTORS || had.bytes >= TURN_BYTES
        })
    }

    /// Takes buffers from the guest until at least `count` are held. Without enough, it asks for a notification of new ones.
    fn has_buffers(&mut self, id: LineId, count: usize) -> bool {
        let turn = self.turn;
        loop {
            let mut chain = self.spare_chains.pop().unwrap_or_default();
            let Some(line) = self.line(id) else {
                return false;
            };
            if !line.is_running() {
                return false;
            }
            let Some(ring) = line.rings[RX].as_mut() else {
                return false;
            };
            if ring.held.len() >= count {
                self.spare_chains.push(chain);
                return true;
            }
            match ring.queue.pop(&mut chain) {
                Ok(true) if guest::total_len(&chain.writable) > HEADER_LEN => {
                    line.had.of(turn).descriptors += usize::from(chain.descriptors);
                    ring.held.push_back(chain)
                }
                Ok(true) => {
                    let len = guest::total_len(&chain.writable);
                    self.fail_line(
                        id,
                        &format!("a receive buffer of {len} bytes holds no packet"),
                    );
                    return false;
                }
                Ok(false) => {
                    let more = ring.queue.enable_notifications();
                    self.spare_chains.push(chain);
                    if !more {
                        return false;
                    }
                }
                Err(error) => {
                    self.fail_line(id, &error);
                    return false;
                }
            }
        }
    }

    /// Writes a header into the first buffer held, whose payload is there, and gives the buffer to the guest.
    fn finish_packet(&mut self, id: LineId, memory: &GuestMemory, header: &Header) -> bool {
        let turn = self.turn;
        let Some(line) = self.line(id) else {
            return false;
        };
        let Some(chain) = line.rings[RX]
            .as_mut()
            .and_then(|ring| ring.held.pop_front())
        else {
            return false;
        };
        line.had.of(turn).bytes += header.len as usize;
        let written = memory.write(&chain.writable, 0, &header.to_bytes());
        if self.captures.are_wanted() && written.is_ok() {
            self.show_packet(id, Direction::Outbound, header, memory, &chain.writable);
        }
        self.complete(id, RX, chain, HEADER_LEN as u32 + header.len);
        if let Err(error) = written {
            self.fail_line(id, &error);
            return false;
        }
        true
    }

    fn send_control(&mut self, id: LineId, header: &Header) {
        if let Some(memory) = self.memory(id, RX) {
            self.finish_packet(id, &memory, header);
        }
    }

    /// Sends data, or if it turns out that there is none, the header alone: the switch counts the credit in it as shown to the
    /// guest, which would otherwise wait for it for ever.
    fn send_data(&mut self, turn: Turn) {
        if self.has_yet_to_park(turn.circuit, turn.from) {
            return;
        }
        let Some(circuit) = self.circuit(turn.circuit) else {
            return;
        };
        let packets = if circuit.keeps_something(turn.from) {
            self.send_kept_to_guest(turn)
        } else if circuit.host.is_none() {
            // Nothing more comes from there.
            self.tell(Event::HostDrained {
                circuit: turn.circuit,
            });
            0
        } else if circuit.is_stream() {
            self.send_from_host(turn)
        } else {
            self.take_message(turn);
            0
        };
        // A message that has just been taken goes with the same numbers, in a turn of its own.
        let nothing_follows = self
            .circuit(turn.circuit)
            .is_some_and(|circuit| !circuit.keeps_something(turn.from));
        if packets == 0 && nothing_follows && self.has_buffers(turn.line, 1) {
            let header = Header {
                operation: Operation::CreditUpdate as u16,
                ..turn.header
            };
            self.send_control(turn.line, &header);
        }
    }

    /// From the host program's socket straight into the guest's buffers. Returns how many packets were sent.
    fn send_from_host(&mut self, turn: Turn) -> u32 {
        if !self.is_past_request(turn.circuit) {
            return 0;
        }
        let Some(memory) = self.memory(turn.line, RX) else {
            return 0;
        };
        let Some((buffers, room)) = self.gather_room(turn) else {
            return 0;
        };
        let host = self
            .circuit(turn.circuit)
            .and_then(|circuit| circuit.host.as_ref());
        let party = host.and_then(|host| host.party);
        let room = room.min(self.slow.piece(party));
        let received = match self.slow.is_suspect(party) {
            true => self.receive_by_copy(turn, &memory, buffers, room),
            false => self.receive_into(turn, &memory, buffers, room),
        };
        match received {
            Ok(received) if received.len == 0 => self.host_ended(turn.circuit),
            Ok(received) => {
                let len = received.len;
                if self.captures.are_wanted() {
                    self.show_received(turn.circuit, turn.from, turn.line, &memory, len);
                }
                let packets = self.hand_over(turn, &memory, len);
                let sent = Sent {
                    circuit: turn.circuit,
                    from: turn.from,
                    len: len as u32,
                    straight: len as u32,
                    packets,
                };
                self.switch.transmitted(self.now, sent, &mut self.actions);
                let ending = self.host_is_ending(turn.circuit);
                if len < room && !ending && !received.control_dropped {
                    // A short read: the socket is empty, and will say when it is not. Descriptors that a program sends
                    // along cut a read short, too.
                    self.tell(Event::HostDrained {
                        circuit: turn.circuit,
                    });
                }
                self.act_on_overruns();
                return packets;
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                self.tell(Event::HostDrained {
                    circuit: turn.circuit,
                });
            }
            Err(error) if is_memory_fault(&error) => self.fail_line(turn.line, &error),
            Err(_) => self.tell(Event::Kill {
                circuit: turn.circuit,
                reason: Reason::PeerReset,
            }),
        }
        0
    }

    /// The host program says no more, or its circuit was cut before it could.
    pub(super) fn host_ended(&mut self, id: CircuitId) {
        let host = self.circuit(id).and_then(|circuit| circuit.host.as_ref());
        let event = match host.is_some_and(HostSocket::is_cut) {
            true => Event::Kill {
                circuit: id,
                reason: Reason::PeerReset,
            },
            false => Event::HostFinished { circuit: id },
        };
        self.tell(event);
    }

    /// Whether the host program has sent something behind its request. What follows from it if not has been done.
    fn is_past_request(&mut self, id: CircuitId) -> bool {
        let Some(host) = self.circuit(id).and_then(|circuit| circuit.host.as_mut()) else {
            return false;
        };
        if host.request_len == 0 {
            return true;
        }
        match host.behind_request() {
            BehindRequest::Data => {
                self.take_host_request(id);
                true
            }
            BehindRequest::End if host.broken || is_broken(&host.socket) => {
                self.tell(Event::Kill {
                    circuit: id,
                    reason: Reason::PeerReset,
                });
                false
            }
            BehindRequest::End => {
                self.tell(Event::HostFinished { circuit: id });
                false
            }
            BehindRequest::Nothing => {
                self.tell(Event::HostDrained { circuit: id });
                false
            }
        }
    }

    /// Holds as many buffers as this turn can use. Returns their number and their room for payload.
    fn gather_room(&mut self, turn: Turn) -> Option<(usize, usize)> {
        let most = turn.packets.min(SCATTER_BUFFERS);
        let mut room = 0;
        let mut buffers = 0;
        while buffers < most && room < turn.budget {
            if buffers > 0 && self.has_had_enough(turn.line)
                || !self.has_buffers(turn.line, buffers + 1)
            {
                break;
            }
            let ring = self.line(turn.line)?.rings[RX].as_ref()?;
            room += guest::total_len(&ring.held[buffers].writable) - HEADER_LEN;
            buffers += 1;
        }
        (buffers > 0).then_some((buffers, room.min(turn.budget)))
    }

    /// The same by memory of our own, so that the call is not charged for pages of the guest's that have to be made first.
    fn receive_by_copy(
        &mut self,
        turn: Turn,
        memory: &GuestMemory,
        buffers: usize,
        room: usize,
    ) -> io::Result<Received> {
        let mut own = std::mem::take(&mut self.message_room);
        let room = room.min(own.len());
        let received = self.receive_own(turn.circuit, &mut own[..room]);
        let copied = received.and_then(|received| {
            let mut left = &own[..received.len];
            let line = self.line(turn.line);
            let ring = line.and_then(|line| line.rings[RX].as_ref());
            for chain in ring.iter().flat_map(|ring| ring.held.iter().take(buffers)) {
                let part = guest::total_len(&chain.writable) - HEADER_LEN;
                let (now, later) = left.split_at(part.min(left.len()));
                memory
                    .write(&chain.writable, HEADER_LEN, now)
                    .map_err(|_| io::Error::from(rustix::io::Errno::FAULT))?;
                left = later;
            }
            Ok(received)
        });
        self.message_room = own;
        copied
    }

    /// Receives what there is in a host program's socket into memory of our own.
    pub(super) fn receive_own(&mut self, id: CircuitId, room: &mut [u8]) -> io::Result<Received> {
        let broken = || io::Error::from(io::ErrorKind::BrokenPipe);
        let host = peek_circuit(&self.circuits, id)
            .and_then(|circuit| circuit.host.as_ref())
            .ok_or_else(broken)?;
        let mut scatter = Scatter::new();
        scatter.push_bytes(room).map_err(io::Error::other)?;
        let receive = || scatter.receive_record(host.socket.as_fd());
        self.slow.timed(host.party, Some(id), receive)
    }

    fn receive_into(
        &mut self,
        turn: Turn,
        memory: &GuestMemory,
        buffers: usize,
        room: usize,
    ) -> io::Result<Received> {
        let broken = || io::Error::from(io::ErrorKind::BrokenPipe);
        let mut scatter = Scatter::new();
        let mut left = room;
        let line = self.lines.get(turn.line.0 as usize);
        let ring = line
            .and_then(|line| line.as_ref()?.rings[RX].as_ref())
            .ok_or_else(broken)?;
        for chain in ring.held.iter().take(buffers) {
            let len = (guest::total_len(&chain.writable) - HEADER_LEN).min(left);
            if scatter
                .push(memory, &chain.writable, HEADER_LEN, len)
                .is_err()
            {
                break;
            }
            left -= len;
        }
        let host = peek_circuit(&self.circuits, turn.circuit)
            .and_then(|circuit| circuit.host.as_ref())
            .ok_or_else(broken)?;
        let receive = || scatter.receive_record(host.socket.as_fd());
        self.slow.timed(host.party, Some(turn.circuit), receive)
    }

    /// Gives the buffers that `len` bytes have filled to the guest. Returns how many.
    fn hand_over(&mut self, turn: Turn, memory: &GuestMemory, len: usize) -> u32 {
        let mut left = len;
        let mut packets = 0;
        while left > 0 {
            let Some(chain) = self
                .line(turn.line)
                .and_then(|line| line.rings[RX].as_ref()?.held.front())
            else {
                break;
            };
            let part = (guest::total_len(&chain.writable) - HEADER_LEN).min(left);
            let header = Header {
                len: part as u32,
                ..turn.header
            };
            if !self.finish_packet(turn.line, memory, &header) {
                break;
            }
            left -= part;
            packets += 1;
        }
        packets
    }

    /// What is kept, cut to the guest's buffers. Returns how many packets were sent.
    fn send_kept_to_guest(&mut self, turn: Turn) -> u32 {
        let Some(memory) = self.memory(turn.line, RX) else {
            return 0;
        };
        let mut sent = Sent {
            circuit: turn.circuit,
            from: turn.from,
            len: 0,
            straight: 0,
            packets: 0,
        };
        let mut budget = turn.budget;
        while budget > 0 && (sent.packets as usize) < turn.packets {
            if sent.packets > 0 && self.has_had_enough(turn.line) || !self.has_buffers(turn.line, 1)
            {
                break;
            }
            let Some((len, flags)) = self.fill_buffer(turn, &memory, budget) else {
                break;
            };
            let header = Header {
                len: len as u32,
                flags,
                ..turn.header
            };
            if !self.finish_packet(turn.line, &memory, &header) {
                break;
            }
            budget -= len;
            sent.len += len as u32;
            sent.packets += 1;
        }
        self.switch.transmitted(self.now, sent, &mut self.actions);
        sent.packets
    }

    /// Fills the first buffer held from what is kept, for a stream from as many parcels as fit. Returns the payload's
    /// length and the packet's flags; nothing when there is nothing to send.
    fn fill_buffer(
        &mut self,
        turn: Turn,
        memory: &Arc<GuestMemory>,
        budget: usize,
    ) -> Option<(usize, u32)> {
        let ring = self.line(turn.line)?.rings[RX].as_ref()?;
        let room = (guest::total_len(&ring.held.front()?.writable) - HEADER_LEN).min(budget);
        let mut filled = 0;
        let mut flags = 0;
        while filled < room {
            let circuit = self.circuit(turn.circuit)?;
            let is_stream = circuit.is_stream();
            let Some(parcel) = circuit.kept(turn.from).and_then(|kept| kept.front()) else {
                break;
            };
            let len = parcel.left().min(room - filled);
            if let Err(error) = self.copy_parcel(turn, memory, filled, len) {
                let vm = self.line(turn.line).map(|line| line.name.clone());
                tracing::warn!(vm, %error, "a copy between guests failed");
                self.tell(Event::Kill {
                    circuit: turn.circuit,
                    reason: Reason::MemoryFault,
                });
                return None;
            }
            filled += len;
            let kept = self.circuit(turn.circuit)?.kept(turn.from)?;
            let parcel = kept.front()?;
            parcel.advance(len);
            if parcel.left() > 0 {
                continue;
            }
            let parcel = kept.pop()?;
            flags = if is_stream { 0 } else { parcel.flags() };
            self.give_back(parcel);
            if !is_stream {
                break;
            }
        }
        (filled > 0).then_some((filled, flags))
    }

    /// Copies the next `len` bytes of the first parcel kept into the first buffer held, `filled` bytes into its payload.
    fn copy_parcel(
        &mut self,
        turn: Turn,
        memory: &GuestMemory,
        filled: usize,
        len: usize,
    ) -> Result<(), guestmem::guest::MemoryError> {
        let gone = || guestmem::guest::MemoryError::RangesTooShort {
            offset: filled,
            wanted: len,
            found: 0,
        };
        let source_line = match self
            .circuit(turn.circuit)
            .and_then(|circuit| circuit.kept(turn.from)?.front())
        {
            Some(Parcel::Parked { line, .. }) => Some(*line),
            Some(Parcel::Stored { .. }) => None,
            None => return Err(gone()),
        };
        let source = match source_line {
            Some(line) => Some(self.memory(line, TX).ok_or_else(gone)?),
            None => None,
        };
        let index = turn.circuit.index as usize;
        let ring = self
            .lines
            .get(turn.line.0 as usize)
            .and_then(Option::as_ref)
            .and_then(|line| line.rings[RX].as_ref());
        let buffer = ring.and_then(|ring| ring.held.front()).ok_or_else(gone)?;
        let circuit = self.circuits.get_mut(index).and_then(Option::as_mut);
        let parcel = circuit
            .and_then(|circuit| circuit.kept(turn.from)?.front())
            .ok_or_else(gone)?;
        match (parcel, source) {
            (Parcel::Parked { chain, offset, .. }, Some(source)) => guest::copy(
                &source,
                &chain.readable,
                *offset,
                memory,
                &buffer.writable,
                HEADER_LEN + filled,
                len,
            ),
            (Parcel::Stored { bytes, offset, .. }, _) => memory.write(
                &buffer.writable,
                HEADER_LEN + filled,
                &bytes[*offset..*offset + len],
            ),
            (Parcel::Parked { .. }, None) => Err(gone()),
        }
    }
}
