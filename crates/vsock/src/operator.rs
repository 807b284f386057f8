//! The operator at work: the callee a call means, whether it may be made, and its taker.

use std::sync::Arc;

use policy::{
    Address, Callee, Caller, LineId, OWN_PORTS, Policy, PortRange, Redirect, RuleId, RuleSet,
    RuleUse, ServiceEntry, ServiceId, Time, Verdict,
};
use wire::vsock::{HOST_CID, SocketType};

use crate::call::{Call, Destination, callee_id};
use crate::end::{End, EndKey, Party};
use crate::event::{Action, CallerId, Decided, HostCaller};
use crate::line::Line;
use crate::own_ports;
use crate::share::Origin;
use crate::switch::{Actions, Cut};
use crate::{CircuitId, Reason, Side, Switch};

/// A call that may be made.
#[derive(Debug)]
pub(crate) struct Route {
    pub(crate) callee: End,
    /// The identifier by which the callee knows the caller.
    pub(crate) caller_cid: u32,
    /// The port by which the callee knows the caller.
    pub(crate) caller_port: u32,
    pub(crate) call: Call,
}

/// A call that may not be made.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) reason: Reason,
    /// The rule that refused it, or whose limit is reached.
    pub(crate) rule: Option<RuleId>,
    /// The callee meant, if there is such.
    pub(crate) dialled: Option<Destination>,
}

impl From<Reason> for Refusal {
    fn from(reason: Reason) -> Refusal {
        Refusal {
            reason,
            rule: None,
            dialled: None,
        }
    }
}

/// What the rules say, together with the rule that says it.
pub(crate) struct Judgement {
    pub(crate) rule: Option<RuleId>,
    /// The callee, and at which port.
    result: Result<(Destination, u32), Reason>,
}

impl Switch {
    /// Puts another policy in force. Circuits that exist count from now on against the limits of the rule that allows them;
    /// those that no rule allows any more go on.
    pub fn set_policy(&mut self, policy: Arc<Policy>) {
        for (_, line) in &mut self.lines {
            line.subject_to(&policy);
        }
        self.directory.subject_to(&policy);
        self.listener_callees = policy.callees(&Callee::Listener);
        self.published_callers = policy.callers(&Caller::Published);
        for (_, program) in &mut self.programs.known {
            program.callers = policy.callers(&Caller::Program {
                uid: program.uid,
                gids: &program.gids,
            });
        }
        let places = self.policy.places_in(&policy);
        self.hand_over_figures(&places, policy.rules().len());
        let used = std::mem::take(&mut self.rules);
        self.rules = RuleUse::handed_over(used, &places, &policy);
        self.policy = policy;
        self.cut_throttles_short();
        let circuits: Vec<usize> = self.circuits.iter().map(|(index, _)| index).collect();
        for index in circuits {
            let rule = self.judge_again(index).and_then(|judgement| judgement.rule);
            self.circuits[index].call.rule = rule;
            if let Some(used) = self.used(rule) {
                used.opened();
            }
        }
    }

    /// Puts a VM into these groups, and into no others. The policy in force takes note of it when it is set again. Returns whether it was in others.
    pub fn set_groups(&mut self, line: LineId, groups: Vec<String>) -> bool {
        let old = self.line_mut(line).map(|line| &mut line.address.groups);
        old.is_some_and(|old| std::mem::replace(old, groups.clone()) != groups)
    }

    /// Gives VMs these other names, and no others. VMs that are not named keep theirs.
    pub fn set_aliases(&mut self, of: Vec<(LineId, Vec<String>)>) {
        let known = of.into_iter().filter_map(|(line, names)| {
            let domain = self.lines.get(line.0 as usize)?.domain;
            Some((domain, line, names))
        });
        self.directory.set_other_names(known.collect());
    }

    /// Ends circuits that the policy in force would not set up, the first of them now and the others at the next ticks. Returns how many.
    pub fn enforce_policy(&mut self, now: Time, actions: &mut Vec<Action>) -> usize {
        let denied: Vec<(CircuitId, Option<Side>)> = self
            .circuits
            .iter()
            .filter(|(index, circuit)| {
                let over = circuit.reason.is_some() || circuit.ends.iter().any(|end| end.gone);
                !over && self.judge_again(*index).is_none()
            })
            .map(|(_, circuit)| (circuit.id, None))
            .collect();
        let count = denied.len();
        let cut = Cut {
            circuits: denied.into_iter(),
            reason: Reason::Denied,
            removed: None,
        };
        self.cut(now, cut, actions);
        count
    }

