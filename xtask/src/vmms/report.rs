//! The table of VMMs and scenarios.

use std::fmt::{self, Display, Formatter};
use std::time::Duration;

/// What came of a scenario with a VMM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Cell {
    /// It passed.
    Passed(Duration),
    /// It did not, for this reason.
    Failed(Duration, String),
    /// The VMM has no such thing.
    NotOffered(String),
    /// It was not come to.
    NotTried(String),
}

/// A VMM's part of the table.
#[derive(Debug)]
pub struct Column {
    /// Its name.
    pub title: &'static str,
    /// What the VMM says of its version.
    pub version: String,
    /// What came of each scenario, by its name, in order.
    pub cells: Vec<(&'static str, Cell)>,
}

/// The table.
#[derive(Debug)]
pub struct Report {
    /// Where it was made.
    pub machine: String,
    /// The VMMs that were there.
    pub columns: Vec<Column>,
    /// Those that were left out, and why.
    pub left_out: Vec<(&'static str, String)>,
}

impl Report {
    /// How many cells have failed or were not come to.
    pub fn failure_count(&self) -> usize {
        let cells = self.columns.iter().flat_map(|column| &column.cells);
        cells
            .filter(|(_, cell)| matches!(cell, Cell::Failed(..) | Cell::NotTried(_)))
            .count()
    }
}

impl Display for Report {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        let mut notes: Vec<String> = Vec::new();
        let mut note = |text: String| {
            notes.push(text);
            notes.len()
        };
        writeln!(formatter, "# VMMs\n\n{}\n", self.machine)?;
        let titles: Vec<&str> = self.columns.iter().map(|column| column.title).collect();
        writeln!(formatter, "| | {} |", titles.join(" | "))?;
        writeln!(formatter, "| --- |{}", " --- |".repeat(titles.len()))?;
        let names = self.columns.first().map(|column| column.cells.as_slice());
        for (row, (name, _)) in names.unwrap_or_default().iter().enumerate() {
            write!(formatter, "| {name} |")?;
            for column in &self.columns {
                let cell = match column.cells.get(row).map(|(_, cell)| cell) {
                    Some(Cell::Passed(took)) => format!("passed, {}", seconds(*took)),
                    Some(Cell::Failed(took, why)) => format!(
                        "**failed** [{}], {}",
                        note(format!("{}, {name}: {why}", column.title)),
                        seconds(*took)
                    ),
                    Some(Cell::NotOffered(why)) => format!(
                        "not offered [{}]",
                        note(format!("{}, {name}: {why}", column.title))
                    ),
                    Some(Cell::NotTried(why)) => format!(
                        "**not tried** [{}]",
                        note(format!("{}, {name}: {why}", column.title))
                    ),
                    None => "**not tried**".to_owned(),
                };
                write!(formatter, " {cell} |")?;
            }
            writeln!(formatter)?;
        }
        writeln!(formatter)?;
        for (index, text) in notes.iter().enumerate() {
            writeln!(formatter, "{}. {text}", index + 1)?;
        }
        if !notes.is_empty() {
            writeln!(formatter)?;
        }
        for column in &self.columns {
            writeln!(formatter, "- {}: {}", column.title, column.version)?;
        }
        for (title, why) in &self.left_out {
            writeln!(formatter, "- {title}: left out, as {why}")?;
        }
        Ok(())
    }
}

fn seconds(took: Duration) -> String {
    format!("{:.1} s", took.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cell_says_what_came_of_it_and_a_vmm_that_is_missing_counts_for_nothing() {
        let took = Duration::from_millis(1500);
        let mut report = Report {
            machine: "Linux".to_owned(),
            columns: vec![Column {
                title: "QEMU",
                version: "QEMU emulator version 7.2".to_owned(),
                cells: vec![
                    ("exec", Cell::Passed(took)),
                    ("cp", Cell::NotOffered("it has none".to_owned())),
                ],
            }],
            left_out: vec![("Alioth", "RINGDOWN_VMM_ALIOTH is not set".to_owned())],
        };
        assert_eq!(
            report.to_string(),
            "# VMMs\n\nLinux\n\n\
             | | QEMU |\n| --- | --- |\n| exec | passed, 1.5 s |\n| cp | not offered [1] |\n\n\
             1. QEMU, cp: it has none\n\n\
             - QEMU: QEMU emulator version 7.2\n- Alioth: left out, as RINGDOWN_VMM_ALIOTH is not set\n"
        );
        assert_eq!(report.failure_count(), 0);
        let cells = &mut report.columns[0].cells;
        cells.push(("shutdown", Cell::Failed(took, "it runs on".to_owned())));
        cells.push(("reset", Cell::NotTried("it never came up".to_owned())));
        assert_eq!(report.failure_count(), 2);
        let table = report.to_string();
        assert!(
            table.contains("| shutdown | **failed** [2], 1.5 s |"),
            "{table}"
        );
        assert!(
            table.contains("3. QEMU, reset: it never came up\n"),
            "{table}"
        );
    }
}
