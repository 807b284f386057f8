//! The commands about networks.

use clap::{Args, Subcommand, ValueEnum};

/// The commands about networks.
#[derive(Debug, Subcommand)]
pub enum NetCommand {
    /// List the networks with their addresses, and what has passed through them
    #[command(visible_alias = "list")]
    Ls(NetList),
    /// Show a network and its ports: addresses, links, frames, and why frames were refused
    Show(NetShow),
    /// Show which MAC address is behind which port
    Macs(NetMacs),
    /// Take the link of a VM's port down, so that the guest has no carrier, or up again
    Link(NetLink),
}

/// The options of `net ls`.
#[derive(Debug, Args)]
pub struct NetList {
    /// Print the list as JSON
    #[arg(long)]
    pub json: bool,
}

/// The options of `net show`.
#[derive(Debug, Args)]
#[command(after_help = "\
RECEIVED is what came from the guest, SENT what went to it, REFUSED what came from it and went nowhere; below the table it says why. DROPPED is what
was for the guest, and it had no room. INTERRUPTS are those that the guest got, and in parentheses as many more as it would have got with one
for each batch; KICKS are those of the guest, in the same way.")]
pub struct NetShow {
    /// Name of the network, or DOMAIN/NAME
    pub network: String,
    /// Print the network as JSON
    #[arg(long)]
    pub json: bool,
}

/// The options of `net macs`.
#[derive(Debug, Args)]
pub struct NetMacs {
    /// Name of the network, or DOMAIN/NAME
    pub network: String,
    /// Print the addresses as JSON
    #[arg(long)]
    pub json: bool,
}

/// The options of `net link`.
#[derive(Debug, Args)]
#[command(after_help = "\
Down: frames from the guest and to it are dropped, and the connection of its VMM is closed, whereupon QEMU takes the carrier away. Up: the
port listens again, and QEMU connects again by itself if its character device says so, as `ringdown args` has it. A link that was taken down is
up again when the daemon is started anew.")]
pub struct NetLink {
    /// Name of the VM, or DOMAIN/NAME
    pub vm: String,
    /// Name of the network, or DOMAIN/NAME
    pub network: String,
    /// Which way
    pub state: LinkState,
    /// Print the port as JSON
    #[arg(long)]
    pub json: bool,
}

/// Whether a link is to be up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LinkState {
    /// It carries frames.
    Up,
    /// It carries none.
    Down,
}
