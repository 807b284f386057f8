//! VMs whose VMM has a vsock device of its own: the calls allowed, how each side sees the other, and what is counted.

mod lines;

use std::sync::Arc;
use std::time::Duration;

use policy::{
    Address, CalleePattern, CallerPattern, DEFAULT_DOMAIN, LineId, NamePattern, Policy, Redirect,
    Rule, RuleId, RuleLimits, ServiceEntry, ServiceId, Time, Verdict, VmPattern,
};
use wire::vsock::{HOST_CID, Header, Operation, SocketType};

use crate::{
    Action, CalleeId, CallerId, CircuitId, CircuitState, Decided, Event, HostCall, HostCaller,
    Limits, MAX_OFFERED_PORTS, Outsider, Reason, Side, Switch, Transmit,
};

/// A hybrid VM `fc` with CID 3, and a VM `web` with CID 4 and rings that run.
struct Scene {
    switch: Switch,
    hybrid: LineId,
    web: LineId,
    now: Time,
}

const PORT_OF_WEB: u32 = 1025;

fn vm(name: &str) -> CallerPattern {
    CallerPattern::Vms(VmPattern::One {
        domain: DEFAULT_DOMAIN.to_owned(),
        name: name.to_owned(),
    })
}

fn called(name: &str) -> CalleePattern {
    CalleePattern::Vms(VmPattern::One {
        domain: DEFAULT_DOMAIN.to_owned(),
        name: name.to_owned(),
    })
}

fn rule(from: CallerPattern, to: CalleePattern, verdict: Verdict) -> Rule {
    Rule {
        from: vec![from],
        to: vec![to],
        ports: Vec::new(),
        verdict,
        limits: RuleLimits::default(),
        label: "rule".to_owned(),
        is_named: true,
    }
}

fn redirect(port: u32, name: &str, to: u32) -> Rule {
    let target = Redirect::Vm {
        domain: DEFAULT_DOMAIN.to_owned(),
        name: name.to_owned(),
        port: Some(to),
    };
    let verdict = Verdict::Redirect(target);
    Rule {
        ports: vec![port..=port],
        ..rule(vm("fc"), CalleePattern::Listeners, verdict)
    }
}

fn services() -> CalleePattern {
    CalleePattern::Service {
        domain: DEFAULT_DOMAIN.to_owned(),
        name: NamePattern::Any,
    }
}

impl Scene {
    fn new(rules: Vec<Rule>) -> Scene {
        Scene::with(rules, Limits::default())
    }

    fn with(rules: Vec<Rule>, limits: Limits) -> Scene {
        let mut switch = Switch::new(Limits::default());
        switch.set_policy(Arc::new(Policy::new(rules)));
        let hybrid = switch.add_hybrid_line(Address::new("fc", 3), limits);
        let web = switch.add_line("web", 4).unwrap();
        let mut scene = Scene {
            hybrid: hybrid.unwrap(),
            switch,
            web,
            now: Duration::from_secs(1),
        };
        let line = web;
        scene.tell(Event::LineUp {
            line,
            seqpacket: true,
        });
        scene
    }

    fn tell(&mut self, event: Event) -> Vec<Action> {
        let mut actions = Vec::new();
        self.switch.handle(self.now, event, &mut actions);
        actions
    }

    fn offer_registry(&mut self) {
        self.switch.set_services(vec![ServiceEntry {
            id: ServiceId(7),
            domain: DEFAULT_DOMAIN.to_owned(),
            name: "registry".to_owned(),
            port: 5000,
        }]);
    }

    /// The hybrid VM calls a port of the host.
    fn calls(&mut self, port: u32) -> Vec<Action> {
        let line = self.hybrid;
        let token = 5;
        self.tell(Event::HybridDial { line, port, token })
    }

    /// A packet of `web`'s guest.
    fn packet(&mut self, operation: Operation, to: (u32, u32), source_port: u32) -> Vec<Action> {
        let header = Header {
            src_cid: 4,
            dst_cid: u64::from(to.0),
            src_port: source_port,
            dst_port: to.1,
            socket_type: SocketType::Stream as u16,
            operation: operation as u16,
            buf_alloc: 65_536,
            ..Header::default()
        };
        let line = self.web;
        self.tell(Event::Packet { line, header })
    }

