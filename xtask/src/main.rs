//! Tasks of the project: guest images, tidy checks, the demonstration.

mod copies;
mod demo;
mod foreign_suites;
mod images;
mod kernel_tests;
mod machine;
mod progress;
mod promises;
mod queue;
mod suites;
mod three_vms;
mod tidy;
mod transparent_price;
mod vmms;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Tasks of the Ringdown project.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", version, about)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Make the guest images for tests and the demonstration; what is up to date stays.
    Images(images::ImagesArguments),
    /// Say whether guests can use KVM here, by booting one with it, and what is used instead.
    Accelerator,
    /// Show everything at work with two guests.
    Demo(demo::DemoArguments),
    /// Show examples/three-vms with real guests.
    ThreeVms,
    /// Measure how fast files and commands get into a guest, beside scp, ssh and QEMU's guest agent.
    Copies(copies::CopiesArguments),
    /// Run Linux's own tests of vsock between two guests.
    KernelTests(kernel_tests::KernelTestsArguments),
    /// Run suites of others in a guest, under `ringdown-agent run` and without it.
    ForeignSuites(foreign_suites::ForeignSuitesArguments),
    /// Run all tests, those with real guests too, as many suites at a time as the processors take.
    Tests(queue::TestsArguments),
    /// Check that each promise of the documents names a test that runs.
    Promises,
    /// Measure what a connection costs under `ringdown-agent run`, beside TCP over a network card.
    TransparentPrice(transparent_price::TransparentPriceArguments),
    /// Run real VMMs on KVM inside a guest, and print the table of what works with which.
    Vmms(vmms::VmmsArguments),
    /// Check this project's own rules, which the compiler does not know.
    Tidy,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    let result = match arguments.task {
        Task::Images(arguments) => images::run(&arguments),
        Task::Accelerator => e2e::accelerator::choose().map(|choice| println!("{choice}")),
        Task::Demo(arguments) => demo::run(&arguments),
        Task::ThreeVms => three_vms::run(),
        Task::Copies(arguments) => copies::run(&arguments),
        Task::KernelTests(arguments) => kernel_tests::run(&arguments),
        Task::ForeignSuites(arguments) => foreign_suites::run(&arguments),
        Task::Tests(arguments) => queue::run(&arguments),
        Task::Promises => promises::run(),
        Task::TransparentPrice(arguments) => transparent_price::run(&arguments),
        Task::Vmms(arguments) => vmms::run(&arguments),
        Task::Tidy => tidy::run(),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
