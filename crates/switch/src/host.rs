//! What programs on the host do.

use wire::vsock::SocketType;

use crate::end::{End, Party};
use crate::event::{Action, Time};
use crate::flow::Ending;
use crate::switch::{Actions, EndKey};
use crate::{CircuitId, LineId, Reason, Side, Switch};

impl Switch {
    pub(crate) fn host_dial(
        &mut self,
        now: Time,
        line_id: LineId,
        port: u32,
        socket_type: SocketType,
        token: u64,
        actions: &mut Actions,
    ) {
        let (host_port, cid) = match self.admit_host_dial(now, line_id, port, socket_type) {
            Ok(admitted) => admitted,
            Err(reason) => {
                if let Some(line) = self.line_mut(line_id) {
                    line.counters.ended[reason.index()] += 1;
                }
                actions.push(Action::HostDialRefused { token, reason });
                return;
            }
        };
        let caller = End::new(Party::Host, host_port);
        let callee = End::new(Party::Guest { line: line_id, cid }, port);
        let index = self.open(now, socket_type, caller, callee);
        let circuit = &mut self.circuits[index];
        actions.push(Action::HostDialing {
            token,
            circuit: circuit.id,
        });
        circuit.end_mut(Side::Callee).outbox.request = true;
        self.enqueue(index, Side::Callee, actions);
    }

    /// A free port for the host's end, and the guest's identifier; or why the call cannot be made.
    fn admit_host_dial(
        &mut self,
        now: Time,
        line_id: LineId,
        port: u32,
        socket_type: SocketType,
    ) -> Result<(u32, u32), Reason> {
        let line = self
            .lines
            .get_mut(line_id.0 as usize)
            .ok_or(Reason::UnknownCid)?;
        if !line.up {
            return Err(Reason::NotRunning);
        }
        if socket_type == SocketType::SeqPacket && !line.seqpacket {
            return Err(Reason::Unsupported);
        }
        line.admit_circuit()?;
        if !line.host_connects.take(now) {
            return Err(Reason::ConnectRate);
        }
        let (cid, circuits) = (line.address.cid, line.circuits);
        // Each circuit has one port, so one of so many is free.
        for _ in 0..=circuits {
            let host_port = self.lines[line_id.0 as usize].take_port();
            let key = EndKey {
                line: line_id,
                port,
                peer_cid: wire::vsock::HOST_CID,
                peer_port: host_port,
            };
            if !self.by_end.contains_key(&key) {
                return Ok((host_port, cid));
            }
        }
        Err(Reason::CircuitLimit)
    }

    pub(crate) fn host_dialed(
        &mut self,
        now: Time,
        id: CircuitId,
        result: Result<(), Reason>,
        actions: &mut Actions,
    ) {
        let Some(index) = self.find(id) else { return };
        if self.circuits[index].answered {
            return;
        }
        if let Err(reason) = result {
            return self.fail_dial(now, index, None, reason, actions);
        }
        self.close_handshake(index);
        self.circuits[index].end_mut(Side::Caller).outbox.response = true;
        self.enqueue(index, Side::Caller, actions);
    }

    pub(crate) fn host_readable(&mut self, id: CircuitId, readable: bool, actions: &mut Actions) {
        let Some(index) = self.find(id) else { return };
        let circuit = &mut self.circuits[index];
        let Some(host) = circuit.host_side() else {
            return;
        };
        let flow = circuit.flow_from(host);
        if readable && (flow.end != Ending::Open || flow.refused || flow.refusal_passed) {
            return;
        }
        circuit.end_mut(host).readable = readable;
        if readable && circuit.answered {
            self.enqueue(index, host.other(), actions);
        }
    }

    pub(crate) fn host_stored(&mut self, id: CircuitId, len: u32, actions: &mut Actions) {
        let Some(index) = self.find(id) else { return };
        let circuit = &mut self.circuits[index];
        let Some(host) = circuit.host_side() else {
            return;
        };
        let id = circuit.id;
        let flow = circuit.flow_from(host);
        if flow.refused || flow.end != Ending::Open {
            // It was read before the device heard that nobody takes it.
            actions.push(Action::Discard {
                circuit: id,
                from: host,
            });
            return;
        }
        flow.store(len);
        self.enqueue(index, host.other(), actions);
    }

    pub(crate) fn host_finished(&mut self, now: Time, id: CircuitId, actions: &mut Actions) {
        let Some(index) = self.find(id) else { return };
        let circuit = &mut self.circuits[index];
        let Some(host) = circuit.host_side() else {
            return;
        };
        circuit.end_mut(host).readable = false;
        let flow = circuit.flow_from(host);
        if flow.end == Ending::Open {
            flow.end = Ending::Finishing;
        }
        self.settle(now, index, actions);
    }

    pub(crate) fn host_refused(&mut self, now: Time, id: CircuitId, actions: &mut Actions) {
        let Some(index) = self.find(id) else { return };
        let Some(host) = self.circuits[index].host_side() else {
            return;
        };
        self.refuse(index, host, actions);
        self.settle(now, index, actions);
    }

    /// The host program went away before the guest answered: the guest's answer will find nobody.
    pub(crate) fn host_gone(&mut self, now: Time, id: CircuitId, actions: &mut Actions) {
        let Some(index) = self.find(id) else { return };
        if self.circuits[index].answered {
            return;
        }
        self.fail_dial(now, index, None, Reason::HostFailed, actions);
    }

    pub(crate) fn delivered(&mut self, now: Time, id: CircuitId, len: u32, actions: &mut Actions) {
        let Some(index) = self.find(id) else { return };
        let circuit = &mut self.circuits[index];
        let Some(host) = circuit.host_side() else {
            return;
        };
        let flow = circuit.flow_to(host);
        if !flow.deliver(len) {
            return self.kill(now, index, Reason::HostFailed, actions);
        }
        flow.acknowledge_all();
        if flow.end != Ending::Open {
            self.settle(now, index, actions);
            return;
        }
        let update_is_due = circuit.starves(host.other());
        self.tune(index, host.other(), update_is_due);
        if update_is_due {
            self.queue_credit_update(index, host.other(), actions);
        }
    }
}
