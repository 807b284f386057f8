//! Linux's own tests of vsock, run between two guests through Ringdown.
//!
//! The programs are those of `tools/testing/vsock` in the sources of the very kernel that the guests boot, from Debian's source
//! packages. One guest runs a program as the client, the other as the server; then the other way round. The two ends keep step over a
//! TCP connection, for which the guests have a network card each, joined by a datagram socket that has nothing to do with Ringdown.
//!
//! A program ends at its first failure. It is then started again without the cases that have been judged, so that a run always reports all of them.

mod outcome;
mod pair;
mod programs;

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use e2e::Kernel;

use crate::progress::Progress;
use outcome::Report;
use pair::{Direction, Pair};

/// What `cargo xtask kernel-tests` takes.
#[derive(Debug, Args)]
pub struct KernelTestsArguments {
    /// Which kernels' tests; without it, those of 6.1 and 6.12.
    #[arg(long = "kernel", value_name = "KERNEL")]
    kernels: Vec<KernelChoice>,
    /// Which guest is the client; without it, each in turn.
    #[arg(long = "client", value_name = "GUEST")]
    clients: Vec<Direction>,
    /// Ask the mirror for newer sources.
    #[arg(long)]
    refresh: bool,
    /// Get the sources and build the programs, without running them.
    #[arg(long)]
    only_build: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum KernelChoice {
    /// Debian 12's own kernel.
    #[value(name = "6.1")]
    V6_1,
    /// The kernel 6.12 of Debian 12's security suite.
    #[value(name = "6.12")]
    V6_12,
}

/// The tests that come with one kernel.
#[derive(Debug)]
pub struct Suite {
    /// The kernel, of the guests and of the sources.
    kernel: Kernel,
    /// Debian's package with the sources.
    package: &'static str,
    /// The test programs.
    programs: &'static [Program],
}

/// A test program.
#[derive(Debug, PartialEq, Eq)]
pub struct Program {
    /// Its name in `tools/testing/vsock`.
    name: &'static str,
    /// How many cases it is known to have. More are welcome, fewer are a failure: a case that vanishes must not look like a pass.
    expected_cases: usize,
    /// Whether it has the options `--list` and `--skip`.
    can_skip: bool,
}

const fn program(name: &'static str, expected_cases: usize) -> Program {
    Program {
        name,
        expected_cases,
        can_skip: true,
    }
}

/// 14 cases.
const SUITE_6_1: Suite = Suite {
    kernel: Kernel::V6_1,
    package: "linux-source-6.1",
    programs: &[program("vsock_test", 11), program("vsock_diag_test", 3)],
};

/// 31 cases, which are 30 tests when `vsock_uring_test`, both of whose cases are always run, counts as one.
const SUITE_6_12: Suite = Suite {
    kernel: Kernel::V6_12,
    package: "linux-source-6.12",
    programs: &[
        program("vsock_test", 26),
        program("vsock_diag_test", 3),
        Program {
            name: "vsock_uring_test",
            expected_cases: 2,
            can_skip: false,
        },
    ],
};

/// Builds the programs, runs them, and reports the results.
pub fn run(arguments: &KernelTestsArguments) -> Result<()> {
    let mut suites = vec![&SUITE_6_1, &SUITE_6_12];
    if !arguments.kernels.is_empty() {
        suites.retain(|suite| {
            arguments
                .kernels
                .iter()
                .any(|choice| choice.kernel() == suite.kernel)
        });
    }
    let mut directions = vec![Direction::A, Direction::B];
    if !arguments.clients.is_empty() {
        directions.retain(|direction| arguments.clients.contains(direction));
    }
    let runs: usize = suites
        .iter()
        .map(|suite| 1 + suite.programs.len() * directions.len())
        .sum();
    let step_count = suites.len() + if arguments.only_build { 0 } else { runs };
    let mut progress = Progress::new("kernel-tests", step_count);

    let built = programs::prepare(&suites, arguments.refresh, &mut progress)?;
    if arguments.only_build {
        progress.done("the programs are built");
        return Ok(());
    }
    let mut reports = Vec::new();
    for (suite, built) in suites.iter().zip(&built) {
        progress.step(format!("booting two guests with kernel {}", suite.kernel));
        let pair = Pair::boot(suite, built)?;
        let mut report = Report::new(&pair.release()?, &built.source_version);
        for direction in &directions {
            for program in suite.programs {
                progress.step(format!("{}, {direction}", program.name));
                let cases = pair.run(program, *direction, &progress)?;
                report.add(program, direction.to_string(), cases);
            }
        }
        report.close(pair.kernel_complaints()?, pair.traffic()?);
        reports.push(report);
    }
    for report in &reports {
        println!("{report}");
    }
    let failure_count: usize = reports.iter().map(Report::failure_count).sum();
    progress.done("every test has been run");
    ensure!(
        failure_count == 0,
        "{failure_count} failures in Linux's own tests of vsock"
    );
    Ok(())
}

impl KernelChoice {
    fn kernel(self) -> Kernel {
        match self {
            KernelChoice::V6_1 => Kernel::V6_1,
            KernelChoice::V6_12 => Kernel::V6_12,
        }
    }
}
