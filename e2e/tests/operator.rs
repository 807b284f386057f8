//! The operator: the example of three VMs as its file says, two domains side by side, reload, names.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::os::unix::net::UnixListener;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use e2e::three_vms::{ALLOWED, Call, DENIED, ThreeVms};
use e2e::{Kernel, Running, Shared, SharedGuard, finished};

/// A second domain whose VMs have the names and CIDs of the example's, and the one rule that leads into it.
const RED: &str = r#"
[[vm]]
name = "web"
domain = "red"
cid = 3
vhost-user = "@/red-web.vhost"
host = "@/red-web.sock"

[[vm]]
name = "db"
domain = "red"
cid = 4
vhost-user = "@/red-db.vhost"
host = "@/red-db.sock"

[[rule]]
name = "across"
from = "ci"
to = "red/db"
port = 7000
action = "allow"
"#;

/// A rule that is there only while a test wants it.
const FOR_A_WHILE: &str = r#"
[[rule]]
name = "for-a-while"
from = "web"
to = "db"
port = 5433
action = "allow"
"#;

/// The call that it allows.
const PASSING: Call = Call {
    from: "web",
    to: "db",
    cid: 4,
    port: 5433,
    rule: "for-a-while",
};

/// What a program sees when its circuit is reset while it waits: Linux shows the end of the data, and takes none any more.
const ENDED: &str = "eof fails:EPIPE:send:1";

static SCENE: Shared<ThreeVms> = Shared::new();

/// One test at a time: the policy is shared.
static ALONE: Mutex<()> = Mutex::new(());

fn scene() -> (MutexGuard<'static, ()>, SharedGuard<ThreeVms>) {
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let guests = [("red-web", Kernel::V6_1), ("red-db", Kernel::V6_12)];
    (alone, SCENE.get(|| ThreeVms::start(RED, &guests).unwrap()))
}

#[test]
fn the_example_does_what_its_file_says() {
    let (_alone, scene) = scene();
    // It is there, so that nothing but the rule stands against the call.
    let _listener = UnixListener::bind(scene.scene.daemon.listener_path("web", 6000)).unwrap();
    for call in &ALLOWED {
        let since = scene.audit().unwrap().len();
        scene.call(call).unwrap();
        let line = scene.audited(call, "allowed", since).unwrap();
        assert_eq!(line["rule"]["label"], call.rule, "{line}");
        let answer = scene.policy_test(call.from, call.to, call.port).unwrap();
        assert_eq!(answer["verdict"], "allowed", "{answer}");
        assert_eq!(answer["rule"]["label"], call.rule, "{answer}");
    }
    for call in &DENIED {
        let since = scene.audit().unwrap().len();
        let duration_us = scene.refused(call).unwrap();
        eprintln!(
            "{} to {} at {}: refused after {duration_us} us by the guest's clock",
            call.from, call.to, call.port
        );
        let line = scene.audited(call, "denied", since).unwrap();
        assert_eq!(line["rule"]["label"], call.rule, "{line}");
        let answer = scene.policy_test(call.from, call.to, call.port).unwrap();
        assert_eq!(answer["verdict"], "denied", "{answer}");
        assert_eq!(answer["rule"]["label"], call.rule, "{answer}");
    }
}

#[test]
fn names_are_told_to_those_who_may_call() {
    let (_alone, scene) = scene();
    let ask = |guest: &str, question: &str| {
        let output = scene
            .guest(guest)
            .run(&format!("ringdown-agent {question}"))
            .unwrap();
        (output.code == 0).then(|| output.text())
    };
    let told = |text: &str| Some(text.to_owned());
    assert_eq!(ask("web", "resolve db"), told("4"));
    assert_eq!(ask("ci", "resolve db"), None);
    assert_eq!(ask("ci", "service registry"), told("2 5000"));
    assert_eq!(ask("web", "service registry"), None);
    assert_eq!(ask("web", "whoami"), told("web default 3"));
    assert_eq!(ask("red-web", "whoami"), told("web red 3"));
    assert_eq!(ask("red-web", "resolve db"), None);
    assert!(ask("ci", "resolve red/db").is_some());
    assert_eq!(ask("web", "resolve red/db"), None);
    assert_eq!(ask("ci", "resolve nobody"), None);
}

