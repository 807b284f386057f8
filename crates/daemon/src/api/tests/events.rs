//! Events and the reasons of refusals over the control API.

use super::*;

const FILE: &str = r#"
[[vm]]
name = "web"
aliases = ["www"]

[[vm]]
name = "db"

[[rule]]
name = "to-db"
from = "web"
to = "db"
port = 5432
action = "allow"
"#;

/// The events that are kept, as their data.
fn kept(daemon: &FakeDaemon, query: &str) -> Vec<Value> {
    let (status, body) = daemon.request("GET", &format!("/v1/events?follow=false{query}"), "");
    assert_eq!(status, 200, "{body}");
    // The bodies are chunked, and each event is in one chunk.
    let data = body.lines().filter_map(|line| line.strip_prefix("data: "));
    data.map(json_of).collect()
}

fn kinds(events: &[Value]) -> Vec<&str> {
    events
        .iter()
        .map(|event| event["kind"].as_str().unwrap())
        .collect()
}

#[test]
fn what_happens_to_vms_is_told_in_order() {
    let daemon = FakeDaemon::with_file(FILE);
    assert_eq!(daemon.request("POST", "/v1/vms", r#"{"name":"x"}"#).0, 201);
    let guest = agent(&daemon, "x", "x.example");
    status_of(&daemon, "/v1/vms/x?wait=ready&timeout_ms=20000");
    drop(guest);
    assert_eq!(daemon.request("POST", "/v1/reload", "").0, 200);
    assert_eq!(daemon.request("DELETE", "/v1/vms/x", "").0, 204);
    let events = kept(&daemon, "");
    for kind in [
        "vm-added",
        "vm-ready",
        "vm-unready",
        "policy-changed",
        "reload",
        "vm-removed",
    ] {
        assert!(kinds(&events).contains(&kind), "{kind}: {events:?}");
    }
    let of_x = kept(&daemon, "&vm=x");
    assert_eq!(
        kinds(&of_x),
        ["vm-added", "vm-ready", "vm-unready", "vm-removed"]
    );
    let reason = of_x[2]["reason"].as_str().unwrap();
    assert!(
        reason.starts_with("its agent's connection ended"),
        "{reason}"
    );
    let ids: Vec<_> = events
        .iter()
        .map(|event| event["id"].as_u64().unwrap())
        .collect();
    assert!(ids.is_sorted_by(|one, next| one < next), "{ids:?}");
    assert_eq!(
        kinds(&kept(&daemon, "&kind=vm-removed,vm-added&vm=x")),
        ["vm-added", "vm-removed"]
    );
    // Resumed by the parameter, and by the header, which wins.
    let last = ids.len() - 1;
    assert_eq!(kept(&daemon, &format!("&after={}", ids[last - 1])).len(), 1);
    let answer = daemon.raw_request(&format!(
        "GET /v1/events?follow=false&after={} HTTP/1.1\r\nHost: x\r\nLast-Event-ID: {}\r\nConnection: close\r\n\r\n",
        ids[0], ids[last],
    ));
    assert!(!answer.unwrap().contains("data: "));
    let lost = kept(&daemon, "&after=7&last=0");
    assert_eq!(
        (kinds(&lost), &lost[0]["count"]),
        (vec!["lost"], &Value::Null)
    );
}

#[test]
fn a_reload_that_is_refused_is_an_event_with_its_reason() {
    let daemon = FakeDaemon::with_file(FILE);
    std::fs::write(daemon.runtime_dir().join("ringdown.toml"), "nonsense").unwrap();
    assert_eq!(daemon.request("POST", "/v1/reload", "").0, 422);
    let events = kept(&daemon, "&kind=reload,policy-changed");
    assert_eq!(kinds(&events), ["reload"]);
    assert!(
        events[0]["reason"].as_str().unwrap().contains("TOML"),
        "{events:?}"
    );
}

#[test]
fn words_that_mean_no_events_are_refused_by_their_field() {
    let daemon = FakeDaemon::start(&[], &[]);
    for (query, field) in [
        ("kind=reloads", "kind"),
        ("kind=reload,", "kind"),
        ("kind=", "kind"),
        ("vm=A", "vm"),
        ("after=-1", "after"),
        ("after=9007199254740992", "after"),
        ("last=4097", "last"),
        ("follow=perhaps", "follow"),
    ] {
        let (status, body) = daemon.request("GET", &format!("/v1/events?{query}"), "");
        assert_eq!(
            (status, &json_of(&body)["field"]),
            (400, &json!(field)),
            "{query}"
        );
    }
    // Each by itself, also where the other one says from where.
    let answer = daemon.raw_request(
        "GET /v1/events?follow=false&after=9007199254740992 HTTP/1.1\r\nHost: x\r\nLast-Event-ID: 1\r\nConnection: close\r\n\r\n",
    );
    let answer = answer.unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 400") && answer.contains("\"after\""),
        "{answer}"
    );
    for header in ["", "x", "-1", "9007199254740992", "1 2"] {
        let answer = daemon.raw_request(&format!(
            "GET /v1/events HTTP/1.1\r\nHost: x\r\nLast-Event-ID: {header}\r\nConnection: close\r\n\r\n"
        ));
        let answer = answer.unwrap();
        assert!(
            answer.starts_with("HTTP/1.1 400") && answer.contains("\"Last-Event-ID\""),
            "{answer}"
        );
    }
    assert!(kept(&daemon, "&after=9007199254740991&last=4096").len() == 1);
}

