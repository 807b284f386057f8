mod undone;

use std::os::unix::net::UnixStream;
use std::path::Path;

use serde_json::{Value, json};

use crate::fake_daemon::FakeDaemon;

const FIRST: &str = r#"
[[vm]]
name = "web"
groups = ["a"]

[[vm]]
name = "db"

[[rule]]
name = "first"
from = "@a"
to = "db"
action = "allow"

[[service]]
name = "registry"
port = 5000
to = "tcp:127.0.0.1:5000"

[[publish]]
name = "www"
listen = "tcp:127.0.0.1:8080"
to = "web:80"
"#;

const SECOND: &str = r#"
[[vm]]
name = "web"
groups = ["b"]
aliases = ["site"]

[[vm]]
name = "ci"
domain = "red"

[[rule]]
name = "second"
from = "@b"
to = "red/ci"
action = "allow"

[[service]]
name = "registry"
port = 5001
to = "tcp:127.0.0.1:5000"

[[service]]
name = "other"
port = 5000
to = "tcp:127.0.0.1:5000"
"#;

fn write(daemon: &FakeDaemon, text: &str) {
    std::fs::write(daemon.runtime_dir().join("ringdown.toml"), text).unwrap();
}

fn reload(daemon: &FakeDaemon) -> (u16, Value) {
    reload_with(daemon, "")
}

fn reload_with(daemon: &FakeDaemon, body: &str) -> (u16, Value) {
    let (status, body) = daemon.request("POST", "/v1/reload", body);
    (status, serde_json::from_str(&body).expect(&body))
}

/// Everything that is in force, as far as it can be seen from outside.
fn in_force(daemon: &FakeDaemon) -> Value {
    let vms = daemon.request("GET", "/v1/vms", "").1;
    let policy = daemon.worker().policy().unwrap();
    let labels = policy.policy.rules().iter().map(|rule| rule.label.clone());
    let services = daemon.worker().services().into_iter();
    let publishes = daemon.offers().offered().unwrap().publishes.into_iter();
    json!({
        "vms": serde_json::from_str::<Value>(&vms).unwrap(),
        "rules": labels.collect::<Vec<_>>(),
        "services": services.map(|service| (service.id.0, service.name, service.port)).collect::<Vec<_>>(),
        "publishes": publishes.map(|publish| publish.name).collect::<Vec<_>>(),
        "web": daemon.worker().groups("web"),
        "sockets": sockets(daemon.runtime_dir()),
    })
}

fn sockets(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.contains(".sock")).collect();
    names.sort();
    names
}

