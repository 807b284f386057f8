//! The options of the everyday jobs.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};

use super::values::time_between;
use super::{Patience, Time};

/// The options of `stats`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ringdown stats web                           one report
  ringdown stats web --interval 5s             a report every 5 seconds, as vmstat has it
  ringdown stats web --interval 1s --count 10  ten reports

Rates are of the interval before the line that shows them. With --json each report is one line with the guest's counters since its boot, which
is what a program that keeps them wants; see `ringdown metrics` for Prometheus.")]
pub struct StatsArguments {
    /// Name of the VM, or DOMAIN/NAME
    pub name: String,
    /// Time between two reports, 100ms to 1h, which go on until interrupted or for --count [default: 1s, and one report]
    #[arg(long, value_name = "TIME")]
    pub interval: Option<Time>,
    /// Stop after so many reports; 0 goes on
    #[arg(long, value_name = "NUMBER")]
    pub count: Option<u32>,
    /// Print a line of JSON for each report
    #[arg(long)]
    pub json: bool,
    /// How long to wait for the guest to be ready and its agent to answer, 0 to 1h
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time_between(0, 3600))]
    pub wait: Duration,
}

/// The options of `logs`.
#[derive(Debug, Args)]
#[command(after_help = "\
Without a FILE the guest's journal is shown, of guests with systemd. Files are followed by name: through rotations, renamed or truncated.

A connection that breaks is made again and the log goes on where it was, without a gap and without repetition: whether the guest was
paused, its agent or this host's daemon was restarted, or the guest was rebooted. Other messages go to standard error.

On a terminal, control characters in the log are replaced; in a pipe or a file, and with --raw, they are kept.

Exit codes: 0 the log ended, or its reader has gone; 1 it could not be followed to its end, for the reason given; 2 the command line is wrong.")]
pub struct LogsArguments {
    /// Name of the VM, or DOMAIN/NAME
    pub name: String,
    /// Files of the guest, with their whole paths; 16 at most
    #[arg(value_name = "FILE", num_args = 0..=16)]
    pub files: Vec<PathBuf>,
    /// Go on with what comes later, until it is interrupted
    #[arg(short, long)]
    pub follow: bool,
    /// Begin with the last lines, so many at most [default: all; with --follow 10]
    #[arg(short = 'n', long, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(..=1_000_000))]
    pub lines: Option<u32>,
    /// Begin at this time of the journal, in the words of journalctl: yesterday, "2026-11-22 10:00", -1h
    #[arg(
        long,
        value_name = "TIME",
        conflicts_with = "files",
        allow_hyphen_values = true
    )]
    pub since: Option<String>,
    /// Show only what this unit wrote into the journal; may be repeated
    #[arg(short, long, value_name = "UNIT", conflicts_with = "files")]
    pub unit: Vec<String>,
    /// For how long to try to get a broken connection back, 0 to 24h
    #[arg(long, value_name = "TIME", default_value = "60s", value_parser = time_between(0, 86400))]
    pub retry: Duration,
    /// Keep control characters on a terminal too
    #[arg(long)]
    pub raw: bool,
    /// Print a line of JSON for each entry
    #[arg(long)]
    pub json: bool,
    /// How long to wait for the guest to be ready and its agent to answer, 0 to 1h
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time_between(0, 3600))]
    pub wait: Duration,
}

/// The options of `time`.
#[derive(Debug, Args)]
pub struct TimeArguments {
    /// Name of the VM, or DOMAIN/NAME
    pub name: String,
    /// Set the guest's clock by this host's, also where another program keeps it
    #[arg(long, visible_alias = "sync")]
    pub set: bool,
    /// Print the offset as JSON
    #[arg(long)]
    pub json: bool,
    /// How long to wait for the guest to be ready and its agent to answer, 0 to 1h
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time_between(0, 3600))]
    pub wait: Duration,
}

/// The options of `shutdown`.
#[derive(Debug, Args)]
#[command(override_usage = "ringdown shutdown [OPTIONS] <NAME>
       ringdown shutdown [OPTIONS] --all")]
#[command(after_help = "\
The guest shuts down its own way: by systemd, or by the command poweroff of its init system. Its agent being gone does not count; its driver, or
its VMM, has to let go of the line. Of a VM with --hybrid or --serial only its agent and its VMM are seen: without its agent for ten seconds, it
counts as off.

