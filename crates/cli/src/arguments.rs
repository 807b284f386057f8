//! The commands, their options, and what the help says.

mod bench;
mod capture;
mod circuits;
mod copy;
mod events;
mod jobs;
mod net;
mod policy;
mod run;
mod top;
mod upgrade;
mod values;
mod web;

pub use bench::{Bench, Direction};
pub use capture::{CaptureArguments, CaptureOutput, FileSize};
pub use copy::{Common as CopyCommon, CopyArguments, SyncArguments};

pub use circuits::{CircuitCommand, CircuitKind, CircuitList, CircuitState, WindowList};
pub use events::{EventArguments, WhyArguments};

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use config::{MAX_SPIN_MICROSECONDS, Workers, parse_workers};

pub use jobs::{
    ClipboardCommand, Freeze, Lock, LogsArguments, Reboot, Shutdown, StatsArguments, Suspend, Thaw,
    TimeArguments,
};

pub use policy::{PolicyCheck, PolicyCommand, PolicyShow, PolicyTest};
pub use run::RunArguments;

pub use top::TopArguments;
pub use upgrade::{Upgrade, Version};
pub use values::{Patience, Size, Time};
pub use web::Web;

pub use net::{LinkState, NetCapture, NetCommand, NetLink, NetList, NetMacs, NetShow};

use crate::vmm::{Accelerator, Memory};
use values::time_between;

/// A private line between each virtual machine and its host: vsock for stock guests and stock VMMs.
#[derive(Debug, Parser)]
#[command(
    name = "ringdown",
    version,
    propagate_version = true,
    after_help = "\
With --json a command prints an object with the number `version`, which is 1, and what was asked for under its name, such as `vms`. Commands that
print as they go (events, logs, stats) print such an object on each line. docs/api.md has the names.

Where $XDG_RUNTIME_DIR/ringdown has no daemon, commands use that of /run/ringdown."
)]
pub struct Arguments {
    /// Directory of the daemon's sockets [default: $RINGDOWN_RUNTIME_DIR, else $XDG_RUNTIME_DIR/ringdown, else /run/ringdown]
    #[arg(long, value_name = "DIR", global = true, display_order = 1000)]
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
    /// Keep VMs' lines while the daemon is stopped, killed or replaced; it prints `ready` when its socket listens
    Hold(Hold),
    /// Have a new version of the program go on where the daemon ends, or say what that would do
    Upgrade(Upgrade),
    /// Add, list and remove VMs of the running daemon
    #[command(subcommand)]
    Vm(Vm),
    /// List networks, show who is in them, capture their frames, and take links up and down
    #[command(subcommand)]
    Net(NetCommand),
    /// Show the packets of all VMs' lines, or of one, to Wireshark or another reader of pcapng
    Capture(CaptureArguments),
    /// List circuits, as `ss` lists sockets: their ends, age and rule, and whether they are zero-copy
    Ls(CircuitList),
    /// Show VMs and circuits live, what each sends and receives, and how much is queued
    Top(TopArguments),
    /// Show past events, and follow new ones: VMs, circuits, refusals, reloads, captures
    Events(EventArguments),
    /// Explain why a call fails: the rule or the state that prevents it, and the last refusals
    Why(WhyArguments),
    /// End a circuit
    #[command(subcommand)]
    Circuit(CircuitCommand),
    /// List the windows of memory that zero-copy circuits have
    Windows(WindowList),
    /// Serve a web page on loopback that shows VMs, circuits, policy and traffic as they are, and print its address
    Web(Web),
    /// Print the arguments with which a VMM attaches to a VM's line, its channels and its networks
    Args(VmmArguments),
    /// Run a command in a guest, with its input, output, signals and exit code as if it ran here
    Exec(Exec),
    /// Open a login shell in a guest, on a terminal of its own
    Shell(Shell),
    /// Copy files and directories to a guest or from a guest
    Cp(CopyArguments),
    /// Make a directory equal to one in a guest, or one in a guest equal to one here: only what differs is sent
    Sync(SyncArguments),
    /// Carry connections between programs of the host and of a guest, over TCP and UNIX sockets
    Forward(ForwardArguments),
    /// Run a program of this host that knows nothing of Ringdown, and carry its connections to guests
    Run(RunArguments),
    /// Show a guest's processors, memory, disks and network, once or at an interval
    Stats(StatsArguments),
    /// Show a guest's journal, or files of it, and follow them across restarts and broken connections
    Logs(LogsArguments),
    /// Show the log of a guest's installer, during the installation and afterwards
    InstallLog(InstallLogArguments),
    /// Show how far a guest's clock is from this host's, and set it
    Time(TimeArguments),
    /// Shut guests down, and wait until they are
    Shutdown(Shutdown),
    /// Reboot a guest, and wait until it is ready
    Reboot(Reboot),
    /// Suspend a guest to memory
    Suspend(Suspend),
    /// Hold all writes to a guest's disks, so that they can be copied
    Freeze(Freeze),
    /// Let a guest write to its disks again
    Thaw(Thaw),
    /// Read and set the clipboard of a guest's desktop
    #[command(subcommand)]
    Clipboard(ClipboardCommand),
    /// Lock the screen of a guest's desktop
    Lock(Lock),
    /// Print figures of all lines and guests in the form that Prometheus reads
    Metrics,
    /// Read the configuration file again: rules, groups, services and published ports change, and VMs and networks come and go
    Reload(Reload),
    /// Ask which rule decides about a call, and find rules that have no effect
    #[command(subcommand)]
    Policy(PolicyCommand),
    /// The file in which every decision is written down
    #[command(subcommand)]
    Audit(AuditCommand),
    /// Put the agent into guests
    #[command(subcommand)]
    Agent(AgentCommand),
    /// Start the programs of services for a sandboxed daemon, which runs this by itself
    #[command(hide = true)]
    StartPrograms,
    /// Check this machine, a configuration and the running daemon, and print each problem with its remedy
    Check(Check),
    /// Print completions for a shell: commands, options, and names of VMs, networks, rules and circuits
    Completions(Completions),
    /// Print what may stand in the place of a command line's last word, for the shells' completions
    #[command(hide = true)]
    Complete(Complete),
    /// Write manual pages and shell completions
    Manual(Manual),
    /// Print this program's version, and the versions of what its daemon keeps for the next one
    Version(Version),
    /// Measure a VM's line, or the circuit between two VMs: throughput and round trips
    Bench(Bench),
}