    /// The policy in force.
    pub fn policy(&self) -> &Arc<Policy> {
        &self.policy
    }

    /// Replaces the services that guests can call. Circuits that exist go on.
    pub fn set_services(&mut self, services: Vec<ServiceEntry>) {
        let policy = self.policy.clone();
        self.directory.set_services(services, &policy);
    }

    /// The VM of a line.
    pub fn address(&self, line: LineId) -> Option<&Address> {
        self.lines.get(line.0 as usize).map(|line| &line.address)
    }

    /// A service that guests can call.
    pub fn service(&self, id: ServiceId) -> Option<&ServiceEntry> {
        self.directory.service(id)
    }

    /// The identifier by which the guest of this line can call the VM of this name, which may begin with a domain. None
    /// gets that no rule would ever let it call.
    pub fn resolve(&mut self, from: LineId, name: &str) -> Option<u32> {
        let caller = self.lines.get(from.0 as usize)?;
        let (domain, name) = name
            .split_once('/')
            .unwrap_or((&caller.address.domain, name));
        let line = self.directory.line_by_name(domain, name)?;
        let callee = &self.lines[line.0 as usize];
        let may_call = self.may_pass(&caller.callers, &callee.callees, true);
        (line == from || may_call).then(|| self.cid_for(from, line))
    }

    /// The port of the service of this name that the guest of this line may call by some rule.
    pub fn resolve_service(&self, from: LineId, name: &str) -> Option<u32> {
        let caller = self.lines.get(from.0 as usize)?;
        let service = self
            .directory
            .service_by_name(&caller.address.domain, name)?;
        let may_call = self.may_pass(&caller.callers, &service.callees, false);
        may_call.then_some(service.entry.port)
    }

    /// Whether some rule would put a call through, at some port. Ports that an earlier rule has denied do not count; a range
    /// that only several of them together have denied does, though.
    fn may_pass(&self, from: &RuleSet, to: &RuleSet, to_a_vm: bool) -> bool {
        let mut denied: Vec<&PortRange> = Vec::new();
        for id in self.policy.between(from, to) {
            let Some(rule) = self.policy.rule(id) else {
                continue;
            };
            let any_port = rule.ports.is_empty();
            if rule.verdict == Verdict::Deny {
                if any_port {
                    return false;
                }
                denied.extend(&rule.ports);
                continue;
            }
            if to_a_vm && rule.leads_to_own_ports_only() {
                continue;
            }
            let is_denied = |ports: &PortRange| {
                let mut denied = denied.iter();
                denied.any(|of| of.contains(ports.start()) && of.contains(ports.end()))
            };
            if any_port || !rule.ports.iter().all(is_denied) {
                return true;
            }
        }
        false
    }

    /// The identifier by which the guest of one line knows another.
    fn cid_for(&mut self, viewer: LineId, line: LineId) -> u32 {
        let domain = self.lines[viewer.0 as usize].domain;
        let known = &self.lines[line.0 as usize];
        if known.domain == domain {
            return known.address.cid;
        }
        self.directory.alias(domain, line, &known.address)
    }

