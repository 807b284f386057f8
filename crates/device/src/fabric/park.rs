//! Packets for other guests that wait where they are, in their sender's descriptors.

use policy::LineId;
use vsock::{CircuitId, Event, Reason, Side};
use wire::vsock::HEADER_LEN;

use super::Fabric;
use super::tx::Packet;
use crate::kept::{Messages, Parcel};
use crate::vsock::TX;

/// What a guest's parked packets may weigh together; what is beyond that is stored. They are all stored at once when its ring stops.
const PARKED_WEIGHT: usize = 16 << 20;

/// What a piece of a parked packet weighs, as much as so many bytes.
const PIECE_WEIGHT: usize = 1024;

/// The most pieces of all parked packets of a guest.
pub(super) const PARKED_PIECES: usize = PARKED_WEIGHT / PIECE_WEIGHT;

/// What a packet weighs while it is parked.
fn weight(packet: &Packet) -> usize {
    packet.header.len as usize + packet.chain.readable.len() * PIECE_WEIGHT
}

impl Fabric {
    /// Whether its sender has not parked too much already.
    pub(super) fn may_park(&mut self, packet: &Packet) -> bool {
        let (entries, weight) = (usize::from(packet.chain.entries), weight(packet));
        self.line(packet.line).is_some_and(|line| {
            line.parked + entries <= line.half_of_ring()
                && line.parked_weight + weight <= PARKED_WEIGHT
        })
    }

    pub(super) fn park(&mut self, id: CircuitId, from: Side, packet: Packet) {
        let weight = weight(&packet);
        let Packet {
            line,
            chain,
            header,
        } = packet;
        let entries = usize::from(chain.entries);
        let Some(circuit) = self.circuit(id) else {
            return;
        };
        circuit.kept_or_new(from).push(Parcel::Parked {
            line,
            chain,
            offset: HEADER_LEN,
            left: header.len as usize,
            flags: header.flags,
            weight,
        });
        let Some(known) = self.line(line) else { return };
        known.parked += entries;
        known.parked_weight += weight;
        if !known.is_noted {
            self.note_line(line);
        }
    }

    /// Gives a parcel's descriptors back, if it has any.
    pub(super) fn give_back(&mut self, parcel: Parcel) {
        if let Parcel::Parked {
            line,
            chain,
            weight,
            ..
        } = parcel
        {
            if let Some(line) = self.line(line) {
                line.parked = line.parked.saturating_sub(usize::from(chain.entries));
                line.parked_weight = line.parked_weight.saturating_sub(weight);
            }
            self.complete(line, TX, chain, 0);
        }
    }

    /// The messages that a guest has stored, and how many they may be.
    pub(super) fn messages_of(&mut self, id: LineId) -> Option<Messages> {
        let most = self.switch.limits(id).kept_messages.into();
        let tally = self.line(id)?.messages.clone();
        Some(Messages { tally, most })
    }

    /// Ends a circuit on which a guest has sent more messages than may be stored.
    pub(super) fn end_for_messages(&mut self, id: CircuitId) {
        self.tell(Event::Kill {
            circuit: id,
            reason: Reason::TooManyMessages,
        });
    }

    /// Copies everything that a guest has parked into memory of our own, and gives its descriptors back.
    pub(super) fn unpark(&mut self, id: LineId) {
        if self.line(id).is_none_or(|line| line.parked == 0) {
            return;
        }
        let (Some(memory), Some(messages)) = (self.memory(id, TX), self.messages_of(id)) else {
            return;
        };
        let vm = self
            .line(id)
            .map_or(String::new(), |line| line.name.clone());
        let (mut returned, mut ended) = (Vec::new(), Vec::new());
        let mut changed = Vec::new();
        for circuit in self.circuits.iter_mut().flatten() {
            let messages = (!circuit.is_stream()).then_some(&messages);
            for from in [Side::Caller, Side::Callee] {
                let Some(kept) = circuit.kept(from) else {
                    continue;
                };
                let (parked, fits) = kept.unpark((id, &vm), &memory, messages);
                if !parked.is_empty() {
                    changed.push(circuit.id);
                }
                returned.extend(parked);
                if !fits {
                    ended.push(circuit.id);
                }
            }
        }
        for parcel in returned {
            self.give_back(parcel);
        }
        for circuit in changed {
            self.switch.note_changed(circuit);
        }
        for circuit in ended {
            self.end_for_messages(circuit);
        }
    }
}