With --all, VMs whose agent is not ready are skipped, with a message. Exit codes: 0 done, or off already (with --suspend, off is 1); 1 not within the time, or refused,
or not asked as its agent is not ready, for the reason given; 2 the command line is wrong.")]
pub struct Shutdown {
    /// Name of the VM, or DOMAIN/NAME
    #[arg(required_unless_present = "all")]
    pub name: Option<String>,
    /// Shut down all VMs of the daemon, at the same time
    #[arg(long, conflicts_with = "name")]
    pub all: bool,
    /// How long to wait for it, 1s to 24h
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub timeout: Patience,
    /// Tell the guest's kernel to stop, after writing everything to disk, if the guest has no way of its own or takes longer than two thirds of the timeout
    #[arg(long)]
    pub force: bool,
    /// Suspend instead of shutting down
    #[arg(long, conflicts_with = "force")]
    pub suspend: bool,
}

/// The options of `reboot`.
#[derive(Debug, Args)]
#[command(after_help = "\
Waits until the guest's agent is there again, in another boot. A VMM that ends when its guest reboots, as QEMU with -no-reboot does, has to be
started again: that is said, with exit code 1, as is that the guest is off.")]
pub struct Reboot {
    /// Name of the VM, or DOMAIN/NAME
    pub name: String,
    /// How long to wait for it, 1s to 24h
    #[arg(long, value_name = "TIME", default_value = "120s")]
    pub timeout: Patience,
    /// Tell the guest's kernel to start again, after writing everything to disk, if the guest has no way of its own or takes longer than two thirds of the timeout
    #[arg(long)]
    pub force: bool,
}

/// The options of `suspend`.
#[derive(Debug, Args)]
#[command(after_help = "\
The guest is suspended to memory, and its VMM has to wake it up (of QEMU: system_wakeup). Waits until the guest no longer answers.
Exit code 1: not within the time, refused, or the guest is off.")]
pub struct Suspend {
    /// Name of the VM, or DOMAIN/NAME
    pub name: String,
    /// How long to wait for it, 1s to 24h
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub timeout: Patience,
}

/// The options of `freeze`.
#[derive(Debug, Args)]
#[command(after_help = "\
All that was written before is on the guest's disks, and nothing is written until `ringdown thaw`, or until the time is over: the guest thaws
by itself then, whatever has become of this host or of the agent. Programs in the guest that write wait meanwhile. The time begins before the first
file system is frozen: if freezing takes longer, everything is thawed and this fails.")]
pub struct Freeze {
    /// Name of the VM, or DOMAIN/NAME
    pub name: String,
    /// Thaw by itself after this time, 1s to 1h
    #[arg(long, value_name = "TIME", default_value = "60s")]
    pub timeout: Time,
    /// How long to wait for the guest to be ready and its agent to answer, 0 to 1h
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time_between(0, 3600))]
    pub wait: Duration,
}

/// The options of `thaw`.
#[derive(Debug, Args)]
pub struct Thaw {
    /// Name of the VM, or DOMAIN/NAME
    pub name: String,
}

/// The commands about the clipboard.
#[derive(Debug, Subcommand)]
pub enum ClipboardCommand {
    /// Write the text in the guest's clipboard to standard output
    Get(ClipboardOfVm),
    /// Put standard input into the guest's clipboard
    Set(ClipboardOfVm),
}

/// The options of `clipboard get` and `clipboard set`.
#[derive(Debug, Args)]
#[command(after_help = "\
The clipboard is that of the active desktop session; the guest needs wl-clipboard, or xclip or xsel for X11. A text may have 1 MiB.")]
pub struct ClipboardOfVm {
    /// Name of the VM, or DOMAIN/NAME
    pub name: String,
    /// How long to wait for the guest to be ready and its agent to answer, 0 to 1h
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time_between(0, 3600))]
    pub wait: Duration,
}

/// The options of `lock`.
#[derive(Debug, Args)]
pub struct Lock {
    /// Name of the VM, or DOMAIN/NAME
    pub name: String,
    /// How long to wait for the guest to be ready and its agent to answer, 0 to 1h
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time_between(0, 3600))]
    pub wait: Duration,
}
