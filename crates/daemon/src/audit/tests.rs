use std::net::IpAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use device::{DecisionCallee, DecisionCaller};
use hostside::audit::{AuditDecision, AuditRecord, AuditRule, MAX_TEXT_LEN};

use super::*;

fn call(vm: &str, decision: AuditDecision) -> AuditRecord {
    AuditRecord {
        decision,
        from: DecisionCaller::Vm {
            domain: "default".to_owned(),
            vm: vm.to_owned(),
            cid: 3,
            port: 1024,
        },
        to: DecisionCallee::UnknownCid { cid: 9, port: 22 },
        redirected_to: None,
        rule: None,
        reason: Some("no VM has this context identifier".into()),
    }
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'), "{text}");
    let parse = |line: &str| serde_json::from_str(line).expect(line);
    text.lines()
        .filter(|line| !line.is_empty())
        .map(parse)
        .collect()
}

/// The sums of what was written and what was held back, of one VM.
fn counted(lines: &[Value], vm: &str) -> (u64, u64) {
    let of_vm = || lines.iter().filter(|line| line["from"]["vm"] == vm);
    let held_back = of_vm()
        .flat_map(|line| ["allowed", "denied", "failed"].map(|word| &line["held_back"][word]))
        .filter_map(Value::as_u64);
    let written = of_vm().filter(|line| line["decision"].is_string());
    (written.count() as u64, held_back.sum())
}

fn wait_for(condition: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(20);
    while !condition() {
        assert!(Instant::now() < deadline, "it did not happen in good time");
        std::thread::yield_now();
    }
}

#[test]
fn a_decision_is_a_line_with_everything_that_is_known() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("audit.log");
    let (audit, writer) = Audit::start(Some(&path)).unwrap();
    audit.record(AuditRecord {
        decision: AuditDecision::Allowed,
        to: DecisionCallee::Vm {
            domain: "blue".to_owned(),
            vm: "db".to_owned(),
            cid: 4,
            port: 5432,
        },
        redirected_to: Some(DecisionCallee::Service {
            domain: "blue".to_owned(),
            service: "db".to_owned(),
            port: 5432,
        }),
        rule: Some(AuditRule {
            index: 7,
            label: "to the \"database\"".to_owned(),
        }),
        reason: None,
        ..call("web", AuditDecision::Allowed)
    });
    audit.record(AuditRecord {
        from: DecisionCaller::Program {
            uid: 1000,
            pid: Some(77),
        },
        to: DecisionCallee::Listener { listener: 6000 },
        ..call("web", AuditDecision::Failed)
    });
    audit.record(AuditRecord {
        from: DecisionCaller::Published {
            published: "www".to_owned(),
            peer: Some("192.0.2.1:5".to_owned()),
        },
        to: DecisionCallee::Address {
            name: Some("x".repeat(MAX_TEXT_LEN + 1)),
            address: Some(IpAddr::from([192, 0, 2, 7])),
            port: 443,
        },
        ..call("web", AuditDecision::Denied)
    });
    drop(writer);
    let mut found = lines(&path);
    for line in &mut found {
        let time = line["time"].take();
        let time = time.as_str().unwrap();
        assert!(time.parse::<jiff::Timestamp>().is_ok(), "{time}");
        assert_eq!(time.len(), "2026-11-21T01:02:03.456789Z".len(), "{time}");
    }
    let reason = "no VM has this context identifier";
    let expected = [
        json!({
            "time": null, "decision": "allowed",
            "from": {"domain": "default", "vm": "web", "cid": 3, "port": 1024},
            "to": {"domain": "blue", "vm": "db", "cid": 4, "port": 5432},
            "redirected_to": {"domain": "blue", "service": "db", "port": 5432},
            "rule": {"index": 7, "label": "to the \"database\""}, "reason": null,
        }),
        json!({
            "time": null, "decision": "failed", "from": {"uid": 1000, "pid": 77}, "to": {"listener": 6000},
            "rule": null, "reason": reason,
        }),
        json!({
            "time": null, "decision": "denied", "from": {"published": "www", "peer": "192.0.2.1:5"},
            "to": {"name": "x".repeat(MAX_TEXT_LEN), "address": "192.0.2.7", "port": 443},
            "rule": null, "reason": reason,
        }),
    ];
    assert_eq!(found, expected);
}

#[test]
fn who_calls_too_often_is_counted_and_hides_nobody() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("audit.log");
    let (audit, writer) = Audit::start(Some(&path)).unwrap();
    let calls = 50_000;
    for index in 0..calls {
        let decision = match index % 3 {
            0 => AuditDecision::Allowed,
            1 => AuditDecision::Denied,
            _ => AuditDecision::Failed,
        };
        audit.record(call("noisy", decision));
    }
    audit.record(call("quiet", AuditDecision::Denied));
    // The summary comes by itself, while the daemon runs.
    wait_for(|| counted(&lines_if_whole(&path), "noisy").1 > 0);
    drop(writer);
    let found = lines(&path);
    let (written, held_back) = counted(&found, "noisy");
    assert_eq!(written + held_back, calls);
    assert!(written >= u64::from(RECORDS_PER_SECOND), "{written}");
    assert!(held_back > 0);
    assert_eq!(counted(&found, "quiet"), (1, 0));
}

/// The lines of a file that is being written.
fn lines_if_whole(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect()
}

