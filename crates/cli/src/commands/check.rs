//! `ringdown check`, and what it prints.

use std::path::Path;

use super::{print, print_named};
use crate::arguments::Check;
use crate::check::{Finding, Severity, everything};
use crate::failure::{FAILURE, Failure};

/// Checks everything, and returns the exit code.
pub fn run(runtime_dir: Option<&Path>, options: &Check) -> Result<u8, Failure> {
    let findings = everything(options.config.as_deref(), runtime_dir);
    match options.json {
        true => print_named("findings", &findings)?,
        false => print(&(words(&findings) + &summary(&findings)))?,
    }
    let has_errors = findings
        .iter()
        .any(|found| found.severity == Severity::Error);
    Ok(if has_errors { FAILURE } else { 0 })
}

/// How many there are of each kind, and so whether one has to look above.
fn summary(findings: &[Finding]) -> String {
    let count = |severity| {
        let found = findings.iter().filter(|found| found.severity == severity);
        found.count()
    };
    let of = |count: usize, word: &str| match count {
        1 => format!("1 {word}"),
        _ => format!("{count} {word}s"),
    };
    let (errors, warnings) = (count(Severity::Error), count(Severity::Warning));
    match errors + warnings {
        0 => "all is fine\n".to_owned(),
        _ => format!("{}, {}\n", of(errors, "error"), of(warnings, "warning")),
    }
}

fn words(findings: &[Finding]) -> String {
    let mut text = String::new();
    for finding in findings {
        let word = match finding.severity {
            Severity::Fine => "fine",
            Severity::Warning => "warning",
            Severity::Error => "ERROR",
        };
        text.push_str(&format!(
            "{word:<8}{:<16}{}\n",
            finding.about, finding.found
        ));
        if let Some(remedy) = &finding.remedy {
            text.push_str(&format!("{:24}remedy: {remedy}\n", ""));
        }
    }
    text
}
