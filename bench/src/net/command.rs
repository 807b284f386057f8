//! The bench of the switch on the command line.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, Subcommand};

use super::case::{Case, full_matrix, quick_matrix};
use super::run::Plan;
use super::subject::Subject;
use super::techniques::STEPS;
use super::{bridge, ovs, report, testpmd};
use crate::perf::measure::Conditions;
use crate::perf::processor::{Placement, load, pin, set_priority};
use crate::perf::progress::Progress;
use crate::perf::results::{Environment, Run};

/// What can be done.
#[derive(Debug, Subcommand)]
pub enum NetCommand {
    /// Measure
    Run(RunOptions),
    /// Make a report of a run that was kept
    Report {
        /// The run's run.json
        run: PathBuf,
    },
    /// Be the VMM of a bridge
    #[command(hide = true)]
    Bridge {
        /// What is measured
        #[arg(long)]
        case: Case,
        /// How long
        #[command(flatten)]
        times: Times,
    },
}

/// How a run is made.
#[derive(Debug, Args)]
pub struct RunOptions {
    /// Measure only this case, for instance 64/1/2/split (repeatable); by default, everything
    #[arg(long = "case", value_name = "CASE")]
    cases: Vec<Case>,
    /// Measure only the cases that goals are about
    #[arg(long, conflicts_with = "cases")]
    quick: bool,
    /// Say which cases there are
    #[arg(long)]
    list: bool,
    /// Measure only this subject (repeatable): ringdown, testpmd, ovs-dpdk, bridge
    #[arg(long = "subject", value_name = "SUBJECT")]
    subjects: Vec<String>,
    /// The program to measure; by default `ringdown` beside this program
    #[arg(long)]
    ringdown: Option<PathBuf>,
    /// Rounds of each case
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    #[command(flatten)]
    times: Times,
    /// Keep the run in a directory of its own in this directory
    #[arg(long)]
    output: Option<PathBuf>,
    /// Let everything measured have this priority (-20 to 19): below zero where others use the machine, too; needs root
    #[arg(long, allow_negative_numbers = true)]
    nice: Option<i32>,
    /// Print the results as JSON instead of tables
    #[arg(long)]
    json: bool,
}

/// How long things take.
#[derive(Debug, Args)]
pub struct Times {
    /// Length of each measurement in milliseconds
    #[arg(long, default_value_t = 300)]
    window_ms: u64,
    /// Warm-up before each measurement in milliseconds
    #[arg(long, default_value_t = 100)]
    warm_up_ms: u64,
    /// How long nothing may happen, in milliseconds, before a case counts as hanging
    #[arg(long, default_value_t = 10_000)]
    patience_ms: u64,
}

impl Times {
    fn conditions(&self) -> Result<Conditions, String> {
        Ok(Conditions {
            warm_up: Duration::from_millis(self.warm_up_ms),
            window: Duration::from_millis(self.window_ms.max(1)),
            patience: Duration::from_millis(self.patience_ms),
            placement: Placement::find().map_err(|error| format!("processors: {error}"))?,
        })
    }
}

impl NetCommand {
    /// Does it.
    pub fn execute(&self) -> Result<(), String> {
        match self {
            NetCommand::Run(options) => run(options),
            NetCommand::Report { run } => {
                let words = |error: &dyn std::fmt::Display| format!("{}: {error}", run.display());
                let text = fs::read_to_string(run).map_err(|error| words(&error))?;
                let run: Run = serde_json::from_str(&text).map_err(|error| words(&error))?;
                print!("{}", report::markdown(&run));
                Ok(())
            }
            NetCommand::Bridge { case, times } => {
                let span = bridge::drive(case, &times.conditions()?)?;
                let json = serde_json::to_string(&span).map_err(|error| error.to_string())?;
                println!("{json}");
                Ok(())
            }
        }
    }
}

