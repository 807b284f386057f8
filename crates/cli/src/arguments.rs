//! The commands, their options, and what the help says.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use daemon::config::MAX_SPIN_MICROSECONDS;

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

/// A VMM whose arguments can be printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Vmm {
    /// QEMU.
    Qemu,
}
