//! Circuits and windows over the control API, with fakes behind it.

use std::time::Duration;

use device::{CircuitFilter, CircuitSnapshot, Credentials, Endpoint};
use policy::DEFAULT_DOMAIN;
use vsock::{CircuitId, CircuitState};
use wire::vsock::SocketType;

use super::*;
use windows::switchboard::pool::{Owners, WindowId, WindowState, WindowStatus};
use windows::switchboard::{CircuitList, ListedCircuit};

const FILE: &str = r#"
[[vm]]
name = "web"
aliases = ["www"]

[[vm]]
name = "db"
domain = "red"
"#;

fn get(daemon: &FakeDaemon, target: &str) -> Value {
    let (status, body) = daemon.request("GET", target, "");
    assert_eq!(status, 200, "{body}");
    json_of(&body)
}

fn listed() -> ListedCircuit {
    let vm = |domain: &str, name: &str, port| Endpoint::Vm {
        domain: domain.to_owned(),
        name: name.to_owned(),
        port,
    };
    ListedCircuit {
        circuit: CircuitSnapshot {
            id: CircuitId {
                index: 12,
                generation: 3054,
            },
            socket_type: SocketType::Stream,
            state: CircuitState::Open,
            age: Duration::from_millis(1500),
            rule: Some("to-db".to_owned()),
            caller: vm(DEFAULT_DOMAIN, "web", 40_001),
            dialled: vm("red", "db", 5432),
            callee: vm("red", "db", 5432),
            bytes: [10, 20],
            queued: [30, 40],
            credit: [50, 60],
        },
        is_zero_copy: true,
        is_draining: false,
    }
}

#[test]
fn a_caller_that_an_agent_leaves_waiting_is_known_while_it_waits() {
    let agents = |age: u64, bytes, port| {
        let mut found = listed();
        found.circuit.age = Duration::from_secs(age);
        found.circuit.bytes = bytes;
        found.circuit.callee = Endpoint::Vm {
            domain: "red".to_owned(),
            name: "db".to_owned(),
            port,
        };
        let circuits = vec![found];
        crate::events::waiting_callers(CircuitList { circuits, more: 0 })
    };
    let silent = agents(6, [9, 0], 1007);
    let words = "its agent has not answered a caller that has waited for 6 s";
    assert_eq!(silent["red/db"].to_string(), words);
    for nothing in [
        agents(6, [9, 1], 1007),
        agents(1, [9, 0], 1007),
        agents(6, [9, 0], 80),
    ] {
        assert!(nothing.is_empty());
    }
}

#[test]
fn circuits_are_listed_as_they_are_asked_for() {
    let daemon = FakeDaemon::with_file(FILE);
    let open = listed();
    let mut draining = listed();
    draining.circuit.id.index = 13;
    draining.circuit.caller = Endpoint::Program {
        credentials: Credentials { uid: 7, pid: 8 },
        ticket: None,
    };
    draining.circuit.callee = Endpoint::Listener { port: 9 };
    draining.is_draining = true;
    let circuits = vec![open, draining];
    let list = CircuitList { circuits, more: 3 };
    daemon.circuits().set(list, Vec::new());
    let expected = json!({
        "circuits": [
            {
                "id": "12-3054", "kind": "zero-copy", "seqpacket": false, "state": "open",
                "from": {"kind": "vm", "vm": "web", "port": 40001},
                "to": {"kind": "vm", "vm": "red/db", "port": 5432},
                "rule": "to-db", "age_ms": 1500, "bytes_from_caller": 10, "bytes_to_caller": 20,
                "queued_from_caller": 30, "queued_to_caller": 40, "credit_from_caller": 50, "credit_to_caller": 60,
            },
            {
                "id": "13-3054", "kind": "zero-copy", "seqpacket": false, "state": "draining",
                "from": {"kind": "program", "uid": 7, "pid": 8},
                "to": {"kind": "vm", "vm": "red/db", "port": 5432},
                "reached": {"kind": "host", "port": 9},
                "rule": "to-db", "bytes_from_caller": 10, "bytes_to_caller": 20,
                "queued_from_caller": 30, "queued_to_caller": 40, "credit_from_caller": 50, "credit_to_caller": 60,
            },
        ],
        "more": 3,
    });
    assert_eq!(get(&daemon, "/v1/circuits"), expected);
    get(&daemon, "/v1/circuits?vm=www&port=5432");
    get(&daemon, "/v1/circuits?vm=red%2Fdb");
    let of = |vm: Option<&str>, port| CircuitFilter {
        vm: vm.map(str::to_owned),
        port,
    };
    assert_eq!(
        daemon.circuits().filters(),
        [
            of(None, None),
            of(Some("web"), Some(5432)),
            of(Some("red/db"), None)
        ]
    );
    for (target, status) in [
        ("/v1/circuits?vm=nobody", 404),
        ("/v1/circuits?port=x", 400),
        ("/v1/circuits?kind=stream", 400),
    ] {
        assert_eq!(daemon.request("GET", target, "").0, status, "{target}");
    }
}

