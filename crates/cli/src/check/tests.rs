use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;

use api::{NetworkDetails, VmStatus};

use super::*;

fn gravities(findings: &[Finding], about: &str) -> Vec<Severity> {
    let about = findings.iter().filter(|finding| finding.about == about);
    about.map(|finding| finding.severity).collect()
}

#[test]
fn whatever_is_not_fine_has_a_remedy() {
    let directory = tempfile::tempdir().unwrap();
    let none = directory.path().join("none");
    let findings = everything(None, Some(&none));
    let daemon = findings.iter().find(|found| found.about == "daemon");
    let remedy = daemon.and_then(|found| found.remedy.as_deref());
    let serve = format!(
        "start it with `ringdown serve --runtime-dir {}`",
        none.display()
    );
    assert_eq!(remedy, Some(serve.as_str()));
    for finding in findings {
        let has_remedy = finding.remedy.is_some_and(|remedy| !remedy.is_empty());
        assert_eq!(
            has_remedy,
            finding.severity != Severity::Fine,
            "{}",
            finding.found
        );
    }
}

#[test]
fn the_machine_is_judged_by_what_it_has() {
    let directory = tempfile::tempdir().unwrap();
    let device = directory.path().join("kvm");
    let bare = "model name\t: hypervisor\nflags\t\t: fpu vmx hypervisors\n";
    let nested = "flags\t\t: fpu vmx hypervisor lahf_lm\n";
    let severity = |cpuinfo| machine::acceleration(&device, cpuinfo).severity;
    assert_eq!(severity(bare), Severity::Warning);
    std::fs::write(&device, "").unwrap();
    assert_eq!(severity(bare), Severity::Fine);
    assert_eq!(severity(""), Severity::Fine);
    assert_eq!(severity(nested), Severity::Warning);
    let remedy = machine::acceleration(&device, nested).remedy.unwrap();
    assert!(remedy.contains("-accel tcg"), "{remedy}");
    assert!(remedy.contains("--accel kvm"), "{remedy}");

    assert_eq!(
        machine::vmms(directory.path().as_os_str()).severity,
        Severity::Warning
    );
    let program = directory.path().join("firecracker");
    std::fs::write(&program, "").unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
    let path = std::env::join_paths([OsStr::new("/nowhere"), directory.path().as_os_str()]);
    assert_eq!(machine::vmms(&path.unwrap()).found, "firecracker");

    assert_eq!(
        machine::descriptors(Some(16 * 1024 - 1)).severity,
        Severity::Warning
    );
    assert_eq!(
        machine::descriptors(Some(16 * 1024)).severity,
        Severity::Fine
    );
    assert_eq!(machine::descriptors(None).severity, Severity::Fine);
    assert_eq!(machine::files_confined(false).severity, Severity::Warning);
    let actions = Some("kill_process kill_thread allow".to_owned());
    assert_eq!(machine::calls_confined(actions).severity, Severity::Fine);
    assert_eq!(machine::calls_confined(None).severity, Severity::Error);
}

#[test]
fn a_configuration_is_judged_by_what_this_machine_has() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("ringdown.toml");
    let text = "\
        [[vm]]\nname = \"web\"\nhost = \"missing/web.sock\"\nwindows = \"8x1G\"\n\
        [[service]]\nname = \"gone\"\nport = 5000\ncommand = [\"/nowhere/program\"]\n\
        [[service]]\nname = \"there\"\nport = 5001\ncommand = [\"/bin/sh\"]\n\
        [[rule]]\nname = \"nobody\"\nfrom = \"wbe\"\nto = \"web\"\nport = 1\naction = \"allow\"\n";
    std::fs::write(&file, text).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o666)).unwrap();
    let (findings, _) = configuration::look(&file, None);
    assert_eq!(
        gravities(&findings, "configuration"),
        [Severity::Error, Severity::Fine]
    );
    assert_eq!(gravities(&findings, "permissions"), [Severity::Error]);
    assert_eq!(gravities(&findings, "services"), [Severity::Error]);
    assert!(gravities(&findings, "policy").contains(&Severity::Warning));

    // Each has the remedy that fits it.
    let text = "[[vm]]\nname = \"web\"\n[[publish]]\nlisten = \"tcp:127.0.0.1:80\"\nto = \"wee:80\"\n\
        [[service]]\nname = \"s\"\nport = 9\nto = \"tcp:a:1\"\n";
    std::fs::write(&file, text).unwrap();
    let (findings, _) = configuration::look(&file, None);
    let policy = findings.iter().filter(|found| found.about == "policy");
    let remedies: Vec<&str> = policy.filter_map(|found| found.remedy.as_deref()).collect();
    assert_eq!(
        remedies,
        [
            "add a [[rule]] with from = \"VM\", to = \"service:s\" and action = \"allow\"",
            "correct the name in its \"to\", or add the VM: calls are refused until then"
        ]
    );

    std::fs::write(&file, "[[vm]]\nnam = \"web\"\n").unwrap();
    let (findings, _) = configuration::look(&file, None);
    assert_eq!(gravities(&findings, "configuration"), [Severity::Error]);
    assert!(
        findings[0].found.contains("line 2"),
        "{}",
        findings[0].found
    );
}

