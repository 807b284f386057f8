//! The control API over a real socket, with a fake worker behind it.

mod captures;
mod circuits;
pub(crate) mod conformance;
mod events;
mod networks;
mod questions;
mod refusals;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use api::{MAX_WAIT_MS, VmState, VmStatus};
use serde_json::{Value, json};
use wire::agent::{CONNECTION_CHANNEL, Frame, Hello};

use super::*;
use crate::fake_daemon::FakeDaemon;

fn json_of(body: &str) -> Value {
    serde_json::from_str(body).expect(body)
}

fn status_of(daemon: &FakeDaemon, target: &str) -> VmStatus {
    let (status, body) = daemon.request("GET", target, "");
    assert_eq!(status, 200, "{body}");
    serde_json::from_str(&body).expect(&body)
}

fn refused(daemon: &FakeDaemon, method: &str, target: &str, body: &str) -> (u16, String) {
    let (status, answer) = daemon.request(method, target, body);
    let problem = json_of(&answer);
    (status, problem["detail"].as_str().unwrap().to_owned())
}

/// An agent of a guest that calls from a privileged port and says hello.
fn agent(daemon: &FakeDaemon, vm: &str, hostname: &str) -> UnixStream {
    let mut guest = daemon.worker().call_agent_port(vm, 1000);
    let hello = Hello {
        hostname: hostname.to_owned(),
        ..Hello::new("ringdown-agent 0.1.0")
    };
    guest
        .write_all(&Frame::Hello(hello).to_bytes(CONNECTION_CHANNEL).unwrap())
        .unwrap();
    guest
}

