//! `ringdown policy`: the rules in force, which one decides about a call, and which cannot be meant.

use std::path::Path;

use api::{PolicyAnswer, PolicyReport, PolicyVerdict, RuleInfo};
use config::directories::default_runtime_dir;
use config::input::InputError;
use config::{Cids, Plan, parse_port, read_file};
use daemon::policy::{AskError, Rulebook};
use wire::agent::forward::Place;

use super::reload::count;
use super::table::{row, table};
use super::{print, print_json, print_named};
use crate::arguments::{PolicyCheck, PolicyShow, PolicyTest};
use crate::client::{Called, Client};
use crate::failure::{FAILURE, Failure};

/// The exit code when the call would be denied.
const DENIED: u8 = 3;

/// `ringdown policy test`.
pub fn test(client: &Client, options: &PolicyTest) -> Result<u8, Failure> {
    let called = called(&options.from, options.port.as_deref())?;
    let answer = match &options.config {
        Some(path) => {
            let port = match called {
                Called::Own => None,
                Called::Port(port) => Some(port),
                Called::Place(_) => Some(wire::agent::PORT),
            };
            rulebook(path)?.ask_at(&options.from, &options.to, port)?
        }
        None => client.test_policy(&options.from, &options.to, called)?,
    };
    match options.json {
        true => print_named("decision", &answer)?,
        false => print(&words(&answer, options.port.as_deref()))?,
    }
    Ok(match answer.verdict {
        PolicyVerdict::Denied => DENIED,
        _ => 0,
    })
}

/// `ringdown policy check`.
///
/// # Errors
/// [`Failure`] when the policy cannot be read.
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

/// `ringdown policy show`.
///
/// # Errors
/// [`Failure`] when the daemon does not say.
pub fn show(client: &Client, options: &PolicyShow) -> Result<(), Failure> {
    let listed = client.rules()?;
    if options.json {
        return print_json(&listed);
    }
    if listed.rules.is_empty() {
        eprintln!("no rules");
    } else {
        print(&rules_in_words(&listed.rules))?;
    }
    if listed.more > 0 {
        eprintln!("{} more rules are not listed", listed.more);
    }
    Ok(())
}

fn rules_in_words(rules: &[RuleInfo]) -> String {
    let mut rows = vec![row(["", "RULE", "FROM", "TO", "PORT", "ACTION", "LIMITS"])];
    for rule in rules {
        let action = match &rule.redirect {
            Some(to) => format!("redirected to {to}"),
            None => rule.verdict.word().to_owned(),
        };
        let limits = rule.limits.iter();
        let limits: Vec<String> = limits
            .map(|(name, value)| format!("{name}={value}"))
            .collect();
        rows.push(vec![
            (rule.index + 1).to_string(),
            rule.label.clone(),
            rule.from.join(","),
            rule.to.join(","),
            rule.ports.join(","),
            action,
            limits.join(" "),
        ]);
    }
    table(&rows)
}

/// What is called: a service's own port where nothing is given.
///
/// # Errors
/// [`InputError`] when it is no port, or when another than the host is to call the agent for a published port.
pub(super) fn called<'a>(from: &str, port: Option<&'a str>) -> Result<Called<'a>, InputError> {
    let Some(text) = port else {
        return Ok(Called::Own);
    };
    match Place::parse(text) {
        Some(_) if from == "host" => Ok(Called::Place(text)),
        Some(_) => Err(InputError::Malformed {
            expected: "a port that this caller could call",
            found: text.to_owned(),
            remedy: "ask with \"host\" as the caller: published ports alone lead there".to_owned(),
        }),
        None => Ok(Called::Port(parse_port(text)?)),
    }
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
            AskError::Input(_)
            | AskError::NotThroughUs { .. }
            | AskError::NoAddress(_)
            | AskError::NoPort => Failure::usage(error),
            _ => Failure::failed(error),
        }
    }
}

/// The port of a question, as it was asked about.
pub(super) fn port_words(port: u32, asked: Option<&str>) -> String {
    match asked.filter(|asked| Place::parse(asked).is_some()) {
        Some(place) => format!("{place} in the guest, by the agent (port {port})"),
        None => format!("port {port}"),
    }
}

fn words(answer: &PolicyAnswer, asked: Option<&str>) -> String {
    let mut text = format!(
        "{}: {} to {}, {}",
        answer.verdict,
        answer.from,
        answer.to,
        port_words(answer.port, asked)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_are_listed_as_they_are_asked() {
        let rules = serde_json::json!([
            {"index": 0, "label": "db", "place": "a.toml:3", "from": ["@web", "ci"], "to": ["db"], "ports": ["5432"], "verdict": "allowed", "limits": {"circuits": 9}},
            {"index": 1, "label": "a.toml:9", "place": "a.toml:9", "from": ["any"], "to": ["host"], "ports": ["*"], "verdict": "redirected", "redirect": "service:x"},
        ]);
        let rules: Vec<RuleInfo> = serde_json::from_value(rules).unwrap();
        let lines = [
            "   RULE      FROM     TO    PORT  ACTION                   LIMITS",
            "1  db        @web,ci  db    5432  allowed                  circuits=9",
            "2  a.toml:9  any      host  *     redirected to service:x",
        ];
        let expected = lines.map(|line| format!("{line}\n")).concat();
        assert_eq!(rules_in_words(&rules), expected);
    }

    #[test]
    fn a_place_in_a_guest_is_asked_about_by_the_host_alone() {
        let called = |from, text| called(from, Some(text));
        for text in ["tcp:80", "tcp:127.0.0.1:80", "unix:/run/web.sock"] {
            assert_eq!(called("host", text), Ok(Called::Place(text)));
        }
        assert_eq!(called("host", "1007"), Ok(Called::Port(1007)));
        assert_eq!(called("web", "80"), Ok(Called::Port(80)));
        assert_eq!(
            port_words(1007, Some("tcp:80")),
            "tcp:80 in the guest, by the agent (port 1007)"
        );
        assert_eq!(port_words(1007, Some("1007")), "port 1007");
        assert_eq!(port_words(5000, None), "port 5000");
        let error = called("web", "tcp:80").unwrap_err().to_string();
        assert!(error.contains("published ports alone"), "{error}");
        assert!(called("host", "udp:53").is_err());
    }
}
