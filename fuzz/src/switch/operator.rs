//! What the operator ought to decide, found out by asking rule by rule.

use std::collections::{BTreeMap, BTreeSet};

use policy::{Address, Callee, Caller, LineId, Redirect, Rule, RuleId, ServiceEntry, Verdict};
use vsock::{
    Action, CalleeId, CallerId, CircuitId, CircuitReport, CircuitState, Decided, HostCaller,
    Outsider, Reason,
};
use wire::vsock::{HOST_CID, Header, Operation, SocketType};

mod changes;

use super::{FIRST_CID, LINES, World};

/// Caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Who {
    Guest(LineId),
    /// A program of the host: a user with a group, or unknown.
    Host(Option<(u32, u32)>),
}

/// A call's callee.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Meant {
    /// No number of the caller's domain.
    Nobody,
    /// A number that its owner was never given: it may be an alias, or nothing.
    Perhaps,
    Callee(CalleeId),
}

/// A call that was put through.
#[derive(Debug, Clone, Copy)]
struct Call {
    who: Who,
    /// None is a VM that has gone since.
    dialled: Option<CalleeId>,
    port: u32,
    reached: CalleeId,
}

/// What the rules say to a call.
type Said = (Option<RuleId>, Result<CalleeId, Reason>);

/// The operator as it is written down: lists, looked through from the beginning.
#[derive(Debug)]
pub(super) struct Operator {
    rules: Vec<Rule>,
    services: Vec<ServiceEntry>,
    /// By line.
    addresses: Vec<Address>,
    /// The numbers that guests of a domain got, and their owners.
    told: Vec<(String, u32, LineId)>,
    calls: BTreeMap<CircuitId, Call>,
    /// Users of the host's programs.
    user: Option<(u32, u32)>,
    pub(super) host_caller: HostCaller,
    /// Calls that were made, and those of them that were decided.
    dials: usize,
    decided: usize,
}

impl Operator {
    pub(super) fn new() -> Operator {
        let address = |number| Address::new(&format!("vm{number}"), FIRST_CID + number);
        Operator {
            rules: vec![Rule::allow_any()],
            services: Vec::new(),
            addresses: (0..LINES).map(address).collect(),
            told: Vec::new(),
            calls: BTreeMap::new(),
            user: None,
            host_caller: HostCaller::Published(Outsider::default()),
            dials: 0,
            decided: 0,
        }
    }

    fn address(&self, line: LineId) -> &Address {
        &self.addresses[line.0 as usize]
    }

    pub(super) fn cid(&self, line: LineId) -> u32 {
        self.address(line).cid
    }

    /// Numbers that guests got.
    pub(super) fn told(&self) -> Vec<u32> {
        self.told.iter().map(|(_, cid, _)| *cid).collect()
    }

    fn meant(&self, from: LineId, cid: u32, port: u32) -> Meant {
        let domain = &self.address(from).domain;
        if cid == HOST_CID {
            let mut services = self.services.iter();
            let service = services.find(|entry| entry.domain == *domain && entry.port == port);
            let listener = CalleeId::Listener { port };
            return Meant::Callee(service.map_or(listener, |entry| CalleeId::Service(entry.id)));
        }
        let mut lines = self.addresses.iter();
        let own = lines.position(|address| address.domain == *domain && address.cid == cid);
        let mut told = self.told.iter();
        let alias = told.find(|(of, number, _)| of == domain && *number == cid);
        let line = match (own, alias) {
            (Some(index), _) => LineId(index as u32),
            (None, Some((_, _, line))) => *line,
            (None, None) if cid < 1 << 30 => return Meant::Nobody,
            (None, None) => return Meant::Perhaps,
        };
        Meant::Callee(CalleeId::Guest { line, port })
    }