/// Waits until the daemon has hung up, and returns what it had said before.
fn until_hung_up(mut guest: UnixStream) -> Vec<u8> {
    guest
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    let mut said = Vec::new();
    match guest.read_to_end(&mut said) {
        Ok(_) => {}
        // What the guest said, unread, makes the end a reset.
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
    said
}

#[test]
fn a_vm_is_added_shown_listed_and_removed() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let new = r#"{"name":"db","cid":9,"limits":{"circuits":8,"host_connects_per_second":0}}"#;
    let (status, body) = daemon.request("POST", "/v1/vms", new);
    assert_eq!(status, 201, "{body}");
    let directory = daemon.runtime_dir().display();
    let expected = json!({
        "name": "db", "domain": "default", "aliases": [], "groups": [], "cid": 9, "kind": "vsock", "state": "waiting",
        "attached": false, "circuits": 0, "counters": {"circuits_opened": 0},
        "limits": {
            "circuits": 8, "half_open_circuits": 2048, "buffered_bytes": 268_435_456, "buffered_messages": 65536,
            "connects_per_second": 50_000, "host_connects_per_second": 0, "control_messages_per_second": 500_000,
        },
        "usage": {
            "circuits": 0, "half_open_circuits": 0, "buffered_bytes": 0, "buffered_messages": 0, "granted_bytes": 0,
        },
        "vhost_user": format!("{directory}/db.vhost"), "host": format!("{directory}/db.sock"),
    });
    assert_eq!(json_of(&body), expected);
    UnixStream::connect(daemon.runtime_dir().join("db.vhost")).unwrap();

    assert_eq!(
        json_of(&daemon.request("GET", "/v1/vms/db", "").1),
        expected
    );
    let list = json_of(&daemon.request("GET", "/v1/vms", "").1);
    let names: Vec<_> = list["vms"]
        .as_array()
        .unwrap()
        .iter()
        .map(|vm| vm["name"].clone())
        .collect();
    assert_eq!(names, ["db", "web"]);
    let health = json_of(&daemon.request("GET", "/v1/health", "").1);
    assert_eq!(
        health,
        json!({"version": env!("CARGO_PKG_VERSION"), "pid": std::process::id(), "vms": 2, "keeper": false})
    );

    assert_eq!(
        daemon.request("DELETE", "/v1/vms/db", ""),
        (204, String::new())
    );
    assert!(!daemon.runtime_dir().join("db.vhost").exists());
    assert_eq!(daemon.request("DELETE", "/v1/vms/db", "").0, 404);
    assert_eq!(daemon.request("GET", "/v1/vms/db", "").0, 404);
    let (status, body) = daemon.request("POST", "/v1/vms", r#"{"name":"db"}"#);
    assert_eq!((status, json_of(&body)["cid"].as_u64()), (201, Some(9)));
}

#[test]
fn a_hybrid_vm_is_added_and_waited_for_by_its_vmms_socket() {
    let daemon = FakeDaemon::start(&[], &[]);
    let path = daemon.runtime_dir().join("v.sock");
    // The socket is the VMM's: neither taken over nor removed.
    let _vmm = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let new = json!({"name": "fc", "hybrid": path}).to_string();
    let (status, body) = daemon.request("POST", "/v1/vms", &new);
    assert_eq!(status, 201, "{body}");
    let vm = json_of(&body);
    assert_eq!(
        (&vm["state"], &vm["hybrid"], &vm["host"]),
        (
            &json!("joined"),
            &json!(path),
            &json!(daemon.runtime_dir().join("fc.sock"))
        )
    );
    assert!(vm.get("vhost_user").is_none());
    assert!(path.exists());
    let wait = "/v1/vms/fc?wait=ready&timeout_ms=1";
    let (status, body) = daemon.request("GET", wait, "");
    assert_eq!(status, 504, "{body}");
    assert!(body.contains("a vsock device of its own"), "{body}");
    assert_eq!(daemon.request("DELETE", "/v1/vms/fc", "").0, 204);
    assert!(path.exists());
}

#[test]
fn a_serial_vm_is_added_by_its_socket_or_that_of_its_vmm() {
    let daemon = FakeDaemon::start(&["name=at,serial=at.port"], &[]);
    let directory = daemon.runtime_dir().to_owned();
    let (status, body) = daemon.request("POST", "/v1/vms", r#"{"name":"old","serial":true}"#);
    assert_eq!(status, 201, "{body}");
    let vm = json_of(&body);
    let path = directory.join("old.serial");
    assert_eq!(vm["kind"], "serial");
    assert_eq!(vm["serial"], json!({ "listen": path }));
    assert_eq!(vm["state"], "waiting");
    assert!(vm.get("vhost_user").is_none());
    UnixStream::connect(&path).unwrap();
    UnixStream::connect(directory.join("old.sock")).unwrap();
    assert_eq!(
        json_of(&daemon.request("GET", "/v1/vms/at", "").1)["serial"],
        json!({ "listen": directory.join("at.port") })
    );
    // The VMM's own socket is neither looked for nor touched.
    let new = r#"{"name":"to","serial_connect":"/nonexistent/to"}"#;
    let (status, body) = daemon.request("POST", "/v1/vms", new);
    assert_eq!(status, 201, "{body}");
    assert_eq!(
        json_of(&body)["serial"],
        json!({ "connect": "/nonexistent/to" })
    );

    daemon.worker().set_state("old", true, true);
    assert_eq!(status_of(&daemon, "/v1/vms/old").state, VmState::Booted);
    let both = r#"{"name":"x","serial":true,"serial_connect":"/x"}"#;
    let (status, body) = daemon.request("POST", "/v1/vms", both);
    assert_eq!(status, 422, "{body}");
    assert!(body.contains("either the VMM connects"), "{body}");
    assert_eq!(daemon.request("DELETE", "/v1/vms/old", "").0, 204);
    assert!(!path.exists());
}

#[test]
fn windows_come_and_go_with_their_vm() {
    let daemon = FakeDaemon::start(&["name=web,windows=2x8M"], &[]);
    let at = |name: &str| daemon.runtime_dir().join("windows").join(name);
    let web = status_of(&daemon, "/v1/vms/web").windows.unwrap();
    assert_eq!((web.count, web.bytes, web.qmp), (2, 8 << 20, None));
    assert_eq!(web.files, [at("web.d/0"), at("web.d/1")]);
    assert!(web.files.iter().all(|file| file.exists()));

    let new = r#"{"name":"db","windows":"1x8M","qmp":"/run/db.qmp"}"#;
    let (status, body) = daemon.request("POST", "/v1/vms", new);
    assert_eq!(status, 201, "{body}");
    let expected = json!({ "count": 1, "bytes": 8 << 20, "qmp": "/run/db.qmp" });
    assert_eq!(json_of(&body)["windows"], expected);
    let new = r#"{"name":"files","windows":"1x8M"}"#;
    assert_eq!(daemon.request("POST", "/v1/vms", new).0, 201);
    assert!(at("files.d/0").exists() && !at("db.d/0").exists());
    for (new, expected) in [
        (r#"{"name":"x","windows":"9x8M"}"#, "1 to 8 windows"),
        (r#"{"name":"x","qmp":"/q"}"#, "write windows"),
        (
            r#"{"name":"x","windows":"1x8M","qmp":"q"}"#,
            "from the root",
        ),
        (
            r#"{"name":"x","windows":"1x8M","qmp":"/run/db.qmp"}"#,
            "VM \"db\" already",
        ),
    ] {
        let (status, body) = daemon.request("POST", "/v1/vms", new);
        let detail = json_of(&body)["detail"].as_str().unwrap().to_owned();
        assert!(
            (400..500).contains(&status) && detail.contains(expected),
            "{status} {detail}"
        );
    }
    // A VM that cannot be added leaves no window behind.
    std::fs::create_dir_all(at("late.d/0")).unwrap();
    let new = r#"{"name":"late","windows":"1x8M"}"#;
    let (status, body) = daemon.request("POST", "/v1/vms", new);
    assert!(
        status == 500 && body.contains("late.d/0"),
        "{status} {body}"
    );
    assert_eq!(daemon.request("GET", "/v1/vms/late", "").0, 404);
    for name in ["web", "files"] {
        assert_eq!(
            daemon.request("DELETE", &format!("/v1/vms/{name}"), "").0,
            204
        );
    }
    assert!(!at("web.d/0").exists() && !at("web.d/1").exists() && !at("files.d/0").exists());
}

#[test]
fn each_bad_request_is_a_problem_that_says_what_to_do() {
    let daemon = FakeDaemon::start(&["name=web,cid=7"], &[]);
    let missing = json!({"name": "db", "host": "/nonexistent/db.sock"}).to_string();
    let long = json!({"name": "db", "host": format!("/{}", "p".repeat(107))}).to_string();
    let used = json!({"name": "db", "host": daemon.runtime_dir().join("web.sock")}).to_string();
    let table: Vec<(&str, &str, &str, u16, &str, &str)> = vec![
        (
            "POST",
            "/v1/vms",
            "",
            400,
            "invalid-request",
            "does not describe a VM",
        ),
        (
            "POST",
            "/v1/vms",
            "[]",
            400,
            "invalid-request",
            "does not describe a VM",
        ),
        (
            "POST",
            "/v1/vms",
            "{\"name\":\"db\",\"cdi\":3}",
            400,
            "invalid-request",
            "unknown field `cdi`",
        ),
        (
            "POST",
            "/v1/vms",
            "{\"name\":\"db\",\"limits\":{\"circuit\":3}}",
            400,
            "invalid-request",
            "unknown key \"circuit\": did you mean \"circuits\"?",
        ),
        (
            "POST",
            "/v1/vms",
            "{\"name\":\"db\",\"limits\":{\"connects_per_second\":1000001}}",
            400,
            "invalid-request",
            "connects-per-second cannot be 1000001: use a whole number from 0 to 1000000",
        ),
        (
            "POST",
            "/v1/vms",
            "{\"name\":\"DB\"}",
            400,
            "invalid-request",
            "cannot be the name of a VM",
        ),
        (
            "POST",
            "/v1/vms",
            "{\"name\":\"db\",\"cid\":2}",
            400,
            "invalid-request",
            "it means the host",
        ),
        (
            "POST",
            "/v1/vms",
            "{\"name\":\"db\",\"cid\":4294967295}",
            400,
            "invalid-request",
            "it means any",
        ),
        (
            "POST",
            "/v1/vms",
            "{\"name\":\"db\",\"host\":\"x\"}",
            400,
            "invalid-request",
            "is relative",
        ),
        ("POST", "/v1/vms", &long, 422, "impossible", "has 108 bytes"),
        (
            "POST",
            "/v1/vms",
            "{\"name\":\"web\"}",
            409,
            "conflict",
            "a VM named \"web\" already",
        ),
        (
            "POST",
            "/v1/vms",
            "{\"name\":\"db\",\"cid\":7}",
            409,
            "conflict",
            "CID 7 belongs to VM \"web\" already",
        ),
        (
            "POST",
            "/v1/vms",
            &used,
            409,
            "conflict",
            "is used by VM \"web\" already",
        ),
        (
            "POST",
            "/v1/vms",
            &missing,
            422,
            "socket-unavailable",
            "create it with `mkdir -p /nonexistent`",
        ),
        (
            "GET",
            "/v1/vms/nobody",
            "",
            404,
            "unknown-vm",
            "no VM named \"nobody\": `ringdown vm ls`",
        ),
        (
            "GET",
            "/v1/vms/nobody?wait=ready",
            "",
            404,
            "unknown-vm",
            "no VM named \"nobody\"",
        ),
        (
            "GET",
            "/v1/vms/web?wait=shutdown",
            "",
            400,
            "invalid-request",
            "shutdown",
        ),
        (
            "GET",
            "/v1/vms/web?timeout=3",
            "",
            400,
            "invalid-request",
            "timeout",
        ),
        (
            "GET",
            "/v1/vms/web?wait=ready&timeout_ms=-1",
            "",
            400,
            "invalid-request",
            "",
        ),
        (
            "GET",
            "/v1/vms/web?wait=ready&timeout_ms=3600001",
            "",
            400,
            "invalid-request",
            "timeout_ms is 3600001: use a whole number from 0 to 3600000",
        ),
        (
            "GET",
            "/v1/vms/web?wait=ready&timeout_ms=0",
            "",
            504,
            "not-ready",
            "no VMM is attached",
        ),
        (
            "DELETE",
            "/v1/vms/nobody",
            "",
            404,
            "unknown-vm",
            "no VM named \"nobody\"",
        ),
        (
            "GET",
            "/v2/vms",
            "",
            404,
            "no-such-resource",
            "nothing is at /v2/vms",
        ),
        (
            "PUT",
            "/v1/vms",
            "",
            405,
            "method-not-allowed",
            "/v1/vms does not know PUT",
        ),
    ];
    assert_eq!(MAX_WAIT_MS, 3_600_000);
    for (method, target, body, status, kind, detail) in table {
        let answer = daemon.request(method, target, body);
        let problem = json_of(&answer.1);
        assert_eq!(answer.0, status, "{method} {target} {body}: {problem}");
        assert_eq!(problem["status"], status);
        assert_eq!(problem["type"], format!("urn:ringdown:problem:{kind}"));
        assert!(!problem["title"].as_str().unwrap().is_empty());
        assert!(
            problem["detail"].as_str().unwrap().contains(detail),
            "{method} {target} {body}: {problem}"
        );
    }
    // Nothing of what was refused has stayed.
    assert_eq!(
        json_of(&daemon.request("GET", "/v1/health", "").1)["vms"],
        1
    );
}

#[test]
fn a_vm_of_another_domain_has_its_place_in_the_path() {
    let daemon = FakeDaemon::start(&["name=web"], &["from=@a,to=red/web,port=*"]);
    let new = r#"{"name":"web","domain":"red","groups":["a"],"aliases":["www"]}"#;
    let request = format!(
        "POST /v1/vms HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{new}",
        new.len()
    );
    let answer = daemon.raw_request(&request).unwrap();
    assert!(answer.starts_with("HTTP/1.1 201"), "{answer}");
    assert!(
        answer.contains("location: /v1/vms/red%2Fweb\r\n"),
        "{answer}"
    );
    for name in ["red%2Fweb", "red%2fwww"] {
        let vm = status_of(&daemon, &format!("/v1/vms/{name}"));
        assert_eq!((vm.full_name().as_str(), vm.cid), ("red/web", 3));
        assert_eq!(
            (vm.groups, vm.aliases),
            (vec!["a".to_owned()], vec!["www".to_owned()])
        );
    }
    let guest = agent(&daemon, "red/web", "red-guest");
    let ready = status_of(&daemon, "/v1/vms/red%2Fweb?wait=ready");
    assert_eq!(ready.agent.unwrap().hostname, "red-guest");
    assert_eq!(status_of(&daemon, "/v1/vms/web").state, VmState::Waiting);
    assert_eq!(daemon.request("DELETE", "/v1/vms/red%2Fwww", "").0, 204);
    until_hung_up(guest);
    assert_eq!(daemon.request("GET", "/v1/vms/red%2Fweb", "").0, 404);
    assert_eq!(daemon.request("GET", "/v1/vms/web", "").0, 200);
    for (body, expected) in [
        (
            r#"{"name":"x","domain":"Red"}"#,
            "cannot be the name of a domain",
        ),
        (
            r#"{"name":"x","groups":["a","a"]}"#,
            "a group \"a\" is there already",
        ),
        (
            r#"{"name":"x","aliases":["host"]}"#,
            "it has a meaning of its own",
        ),
        (r#"{"name":"red/x"}"#, "cannot be the name of a VM"),
    ] {
        let (status, answer) = daemon.request("POST", "/v1/vms", body);
        assert!([400, 422].contains(&status), "{status} {answer}");
        assert!(
            json_of(&answer)["detail"]
                .as_str()
                .unwrap()
                .contains(expected),
            "{answer}"
        );
    }
    let many = json!({"name": "x", "groups": (0..65).map(|index| format!("g{index}")).collect::<Vec<_>>()});
    assert_eq!(daemon.request("POST", "/v1/vms", &many.to_string()).0, 409);
}

#[test]
fn questions_about_the_policy_are_answered() {
    let daemon = FakeDaemon::start(&["name=web", "name=db"], &["from=web,to=db,port=5432"]);
    let ask = |query: &str| {
        let (status, body) = daemon.request("GET", &format!("/v1/policy/test?{query}"), "");
        (status, json_of(&body))
    };
    let (status, answer) = ask("from=web&to=db&port=5432");
    assert_eq!((status, &answer["verdict"]), (200, &json!("allowed")));
    assert_eq!(answer["rule"]["index"], 0);
    let (status, answer) = ask("from=db&to=host&port=5432");
    assert_eq!((status, &answer["rule"]), (200, &Value::Null));
    for (query, status, kind) in [
        ("from=web&to=nobody&port=1", 404, "unknown-vm"),
        ("from=web&to=service%3Ax&port=1", 404, "unknown-service"),
        ("from=web&to=%2A&port=1", 400, "invalid-request"),
        ("from=web&to=db&port=x", 400, "invalid-request"),
        ("from=web&to=db&port=4294967295", 400, "invalid-request"),
        ("from=web&to=db", 400, "invalid-request"),
        ("from=web&to=db&port=1&x=2", 400, "invalid-request"),
    ] {
        let (found, problem) = ask(query);
        assert_eq!(
            (found, &problem["type"]),
            (status, &json!(format!("urn:ringdown:problem:{kind}"))),
            "{query}: {problem}"
        );
    }
    let (status, report) = daemon.request("GET", "/v1/policy/check", "");
    assert_eq!(
        (status, json_of(&report)),
        (200, json!({"rules": 1, "findings": []}))
    );
    assert_eq!(daemon.request("DELETE", "/v1/vms/db", "").0, 204);
    let report = json_of(&daemon.request("GET", "/v1/policy/check", "").1);
    assert_eq!(report["findings"][0]["kind"], "unknown-vm");
    let (status, problem) = daemon.request("POST", "/v1/audit/rotate", "");
    assert_eq!(status, 409);
    assert!(problem.contains("no audit is configured"), "{problem}");
}

#[test]
fn a_problem_has_its_media_type() {
    let daemon = FakeDaemon::start(&[], &[]);
    let answer = daemon
        .raw_request("GET /v1/vms/x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .unwrap();
    assert!(
        answer.contains("content-type: application/problem+json\r\n"),
        "{answer}"
    );
}

#[test]
fn a_body_and_a_head_have_their_limits() {
    let daemon = FakeDaemon::start(&[], &[]);
    let padded = |len: usize| format!("{{\"name\":\"web\"}}{}", " ".repeat(len - 14));
    assert_eq!(
        daemon.request("POST", "/v1/vms", &padded(MAX_BODY_LEN)).0,
        201
    );
    let (status, body) = daemon.request("POST", "/v1/vms", &padded(MAX_BODY_LEN + 1));
    assert_eq!(
        (status, json_of(&body)["type"].as_str()),
        (400, Some("urn:ringdown:problem:invalid-request"))
    );

    let head = |len: usize| {
        format!(
            "GET /v1/health HTTP/1.1\r\nConnection: close\r\nX: {}\r\n\r\n",
            "x".repeat(len)
        )
    };
    assert!(
        daemon
            .raw_request(&head(MAX_HEADER_BYTES / 2))
            .unwrap()
            .starts_with("HTTP/1.1 200")
    );
    let answer = daemon.raw_request(&head(2 * MAX_HEADER_BYTES));
    // The daemon may have hung up before the client has read the refusal.
    assert!(answer.is_err() || answer.is_ok_and(|answer| answer.starts_with("HTTP/1.1 431")));
    assert!(
        daemon
            .raw_request("garbage\r\n\r\n")
            .unwrap()
            .starts_with("HTTP/1.1 400")
    );
    assert_eq!(daemon.request("GET", "/v1/health", "").0, 200);
}

#[test]
fn a_guest_that_cannot_be_seen_is_not_waited_for() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    daemon.worker().set_state("web", true, false);
    let (status, body) = std::thread::scope(|scope| {
        let wait = "/v1/vms/web?wait=ready&timeout_ms=600000";
        let waiting = scope.spawn(|| daemon.request("GET", wait, ""));
        std::thread::sleep(Duration::from_millis(300));
        assert!(!waiting.is_finished());
        // A fault that a guest may get over.
        daemon.worker().set_fault("web", "a ring is broken");
        std::thread::sleep(Duration::from_millis(1300));
        assert!(!waiting.is_finished());
        daemon.worker().set_fault("web", device::NOT_SHARED);
        waiting.join().unwrap()
    });
    assert_eq!(status, 504, "{body}");
    assert!(body.contains("its memory is probably not shared"), "{body}");
    assert!(!body.contains("600 s"), "{body}");
    // Its VMM has left, and may be started again with memory that is.
    daemon.worker().set_state("web", false, false);
    let wait = "/v1/vms/web?wait=ready&timeout_ms=1500";
    let (status, body) = daemon.request("GET", wait, "");
    assert_eq!(status, 504);
    assert!(body.contains("within 1.5 s"), "{body}");
}

#[test]
fn a_vm_whose_vmm_was_cut_off_is_not_waited_for() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let fault = "the VMM shares no memory";
    let wait = |timeout_ms: u32| {
        let target = format!("/v1/vms/web?wait=ready&timeout_ms={timeout_ms}");
        let begun = std::time::Instant::now();
        let (status, body) = daemon.request("GET", &target, "");
        assert_eq!(status, 504, "{body}");
        (body, begun.elapsed())
    };
    // A VMM that was never there may come at any time.
    assert!(wait(1500).0.contains("within 1.5 s"));
    let (body, waited) = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| wait(600_000));
        std::thread::sleep(Duration::from_millis(300));
        daemon.worker().set_fault("web", fault);
        waiting.join().unwrap()
    });
    for words in [
        fault,
        "waiting does not help: end its VMM, and start it with what `ringdown args web --vmm qemu` prints",
    ] {
        assert!(body.contains(words), "{body}");
    }
    assert!(waited < Duration::from_secs(4), "{waited:?}");
    // It knew that before: another may just be starting.
    let (_, waited) = wait(600_000);
    assert!(waited >= Duration::from_secs(5), "{waited:?}");
    // That has come, and is waited for.
    daemon.worker().set_state("web", true, false);
    assert!(wait(1500).0.contains("within 1.5 s"));
}

#[test]
fn the_state_says_how_far_a_vm_has_come() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    for (attached, driver_ready, state) in [
        (false, false, VmState::Waiting),
        (true, false, VmState::Attached),
        (true, true, VmState::Booted),
    ] {
        daemon.worker().set_state("web", attached, driver_ready);
        assert_eq!(status_of(&daemon, "/v1/vms/web").state, state);
        let (status, body) = daemon.request("GET", "/v1/vms/web?wait=ready&timeout_ms=1", "");
        assert_eq!(
            (status, json_of(&body)["state"].as_str()),
            (504, Some(state.word()))
        );
        assert!(body.contains(state.meaning()), "{body}");
    }
    let guest = agent(&daemon, "web", "web-guest");
    let ready = status_of(&daemon, "/v1/vms/web?wait=ready");
    assert_eq!(ready.state, VmState::Ready);
    let info = ready.agent.unwrap();
    assert_eq!(
        (info.hostname.as_str(), info.software.as_str()),
        ("web-guest", "ringdown-agent 0.1.0")
    );
    drop(guest);
}

