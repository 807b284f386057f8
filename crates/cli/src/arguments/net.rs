//! The commands about networks.

use clap::{Args, Subcommand, ValueEnum};

use super::CaptureOutput;

/// The commands about networks.
#[derive(Debug, Subcommand)]
pub enum NetCommand {
    /// List the networks with their addresses, and what has passed through them
    #[command(alias = "list")]
    Ls(NetList),
    /// Show a network and its ports: addresses, links, frames, and why frames were refused
    Show(NetShow),
    /// Show which MAC address is behind which port
    Macs(NetMacs),
    /// Take the link of a VM's port down, so that the guest has no carrier, or up again
    Link(NetLink),
    /// Show the frames of a network, or of one VM's port, to Wireshark or another reader of pcapng
    Capture(NetCapture),
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
VMM is waiting while no VMM is attached to the port's socket, attached while one is and its guest has started no driver, and running with a driver. It is taken
off while the link is down (`ringdown net link`), whether it is there or not.
RECEIVED is what came from the guest, SENT what went to it, REFUSED what came from it and went nowhere; below the table it says why. DROPPED is what
was for the guest, and it had no room, or no driver yet; of a port that waits for its VMM nothing is counted. INTERRUPTS are those that the guest got, and in parentheses the batches of frames that it was given without one. KICKS are the notifications
that the guest sent, and in parentheses the frames that were taken without one.")]
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
up again when the daemon is started anew without a keeper, and until then `ringdown check` warns of it.")]
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

/// The options of `net capture`.
#[derive(Debug, Args)]
#[command(after_help = "\
Each VM's port is an interface of the capture. Inbound is what came from the guest, also what the switch refused, which a comment says; outbound
is what the guest was given. So a frame between two VMs is there twice in the capture of a network. Frames that a guest leaves its network card to
cut are captured whole, up to 64 KiB, with checksums that are not done yet, as on any host.

  Live:      ringdown net capture lan | wireshark -k -i -
  In words:  ringdown net capture lan web | tcpdump -n -r -

It ends with Ctrl-C, after --count frames, or when its reader goes away. A reader that is too slow loses frames, never a guest; how many, the
capture says, and the last line on standard error. The exit code is 1 if the capture ended for another reason.")]
pub struct NetCapture {
    /// Name of the network, or DOMAIN/NAME
    pub network: String,
    /// Name of the VM, or DOMAIN/NAME, whose port is to be captured alone
    pub vm: Option<String>,
    /// The same, as `ringdown capture` has it
    #[arg(long = "vm", value_name = "NAME", conflicts_with = "vm")]
    pub of_vm: Option<String>,
    #[command(flatten)]
    pub output: CaptureOutput,
}

impl NetCapture {
    /// The VM whose port is to be captured alone.
    pub fn of_vm(&self) -> Option<&str> {
        self.vm.as_deref().or(self.of_vm.as_deref())
    }
}

/// Whether a link is to be up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum LinkState {
    /// It carries frames.
    Up,
    /// It carries none.
    Down,
}