#[test]
fn two_domains_have_equal_names_and_one_rule_opens_one_path() {
    let (_alone, scene) = scene();
    let refused = |from: &str, cid: u32, port: u32| {
        scene
            .guest(from)
            .probe_to_end(&format!("fails:ECONNRESET:connect:{cid}:{port}"))
            .unwrap();
    };
    // Listeners that must get no call, but for the one path.
    let ears: Vec<Running> = [("red-db", 5432), ("red-db", 7001), ("red-web", 5432)]
        .map(|(guest, port)| {
            scene
                .guest(guest)
                .probe_listening(&format!("listen:{port} accept"))
                .unwrap()
        })
        .into();
    // What is allowed between `web` and `db` is so in their own domain only.
    scene.call(&ALLOWED[0]).unwrap();
    refused("red-web", 4, 5432);
    refused("red-db", 3, 5432);

    let agent = "ringdown-agent resolve red/db";
    let alias: u32 = scene.guest("ci").shell(agent).unwrap().parse().unwrap();
    assert!(![2, 3, 4, 5].contains(&alias), "{alias}");
    let callee = scene
        .guest("red-db")
        .probe_listening("listen:7000 accept drain send:300000 close")
        .unwrap();
    let steps = format!("connect:{alias}:7000 send:200000 shut:wr drain");
    let printed = scene.guest("ci").probe_to_end(&steps).unwrap();
    assert_eq!(printed, "drained 300000");
    assert!(finished(callee).unwrap().ends_with("drained 200000"));

    let callee = scene
        .guest("red-db")
        .probe_listening("listen:7000 accept")
        .unwrap();
    refused("ci", alias, 7001);
    refused("ci", alias, 5432);
    refused("ci", 4, 7000);
    for stranger in ["web", "db", "red-web"] {
        refused(stranger, alias, 7000);
    }
    refused("red-web", 4, 7000);
    for from in ["red-db", "red-web"] {
        let answer = scene
            .policy_test(&from.replace('-', "/"), "ci", 7000)
            .unwrap();
        assert_eq!(answer["verdict"], "denied", "{answer}");
    }
    let answer = scene.policy_test("ci", "red/db", 7000).unwrap();
    assert_eq!(answer["verdict"], "allowed", "{answer}");
    for ear in ears.into_iter().chain([callee]) {
        assert!(!ear.has_ended(), "{:?}", finished(ear));
        ear.kill();
    }
}

#[test]
fn a_reload_changes_the_answer_and_ends_circuits_only_if_asked() {
    let (_alone, scene) = scene();
    let (web, db) = (scene.guest("web"), scene.guest("db"));
    let wait = |guest: &e2e::Guest, file: &str| {
        guest
            .wait_until(&format!("[ -e {file} ]"), Duration::from_secs(60))
            .unwrap();
    };
    // One circuit that is always allowed lives through all of it.
    let far = db
        .probe_listening("listen:5432 accept recv:1000 recv:1000 eof")
        .unwrap();
    let near = web
        .probe("connect:4:5432 send:1000 touch:/tmp/stands wait:/tmp/over send:1000 close")
        .unwrap();
    wait(web, "/tmp/stands");

    scene.refused(&PASSING).unwrap();
    scene.reload(FOR_A_WHILE, &[]).unwrap();
    let since = scene.audit().unwrap().len();
    scene.call(&PASSING).unwrap();
    let line = scene.audited(&PASSING, "allowed", since).unwrap();
    assert_eq!(line["rule"]["label"], PASSING.rule, "{line}");

    // What cannot be read changes nothing, and is reported with its place.
    let error = scene.reload("[[rule]]\nform = \"web\"\n", &[]).unwrap_err();
    let words = format!("{error:#}");
    assert!(words.contains("ringdown.toml"), "{words}");
    assert!(words.contains("from"), "the nearest key: {words}");
    scene.call(&PASSING).unwrap();

    // Without more, a circuit outlives its rule.
    let callee = db
        .probe_listening("listen:5433 accept recv:1000 recv:1000 eof")
        .unwrap();
    let caller = web
        .probe("connect:4:5433 send:1000 touch:/tmp/held wait:/tmp/go send:1000 close")
        .unwrap();
    wait(web, "/tmp/held");
    scene.reload("", &[]).unwrap();
    scene.refused(&PASSING).unwrap();
    web.shell("touch /tmp/go").unwrap();
    finished(caller).unwrap();
    finished(callee).unwrap();

    // Enforced, it ends, and what is allowed does not.
    scene.reload(FOR_A_WHILE, &[]).unwrap();
    let callee = db
        .probe_listening(&format!("listen:5433 accept recv:1000 {ENDED}"))
        .unwrap();
    let caller = web
        .probe(&format!(
            "connect:4:5433 send:1000 touch:/tmp/again {ENDED}"
        ))
        .unwrap();
    wait(web, "/tmp/again");
    scene.reload("", &["--enforce-existing"]).unwrap();
    finished(caller).unwrap();
    finished(callee).unwrap();

    assert!(!near.has_ended(), "{:?}", finished(near));
    web.shell("touch /tmp/over").unwrap();
    finished(near).unwrap();
    finished(far).unwrap();
}