#[test]
fn who_waits_is_told_when_the_agent_comes() {
    let daemon = FakeDaemon::start(&["name=web", "name=db"], &[]);
    std::thread::scope(|scope| {
        let waiters: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| status_of(&daemon, "/v1/vms/web?wait=ready&timeout_ms=20000")))
            .collect();
        // Another VM's agent is not the one that is waited for.
        let _other = agent(&daemon, "db", "db-guest");
        status_of(&daemon, "/v1/vms/db?wait=ready");
        assert!(waiters.iter().all(|waiter| !waiter.is_finished()));
        let _guest = agent(&daemon, "web", "web-guest");
        for waiter in waiters {
            assert_eq!(waiter.join().unwrap().agent.unwrap().hostname, "web-guest");
        }
    });
}

#[test]
fn the_daemon_says_hello_too_and_the_vm_is_ready_while_the_agent_stays() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let mut guest = agent(&daemon, "web", "web-guest");
    status_of(&daemon, "/v1/vms/web?wait=ready");
    let mut decoder = wire::agent::Decoder::new();
    let hello = loop {
        let count = guest.read(decoder.space()).unwrap();
        assert_ne!(count, 0, "the daemon hung up");
        decoder.advance(count);
        match decoder.next_frame().unwrap() {
            Some((CONNECTION_CHANNEL, Frame::Hello(hello))) => break hello,
            Some(other) => panic!("expected a hello, found {other:?}"),
            None => {}
        }
    };
    assert!(hello.software.starts_with("ringdown "), "{hello:?}");
    drop(guest);
    wait_for(|| status_of(&daemon, "/v1/vms/web").state == VmState::Waiting);
}