/// The options of `serve`.
#[derive(Debug, Args)]
#[command(after_help = "\
Without a configuration file and without --allow, VMs reach the host and not each other. ringdown.toml(5), and docs/ringdown.toml, have every key of the
file.

Signals: SIGTERM and SIGINT end the daemon; SIGHUP reads the configuration again, as `ringdown reload` does; SIGUSR1 opens the audit's file anew,
as `ringdown audit rotate` does.")]
pub struct Serve {
    /// Read VMs and rules from this TOML file: ringdown.toml(5)
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Serve a VM: name=NAME [,domain=DOMAIN] [,cid=CID] [,groups=NAME+NAME…] [,aliases=NAME+NAME…] [,vhost-user=SOCKET] or [,hybrid=SOCKET] [,host=SOCKET]
    /// or [,serial[=SOCKET]] or [,serial-connect=SOCKET] [,networks=NETWORK+NETWORK…] [,windows=COUNTxSIZE[,qmp=SOCKET]] [,limits.KEY=NUMBER …]; may be repeated
    #[arg(long, value_name = "KEY=VALUE,…")]
    pub vm: Vec<String>,
    /// Have a network of this name, or DOMAIN/NAME, for VMs to be put into, as [[network]] with nothing but the name; may be repeated
    #[arg(long, value_name = "NAME")]
    pub network: Vec<String>,
    /// Let VMs call others: from=NAME,to=NAME,port=PORT[,domain=DOMAIN]; * for any, @GROUP for a group, DOMAIN/NAME for a VM of another
    /// domain, 8000-8999 for several ports; may be repeated
    #[arg(long, value_name = "KEY=VALUE,…")]
    pub allow: Vec<String>,
    /// Poll for up to this many microseconds before sleeping, while guests and programs answer quickly: saves all of them the
    /// wake-ups, at the cost of CPU time. 0 sleeps at once, 1000 is the most [default: 100]
    #[arg(long, value_name = "MICROSECONDS", value_parser = clap::value_parser!(u64).range(..=MAX_SPIN_MICROSECONDS))]
    pub spin: Option<u64>,
    /// Spread networks over up to so many threads, 1 to 64, or auto: as many as the daemon has cores, at most 8. Each begins with its first network, so
    /// that there are never more than networks. All lines share one thread of their own [default: auto]
    #[arg(long, value_name = "NUMBER", value_parser = parse_workers)]
    pub workers: Option<Workers>,
    /// Take so many frames from a guest's ring at a time; to measure what batches bring
    #[arg(long, value_name = "FRAMES", hide = true)]
    pub net_batch: Option<usize>,
    /// Have the keeper at this socket (`ringdown hold`) keep what VMMs and guests hold on to, and go on with what it has
    #[arg(long, value_name = "SOCKET")]
    pub keeper: Option<PathBuf>,
    /// Confine the daemon to the files and system calls that it needs: on, off, or log to have the kernel log the calls that would be refused
    #[arg(long, value_enum, value_name = "MODE", default_value = "on")]
    pub sandbox: Sandbox,
    /// Let the sandboxed daemon make files in this directory, beside those that the configuration names when it starts; may be repeated
    #[arg(long, value_name = "DIR")]
    pub sandbox_path: Vec<PathBuf>,
    /// What to log to standard error: error, warn, info, debug or trace, also per module [default: $RINGDOWN_LOG, else info]
    #[arg(long, value_name = "FILTER")]
    pub log: Option<String>,
    /// Read the configuration as for a start, print the names of its VMs, and end; nothing is made, and no daemon is asked
    #[arg(long)]
    pub dry_run: bool,
}

