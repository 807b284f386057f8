//! Hybrid and serial lines that come and go, and the ports that they offer.

use super::*;

#[test]
fn a_removed_hybrid_line_ends_its_circuits_and_its_number_is_free() {
    let mut scene = Scene::new(vec![
        redirect(5432, "web", 80),
        rule(vm("web"), called("fc"), Verdict::Allow),
    ]);
    let circuit = dialling(&scene.calls(5432));
    let port = scene.sent().unwrap().src_port;
    scene.packet(Operation::Response, (3, port), 80);
    scene.packet(Operation::Request, (3, 22), PORT_OF_WEB);
    let mut actions = Vec::new();
    let old = scene.hybrid;
    scene.switch.remove_line(scene.now, old, &mut actions);
    let reset = true;
    assert!(actions.contains(&Action::HostClose { circuit, reset }));
    assert_eq!(scene.sent().unwrap().operation, Operation::Reset as u16);
    assert_eq!(scene.sent().unwrap().operation, Operation::Reset as u16);
    assert_eq!(scene.circuits_of(scene.web), 0);
    let new = scene
        .switch
        .add_hybrid_line(Address::new("fc", 3), Limits::default());
    assert_eq!(new, Ok(old));
    assert_eq!(scene.circuits_of(old), 0);
}

#[test]
fn a_hybrid_line_hears_no_packets_and_is_always_up() {
    let mut scene = Scene::new(Vec::new());
    let line = scene.hybrid;
    let header = Header {
        src_cid: 3,
        dst_cid: 2,
        socket_type: 1,
        operation: Operation::Request as u16,
        ..Header::default()
    };
    assert_eq!(scene.tell(Event::Packet { line, header }), []);
    assert_eq!(scene.tell(Event::LineDown { line }), []);
    let report = scene.switch.lines().find(|report| report.id == line);
    let report = report.unwrap();
    assert!(report.up && report.hybrid);
    assert_eq!(report.counters.packets_from_guest, 0);
}

#[test]
fn the_ports_on_offer_are_those_that_lead_somewhere() {
    let many = Rule {
        ports: vec![20..=22, 30..=30],
        ..redirect(0, "web", 80)
    };
    let elsewhere = Rule {
        from: vec![vm("web")],
        ..redirect(40, "web", 80)
    };
    let allowed = Rule {
        ports: vec![50..=50],
        ..rule(vm("fc"), CalleePattern::Listeners, Verdict::Allow)
    };
    let mut scene = Scene::new(vec![many, elsewhere, allowed]);
    scene.offer_registry();
    let offered = scene.switch.offered_ports(scene.hybrid);
    let ports: Vec<u32> = offered.ports.iter().copied().collect();
    assert_eq!(ports, [20, 21, 22, 30, 1006, 1007, 5000]);
    assert!(!offered.incomplete);
    scene.switch.set_services(Vec::new());
    assert!(
        !scene
            .switch
            .offered_ports(scene.hybrid)
            .ports
            .contains(&5000)
    );
}

#[test]
fn no_rule_makes_a_line_listen_everywhere() {
    let whole = |ports| Rule {
        ports,
        ..redirect(0, "web", 80)
    };
    let offered = |rules| {
        let scene = Scene::new(rules);
        scene.switch.offered_ports(scene.hybrid)
    };
    let any = offered(vec![whole(Vec::new())]);
    assert_eq!((any.ports.len(), any.incomplete), (2, true));
    let own = 2;
    let most = (MAX_OFFERED_PORTS - own) as u32;
    for (last, incomplete) in [(most - 1, false), (most, false), (most + 1, true)] {
        let offered = offered(vec![whole(vec![1_000_001..=1_000_000 + last])]);
        let expected = (last.min(most) as usize) + own;
        assert_eq!(offered.ports.len(), expected, "{last}");
        assert_eq!(offered.incomplete, incomplete, "{last}");
    }
    let endless = offered(vec![whole(vec![0..=u32::MAX])]);
    assert_eq!(endless.ports.len(), MAX_OFFERED_PORTS);
    assert!(endless.incomplete);
}

#[test]
fn a_serial_line_comes_and_goes_and_its_guest_reaches_listeners() {
    let mut scene = Scene::new(Vec::new());
    let added = scene
        .switch
        .add_serial_line(Address::new("old", 5), Limits::default());
    let line = added.unwrap();
    let dial = Event::HostDial {
        line,
        port: 22,
        socket_type: SocketType::Stream,
        caller: HostCaller::Published(Outsider::default()),
        token: 1,
    };
    let refused = |actions: &[Action]| {
        actions
            .iter()
            .any(|action| matches!(action, Action::HostDialRefused { reason, .. } if *reason == Reason::NotRunning))
    };
    let dialled = |actions: &[Action]| {
        actions
            .iter()
            .any(|action| matches!(action, Action::DialHybrid { .. }))
    };
    assert!(refused(&scene.tell(dial)));
    let seqpacket = true;
    scene.tell(Event::LineUp { line, seqpacket });
    assert!(dialled(&scene.tell(dial)));
    // Programs of the host listen for it as for a guest with rings.
    let (port, token) = (9000, 2);
    let actions = scene.tell(Event::HybridDial { line, port, token });
    let reaches = |action: &Action| {
        matches!(
            action,
            Action::DialHost(HostCall {
                port: 9000,
                service: None,
                ..
            })
        )
    };
    assert!(actions.iter().any(reaches), "{actions:?}");
    // What is open when it goes is for its carrier to end.
    assert_eq!(scene.circuits_of(line), 2);
    assert!(scene.tell(Event::LineDown { line }).is_empty());
    assert_eq!(scene.circuits_of(line), 2);
    assert!(refused(&scene.tell(dial)));
    // A hybrid line that is no serial one is always up.
    let line = scene.hybrid;
    scene.tell(Event::LineDown { line });
    assert!(
        scene
            .switch
            .lines()
            .any(|report| report.id == line && report.up)
    );
}
