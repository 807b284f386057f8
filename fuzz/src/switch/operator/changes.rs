//! What the operator does while circuits live.

use std::collections::BTreeSet;
use std::sync::Arc;

use policy::{
    Address, CalleePattern, CallerPattern, DEFAULT_DOMAIN, LineId, NamePattern, Policy, Redirect,
    Rule, RuleLimits, ServiceEntry, ServiceId, Verdict, VmPattern,
};
use vsock::{Action, CalleeId, CircuitId, CircuitReport, CircuitState, HostCaller, Reason};

use super::super::{FIRST_CID, LINES, PORTS, World};
use super::{Call, Who};
use crate::Dice;

impl World {
    pub(in crate::switch) fn operator_changes(&mut self, dice: &mut Dice<'_>) {
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
        let address = self.operator.address(other);
        let name = format!("{}/{}", address.domain, address.name);
        let told = self.switch.resolve(line, &name);
        assert_eq!(self.twin.resolve(line, &name), told);
        let domain = self.operator.address(line).domain.clone();
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
    pub(in crate::switch) fn replace_line(&mut self, line: LineId, address: Address) {
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
    let (ours, red) = (|| DEFAULT_DOMAIN.to_owned(), || "red".to_owned());
    let any = |domain| VmPattern::Any { domain };
    let one = |name: &str| VmPattern::One {
        domain: ours(),
        name: name.to_owned(),
    };
    let group = || VmPattern::Group {
        domain: red(),
        name: "g".to_owned(),
    };
    let from = match dice.below(8) {
        0 | 1 => CallerPattern::Vms(any(ours())),
        2 => CallerPattern::Vms(any(red())),
        3 => CallerPattern::Vms(one("vm0")),
        4 => CallerPattern::Vms(group()),
        5 => CallerPattern::User(7),
        6 => CallerPattern::UserGroup(50),
        _ => CallerPattern::Host,
    };
    let service = |domain, name| CalleePattern::Service { domain, name };
    let to = match dice.below(8) {
        0 | 1 => CalleePattern::Vms(any(ours())),
        2 => CalleePattern::Vms(any(red())),
        3 => CalleePattern::Vms(one("vm1")),
        4 => service(ours(), NamePattern::Any),
        5 => service(red(), NamePattern::Prefix("a".to_owned())),
        6 => CalleePattern::Vms(group()),
        _ => CalleePattern::Listeners,
    };
    let to_vm = |domain, name: &str, port| {
        let name = name.to_owned();
        Verdict::Redirect(Redirect::Vm { domain, name, port })
    };
    let verdict = match dice.below(10) {
        0 => Verdict::Deny,
        1 => to_vm(ours(), "vm1", None),
        2 => to_vm(ours(), "vm0", Some(81)),
        3 => to_vm(red(), "vm0", None),
        4 => Verdict::Redirect(Redirect::Service {
            domain: ours(),
            name: "a".to_owned(),
        }),
        _ => Verdict::Allow,
    };
    let ports = match dice.below(4) {
        0 => vec![80..=80],
        1 => vec![1024..=u32::MAX, 81..=81],
        _ => Vec::new(),
    };
    Rule {
        from: vec![from],
        to: vec![to],
        ports,
        verdict,
        limits: RuleLimits {
            circuits: dice.pick(&[None, None, Some(2), Some(0)]),
            connects_per_second: dice.pick(&[None, None, Some(3), Some(0)]),
            bytes_per_second: dice.pick(&[None, Some(1), Some(100_000), Some(0), Some(u64::MAX)]),
        },
        label: String::new(),
        is_named: false,
    }
}