fn found_in(directory: &Path, text: &str) -> Vec<(Severity, String)> {
    let file = directory.join("ringdown.toml");
    std::fs::write(&file, text).unwrap();
    let (findings, _) = configuration::look(&file, Some(&directory.join("run")));
    let bad = findings.into_iter().filter(|found| {
        found.severity != Severity::Fine && !["configuration", "policy"].contains(&found.about)
    });
    bad.map(|found| (found.severity, found.found)).collect()
}

#[test]
fn what_the_daemon_would_not_start_with_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let directory = directory.path();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let taken = taken.local_addr().unwrap();
    let port = |listen: &str| {
        format!("[[vm]]\nname = \"web\"\n[[publish]]\nlisten = \"{listen}\"\nto = \"web:80\"\n")
    };
    for (text, words) in [
        (
            "[[network]]\nname = \"lan\"\nuplink = { interface = \"nosuch0\" }\n".to_owned(),
            "nosuch0, is not there",
        ),
        (
            "state-dir = \"none/state\"\n".to_owned(),
            "none does not exist",
        ),
        (
            "runtime-dir = \"none/run\"\n".to_owned(),
            "none does not exist",
        ),
        (port("tcp:192.0.2.9:80"), "cannot listen on 192.0.2.9:80"),
        (port(&format!("tcp:{taken}")), "in use"),
    ] {
        let found = found_in(directory, &text);
        let [(Severity::Error, found)] = &found[..] else {
            panic!("{text}: {found:?}");
        };
        assert!(found.contains(words), "{found}");
    }
    for text in [
        "state-dir = \"state\"\n",
        "runtime-dir = \"run\"\nstate-dir = \"run/state\"\n",
        "[[network]]\nname = \"lan\"\nuplink = { tap = \"nosuch0\" }\n",
        &port("tcp:127.0.0.1:0"),
    ] {
        assert_eq!(found_in(directory, text), [], "{text}");
    }
}

#[test]
fn a_service_without_its_program_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let text = format!("[[service]]\nname = \"s\"\nport = 9\nto = \"tcp:{at}\"\n");
    assert_eq!(found_in(directory.path(), &text), []);
    drop(listener);
    let found = found_in(directory.path(), &text);
    let [(Severity::Warning, found)] = &found[..] else {
        panic!("{found:?}");
    };
    assert!(
        found.starts_with(&format!("nothing answers for the service \"s\": {at}")),
        "{found}"
    );
}

#[test]
fn a_socket_without_a_listener_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let text = format!(
        "[[service]]\nname = \"s\"\nport = 9\nto = \"unix:{}\"\n",
        socket.display()
    );
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    assert_eq!(found_in(directory.path(), &text), []);
    drop(listener);
    assert!(socket.exists());
    let found = found_in(directory.path(), &text);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].1.contains("nothing answers for the service \"s\""));
}

