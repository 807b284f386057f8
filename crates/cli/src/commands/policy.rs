//! `ringdown policy`: which rule decides about a call, and which rules cannot be meant.

use std::path::Path;

use daemon::api::types::{PolicyAnswer, PolicyReport, PolicyVerdict};
use daemon::config::{Cids, Plan, default_runtime_dir, parse_port, read_file};
use daemon::policy::{AskError, Rulebook};

use super::reload::count;
use super::{print, print_json, print_named};
use crate::arguments::{PolicyCheck, PolicyTest};
use crate::client::Client;
use crate::failure::{FAILURE, Failure};

/// The exit code when the call would be denied.
const DENIED: u8 = 3;

/// `ringdown policy test`.
///
/// # Errors
/// [`Failure`] when there is no answer.
pub fn test(client: &Client, options: &PolicyTest) -> Result<u8, Failure> {
    let port = parse_port(&options.port)?;
    let answer = match &options.config {
        Some(path) => rulebook(path)?.ask(&options.from, &options.to, port)?,
        None => client.test_policy(&options.from, &options.to, port)?,
    };
    match options.json {
        true => print_named("decision", &answer)?,
        false => print(&words(&answer))?,
    }
    Ok(match answer.verdict {
        PolicyVerdict::Denied => DENIED,
        _ => 0,
    })
}

/// `ringdown policy check`.
///
/// # Errors
/// [`Failure`] when the policy cannot be looked at.
pub fn check(client: &Client, options: &PolicyCheck) -> Result<u8, Failure> {
    let report = match &options.config {
        Some(path) => rulebook(path)?.report(),
        None => client.check_policy()?,
    };
    match options.json {
        true => print_json(&report)?,
        false => print(&findings(&report))?,
    }
    Ok(if report.findings.is_empty() {
        0
    } else {
        FAILURE
    })
}

/// What a file says, without a daemon.
fn rulebook(path: &Path) -> Result<Rulebook, Failure> {
    let config = read_file(path)?;
    let runtime_dir = config.runtime_dir.clone();
    let runtime_dir = std::path::absolute(runtime_dir.unwrap_or_else(default_runtime_dir));
    let plan = Plan::new(runtime_dir.map_err(Failure::failed)?, Cids::default());
    Ok(Rulebook::new(plan, &config)?)
}

impl From<AskError> for Failure {
    fn from(error: AskError) -> Failure {
        match error {
            AskError::Input(_) | AskError::NotThroughUs { .. } | AskError::NoAddress(_) => {
                Failure::usage(error)
            }
            _ => Failure::failed(error),
        }
    }
}

fn words(answer: &PolicyAnswer) -> String {
    let mut text = format!(
        "{}: {} to {}, port {}",
        answer.verdict, answer.from, answer.to, answer.port
    );
    if let Some(redirect) = &answer.redirect {
        text.push_str(&format!(", goes to {redirect}"));
    }
    text.push_str(&format!("\n  because {}\n", answer.why));
    for note in &answer.notes {
        text.push_str(&format!("  note: {note}\n"));
    }
    for passed in &answer.passed_over {
        text.push_str(&format!("  {passed}\n"));
    }
    text
}

fn findings(report: &PolicyReport) -> String {
    let mut text = String::new();
    for finding in &report.findings {
        text.push_str(&format!("{finding}\n"));
    }
    text.push_str(&format!(
        "checked {}: {}\n",
        count(report.rules, "rule"),
        match report.findings.len() {
            0 => "nothing found".to_owned(),
            number => count(number, "finding"),
        }
    ));
    text
}