    fn say(&self, who: Who, dialled: CalleeId, port: u32) -> Said {
        let gids = match who {
            Who::Host(Some((_, gid))) => vec![gid],
            _ => Vec::new(),
        };
        let caller = match who {
            Who::Guest(line) => self.address(line).as_caller(),
            Who::Host(Some((uid, _))) => Caller::Program { uid, gids: &gids },
            Who::Host(None) => Caller::Published,
        };
        let service = |id| self.services.iter().find(|entry| entry.id == id);
        let callee = match dialled {
            CalleeId::Guest { line, .. } => self.address(line).as_callee(),
            CalleeId::Service(id) => match service(id) {
                Some(entry) => Callee::Service {
                    domain: &entry.domain,
                    name: &entry.name,
                },
                None => return (None, Err(Reason::NoListener)),
            },
            CalleeId::Listener { .. } => Callee::Listener,
        };
        let first = self.rules.iter().position(|rule| {
            rule.from.iter().any(|pattern| pattern.covers(&caller))
                && rule.to.iter().any(|pattern| pattern.covers(&callee))
                && (rule.ports.is_empty() || rule.ports.iter().any(|ports| ports.contains(&port)))
        });
        let open = matches!(who, Who::Host(_)) || matches!(dialled, CalleeId::Listener { .. });
        let Some(index) = first else {
            let result = match is_own(dialled) {
                own if open && !(own && who == Who::Host(None)) => Ok(dialled),
                true => Err(Reason::OwnPort),
                false => Err(Reason::Denied),
            };
            return (None, result);
        };
        let result = match &self.rules[index].verdict {
            Verdict::Allow => Ok(dialled),
            Verdict::Deny => Err(Reason::Denied),
            Verdict::Redirect(redirect) => match self.target(redirect, port) {
                None => Err(Reason::NotRunning),
                Some(CalleeId::Service(_)) if !matches!(who, Who::Guest(_)) => Err(Reason::Denied),
                Some(target) => Ok(target),
            },
        };
        let result = result.and_then(|reached| match reached {
            _ if is_own(reached) && !(matches!(who, Who::Host(Some(_))) && reached == dialled) => {
                Err(Reason::OwnPort)
            }
            CalleeId::Guest { line, .. } if who == Who::Guest(line) => Err(Reason::Denied),
            reached => Ok(reached),
        });
        (Some(RuleId(index as u32)), result)
    }

    fn target(&self, redirect: &Redirect, dialled_port: u32) -> Option<CalleeId> {
        match redirect {
            Redirect::Vm { domain, name, port } => {
                let mut lines = self.addresses.iter();
                let index = lines.position(|of| of.domain == *domain && of.name == *name)?;
                Some(CalleeId::Guest {
                    line: LineId(index as u32),
                    port: port.unwrap_or(dialled_port),
                })
            }
            Redirect::Service { domain, name } => {
                let mut services = self.services.iter();
                let entry = services.find(|of| of.domain == *domain && of.name == *name)?;
                Some(CalleeId::Service(entry.id))
            }
        }
    }

    /// A line has been removed, and its number is another VM's.
    fn replaced(&mut self, line: LineId, address: Address) {
        self.addresses[line.0 as usize] = address;
        self.told.clear();
        for call in self.calls.values_mut() {
            let gone = matches!(call.dialled, Some(CalleeId::Guest { line: of, .. }) if of == line);
            call.dialled = call.dialled.filter(|_| !gone);
        }
    }
}

/// Whether a call leads to a port that is the daemon's own.
fn is_own(callee: CalleeId) -> bool {
    matches!(callee, CalleeId::Guest { port, .. } if (1005..=1007).contains(&port))
}

// ---- Calls ----

impl World {
    pub(super) fn ids(&self) -> BTreeSet<CircuitId> {
        self.switch.circuits().map(|report| report.id).collect()
    }

    /// A guest has sent a packet; `before` are the circuits that there were.
    pub(super) fn check_guest_call(
        &mut self,
        line: LineId,
        header: &Header,
        before: &BTreeSet<CircuitId>,
        actions: &[Action],
    ) {
        let is_call = header.operation == Operation::Request as u16
            && header.src_cid == u64::from(self.operator.cid(line))
            && SocketType::from_wire(header.socket_type).is_some();
        let refused = actions.iter().find_map(|action| match action {
            Action::Decided(decided) if decided.reached.is_none() => Some(*decided),
            _ => None,
        });
        let made = self.new_circuit(before);
        assert!(
            is_call || (refused.is_none() && made.is_none()),
            "no call was made"
        );
        if refused.is_none() && made.is_none() {
            return;
        }
        self.operator.dials += 1;
        let port = header.dst_port;
        let who = Who::Guest(line);
        let meant = self.operator.meant(line, header.dst_cid as u32, port);
        if let Some(decided) = refused {
            assert!(made.is_none(), "refused, and put through");
            let from = CallerId::Guest {
                line,
                port: header.src_port,
            };
            assert_eq!(decided.caller, from);
            let called = (decided.dialled_cid, decided.dialled_port);
            assert_eq!(called, (header.dst_cid as u32, port));
            self.check_refusal(who, meant, &decided, actions);
        }
        if let Some(report) = made {
            self.check_circuit(who, meant, port, &report, actions);
        }
    }

