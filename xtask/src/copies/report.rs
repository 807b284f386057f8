//! What was measured: medians, ratios, and everything one by one for later readers.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use e2e::accelerator;
use serde::Serialize;

use crate::machine::{median, processor, today};

/// What all others of a kind are compared with.
const SUBJECTS: [&str; 2] = ["ringdown cp, vsock", "ringdown exec, vsock"];

/// What is measured again and again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Series {
    kind: Kind,
    command: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Kind {
    ToGuest,
    FromGuest,
    Command,
}

impl Series {
    /// A file into the guest.
    pub fn to_guest(command: &str) -> Series {
        Series::new(Kind::ToGuest, command)
    }

    /// A file out of the guest.
    pub fn from_guest(command: &str) -> Series {
        Series::new(Kind::FromGuest, command)
    }

    /// A command from its start to its end.
    pub fn command(command: &str) -> Series {
        Series::new(Kind::Command, command)
    }

    fn new(kind: Kind, command: &str) -> Series {
        let command = command.to_owned();
        Series { kind, command }
    }
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    mib: usize,
    rounds: usize,
    guest: String,
    accelerator: String,
    processor: String,
    date: String,
    results: Vec<Measured>,
}

#[derive(Debug, Serialize)]
struct Measured {
    #[serde(flatten)]
    series: Series,
    /// How much was carried each time, in bytes.
    bytes: usize,
    seconds: Vec<f64>,
}

impl Report {
    /// Nothing measured yet.
    pub fn new(mib: usize, rounds: usize, guest: &str) -> Result<Report> {
        Ok(Report {
            mib,
            rounds,
            guest: guest.to_owned(),
            accelerator: accelerator::choose()?.to_string(),
            processor: processor(),
            date: today()?,
            results: Vec::new(),
        })
    }

    /// Adds what was measured once.
    pub fn add(&mut self, series: Series, bytes: usize, taken: Duration) {
        let seconds = taken.as_secs_f64();
        match self
            .results
            .iter_mut()
            .find(|result| result.series == series)
        {
            Some(result) => result.seconds.push(seconds),
            None => self.results.push(Measured {
                series,
                bytes,
                seconds: vec![seconds],
            }),
        }
    }

    /// Medians, and how many times as quick as each Ringdown is over vsock, in Markdown.
    pub fn table(&self) -> String {
        let mut table = format!(
            "Kernel {} ({}), {} MiB, medians of {} rounds by turns, {}, {}.\n",
            self.guest, self.accelerator, self.mib, self.rounds, self.processor, self.date
        );
        for (kind, title) in [
            (Kind::ToGuest, "file to the guest"),
            (Kind::FromGuest, "file from the guest"),
            (Kind::Command, "command, start to finish"),
        ] {
            table +=
                &format!("\n| {title} | median | ringdown over vsock is |\n| --- | --- | --- |\n");
            let of_kind = || {
                self.results
                    .iter()
                    .filter(move |result| result.series.kind == kind)
            };
            let subject =
                of_kind().find(|result| SUBJECTS.contains(&result.series.command.as_str()));
            for result in of_kind() {
                let ratio = subject.map_or(f64::NAN, |subject| {
                    result.seconds_each() / subject.seconds_each()
                });
                table += &format!(
                    "| {} | {} | {ratio:.2}x as quick |\n",
                    result.series.command,
                    result.shown()
                );
            }
        }
        table
    }

    /// Writes the table and all single figures into a new directory below `parent`, and gives that.
    pub fn keep(&self, parent: &Path) -> Result<PathBuf> {
        let directory = parent.join(format!("{}-copies", self.date));
        fs::create_dir_all(&directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        fs::write(directory.join("report.md"), self.table())?;
        fs::write(directory.join("run.json"), serde_json::to_vec_pretty(self)?)?;
        Ok(directory)
    }
}

impl Measured {
    /// The time for a MiB, or for a command.
    fn seconds_each(&self) -> f64 {
        match self.bytes {
            0 => median(&self.seconds),
            bytes => median(&self.seconds) / (bytes as f64 / f64::from(1 << 20)),
        }
    }

    fn shown(&self) -> String {
        match self.bytes {
            0 => format!("{:.1} ms", median(&self.seconds) * 1000.0),
            _ => format!("{:.2} MiB/s", 1.0 / self.seconds_each()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_medians_and_by_the_byte() {
        let mut report = Report::new(64, 3, "6.12").unwrap();
        for ms in [100, 900, 200] {
            report.add(
                Series::to_guest(SUBJECTS[0]),
                2 << 20,
                Duration::from_millis(ms),
            );
            report.add(
                Series::to_guest("other"),
                1 << 20,
                Duration::from_millis(ms * 10),
            );
        }
        let table = report.table();
        assert!(
            table.contains("| ringdown cp, vsock | 10.00 MiB/s | 1.00x as quick |"),
            "{table}"
        );
        assert!(
            table.contains("| other | 0.50 MiB/s | 20.00x as quick |"),
            "{table}"
        );
    }
}