    /// Judges the dial of a guest.
    pub(crate) fn route_from_guest(
        &mut self,
        now: Time,
        from: LineId,
        key: &EndKey,
        socket_type: SocketType,
        actions: &mut Actions,
    ) -> Result<Route, Refusal> {
        let caller = &self.lines[from.0 as usize];
        let dialled = self.dialled_by_guest(caller, key)?;
        caller.admit_circuit(None).map_err(|reason| Refusal {
            reason,
            rule: None,
            dialled: Some(dialled),
        })?;
        let judgement = self.judge(&caller.callers, dialled, key.peer_port, None);
        let rule = judgement.rule;
        let refuse = |reason| Refusal {
            reason,
            rule,
            dialled: Some(dialled),
        };
        let (reached, port) = judgement.result.map_err(refuse)?;
        if let (Destination::Line(line), true) = (reached, self.is_cutting()) {
            let theirs = EndKey {
                line,
                port,
                peer_cid: self.cid_for(line, from),
                peer_port: key.port,
            };
            self.cut_lost(now, &theirs, actions);
        }
        let call = Call {
            host: None,
            dialled,
            dialled_port: key.peer_port,
            reached,
            rule,
        };
        let route = self.route_to(from, key, (reached, port), socket_type, call);
        let mut route = route.map_err(refuse)?;
        route.callee.seen = (key.peer_cid, key.peer_port);
        self.admits_by_rule(now, rule).map_err(refuse)?;
        if !self.lines[from.0 as usize].connects.take(now) {
            return Err(refuse(Reason::ConnectRate));
        }
        self.count_call(now, rule);
        Ok(route)
    }

    /// How the two ends of a call that may be made know each other.
    fn route_to(
        &mut self,
        from: LineId,
        key: &EndKey,
        (reached, port): (Destination, u32),
        socket_type: SocketType,
        call: Call,
    ) -> Result<Route, Reason> {
        let caller = &self.lines[from.0 as usize];
        let (from_hybrid, serial) = (caller.hybrid, caller.serial);
        let mut route = Route {
            callee: End::new(Party::Host, port),
            caller_cid: caller.address.cid,
            caller_port: key.port,
            call,
        };
        let Destination::Line(line) = reached else {
            if from_hybrid {
                // Programs of the host listen where the VMM itself calls, and without us.
                if !serial && reached == Destination::Listener && !OWN_PORTS.contains(&port) {
                    return Err(Reason::NoListener);
                }
                route.caller_port = self.lines[from.0 as usize].take_port();
            }
            return Ok(route);
        };
        if line == from {
            return Err(Reason::Denied);
        }
        self.admit_at(line, socket_type, Origin::of(None, Some(from)))?;
        route.caller_cid = self.cid_for(line, from);
        let mut theirs = EndKey {
            line,
            port,
            peer_cid: route.caller_cid,
            peer_port: key.port,
        };
        if from_hybrid {
            theirs.peer_port = self.free_port(from, &theirs);
            route.caller_port = theirs.peer_port;
        }
        // The last bytes of an earlier circuit may still be on their way, or its end unconfirmed.
        if self.by_end.contains_key(&theirs) {
            return Err(Reason::PortsInUse);
        }
        let callee = &self.lines[line.0 as usize];
        let party = Party::of_vm(line, callee.address.cid, callee.hybrid);
        route.callee = End::new(party, port);
        Ok(route)
    }

    /// Whether a circuit is that of a program of the host or of the daemon, to the very VM and port that it called. What vouches for the caller asks this itself,
    /// whatever let the call through.
    pub fn is_hosts_direct_call(&self, id: CircuitId) -> bool {
        self.find(id).is_some_and(|index| {
            let circuit = &self.circuits[index];
            let call = &circuit.call;
            let reached = (call.reached, circuit.end(Side::Callee).port);
            own_ports::is_direct(call.host, (call.dialled, call.dialled_port), reached)
        })
    }

    /// The callee meant.
    fn dialled_by_guest(&self, caller: &Line, key: &EndKey) -> Result<Destination, Reason> {
        if key.peer_cid != HOST_CID {
            let line = self.directory.line_by_cid(caller.domain, key.peer_cid);
            return line.map(Destination::Line).ok_or(Reason::UnknownCid);
        }
        if OWN_PORTS.contains(&key.peer_port) {
            return Ok(Destination::Listener);
        }
        let service = self.directory.service_at(caller.domain, key.peer_port);
        Ok(service.map_or(Destination::Listener, |service| {
            Destination::Service(service.entry.id)
        }))
    }