#[test]
fn so_many_sources_are_told_apart_and_the_rest_is_counted_together() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("audit.log");
    let (audit, writer) = Audit::start(Some(&path)).unwrap();
    let total = (MAX_SOURCES as u64 + 1000) * 2;
    for index in 0..MAX_SOURCES + 1000 {
        for _ in 0..2 {
            audit.record(call(&format!("vm{index}"), AuditDecision::Denied));
        }
    }
    assert!(audit.sources() <= MAX_SOURCES + 1);
    drop(writer);
    let found = lines(&path);
    let written = found.iter().filter(|line| line["decision"].is_string());
    let held_back: u64 = found
        .iter()
        .filter_map(|line| line["held_back"]["denied"].as_u64())
        .sum();
    assert_eq!(written.count() as u64 + held_back, total);
}

#[test]
fn a_file_that_was_moved_away_is_left_when_it_is_asked_for() {
    let directory = tempfile::tempdir().unwrap();
    let (path, old) = (
        directory.path().join("audit.log"),
        directory.path().join("audit.log.1"),
    );
    let (audit, writer) = Audit::start(Some(&path)).unwrap();
    audit.record(call("first", AuditDecision::Denied));
    wait_for(|| lines_if_whole(&path).len() == 1);
    std::fs::rename(&path, &old).unwrap();
    audit.rotate().unwrap();
    audit.record(call("second", AuditDecision::Denied));
    drop(writer);
    assert_eq!(counted(&lines(&old), "first"), (1, 0));
    assert_eq!(counted(&lines(&path), "second"), (1, 0));
    assert_eq!(lines(&path).len(), 1);
    let mode = std::os::unix::fs::MetadataExt::mode(&std::fs::metadata(&path).unwrap());
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn another_file_that_cannot_be_opened_leaves_the_old_one_in_use() {
    let directory = tempfile::tempdir().unwrap();
    let (path, other) = (
        directory.path().join("audit.log"),
        directory.path().join("other.log"),
    );
    assert!(Audit::start(Some(&directory.path().join("none/audit.log"))).is_err());
    let (audit, writer) = Audit::start(Some(&path)).unwrap();
    assert!(audit.move_to(Some(directory.path())).is_err());
    audit.record(call("first", AuditDecision::Denied));
    audit.move_to(Some(&other)).unwrap();
    audit.record(call("second", AuditDecision::Denied));
    audit.move_to(None).unwrap();
    audit.record(call("third", AuditDecision::Denied));
    drop(writer);
    assert_eq!(counted(&lines(&path), "first"), (1, 0));
    assert_eq!(counted(&lines(&other), "second"), (1, 0));
    assert_eq!(lines(&path).len() + lines(&other).len(), 2);
    // After the end no thread writes, waits or panics.
    audit.record(call("fourth", AuditDecision::Denied));
    assert!(audit.rotate().is_err());
}

#[test]
fn what_a_full_disk_does_not_take_is_counted_and_told_when_there_is_room() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("audit.log");
    // `/dev/full` says what a full disk says.
    std::os::unix::fs::symlink("/dev/full", &path).unwrap();
    let (audit, writer) = Audit::start(Some(&path)).unwrap();
    for _ in 0..5 {
        audit.record(call("web", AuditDecision::Denied));
    }
    // Commands keep their order behind the records, so the records have been tried when this returns.
    std::fs::remove_file(&path).unwrap();
    audit.rotate().unwrap();
    audit.record(call("web", AuditDecision::Denied));
    drop(writer);
    let found = lines(&path);
    let unwritten: u64 = found
        .iter()
        .filter_map(|line| line["unwritten"].as_u64())
        .sum();
    let (written, held_back) = counted(&found, "web");
    assert_eq!((written, held_back, unwritten), (1, 0, 5));
}

/// A file that a full disk or the end of a machine has left with half a line.
#[test]
fn half_a_line_does_not_take_the_next_one_with_it() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("audit.log");
    let whole = |count| {
        let text = std::fs::read_to_string(&path).unwrap();
        let parsed = text
            .lines()
            .filter(|line| serde_json::from_str::<Value>(line).is_ok());
        parsed.count() == count
    };
    std::fs::write(&path, "{\"time\": \"2026-").unwrap();
    let (audit, writer) = Audit::start(Some(&path)).unwrap();
    audit.record(call("web", AuditDecision::Denied));
    wait_for(|| whole(1));
    // Opened again, the same file has half a line again.
    let mut file = std::fs::File::options().append(true).open(&path).unwrap();
    std::io::Write::write_all(&mut file, b"{\"time\":").unwrap();
    audit.rotate().unwrap();
    audit.record(call("db", AuditDecision::Denied));
    wait_for(|| whole(2));
    // Where the last line is whole, none is empty.
    audit.rotate().unwrap();
    audit.record(call("mail", AuditDecision::Denied));
    drop(writer);
    assert!(whole(3));
    let text = std::fs::read_to_string(&path).unwrap();
    assert_eq!((text.lines().count(), text.contains("\n\n")), (5, false));
}

#[test]
fn a_pipe_that_nobody_reads_stops_nobody() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("pipe");
    rustix::fs::mkfifoat(
        rustix::fs::CWD,
        &path,
        rustix::fs::Mode::from_raw_mode(0o600),
    )
    .unwrap();
    assert!(Audit::start(Some(&path)).is_err());
    let _reader = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let (audit, writer) = Audit::start(Some(&path)).unwrap();
    // More than a pipe holds.
    for vm in 0..20 {
        for _ in 0..RECORDS_PER_SECOND {
            audit.record(call(&format!("vm{vm}"), AuditDecision::Denied));
        }
    }
    drop(writer);
}
