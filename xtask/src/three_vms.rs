//! The example of three VMs, shown with real guests.

use anyhow::{Result, ensure};
use e2e::ShowLogs;
use e2e::three_vms::{ALLOWED, ANSWER_BYTES, Call, DENIED, QUESTION_BYTES, ThreeVms};

use crate::progress::Progress;

/// Runs the example.
///
/// # Errors
/// The first thing that is not as the file says.
pub fn run() -> Result<()> {
    let mut progress = Progress::new("three-vms", 4);
    progress.step(
        "boot web, db and ci beside one daemon that has read examples/three-vms/ringdown.toml",
    );
    let example = ThreeVms::start("", &[])?;
    for guest in &example.scene.guests {
        progress.note(format!("{}: Linux {}", guest.name(), guest.release()));
    }
    let result = show(&example, &mut progress);
    if result.is_err() {
        example.show_logs();
    }
    result?;
    progress.done("everything is as the file says");
    Ok(())
}

fn show(example: &ThreeVms, progress: &mut Progress) -> Result<()> {
    progress.step(format!(
        "what is allowed: {} MiB there and {} MiB back, with checksums",
        QUESTION_BYTES >> 20,
        ANSWER_BYTES >> 20
    ));
    for call in &ALLOWED {
        let digest = example.call(call)?;
        progress.note(format!("{}: sha256 {}…", words(call), &digest[..16]));
        told(example, call, "allowed", progress)?;
    }
    progress.step("what is denied");
    for call in &DENIED {
        let duration_us = example.refused(call)?;
        progress.note(format!(
            "{}: reset after {:.1} ms by the guest's clock",
            words(call),
            duration_us as f64 / 1000.0
        ));
        told(example, call, "denied", progress)?;
    }
    progress.step("names: ringdown-agent resolve db");
    let cid = example.guest("web").shell("ringdown-agent resolve db")?;
    progress.note(format!("in web: {cid}"));
    let output = example.guest("ci").run("ringdown-agent resolve db")?;
    ensure!(output.code != 0, "ci, which may not call db, gets its name");
    progress.note(format!("in ci: {}", output.error_text()));
    Ok(())
}

/// Shows what the audit and `ringdown policy test` say about a call.
fn told(example: &ThreeVms, call: &Call, decision: &str, progress: &Progress) -> Result<()> {
    let line = example.audited(call, decision, 0)?;
    progress.note(format!("  audit: {line}"));
    let answer = example.policy_test(call.from, call.to, call.port)?;
    ensure!(
        answer["verdict"] == decision && answer["rule"]["label"] == call.rule,
        "policy test says {answer}"
    );
    Ok(())
}

fn words(call: &Call) -> String {
    format!("{} to {}, port {}", call.from, call.to, call.port)
}
