//! The options of the commands about circuits.

use clap::{Args, Subcommand};

/// The options of `ls`.
#[derive(Debug, Args)]
#[command(after_help = "\
KIND is what carries the bytes: stream, or zero-copy where both programs have mapped a window of memory; what passes there nobody counts.
SENT is what the caller has sent and the callee has taken, RECEIVED the other way round. QUEUED is what the daemon keeps of what the caller has sent, then of what it is sent;
CREDIT, in the same order, what whoever receives it has room for.
STATE is dialling, open, closing, or draining: the stream is over, and a program still has the window.")]
pub struct CircuitList {
    /// Only circuits of this VM, or DOMAIN/NAME
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// Only circuits that were called at this port
    #[arg(long)]
    pub port: Option<u32>,
    /// Print the list as JSON
    #[arg(long)]
    pub json: bool,
}

/// The commands about one circuit.
#[derive(Debug, Subcommand)]
pub enum CircuitCommand {
    /// End a circuit: both its ends see a reset, and its window, if it has one, is taken away
    End(CircuitEnd),
}

/// The options of `circuit end`.
#[derive(Debug, Args)]
pub struct CircuitEnd {
    /// Number of the circuit, as `ringdown ls` shows it
    pub id: String,
}

/// The options of `windows`.
#[derive(Debug, Args)]
#[command(after_help = "\
STATE is free, in use, absent (the guest has not shown its device), or quarantined: somebody has not let go of it in time, and nobody gets it until
that guest's agent says that it is gone.")]
pub struct WindowList {
    /// Print the list as JSON
    #[arg(long)]
    pub json: bool,
}
