//! The operator's side of a world: rules, services, and a second opinion on each decision.

use std::sync::Arc;

use policy::{Callee, Caller, LineId, Policy, Rule, RuleId, ServiceEntry, ServiceId, Verdict};
use wire::vsock::{HOST_CID, Header, Operation, SocketType};

use super::log::{Input, Output};
use super::program::Answer;
use super::world::World;
use crate::end::EndKey;
use crate::{CalleeId, CallerId, CircuitId, Decided, HostCaller, Reason, Side};

/// The first of these rules that matches, found one by one.
pub(crate) fn first_match<'a>(
    rules: &'a [Rule],
    caller: &Caller<'_>,
    callee: &Callee<'_>,
    port: u32,
) -> Option<(RuleId, &'a Rule)> {
    let matches = |rule: &Rule| {
        rule.from.iter().any(|pattern| pattern.covers(caller))
            && rule.to.iter().any(|pattern| pattern.covers(callee))
            && (rule.ports.is_empty() || rule.ports.iter().any(|ports| ports.contains(&port)))
    };
    let index = rules.iter().position(matches)?;
    Some((RuleId(index as u32), &rules[index]))
}

impl World {
    /// Puts these rules in force.
    pub(crate) fn set_rules(&mut self, rules: Vec<Rule>) {
        let policy = Arc::new(Policy::new(rules));
        self.switch.set_policy(policy.clone());
        self.log.record(Input::Policy(policy), Output::Done, &[]);
        self.reloads += 1;
        self.check_tables();
    }

    /// Ends the circuits that the rules in force would not set up. Returns how many.
    pub(crate) fn enforce(&mut self) -> usize {
        let mut actions = Vec::new();
        let ended = self.switch.enforce_policy(self.now, &mut actions);
        let output = Output::Ended(ended);
        self.log.record(Input::Enforce(self.now), output, &actions);
        let cut_short: Vec<_> = self
            .switch
            .circuits
            .iter()
            .filter(|(_, circuit)| circuit.reason == Some(Reason::Denied))
            .map(|(_, circuit)| circuit.id)
            .collect();
        let to_be_cut = self.switch.cuts.iter();
        let to_be_cut = to_be_cut.flat_map(|cut| cut.circuits.as_slice());
        for circuit in cut_short.into_iter().chain(to_be_cut.map(|(id, _)| *id)) {
            self.audit.taint(circuit);
        }
        for action in actions {
            self.carry_out(action, &mut None);
        }
        self.follow_up();
        self.check_tables();
        ended
    }

    /// Replaces the services: domain, name and port, and how each answers.
    pub(crate) fn set_services(&mut self, services: &[(&str, &str, u32, Answer)]) {
        let mut entries = Vec::new();
        self.services.clear();
        for (domain, name, port, answer) in services {
            let full_name = ((*domain).to_owned(), (*name).to_owned());
            let known = self
                .service_names
                .iter()
                .position(|name| *name == full_name);
            let number = known.unwrap_or_else(|| {
                self.service_names.push(full_name.clone());
                self.service_names.len() - 1
            });
            let id = ServiceId(number as u32);
            self.services.insert(id, *answer);
            let (domain, name) = full_name;
            entries.push(ServiceEntry {
                id,
                domain,
                name,
                port: *port,
            });
        }
        self.log
            .record(Input::Services(entries.clone()), Output::Done, &[]);
        self.switch.set_services(entries);
    }

    /// What this guest gets for a name.
    pub(crate) fn resolve(&mut self, line: LineId, name: &str) -> Option<u32> {
        let cid = self.switch.resolve(line, name);
        let input = Input::Resolve(line, name.to_owned());
        self.log.record(input, Output::Resolved(cid), &[]);
        cid
    }

    /// Programs of the host call as this user from now on.
    pub(crate) fn call_as(&mut self, uid: u32, gids: &[u32]) {
        let program = self.switch.program(uid, gids);
        let number = program.map(|program| program.0);
        let input = Input::Program(uid, gids.to_vec());
        self.log.record(input, Output::Resolved(number), &[]);
        let program = program.expect("there are few users");
        self.host_caller = HostCaller::Program(program);
        self.tells_users_apart = true;
    }

    /// Whether a call may reach another than it was meant for.
    pub(super) fn redirects(&self) -> bool {
        let mut rules = self.switch.policy.rules().iter();
        self.reloads > 1 || rules.any(|rule| matches!(rule.verdict, Verdict::Redirect(_)))
    }

    /// Whether this packet is a call, and not the repetition of one.
    pub(super) fn dials_anew(&self, line: LineId, key: &EndKey, header: &Header) -> bool {
        let known = self.circuit_at(key);
        let is_call = header.operation == Operation::Request as u16
            && header.src_cid == u64::from(self.guests[&line].cid)
            && u32::try_from(header.dst_cid).is_ok();
        let Some(socket_type) = SocketType::from_wire(header.socket_type).filter(|_| is_call)
        else {
            return false;
        };
        let again =
            known.is_some_and(|(circuit, side)| self.asks_again(circuit, side, socket_type));
        !again
    }

