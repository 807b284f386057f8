//! Reports to the audit: what became of a call, with the names of both ends.

use policy::LineId;
use vsock::{CalleeId, CallerId, CircuitId, Decided, Event};

use super::Fabric;
use crate::caller::Who;
use crate::decision::{Decision, DecisionCallee, DecisionCaller, Observation};

impl Fabric {
    pub(super) fn report_decision(&mut self, decided: &Decided) {
        // One whose caller is gone already belongs to none.
        let Some(caller) = self.decision_caller(decided.caller) else {
            return;
        };
        let (cid, port) = (decided.dialled_cid, decided.dialled_port);
        let callee = |id: Option<CalleeId>| self.decision_callee(id?);
        let dialled = callee(decided.dialled);
        let dialled = dialled.unwrap_or(DecisionCallee::UnknownCid { cid, port });
        let (circuit, reached) = (self.circuit_of(decided), callee(decided.reached));
        let policy = self.switch.policy();
        let rule = decided.rule.and_then(|id| {
            let rule = policy.rule(id)?;
            Some((id, rule.label.as_str()))
        });
        if let Some(sink) = &mut self.decisions {
            sink(Decision {
                caller,
                circuit,
                dialled,
                reached,
                rule,
                result: decided.result,
            });
        }
    }

    /// The circuit that a call has become.
    fn circuit_of(&self, decided: &Decided) -> Option<CircuitId> {
        decided.result.ok()?;
        match decided.caller {
            CallerId::HostCircuit { circuit } => Some(circuit),
            CallerId::HostAttempt { .. } => None,
            CallerId::Guest { line, port } => {
                let peer = (decided.dialled_cid, decided.dialled_port);
                let (circuit, _) = self.switch.circuit_of(line, port, peer.0, peer.1)?;
                Some(circuit)
            }
        }
    }

    /// Reports to the observer that a circuit is over.
    pub(super) fn observe_end(&mut self, id: CircuitId) {
        let Some(ended) = self.switch.take_ended(id) else {
            return;
        };
        let left = self.handover.left.as_ref();
        if left.is_some_and(|left| left.contains(&id)) {
            // It ends here, and goes on in the next daemon.
            return;
        }
        let circuit = self.snapshot(&ended.circuit);
        let reason = ended.reason;
        let circuit = &circuit;
        self.observe(&Observation::CircuitEnded { circuit, reason });
    }

    /// Reports to the switch that a line comes or goes, and to the observer if that is news.
    pub(super) fn tell_of_line(&mut self, line: LineId, event: Event) {
        let was_up = self.switch.is_up(line);
        self.tell(event);
        let is_up = self.switch.is_up(line);
        let Some(vm) = self.line(line).map(|line| line.name.clone()) else {
            return;
        };
        let vm = vm.as_str();
        // A driver that starts anew has been away, even if it was not seen to go.
        match (was_up, is_up) {
            (_, true) => self.observe(&Observation::LineUp { vm }),
            (true, false) => self.observe(&Observation::LineDown { vm }),
            (false, false) => {}
        }
    }

    fn observe(&mut self, observation: &Observation<'_>) {
        if let Some(observer) = &mut self.observer {
            observer(observation);
        }
    }

    fn decision_caller(&self, caller: CallerId) -> Option<DecisionCaller> {
        let who = match caller {
            CallerId::Guest { line, port } => {
                let vm = self.switch.address(line)?;
                return Some(DecisionCaller::Vm {
                    domain: vm.domain.clone(),
                    vm: vm.name.clone(),
                    cid: vm.cid,
                    port,
                });
            }
            CallerId::HostAttempt { token } => {
                self.callers.get(token as usize).map(|caller| &caller.who)
            }
            CallerId::HostCircuit { circuit } => self.who_called(circuit),
        };
        let program = match who? {
            Who::Program(credentials) => credentials,
            Who::Represented(program) => &program.credentials,
            Who::Published { name, peer, .. } => {
                let (published, peer) = (name.to_string(), peer.clone());
                return Some(DecisionCaller::Published { published, peer });
            }
            Who::Vmm | Who::Channel { .. } => return None,
        };
        Some(DecisionCaller::Program {
            uid: program.uid,
            pid: u32::try_from(program.pid).ok(),
        })
    }

    fn who_called(&self, id: CircuitId) -> Option<&Who> {
        let circuit = self.circuits.get(id.index as usize)?.as_ref()?;
        circuit.who.as_ref().filter(|_| circuit.id == id)
    }

    fn decision_callee(&self, callee: CalleeId) -> Option<DecisionCallee> {
        Some(match callee {
            CalleeId::Guest { line, port } => {
                let vm = self.switch.address(line)?;
                DecisionCallee::Vm {
                    domain: vm.domain.clone(),
                    vm: vm.name.clone(),
                    cid: vm.cid,
                    port,
                }
            }
            CalleeId::Service(id) => {
                let service = self.switch.service(id)?;
                DecisionCallee::Service {
                    domain: service.domain.clone(),
                    service: service.name.clone(),
                    port: service.port,
                }
            }
            CalleeId::Listener { port } => DecisionCallee::Listener { listener: port },
        })
    }
}