#[test]
fn a_published_socket_that_another_program_has_is_found() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("s");
    let text = format!(
        "[[vm]]\nname = \"web\"\n[[publish]]\nlisten = \"unix:{}\"\nto = \"web:tcp:80\"\n",
        socket.display()
    );
    assert_eq!(found_in(directory.path(), &text), []);
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    let found = found_in(directory.path(), &text);
    assert_eq!(found.len(), 1, "{found:?}");
    assert!(found[0].1.contains("another program listens on"));
    // One without a listener is taken over.
    drop(listener);
    assert_eq!(found_in(directory.path(), &text), []);
    assert!(socket.exists());
}

fn vm(kind: &str, state: &str) -> VmStatus {
    let vm = serde_json::json!({
        "name": "box", "cid": 3, "kind": kind, "state": state, "host": "/r/box.sock", "circuits": 0,
    });
    serde_json::from_value(vm).unwrap()
}

/// After `vm rm` and a reload the VM is there again, and its VMM runs on.
#[test]
fn a_vmm_that_was_cut_off_is_to_be_ended_before_another_is_started() {
    let remedy = |kind| daemon_state::guest(&vm(kind, "waiting")).remedy.unwrap();
    assert!(
        remedy("vsock")
            .ends_with("if one still runs that was cut off, as by `ringdown vm rm`, end it first")
    );
    // Those of other lines connect again.
    assert!(!remedy("serial").contains("end it"));
}

#[test]
fn a_guest_that_does_not_answer_is_looked_at_by_its_kind_of_line() {
    let remedy = |kind| daemon_state::guest(&vm(kind, "attached")).remedy.unwrap();
    let serial = remedy("serial");
    for word in [
        "virtio_console",
        "org.ringdown.agent.0",
        "ringdown-agent runs",
    ] {
        assert!(serial.contains(word), "{serial}");
    }
    assert!(
        !serial.contains("share=on") && !serial.contains("vsock"),
        "{serial}"
    );
    assert!(remedy("vsock").contains("share=on"));
    let asleep = VmStatus {
        counters: [("packets_from_guest".to_owned(), 1)].into(),
        ..vm("vsock", "attached")
    };
    let remedy = daemon_state::guest(&asleep).remedy.unwrap();
    assert!(remedy.contains("have its VMM wake it up"), "{remedy}");
}

fn network_with_box(attached: bool, driver_ready: bool) -> NetworkDetails {
    let network = serde_json::json!({
        "name": "lan", "domain": "default", "mtu": 1500, "mac": "02:00:00:01:00:00", "dns_domain": "lan", "dhcp": true, "dns": true,
        "router_advertisements": false, "vms": 1, "attached": 1,
        "ports": [
            { "kind": "vm", "vm": "box", "attached": attached, "driver_ready": driver_ready, "link_up": true },
            { "kind": "station", "attached": true, "driver_ready": true, "link_up": true },
        ],
    });
    serde_json::from_value(network).unwrap()
}

#[test]
fn the_fault_of_a_card_is_history_once_its_vmm_has_left() {
    let net = serde_json::json!({
        "network": "lan", "vhost_user": "/r/n", "mac": "02:00:00:00:00:03", "last_fault": "no card", "mtu": 1500, "queue_pairs": 1,
        "vlan": "1", "isolated": false, "learn": false, "moderation": "adaptive",
    });
    let net: api::VmPort = serde_json::from_value(net).unwrap();
    let of = |is_vmm_there, is_card_there| {
        let vm = VmStatus {
            nets: vec![net.clone()],
            attached: is_vmm_there,
            ..vm("vsock", "waiting")
        };
        let networks = [network_with_box(is_card_there, false)];
        let findings = daemon_state::cards(&[vm], &networks);
        gravities(&findings, "networks")
    };
    assert_eq!(of(true, true), [Severity::Error]);
    assert_eq!(of(false, false), [Severity::Warning]);
    // Another VMM has come, without the card: that it has none is said elsewhere.
    assert_eq!(of(true, false), []);
}