    /// A host program has dialled a line.
    pub(super) fn check_host_call(
        &mut self,
        line: LineId,
        port: u32,
        before: &BTreeSet<CircuitId>,
        actions: &[Action],
    ) {
        self.operator.dials += 1;
        let who = Who::Host(self.operator.user);
        let meant = Meant::Callee(CalleeId::Guest { line, port });
        match self.new_circuit(before) {
            Some(report) => self.check_circuit(who, meant, port, &report, actions),
            None => {
                let decided = actions.iter().find_map(|action| match action {
                    Action::Decided(decided) => Some(*decided),
                    _ => None,
                });
                let decided = decided.expect("a refusal is a decision");
                self.check_refusal(who, meant, &decided, actions);
            }
        }
    }

    fn new_circuit(&self, before: &BTreeSet<CircuitId>) -> Option<CircuitReport> {
        let mut made = self.switch.circuits().filter(|of| !before.contains(&of.id));
        let first = made.next();
        assert!(made.next().is_none(), "two circuits for one call");
        first
    }

    fn check_refusal(&self, who: Who, meant: Meant, decided: &Decided, actions: &[Action]) {
        let Err(reason) = decided.result else {
            panic!("put through without a callee: {decided:?}");
        };
        let told = actions.iter().any(|action| match action {
            Action::Report { reason: said, .. } => *said == reason,
            Action::HostDialRefused { reason: said, .. } => *said == reason,
            _ => false,
        });
        assert!(told, "{decided:?} is not reported: {actions:?}");
        let dialled = match meant {
            Meant::Nobody => {
                assert_eq!((decided.dialled, decided.rule), (None, None));
                return assert_eq!(reason, Reason::UnknownCid);
            }
            Meant::Perhaps => return,
            Meant::Callee(dialled) => dialled,
        };
        assert_eq!(decided.dialled, Some(dialled));
        let (rule, said) = self.operator.say(who, dialled, decided.dialled_port);
        let own_limit = matches!(reason, Reason::CircuitLimit | Reason::HalfOpenLimit);
        if !(own_limit && decided.rule.is_none()) {
            assert_eq!(decided.rule, rule, "{decided:?}");
        }
        match said {
            Err(said) => assert!(own_limit || reason == said, "{said:?}: {decided:?}"),
            Ok(_) => assert!(
                !matches!(reason, Reason::Denied | Reason::UnknownCid),
                "it is allowed: {decided:?}"
            ),
        }
    }

    fn check_circuit(
        &mut self,
        who: Who,
        meant: Meant,
        port: u32,
        report: &CircuitReport,
        actions: &[Action],
    ) {
        let dialled = match meant {
            Meant::Nobody => panic!("put through without a callee: {report:?}"),
            Meant::Perhaps => return,
            Meant::Callee(dialled) => dialled,
        };
        let (rule, said) = self.operator.say(who, dialled, port);
        let Ok(reached) = said else {
            panic!("{dialled:?} must not be called by {who:?}: {report:?}");
        };
        let dial = actions.iter().find_map(|action| match action {
            Action::DialHost(call) => Some((call.service, call.rule)),
            _ => None,
        });
        let callee = (report.callee.line, report.callee.port);
        match reached {
            CalleeId::Guest { line, port } => assert_eq!(callee, (Some(line), port)),
            CalleeId::Service(id) => assert_eq!(dial, Some((Some(id), rule))),
            CalleeId::Listener { port } => {
                assert_eq!((dial, callee), (Some((None, rule)), (None, port)));
            }
        }
        let call = Call {
            who,
            dialled: Some(dialled),
            port,
            reached,
        };
        self.operator.calls.insert(report.id, call);
    }

    /// Each call is decided once: those that are not are being answered.
    pub(super) fn check_decisions(&self) {
        let dialling = self.switch.circuits();
        let dialling = dialling.filter(|report| report.state == CircuitState::Dialling);
        let Operator { dials, decided, .. } = self.operator;
        assert_eq!(dials, decided + dialling.count());
    }

    pub(super) fn note_decision(&mut self) {
        self.operator.decided += 1;
    }

    pub(super) fn forget_call(&mut self, circuit: CircuitId) {
        self.operator.calls.remove(&circuit);
    }
}
