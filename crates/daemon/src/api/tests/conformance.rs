//! The API and its description say the same: each answer of the other tests is held against the description too.

use super::super::description::DESCRIPTION;
use super::*;

const METHODS: [&str; 8] = [
    "get", "head", "put", "post", "delete", "patch", "options", "trace",
];

/// Holds an answer against the description. Of what is described nowhere, there must be no resource, or no such method.
pub(crate) fn check(method: &str, target: &str, status: u16, head: &str, body: &str) {
    let context = format!("{method} {target}: {status} {body}");
    let path = target.split('?').next().unwrap();
    if !path.starts_with("/v1/") {
        return;
    }
    let Some(methods) = methods_of(path) else {
        assert_eq!(status, 404, "{context}");
        return valid(&problem_schema(), body, &context);
    };
    let Some(operation) = methods.get(method.to_lowercase()) else {
        // The head of an answer to GET is described with it.
        assert!(status == 405 || method == "HEAD", "{context}");
        return;
    };
    let response = &operation["responses"][status.to_string()];
    assert!(response.is_object(), "not described: {context}");
    let Some(content) = response.get("content").and_then(Value::as_object) else {
        assert_eq!(body, "", "{context}");
        return;
    };
    let media_type = head.lines().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        name.eq_ignore_ascii_case("content-type").then_some(value)
    });
    let media_type = media_type.expect(&context);
    let described = content.get(media_type).expect(&context);
    if media_type.ends_with("json") {
        valid(&described["schema"], body, &context);
    }
}

fn problem_schema() -> Value {
    json!({ "$ref": "#/components/schemas/Problem" })
}

/// What is described at a path. Names stand for one segment.
fn methods_of(path: &str) -> Option<&'static Value> {
    let fits = |template: &str| {
        let (template, path) = (template.split('/'), path.split('/'));
        let same = |(of, is): (&str, &str)| of == is || of.starts_with('{') && !is.is_empty();
        template.clone().count() == path.clone().count() && template.zip(path).all(same)
    };
    let mut paths = DESCRIPTION["paths"].as_object().unwrap().iter();
    paths
        .find(|(template, _)| fits(template))
        .map(|(_, methods)| methods)
}

fn valid(schema: &Value, body: &str, context: &str) {
    let mut schema = schema.clone();
    schema["components"] = DESCRIPTION["components"].clone();
    let validator = jsonschema::draft202012::new(&schema).expect(context);
    let body = json_of(body);
    let errors = validator.iter_errors(&body).map(|error| error.to_string());
    let errors: Vec<String> = errors.collect();
    assert!(errors.is_empty(), "{errors:?}: {context}");
}

/// Each operation: its method, its path and what is said of it.
fn operations() -> Vec<(&'static str, &'static str, &'static Value)> {
    let paths = DESCRIPTION["paths"].as_object().unwrap();
    let mut operations = Vec::new();
    for (path, methods) in paths {
        for (method, operation) in methods.as_object().unwrap() {
            operations.push((method.as_str(), path.as_str(), operation));
        }
    }
    assert!(operations.len() > 20);
    operations
}

#[test]
fn the_description_is_served_and_whole() {
    let daemon = FakeDaemon::start(&[], &[]);
    let (status, body) = daemon.request("GET", "/v1/openapi.json", "");
    assert_eq!((status, json_of(&body)), (200, DESCRIPTION.clone()));
    assert_eq!(DESCRIPTION["openapi"], "3.1.0");
    let mut ids = std::collections::HashSet::new();
    for (method, path, operation) in operations() {
        let context = format!("{method} {path}");
        // Unique among all operations (OpenAPI 3.1, section 4.8.10.1): clients are made of them.
        let id = operation["operationId"].as_str().expect(&context);
        assert!(ids.insert(id), "{context}: {id} is there twice");
        let words = operation["summary"].as_str().expect(&context);
        assert!(
            !words.is_empty() && operation["tags"][0].is_string(),
            "{context}"
        );
        for parameter in operation["parameters"].as_array().into_iter().flatten() {
            assert!(
                parameter["description"].is_string(),
                "{context}: {parameter}"
            );
            let is_needed = parameter["in"] == "path"
                || ["from", "to"].contains(&parameter["name"].as_str().unwrap());
            assert_eq!(parameter["required"], is_needed, "{context}: {parameter}");
        }
        for (status, response) in operation["responses"].as_object().unwrap() {
            let is_refusal = status.as_str() >= "400";
            let problem = &response["content"][api::PROBLEM_MEDIA_TYPE]["schema"];
            assert_eq!(
                is_refusal,
                *problem == problem_schema(),
                "{context} {status}"
            );
        }
        for always in ["403", "500"] {
            assert!(operation["responses"][always].is_object(), "{context}");
        }
    }
    // What is referred to is there.
    let text = DESCRIPTION.to_string();
    for reference in text.split("\"$ref\":\"#").skip(1) {
        let pointer = reference.split('"').next().unwrap();
        assert!(DESCRIPTION.pointer(pointer).is_some(), "{pointer}");
    }
}

