//! The device's way to guests: draining one ring and filling the other.

use policy::LineId;
use wire::vsock::{Header, Operation, SHUTDOWN_SEND, SocketType};

use super::guest::Packet;
use super::log::{Input, Output};
use super::pace::BATCH;
use super::payload::Chunk;
use super::world::World;
use crate::end::EndKey;
use crate::{CircuitId, Event, Reason, Sent, Side, Transmit};

impl World {
    pub(crate) fn circuit_at(&self, key: &EndKey) -> Option<(CircuitId, Side)> {
        let EndKey {
            line,
            port,
            peer_cid,
            peer_port,
        } = *key;
        self.switch.circuit_of(line, port, peer_cid, peer_port)
    }

    /// Takes up to `max` packets that a guest has sent.
    pub(crate) fn take_from_guest(&mut self, line: LineId, max: usize) -> usize {
        let mut taken = 0;
        while taken < max {
            let Some(guest) = self.guests.get_mut(&line) else {
                break;
            };
            if guest.paused || !guest.up || guest.tx.is_empty() {
                break;
            }
            if taken % BATCH == 0 && !self.is_heard(line) {
                break;
            }
            let guest = self.guests.get_mut(&line).expect("just seen");
            let Some(packet) = guest.tx.pop_front() else {
                break;
            };
            taken += 1;
            let now = self.now;
            self.pace(line).sent(now, &packet.header);
            self.packet(line, packet);
        }
        taken
    }

    fn packet(&mut self, line: LineId, packet: Packet) {
        let Packet { header, chunk, .. } = packet;
        let key = EndKey {
            line,
            port: header.src_port,
            peer_cid: header.dst_cid as u32,
            peer_port: header.dst_port,
        };
        let hostile = self.guests[&line].hostile;
        self.dials += u64::from(self.dials_anew(line, &key, &header));
        let before = self.circuit_at(&key);
        if let Some((circuit, side)) = before {
            if self.log.traced.is_some() {
                self.log
                    .trace(&format!("{circuit:?} {side:?} sends {header:?}"));
            }
            if hostile {
                self.audit.taint(circuit);
            }
            let says_end =
                header.operation == Operation::Shutdown as u16 && header.flags & SHUTDOWN_SEND != 0;
            self.audit.end(circuit, side).finished |= says_end;
            if header.operation == Operation::Response as u16
                && side == Side::Callee
                && self.unanswered(circuit)
            {
                self.audit.opened(circuit);
            }
            let asks_again = header.operation == Operation::Request as u16
                && SocketType::from_wire(header.socket_type)
                    .is_some_and(|kind| self.asks_again(circuit, side, kind));
            if header.operation == Operation::Reset as u16
                || (header.operation == Operation::Request as u16 && !asks_again)
            {
                self.audit.gone(circuit, side);
            }
        }
        self.tell(Event::Packet { line, header }, chunk);
        let dialled = self.circuit_at(&key).filter(|(_, side)| {
            header.operation == Operation::Request as u16 && *side == Side::Caller
        });
        if let Some((circuit, _)) = dialled {
            let again = before.is_some_and(|(before, _)| before == circuit);
            if !again {
                let now = self.now;
                self.pace(line).dialled(now);
            }
            self.circuit_of
                .insert((line, key.port, key.peer_cid, key.peer_port), circuit);
            if hostile {
                self.audit.taint(circuit);
            }
        }
        self.follow_up();
    }

    /// Sends to a guest what the switch has for it, while there is room.
    pub(crate) fn pump(&mut self, line: LineId) -> usize {
        let mut sent = 0;
        while self
            .guests
            .get(&line)
            .is_some_and(|guest| guest.up && guest.room() > 0)
        {
            let orphan = !self.switch.lines[line.0 as usize].orphans.is_empty();
            let mut actions = Vec::new();
            let next = self.switch.next_for(self.now, line, &mut actions);
            self.log
                .record(Input::Next(self.now, line), Output::Next(next), &actions);
            match next {
                None => {}
                Some(Transmit::Control(header)) => {
                    self.pace(line).is_sent(&header);
                    self.control(line, header, orphan);
                }
                Some(Transmit::Data {
                    circuit,
                    from,
                    budget,
                    packets,
                    header,
                }) => self.send_data(line, circuit, from, budget, packets, header),
            }
            for action in actions {
                self.carry_out(action, &mut None);
            }
            self.follow_up();
            if next.is_none() {
                break;
            }
            sent += 1;
            assert!(sent < 1_000_000, "the switch never comes to an end");
        }
        sent
    }

