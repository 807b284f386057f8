//! `ringdown-bench`: measures.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use bench::perf::case::Case;
use bench::perf::measure::{Conditions, Failed, Figures};
use bench::perf::processor::{Placement, pin};
use bench::perf::subject::{Kind, Subject};
use bench::perf::{latency, throughput};
use clap::Parser;

/// Measures.
#[derive(Debug, Parser)]
struct Arguments {
    /// The program
    #[arg(long)]
    ringdown: Option<PathBuf>,
    /// The peer
    #[arg(long)]
    peer: Option<PathBuf>,
    #[arg(long)]
    case: Vec<Case>,
    #[arg(long, default_value = "3")]
    rounds: usize,
    #[arg(long, default_value = "300")]
    window_ms: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let placement = Placement::find().expect("affinity");
    pin(placement.generator).expect("affinity");
    let conditions = Conditions {
        warm_up: Duration::from_millis(100),
        window: Duration::from_millis(arguments.window_ms),
        patience: Duration::from_secs(5),
        placement,
    };
    let mut subjects = Vec::new();
    if let Some(program) = arguments.ringdown {
        subjects.push(Subject {
            kind: Kind::Ringdown,
            program,
        });
    }
    if let Some(program) = arguments.peer {
        subjects.push(Subject {
            kind: Kind::VhostDeviceVsock,
            program,
        });
    }
    for case in &arguments.case {
        for _ in 0..arguments.rounds {
            for subject in &subjects {
                let result: Result<Figures, Failed> = match case {
                    Case::Throughput(case) => throughput::measure(subject, case, &conditions),
                    Case::PingPong {
                        direction,
                        message_len,
                    } => latency::measure(subject, *direction, *message_len, &conditions),
                };
                println!("{case} {} {result:.3?}", subject.name());
            }
        }
    }
    ExitCode::SUCCESS
}
