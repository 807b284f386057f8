//! Messages of host programs, for guests with SEQPACKET sockets: each is read as a whole and kept until the guest has room for it.

use std::io;

use vsock::{CircuitId, Event, Reason};
use wire::vsock::SEQPACKET_END_OF_MESSAGE;

use super::Fabric;
use super::rx::Turn;

/// After so many more circuits that wait for room for a message, those that have ended are struck out.
const SHORT_SWEEP: usize = 1024;

impl Fabric {
    /// A message of a host program is read as a whole and then sent on as the guest has room.
    pub(super) fn take_message(&mut self, turn: Turn) {
        if self.is_short_of_room(turn) {
            return self.tell(Event::HostDrained {
                circuit: turn.circuit,
            });
        }
        let mut room = std::mem::take(&mut self.message_room);
        let has_host = self
            .circuit(turn.circuit)
            .is_some_and(|circuit| circuit.host.is_some());
        let received = has_host.then(|| self.receive_own(turn.circuit, &mut room));
        match received {
            Some(Ok(record)) if record.len == 0 && self.no_message_is_left(turn.circuit) => {
                self.host_ended(turn.circuit);
            }
            Some(Ok(record)) if record.len == 0 => {}
            Some(Ok(record))
                if record.truncated
                    || record.len > self.switch.window_towards(turn.circuit, turn.from.other()) =>
            {
                self.tell(Event::Kill {
                    circuit: turn.circuit,
                    reason: Reason::MessageTooLong,
                });
            }
            Some(Ok(record)) => {
                let this_turn = self.turn;
                let tally = self.line(turn.line).map(|line| {
                    // Reading is a copy, too, and uses up no buffer of the guest's that would end the turn.
                    line.had.of(this_turn).bytes += record.len;
                    line.host_message_bytes.clone()
                });
                if let (Some(tally), Some(circuit)) = (tally, self.circuit(turn.circuit)) {
                    let entry = tally.enter(record.len as u64);
                    let kept = circuit.kept_or_new(turn.from);
                    kept.store(record.len, SEQPACKET_END_OF_MESSAGE, Some(entry))
                        .copy_from_slice(&room[..record.len]);
                }
                self.tell(Event::HostStored {
                    circuit: turn.circuit,
                    len: record.len as u32,
                });
            }
            Some(Err(error)) if error.kind() == io::ErrorKind::WouldBlock => {
                self.tell(Event::HostDrained {
                    circuit: turn.circuit,
                });
            }
            Some(Err(_)) => self.tell(Event::Kill {
                circuit: turn.circuit,
                reason: Reason::PeerReset,
            }),
            None => {}
        }
        self.message_room = room;
        self.act_on_overruns();
    }

    /// Whether so much of host programs' messages waits for this guest that the next one is not to be read. The first one
    /// always is.
    fn is_short_of_room(&mut self, turn: Turn) -> bool {
        let most = self.switch.limits(turn.line).line_grant_bytes;
        let Some(line) = self.line(turn.line) else {
            return false;
        };
        let held = line.host_message_bytes.total();
        if held == 0 || held < most {
            return false;
        }
        let Some(host) = self
            .circuit(turn.circuit)
            .and_then(|circuit| circuit.host.as_mut())
        else {
            return false;
        };
        if !std::mem::replace(&mut host.short_of_room, true) {
            self.wait_for_room(turn);
        }
        true
    }

    fn wait_for_room(&mut self, turn: Turn) {
        let circuits = &self.circuits;
        let Some(line) = self
            .lines
            .get_mut(turn.line.0 as usize)
            .and_then(Option::as_mut)
        else {
            return;
        };
        if line.short_of_room.is_empty() {
            self.short_lines.push_back(turn.line);
        } else if line.short_of_room.len() % SHORT_SWEEP == 0 {
            // Circuits that have ended meanwhile must not pile up.
            line.short_of_room.retain(|id| {
                let circuit = circuits.get(id.index as usize).and_then(Option::as_ref);
                circuit.is_some_and(|circuit| circuit.id == *id)
            });
        }
        line.short_of_room.push(turn.circuit);
    }

    /// Reads on from the host programs of those guests that have taken half of what waited for them: not after each
    /// message, or each would have all programs checked.
    pub(super) fn end_shortage(&mut self) {
        for _ in 0..self.short_lines.len() {
            let Some(id) = self.short_lines.pop_front() else {
                return;
            };
            let most = self.switch.limits(id).line_grant_bytes;
            let Some(line) = self.line(id) else { continue };
            if line.host_message_bytes.total() > most / 2 {
                self.short_lines.push_back(id);
                continue;
            }
            for circuit in std::mem::take(&mut line.short_of_room) {
                if let Some(host) = self
                    .circuit(circuit)
                    .and_then(|circuit| circuit.host.as_mut())
                {
                    host.short_of_room = false;
                    self.tell(Event::HostReadable { circuit });
                }
            }
        }
    }

    /// Whether a read of no bytes was the end of data. A message of no bytes looks the same; it has no form in vsock, and is
    /// passed over as Linux does.
    fn no_message_is_left(&mut self, id: CircuitId) -> bool {
        let host = self.circuit(id).and_then(|circuit| circuit.host.as_ref());
        host.is_none_or(|host| {
            host.ending && rustix::io::ioctl_fionread(&host.socket).is_ok_and(|left| left == 0)
        })
    }
}
