//! What is refused of a request, by which field, and in which words.

use api::PROBLEM_MEDIA_TYPE;

use super::super::description::DESCRIPTION;
use super::*;

/// Each operation: its method and its path, with `x` for what is named in it.
fn operations() -> Vec<(String, String, &'static Value)> {
    let mut operations = Vec::new();
    for (path, methods) in DESCRIPTION["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap() {
            operations.push((method.to_uppercase(), path.clone(), operation));
        }
    }
    assert!(operations.len() > 20);
    operations
}

/// The path with these in the places of its names.
fn filled(path: &str, name: &str) -> String {
    let in_place = |part: &str| match part.starts_with('{') {
        true => name.to_owned(),
        false => part.to_owned(),
    };
    let parts: Vec<String> = path.split('/').map(in_place).collect();
    parts.join("/")
}

/// The field and the detail of a request that is refused with 400.
fn invalid(daemon: &FakeDaemon, method: &str, target: &str, body: &str) -> (Value, String) {
    let (status, answer) = daemon.request(method, target, body);
    assert_eq!(status, 400, "{method} {target} {body}: {answer}");
    let problem = json_of(&answer);
    let detail = problem["detail"].as_str().unwrap().to_owned();
    // What a parser says of types of Rust helps no client.
    for word in [
        "invalid digit",
        "invalid type",
        "expected u64",
        "variant",
        "missing field",
    ] {
        assert!(!detail.contains(word), "{method} {target} {body}: {detail}");
    }
    (problem["field"].clone(), detail)
}

#[test]
fn a_parameter_that_is_not_described_is_refused_everywhere() {
    let daemon = FakeDaemon::start(&[], &[]);
    for (method, path, _) in operations() {
        let target = format!("{}?bogus=1", filled(&path, "x"));
        let (field, detail) = invalid(&daemon, &method, &target, "");
        assert_eq!(field, "bogus", "{method} {path}: {detail}");
        assert!(detail.contains("takes no parameter \"bogus\""), "{detail}");
    }
    for (target, field, words) in [
        ("/v1/vms?wait=ready", "wait", "leave it out"),
        ("/v1/windows?vm=zz", "vm", "leave it out"),
        ("/v1/vms/x?wiat=ready", "wiat", "did you mean wait?"),
        ("/v1/circuits?colour=x", "colour", "it takes vm, port"),
        ("/v1/circuits?Port=1", "Port", "did you mean port?"),
        ("/v1/vms?=1", "", "leave it out"),
    ] {
        let (found, detail) = invalid(&daemon, "GET", target, "");
        assert_eq!(found, field, "{target}");
        assert!(detail.contains(words), "{target}: {detail}");
    }
    // Of what is long not more is said than a person reads.
    let target = format!("/v1/vms?{}=1", "é".repeat(1000));
    let (field, _) = invalid(&daemon, "GET", &target, "");
    assert_eq!(field, format!("{}…", "é".repeat(64)));
    // An empty query is none.
    assert_eq!(daemon.request("GET", "/v1/vms?", "").0, 200);
    assert_eq!(daemon.request("GET", "/v1/vms?&", "").0, 200);
}

#[test]
fn a_body_that_is_not_described_is_refused_everywhere() {
    let daemon = FakeDaemon::start(&[], &[]);
    let mut refused = 0;
    for (method, path, operation) in operations() {
        if operation.get("requestBody").is_some() {
            continue;
        }
        let needed = operation["parameters"].as_array();
        let needed = needed
            .into_iter()
            .flatten()
            .filter(|of| of["required"] == true);
        let query: Vec<String> = needed
            .filter(|of| of["in"] == "query")
            .map(|of| format!("{}=1", of["name"].as_str().unwrap()))
            .collect();
        let target = format!("{}?{}", filled(&path, "x"), query.join("&"));
        for body in ["{}", " ", &"x".repeat(MAX_BODY_LEN + 1)] {
            let (_, detail) = invalid(&daemon, &method, &target, body);
            assert!(
                detail.contains("takes no body: leave it out"),
                "{target}: {detail}"
            );
        }
        refused += 1;
    }
    assert!(refused > 15, "{refused}");
    let chunked = |body: &str| {
        let head = "POST /v1/audit/rotate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked";
        daemon
            .raw_request(&format!("{head}\r\n\r\n{body}0\r\n\r\n"))
            .unwrap()
    };
    assert!(chunked("1\r\nx\r\n").starts_with("HTTP/1.1 400 "));
    assert!(chunked("").starts_with("HTTP/1.1 409 "));
}