#[test]
fn a_card_without_a_driver_is_named_once_its_guest_has_booted() {
    let mut network = network_with_box(true, false);
    let found = |state, network: &NetworkDetails| {
        let vms = [vm("vsock", state)];
        daemon_state::idle_cards(&vms, std::slice::from_ref(network)).len()
    };
    assert_eq!(found("attached", &network), 0);
    assert_eq!(found("booted", &network), 1);
    assert_eq!(found("ready", &network), 1);
    let mut paused = vm("vsock", "ready");
    paused.paused = true;
    assert!(daemon_state::idle_cards(&[paused], std::slice::from_ref(&network)).is_empty());
    network.ports[0].driver_ready = true;
    assert_eq!(found("ready", &network), 0);
}

#[test]
fn a_published_port_whose_last_caller_was_refused_is_found() {
    let event = |kind, from: &str, reason: &str| api::Event {
        id: 1,
        time: "2026-11-23T12:00:00Z".to_owned(),
        kind,
        details: api::EventDetails {
            from: Some(from.to_owned()),
            to: Some("web:tcp:80".to_owned()),
            reason: Some(reason.to_owned()),
            ..api::EventDetails::default()
        },
    };
    use api::EventKind::{CircuitOpened, Refused};
    let mut events = vec![
        event(Refused, "published(www)", "no rule allows it"),
        event(CircuitOpened, "published(www)", ""),
        event(Refused, "published(www)", "the VM is not running"),
        event(Refused, "published(db)", "the VM is not running"),
        event(CircuitOpened, "published(db)", ""),
        event(Refused, "web:1024", "no rule allows it"),
    ];
    let found = calls::published(&events);
    assert_eq!(found.len(), 1);
    assert_eq!(
        found[0].found,
        "www: its last caller (2026-11-23T12:00:00Z) did not reach web:tcp:80: the VM is not running"
    );
    let remedy = found[0].remedy.as_deref().unwrap_or_default();
    assert!(
        remedy.contains("`ringdown why host web tcp:80`"),
        "{remedy}"
    );
    let reloaded = api::Event {
        details: api::EventDetails::default(),
        ..event(api::EventKind::PolicyChanged, "", "")
    };
    let again = [&events[..], &[reloaded]].concat();
    assert!(calls::published(&again).is_empty());
    events.push(event(CircuitOpened, "published(www)", ""));
    assert!(calls::published(&events).is_empty());
}

#[test]
fn an_agent_that_left_its_last_caller_without_an_answer_is_found() {
    let answered = vm("vsock", "ready");
    let silent = api::VmStatus {
        unanswered: Some(api::Unanswered {
            time: "2026-11-23T12:00:00Z".to_owned(),
            seconds: 30,
            waits: false,
        }),
        ..answered.clone()
    };
    let answered = daemon_state::guest(&answered).found;
    assert!(!answered.contains("answer"), "{answered}");
    // One finding, with a remedy that needs nothing of the guest.
    let silent = daemon_state::guest(&silent);
    assert_eq!(
        silent.found,
        "box: its agent did not answer its last caller in 30 s (2026-11-23T12:00:00Z)"
    );
    assert_eq!(silent.severity, Severity::Warning);
    let remedy = silent.remedy.unwrap();
    assert!(remedy.contains("`system_reset`"), "{remedy}");
    assert!(!remedy.contains("systemctl"), "{remedy}");
}

#[test]
fn a_keeper_is_told_of_in_one_line() {
    let found = |keeper, keeper_ended, hindrance: Option<&str>| {
        let health = api::Health {
            version: String::new(),
            pid: 1,
            vms: 0,
            config: None,
            keeper,
            keeper_ended,
            paths_ended: false,
            restart: None,
            unavailable: Vec::new(),
        };
        let mut findings = daemon_state::keeper(&health, hindrance.map(str::to_owned)).into_iter();
        findings.next().map(|finding| finding.found)
    };
    let in_use = found(Some(true), false, None).unwrap();
    assert!(in_use.starts_with("in use: "), "{in_use}");
    assert_eq!(
        found(Some(true), false, Some("no answer")).unwrap(),
        "no answer"
    );
    let none = found(Some(false), false, None).unwrap();
    assert!(none.starts_with("none: "), "{none}");
    let ended = found(Some(false), true, None).unwrap();
    assert!(ended.starts_with("it has ended"), "{ended}");
    assert!(found(None, false, None).is_none(), "a daemon of before");
}
