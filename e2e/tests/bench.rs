//! `ringdown bench` with real guests: both kernels, each way, round trips, from guest to guest, and what it says when the policy denies it.
//!
//! How fast anything is, is not the matter here.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::io::{BufRead, BufReader};
use std::process::{Output, Stdio};

use e2e::{DaemonSpec, Kernel, Scene, Shared, SharedGuard};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

static SCENE: Shared<Scene> = Shared::new();

/// The port for which a rule with a single port stands.
const PORT: &str = "5201";

/// `old` may call `new` and `wide` at any port, `new` may call `old` at one. `wide` is for tests that need all of a guest's places.
fn scene() -> SharedGuard<Scene> {
    SCENE.get(|| {
        let daemon = DaemonSpec::new()
            .vm("old", 3)
            .vm("new", 4)
            .vm("wide", 5)
            .arguments(&["--allow", "from=old,to=new,port=*"])
            .arguments(&["--allow", "from=old,to=wide,port=*"])
            .arguments(&["--allow", &format!("from=new,to=old,port={PORT}")]);
        let guests = [
            ("old", Kernel::V6_1),
            ("new", Kernel::V6_12),
            ("wide", Kernel::V6_12),
        ];
        Scene::start(daemon, &guests).unwrap()
    })
}

fn bench(scene: &Scene, words: &str) -> Output {
    let arguments: Vec<&str> = ["bench"].into_iter().chain(words.split(' ')).collect();
    scene.daemon.run(&arguments).unwrap()
}

/// The document of a benchmark that succeeds; nothing else is on either output.
fn document(scene: &Scene, words: &str) -> Value {
    let output = bench(scene, &format!("{words} --json"));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}: {said}");
    assert_eq!(said, "", "{words}");
    let document: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(
        (&document["version"], &document["interrupted"]),
        (&1.into(), &false.into())
    );
    document
}

/// The one measurement of a document, which has moved bytes, and all of them right.
fn measurement(document: &Value, from: &str, to: &str) -> Value {
    let [measurement] = document["measurements"].as_array().unwrap().as_slice() else {
        panic!("expected one measurement: {document}");
    };
    assert_eq!(
        (&measurement["from"], &measurement["to"]),
        (&from.into(), &to.into())
    );
    assert!(measurement["bytes"].as_u64().unwrap() > 0, "{measurement}");
    assert!(
        measurement["bits_per_second"].as_f64().unwrap() > 0.0,
        "{measurement}"
    );
    assert_eq!(measurement["wrong_bytes"], 0);
    measurement.clone()
}

fn check_round_trips(measurement: &Value, message_len: u64) {
    let times = &measurement["round_trips"];
    let us = |key: &str| times[key].as_f64().unwrap();
    assert_eq!(
        measurement["bytes"].as_u64().unwrap(),
        times["count"].as_u64().unwrap() * message_len
    );
    let row = ["min_us", "p1_us", "p50_us", "p99_us", "p99_9_us", "max_us"].map(us);
    assert!(row.is_sorted() && row[0] > 0.0, "{times}");
    assert!(
        (us("min_us")..=us("max_us")).contains(&us("mean_us")),
        "{times}"
    );
}

#[test]
fn between_host_and_guest_every_byte_arrives_each_way() {
    let scene = scene();
    for name in ["old", "new"] {
        for (direction, from, to) in [("to-guest", "host", name), ("from-guest", name, "host")] {
            let words = format!("{name} --direction {direction} --streams 2 --time 500ms --verify");
            let measured = measurement(&document(&scene, &words), from, to);
            assert_eq!(measured["verified"], true);
            assert_eq!(measured["streams"].as_array().unwrap().len(), 2);
        }
    }
}

#[test]
fn round_trips_between_host_and_guest() {
    let scene = scene();
    for name in ["old", "new"] {
        for size in [64, 100_000] {
            let words = format!("{name} --ping --size {size} --time 500ms --verify");
            let measured = measurement(&document(&scene, &words), "host", name);
            check_round_trips(&measured, size);
        }
    }
}