#[test]
fn the_newest_agent_wins_and_the_old_one_is_hung_up_on() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let first = agent(&daemon, "web", "first");
    status_of(&daemon, "/v1/vms/web?wait=ready");
    let second = agent(&daemon, "web", "second");
    until_hung_up(first);
    let hostname = || {
        status_of(&daemon, "/v1/vms/web")
            .agent
            .map(|agent| agent.hostname)
    };
    assert_eq!(hostname().as_deref(), Some("second"));
    // A call that never says hello does not take the place of one that did, and gives way to the next.
    let silent = daemon.worker().call_agent_port("web", 1001);
    let silent_too = daemon.worker().call_agent_port("web", 1002);
    until_hung_up(silent);
    assert_eq!(hostname().as_deref(), Some("second"));
    let third = agent(&daemon, "web", "third");
    until_hung_up(silent_too);
    until_hung_up(second);
    assert_eq!(hostname().as_deref(), Some("third"));
    drop(third);
    wait_for(|| hostname().is_none());
}

#[test]
fn an_unprivileged_caller_is_hung_up_on_without_a_word() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    for port in [1024, 1025, u32::MAX] {
        assert_eq!(
            until_hung_up(daemon.worker().call_agent_port("web", port)),
            b""
        );
    }
    let hello = Frame::Hello(Hello::new("x"))
        .to_bytes(CONNECTION_CHANNEL)
        .unwrap();
    let mut guest = daemon.worker().call_agent_port("web", 1023);
    guest.write_all(&hello).unwrap();
    status_of(&daemon, "/v1/vms/web?wait=ready");
}

