//! What `bench` can be asked.

use std::time::Duration;

use clap::{Args, ValueEnum};
use wire::agent::bench::MAX_STREAMS;

use super::values::time_between;
use super::{Size, Time};

/// The options of `bench`.
#[derive(Debug, Args)]
#[command(after_help = "\
What is measured: one program on the host and the agent in the guest (with --to, the agents of two guests) send each other messages over
vsock, as any program would: a throughput test writes them one after the other, a round trip is over when the message has come back. So
the figures contain the guest's kernel and its virtual CPUs, and the program's own work. What counts is what the receiver has received,
by the host's clock; single round trips between guests are timed by the guest that begins them. With --verify every byte is compared, which costs time at both
ends.

A guest without KVM (QEMU with TCG) is emulated and ten to a hundred times slower: its figures say nothing about the line.

VM to VM, VM calls VM2, and the policy has to allow it: --allow from=VM,to=VM2,port=* at `ringdown serve`, or a single port that is given
with --port too.

Without --direction and --ping, throughput each way and round trips are measured, 3 s each. Ctrl-C ends the measurement and shows what there
is so far; a second one ends at once.

Exit codes: 0 measured; 1 it could not be measured, or bytes were wrong; 2 the command line is wrong; 130 ended by a signal.")]
pub struct Bench {
    /// Name of the VM
    #[arg(value_name = "VM")]
    pub name: String,
    /// Measure between the VM and this one, which the VM calls, instead of the host
    #[arg(long, value_name = "VM2")]
    pub to: Option<String>,
    /// Measure throughput to the guest (with --to: from VM to VM2), from it, or both, one after the other
    #[arg(long, value_enum)]
    pub direction: Option<Direction>,
    /// Measure round trips
    #[arg(long, conflicts_with_all = ["direction", "streams"])]
    pub ping: bool,
    /// Length of the messages, 1 to 16M [default: 64K; of round trips 64]
    #[arg(long, value_name = "BYTES")]
    pub size: Option<Size>,
    /// Number of streams at once, 1 to 128
    #[arg(long, value_name = "NUMBER", default_value = "1", value_parser = streams)]
    pub streams: usize,
    /// How long each measurement takes, 100ms to 1h [default: 10s]
    #[arg(long, value_name = "TIME")]
    pub time: Option<Time>,
    /// Compare every byte with what was sent
    #[arg(long)]
    pub verify: bool,
    /// Let the agent of VM2 listen at this vsock port [default: any that is free]
    #[arg(long, value_name = "PORT", requires = "to", value_parser = clap::value_parser!(u32).range(1..=4_294_967_294))]
    pub port: Option<u32>,
    /// Print one JSON document at the end, and nothing else
    #[arg(long)]
    pub json: bool,
    /// How long to wait for the guest to be ready and its agent to answer, 0 to 1h
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time_between(0, 3600))]
    pub wait: Duration,
}

/// Which way bytes go.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Direction {
    /// From the host, or the VM that calls.
    ToGuest,
    /// To it.
    FromGuest,
    /// First the one, then the other.
    Both,
}

fn streams(text: &str) -> Result<usize, String> {
    text.parse()
        .ok()
        .filter(|count| (1..=MAX_STREAMS).contains(count))
        .ok_or_else(|| format!("expected 1 to {MAX_STREAMS}"))
}
