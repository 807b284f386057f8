//! The bench itself: every kind of case works, and its results can be kept and shown. Figures are not checked.

#![allow(clippy::unwrap_used)] // What goes wrong here is a failed test.

use std::path::Path;
use std::process::Command;

use bench::perf::results::{Outcome, Run};

/// Every kind of case, as small as can be; throughput with every byte compared, where that can be.
const CASES: &[&str] = &[
    "memcpy/16K",
    "eventfd/apart",
    "eventfd/together",
    "g2h/64K/1/checked",
    "g2h/64K/2/checked/pages",
    "h2g/64K/1/checked",
    "h2g/4K/4/checked",
    "g2g/128K/1/checked",
    "g2g/64/4/checked/pages",
    "g2h/4K/2",
    "h2g/64K/1/cheap",
    "g2h/64K/1/cheap",
    "g2g/4K/1",
    "pingpong/h-g/64",
    "pingpong/g-g/4K",
    "connect/g2h/4",
    "connect/h2g/1",
    "idle/g2h/50",
    "idle/g2g/50",
    "quiet/2",
    "vms/3",
    "circuits/80",
    "noisy",
];

fn bench(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_ringdown-bench"))
        .args(arguments)
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?}: {errors}");
    String::from_utf8(output.stdout).unwrap()
}

fn measure(cases: &[&str], directory: &Path) -> Run {
    let directory = directory.display().to_string();
    let mut arguments = vec![
        "run",
        "--json",
        "--no-peer",
        "--ringdown",
        env!("CARGO_BIN_EXE_ringdown-under-test"),
        "--output",
        &directory,
        "--rounds",
        "1",
        "--window-ms",
        "20",
        "--warm-up-ms",
        "0",
        "--patience-ms",
        "60000",
    ];
    for case in cases {
        arguments.extend(["--case", case]);
    }
    serde_json::from_str(&bench(&arguments)).unwrap()
}

#[test]
fn every_kind_of_case_comes_to_figures_that_can_be_shown() {
    let directory = tempfile::tempdir().unwrap();
    let run = measure(CASES, directory.path());
    for case in CASES {
        let points: Vec<_> = run.points.iter().filter(|p| p.case == *case).collect();
        assert!(!points.is_empty(), "{case}");
        for point in points {
            for round in &point.rounds {
                let Outcome::Figures(figures) = &round.outcome else {
                    panic!("{case} {}: {:?}", point.subject, round.outcome);
                };
                assert!(!figures.is_empty(), "{case} {}", point.subject);
            }
        }
        let machine = case.starts_with("memcpy") || case.starts_with("eventfd");
        let subject = if machine { "machine" } else { "ringdown" };
        assert!(run.point(case, subject).is_some(), "{case}");
    }
    // Only what can be counted is checked: that circuits were made, and bytes moved.
    assert_eq!(
        run.median("idle/g2h/50", "ringdown", "circuits"),
        Some(50.0)
    );
    assert_eq!(
        run.median("idle/g2g/50", "ringdown", "circuits"),
        Some(50.0)
    );
    for case in [
        "g2h/64K/1/checked",
        "h2g/64K/1/checked",
        "g2g/128K/1/checked",
    ] {
        let rate = run.median(case, "ringdown", "gbit_per_s").unwrap();
        assert!(rate > 0.0, "{case}");
    }
    for captured in ["ringdown captured", "ringdown captured in part"] {
        let packets = run.median("g2g/4K/1", captured, "captured_packets");
        assert!(packets.unwrap() > 0.0, "{captured}");
    }
    reports_can_be_made(&run, directory.path());
}

fn reports_can_be_made(run: &Run, directory: &Path) {
    let kept = directory.join(run.environment.directory_name());
    for name in [
        "run.json",
        "report.md",
        "report.html",
        "g2h.svg",
        "pingpong.svg",
    ] {
        let text = std::fs::read_to_string(kept.join(name)).unwrap();
        assert!(!text.is_empty(), "{name}");
        let home = directory.display().to_string();
        assert!(!text.contains(&home), "{name} names a path");
    }
    let json = kept.join("run.json").display().to_string();
    let report = bench(&["report", &json]);
    for title in [
        "## Goals",
        "## Guest to host",
        "## Ping-pong",
        "## Idle circuits",
        "## Many VMs",
    ] {
        assert!(report.contains(title), "{title} is missing in {report}");
    }
    assert!(!report.contains("## What did not work"), "{report}");
    let readme = bench(&["report", "--short", &json]);
    assert!(readme.contains("| Ringdown |"), "{readme}");
    let html = std::fs::read_to_string(kept.join("report.html")).unwrap();
    assert!(html.contains("<svg") && html.ends_with("</html>\n"));
}

#[test]
fn a_program_that_does_not_start_is_a_result_and_no_end() {
    let text = bench(&[
        "run",
        "--json",
        "--no-peer",
        "--ringdown",
        "/bin/false",
        "--rounds",
        "1",
        "--window-ms",
        "1",
        "--case",
        "g2h/4K/1",
    ]);
    let run: Run = serde_json::from_str(&text).unwrap();
    let (word, reason) = run
        .point("g2h/4K/1", "ringdown")
        .unwrap()
        .trouble()
        .unwrap();
    assert_eq!(word, "fails");
    assert!(reason.contains("it ended with"), "{reason}");
    assert_eq!(run.point("g2h/4K/1", "af_unix").unwrap().trouble(), None);
}
