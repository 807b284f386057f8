//! The options of the command about the web page.

use clap::Args;

/// The options of `web`.
#[derive(Debug, Args)]
#[command(after_help = "\
The address has a token and a host name of its own in it, which are made anew at each start: with the address one sees what
`ringdown ls`, `vm ls`, `metrics` and `policy` show, and can change nothing. It is for a browser on this host; from elsewhere,
`ssh -L 8080:127.0.0.1:8080 HOST` with --listen 127.0.0.1:8080 brings it there. Browsers look for names below `localhost` on
their own machine; Safari does not.")]
pub struct Web {
    /// Listen at this port of 127.0.0.1 and [::1]; port 0 is any that is free
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:0")]
    pub listen: String,
}
