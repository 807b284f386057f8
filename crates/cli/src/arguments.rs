//! The commands, their options, and what the help says.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use daemon::config::MAX_SPIN_MICROSECONDS;
use wire::agent::bench::MAX_STREAMS;

use crate::commands::bench::{Size, Time};
use crate::qemu::Memory;

/// A private line between each virtual machine and its host: vsock for stock guests and stock VMMs.
#[derive(Debug, Parser)]
#[command(
    name = "ringdown",
    version,
    propagate_version = true,
    disable_help_subcommand = true
)]
pub struct Arguments {
    /// Directory of the daemon's sockets [default: $RINGDOWN_RUNTIME_DIR, else $XDG_RUNTIME_DIR/ringdown, else /run/ringdown]
    #[arg(long, value_name = "DIR", global = true)]
    pub runtime_dir: Option<PathBuf>,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run the daemon in the foreground; it prints `ready` when every socket listens
    Serve(Serve),
    /// Add, list and remove VMs of the running daemon
    #[command(subcommand)]
    Vm(Vm),
    /// Print the arguments with which a VMM attaches to a VM's line
    Args(VmmArguments),
    /// Run a command in a guest, with its input, output, signals and exit code as if it ran here
    Exec(Exec),
    /// Measure a VM's line, or the circuit between two VMs: throughput and round trips
    Bench(Bench),
}

/// The options of `serve`.
#[derive(Debug, Args)]
#[command(
    after_help = "Without a configuration file and without --allow, VMs reach the host and not each other."
)]
pub struct Serve {
    /// Read VMs and rules from this TOML file
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Serve a VM: name=NAME[,cid=CID][,vhost-user=SOCKET][,host=SOCKET][,limits.KEY=NUMBER …]; may be repeated
    #[arg(long, value_name = "KEY=VALUE,…")]
    pub vm: Vec<String>,
    /// Let one VM call another: from=NAME,to=NAME,port=PORT, each of them * for any; may be repeated
    #[arg(long, value_name = "KEY=VALUE,…")]
    pub allow: Vec<String>,
    /// Look for up to this many microseconds before sleeping, while guests and programs answer quickly: saves them and us the
    /// wake-ups, at the cost of CPU time. 0 sleeps at once, 1000 is the most [default: 100]
    #[arg(long, value_name = "MICROSECONDS", value_parser = clap::value_parser!(u64).range(..=MAX_SPIN_MICROSECONDS))]
    pub spin: Option<u64>,
    /// What to log to standard error: error, warn, info, debug or trace, also per module [default: $RINGDOWN_LOG, else info]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
}

/// The commands about VMs.
#[derive(Debug, Subcommand)]
pub enum Vm {
    /// Add a VM to the running daemon
    Add(VmAdd),
    /// List the VMs and how far each has come
    #[command(visible_alias = "list")]
    Ls(VmList),
    /// Remove a VM: its circuits are reset, its sockets removed
    #[command(visible_alias = "remove")]
    Rm(VmRemove),
}

/// The options of `vm add`.
#[derive(Debug, Args)]
pub struct VmAdd {
    /// Name of the VM: 1 to 63 of a-z, 0-9, '.', '_' and '-', starting with a letter or a digit
    pub name: String,
    /// Context identifier of the guest, 3 to 4294967294 [default: the lowest free one]
    #[arg(long)]
    pub cid: Option<String>,
    /// Socket for the VMM [default: NAME.vhost in the runtime directory]
    #[arg(long, value_name = "SOCKET")]
    pub vhost_user: Option<PathBuf>,
    /// Socket for programs of the host [default: NAME.sock in the runtime directory]
    #[arg(long, value_name = "SOCKET")]
    pub host: Option<PathBuf>,
    /// Let the VM use this much: circuits, half-open-circuits, buffered-bytes, buffered-messages, connects-per-second,
    /// host-connects-per-second or control-messages-per-second; may be repeated
    #[arg(long, value_name = "KEY=NUMBER")]
    pub limit: Vec<String>,
    /// Print the VM as JSON
    #[arg(long)]
    pub json: bool,
}

/// The options of `vm ls`.
#[derive(Debug, Args)]
pub struct VmList {
    /// Print the list as JSON
    #[arg(long)]
    pub json: bool,
}

/// The options of `vm rm`.
#[derive(Debug, Args)]
pub struct VmRemove {
    /// Name of the VM
    pub name: String,
}

/// The options of `args`.
#[derive(Debug, Args)]
pub struct VmmArguments {
    /// Name of the VM
    pub name: String,
    /// The VMM to print arguments for
    #[arg(long, value_enum)]
    pub vmm: Vmm,
    /// Memory of the guest: a number and K, M, G or T; a `-m` of yours must say the same
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    pub memory: Memory,
    /// Print the arguments as a JSON array
    #[arg(long)]
    pub json: bool,
}

/// The options of `exec`.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit codes: the command's own; 128 + n if signal n ended it; 127 if the guest has no such command, 126 if it cannot be
executed; 255 if the connection broke before the command's end was known; 1 if the VM is not there or not ready, 2 if
the words were wrong: then nothing was started.")]
pub struct Exec {
    /// Name of the VM
    pub name: String,
    /// Give the command a terminal of its own, and make this one raw meanwhile
    #[arg(short = 't', long)]
    pub tty: bool,
    /// Set a variable in the command's environment; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    pub env: Vec<OsString>,
    /// Run the command in this directory of the guest [default: the home directory of the agent's user]
    #[arg(long, value_name = "DIR")]
    pub cwd: Option<PathBuf>,
    /// How long to wait for the guest to be ready, in seconds, 0 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(..=3600))]
    pub wait: u64,
    /// The command and its arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

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

Exit codes: 0 measured; 1 it could not be measured, or bytes were wrong; 2 the words were wrong; 130 ended by a signal.")]
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
    /// How long to wait for the guest to be ready, in seconds, 0 to 3600
    #[arg(long, value_name = "SECONDS", default_value_t = 30, value_parser = clap::value_parser!(u64).range(..=3600))]
    pub wait: u64,
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

/// A VMM whose arguments can be printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Vmm {
    /// QEMU.
    Qemu,
}
