//! The options of `run`.

use std::ffi::OsString;
use std::time::Duration;

use clap::Args;

use super::values::time_between;

/// The options of `run`.
#[derive(Debug, Args)]
#[command(after_help = "\
What the command connects by AF_VSOCK goes to the VM that has the CID, and what it connects to a PATH goes to that port of the VM, by the daemon and
its rules, as if the command had said CONNECT to the VM's host socket. This host needs no vsock for that. Everything else is as without `run`, but
the command cannot gain privileges, as by sudo.

  ringdown run socat - VSOCK-CONNECT:4:5000
  ringdown run --unix /run/postgresql/.s.PGSQL.5432=db:5432 -- psql -h /run/postgresql

The command's processes are carried until the command itself ends. docs/run.md says what is carried and what is not.

Exit codes: the command's own; 128 + n if signal n ended it; 127 if there is no such command, 126 if it cannot be executed, 1 if it cannot be
supervised or a VM of --unix is not there, 2 if the command line is wrong: nothing was started then.")]
pub struct RunArguments {
    /// Have connections to this UNIX socket go to the port of a VM; NAME may be DOMAIN/NAME; may be repeated
    #[arg(long, value_name = "PATH=NAME:PORT")]
    pub unix: Vec<String>,
    /// The domain whose CIDs the command uses
    #[arg(long, default_value = config::input::DEFAULT_DOMAIN)]
    pub domain: String,
    /// How long a connection may take, 1s to 5m; AF_VSOCK itself has 2s
    #[arg(long, value_name = "TIME", default_value = "2s", value_parser = time_between(1, 300))]
    pub connect_timeout: Duration,
    /// Say on standard error what became of each connection that was to be carried
    #[arg(short, long)]
    pub verbose: bool,
    /// The command and its arguments; `--` before it where an option of the command is one of `ringdown run` too
    #[arg(trailing_var_arg = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}
