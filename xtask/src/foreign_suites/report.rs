//! The table of the suites, and what ends otherwise under `run`.

use std::fmt::Write;

use super::outcome::{Outcome, Outcomes, counts, differences};
use super::{Suite, known};

/// What was found, as Markdown.
#[derive(Debug)]
pub struct Report {
    table: String,
    differences: String,
    unexplained: usize,
}

fn word(outcome: Option<Outcome>) -> &'static str {
    match outcome {
        Some(Outcome::Passed) => "passed",
        Some(Outcome::Failed) => "failed",
        Some(Outcome::Skipped) => "skipped",
        None => "not run",
    }
}

impl Report {
    /// Nothing was found yet, in a guest with this kernel.
    pub fn new(release: &str) -> Report {
        Report {
            table: format!(
                "Linux {release}: passed / failed / skipped\n\n\
                 | suite | version | without `run` | under `run` | end otherwise |\n| --- | --- | --- | --- | --- |\n"
            ),
            differences: String::new(),
            unexplained: 0,
        }
    }

    pub fn add(&mut self, suite: &Suite, version: &str, plain: &Outcomes, run: &Outcomes) {
        let shown = |outcomes| counts(outcomes).map(|count| count.to_string()).join(" / ");
        let differing = differences(plain, run);
        // A String takes whatever is written to it.
        let _ = writeln!(
            self.table,
            "| {} | {version} | {} | {} | {} |",
            suite.title,
            shown(plain),
            shown(run),
            differing.len()
        );
        for (name, plain, run) in differing {
            let reason = known::reason(suite.name, &name);
            self.unexplained += usize::from(reason.is_none());
            let _ = writeln!(
                self.differences,
                "- {}, {name}: {} without, {} under `run`: {}",
                suite.name,
                word(plain),
                word(run),
                reason.unwrap_or("NOT EXPLAINED")
            );
        }
    }

    pub fn text(&self) -> String {
        format!("{}\n{}", self.table, self.differences)
    }

    /// So many tests end otherwise, and it is not known why.
    pub fn unexplained(&self) -> usize {
        self.unexplained
    }
}
