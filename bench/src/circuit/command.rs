//! The bench of circuits on the command line.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};

use super::case::{Case, OTHERS, full_matrix};
use super::measure::Plan;
use super::other::{OtherOptions, be_other};
use super::report;
use crate::perf::limits::raise_descriptor_limit;
use crate::perf::measure::Conditions;
use crate::perf::processor::{Placement, load, pin};
use crate::perf::progress::Progress;
use crate::perf::results::{Environment, Run};

/// What can be done.
#[derive(Debug, Subcommand)]
pub enum CircuitCommand {
    /// Measure
    Run(RunOptions),
    /// Make a report of a run that was kept
    Report {
        /// The run's run.json
        run: PathBuf,
    },
    /// Be the other process
    #[command(hide = true)]
    Other(OtherOptions),
}

/// How a run is made.
#[derive(Debug, Args)]
pub struct RunOptions {
    /// Measure only this case, for instance in-place/64K/spin (repeatable); by default, everything
    #[arg(long = "case", value_name = "CASE")]
    cases: Vec<Case>,
    /// Say which cases there are
    #[arg(long)]
    list: bool,
    /// Rounds of each case
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Length of each measurement in milliseconds
    #[arg(long, default_value_t = 250)]
    window_ms: u64,
    /// Warm-up before each measurement in milliseconds
    #[arg(long, default_value_t = 80)]
    warm_up_ms: u64,
    /// How long nothing may happen, in milliseconds, before a case counts as hanging
    #[arg(long, default_value_t = 5000)]
    patience_ms: u64,
    /// Keep the run in a directory of its own in this directory
    #[arg(long)]
    output: Option<PathBuf>,
}

impl CircuitCommand {
    /// Does it.
    pub fn execute(&self) -> Result<(), String> {
        // Each circuit takes one, and what is handed over another for a moment.
        raise_descriptor_limit(4 * OTHERS as u64);
        match self {
            CircuitCommand::Run(options) => run(options),
            CircuitCommand::Report { run } => {
                let words = |error: &dyn std::fmt::Display| format!("{}: {error}", run.display());
                let text = fs::read_to_string(run).map_err(|error| words(&error))?;
                let run: Run = serde_json::from_str(&text).map_err(|error| words(&error))?;
                print!("{}", report::markdown(&run));
                Ok(())
            }
            CircuitCommand::Other(options) => be_other(options),
        }
    }
}

fn run(options: &RunOptions) -> Result<(), String> {
    let cases = match options.cases.is_empty() {
        true => full_matrix(),
        false => options.cases.clone(),
    };
    if options.list {
        for case in cases {
            println!("{case}");
        }
        return Ok(());
    }
    let placement = Placement::find().map_err(|error| format!("processors: {error}"))?;
    pin(placement.generator).map_err(|error| format!("pinning: {error}"))?;
    if load() > 0.5 {
        eprintln!(
            "[bench] the load average is {:.2}: others use this machine, and the figures will show it",
            load()
        );
    }
    let plan = Plan {
        cases,
        rounds: options.rounds.max(1),
        conditions: Conditions {
            warm_up: Duration::from_millis(options.warm_up_ms),
            window: Duration::from_millis(options.window_ms.max(1)),
            patience: Duration::from_millis(options.patience_ms),
            placement,
        },
    };
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let environment = Environment::find(source, None, placement);
    let run = plan.run(environment, &Progress::shown());
    println!("\n{}", report::goals(&run).plain());
    let Some(output) = &options.output else {
        return Ok(());
    };
    let directory = output.join(format!("{}-circuit", run.environment.date));
    keep(&run, &directory).map_err(|error| format!("{}: {error}", directory.display()))?;
    println!("[bench] kept in {}", directory.display());
    Ok(())
}

fn keep(run: &Run, directory: &Path) -> std::io::Result<()> {
    fs::create_dir_all(directory)?;
    let json = serde_json::to_string_pretty(run)?;
    fs::write(directory.join("run.json"), json + "\n")?;
    fs::write(directory.join("report.md"), report::markdown(run))
}
