//! What was measured: medians, ratios, and everything one by one for later readers.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use e2e::accelerator;
use serde::Serialize;

use super::{TransparentPriceArguments, Way};
use crate::machine::{median, processor, today};

/// A machine with more load than this (the average of a minute) is not a quiet one.
const QUIET_LOAD: f64 = 0.3;

/// What is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum What {
    /// Bytes to the guest and from it.
    In,
    Out,
    Connect,
    GuestMemory,
    DaemonMemory,
}

/// Everything that was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    mib: usize,
    rounds: usize,
    connections: usize,
    held: usize,
    guest: String,
    accelerator: String,
    processor: String,
    load: f64,
    date: String,
    results: Vec<Measured>,
}

#[derive(Debug, Serialize)]
struct Measured {
    what: What,
    /// Seconds, or bytes of memory for a connection.
    run: Vec<f64>,
    network: Vec<f64>,
}

impl Report {
    /// Nothing measured yet.
    pub fn new(arguments: &TransparentPriceArguments, guest: &str) -> Result<Report> {
        let load = fs::read_to_string("/proc/loadavg")?;
        let load = load.split(' ').next().and_then(|word| word.parse().ok());
        Ok(Report {
            mib: arguments.mib,
            rounds: arguments.rounds,
            connections: arguments.connections,
            held: arguments.held,
            guest: guest.to_owned(),
            accelerator: accelerator::choose()?.to_string(),
            processor: processor(),
            load: load.context("/proc/loadavg says nothing")?,
            date: today()?,
            results: Vec::new(),
        })
    }

    /// Adds what was measured once.
    pub fn add(&mut self, what: What, way: Way, figure: f64) {
        let found = self.results.iter().position(|result| result.what == what);
        let index = found.unwrap_or_else(|| {
            self.results.push(Measured {
                what,
                run: Vec::new(),
                network: Vec::new(),
            });
            self.results.len() - 1
        });
        let result = &mut self.results[index];
        match way {
            Way::Run => result.run.push(figure),
            Way::Network => result.network.push(figure),
        }
    }

    /// Medians and their ratios, in Markdown.
    pub fn table(&self) -> String {
        let quiet = match self.load > QUIET_LOAD {
            true => format!(
                "Not from a quiet machine (load {:.1}): read only the ratios, and those with care. ",
                self.load
            ),
            false => String::new(),
        };
        let mut table = format!(
            "{quiet}Kernel {} ({}), {} MiB each way, {} connections one after the other, {} open at once, medians of {} rounds by turns, {}, {}.\n\n\
             | what | under `run` | TCP over virtio-net | ratio (least and greatest of a round) |\n| --- | --- | --- | --- |\n",
            self.guest,
            self.accelerator,
            self.mib,
            self.connections,
            self.held,
            self.rounds,
            self.processor,
            self.date
        );
        for result in &self.results {
            let (run, network) = (median(&result.run), median(&result.network));
            table += &format!(
                "| {} | {} | {} | {} |\n",
                result.title(),
                self.shown(result.what, run),
                self.shown(result.what, network),
                result.ratios(run, network)
            );
        }
        table
    }

    fn shown(&self, what: What, figure: f64) -> String {
        match what {
            What::In | What::Out => format!("{:.0} MiB/s", self.mib as f64 / figure),
            What::Connect => format!("{:.2} ms", figure * 1000.0),
            What::GuestMemory | What::DaemonMemory => format!("{:.1} KiB", figure / 1024.0),
        }
    }

    /// Writes the table and all single figures into a new directory below `parent`, and gives that.
    pub fn keep(&self, parent: &Path) -> Result<PathBuf> {
        let directory = parent.join(format!("{}-transparent", self.date));
        fs::create_dir_all(&directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        fs::write(directory.join("report.md"), self.table())?;
        fs::write(directory.join("run.json"), serde_json::to_vec_pretty(self)?)?;
        Ok(directory)
    }
}

impl Measured {
    fn title(&self) -> &'static str {
        match self.what {
            What::In => "bytes to the guest",
            What::Out => "bytes from the guest",
            What::Connect => "`socket` and `connect`",
            What::GuestMemory => "memory in the guest for a connection, the agent's included",
            What::DaemonMemory => "memory of the daemon for a connection",
        }
    }

    /// Where a connection needs nothing there is no ratio.
    fn ratios(&self, run: f64, network: f64) -> String {
        if network <= 0.0 || self.network.iter().any(|figure| *figure <= 0.0) {
            return "–".to_owned();
        }
        let both = self.run.iter().zip(&self.network);
        let mut each: Vec<f64> = both
            .map(|(run, network)| self.ratio(*run, *network))
            .collect();
        each.sort_by(f64::total_cmp);
        let [least, greatest] =
            [each.first(), each.last()].map(|each| each.map_or(f64::NAN, |e| *e));
        format!(
            "{:.2} ({least:.2} to {greatest:.2})",
            self.ratio(run, network)
        )
    }

    /// Of rates, how many times as quick `run` is; of the rest, how many times as much it takes.
    fn ratio(&self, run: f64, network: f64) -> f64 {
        match self.what {
            What::In | What::Out => network / run,
            _ => run / network,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratios_are_of_medians() {
        let arguments = TransparentPriceArguments {
            mib: 64,
            rounds: 3,
            connections: 1,
            held: 1,
            output: None,
        };
        let mut report = Report::new(&arguments, "6.12").unwrap();
        for seconds in [1.0, 9.0, 2.0] {
            report.add(What::In, Way::Run, seconds);
            report.add(What::In, Way::Network, 2.0 * seconds);
            report.add(What::Connect, Way::Run, 3.0 * seconds / 1000.0);
            report.add(What::Connect, Way::Network, seconds / 1000.0);
        }
        let table = report.table();
        let rate = "| bytes to the guest | 32 MiB/s | 16 MiB/s | 2.00 (2.00 to 2.00) |";
        assert!(table.contains(rate), "{table}");
        let time = "| 6.00 ms | 2.00 ms | 3.00 (3.00 to 3.00) |";
        assert!(table.contains(time), "{table}");
    }
}