    /// Whether a request repeats the dial of this circuit, of which neither end is lost.
    pub(super) fn asks_again(&self, circuit: CircuitId, side: Side, kind: SocketType) -> bool {
        self.switch.find(circuit).is_some_and(|index| {
            let ends = &self.switch.circuits[index].ends;
            let is_whole = !ends.iter().any(|end| self.switch.is_lost(end));
            is_whole && self.switch.is_same_dial(index, side, kind)
        })
    }

    /// Asks the rules one by one what the switch has found out by its tables.
    pub(super) fn check_decision(&mut self, decided: Decided) {
        self.decided.push(decided);
        let Decided { rule, result, .. } = decided;
        let port = decided.dialled_port;
        let Some(dialled) = decided.dialled else {
            // It has gone since.
            let gone = decided.reached.is_some();
            assert!(
                gone || rule.is_none(),
                "a rule without callers: {decided:?}"
            );
            return assert!(gone || result.is_err(), "to no VM: {decided:?}");
        };
        let lines = [decided.caller.line(), dialled.line()];
        let mut lines = lines.into_iter().flatten();
        if lines.any(|line| !self.switch.lines.contains(line.0 as usize)) {
            return;
        }
        let rules = self.switch.policy.clone();
        let caller = match decided.caller {
            CallerId::Guest { line, .. } => {
                let address = &self.switch.lines[line.0 as usize].address;
                Caller::Vm {
                    domain: &address.domain,
                    name: &address.name,
                    groups: &address.groups,
                }
            }
            // Scenarios tell users apart by what becomes of their calls.
            _ => Caller::Published,
        };
        let by_guest = matches!(decided.caller, CallerId::Guest { .. });
        let callee = match dialled {
            CalleeId::Guest { line, .. } => {
                let address = &self.switch.lines[line.0 as usize].address;
                Callee::Vm {
                    domain: &address.domain,
                    name: &address.name,
                    groups: &address.groups,
                }
            }
            CalleeId::Service(id) => match self.switch.service(id) {
                Some(service) => Callee::Service {
                    domain: &service.domain,
                    name: &service.name,
                },
                None => return,
            },
            CalleeId::Listener { .. } => Callee::Listener,
        };
        if !by_guest && self.tells_users_apart {
            return;
        }
        let own = dialled == CalleeId::Listener { port } && [1005, 1006, 1007].contains(&port);
        let first = first_match(rules.rules(), &caller, &callee, port).filter(|_| !own);
        if let Some(rule) = rule {
            assert_eq!(first.map(|(id, _)| id), Some(rule), "{decided:?}");
        }
        let refused = match first.map(|(_, rule)| &rule.verdict) {
            Some(Verdict::Allow | Verdict::Redirect(_)) => false,
            Some(Verdict::Deny) => true,
            None => by_guest && !matches!(dialled, CalleeId::Listener { .. }),
        };
        let own_of_a_vm = [1005, 1006, 1007].contains(&port) && dialled.line().is_some();
        let by_rule_alone = !(own_of_a_vm && first.is_none());
        if refused && self.reloads == 1 && by_rule_alone {
            assert_eq!(result, Err(Reason::Denied), "{decided:?}");
        }
        // Whatever the rules say: only a program of the host gets to a VM's own ports, and only where it called.
        if let Some(CalleeId::Guest { port: reached, .. }) = decided.reached {
            let by_program = matches!(decided.caller, CallerId::HostCircuit { .. })
                && matches!(self.host_caller, HostCaller::Program(_));
            assert!(
                ![1005, 1006, 1007].contains(&reached)
                    || (by_program && decided.reached == decided.dialled),
                "{decided:?}"
            );
        }
        // No VM calls itself, whatever the rules say.
        let itself = matches!(first, Some((_, rule)) if matches!(rule.verdict, Verdict::Redirect(_)))
            || matches!((decided.caller, dialled), (CallerId::Guest { line, .. }, CalleeId::Guest { line: to, .. }) if line == to);
        if decided.reached.is_none() && result == Err(Reason::Denied) && !itself {
            assert!(refused, "{decided:?}");
        }
        let to_host = matches!(dialled, CalleeId::Service(_) | CalleeId::Listener { .. });
        assert!(!to_host || decided.dialled_cid == HOST_CID, "{decided:?}");
    }
}

impl CallerId {
    fn line(self) -> Option<LineId> {
        match self {
            CallerId::Guest { line, .. } => Some(line),
            _ => None,
        }
    }
}

impl CalleeId {
    fn line(self) -> Option<LineId> {
        match self {
            CalleeId::Guest { line, .. } => Some(line),
            _ => None,
        }
    }
}
