//! What the operator ought to decide, found out by asking rule by rule.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use policy::{
    Address, Callee, CalleePattern, Caller, CallerPattern, LineId, NamePattern, Policy, Redirect,
    Rule, RuleId, RuleLimits, ServiceEntry, ServiceId, Verdict, VmPattern,
};
use vsock::{
    Action, CalleeId, CallerId, CircuitId, CircuitReport, CircuitState, Decided, HostCaller,
    Outsider, Reason,
};
use wire::vsock::{HOST_CID, Header, Operation, SocketType};

use super::{FIRST_CID, LINES, PORTS, World};
use crate::Dice;

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

    pub(super) fn cid(&self, line: LineId) -> u32 {
        self.addresses[line.0 as usize].cid
    }

    /// Numbers that guests got.
    pub(super) fn told(&self) -> Vec<u32> {
        self.told.iter().map(|(_, cid, _)| *cid).collect()
    }

    fn meant(&self, from: LineId, cid: u32, port: u32) -> Meant {
        let domain = &self.addresses[from.0 as usize].domain;
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
            Who::Guest(line) => {
                let address = &self.addresses[line.0 as usize];
                Caller::Vm {
                    domain: &address.domain,
                    name: &address.name,
                    groups: &address.groups,
                }
            }
            Who::Host(Some((uid, _))) => Caller::Program { uid, gids: &gids },
            Who::Host(None) => Caller::Published,
        };
        let service = |id| self.services.iter().find(|entry| entry.id == id);
        let callee = match dialled {
            CalleeId::Guest { line, .. } => {
                let address = &self.addresses[line.0 as usize];
                Callee::Vm {
                    domain: &address.domain,
                    name: &address.name,
                    groups: &address.groups,
                }
            }
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
            let own = matches!(
                dialled,
                CalleeId::Guest {
                    port: 1005..=1007,
                    ..
                }
            );
            let result = if open && !(own && who == Who::Host(None)) {
                Ok(dialled)
            } else if own {
                Err(Reason::OwnPort)
            } else {
                Err(Reason::Denied)
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
            CalleeId::Guest {
                port: 1005..=1007, ..
            } if !(matches!(who, Who::Host(Some(_))) && reached == dialled) => Err(Reason::OwnPort),
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

// ---- Changes ----

impl World {
    pub(super) fn operator_changes(&mut self, dice: &mut Dice<'_>) {
        match dice.below(8) {
            0..=2 => self.set_policy(dice),
            3 => self.enforce(),
            4 => self.set_services(dice),
            5 => self.look_up(dice),
            6 => self.change_user(dice),
            _ => self.move_to_other_domain(),
        }
    }

    fn set_policy(&mut self, dice: &mut Dice<'_>) {
        let rules: Vec<Rule> = (0..dice.below(5)).map(|_| rule(dice)).collect();
        let policy = Arc::new(Policy::new(rules.clone()));
        self.switch.set_policy(policy.clone());
        self.twin.set_policy(policy);
        self.operator.rules = rules;
        if self.traced {
            eprintln!("rules: {:?}", self.operator.rules);
        }
    }

    /// Circuits that the rules no longer allow are ended, and no others.
    fn enforce(&mut self) {
        let reports: Vec<CircuitReport> = self.switch.circuits().collect();
        let (mut actions, mut again) = (Vec::new(), Vec::new());
        let ended = self.switch.enforce_policy(self.now, &mut actions);
        let same = self.twin.enforce_policy(self.now, &mut again);
        assert_eq!((ended, &actions), (same, &again));
        let closed: BTreeSet<CircuitId> = actions
            .iter()
            .filter_map(|action| match action {
                Action::HostClose { circuit, reset } => {
                    assert!(reset);
                    Some(*circuit)
                }
                Action::HostRejected { circuit, reason } => {
                    assert_eq!(*reason, Reason::Denied);
                    Some(*circuit)
                }
                _ => None,
            })
            .collect();
        let mut most = 0;
        for report in reports {
            let Some(call) = self.operator.calls.get(&report.id) else {
                most += 1;
                continue;
            };
            let said = call
                .dialled
                .map(|dialled| self.operator.say(call.who, dialled, call.port).1);
            let stays = said == Some(Ok(call.reached));
            most += usize::from(!stays);
            let live = report.state != CircuitState::Closing && self.hosts.contains_key(&report.id);
            if live && !self.renumbered(call) {
                assert_eq!(closed.contains(&report.id), !stays, "{report:?} {call:?}");
            }
        }
        assert!(
            ended <= most,
            "{ended} ended, and at most {most} may not live"
        );
        self.carry_out(&actions, vsock::Event::Tick);
        let again = self.switch.enforce_policy(self.now, &mut Vec::new());
        assert_eq!(
            (again, self.twin.enforce_policy(self.now, &mut Vec::new())),
            (0, 0)
        );
    }

    /// Whether a service has another port than when a call was redirected to it: then it counts as another.
    fn renumbered(&self, call: &Call) -> bool {
        matches!(call.reached, CalleeId::Service(_)) && call.dialled != Some(call.reached)
    }

    fn set_services(&mut self, dice: &mut Dice<'_>) {
        let mut services: Vec<ServiceEntry> = Vec::new();
        for _ in 0..dice.below(4) {
            let number = dice.below(4);
            services.push(ServiceEntry {
                id: ServiceId(number as u32),
                domain: ["default", "red"][number / 2].to_owned(),
                name: ["a", "b"][number % 2].to_owned(),
                port: dice.pick(&PORTS),
            });
        }
        self.switch.set_services(services.clone());
        self.twin.set_services(services.clone());
        // Of two of one name or at one port, the later one holds.
        let known = &mut self.operator.services;
        known.clear();
        for entry in services {
            known.retain(|of| {
                of.domain != entry.domain || (of.name != entry.name && of.port != entry.port)
            });
            known.push(entry);
        }
    }

    /// A guest asks for the number of another.
    fn look_up(&mut self, dice: &mut Dice<'_>) {
        let line = LineId(dice.below(LINES as usize) as u32);
        let other = LineId(dice.below(LINES as usize) as u32);
        let address = &self.operator.addresses[other.0 as usize];
        let name = format!("{}/{}", address.domain, address.name);
        let told = self.switch.resolve(line, &name);
        assert_eq!(self.twin.resolve(line, &name), told);
        let domain = self.operator.addresses[line.0 as usize].domain.clone();
        if domain == address.domain {
            assert!(told.is_none_or(|cid| cid == address.cid));
        }
        let ports = [80, 81, 1024, 9];
        let may_call = ports.iter().any(|port| {
            let callee = CalleeId::Guest {
                line: other,
                port: *port,
            };
            let (rule, said) = self.operator.say(Who::Guest(line), callee, *port);
            rule.is_some() && said.is_ok()
        });
        assert!(told.is_some() || !may_call, "{name} may be called");
        if let Some(cid) = told {
            let known = self.operator.told.iter();
            let mut same = known.filter(|(of, number, _)| (of, *number) == (&domain, cid));
            assert!(
                same.all(|(_, _, line)| *line == other),
                "one number for two"
            );
            self.operator.told.push((domain, cid, other));
            self.operator.told.truncate(4);
        }
    }

    fn change_user(&mut self, dice: &mut Dice<'_>) {
        let user = (dice.pick(&[7, 8]), dice.pick(&[50, 51]));
        let program = self.switch.program(user.0, &[user.1]);
        assert_eq!(self.twin.program(user.0, &[user.1]), program);
        let program = program.expect("there are few users");
        self.operator.user = Some(user);
        self.operator.host_caller = HostCaller::Program(program);
    }

    /// The last VM is replaced by one of another domain that has the number and the name of the first.
    fn move_to_other_domain(&mut self) {
        let address = Address {
            domain: "red".to_owned(),
            groups: vec!["g".to_owned()],
            ..Address::new("vm0", FIRST_CID)
        };
        self.replace_line(LineId(LINES - 1), address);
    }

    /// A VM goes, and another has its line's number.
    pub(super) fn replace_line(&mut self, line: LineId, address: Address) {
        self.up.remove(&line);
        self.views.line_gone(line);
        let (mut actions, mut again) = (Vec::new(), Vec::new());
        self.switch.remove_line(self.now, line, &mut actions);
        self.twin.remove_line(self.now, line, &mut again);
        assert_eq!(actions, again);
        self.carry_out(&actions, vsock::Event::Tick);
        for switch in [&mut self.switch, &mut self.twin] {
            let again = switch.add_line_at(address.clone(), self.limits);
            assert_eq!(again, Ok(line), "numbers are used again");
        }
        self.operator.replaced(line, address);
    }
}

fn rule(dice: &mut Dice<'_>) -> Rule {
    let domain = || "default".to_owned();
    let red = || "red".to_owned();
    let name = |text: &str| text.to_owned();
    let from = match dice.below(8) {
        0 | 1 => CallerPattern::Vms(VmPattern::Any { domain: domain() }),
        2 => CallerPattern::Vms(VmPattern::Any { domain: red() }),
        3 => CallerPattern::Vms(VmPattern::One {
            domain: domain(),
            name: name("vm0"),
        }),
        4 => CallerPattern::Vms(VmPattern::Group {
            domain: red(),
            name: name("g"),
        }),
        5 => CallerPattern::User(7),
        6 => CallerPattern::UserGroup(50),
        _ => CallerPattern::Host,
    };
    let to = match dice.below(8) {
        0 | 1 => CalleePattern::Vms(VmPattern::Any { domain: domain() }),
        2 => CalleePattern::Vms(VmPattern::Any { domain: red() }),
        3 => CalleePattern::Vms(VmPattern::One {
            domain: domain(),
            name: name("vm1"),
        }),
        4 => CalleePattern::Service {
            domain: domain(),
            name: NamePattern::Any,
        },
        5 => CalleePattern::Service {
            domain: red(),
            name: NamePattern::Prefix(name("a")),
        },
        6 => CalleePattern::Vms(VmPattern::Group {
            domain: red(),
            name: name("g"),
        }),
        _ => CalleePattern::Listeners,
    };
    let to_vm = |domain: String, text: &str, port| {
        let name = name(text);
        Verdict::Redirect(Redirect::Vm { domain, name, port })
    };
    let verdict = match dice.below(10) {
        0 => Verdict::Deny,
        1 => to_vm(domain(), "vm1", None),
        2 => to_vm(domain(), "vm0", Some(81)),
        3 => to_vm(red(), "vm0", None),
        4 => Verdict::Redirect(Redirect::Service {
            domain: domain(),
            name: name("a"),
        }),
        _ => Verdict::Allow,
    };
    let ports = match dice.below(4) {
        0 => vec![80..=80],
        1 => vec![1024..=u32::MAX, 81..=81],
        _ => Vec::new(),
    };
    let limits = RuleLimits {
        circuits: dice.pick(&[None, None, Some(2), Some(0)]),
        connects_per_second: dice.pick(&[None, None, Some(3), Some(0)]),
        bytes_per_second: dice.pick(&[None, Some(1), Some(100_000), Some(0), Some(u64::MAX)]),
    };
    Rule {
        from: vec![from],
        to: vec![to],
        ports,
        verdict,
        limits,
        label: String::new(),
        is_named: false,
    }
}