#[test]
fn a_service_is_asked_about_at_its_own_port() {
    let service = "\n[[service]]\nname = \"registry\"\nport = 5000\nto = \"tcp:127.0.0.1:5000\"\n";
    let daemon = FakeDaemon::with_file(&format!("{FILE}{service}"));
    for of in ["why", "policy/test"] {
        let target = format!("/v1/{of}?from=web&to=service:registry");
        let (status, body) = daemon.request("GET", &target, "");
        assert_eq!((status, &json_of(&body)["port"]), (200, &json!(5000)));
    }
}

#[test]
fn why_tells_the_rule_the_state_and_what_was_refused() {
    let daemon = FakeDaemon::with_file(FILE);
    let why = |query: &str| json_of(&daemon.request("GET", &format!("/v1/why?{query}"), "").1);
    let allowed = why("from=www&to=db&port=5432");
    assert_eq!(
        (&allowed["allowed"], &allowed["rule"]),
        (&json!(true), &json!("to-db"))
    );
    assert_eq!(allowed["refusals"], json!([]));
    let absent = allowed["hindrances"].as_array().unwrap();
    assert_eq!(absent.len(), 2, "{allowed}");
    assert!(absent[1].as_str().unwrap().contains("\"db\""), "{allowed}");
    let fails = allowed["fails"].as_str().unwrap();
    assert!(
        fails.starts_with("it would fail now: VM \"web\""),
        "{fails}"
    );
    daemon.worker().set_state("db", true, true);
    daemon.worker().set_state("web", true, true);
    let works = why("from=web&to=db&port=5432");
    assert_eq!(
        (&works["hindrances"], works.get("fails")),
        (&json!([]), None)
    );

    let denied = why("from=web&to=db&port=22");
    assert_eq!(
        (&denied["allowed"], &denied["rule"]),
        (&json!(false), &Value::Null)
    );
    assert!(
        denied["reason"]
            .as_str()
            .unwrap()
            .contains("no rule matches"),
        "{denied}"
    );
    assert_eq!(denied.get("fails"), None);
    assert_eq!(denied["policy"]["passed_over"][0]["differs_in"], "port");

    // No program listens for the guest, until one does.
    let silent = why("from=web&to=host&port=7000");
    assert_eq!(silent["allowed"], true);
    assert!(
        silent["hindrances"][0]
            .as_str()
            .unwrap()
            .contains("web.sock_7000"),
        "{silent}"
    );
    let _listener =
        std::os::unix::net::UnixListener::bind(daemon.runtime_dir().join("web.sock_7000")).unwrap();
    assert_eq!(why("from=web&to=host&port=7000")["hindrances"], json!([]));
    // What keeps the guest's agent from making connections for published ports.
    let of_agent = || why("from=host&to=web&port=1007")["hindrances"].to_string();
    assert!(of_agent().contains("its ringdown-agent has not called"));
    let of_place = why("from=host&to=web&place=tcp:80");
    assert_eq!(
        (&of_place["port"], of_place["hindrances"].to_string()),
        (&json!(1007), of_agent())
    );
    let _guest = agent(&daemon, "web", "web.example");
    status_of(&daemon, "/v1/vms/web?wait=ready&timeout_ms=20000");
    assert!(of_agent().contains("forward is off in its /etc/ringdown/agent.toml"));
    assert_eq!(
        daemon
            .request("GET", "/v1/why?from=web&to=nobody&port=1", "")
            .0,
        404
    );
}