fn run(options: &RunOptions) -> Result<(), String> {
    let cases = match (options.cases.is_empty(), options.quick) {
        (false, _) => options.cases.clone(),
        (true, true) => quick_matrix(),
        (true, false) => full_matrix(),
    };
    if options.list {
        for case in cases {
            println!("{case}");
        }
        return Ok(());
    }
    let conditions = options.times.conditions()?;
    let subjects = subjects(options)?;
    if let Some(nice) = options.nice {
        set_priority(nice).map_err(|error| format!("priority {nice}: {error}"))?;
    }
    pin(conditions.placement.generator).map_err(|error| format!("pinning: {error}"))?;
    if load() > 0.5 {
        eprintln!(
            "[bench] the load average is {:.2}: others use this machine, and the figures will show it",
            load()
        );
    }
    let is_measured = |name: &str| subjects.iter().any(|subject| subject.name() == name);
    let versions = [
        testpmd::version().filter(|_| is_measured("testpmd")),
        ovs::version().filter(|_| is_measured("ovs-dpdk")),
    ];
    let versions: Vec<String> = versions.into_iter().flatten().collect();
    let peers = (!versions.is_empty()).then(|| versions.join(", "));
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let environment = Environment::find(source, peers, conditions.placement);
    let steps = subjects.iter().find_map(|subject| match subject {
        Subject::Ringdown(program) => Some(program.clone()),
        _ => None,
    });
    let steps = steps
        .into_iter()
        .flat_map(|program| (0..STEPS.len()).map(move |step| Subject::Step(program.clone(), step)));
    let plan = Plan {
        cases,
        steps: steps.collect(),
        subjects,
        rounds: options.rounds.max(1),
        conditions,
    };
    let run = plan.run(environment, &Progress::shown());
    show(&run, options)
}

/// What is there and wanted. What is not there is said.
fn subjects(options: &RunOptions) -> Result<Vec<Subject>, String> {
    let wanted = &options.subjects;
    let bench = std::env::current_exe().map_err(|error| error.to_string())?;
    let bridge = match bridge::obstacle() {
        None => Ok(Subject::Bridge(bench.clone())),
        Some(reason) => Err(reason),
    };
    let ringdown = options
        .ringdown
        .clone()
        .unwrap_or_else(|| bench.with_file_name("ringdown"));
    let ringdown = match ringdown.is_file() {
        true => Ok(Subject::Ringdown(ringdown)),
        false => {
            Err("there is no ringdown beside this program; build it, or give --ringdown".to_owned())
        }
    };
    let found = [
        ("ringdown", ringdown),
        (
            "testpmd",
            testpmd::find()
                .map(Subject::Testpmd)
                .ok_or("the package dpdk-dev is not installed".to_owned()),
        ),
        (
            "ovs-dpdk",
            ovs::find()
                .map(Subject::Ovs)
                .ok_or("the package openvswitch-switch-dpdk is not installed".to_owned()),
        ),
        ("bridge", bridge),
    ];
    if let Some(unknown) = wanted
        .iter()
        .find(|name| found.iter().all(|(known, _)| known != name))
    {
        let known: Vec<&str> = found.iter().map(|(known, _)| *known).collect();
        return Err(format!(
            "{unknown:?} is no subject: expected one of {}",
            known.join(", ")
        ));
    }
    let mut subjects = Vec::new();
    for (name, subject) in found {
        if !wanted.is_empty() && !wanted.iter().any(|wanted| wanted == name) {
            continue;
        }
        match subject {
            Ok(subject) => subjects.push(subject),
            Err(reason) => eprintln!("[bench] without {name}: {reason}"),
        }
    }
    match subjects.is_empty() {
        true => Err("there is nothing to measure".to_owned()),
        false => Ok(subjects),
    }
}

fn show(run: &Run, options: &RunOptions) -> Result<(), String> {
    let json = serde_json::to_string_pretty(run).map_err(|error| error.to_string())?;
    let report = report::markdown(run);
    if let Some(output) = &options.output {
        let directory = output.join(format!("{}-net", run.environment.date));
        let words = |error: std::io::Error| format!("{}: {error}", directory.display());
        fs::create_dir_all(&directory).map_err(words)?;
        fs::write(directory.join("run.json"), &json).map_err(words)?;
        fs::write(directory.join("report.md"), &report).map_err(words)?;
        eprintln!("[bench] kept in {}", directory.display());
    }
    match options.json {
        true => println!("{json}"),
        false if options.quick => println!("{}", report::goals(run).plain()),
        false => println!("{report}"),
    }
    Ok(())
}