/// The options of `hold`.
#[derive(Debug, Args)]
#[command(after_help = "\
Start it once, as the user that runs the daemon, and give the daemon the same socket: `ringdown serve --keeper SOCKET`. When that ends in any way, the next
`ringdown serve --keeper SOCKET` goes on with the guests' lines and networks, and with circuits between guests. docs/service.md says what lives on.")]
pub struct Hold {
    /// Socket at which the daemon finds it
    #[arg(long, value_name = "SOCKET")]
    pub socket: PathBuf,
    /// Have the keeper at this socket let everything go and end: VMMs see their connections close, and the sockets at which they connect are removed. Refused while a daemon uses it
    #[arg(long)]
    pub release: bool,
}

/// Whether the daemon confines itself.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub enum Sandbox {
    /// What it does not need is refused
    On,
    /// Nothing is refused, and the kernel logs system calls that would be
    Log,
    /// Nothing is confined
    Off,
}

/// The commands about VMs.
#[derive(Debug, Subcommand)]
pub enum Vm {
    /// Add a VM to the running daemon
    Add(Box<VmAdd>),
    /// List the VMs and how far each has come
    #[command(alias = "list")]
    Ls(VmList),
    /// Remove a VM: its circuits are reset, its sockets removed; its VMM goes on, and a reload adds a VM again that the configuration names
    #[command(aliases = ["remove", "del", "delete"])]
    Rm(VmRemove),
}

