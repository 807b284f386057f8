//! Circuits that outlive the switch in the minds of guests.
//!
//! When the process ends, a guest's kernel holds its connections for open, and learns otherwise only from the answer to the next packet that it sends. A program that
//! waits sends none. So each line can have a register of its ends, which the owner of the switch keeps elsewhere; the next switch resets what stands there.

use policy::LineId;
use wire::vsock::{Header, Operation};

use crate::end::{EndRegister, GuestEnd};
use crate::switch::Actions;
use crate::{Action, Side, Switch};

impl Switch {
    /// Has the ends of a line's circuits noted there, from now on. The line has none yet.
    pub fn register_ends(&mut self, line: LineId, register: Box<dyn EndRegister>) {
        if let Some(line) = self.line_mut(line) {
            line.register = Some(register);
        }
    }

    /// Leaves the registers as they are: what ends from now on is for the next switch to reset.
    pub fn leave_ends(&mut self) {
        for (_, line) in &mut self.lines {
            line.register = None;
        }
    }

    /// Resets ends that a switch before this one left to a guest: when its line is up.
    pub fn reset_lost(&mut self, id: LineId, ends: &[GuestEnd], actions: &mut Actions) {
        let Some(line) = self.line_mut(id) else {
            return;
        };
        line.lost = ends.to_vec();
        if line.up {
            self.reset_noted(id, actions);
        }
    }

    /// Resets what [`reset_lost`](Self::reset_lost) has noted.
    pub(crate) fn reset_noted(&mut self, id: LineId, actions: &mut Actions) {
        let Some(line) = self.line_mut(id).filter(|line| !line.lost.is_empty()) else {
            return;
        };
        let cid = line.address.cid;
        let lost = std::mem::take(&mut line.lost).into_iter();
        line.orphans.extend(lost.map(|end| Header {
            src_cid: end.peer.0.into(),
            dst_cid: cid.into(),
            src_port: end.peer.1,
            dst_port: end.port,
            socket_type: end.socket_type as u16,
            operation: Operation::Reset as u16,
            ..Header::default()
        }));
        actions.push(Action::Wake { line: id });
    }

    /// Notes the end at a place of its line's list.
    pub(crate) fn note_end(&mut self, id: LineId, place: usize) {
        let Some(line) = self.lines.get_mut(id.0 as usize) else {
            return;
        };
        let (Some(register), Some((index, side))) = (&mut line.register, line.ends.get(place))
        else {
            return;
        };
        let circuit = &self.circuits[*index as usize];
        let peer: Side = side.other();
        register.set(
            place,
            GuestEnd {
                port: circuit.end(*side).port,
                peer: circuit.end(peer).seen,
                socket_type: circuit.socket_type,
            },
        );
    }
}