#[test]
fn what_is_described_is_there_and_nothing_else() {
    let daemon = FakeDaemon::start(&["name=x"], &[]);
    let paths = DESCRIPTION["paths"].as_object().unwrap();
    for (path, methods) in paths {
        let target = path
            .replace("{name}", "x")
            .replace("{vm}", "x")
            .replace("{id}", "0-0");
        for method in METHODS {
            let is_described = methods.get(method).is_some();
            // A path asked for GET is asked for HEAD too (RFC 9110, section 9.3.2); a capture does not end.
            if method == "head" || (is_described && path.ends_with("/capture")) {
                continue;
            }
            let end = "?follow=false".repeat(usize::from(path.ends_with("/events")));
            let target = format!("{target}{end}");
            let (status, body) = daemon.request(&method.to_uppercase(), &target, "");
            let is_there = status != 405 && !body.contains("urn:ringdown:problem:no-such-resource");
            assert_eq!(is_there, is_described, "{method} {path}: {status} {body}");
        }
    }
}

#[test]
fn bounds_of_parameters_are_those_that_hold() {
    let daemon = FakeDaemon::start(&["name=x"], &[]);
    let mut checked = 0;
    for (method, path, operation) in operations() {
        let parameters = operation["parameters"].as_array();
        let of_query = |of: &&Value| of["in"] == "query";
        for parameter in parameters.into_iter().flatten().filter(of_query) {
            let (name, schema) = (parameter["name"].as_str().unwrap(), &parameter["schema"]);
            let bounds = (schema["minimum"].as_u64(), schema["maximum"].as_u64());
            let (Some(least), Some(most)) = bounds else {
                continue;
            };
            let target = path.replace("{name}", "x");
            let others: String = parameters
                .into_iter()
                .flatten()
                .filter(|other| other["required"] == true && of_query(other))
                .filter(|other| other["name"] != name)
                .map(|other| format!("&{}=x", other["name"].as_str().unwrap()))
                .collect();
            let ask = |value: &str| {
                let target = format!("{target}?{name}={value}{others}");
                let (status, body) = daemon.request(&method.to_uppercase(), &target, "");
                (status, json_of(&body)["field"] == name)
            };
            let above = (u128::from(most) + 1).to_string();
            for wrong in [above.as_str(), "-1", "x", "", "1.5"] {
                assert_eq!(ask(wrong), (400, true), "{method} {path} {name}={wrong}");
            }
            if let Some(below) = least.checked_sub(1) {
                let below = below.to_string();
                assert_eq!(ask(&below), (400, true), "{method} {path} {name}={below}");
            }
            // What streams does not end, or is no JSON.
            if !path.ends_with("/capture") && !path.ends_with("/events") {
                for right in [least, most] {
                    let (status, is_blamed) = ask(&right.to_string());
                    assert!(
                        status != 400 && !is_blamed,
                        "{method} {path} {name}={right}: {status}"
                    );
                }
            }
            checked += 1;
        }
    }
    assert!(checked >= 8, "{checked}");
}