/// The options of `vm add`.
#[derive(Debug, Args)]
pub struct VmAdd {
    /// Name of the VM: 1 to 63 of a-z, 0-9, '.', '_' and '-', starting with a letter or a digit; or DOMAIN/NAME
    pub name: String,
    /// Domain of the VM, which has names and CIDs of its own [default: default]
    #[arg(long)]
    pub domain: Option<String>,
    /// Put the VM into this group; may be repeated
    #[arg(long, value_name = "GROUP")]
    pub group: Vec<String>,
    /// Another name of the VM; may be repeated
    #[arg(long, value_name = "NAME")]
    pub alias: Vec<String>,
    /// Context identifier of the guest, 3 to 4294967294 [default: the one that this name had before, or the lowest free one]
    #[arg(long)]
    pub cid: Option<String>,
    /// Socket for the VMM [default: NAME.vhost in the runtime directory, or DOMAIN.NAME.vhost]
    #[arg(long, value_name = "SOCKET")]
    pub vhost_user: Option<PathBuf>,
    /// Socket for programs of the host [default: NAME.sock in the runtime directory, or DOMAIN.NAME.sock]
    #[arg(long, value_name = "SOCKET")]
    pub host: Option<PathBuf>,
    /// The UNIX socket of a VMM that has a vsock device of its own (Firecracker, Cloud Hypervisor, libkrun), instead of --vhost-user
    #[arg(long, value_name = "SOCKET", conflicts_with = "vhost_user")]
    pub hybrid: Option<PathBuf>,
    /// Reach the guest, which has no vsock, by the virtio-serial port of its agent; QEMU connects to this socket [default: NAME.serial in the
    /// runtime directory, or DOMAIN.NAME.serial]
    #[arg(long, value_name = "SOCKET", num_args = 0..=1, require_equals = true, conflicts_with_all = ["vhost_user", "hybrid", "serial_connect"])]
    pub serial: Option<Option<PathBuf>>,
    /// The same, but QEMU listens at this socket, and the daemon connects
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["vhost_user", "hybrid"])]
    pub serial_connect: Option<PathBuf>,
    /// Put the VM into a network: NETWORK [,mac=MAC] [,ipv4=ADDRESS] [,vlan=VLAN or ,trunk=VLAN+VLAN… [,native=VLAN]] [,isolated] [,learn]
    /// [,frames-per-second=NUMBER] [,bytes-per-second=NUMBER] [,broadcasts-per-second=NUMBER] [,queue-pairs=NUMBER] [,moderation=adaptive|off|50us]
    /// [,vhost-user=SOCKET]; may be repeated
    #[arg(long, value_name = "NETWORK[,KEY=VALUE…]")]
    pub net: Vec<String>,
    /// Have this many windows of this size for zero-copy circuits with the host, such as 4x16M, and as many with other VMs if there is --qmp: 1 to 8 of
    /// 8M to 1G each
    #[arg(long, value_name = "COUNTxSIZE")]
    pub windows: Option<String>,
    /// Control socket of the VM's QEMU (-qmp unix:SOCKET,server=on,wait=off), where windows are added while it runs; without it the VMM is started
    /// with them
    #[arg(long, value_name = "SOCKET", requires = "windows")]
    pub qmp: Option<PathBuf>,
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
#[command(after_help = "\
STATE is how far the VM has come:
  waiting   no VMM is attached to its socket, or listens at its own
  attached  a VMM is, and nothing in its guest answers
  booted    the guest's vsock driver runs, or something answers at its serial port; its agent has not called
  joined    its VMM has a vsock device of its own, so that nothing is known of the guest; its agent has not called
  ready     its agent is there, and exec, cp and the other commands for guests work

GUEST is the guest's host name, by its agent. FAULT, there if a VM has one, is why its VMM's connection, its device or one of its network cards failed, or that the VM is
probably paused.")]
pub struct VmList {
    /// Print the list as JSON
    #[arg(long)]
    pub json: bool,
}

/// The options of `vm rm`.
#[derive(Debug, Args)]
pub struct VmRemove {
    /// Name of the VM, or DOMAIN/NAME
    pub name: String,
    /// Print the VM as it was, as JSON
    #[arg(long)]
    pub json: bool,
}

/// The options of `reload`.
#[derive(Debug, Args)]
#[command(after_help = "\
An invalid configuration, or one that cannot be brought into force, changes nothing: everything stays as it was, and the message says what to do. VMs that were added by
hand stay. The sockets, the CID, the limits and the number of queues of a VM that is there do not change, nor do the MTU and the uplink of a
network, nor runtime-dir, state-dir, spin-microseconds and workers.

Exit codes: 0 reloaded; 1 it could not be brought into force, or the daemon was started without --config and has no file to read; 2 the configuration is
invalid.")]
pub struct Reload {
    /// End circuits that the new rules do not allow any more; without it only new calls are asked about
    #[arg(long)]
    pub enforce_existing: bool,
    /// Print what has changed as JSON
    #[arg(long)]
    pub json: bool,
}

/// The commands about the audit.
#[derive(Debug, Subcommand)]
pub enum AuditCommand {
    /// Have the daemon open the file anew, after it was moved away; for logrotate
    Rotate,
}

/// The options of `install-log`.
#[derive(Debug, Args)]
#[command(after_help = "\
The VM needs a channel with install-log = true in the daemon's configuration, and its QEMU the port that `ringdown args` prints for it. Anaconda,
the installer of Fedora and its kin, writes its log there by itself.

On a terminal, control characters in the log are replaced; in a pipe or a file, and with --raw, they are kept.