    /// What `web`'s guest is sent next.
    fn sent(&mut self) -> Option<Header> {
        let mut actions = Vec::new();
        match self.switch.next_for(self.now, self.web, &mut actions) {
            Some(Transmit::Control(header)) => Some(header),
            other => {
                assert_eq!(other, None);
                None
            }
        }
    }

    fn circuits_of(&self, line: LineId) -> u32 {
        let mut lines = self.switch.lines();
        lines.find(|report| report.id == line).unwrap().circuits
    }

    fn ended(&self, line: LineId, reason: Reason) -> u64 {
        let mut lines = self.switch.lines();
        let report = lines.find(|report| report.id == line).unwrap();
        report.counters.ended[reason.index()]
    }

    fn answer(&mut self, circuit: CircuitId, result: Result<(), Reason>) -> Vec<Action> {
        self.tell(Event::HostDialed { circuit, result })
    }
}

/// The circuit that a host's socket has become the caller's end of.
fn dialling(actions: &[Action]) -> CircuitId {
    let circuits: Vec<CircuitId> = actions
        .iter()
        .filter_map(|action| match action {
            Action::HostDialing { token: 5, circuit } => Some(*circuit),
            _ => None,
        })
        .collect();
    assert_eq!(circuits.len(), 1, "{actions:?}");
    circuits[0]
}

fn decided(actions: &[Action]) -> Decided {
    let decisions: Vec<Decided> = actions
        .iter()
        .filter_map(|action| match action {
            Action::Decided(decided) => Some(*decided),
            _ => None,
        })
        .collect();
    assert_eq!(
        decisions.len(),
        1,
        "each call is reported once: {actions:?}"
    );
    decisions[0]
}

fn assert_refused(actions: &[Action], reason: Reason) {
    let refused = Action::HostDialRefused { token: 5, reason };
    assert!(actions.contains(&refused), "{actions:?}");
    assert_eq!(decided(actions).result, Err(reason));
}

#[test]
fn a_guest_calls_a_hybrid_vm_by_its_identifier() {
    let mut scene = Scene::new(vec![rule(vm("web"), called("fc"), Verdict::Allow)]);
    let actions = scene.packet(Operation::Request, (3, 22), PORT_OF_WEB);
    let line = scene.hybrid;
    let Some(Action::DialHybrid { circuit, .. }) = actions.first().copied() else {
        panic!("{actions:?}");
    };
    let expected = Action::DialHybrid {
        circuit,
        line,
        port: 22,
    };
    assert_eq!(actions, [expected]);
    assert_eq!(scene.switch.host_side(circuit), Some(Side::Callee));
    assert_eq!(scene.circuits_of(line), 1);
    let actions = scene.answer(circuit, Ok(()));
    let decided = decided(&actions);
    let guest = |line, port| CalleeId::Guest { line, port };
    assert_eq!(decided.reached, Some(guest(line, 22)));
    assert_eq!(decided.rule, Some(RuleId(0)));
    let response = scene.sent().unwrap();
    assert_eq!(response.operation, Operation::Response as u16);
    assert_eq!((response.src_cid, response.src_port), (3, 22));
    let report = scene.switch.circuits().next().unwrap();
    assert_eq!(report.state, CircuitState::Open);
    assert_eq!((report.callee.line, report.callee.cid), (Some(line), 3));
    // What reaches its VMM counts as its own.
    let mut header = Header {
        src_cid: 4,
        dst_cid: 3,
        src_port: PORT_OF_WEB,
        dst_port: 22,
        len: 100,
        socket_type: 1,
        operation: Operation::Data as u16,
        buf_alloc: 65_536,
        ..Header::default()
    };
    let web = scene.web;
    let actions = scene.tell(Event::Packet { line: web, header });
    let from = Side::Caller;
    assert!(actions.contains(&Action::Forward { circuit, from }));
    scene.tell(Event::Delivered { circuit, len: 100 });
    let counted = |scene: &Scene, line| {
        let mut lines = scene.switch.lines();
        lines.find(|report| report.id == line).unwrap().counters
    };
    assert_eq!(counted(&scene, line).bytes_to_guest, 100);
    // The end of both.
    header.len = 0;
    header.operation = Operation::Reset as u16;
    let actions = scene.tell(Event::Packet { line: web, header });
    assert!(
        actions.contains(&Action::Released { circuit }),
        "{actions:?}"
    );
    assert_eq!((scene.circuits_of(line), scene.circuits_of(web)), (0, 0));
}

