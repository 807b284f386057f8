//! `ringdown-bench`: measures Ringdown beside its peer and the machine's limits, and reports.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use bench::circuit::command::CircuitCommand;
use bench::net::command::NetCommand;
use bench::perf::case::Case;
use bench::perf::limits::{Task, be_other, raise_descriptor_limit};
use bench::perf::measure::Conditions;
use bench::perf::processor::{Placement, load, pin, set_priority};
use bench::perf::progress::Progress;
use bench::perf::results::{Environment, Run};
use bench::perf::run::{Plan, full_matrix, quick_matrix};
use bench::perf::{goals, peer, report};
use clap::{Args, Parser, Subcommand};

/// Descriptors for ten thousand circuits, two each, and the rest.
const DESCRIPTORS: u64 = 32_768;

/// How fast Ringdown is, beside its peer and the machine's limits.
#[derive(Debug, Parser)]
#[command(name = "ringdown-bench", version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Measure
    Run(RunOptions),
    /// Make a report of a run that was kept
    Report {
        /// The run's run.json
        run: PathBuf,
        /// Write report.md, report.html and the plots into this directory instead of printing
        #[arg(long)]
        output: Option<PathBuf>,
        /// Print the short table of docs/performance.md
        #[arg(long, conflicts_with = "output")]
        short: bool,
    },
    /// The program to compare with
    #[command(subcommand)]
    Peer(PeerCommand),
    /// The switch: frames from guest to guest, beside DPDK, Open vSwitch and Linux's bridge
    #[command(subcommand)]
    Net(NetCommand),
    /// Circuits: a ring between two processes, beside sockets and the machine's limits
    #[command(subcommand)]
    Circuit(CircuitCommand),
    /// Be the other process of a limit
    #[command(hide = true)]
    Other {
        #[arg(long)]
        path: PathBuf,
        #[arg(long)]
        task: Task,
        #[arg(long)]
        streams: usize,
        #[arg(long)]
        message_len: usize,
    },
}

#[derive(Debug, Subcommand)]
enum PeerCommand {
    /// Build it from the registry
    Install {
        /// Where to; by default `peers` beside this program's directory
        #[arg(long)]
        root: Option<PathBuf>,
    },
}

#[derive(Debug, Args)]
struct RunOptions {
    /// Measure only this case, for instance g2h/64K/1 (repeatable); by default, everything
    #[arg(long = "case", value_name = "CASE")]
    cases: Vec<Case>,
    /// Measure only the cases that goals are about
    #[arg(long, conflicts_with = "cases")]
    quick: bool,
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
    /// The program to measure; by default `ringdown` beside this program
    #[arg(long)]
    ringdown: Option<PathBuf>,
    /// The peer's program; by default where `peer install` puts it
    #[arg(long)]
    peer: Option<PathBuf>,
    /// Measure without the peer
    #[arg(long, conflicts_with = "peer")]
    no_peer: bool,
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

fn main() -> ExitCode {
    let result = match Arguments::parse().command {
        Command::Run(options) => run(&options),
        Command::Report { run, output, short } => make_report(&run, output.as_deref(), short),
        Command::Peer(PeerCommand::Install { root }) => {
            let root = root.or_else(peers_directory);
            install_peer(root)
        }
        Command::Net(command) => command.execute(),
        Command::Circuit(command) => command.execute(),
        Command::Other {
            path,
            task,
            streams,
            message_len,
        } => be_other(&path, task, streams, message_len).map_err(|error| error.to_string()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("ringdown-bench: {reason}");
            ExitCode::FAILURE
        }
    }
}

/// The directory that this program is in.
fn own_directory() -> Option<PathBuf> {
    Some(std::env::current_exe().ok()?.parent()?.to_owned())
}

fn peers_directory() -> Option<PathBuf> {
    Some(own_directory()?.parent()?.join("peers"))
}

fn install_peer(root: Option<PathBuf>) -> Result<(), String> {
    let root = root.ok_or("cannot find this program's own directory; give --root")?;
    let program = peer::install(&root)?;
    eprintln!(
        "[bench] {} {}: {}",
        peer::CRATE,
        peer::VERSION,
        program.display()
    );
    Ok(())
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
    let placement = Placement::find().map_err(|error| format!("processors: {error}"))?;
    pin(placement.generator).map_err(|error| format!("pinning: {error}"))?;
    if let Some(nice) = options.nice {
        set_priority(nice).map_err(|error| format!("priority {nice}: {error}"))?;
    }
    raise_descriptor_limit(DESCRIPTORS);
    let plan = plan(options, cases, placement)?;
    if load() > 0.5 {
        eprintln!(
            "[bench] the load average is {:.2}: others use this machine, and the figures will show it",
            load()
        );
    }
    let peer_name = plan
        .peer
        .as_ref()
        .map(|_| format!("{} {}", peer::CRATE, peer::VERSION));
    let source = Path::new(env!("CARGO_MANIFEST_DIR"));
    let environment = Environment::find(source, peer_name, placement);
    let run = plan.run(environment, &Progress::shown());
    show(&run, options)
}

fn plan(options: &RunOptions, cases: Vec<Case>, placement: Placement) -> Result<Plan, String> {
    let bench = std::env::current_exe().map_err(|error| error.to_string())?;
    let beside = || own_directory().map(|directory| directory.join("ringdown"));
    let ringdown = options
        .ringdown
        .clone()
        .or_else(beside)
        .filter(|path| path.is_file())
        .ok_or("there is no ringdown beside this program; build it, or give --ringdown")?;
    let peer = match options.no_peer {
        true => None,
        false => options
            .peer
            .clone()
            .or_else(|| peer::find(&peers_directory()?)),
    };
    if peer.is_none() && !options.no_peer {
        eprintln!("[bench] without the peer: `ringdown-bench peer install` builds it");
    }
    Ok(Plan {
        cases,
        ringdown,
        peer,
        bench,
        rounds: options.rounds.max(1),
        conditions: Conditions {
            warm_up: Duration::from_millis(options.warm_up_ms),
            window: Duration::from_millis(options.window_ms.max(1)),
            patience: Duration::from_millis(options.patience_ms),
            placement,
        },
    })
}

fn show(run: &Run, options: &RunOptions) -> Result<(), String> {
    let json = serde_json::to_string_pretty(run).map_err(|error| error.to_string())?;
    if let Some(output) = &options.output {
        let directory = output.join(run.environment.directory_name());
        let words = |error: std::io::Error| format!("{}: {error}", directory.display());
        fs::create_dir_all(&directory).map_err(words)?;
        fs::write(directory.join("run.json"), json.as_bytes()).map_err(words)?;
        report::write(run, &directory).map_err(words)?;
        eprintln!("[bench] kept in {}", directory.display());
    }
    match options.json {
        true => println!("{json}"),
        false if options.cases.is_empty() => println!("{}", goals::table(run).plain()),
        false => println!("{}", report::markdown(run)),
    }
    Ok(())
}

fn make_report(path: &Path, output: Option<&Path>, short: bool) -> Result<(), String> {
    let words = |path: &Path, error: std::io::Error| format!("{}: {error}", path.display());
    let text = fs::read_to_string(path).map_err(|error| words(path, error))?;
    let run: Run = serde_json::from_str(&text)
        .map_err(|error| format!("{} is no run: {error}", path.display()))?;
    match output {
        Some(directory) => {
            fs::create_dir_all(directory).map_err(|error| words(directory, error))?;
            report::write(&run, directory).map_err(|error| words(directory, error))?;
        }
        None if short => print!("{}", report::short(&run)),
        None => print!("{}", report::markdown(&run)),
    }
    Ok(())
}
