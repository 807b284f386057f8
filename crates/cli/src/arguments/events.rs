//! The options of `events` and `why`.

use clap::Args;

/// The options of `events`.
#[derive(Debug, Args)]
#[command(after_help = "\
Kinds of events: restarted, unavailable, available, vm-added, vm-removed, vm-ready, vm-unready, line-up, line-down, circuit-opened, circuit-ended, refused, policy-changed,
reload, window-lent, window-free, capture-started, capture-ended, reader-dropped; and lost, where events that were asked for are not kept any more.

Each exec, cp or other command for a guest is a circuit to port 1007 of that guest, and agents call port 1007 of the host. To leave these out:
ringdown events | grep -v ':1007, '

With --follow, it goes on behind the last event when the daemon was restarted, or has dropped a reader that was too slow.

Exit codes: 0 at the end of what is kept, or after Ctrl-C; 1 when there is no daemon to begin with.")]
pub struct EventArguments {
    /// Go on with what happens from now on; of what has happened, show the last 10 events only, unless --after or --lines is given
    #[arg(short, long)]
    pub follow: bool,
    /// Show the last N of the events that are kept and asked for, then end, or with --follow go on
    #[arg(short = 'n', long, value_name = "N", conflicts_with = "after", value_parser = clap::value_parser!(u16).range(1..=4096))]
    pub lines: Option<u16>,
    /// Show what came after the event of this number; a daemon keeps the last 4096
    #[arg(long, value_name = "ID")]
    pub after: Option<u64>,
    /// Only events of this VM, or DOMAIN/NAME
    #[arg(long, value_name = "NAME")]
    pub vm: Option<String>,
    /// Only events of this kind; may be repeated
    #[arg(long, value_name = "KIND")]
    pub kind: Vec<String>,
    /// Print one JSON object a line
    #[arg(long)]
    pub json: bool,
}

/// The options of `why`.
#[derive(Debug, Args)]
#[command(after_help = "\
Exit codes: 0 the policy allows the call, and nothing known makes it fail; 3 the policy denies it; 4 it is allowed, and the first line says what makes it fail now,
or that the last call failed, within 10 minutes and since the configuration was last read; 1 there is no answer, as for an unknown name; 2 the command line is wrong.")]
pub struct WhyArguments {
    /// Who calls: a VM or DOMAIN/NAME, host, user:NAME or users:GROUP
    pub from: String,
    /// Who is called: a VM or DOMAIN/NAME, host, service:NAME, address:10.1.2.3 or name:deb.debian.org
    pub to: String,
    /// The port; of a service its own, if left out; from host also tcp:PORT or unix:PATH, as in the "to" of a published port
    pub port: Option<String>,
    /// Print the answer as JSON
    #[arg(long)]
    pub json: bool,
}
