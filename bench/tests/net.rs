//! Frames go through the switch as they were sent. Figures are not checked.

#![allow(clippy::unwrap_used)] // What goes wrong here is a failed test.

use std::process::Command;

use bench::perf::results::{Outcome, Run};

/// Every kind of frame and ring, with every byte compared where time allows, and guests that sleep.
const CASES: &[&str] = &[
    "64/3/2/split/checked",
    "1500/1/2/packed/checked",
    "tso/2/2/split/checked",
    "tso/1/4/packed/checked",
    "512/64/4/split",
    "1514/1/2/packed/asleep/checked",
    "64/1/2/split/asleep",
];

#[test]
fn frames_arrive_as_they_were_sent() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_ringdown-bench"));
    command.args(["net", "run", "--json", "--subject", "ringdown"]);
    command.args(["--ringdown", env!("CARGO_BIN_EXE_ringdown-under-test")]);
    command.args(["--rounds", "1", "--window-ms", "60", "--warm-up-ms", "1"]);
    // It says how long nothing may happen at all; a machine with other work may take its time.
    command.args(["--patience-ms", "60000"]);
    for case in CASES {
        command.args(["--case", case]);
    }
    let output = command.output().unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    let run: Run = serde_json::from_slice(&output.stdout).unwrap();
    for case in CASES {
        let point = run.point(case, "ringdown");
        let point = point.unwrap_or_else(|| panic!("{case} was not measured"));
        match &point.rounds[0].outcome {
            // There are no figures unless frames arrived at every port.
            Outcome::Figures(figures) => assert!(figures["mframes_per_s"] > 0.0, "{case}"),
            other => panic!("{case}: {other:?}"),
        }
    }
    // The steps without some of what makes it fast are measured beside the last one.
    let last = CASES.last().unwrap();
    for (step, _) in bench::net::techniques::STEPS {
        let point = run.point(last, step).unwrap();
        assert_eq!(point.trouble(), None, "{step}");
    }
}