#[test]
fn an_agent_that_talks_after_its_hello_is_hung_up_on() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let mut guest = agent(&daemon, "web", "web-guest");
    status_of(&daemon, "/v1/vms/web?wait=ready");
    guest.write_all(b"x").unwrap();
    until_hung_up(guest);
    assert_eq!(status_of(&daemon, "/v1/vms/web").state, VmState::Waiting);
}

#[test]
fn removing_a_vm_hangs_up_on_its_agent_and_answers_who_waits_for_it() {
    let daemon = FakeDaemon::start(&["name=web", "name=db"], &[]);
    let guest = agent(&daemon, "web", "web-guest");
    status_of(&daemon, "/v1/vms/web?wait=ready");
    std::thread::scope(|scope| {
        let waiter =
            scope.spawn(|| daemon.request("GET", "/v1/vms/db?wait=ready&timeout_ms=20000", ""));
        assert_eq!(daemon.request("DELETE", "/v1/vms/web", "").0, 204);
        until_hung_up(guest);
        assert_eq!(daemon.request("DELETE", "/v1/vms/db", "").0, 204);
        let (status, body) = waiter.join().unwrap();
        assert_eq!(status, 404, "{body}");
    });
    assert_eq!(
        daemon.request("POST", "/v1/vms", r#"{"name":"web"}"#).0,
        201
    );
    assert_eq!(status_of(&daemon, "/v1/vms/web").state, VmState::Waiting);
}

#[test]
fn the_end_of_the_daemon_does_not_wait_for_those_who_wait() {
    let mut daemon = FakeDaemon::start(&["name=web"], &[]);
    let mut client = UnixStream::connect(daemon.runtime_dir().join("control.sock")).unwrap();
    client
        .write_all(b"GET /v1/vms/web?wait=ready&timeout_ms=3600000 HTTP/1.1\r\nHost: x\r\n\r\n")
        .unwrap();
    // Answered after the request above has been accepted, so the daemon is waiting on it.
    assert_eq!(daemon.request("GET", "/v1/health", "").0, 200);
    daemon.stop().unwrap();
    assert_eq!(until_hung_up(client), b"");
}

/// Waits for something that follows from an event which the test cannot see itself.
fn wait_for(condition: impl Fn() -> bool) {
    let deadline = std::time::Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(
            std::time::Instant::now() < deadline,
            "it did not happen in good time"
        );
        std::thread::yield_now();
    }
}