Exit codes: 0 shown, or its reader has gone; 1 it could not be shown; 2 the command line is wrong.")]
pub struct InstallLogArguments {
    /// Name of the VM, or DOMAIN/NAME
    pub name: String,
    /// Go on with what comes later, until it is interrupted
    #[arg(short, long)]
    pub follow: bool,
    /// Keep control characters, even on a terminal
    #[arg(long)]
    pub raw: bool,
}

/// The options of `args`.
#[derive(Debug, Args)]
pub struct VmmArguments {
    /// Name of the VM, or DOMAIN/NAME
    pub name: String,
    /// The VMM to print arguments for
    #[arg(
        long,
        value_enum,
        value_name = "qemu|libvirt|cloud-hypervisor|firecracker|alioth"
    )]
    pub vmm: Vmm,
    /// Memory of the guest: a number and K, M, G or T; a `-m` of yours must say the same. A serial VM needs none that is shared
    #[arg(long, value_name = "SIZE", default_value = "256M")]
    pub memory: Memory,
    /// What QEMU or libvirt runs the guest with. QEMU before 8.0 crashes when it emulates a guest that has a network card for KVM; a card for tcg works with
    /// both and is slower [default: kvm if /dev/kvm can be used and this machine is not a VM itself, else tcg]
    #[arg(long, value_enum)]
    pub accel: Option<Accelerator>,
    /// Print the arguments as JSON, each as a word; of Firecracker's configuration, the part is JSON without this too
    #[arg(long)]
    pub json: bool,
}

/// The options of `exec`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  ringdown exec web uname -a
  ringdown exec -t web sh
  ringdown exec web -- ls -t         -t is an option of both: behind `--` it is the command's

With -t on a terminal each key is the command's, Ctrl-C too. As in ssh, Enter, ~ and . leave a guest that takes none, with exit code 255; Enter, ~ and ~
send one ~.

Signals (HUP, INT, QUIT, TERM, USR1, USR2) go on to the command. If the guest's agent does not answer within 5 s of one that asks it to end, as where the VM is
paused, exec ends by itself with exit code 255, and the command in the guest may still run; so `timeout 60 ringdown exec ...` ends. It ends too at a second
such signal a second later without an answer, and at the third within two seconds.

Exit codes: the command's own; 128 + n if signal n ended it; 127 if the guest has no such command, 126 if it cannot be executed, or the guest has no directory
as --cwd says;
255 if the connection broke before the command's end was known, as when the daemon is restarted (the agent then hangs the command
up, and kills it if it does not go), or gave no answer after a signal, or the guest's agent refused it (agent.toml); 1 if the VM is not there, not ready, gives no
answer, or is not to be reached by this user, 2 if the command line is wrong or too long: nothing was started then.")]
pub struct Exec {
    /// Name of the VM, or DOMAIN/NAME
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
    /// How long to wait for the guest to be ready and its agent to answer, 0 to 1h
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time_between(0, 3600))]
    pub wait: Duration,
    /// The command and its arguments; `--` before it where an option of the command is one of `ringdown exec` too
    #[arg(trailing_var_arg = true, required = true, value_name = "COMMAND")]
    pub command: Vec<OsString>,
}

/// The options of `check`.
#[derive(Debug, Args)]
#[command(after_help = "\
Permissions are those of the user who asks: for the service, ask as its user, as in `sudo -u ringdown ringdown check`.

That no daemon serves is a warning, so that a machine can be looked at before the first start, and an error where --runtime-dir or RINGDOWN_RUNTIME_DIR names its
directory and there is no --config, or where one that has died has left its socket.

Exit codes: 0 nothing is wrong, though there may be warnings; 1 something does not work; 2 the command line is wrong.")]
pub struct Check {
    /// Check this configuration file too
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Print what was found as JSON
    #[arg(long)]
    pub json: bool,
}

/// The options of `completions`.
#[derive(Debug, Args)]
#[command(
    after_help = "For this shell alone: `source <(ringdown completions bash)`, or `ringdown completions fish | source`.

The scripts for bash, zsh and fish call the `ringdown` of the search path, which asks the daemon for names, for a second at most."
)]
pub struct Completions {
    /// The shell
    #[arg(value_enum)]
    pub shell: clap_complete::Shell,
}

/// A command line to its word under the cursor.
#[derive(Debug, Args)]
pub struct Complete {
    /// The command line, whose last word is to be completed
    #[arg(last = true)]
    pub words: Vec<OsString>,
}

