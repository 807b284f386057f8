//! The options of the commands about the policy.

use std::path::PathBuf;

use clap::{Args, Subcommand};

/// The commands about the policy.
#[derive(Debug, Subcommand)]
pub enum PolicyCommand {
    /// Say what becomes of a call, and which rule decides
    Test(PolicyTest),
    /// Look for rules that never match or open nothing, and for names that do not exist
    Check(PolicyCheck),
    /// List the rules that the daemon has in force, in the order in which they are asked
    Show(PolicyShow),
}

/// The options of `policy show`.
#[derive(Debug, Args)]
pub struct PolicyShow {
    /// Print the rules as JSON
    #[arg(long)]
    pub json: bool,
}

/// The options of `policy test`.
#[derive(Debug, Args)]
#[command(after_help = "\
FROM is a VM, host (a program of the host, or a published port), user:NAME or users:GROUP. TO is a VM, service:NAME, host (the socket that a
program of the host has made for the VM), address:10.1.2.3 or name:deb.debian.org. A VM or service of another domain is DOMAIN/NAME.

Exit codes: 0 allowed or redirected; 3 denied; 1 there is no answer; 2 the command line is wrong.")]
pub struct PolicyTest {
    /// Who calls
    pub from: String,
    /// Who is called
    pub to: String,
    /// The port that is called; of a service its own, if left out; from host also tcp:PORT or unix:PATH, as in the "to" of a published port
    pub port: Option<String>,
    /// Ask about this file instead of the running daemon
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}

/// The options of `policy check`.
#[derive(Debug, Args)]
#[command(
    after_help = "With --config it is about the file alone. `ringdown check --config FILE` also checks this machine: interfaces, addresses, directories, programs.

Exit codes: 0 nothing found; 1 something found, or there is no answer; 2 the configuration is invalid."
)]
pub struct PolicyCheck {
    /// Check this file instead of the running daemon
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print what was found as JSON
    #[arg(long)]
    pub json: bool,
}