#[test]
fn without_a_rule_nobody_calls_a_hybrid_vm() {
    let mut scene = Scene::new(Vec::new());
    let actions = scene.packet(Operation::Request, (3, 22), PORT_OF_WEB);
    assert_eq!(decided(&actions).result, Err(Reason::Denied));
    assert_eq!(scene.sent().unwrap().operation, Operation::Reset as u16);
    assert_eq!(scene.circuits_of(scene.hybrid), 0);
}

#[test]
fn messages_do_not_reach_a_hybrid_vm() {
    let mut scene = Scene::new(vec![rule(vm("web"), called("fc"), Verdict::Allow)]);
    let line = scene.hybrid;
    let header = Header {
        src_cid: 4,
        dst_cid: 3,
        src_port: PORT_OF_WEB,
        dst_port: 22,
        socket_type: SocketType::SeqPacket as u16,
        operation: Operation::Request as u16,
        ..Header::default()
    };
    let web = scene.web;
    let actions = scene.tell(Event::Packet { line: web, header });
    assert_eq!(decided(&actions).result, Err(Reason::Unsupported));
    let actions = scene.tell(Event::HostDial {
        line,
        port: 22,
        socket_type: SocketType::SeqPacket,
        caller: HostCaller::Published(Outsider::default()),
        token: 5,
    });
    assert_refused(&actions, Reason::Unsupported);
}

#[test]
fn a_vmm_that_does_not_put_a_call_through_is_a_reset_with_its_reason() {
    let rules = || vec![rule(vm("web"), called("fc"), Verdict::Allow)];
    for reason in [Reason::NotRunning, Reason::GuestRefused] {
        let mut scene = Scene::new(rules());
        let actions = scene.packet(Operation::Request, (3, 22), PORT_OF_WEB);
        let Action::DialHybrid { circuit, .. } = actions[0] else {
            panic!("{actions:?}");
        };
        let actions = scene.answer(circuit, Err(reason));
        assert_eq!(decided(&actions).result, Err(reason));
        assert_eq!(scene.sent().unwrap().operation, Operation::Reset as u16);
        assert_eq!(scene.circuits_of(scene.hybrid), 0);
    }
    // One that says nothing has as long as any other callee.
    let mut scene = Scene::new(rules());
    scene.packet(Operation::Request, (3, 22), PORT_OF_WEB);
    scene.now = scene.switch.poll_at().unwrap();
    assert_eq!(scene.now, Duration::from_secs(11));
    let actions = scene.tell(Event::Tick);
    assert_eq!(decided(&actions).result, Err(Reason::TimedOut));
    assert!(
        actions
            .iter()
            .any(|action| matches!(action, Action::HostClose { .. }))
    );
}

#[test]
fn a_hybrid_vm_reaches_a_guest_by_a_redirection_and_is_seen_as_itself() {
    let mut scene = Scene::new(vec![redirect(5432, "web", 80)]);
    let actions = scene.calls(5432);
    let circuit = dialling(&actions);
    assert_eq!(scene.switch.host_side(circuit), Some(Side::Caller));
    let request = scene.sent().unwrap();
    assert_eq!(request.operation, Operation::Request as u16);
    assert_eq!((request.src_cid, request.dst_port), (3, 80));
    assert!(
        request.src_port >= 1 << 30,
        "not a port that vouches for anything"
    );
    let actions = scene.packet(Operation::Response, (3, request.src_port), 80);
    let port = request.src_port;
    assert!(actions.contains(&Action::HostAccepted { circuit, port }));
    let decided = decided(&actions);
    let line = scene.hybrid;
    assert_eq!(decided.caller, CallerId::Guest { line, port });
    assert_eq!(
        (decided.dialled_cid, decided.dialled_port),
        (HOST_CID, 5432)
    );
    assert_eq!(decided.dialled, Some(CalleeId::Listener { port: 5432 }));
    // A second call has another port.
    dialling(&scene.calls(5432));
    assert_ne!(scene.sent().unwrap().src_port, port);
    assert_eq!(scene.circuits_of(line), 2);
}