#[test]
fn a_path_that_is_no_utf_8_is_refused_by_what_it_names() {
    let daemon = FakeDaemon::start(&[], &[]);
    let mut refused = 0;
    for (method, path, operation) in operations() {
        let Some(name) = path.split(['{', '}']).nth(1) else {
            continue;
        };
        let body = match operation.get("requestBody") {
            Some(_) => r#"{"up":true}"#,
            None => "",
        };
        let (field, detail) = invalid(&daemon, &method, &filled(&path, "%ff"), body);
        assert_eq!(field, name, "{method} {path}");
        assert!(
            detail.contains("is no UTF-8: write it in ASCII"),
            "{detail}"
        );
        refused += 1;
    }
    assert!(refused >= 7, "{refused}");
    let answer = daemon
        .raw_request("GET /page/%ff HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        .unwrap();
    let media_type = format!("\r\ncontent-type: {PROBLEM_MEDIA_TYPE}\r\n");
    assert!(
        answer.starts_with("HTTP/1.1 400 ") && answer.contains(&media_type),
        "{answer}"
    );
    // It is of UTF-8 and names nothing.
    assert_eq!(daemon.request("GET", "/v1/vms/%C3%A9", "").0, 404);
}

#[test]
fn a_parameter_that_does_not_fit_is_refused_with_what_does() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let ports = "port is {}: use a whole number from 0 to 4294967295";
    let long = "7".repeat(1000);
    let shown = format!("{}…", "7".repeat(64));
    for (target, field, detail) in [
        ("/v1/circuits?port=foo", "port", ports.replace("{}", "foo")),
        ("/v1/circuits?port=-1", "port", ports.replace("{}", "-1")),
        ("/v1/circuits?port=%2B1", "port", ports.replace("{}", "+1")),
        ("/v1/circuits?port=", "port", ports.replace("{}", "empty")),
        ("/v1/circuits?port", "port", ports.replace("{}", "empty")),
        ("/v1/circuits?port=4294967296", "port", ports.replace("{}", "4294967296")),
        (&format!("/v1/circuits?port={long}"), "port", ports.replace("{}", &shown)),
        ("/v1/circuits?port=5&port=6", "port", "port is given twice: give it once".to_owned()),
        ("/v1/events?last=-1", "last", "last is -1: use a whole number from 0 to 4096".to_owned()),
        ("/v1/events?follow=yes", "follow", "follow is yes: use true or false".to_owned()),
        (
            "/v1/vms/web?timeout_ms=-1",
            "timeout_ms",
            "timeout_ms is -1: use a whole number from 0 to 3600000".to_owned(),
        ),
        ("/v1/vms/web?wait=never", "wait", "wait is never: use ready".to_owned()),
        (
            "/v1/why?from=web&to=web",
            "port",
            "the port is missing: give the port that is called; only a service has one of its own".to_owned(),
        ),
        (
            "/v1/why?from=web&to=web&place=tcp:80",
            "place",
            "only the host reaches a place in a guest, and without a port: a published port leads there".to_owned(),
        ),
        (
            "/v1/why?from=host&to=web&place=udp:80",
            "place",
            "place must be tcp:PORT, tcp:HOST:PORT or unix:PATH".to_owned(),
        ),
        (
            "/v1/policy/test?from=web",
            "to",
            "to is missing: add it to the query. Who would be called: a VM, `host`, `service:NAME`, `address:10.1.2.3` or \
             `name:deb.debian.org`."
                .to_owned(),
        ),
    ] {
        let found = invalid(&daemon, "GET", target, "");
        assert_eq!(found, (json!(field), detail), "{target}");
    }
    // HEAD is asked as GET is.
    let head = "HEAD /v1/circuits?port=x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    assert!(
        daemon
            .raw_request(head)
            .unwrap()
            .starts_with("HTTP/1.1 400 ")
    );
}

