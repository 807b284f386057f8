//! The options of the commands about circuits.

use clap::{Args, Subcommand, ValueEnum};

/// The options of `ls`.
#[derive(Debug, Args)]
#[command(after_help = "\
KIND is what carries the bytes: stream, or zero-copy where both programs have mapped a window of memory; those bytes are not counted.
SENT is what the caller has sent and the callee has taken, RECEIVED the other way round. QUEUED and CREDIT have two figures each, first from the
caller to the callee, then the other way: QUEUED is what the daemon holds because the receiver has not taken it yet, CREDIT the room that the receiver has.
STATE is dialling, open, closing, or draining: the stream is over, and a program still has the window.")]
pub struct CircuitList {
    /// Only circuits of this VM, or DOMAIN/NAME
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// Only circuits that were called at this port
    #[arg(long)]
    pub port: Option<u32>,
    /// Only circuits that this rule allows, by its name; - for those that none does
    #[arg(long, value_name = "NAME")]
    pub rule: Option<String>,
    /// Only circuits in this state
    #[arg(long, value_enum, value_name = "STATE")]
    pub state: Option<CircuitState>,
    /// Only circuits of this kind
    #[arg(long, value_enum, value_name = "KIND")]
    pub kind: Option<CircuitKind>,
    /// Print the list as JSON
    #[arg(long)]
    pub json: bool,
}

/// How far a circuit has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CircuitState {
    /// The callee has yet to answer
    Dialling,
    /// Both ends know each other
    Open,
    /// At least one end is gone
    Closing,
    /// The stream is over, and a program still has the window
    Draining,
}

/// What carries a circuit's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CircuitKind {
    /// The daemon carries the bytes
    Stream,
    /// A window of memory that both programs have mapped carries them
    ZeroCopy,
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
STATE is free, in use, absent (the guest has not shown its device), or quarantined: a program has not released it in time, and it is not used until
that guest's agent reports it released.")]
pub struct WindowList {
    /// Print the list as JSON
    #[arg(long)]
    pub json: bool,
}