    /// Judges the dial of a host program or of a caller at a published port. Returns the line that has the
    /// call, the port there, and what to remember.
    pub(crate) fn route_from_host(
        &mut self,
        now: Time,
        dialled: LineId,
        port: u32,
        socket_type: SocketType,
        host: HostCaller,
    ) -> Result<(LineId, u32, Call), Refusal> {
        if self.lines.get(dialled.0 as usize).is_none() {
            return Err(Reason::UnknownCid.into());
        }
        let dialled = Destination::Line(dialled);
        let judgement = self.judge(self.host_callers(host), dialled, port, Some(host));
        let rule = judgement.rule;
        let refuse = |reason| Refusal {
            reason,
            rule,
            dialled: Some(dialled),
        };
        let call = |reached| Call {
            host: Some(host),
            dialled,
            dialled_port: port,
            reached,
            rule,
        };
        match judgement.result.map_err(refuse)? {
            (reached @ Destination::Line(line), port) => {
                self.admit_at(line, socket_type, Origin::of(Some(host), None))
                    .map_err(refuse)?;
                self.admits_by_rule(now, rule).map_err(refuse)?;
                if !self.lines[line.0 as usize].host_connects.take(now) {
                    return Err(refuse(Reason::ConnectRate));
                }
                self.count_call(now, rule);
                Ok((line, port, call(reached)))
            }
            // Two programs of the host need no daemon between them.
            _ => Err(refuse(Reason::Denied)),
        }
    }

    fn host_callers(&self, host: HostCaller) -> &RuleSet {
        match host {
            HostCaller::Published(_) | HostCaller::ForPublished(_) => &self.published_callers,
            HostCaller::Program(id) => self
                .programs
                .known
                .get(id.0 as usize)
                .map_or(&self.published_callers, |program| &program.callers),
        }
    }

    fn admit_at(
        &self,
        line: LineId,
        socket_type: SocketType,
        origin: Option<Origin>,
    ) -> Result<(), Reason> {
        let line = &self.lines[line.0 as usize];
        if !line.up {
            return Err(Reason::NotRunning);
        }
        if socket_type == SocketType::SeqPacket && !line.seqpacket {
            return Err(Reason::Unsupported);
        }
        line.admit_circuit(origin)
    }

    fn admits_by_rule(&mut self, now: Time, rule: Option<RuleId>) -> Result<(), Reason> {
        self.used(rule).map_or(Ok(()), |used| Ok(used.admits(now)?))
    }

    /// A call is put through: it counts for the rule that allows it. One that is refused, even by the caller's own limits, takes
    /// nothing from others that the rule allows to call.
    fn count_call(&mut self, now: Time, rule: Option<RuleId>) {
        if let Some(used) = self.used(rule) {
            used.called(now);
        }
    }

    pub(crate) fn used(&mut self, rule: Option<RuleId>) -> Option<&mut RuleUse> {
        self.rules.get_mut(rule?.0 as usize)
    }

    /// Whether a call may be made, and its callee. Every kind of call is judged here, when it is made and when it is judged again.
    fn judge(
        &self,
        from: &RuleSet,
        dialled: Destination,
        port: u32,
        host: Option<HostCaller>,
    ) -> Judgement {
        let mut judgement = self.judge_by_rules(from, dialled, port, host.is_some());
        let reached = match judgement.result {
            Ok(reached) => reached,
            // Where no rule allows it, the reason is that none could.
            Err(Reason::Denied) if judgement.rule.is_none() => (dialled, port),
            Err(_) => return judgement,
        };
        if let Err(reason) = own_ports::check(host, (dialled, port), reached) {
            judgement.result = Err(reason);
        }
        judgement
    }

    /// What the rules say to a call, and what holds where none says anything.
    fn judge_by_rules(
        &self,
        from: &RuleSet,
        dialled: Destination,
        port: u32,
        from_host: bool,
    ) -> Judgement {
        let through = |rule| Judgement {
            rule,
            result: Ok((dialled, port)),
        };
        let to = match dialled {
            Destination::Listener if OWN_PORTS.contains(&port) => return through(None),
            Destination::Listener => &self.listener_callees,
            Destination::Line(line) => &self.lines[line.0 as usize].callees,
            Destination::Departed => return refused(None, Reason::NotRunning),
            Destination::Service(id) => match self.directory.service_callees(id) {
                Some(callees) => callees,
                None => return refused(None, Reason::NoListener),
            },
        };
        match self.policy.decide(from, to, port).rule {
            None if from_host || dialled == Destination::Listener => through(None),
            None => refused(None, Reason::Denied),
            Some((rule, Verdict::Allow)) => through(Some(rule)),
            Some((rule, Verdict::Deny)) => refused(Some(rule), Reason::Denied),
            Some((rule, Verdict::Redirect(redirect))) => match self.redirected(redirect, port) {
                Some(result) => Judgement {
                    rule: Some(rule),
                    result: Ok(result),
                },
                None => refused(Some(rule), Reason::NotRunning),
            },
        }
    }

