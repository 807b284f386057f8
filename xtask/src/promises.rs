//! What the documents promise, and the test that fails where a promise is broken.
//!
//! `docs/promises/PAGE.toml` goes with `docs/PAGE.md`. Each piece of the page's text (a paragraph, an item of a list, a row of a table) is
//! quoted there: as a promise with the tests that hold it, or among what only explains. So a promise that is added without a test, a test that
//! is renamed or ignored, and a promise that was reworded without its entry are each an error.

mod page;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use e2e::images::project_root;
use serde::Deserialize;

use crate::suites::{self, Suite};
use page::{Piece, pieces};

/// Pages of which every promise has to be held by a test.
const PAGES: [&str; 5] = ["threat-model", "service", "services", "network", "cuts"];

/// What an entry's test begins with when it is a row of the table of attacks, and when it is all rows of a group.
const ATTACK: &str = "attack ";
const ATTACKS: &str = "attacks ";

/// What an entry's test ends with when it is every test of a module.
const EVERY: &str = "::*";

/// What is said of a page.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entries {
    /// Words of the page that promise nothing that a test could hold.
    #[serde(default)]
    explains: Vec<String>,
    #[serde(default)]
    promise: Vec<Promise>,
}

/// A promise.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Promise {
    /// Words of the page.
    says: String,
    /// `PACKAGE::TEST`, `PACKAGE/SUITE::TEST`, either with `::*` for all tests of a module, `attack NAME` or `attacks GROUP`.
    tests: Vec<String>,
}

/// Checks all pages.
///
/// # Errors
/// When the tests do not build, or a page and its entries disagree.
pub fn run() -> Result<()> {
    let root = project_root();
    let mut known = tests()?;
    known.extend(attacks(&root)?);
    let mut findings = Vec::new();
    let (mut promises, mut named) = (0, BTreeSet::new());
    for name in PAGES {
        let page = read(&root.join(format!("docs/{name}.md")))?;
        let entries: Entries =
            toml::from_str(&read(&root.join(format!("docs/promises/{name}.toml")))?)
                .with_context(|| format!("docs/promises/{name}.toml"))?;
        let found = check(&pieces(&page), &entries, &known);
        findings.extend(found.into_iter().map(|words| format!("{name}: {words}")));
        promises += entries.promise.len();
        named.extend(
            entries
                .promise
                .into_iter()
                .flat_map(|promise| promise.tests),
        );
    }
    for finding in &findings {
        eprintln!("[promises] {finding}");
    }
    ensure!(findings.is_empty(), "{} findings", findings.len());
    eprintln!(
        "[promises] {promises} promises of {} pages, held by {} tests or groups of tests",
        PAGES.len(),
        named.len()
    );
    Ok(())
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

/// What is wrong between a page and its entries.
fn check(page: &[Piece], entries: &Entries, known: &BTreeSet<String>) -> Vec<String> {
    let mut findings = Vec::new();
    let quotes = entries.promise.iter().map(|promise| &promise.says);
    let quotes: Vec<String> = quotes
        .chain(&entries.explains)
        .map(|says| page::folded(says))
        .collect();
    for quote in &quotes {
        if !page.iter().any(|piece| piece.text.contains(quote)) {
            findings.push(format!("the page does not say {quote:?}"));
        }
    }
    for piece in page {
        if !quotes.iter().any(|quote| piece.text.contains(quote)) {
            findings.push(format!(
                "line {}: no entry quotes {:?}",
                piece.line, piece.text
            ));
        }
    }
    for promise in &entries.promise {
        if promise.tests.is_empty() {
            findings.push(format!("no test holds {:?}", promise.says));
        }
        for test in promise.tests.iter().filter(|test| !is_known(test, known)) {
            findings.push(format!("there is no test {test:?}, for {:?}", promise.says));
        }
    }
    findings
}

fn is_known(test: &str, known: &BTreeSet<String>) -> bool {
    match test.strip_suffix(EVERY) {
        Some(module) => known
            .iter()
            .any(|name| name.starts_with(&format!("{module}::"))),
        None => known.contains(test),
    }
}

/// The tests that `make test` runs.
fn tests() -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    // As `make test` builds them, so that nothing is built for this alone.
    for suite in suites::build(suites::ALL)? {
        let all = listed(&suite, &[])?;
        let ignored = listed(&suite, &["--ignored"])?;
        let place = suite.full_name();
        names.extend(
            all.difference(&ignored)
                .map(|test| format!("{place}::{test}")),
        );
    }
    Ok(names)
}

fn listed(suite: &Suite, arguments: &[&str]) -> Result<BTreeSet<String>> {
    let output = Command::new(&suite.program)
        .args(["--list", "--format", "terse"])
        .args(arguments)
        .output()
        .with_context(|| format!("cannot run {}", suite.program.display()))?;
    ensure!(
        output.status.success(),
        "{} cannot list its tests",
        suite.name
    );
    let list = String::from_utf8(output.stdout).context("a list of tests that is not UTF-8")?;
    let tests = list.lines().filter_map(|line| line.strip_suffix(": test"));
    Ok(tests.map(str::to_owned).collect())
}

/// The rows of the table of attacks, which is held against the attacks that run by a test of theirs.
fn attacks(root: &Path) -> Result<Vec<String>> {
    let page = read(&root.join("docs/attacks.md"))?;
    let names = page.lines().filter_map(|line| {
        let row = line.strip_prefix("| `").and_then(|row| row.split_once('`'));
        let group = line.strip_prefix("## ");
        row.map(|(name, _)| format!("{ATTACK}{name}"))
            .or(group.map(|group| format!("{ATTACKS}{group}")))
    });
    Ok(names.collect())
}

#[cfg(test)]
mod tests;
