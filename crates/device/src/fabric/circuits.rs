//! Circuits, for queries: which there are, which one a guest means, and the end of one.

use std::ops::Range;

use policy::{LineId, ServiceEntry};
use vsock::{CalleeId, CircuitId, CircuitReport, CircuitState, Event, Reason, Side};

use super::Fabric;
use crate::caller::Who;
use crate::snapshot::{CircuitSnapshot, Endpoint};

/// Which circuits are asked for. Without anything, all.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CircuitFilter {
    /// Those of which a VM is an end, by its full name.
    pub vm: Option<String>,
    /// Those that were called at this port.
    pub port: Option<u32>,
}

/// Places of circuits that are gone through between two turns: a few hundred circuits take less than a millisecond.
const SLICE: usize = 256;

/// Some of the circuits.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CircuitSlice {
    /// Those that pass the filter.
    pub circuits: Vec<CircuitSnapshot>,
    /// How many more of this slice do.
    pub more: usize,
    /// Where the next slice begins. Nothing after the last.
    pub next: Option<usize>,
}

/// What some of the circuits keep.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Survey {
    /// Payload that is kept, in bytes, and the line whose guest sent it, or to which programs of the host sent it.
    pub kept_bytes: Vec<(LineId, u64)>,
    /// Where the next slice begins. Nothing after the last.
    pub next: Option<usize>,
}

impl Fabric {
    /// A slice of the circuits that pass the filter, `room` of them at most. The first begins at 0. A circuit that is there all the time is
    /// in one of them.
    pub fn list_circuits(&self, filter: &CircuitFilter, from: usize, room: usize) -> CircuitSlice {
        let line = filter.vm.as_ref().map(|vm| self.line_named(vm));
        let is_wanted = |circuit: &CircuitReport| {
            let of_vm = |line: Option<LineId>| {
                line.is_some() && [circuit.caller.line, circuit.callee.line].contains(&line)
            };
            let called_at = |port| circuit.dialled.is_some_and(|to| port_of(to, self) == port);
            line.is_none_or(of_vm) && filter.port.is_none_or(called_at)
        };
        let (places, next) = self.slice(from);
        let mut listed = CircuitSlice {
            next,
            ..CircuitSlice::default()
        };
        for circuit in self.switch.circuits_at(places).filter(is_wanted) {
            match listed.circuits.len() < room {
                true => listed.circuits.push(self.snapshot(&circuit)),
                false => listed.more += 1,
            }
        }
        listed
    }

    /// Adds what a slice of the circuits have carried to the figures of their rules, and returns what they keep. The first begins at 0.
    pub fn survey_circuits(&mut self, from: usize) -> Survey {
        let (places, next) = self.slice(from);
        Survey {
            kept_bytes: self.switch.survey(places),
            next,
        }
    }

    pub(super) fn slice(&self, from: usize) -> (Range<usize>, Option<usize>) {
        let to = from.saturating_add(SLICE);
        let next = (to < self.switch.circuit_places()).then_some(to);
        (from..to, next)
    }

    /// A circuit, as long as it is there.
    pub fn show_circuit(&self, id: CircuitId) -> Option<CircuitSnapshot> {
        Some(self.snapshot(&self.switch.circuit(id)?))
    }

    /// The circuit that the guest of a VM knows by these ports, and its side of it.
    pub fn find_circuit(
        &self,
        vm: &str,
        port: u32,
        peer_cid: u32,
        peer_port: u32,
    ) -> Option<(CircuitSnapshot, Side)> {
        let line = self.line_named(vm)?;
        let (id, side) = self.switch.circuit_of(line, port, peer_cid, peer_port)?;
        Some((self.show_circuit(id)?, side))
    }

    /// Cuts a circuit short: both its ends see a reset. Returns whether it was there.
    pub fn end_circuit(&mut self, id: CircuitId) -> bool {
        let is_there = self.switch.circuit(id).is_some();
        if is_there {
            self.tell(Event::Kill {
                circuit: id,
                reason: Reason::Operator,
            });
        }
        is_there
    }

    pub(super) fn snapshot(&self, circuit: &CircuitReport) -> CircuitSnapshot {
        let rule = circuit.rule.and_then(|id| {
            let policy = self.switch.policy();
            Some(policy.rule(id)?.label.clone())
        });
        CircuitSnapshot {
            id: circuit.id,
            socket_type: circuit.socket_type,
            state: match circuit.is_cut_short {
                true => CircuitState::Closing,
                false => circuit.state,
            },
            age: self.start.elapsed().saturating_sub(circuit.opened_at),
            rule,
            caller: match circuit.caller.line {
                Some(line) => self.vm_endpoint(line, circuit.caller.port),
                None => self.host_caller(circuit.id),
            },
            dialled: self.callee_endpoint(circuit.dialled),
            callee: self.callee_endpoint(circuit.reached),
            bytes: [circuit.caller.passed_bytes, circuit.callee.passed_bytes],
            queued: [circuit.caller.kept_bytes, circuit.callee.kept_bytes],
            // An end's credit is the room that it has, which is for what the other sends.
            credit: [circuit.callee.credit_bytes, circuit.caller.credit_bytes],
        }
    }

    fn vm_endpoint(&self, line: LineId, port: u32) -> Endpoint {
        self.switch
            .address(line)
            .map_or(Endpoint::Gone, |vm| Endpoint::Vm {
                domain: vm.domain.clone(),
                name: vm.name.clone(),
                port,
            })
    }

    fn host_caller(&self, id: CircuitId) -> Endpoint {
        match self
            .peek_circuit(id)
            .and_then(|circuit| circuit.who.as_ref())
        {
            Some(Who::Program(credentials)) => Endpoint::Program {
                credentials: *credentials,
                ticket: None,
            },
            Some(Who::Represented(program)) => Endpoint::Program {
                credentials: program.credentials,
                ticket: Some(program.ticket),
            },
            Some(Who::Published { name, .. }) => Endpoint::Published {
                name: name.to_string(),
            },
            Some(Who::Vmm | Who::Channel { .. }) | None => Endpoint::Gone,
        }
    }

    fn callee_endpoint(&self, callee: Option<CalleeId>) -> Endpoint {
        match callee {
            Some(CalleeId::Guest { line, port }) => self.vm_endpoint(line, port),
            Some(CalleeId::Listener { port }) => Endpoint::Listener { port },
            Some(CalleeId::Service(id)) => match self.switch.service(id) {
                Some(ServiceEntry { name, port, .. }) => Endpoint::Service {
                    name: name.clone(),
                    port: *port,
                },
                None => Endpoint::Gone,
            },
            None => Endpoint::Gone,
        }
    }
}

fn port_of(callee: CalleeId, fabric: &Fabric) -> u32 {
    match callee {
        CalleeId::Guest { port, .. } | CalleeId::Listener { port } => port,
        CalleeId::Service(id) => fabric.switch.service(id).map_or(0, |service| service.port),
    }
}