#[test]
fn a_file_that_has_changed_comes_into_force() {
    let daemon = FakeDaemon::with_file(FIRST);
    let before = in_force(&daemon);
    assert_eq!(before["services"], json!([[1, "registry", 5000]]));
    assert_eq!(before["publishes"], json!(["www"]));
    // What was added by hand is nothing that the file has to know.
    assert_eq!(
        daemon
            .request("POST", "/v1/vms", r#"{"name":"mine","cid":7}"#)
            .0,
        201
    );
    write(&daemon, SECOND);
    let (status, reloaded) = reload(&daemon);
    let expected = json!({
        "added": ["red/ci"], "removed": ["db"], "cut_off": [], "vms": 3, "rules": 1, "services": 2, "networks": 0, "publishes": 0,
        "published": [], "unpublished": ["tcp:127.0.0.1:8080 (\"www\") to web:80"],
        "findings": reloaded["findings"],
    });
    assert_eq!((status, &reloaded), (200, &expected));
    let after = in_force(&daemon);
    let names: Vec<&Value> = after["vms"]["vms"]
        .as_array()
        .unwrap()
        .iter()
        .map(|vm| &vm["name"])
        .collect();
    assert_eq!(names, ["mine", "ci", "web"]);
    assert_eq!(after["rules"], json!(["second"]));
    assert_eq!(
        after["services"],
        json!([[1, "registry", 5001], [2, "other", 5000]])
    );
    assert_eq!(after["publishes"], json!([]));
    assert_eq!(after["web"], json!(["b"]));
    assert_eq!(
        after["sockets"],
        json!([
            "circuit.sock",
            "control.sock",
            "mine.sock",
            "red.ci.sock",
            "web.sock"
        ])
    );
    assert_eq!(daemon.request("GET", "/v1/vms/site", "").0, 200);
    assert_eq!(daemon.request("GET", "/v1/vms/red%2Fci", "").0, 200);
    assert!(!daemon.worker().policy().unwrap().enforce_existing);
    // A published port that changes is named as it was and as it is. A service that comes back is a new one.
    write(&daemon, &FIRST.replace(":8080", ":8081"));
    assert_eq!(reload(&daemon).0, 200);
    write(&daemon, FIRST);
    let (status, reloaded) = reload_with(&daemon, r#"{"enforce_existing":true}"#);
    assert_eq!(
        (status, &reloaded["published"], &reloaded["unpublished"]),
        (
            200,
            &json!(["tcp:127.0.0.1:8080 (\"www\") to web:80"]),
            &json!(["tcp:127.0.0.1:8081 (\"www\") to web:80"])
        )
    );
    assert!(daemon.worker().policy().unwrap().enforce_existing);
    write(&daemon, SECOND);
    assert_eq!(reload(&daemon).0, 200);
    assert_eq!(
        in_force(&daemon)["services"],
        json!([[1, "registry", 5001], [3, "other", 5000]])
    );
}

#[test]
fn a_service_that_leads_elsewhere_is_another_service() {
    let text = |more: &str| {
        format!("[[service]]\nname = \"x\"\nport = 5000\nto = \"tcp:127.0.0.1:{more}\n")
    };
    let daemon = FakeDaemon::with_file(&text("5000\""));
    for (more, number) in [
        ("5000\"\nmax-connections = 7", 1),
        ("5001\"", 2),
        ("5001\"\nconnect-timeout-ms = 7", 2),
        ("5001\"\nproxy-protocol = true", 3),
        ("5000\"", 4),
    ] {
        write(&daemon, &text(more));
        assert_eq!(reload(&daemon).0, 200, "{more}");
        let services = &in_force(&daemon)["services"];
        assert_eq!(*services, json!([[number, "x", 5000]]), "{more}");
    }
}

#[test]
fn a_file_that_has_not_changed_changes_nothing() {
    let daemon = FakeDaemon::with_file(FIRST);
    let before = in_force(&daemon);
    let (status, reloaded) = reload(&daemon);
    assert_eq!(
        (status, &reloaded["added"], &reloaded["removed"]),
        (200, &json!([]), &json!([]))
    );
    assert_eq!(in_force(&daemon), before);
}

#[test]
fn what_cannot_be_taken_leaves_everything_as_it_was_and_says_so() {
    let daemon = FakeDaemon::with_file(FIRST);
    let (status, body) = daemon.request("POST", "/v1/vms", r#"{"name":"mine","cid":7}"#);
    assert_eq!(status, 201, "{body}");
    daemon.offers().refuse("refused");
    let state = || (in_force(&daemon), remembered(&daemon));
    let before = state();
    let with = |more: &str| format!("{SECOND}\n{more}");
    let vm = |more: &str| format!("[[vm]]\nname = \"new\"\n[[vm]]\nname = \"web\"\n{more}");
    let table = [
        (
            "[[vm]\n".to_owned(),
            422,
            "configuration-refused",
            "line 1, column 6: this is not valid TOML",
        ),
        (
            with("[[rules]]"),
            422,
            "configuration-refused",
            "line 27, column 3: unknown key \"rules\"",
        ),
        (
            with("[[service]]\nname = \"third\"\nport = 5000\negress = true"),
            422,
            "configuration-refused",
            "port 5000 of the host belongs to \"other\" already",
        ),
        (
            vm("cid = 9"),
            409,
            "reload-failed",
            "line 3, column 1: \"cid\" of VM \"web\" cannot change while the VM is there: put it back, or remove the VM with `ringdown vm rm web` first",
        ),
        (
            vm("host = \"elsewhere.sock\""),
            409,
            "reload-failed",
            "\"host\" of VM \"web\" cannot change",
        ),
        (
            vm("vhost-user = \"elsewhere\""),
            409,
            "reload-failed",
            "\"vhost-user\" of VM \"web\" cannot change",
        ),
        (
            vm("limits = { circuits = 3 }"),
            409,
            "reload-failed",
            "\"limits\" of VM \"web\" cannot change",
        ),
        (
            "[[vm]]\nname = \"new\"\ncid = 7".to_owned(),
            409,
            "reload-failed",
            "CID 7 belongs to VM \"mine\" already",
        ),
        // The VM that has it is about to go, but has not gone yet.
        (
            "[[vm]]\nname = \"new\"\ncid = 3".to_owned(),
            409,
            "reload-failed",
            "CID 3 belongs to VM \"web\" already",
        ),
        (
            "runtime-dir = \"/elsewhere\"".to_owned(),
            409,
            "reload-failed",
            "\"runtime-dir\" cannot change while the daemon runs: put it back to",
        ),
        (
            "state-dir = \"/elsewhere\"".to_owned(),
            409,
            "reload-failed",
            "\"state-dir\" cannot change while the daemon runs",
        ),
        (
            "spin-microseconds = 7".to_owned(),
            409,
            "reload-failed",
            "\"spin-microseconds\" cannot change while the daemon runs: put it back to \"100\"",
        ),
        (
            "workers = 2".to_owned(),
            409,
            "reload-failed",
            "\"workers\" cannot change while the daemon runs: put it back to \"auto\"",
        ),
        (
            with("[[publish]]\nname = \"refused\"\nlisten = \"tcp:127.0.0.1:1\"\nto = \"web:1\""),
            409,
            "reload-failed",
            "the published port \"refused\": the address is in use",
        ),
        (
            format!("audit = \"/nonexistent/audit.log\"\n{SECOND}"),
            409,
            "reload-failed",
            "cannot open the audit's file /nonexistent/audit.log",
        ),
        (
            format!(
                "audit = \"audit.log\"\n{}",
                with("[[vm]]\nname = \"lost\"\nhost = \"/nonexistent/x\"")
            ),
            409,
            "reload-failed",
            "VM \"lost\": the directory /nonexistent does not exist",
        ),
    ];
    for (text, status, kind, expected) in table {
        write(&daemon, &text);
        let (found, problem) = reload(&daemon);
        assert_eq!(
            (found, &problem["type"]),
            (status, &json!(format!("urn:ringdown:problem:{kind}"))),
            "{text}: {problem}"
        );
        let detail = problem["detail"].as_str().unwrap();
        assert!(
            detail.contains(expected),
            "expected …{expected}…\nfound {detail}"
        );
        assert_eq!(state(), before, "{text}");
    }
    std::fs::remove_file(daemon.runtime_dir().join("ringdown.toml")).unwrap();
    let (status, problem) = reload(&daemon);
    assert_eq!(status, 409, "{problem}");
    assert!(
        problem["detail"]
            .as_str()
            .unwrap()
            .starts_with("cannot read the configuration file")
    );
    // And the daemon still takes something that holds.
    write(&daemon, SECOND);
    assert_eq!(reload(&daemon).0, 200);
    assert_ne!(state().1, before.1);
    UnixStream::connect(daemon.runtime_dir().join("red.ci.sock")).unwrap();
}

#[test]
fn a_bad_request_reloads_nothing() {
    let daemon = FakeDaemon::with_file(FIRST);
    let changes = daemon.worker().policy_changes();
    for body in ["7", "{\"enforce\":true}", "{\"enforce_existing\":1}"] {
        let (status, problem) = reload_with(&daemon, body);
        assert_eq!(
            (status, &problem["type"]),
            (400, &json!("urn:ringdown:problem:invalid-request"))
        );
    }
    assert_eq!(daemon.request("GET", "/v1/reload", "").0, 405);
    assert_eq!(daemon.worker().policy_changes(), changes);
}

#[test]
fn a_vm_that_the_file_takes_over_goes_when_the_file_forgets_it() {
    let daemon = FakeDaemon::with_file("");
    assert_eq!(
        daemon
            .request("POST", "/v1/vms", r#"{"name":"web","cid":9}"#)
            .0,
        201
    );
    write(&daemon, "[[vm]]\nname = \"web\"");
    assert_eq!(reload(&daemon).1["added"], json!([]));
    write(&daemon, "");
    assert_eq!(reload(&daemon).1["removed"], json!(["web"]));
    // Its name has kept its CID.
    write(&daemon, "[[vm]]\nname = \"first\"\n[[vm]]\nname = \"web\"");
    assert_eq!(reload(&daemon).0, 200);
    let vm: Value = serde_json::from_str(&daemon.request("GET", "/v1/vms/web", "").1).unwrap();
    assert_eq!(vm["cid"], 9);
}

#[test]
fn aliases_move_between_vms_and_rules_follow() {
    let text = |first: &str, second: &str| {
        format!(
            "[[vm]]\nname = \"a\"\naliases = [{first}]\n[[vm]]\nname = \"b\"\naliases = [{second}]\n\
             [[rule]]\nfrom = \"main\"\nto = \"*\"\naction = \"allow\""
        )
    };
    let daemon = FakeDaemon::with_file(&text("\"main\"", ""));
    // Guests get it too.
    let aliases = || daemon.worker().policy().unwrap().aliases;
    let pair = |name: &str, aliases: &[&str]| {
        let aliases = aliases.iter().map(|alias| (*alias).to_owned());
        (name.to_owned(), aliases.collect::<Vec<_>>())
    };
    let verdict = |from: &str, to: &str| {
        let answer = daemon
            .request(
                "GET",
                &format!("/v1/policy/test?from={from}&to={to}&port=1"),
                "",
            )
            .1;
        serde_json::from_str::<Value>(&answer).unwrap()["verdict"].clone()
    };
    assert_eq!(
        (verdict("a", "b"), verdict("b", "a")),
        (json!("allowed"), json!("denied"))
    );
    write(&daemon, &text("", "\"main\""));
    assert_eq!(reload(&daemon).0, 200);
    assert_eq!(
        (verdict("a", "b"), verdict("b", "a")),
        (json!("denied"), json!("allowed"))
    );
    assert_eq!(aliases(), [pair("a", &[]), pair("b", &["main"])]);
}

#[test]
fn the_audit_moves_to_another_file_with_a_reload() {
    let daemon = FakeDaemon::with_file("audit = \"first.log\"");
    let path = |name: &str| daemon.runtime_dir().join(name);
    assert!(path("first.log").exists());
    write(&daemon, "audit = \"second.log\"");
    assert_eq!(reload(&daemon).0, 200);
    assert!(path("second.log").exists());
    std::fs::rename(path("second.log"), path("second.log.1")).unwrap();
    assert_eq!(
        daemon.request("POST", "/v1/audit/rotate", ""),
        (204, String::new())
    );
    assert!(path("second.log").exists());
}

const NETWORKS: &str = r#"
[[network]]
name = "lan"
ipv4 = "10.1.2.0/24"

[[vm]]
name = "web"
networks = ["lan"]

[[vm]]
name = "db"
aliases = ["store"]
networks = ["lan"]
"#;

/// Where VMMs connect.
fn vmm_sockets(daemon: &FakeDaemon) -> Vec<String> {
    let entries = std::fs::read_dir(daemon.runtime_dir()).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.filter(|name| name.ends_with(".vhost")).collect();
    names.sort();
    names
}

fn hosts(daemon: &FakeDaemon, network: &str) -> Vec<String> {
    let hosts = daemon.net().hosts(network).into_iter();
    let names = hosts.map(|host| std::iter::once(host.name).chain(host.aliases));
    names.flatten().collect()
}

#[test]
fn networks_and_ports_come_go_and_change() {
    let daemon = FakeDaemon::with_file(NETWORKS);
    assert_eq!(hosts(&daemon, "lan"), ["db", "store", "web"]);
    let before = daemon.net().ports("lan");
    let socket = |name: &str| daemon.runtime_dir().join(name);
    assert!(socket("web.net-lan.vhost").exists());
    let text = NETWORKS
        .replace(
            "aliases = [\"store\"]\nnetworks = [\"lan\"]",
            "networks = [\"dmz\"]",
        )
        .replace(
            "ipv4 = \"10.1.2.0/24\"",
            "ipv4 = \"10.1.3.0/24\"\nisolated = true",
        );
    write(&daemon, &(text.clone() + "[[network]]\nname = \"dmz\"\n"));
    let (status, reloaded) = reload(&daemon);
    assert_eq!(
        (status, &reloaded["networks"]),
        (200, &json!(2)),
        "{reloaded}"
    );
    assert_eq!(hosts(&daemon, "lan"), ["web"]);
    assert_eq!(hosts(&daemon, "dmz"), ["db"]);
    // A network that gets its answers anew gets its hosts anew as well.
    write(
        &daemon,
        &(text.replace("isolated = true", "isolated = true\ndns = false")
            + "[[network]]\nname = \"dmz\"\n"),
    );
    assert_eq!(reload(&daemon).0, 200);
    assert!(!daemon.net().network("lan").unwrap().station.dns);
    assert_eq!(hosts(&daemon, "lan"), ["web"]);
    let after = daemon.net().ports("lan");
    assert_eq!(after.len(), 1);
    assert!(after[0].isolated);
    assert_eq!(after[0].mac, before[1].mac);
    assert_eq!(after[0].ipv4.unwrap().octets()[..3], [10, 1, 3]);
    let station = daemon.net().network("lan").unwrap().station;
    assert_eq!(station.ipv4.unwrap().to_string(), "10.1.3.1/24");
    assert!(socket("db.net-dmz.vhost").exists() && !socket("db.net-lan.vhost").exists());
    write(&daemon, "[[vm]]\nname = \"web\"\n");
    assert_eq!(reload(&daemon).0, 200);
    assert!(daemon.net().network("lan").is_none() && daemon.net().network("dmz").is_none());
    assert!(!daemon.worker().networks_stood_still());
    assert_eq!(vmm_sockets(&daemon), ["web.vhost"]);
    // All have their old ports.
    write(&daemon, NETWORKS);
    assert_eq!(reload(&daemon).0, 200);
    assert_eq!(daemon.net().ports("lan"), before);
}

/// What a restart reads: which identifiers and which addresses belong to which names.
fn remembered(daemon: &FakeDaemon) -> [Option<Vec<u8>>; 2] {
    ["cids.json", "networks.json"].map(|name| std::fs::read(daemon.runtime_dir().join(name)).ok())
}

#[test]
fn a_network_that_cannot_be_had_leaves_everything_as_it_was() {
    let daemon = FakeDaemon::with_file(NETWORKS);
    let state = || (daemon.net().ports("lan"), vmm_sockets(&daemon));
    let before = (state(), remembered(&daemon));
    // Another listens where the last of the new ports would.
    let taken = daemon.runtime_dir().join("new.net-dmz.vhost");
    let _listener = std::os::unix::net::UnixListener::bind(&taken).unwrap();
    let more =
        "[[network]]\nname = \"dmz\"\n[[vm]]\nname = \"new\"\nnetworks = [\"lan\", \"dmz\"]\n";
    write(
        &daemon,
        &(NETWORKS.replace("ipv4 = \"10.1.2.0/24\"", "ipv4 = \"10.1.3.0/24\"") + more),
    );
    let (status, problem) = reload(&daemon);
    let detail = problem["detail"].as_str().unwrap();
    assert_eq!(status, 409, "{problem}");
    assert!(
        detail.contains("VM \"new\" in the network \"dmz\": another program listens on"),
        "{detail}"
    );
    std::fs::remove_file(&taken).unwrap();
    assert_eq!((state(), remembered(&daemon)), before);
    assert!(daemon.net().network("dmz").is_none());
    assert_eq!(
        daemon
            .net()
            .network("lan")
            .unwrap()
            .station
            .ipv4
            .unwrap()
            .to_string(),
        "10.1.2.1/24"
    );
    // A VM that was added by hand keeps its network.
    let (status, body) = daemon.request(
        "POST",
        "/v1/vms",
        r#"{"name":"hand","nets":[{"network":"lan"}]}"#,
    );
    assert_eq!(status, 201, "{body}");
    write(&daemon, "[[vm]]\nname = \"web\"\n");
    let (status, problem) = reload(&daemon);
    let detail = problem["detail"].as_str().unwrap();
    assert_eq!(status, 409, "{problem}");
    assert!(
        detail.contains("the configuration, for VM \"hand\": there is no network named \"lan\""),
        "{detail}"
    );
}

#[test]
fn windows_come_and_go_with_a_reload_and_do_not_change() {
    let daemon = FakeDaemon::with_file("[[vm]]\nname = \"web\"\nwindows = \"1x8M\"\n");
    let at = |name: &str| daemon.runtime_dir().join("windows").join(name);
    assert!(at("web.d/0").exists());
    for changed in ["windows = \"2x8M\"", "windows = \"1x8M\"\nqmp = \"/q\"", ""] {
        write(&daemon, &format!("[[vm]]\nname = \"web\"\n{changed}"));
        let (status, problem) = reload(&daemon);
        let detail = problem["detail"].as_str().unwrap();
        assert!(
            status == 409 && detail.contains("cannot change"),
            "{status} {detail}"
        );
    }
    // A reload that fails behind the windows takes them back.
    let lost = "[[vm]]\nname = \"lost\"\nhost = \"/nonexistent/s\"\n";
    let both = format!("[[vm]]\nname = \"new\"\nwindows = \"1x8M\"\n{lost}");
    write(
        &daemon,
        &format!("[[vm]]\nname = \"web\"\nwindows = \"1x8M\"\n{both}"),
    );
    assert_eq!(reload(&daemon).0, 409);
    assert!(at("web.d/0").exists() && !at("new.d/0").exists());
    write(&daemon, "[[vm]]\nname = \"db\"\nwindows = \"1x8M\"");
    assert_eq!(reload(&daemon).0, 200);
    assert!(!at("web.d/0").exists() && at("db.d/0").exists());
}

#[test]
fn a_daemon_without_a_file_says_so_and_changes_nothing() {
    let daemon = FakeDaemon::start(&["name=web"], &[]);
    let before = in_force(&daemon);
    let (status, problem) = reload(&daemon);
    assert_eq!(status, 409, "{problem}");
    assert_eq!(problem["type"], "urn:ringdown:problem:reload-failed");
    let detail = problem["detail"].as_str().unwrap();
    assert!(detail.contains("started without --config"), "{detail}");
    assert_eq!(in_force(&daemon), before);
}

#[test]
fn a_check_says_what_a_reload_would_do_and_does_nothing() {
    let daemon = FakeDaemon::with_file(FIRST);
    let before = in_force(&daemon);
    let check = || reload_with(&daemon, r#"{"check":true}"#);
    write(&daemon, SECOND);
    let (status, would) = check();
    assert_eq!(
        (status, &would["added"]),
        (200, &json!(["red/ci"])),
        "{would}"
    );
    assert_eq!(
        (&would["removed"], &would["rules"]),
        (&json!(["db"]), &json!(1))
    );
    write(
        &daemon,
        &FIRST.replace("name = \"db\"", "name = \"db\"\ncid = 99"),
    );
    let (status, refused) = check();
    let (expected, problem) = reload(&daemon);
    assert_eq!((status, &refused), (expected, &problem));
    assert!(
        refused["detail"].as_str().unwrap().contains("cid"),
        "{refused}"
    );
    write(&daemon, FIRST);
    daemon.offers().refuse("www");
    assert_ne!(check().0, 200);
    assert_eq!(in_force(&daemon), before);
    let events = daemon
        .request("GET", "/v1/events?follow=false&kind=reload", "")
        .1;
    assert_eq!(events.matches("event: reload").count(), 1, "{events}");
}