#[test]
fn a_member_that_does_not_fit_is_refused_with_what_does() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let most = |name: &str| {
        let limits = &DESCRIPTION["components"]["schemas"]["NewVm"]["properties"]["limits"];
        limits["properties"][name]["maximum"].as_u64().unwrap()
    };
    let circuits = format!("use a whole number from 0 to {}", most("circuits"));
    for (body, field, detail) in [
        ("{}", "name", "name is missing: add it, a string".to_owned()),
        (
            r#"{"name":3}"#,
            "name",
            "name is 3: use a string".to_owned(),
        ),
        (
            r#"{"name":"x","name":"y"}"#,
            "name",
            "name is given twice: give it once".to_owned(),
        ),
        (
            r#"{"name":"x","limits":{"circuits":-1}}"#,
            "limits.circuits",
            format!("limits.circuits is -1: {circuits}"),
        ),
        (
            r#"{"name":"x","limits":{"circuits":"many"}}"#,
            "limits.circuits",
            format!("limits.circuits is \"many\": {circuits}"),
        ),
        (
            r#"{"name":"x","cid":1e99}"#,
            "cid",
            "cid is 1e+99: use a whole number from 3 to 4294967294".to_owned(),
        ),
        (
            r#"{"name":"x","limits":{"circuits":1,"circuits":1}}"#,
            "limits.circuits",
            "limits.circuits is given twice: give it once".to_owned(),
        ),
        (
            r#"{"name":"x","limits":3}"#,
            "limits",
            "limits is 3: use an object".to_owned(),
        ),
        (
            r#"{"name":"x","groups":"g"}"#,
            "groups",
            "groups is \"g\": use a list".to_owned(),
        ),
        (
            r#"{"name":"x","groups":["g",7]}"#,
            "groups[1]",
            "groups[1] is 7: use a string".to_owned(),
        ),
        (
            r#"{"name":"x","serial":3}"#,
            "serial",
            "serial is 3: use true or false or a string".to_owned(),
        ),
        (
            r#"{"name":"x","nets":[["lan"]]}"#,
            "nets[0]",
            "nets[0] is [\"lan\"]: use an object".to_owned(),
        ),
        (
            r#"{"name":"x","nets":[{}]}"#,
            "nets[0].network",
            "nets[0].network is missing: add it, a string".to_owned(),
        ),
        (
            r#"{"name":"x","nets":[{"network":"a","network":"b"}]}"#,
            "nets[0].network",
            "nets[0].network is given twice: give it once".to_owned(),
        ),
        (
            r#"{"name":"x","nets":[{"network":"a","vlan":-7}]}"#,
            "nets[0].vlan",
            "nets[0].vlan is -7: use a whole number from 1 to 4094".to_owned(),
        ),
        (
            r#"{"name":"x","nets":[{"network":"a","trunk":[1,"x"]}]}"#,
            "nets[0].trunk[1]",
            "nets[0].trunk[1] is \"x\": use a whole number from 1 to 4094".to_owned(),
        ),
    ] {
        let found = invalid(&daemon, "POST", "/v1/vms", body);
        assert_eq!(found, (json!(field), detail), "{body}");
    }
    let (field, detail) = invalid(&daemon, "POST", "/v1/vms", r#"{"nmae":"x"}"#);
    assert!(
        field == "nmae" && detail.contains("unknown field `nmae`"),
        "{detail}"
    );
    let link = "/v1/networks/lan/ports/web/link";
    assert_eq!(invalid(&daemon, "PUT", link, "{}").0, "up");
    assert_eq!(
        invalid(&daemon, "PUT", link, r#"{"up":true,"up":true}"#).0,
        "up"
    );
    let enforce = r#"{"enforce_existing":1}"#;
    assert_eq!(
        invalid(&daemon, "POST", "/v1/reload", enforce).0,
        "enforce_existing"
    );

    // The values of members without their names are no object.
    for (method, target, body) in [
        ("POST", "/v1/vms", r#"["x"]"#),
        ("POST", "/v1/reload", "[]"),
        ("POST", "/v1/reload", "[true]"),
        ("PUT", link, "[true]"),
        ("PUT", link, "null"),
    ] {
        let (field, detail) = invalid(&daemon, method, target, body);
        assert_eq!(field, Value::Null, "{target} {body}");
        assert!(detail.ends_with(": use an object"), "{detail}");
    }
    for nothing in ["", "null", " null\n"] {
        assert_eq!(
            daemon.request("POST", "/v1/reload", nothing).0,
            // It has no file.
            409,
            "{nothing:?}"
        );
    }
    // A body that ends too early, or goes on, is refused as a whole.
    for body in [r#"{"name":"x""#, r#"{"name":"x"} {}"#, "", "x"] {
        let (_, answer) = daemon.request("POST", "/v1/vms", body);
        assert!(
            answer.contains("the body does not describe a VM"),
            "{answer}"
        );
    }
}