    fn control(&mut self, line: LineId, header: Header, orphan: bool) {
        self.totals.control_packets += 1;
        if header.operation == Operation::CreditRequest as u16 {
            self.totals.credit_requests += 1;
        }
        let key = EndKey {
            line,
            port: header.dst_port,
            peer_cid: header.src_cid as u32,
            peer_port: header.src_port,
        };
        let place = (line, key.port, key.peer_cid, key.peer_port);
        if header.operation == Operation::Request as u16 {
            let (circuit, side) = self.circuit_at(&key).expect("it has just been sent");
            assert_eq!(side, Side::Callee);
            self.circuit_of.insert(place, circuit);
            if self.guests[&line].hostile {
                self.audit.taint(circuit);
            }
        }
        let circuit = self.circuit_of.get(&place).copied().filter(|_| !orphan);
        if self.log.traced.is_some() {
            self.log.trace(&format!("{circuit:?} is sent {header:?}"));
        }
        let guest = self.guests.get_mut(&line).expect("pumped");
        guest.rx.push_back(Packet {
            header,
            chunk: None,
            circuit,
        });
    }

    fn send_data(
        &mut self,
        line: LineId,
        circuit: CircuitId,
        from: Side,
        budget: u32,
        max_packets: u32,
        header: Header,
    ) {
        assert!(budget > 0 && max_packets > 0);
        assert_eq!(header.operation, Operation::Data as u16);
        let mut sent = Sent {
            circuit,
            from,
            len: 0,
            straight: 0,
            packets: 0,
        };
        let mut then = None;
        while sent.len < budget && sent.packets < max_packets {
            let guest = &self.guests[&line];
            if guest.room() == 0 {
                break;
            }
            let max = guest.buffer_payload.min(budget - sent.len);
            let stored = self
                .stores
                .get_mut(&(circuit, from))
                .and_then(|store| store.take(max));
            let chunk = match stored {
                Some(chunk) => chunk,
                None => match self.read_host(circuit, from, max) {
                    Ok(chunk) => {
                        sent.straight += chunk.len;
                        chunk
                    }
                    Err(event) => {
                        then = event;
                        break;
                    }
                },
            };
            sent.len += chunk.len;
            sent.packets += 1;
            let packet = Packet {
                header: Header {
                    len: chunk.len,
                    flags: chunk.flags,
                    ..header
                },
                chunk: Some(chunk),
                circuit: Some(circuit),
            };
            self.guests
                .get_mut(&line)
                .expect("pumped")
                .rx
                .push_back(packet);
        }
        self.totals.data_packets += u64::from(sent.packets);
        let mut actions = Vec::new();
        self.switch.transmitted(self.now, sent, &mut actions);
        self.log
            .record(Input::Sent(self.now, sent), Output::Done, &actions);
        for action in actions {
            self.carry_out(action, &mut None);
        }
        self.pending.extend(then);
        self.follow_up();
    }

    /// Reads up to `max` bytes straight from a program's socket; or says what was found instead.
    fn read_host(
        &mut self,
        circuit: CircuitId,
        from: Side,
        max: u32,
    ) -> Result<Chunk, Option<Event>> {
        let token = self.host_of.get(&circuit).copied().ok_or(None)?;
        let program = self.programs.get_mut(&token).expect("it has a circuit");
        if program.side != from {
            return Err(None);
        }
        if program.socket_type == SocketType::SeqPacket && program.outgoing.len() > 0 {
            return Err(self.read_message(circuit, from, token));
        }
        if let Some(chunk) = program.outgoing.take(max) {
            self.totals.bytes += u64::from(chunk.len);
            return Ok(chunk);
        }
        if program.finished {
            program.end_read = true;
            self.audit.end(circuit, from).finished = true;
            return Err(Some(Event::HostFinished { circuit }));
        }
        Err(Some(Event::HostDrained { circuit }))
    }

    /// Reads one whole message into the store.
    fn read_message(&mut self, circuit: CircuitId, from: Side, token: u64) -> Option<Event> {
        let index = self.switch.find(circuit)?;
        let window = self.switch.circuits[index].flow_from(from).window();
        let program = self.programs.get_mut(&token)?;
        let len = program.outgoing.message_len()?;
        if len > window {
            self.audit.taint(circuit);
            let reason = Reason::MessageTooLong;
            return Some(Event::Kill { circuit, reason });
        }
        let store = self.stores.entry((circuit, from)).or_default();
        let mut left = len;
        while left > 0 {
            let chunk = program.outgoing.take(left)?;
            left -= chunk.len;
            store.push(chunk);
        }
        self.totals.bytes += u64::from(len);
        Some(Event::HostStored { circuit, len })
    }
}
