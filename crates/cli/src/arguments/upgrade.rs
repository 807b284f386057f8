//! The options of `upgrade` and `version`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::values::time_between;

/// The options of `upgrade`.
#[derive(Debug, Args)]
#[command(after_help = "\
The daemon needs a keeper (`ringdown hold`, ringdown-keeper.service). It is asked to end, and leaves everything there; then the new program goes on. docs/service.md
says what goes on.

Under systemd it is `systemctl restart` of the daemon's unit, and the new program is the one that the unit starts. Otherwise this command starts the new program as
the daemon was started: with its arguments, working directory, input and outputs, in a process group of its own. It has to be run as the daemon's user. If the new daemon
does not serve in time, or ends within a second, the old program is started again.

The new program's path begins at the root. The file belongs to root or the daemon's user, and others cannot write it.

Exit codes: 0 done, or --check found nothing in the way; 1 not done, or not possible; 2 the command line is wrong.")]
pub struct Upgrade {
    /// Say what an upgrade would do, and do nothing
    #[arg(long)]
    pub check: bool,
    /// The new program [default: the file that the daemon was started from, or that its unit starts]
    #[arg(long, value_name = "FILE")]
    pub binary: Option<PathBuf>,
    /// How long the new daemon may take until it serves, 1s to 10m
    #[arg(long, value_name = "TIME", default_value = "10s", value_parser = time_between(1, 600))]
    pub timeout: Duration,
    /// With --check: print what was found as JSON
    #[arg(long, requires = "check")]
    pub json: bool,
}

/// The options of `version`.
#[derive(Debug, Args)]
pub struct Version {
    /// Print it as JSON, with the versions of what a daemon keeps for the next one
    #[arg(long)]
    pub json: bool,
}