#[test]
fn a_circuit_is_ended_once() {
    let daemon = FakeDaemon::with_file(FILE);
    let list = CircuitList {
        circuits: vec![listed()],
        more: 0,
    };
    daemon.circuits().set(list, Vec::new());
    for wrong in [
        "12",
        "12-3055",
        "x",
        "12-3054-1",
        "4294967296-1",
        "+12-3054",
    ] {
        let target = format!("/v1/circuits/{wrong}");
        let (status, body) = daemon.request("DELETE", &target, "");
        assert_eq!(status, 404, "{wrong}");
        assert!(body.contains("unknown-circuit"), "{body}");
    }
    assert_eq!(daemon.request("DELETE", "/v1/circuits/12-3054", "").0, 204);
    assert_eq!(daemon.request("DELETE", "/v1/circuits/12-3054", "").0, 404);
}

#[test]
fn windows_are_listed_and_counted() {
    let daemon = FakeDaemon::with_file(FILE);
    let window = |owners, state| WindowStatus {
        uuid: WindowId([0xab; 16]),
        owners,
        len: 16 << 20,
        state,
        generation: 5,
    };
    let host = Owners::Host {
        vm: "web".to_owned(),
        uid: Some(1000),
    };
    let vms = Owners::Vms {
        a: "web".to_owned(),
        b: "red/db".to_owned(),
    };
    let windows = vec![
        window(host, WindowState::InUse),
        window(vms, WindowState::Quarantined),
    ];
    daemon.circuits().set(CircuitList::default(), windows);
    let uuid = "ab".repeat(16);
    let expected = json!({
        "windows": [
            {"uuid": uuid, "between": ["host", "web"], "uid": 1000, "size": 16 << 20, "state": "in use", "generation": 5},
            {"uuid": uuid, "between": ["web", "red/db"], "size": 16 << 20, "state": "quarantined", "generation": 5},
        ],
    });
    assert_eq!(get(&daemon, "/v1/windows"), expected);
    let (_, page) = daemon.request("GET", "/v1/metrics", "");
    for line in [
        "ringdown_windows{state=\"in use\"} 1\n",
        "ringdown_windows{state=\"quarantined\"} 1\n",
        "ringdown_switchboard_events_total{event=\"revoked\"} 0\n",
    ] {
        assert!(page.contains(line), "{line:?} in\n{page}");
    }
}

#[test]
fn windows_are_taken_away_with_their_vm_and_when_rules_are_enforced() {
    let daemon = FakeDaemon::with_file(FILE);
    assert_eq!(daemon.request("POST", "/v1/reload", "").0, 200);
    assert_eq!(daemon.circuits().events(), [""; 0]);
    let enforce = r#"{"enforce_existing":true}"#;
    assert_eq!(daemon.request("POST", "/v1/reload", enforce).0, 200);
    assert_eq!(daemon.request("DELETE", "/v1/vms/www", "").0, 204);
    assert_eq!(daemon.circuits().events(), ["enforce", "removed web"]);
}