/// The options of `manual`.
#[derive(Debug, Args)]
pub struct Manual {
    /// Directory in which man1, man5 and completions are made
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
}

/// The commands about the agent.
#[derive(Debug, Subcommand)]
pub enum AgentCommand {
    /// Install or update the agent in a running guest over ssh, and start it
    Install(AgentInstall),
}

/// The options of `agent install`.
#[derive(Debug, Args)]
#[command(after_help = "\
The guest needs a POSIX shell, and root or sudo. With systemd or OpenRC the agent is started now and at each boot. Guests that ssh does not
reach get it into their image: see docs/agent-install.md.

  ringdown agent install web --to root@192.0.2.7 --ssh-option=-p --ssh-option=2222")]
pub struct AgentInstall {
    /// Name of the VM
    pub name: String,
    /// Where ssh goes: [USER@]HOST, or a name of its configuration [default: NAME]
    #[arg(long, value_name = "DESTINATION")]
    pub to: Option<String>,
    /// The agent's binary [default: ringdown-agent beside this program]
    #[arg(long, value_name = "FILE")]
    pub binary: Option<PathBuf>,
    /// The program that does what ssh does
    #[arg(long, value_name = "PROGRAM", default_value = "ssh")]
    pub ssh: String,
    /// An argument for ssh before the destination; may be repeated
    #[arg(long, value_name = "ARGUMENT", allow_hyphen_values = true)]
    pub ssh_option: Vec<String>,
}

/// The options of `shell`.
#[derive(Debug, Args)]
#[command(after_help = "\
Each key is the shell's, Ctrl-C too. As in ssh, Enter, ~ and . leave a guest that takes none, with exit code 255; Enter, ~ and ~ send one ~.")]
pub struct Shell {
    /// Name of the VM
    pub name: String,
    /// Set a variable on top of the agent's environment; may be repeated
    #[arg(long, value_name = "NAME=VALUE")]
    pub env: Vec<OsString>,
    /// How long to wait for the guest to be ready and its agent to answer, 0 to 1h
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time_between(0, 3600))]
    pub wait: Duration,
    /// A command, which is refused with the line that runs it
    #[arg(trailing_var_arg = true, hide = true)]
    pub command: Vec<OsString>,
}

/// The options of `forward`.
#[derive(Debug, Args)]
#[command(after_help = "\
A place is [ADDRESS:]PORT or the absolute path of a UNIX socket; it leads to HOST:PORT or a path. Without ADDRESS it is one of 127.0.0.1, * stands for all
addresses, an IPv6 address stands in brackets, and port 0 takes one that is free.

  ringdown forward web 8080:80                         port 8080 of this host leads to port 80 of the guest
  ringdown forward web -L /run/db.sock:localhost:5432  a socket of this host leads to a port of the guest
  ringdown forward web -R 3128:proxy.example:3128      port 3128 of the guest leads to a port that this host can reach

It forwards until it is interrupted, also across restarts of the guest, its agent and the daemon; connections that are open then end.")]
pub struct ForwardArguments {
    /// Name of the VM
    pub name: String,
    /// Ports of this host that lead to ports of the guest: PORT, or HERE:THERE
    #[arg(value_name = "PORTS")]
    pub ports: Vec<String>,
    /// A place of this host that leads to one of the guest; may be repeated
    #[arg(
        short = 'L',
        long = "to-guest",
        value_name = "[ADDRESS:]PORT:HOST:PORT"
    )]
    pub local: Vec<String>,
    /// A place of the guest that leads to one of this host; may be repeated
    #[arg(short = 'R', long = "to-host", value_name = "[ADDRESS:]PORT:HOST:PORT")]
    pub remote: Vec<String>,
    /// How long to wait for the guest to be ready and its agent to answer, 0 to 1h
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = time_between(0, 3600))]
    pub wait: Duration,
}

/// A VMM whose arguments can be printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Vmm {
    /// QEMU.
    Qemu,
    /// libvirt: the elements of the domain's XML.
    Libvirt,
    /// Cloud Hypervisor, with a vhost-user device, or of a hybrid VM with a vsock device of its own.
    CloudHypervisor,
    /// Firecracker, whose vsock device is its own: a part of its configuration file.
    Firecracker,
    /// Alioth, with a vhost-user device.
    Alioth,
}