#[test]
fn between_guests_every_byte_arrives_each_way_whoever_calls() {
    let scene = scene();
    for (caller, called, port) in [
        ("old", "new", String::new()),
        ("new", "old", format!(" --port {PORT}")),
    ] {
        for (direction, from, to) in [("to-guest", caller, called), ("from-guest", called, caller)]
        {
            let words = format!(
                "{caller} --to {called} --direction {direction} --streams 3 --time 500ms --verify{port}"
            );
            let measured = measurement(&document(&scene, &words), from, to);
            assert_eq!(measured["verified"], true);
            assert_eq!(measured["streams"].as_array().unwrap().len(), 3);
        }
        let words = format!("{caller} --to {called} --ping --time 500ms --verify{port}");
        let measured = measurement(&document(&scene, &words), caller, called);
        check_round_trips(&measured, 64);
    }
}

#[test]
fn as_many_streams_and_as_long_messages_as_are_allowed() {
    let scene = scene();
    for words in [
        "wide --direction to-guest --streams 128 --size 4K",
        "wide --direction from-guest --streams 128 --size 4K",
        "wide --direction from-guest --streams 4 --size 16M",
        "old --to wide --direction to-guest --streams 2 --size 16M",
    ] {
        let document = document(&scene, &format!("{words} --time 200ms"));
        let streams = document["measurements"][0]["streams"].as_array().unwrap();
        let expected = words
            .split(' ')
            .skip_while(|word| *word != "--streams")
            .nth(1);
        assert_eq!(
            Some(streams.len().to_string().as_str()),
            expected,
            "{words}"
        );
    }
    // All places and all memory are free again, and commands had theirs all the time.
    let output = scene.daemon.run(&["exec", "wide", "--", "true"]).unwrap();
    assert!(output.status.success());
    document(
        &scene,
        "wide --direction from-guest --streams 4 --size 16M --time 100ms",
    );
}

#[test]
fn what_the_policy_denies_is_said_with_the_way_to_allow_it() {
    let scene = scene();
    // Any free port is not the one that the rule allows.
    let output = bench(&scene, "new --to old --time 100ms");
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("--allow from=new,to=old,port=*"), "{said}");
    // Nothing stays behind: the next one that is allowed works.
    let words = format!("new --to old --direction to-guest --time 100ms --port {PORT}");
    measurement(&document(&scene, &words), "new", "old");
}

#[test]
fn a_person_sees_each_second_and_ctrl_c_gives_the_summary_so_far() {
    let scene = scene();
    for words in [
        "bench old --direction from-guest --time 1h",
        "bench old --to new --ping --time 1h",
    ] {
        let arguments: Vec<&str> = words.split(' ').collect();
        let mut child = scene
            .daemon
            .command(&arguments)
            .unwrap()
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        // The title, and a second.
        let title = lines.next().unwrap().unwrap();
        assert!(title.contains("old"), "{title}");
        let second = lines.next().unwrap().unwrap();
        assert!(second.contains(" s "), "{second}");
        let process = Pid::from_raw(child.id().try_into().unwrap()).unwrap();
        kill_process(process, Signal::INT).unwrap();
        let rest: Vec<String> = lines.map(Result::unwrap).collect();
        assert!(rest.iter().any(|line| line.contains("total")), "{rest:?}");
        assert!(
            rest.iter().any(|line| line.contains("interrupted")),
            "{rest:?}"
        );
        assert_eq!(child.wait().unwrap().code(), Some(130));
    }
}

#[test]
fn without_further_words_everything_is_measured() {
    let scene = scene();
    let document = document(&scene, "new --time 200ms");
    let kinds: Vec<&Value> = document["measurements"]
        .as_array()
        .unwrap()
        .iter()
        .map(|measurement| &measurement["kind"])
        .collect();
    assert_eq!(kinds, ["throughput", "throughput", "round_trips"]);
}

#[test]
fn wrong_words_are_refused_before_anything_is_asked() {
    let scene = scene();
    for words in [
        "old --size 0",
        "old --size 17M",
        "old --streams 0",
        "old --streams 129",
        "old --time 2h",
        "old --to old",
        "old --streams 128 --size 1M",
        "old --ping --direction both",
        "old --port 5",
    ] {
        let output = bench(&scene, words);
        assert_eq!(output.status.code(), Some(2), "{words}: {output:?}");
    }
    let output = bench(&scene, "nobody --time 100ms");
    assert_eq!(output.status.code(), Some(1));
}