    fn redirected(&self, redirect: &Redirect, dialled_port: u32) -> Option<(Destination, u32)> {
        match redirect {
            Redirect::Vm { domain, name, port } => {
                let line = self.directory.line_by_name(domain, name)?;
                Some((Destination::Line(line), port.unwrap_or(dialled_port)))
            }
            Redirect::Service { domain, name } => {
                let service = &self.directory.service_by_name(domain, name)?.entry;
                Some((Destination::Service(service.id), service.port))
            }
        }
    }

    /// What the rules in force say to a circuit that exists, unless they would refuse it or redirect it.
    pub(crate) fn judge_again(&self, index: usize) -> Option<Judgement> {
        let circuit = &self.circuits[index];
        let call = circuit.call;
        let judgement = self.judge_now(index)?;
        let same = matches!(judgement.result, Ok((reached, port))
            if reached == call.reached && port == circuit.end(Side::Callee).port);
        same.then_some(judgement)
    }

    /// The rule that denies a circuit's call now, or has it lead elsewhere.
    pub(crate) fn ended_by(&self, index: usize) -> Option<RuleId> {
        self.judge_now(index)?.rule
    }

    fn judge_now(&self, index: usize) -> Option<Judgement> {
        let circuit = &self.circuits[index];
        let call = circuit.call;
        let from = match call.host {
            Some(host) => self.host_callers(host),
            None => {
                &self
                    .lines
                    .get(circuit.end(Side::Caller).owner()?.0 as usize)?
                    .callers
            }
        };
        Some(self.judge(from, call.dialled, call.dialled_port, call.host))
    }

    /// Says that a guest's dial has become nothing.
    pub(crate) fn refused(
        &mut self,
        from: LineId,
        key: &EndKey,
        refusal: Refusal,
        actions: &mut Actions,
    ) {
        self.count_refused(refusal.rule, refusal.reason);
        actions.push(Action::Decided(Decided {
            caller: CallerId::Guest {
                line: from,
                port: key.port,
            },
            dialled_cid: key.peer_cid,
            dialled_port: key.peer_port,
            dialled: refusal
                .dialled
                .and_then(|dialled| callee_id(dialled, key.peer_port)),
            reached: None,
            rule: refusal.rule,
            result: Err(refusal.reason),
        }));
    }

    pub(crate) fn count_refused(&mut self, rule: Option<RuleId>, reason: Reason) {
        let refused = &mut self.figures.of(rule).refused;
        *refused.entry(reason).or_default() += 1;
    }

    /// Says what became of a dial that was put through.
    pub(crate) fn decided(
        &mut self,
        now: Time,
        index: usize,
        result: Result<(), Reason>,
        actions: &mut Actions,
    ) {
        self.circuits[index].put_through = result.is_ok();
        match result {
            Ok(()) => self.count_set_up(now, index),
            Err(reason) => self.count_refused(self.circuits[index].call.rule, reason),
        }
        let circuit = &self.circuits[index];
        let (caller, callee) = (circuit.end(Side::Caller), circuit.end(Side::Callee));
        let call = circuit.call;
        let by = match caller.owner() {
            Some(line) => CallerId::Guest {
                line,
                port: caller.port,
            },
            None => CallerId::HostCircuit {
                circuit: circuit.id,
            },
        };
        actions.push(Action::Decided(Decided {
            caller: by,
            dialled_cid: callee.seen.0,
            dialled_port: call.dialled_port,
            dialled: callee_id(call.dialled, call.dialled_port),
            reached: callee_id(call.reached, callee.port),
            rule: call.rule,
            result,
        }));
    }
}

fn refused(rule: Option<RuleId>, reason: Reason) -> Judgement {
    Judgement {
        rule,
        result: Err(reason),
    }
}