#[test]
fn the_ports_of_a_hybrid_vm_go_around_those_that_are_in_use() {
    let mut scene = Scene::new(vec![redirect(5432, "web", 80)]);
    dialling(&scene.calls(5432));
    let first = scene.sent().unwrap().src_port;
    let line = &mut scene.switch.lines[scene.hybrid.0 as usize];
    line.next_port = first;
    dialling(&scene.calls(5432));
    assert_eq!(scene.sent().unwrap().src_port, first + 1);
}

#[test]
fn a_hybrid_vm_calls_a_service_and_the_two_sockets_are_joined() {
    let mut scene = Scene::new(vec![rule(vm("fc"), services(), Verdict::Allow)]);
    scene.offer_registry();
    let actions = scene.calls(5000);
    let circuit = dialling(&actions);
    let line = scene.hybrid;
    let dial = Action::DialHost(HostCall {
        circuit,
        line,
        port: 5000,
        source_port: 0,
        socket_type: SocketType::Stream,
        service: Some(ServiceId(7)),
        rule: Some(RuleId(0)),
    });
    assert_eq!(actions[1], dial);
    let actions = scene.answer(circuit, Ok(()));
    assert_eq!(
        decided(&actions).reached,
        Some(CalleeId::Service(ServiceId(7)))
    );
    let joined =
        |action: &&Action| matches!(action, Action::Relay { circuit: id, .. } if *id == circuit);
    assert_eq!(actions.iter().filter(joined).count(), 1);
    assert_eq!(scene.circuits_of(line), 1);
    assert_eq!(scene.tell(Event::RelayEnded { circuit }), []);
    assert_eq!(
        scene.circuits_of(line),
        1,
        "what is left is the host's memory"
    );
    let actions = scene.tell(Event::Taken { circuit });
    assert_eq!(actions, [Action::Released { circuit }]);
    assert_eq!(scene.circuits_of(line), 0);
    assert_eq!(scene.tell(Event::Taken { circuit }), []);
}

#[test]
fn what_a_hybrid_vm_is_refused_is_refused_at_once() {
    let mut scene = Scene::new(vec![redirect(9, "fc", 80), redirect(10, "nobody", 80)]);
    scene.offer_registry();
    let cases = [
        (5000, Reason::Denied),
        (9, Reason::Denied),
        (10, Reason::NotRunning),
        // It can be called only at a socket that was left over, as programs of the host listen without us.
        (8080, Reason::NoListener),
    ];
    for (port, reason) in cases {
        let actions = scene.calls(port);
        assert_refused(&actions, reason);
        let line = scene.hybrid;
        assert_eq!(decided(&actions).caller, CallerId::Guest { line, port: 0 });
    }
    assert_eq!(scene.ended(scene.hybrid, Reason::Denied), 2);
    assert_eq!(scene.circuits_of(scene.hybrid), 0);
    // No VM calls in the name of a line with rings.
    let line = scene.web;
    let (port, token) = (80, 5);
    let actions = scene.tell(Event::HybridDial { line, port, token });
    let reason = Reason::UnknownCid;
    assert_eq!(actions, [Action::HostDialRefused { token, reason }]);
}

#[test]
fn the_daemons_own_ports_need_no_rule() {
    for port in [1006, wire::agent::PORT] {
        let mut scene = Scene::new(vec![rule(vm("fc"), services(), Verdict::Deny)]);
        let actions = scene.calls(port);
        dialling(&actions);
        let dials = |action: &&Action| matches!(action, Action::DialHost(HostCall { port: at, service: None, source_port: 0, .. }) if *at == port);
        assert_eq!(actions.iter().filter(dials).count(), 1);
    }
}

#[test]
fn limits_hold_for_hybrid_lines() {
    let limits = Limits {
        half_open: 2,
        circuits: 3,
        ..Limits::default()
    };
    let mut scene = Scene::with(vec![rule(vm("fc"), services(), Verdict::Allow)], limits);
    scene.offer_registry();
    let first = dialling(&scene.calls(5000));
    dialling(&scene.calls(5000));
    assert_refused(&scene.calls(5000), Reason::HalfOpenLimit);
    scene.answer(first, Ok(()));
    dialling(&scene.calls(5000));
    assert_refused(&scene.calls(5000), Reason::CircuitLimit);
    scene.tell(Event::RelayEnded { circuit: first });
    scene.tell(Event::Taken { circuit: first });
    assert_refused(&scene.calls(5000), Reason::HalfOpenLimit);

    let slow = Limits {
        connects_per_second: 2,
        ..Limits::default()
    };
    let mut scene = Scene::with(vec![rule(vm("fc"), services(), Verdict::Allow)], slow);
    scene.offer_registry();
    dialling(&scene.calls(5000));
    dialling(&scene.calls(5000));
    assert_refused(&scene.calls(5000), Reason::ConnectRate);
}