#[test]
fn bounds_of_a_vm_are_those_that_hold() {
    let daemon = FakeDaemon::start(&[], &[]);
    let members = &DESCRIPTION["components"]["schemas"]["NewVm"]["properties"];
    let add = |body: Value| {
        let (status, answer) = daemon.request("POST", "/v1/vms", &body.to_string());
        if status == 201 {
            let name = json_of(&answer)["name"].as_str().unwrap().to_owned();
            let target = format!("/v1/vms/{name}");
            assert_eq!(daemon.request("DELETE", &target, "").0, 204);
            return (status, Value::Null);
        }
        (status, json_of(&answer)["field"].clone())
    };
    let mut numbers = vec![("cid".to_owned(), members["cid"].clone())];
    for (name, schema) in members["limits"]["properties"].as_object().unwrap() {
        numbers.push((format!("limits.{name}"), schema.clone()));
    }
    assert_eq!(numbers.len(), 8);
    for (field, schema) in numbers {
        let body = |value: Value| match field.split_once('.') {
            Some((outer, inner)) => json!({ "name": "x", outer: { inner: value } }),
            None => json!({ "name": "x", &field: value }),
        };
        let (least, most) = (
            schema["minimum"].as_u64().unwrap(),
            schema["maximum"].as_u64().unwrap(),
        );
        for right in [least, most] {
            assert_eq!(
                add(body(json!(right))),
                (201, Value::Null),
                "{field}: {right}"
            );
        }
        let mut wrong = vec![json!(most + 1), json!(-1), json!("1"), json!(1.5)];
        wrong.extend(least.checked_sub(1).map(|below| json!(below)));
        for wrong in wrong {
            assert_eq!(add(body(wrong.clone())), (400, json!(field)), "{wrong}");
        }
    }
    // To JSON Schema these are integers.
    for whole in ["3.0", "3e0", "0.3e1"] {
        let body = format!(r#"{{"name":"x","cid":{whole},"limits":{{"circuits":7.0}}}}"#);
        let (status, answer) = daemon.request("POST", "/v1/vms", &body);
        assert_eq!(
            (status, &json_of(&answer)["cid"]),
            (201, &json!(3)),
            "{answer}"
        );
        assert_eq!(daemon.request("DELETE", "/v1/vms/x", "").0, 204);
    }
    let longest = members["name"]["maxLength"].as_u64().unwrap() as usize;
    assert_eq!(add(json!({ "name": "x".repeat(longest) })).0, 201);
    let too_long = "x".repeat(longest + 1);
    for wrong in [too_long.as_str(), "", "X", "-x", "x/y", "x y"] {
        assert_eq!(
            add(json!({ "name": wrong })),
            (400, json!("name")),
            "{wrong:?}"
        );
    }
    let most = members["groups"]["maxItems"].as_u64().unwrap() as usize;
    let groups =
        |count: usize| -> Vec<String> { (0..count).map(|index| format!("g{index}")).collect() };
    assert_eq!(add(json!({ "name": "x", "groups": groups(most) })).0, 201);
    let too_many = json!({ "name": "x", "groups": groups(most + 1) });
    assert_eq!(add(too_many), (409, json!("groups")));
    let most = members["nets"]["maxItems"].as_u64().unwrap() as usize;
    assert_eq!(most, config::MAX_NETS);
}

#[test]
fn patterns_are_those_that_hold() {
    let members = &DESCRIPTION["components"]["schemas"]["NewVm"]["properties"];
    let windows = jsonschema::draft202012::new(&members["windows"]).unwrap();
    for count in 0..10 {
        for size in 0..1100 {
            for unit in ["M", "G", "K"] {
                let text = format!("{count}x{size}{unit}");
                let is_taken = config::parse_windows(&text).is_ok();
                assert_eq!(windows.is_valid(&json!(text)), is_taken, "{text}");
            }
        }
    }
    let port = &DESCRIPTION["components"]["schemas"]["NewPort"]["properties"];
    let checked = |member: &str, text: &str| {
        let schema = jsonschema::draft202012::new(&port[member]).unwrap();
        let body = json!({ "name": "web", "nets": [{ "network": "lan", member: text }] });
        let is_taken = config::parse_vm_members(&body).is_ok();
        assert_eq!(schema.is_valid(&json!(text)), is_taken, "{member} {text}");
    };
    for text in [
        "0.0.0.1",
        "10.1.2.3",
        "255.255.255.254",
        "256.1.1.1",
        "1.2.3",
        "01.2.3.4",
        "1.2.3.4.5",
        "",
    ] {
        checked("ipv4", text);
    }
    for text in [
        "02:00:5e:10:00:01",
        "00:00:00:00:00:01",
        "01:00:00:00:00:01",
        "2:0:5e:10:0:1",
        "",
        "02-00-5e-10-00-01",
    ] {
        checked("mac", text);
    }
    for text in [
        "adaptive", "off", "0us", "1us", "10000us", "10001us", "1ms", "10ms", "11ms", "1s", "",
    ] {
        checked("moderation", text);
    }
}

#[test]
fn a_refusal_names_the_field() {
    let daemon = FakeDaemon::start(&["name=web,cid=7"], &[]);
    let long_path = format!("/{}", "p".repeat(107));
    let two_ports = json!([{ "network": "a" }, { "network": "b", "vlan": "x" }]);
    for (body, status, field) in [
        (json!({ "nmae": "x" }), 400, "nmae"),
        (json!({ "name": 3 }), 400, "name"),
        (json!({ "name": "x", "serial": 3 }), 400, "serial"),
        (
            json!({ "name": "x", "limits": { "circuit": 3 } }),
            400,
            "limits.circuit",
        ),
        (json!({ "name": "x", "limits": 3 }), 400, "limits"),
        (
            json!({ "name": "x", "nets": two_ports }),
            400,
            "nets[1].vlan",
        ),
        (json!({ "name": "x", "nets": [["lan"]] }), 400, "nets[0]"),
        (
            json!({ "name": "x", "nets": [{ "network": "lan" }] }),
            422,
            "nets",
        ),
        (json!({ "name": "x", "host": "x" }), 400, "host"),
        (json!({ "name": "x", "qmp": long_path }), 422, "qmp"),
        (json!({ "name": "x", "qmp": "/q" }), 422, "qmp"),
        (json!({ "name": "x", "windows": "0x8M" }), 400, "windows"),
        (
            json!({ "name": "x", "hybrid": "/h", "vhost_user": "/v" }),
            422,
            "vhost_user",
        ),
        (
            json!({ "name": "x", "serial": true, "serial_connect": "/s" }),
            422,
            "serial_connect",
        ),
        (json!({ "name": "host" }), 422, "name"),
        (json!({ "name": "web" }), 409, "name"),
        (json!({ "name": "x", "cid": 7 }), 409, "cid"),
        (
            json!({ "name": "x", "aliases": ["a", "a"] }),
            422,
            "aliases",
        ),
    ] {
        let (answered, answer) = daemon.request("POST", "/v1/vms", &body.to_string());
        let found = (answered, &json_of(&answer)["field"]);
        assert_eq!(found, (status, &json!(field)), "{body}: {answer}");
    }
}
