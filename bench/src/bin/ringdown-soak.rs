//! `ringdown-soak`: many short circuits on every path, a policy that changes all the while, and an eye on what the daemon holds.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use bench::perf::limits::raise_descriptor_limit;
use bench::soak::path::Path;
use bench::soak::{Options, run};
use clap::Parser;

/// Descriptors for all calls at once, several each, and the rest.
const DESCRIPTORS: u64 = 8192;

/// Makes calls on every path while the policy changes, and fails if one goes wrong or the daemon leaks.
#[derive(Debug, Parser)]
#[command(name = "ringdown-soak", version)]
struct Arguments {
    /// How long, in seconds
    #[arg(long, default_value_t = 3600)]
    seconds: u64,
    /// How long until the daemon is first looked at, in seconds
    #[arg(long, default_value_t = 60)]
    warm_up_seconds: u64,
    /// How long between two looks, in seconds
    #[arg(long, default_value_t = 600)]
    rest_every_seconds: u64,
    /// Calls per second
    #[arg(long, default_value_t = 500.0)]
    rate: f64,
    /// How often the policy is read anew, in seconds; 0 for never
    #[arg(long, default_value_t = 60)]
    reload_every_seconds: u64,
    /// Take only this path (repeatable); by default, all
    #[arg(long = "path")]
    paths: Vec<Path>,
    /// How often a line is shown, in seconds
    #[arg(long, default_value_t = 10)]
    progress_every_seconds: u64,
    /// The program; by default `ringdown` beside this one
    #[arg(long)]
    ringdown: Option<PathBuf>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    raise_descriptor_limit(DESCRIPTORS);
    let seconds = Duration::from_secs;
    let beside = || std::env::current_exe().map(|own| own.with_file_name("ringdown"));
    let program = match arguments.ringdown.map_or_else(beside, Ok) {
        Ok(program) => program,
        Err(error) => {
            eprintln!("error: where is ringdown? {error}");
            return ExitCode::FAILURE;
        }
    };
    let paths = match arguments.paths.is_empty() {
        true => Path::ALL.to_vec(),
        false => arguments.paths,
    };
    let options = Options {
        program,
        duration: seconds(arguments.seconds),
        warm_up: seconds(arguments.warm_up_seconds),
        between_rests: seconds(arguments.rest_every_seconds.max(1)),
        rate: arguments.rate,
        reload_every: Some(seconds(arguments.reload_every_seconds))
            .filter(|every| !every.is_zero()),
        paths,
        progress_every: Some(seconds(arguments.progress_every_seconds)),
    };
    match run(&options) {
        Ok(report) => {
            print!("{report}");
            if report.is_good() {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            }
        }
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}