#[test]
fn a_rules_circuits_count_joined_sockets_until_they_are_closed() {
    let one = RuleLimits {
        circuits: Some(1),
        ..RuleLimits::default()
    };
    let rule = Rule {
        limits: one,
        ..rule(vm("fc"), services(), Verdict::Allow)
    };
    let mut scene = Scene::new(vec![rule]);
    scene.offer_registry();
    let circuit = dialling(&scene.calls(5000));
    scene.answer(circuit, Ok(()));
    assert_refused(&scene.calls(5000), Reason::RuleCircuits);
    scene.tell(Event::RelayEnded { circuit });
    scene.tell(Event::Taken { circuit });
    dialling(&scene.calls(5000));
}

#[test]
fn two_hybrid_vms_are_joined() {
    let mut scene = Scene::new(vec![redirect(5432, "other", 80)]);
    let other = scene
        .switch
        .add_hybrid_line(Address::new("other", 9), Limits::default())
        .unwrap();
    let actions = scene.calls(5432);
    let circuit = dialling(&actions);
    let dial = Action::DialHybrid {
        circuit,
        line: other,
        port: 80,
    };
    assert_eq!(actions[1], dial);
    assert_eq!(
        (scene.circuits_of(other), scene.circuits_of(scene.hybrid)),
        (1, 1)
    );
    scene.answer(circuit, Ok(()));
    // Either's removal ends it, and leaves nothing behind on the other.
    let mut actions = Vec::new();
    scene.switch.remove_line(scene.now, other, &mut actions);
    assert!(actions.contains(&Action::HostClose {
        circuit,
        reset: true
    }));
    assert!(actions.contains(&Action::Released { circuit }));
    assert_eq!(scene.circuits_of(scene.hybrid), 0);
}

#[test]
fn whoever_comes_in_by_a_published_port_reaches_a_hybrid_vm() {
    let mut scene = Scene::new(Vec::new());
    let line = scene.hybrid;
    let dial = |scene: &mut Scene| {
        scene.tell(Event::HostDial {
            line,
            port: 80,
            socket_type: SocketType::Stream,
            caller: HostCaller::Published(Outsider::default()),
            token: 5,
        })
    };
    let actions = dial(&mut scene);
    let circuit = dialling(&actions);
    let expected = Action::DialHybrid {
        circuit,
        line,
        port: 80,
    };
    assert_eq!(actions[1], expected);
    let actions = scene.answer(circuit, Ok(()));
    assert_eq!(decided(&actions).caller, CallerId::HostCircuit { circuit });
    // It hung up before the VMM had answered.
    let circuit = dialling(&dial(&mut scene));
    let actions = scene.tell(Event::HostGone { circuit });
    assert!(
        actions.contains(&Action::Released { circuit }),
        "{actions:?}"
    );
    assert_eq!(scene.circuits_of(line), 1);
}

#[test]
fn a_policy_that_no_longer_allows_it_ends_what_a_hybrid_vm_has_called() {
    let mut scene = Scene::new(vec![
        rule(vm("fc"), services(), Verdict::Allow),
        redirect(5432, "web", 80),
    ]);
    scene.offer_registry();
    let service = dialling(&scene.calls(5000));
    scene.answer(service, Ok(()));
    let guest = dialling(&scene.calls(5432));
    let port = scene.sent().unwrap().src_port;
    scene.packet(Operation::Response, (3, port), 80);
    let mut actions = Vec::new();
    let unchanged = scene.switch.policy().clone();
    scene.switch.set_policy(unchanged);
    assert_eq!(scene.switch.enforce_policy(scene.now, &mut actions), 0);
    scene.switch.set_policy(Arc::default());
    assert_eq!(scene.switch.enforce_policy(scene.now, &mut actions), 2);
    for circuit in [service, guest] {
        let reset = true;
        assert!(actions.contains(&Action::HostClose { circuit, reset }));
    }
    assert_eq!(scene.sent().unwrap().operation, Operation::Reset as u16);
    assert_eq!(scene.circuits_of(scene.hybrid), 0);
}
