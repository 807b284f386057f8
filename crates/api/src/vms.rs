//! What goes over the control socket about VMs, and about the daemon.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};

use config::{NewPort, VmmSocket, full_name, schema};
use policy::DEFAULT_DOMAIN;
use serde::{Deserialize, Serialize};
use utoipa::openapi::schema::{ObjectBuilder, OneOfBuilder, Type};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use crate::json::{each_once, objects};
use crate::networks::VmPort;
use crate::restart::Restart;
use crate::unavailable::UnavailablePart;

/// The longest wait that one request may ask for, in milliseconds.
pub const MAX_WAIT_MS: u64 = 60 * 60 * 1000;

/// The wait of a request that asks for readiness and gives no `timeout_ms`, in milliseconds.
pub const DEFAULT_WAIT_MS: u64 = 30 * 1000;

/// The body of `POST /v1/vms`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewVm {
    /// Name of the VM.
    #[schema(schema_with = schema::name)]
    pub name: String,
    /// Its domain; left out, it is `default`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = schema::optional::name)]
    pub domain: Option<String>,
    /// Groups of the domain that it is in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(schema_with = schema::names)]
    pub groups: Vec<String>,
    /// Other names of it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(schema_with = schema::names)]
    pub aliases: Vec<String>,
    /// Context identifier; left out, the one that this name had before, or the lowest free one from 3 up is assigned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = schema::optional::cid)]
    pub cid: Option<u64>,
    /// Absolute path of the vhost-user socket; left out, `NAME.vhost` in the runtime directory, or `DOMAIN.NAME.vhost`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = schema::optional::socket_path)]
    pub vhost_user: Option<PathBuf>,
    /// Absolute path of the host socket; left out, `NAME.sock` in the runtime directory, or `DOMAIN.NAME.sock`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = schema::optional::socket_path)]
    pub host: Option<PathBuf>,
    /// Absolute path of the socket of a VMM that has a vsock device of its own, instead of both of the above.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = schema::optional::socket_path)]
    pub hybrid: Option<PathBuf>,
    /// For a guest without vsock: the virtio-serial port of its agent stands for the vhost-user socket. `true`, or the absolute path of
    /// the socket where the VMM connects; with `true` it is `NAME.serial` in the runtime directory, or `DOMAIN.NAME.serial`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<NewSerial>,
    /// The same, but the VMM listens at this absolute path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = schema::optional::socket_path)]
    pub serial_connect: Option<PathBuf>,
    /// Its ports in networks, each network once.
    #[serde(
        default,
        skip_serializing_if = "Vec::is_empty",
        deserialize_with = "objects"
    )]
    #[schema(max_items = 8)]
    pub nets: Vec<NewPort>,
    /// The memory of its zero-copy circuits, as a number and size of windows: `4x16M`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = schema::optional::windows)]
    pub windows: Option<String>,
    /// Absolute path of the control socket of its QEMU, where windows are added while it runs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(schema_with = schema::optional::socket_path)]
    pub qmp: Option<PathBuf>,
    /// What the VM may use, by the names of [`LIMIT_MEMBERS`](config::limits::LIMIT_MEMBERS); what is left out has its default.
    #[serde(
        default,
        skip_serializing_if = "BTreeMap::is_empty",
        deserialize_with = "each_once"
    )]
    #[schema(schema_with = schema::limits)]
    pub limits: BTreeMap<String, u64>,
}

/// Where the VMM connects for the virtio-serial port of the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum NewSerial {
    /// Where it does by default; `false` says that there is no such port.
    Default(bool),
    /// At this absolute path.
    At(PathBuf),
}

// By hand: what a path looks like cannot be said of a variant by attributes.
impl PartialSchema for NewSerial {
    fn schema() -> RefOr<Schema> {
        let switch = ObjectBuilder::new().schema_type(Type::Boolean);
        OneOfBuilder::new()
            .item(switch)
            .item(schema::socket_path())
            .into()
    }
}

impl ToSchema for NewSerial {}

/// What a VM's line is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum LineKind {
    /// A vhost-user-vsock device.
    #[default]
    Vsock,
    /// A vsock device of the VMM's own.
    Hybrid,
    /// A virtio-serial port.
    Serial,
}

impl<P> From<&VmmSocket<P>> for LineKind {
    fn from(vmm: &VmmSocket<P>) -> LineKind {
        match vmm {
            VmmSocket::Vsock(_) => LineKind::Vsock,
            VmmSocket::Hybrid(_) => LineKind::Hybrid,
            VmmSocket::Serial(_) => LineKind::Serial,
        }
    }
}

impl fmt::Display for LineKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            LineKind::Vsock => "vsock",
            LineKind::Hybrid => "hybrid",
            LineKind::Serial => "serial",
        })
    }
}

/// Where the daemon and a VMM meet for a virtio-serial port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ChardevInfo {
    /// The daemon listens at this path.
    #[schema(value_type = String)]
    Listen(PathBuf),
    /// The VMM listens at this path.
    #[schema(value_type = String)]
    Connect(PathBuf),
}

/// A channel of a VM as the daemon sees it now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ChannelStatus {
    /// The port's name in the guest.
    pub name: String,
    /// Where the daemon and the VMM meet for it.
    pub chardev: ChardevInfo,
    /// A VMM is connected.
    pub attached: bool,
    /// Something takes what the guest writes.
    pub taken: bool,
    /// What is at the host's end, in words: `unix:PATH`, `listen:PATH`, `file:PATH`, `command:PATH` or `install-log`.
    pub to: String,
    /// The file that what the guest writes is appended to, if it is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub file: Option<PathBuf>,
    /// What has happened on it, by name.
    #[serde(default)]
    pub counters: BTreeMap<String, u64>,
}

/// The windows of a VM: the memory of its zero-copy circuits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmWindows {
    /// How many there are with the host, and again with other VMs.
    pub count: u32,
    /// The size of each, in bytes.
    pub bytes: u64,
    /// The files that the VMM is started with, if windows are not added while it runs.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<String>)]
    pub files: Vec<PathBuf>,
    /// The control socket of its QEMU, where they are added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub qmp: Option<PathBuf>,
}

/// What becomes of the VMM of a VM that is removed, for a sentence.
pub const VMM_RUNS_ON: &str = "its VMM still runs, without a line";

/// How an agent left its last caller without an answer, or leaves one that waits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Unanswered {
    /// When the caller went, or was seen waiting, as RFC 3339 has it.
    pub time: String,
    /// How long it had waited.
    pub seconds: u64,
    /// Whether it waits still.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub waits: bool,
}

impl fmt::Display for Unanswered {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Unanswered {
            time,
            seconds,
            waits,
        } = self;
        if *waits {
            return write!(
                formatter,
                "its agent has not answered a caller that has waited for {seconds} s"
            );
        }
        write!(
            formatter,
            "its agent did not answer its last caller in {seconds} s ({time})"
        )
    }
}

/// How far a VM has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum VmState {
    /// No VMM has connected to the vhost-user socket, or to that of the serial port; or none listens at its own socket.
    Waiting,
    /// A VMM is connected; the guest's driver has not started.
    Attached,
    /// The guest's vsock driver runs, or something answers at its serial port; the agent has not called.
    Booted,
    /// Its VMM has a vsock device of its own, so that nothing is known of the guest; the agent has not called.
    Joined,
    /// The guest's agent is there.
    Ready,
}

impl VmState {
    /// The state in one word, as in the JSON.
    pub fn word(self) -> &'static str {
        match self {
            VmState::Waiting => "waiting",
            VmState::Attached => "attached",
            VmState::Booted => "booted",
            VmState::Joined => "joined",
            VmState::Ready => "ready",
        }
    }

    /// What it means, for a sentence that begins with the VM's name.
    pub fn meaning(self) -> &'static str {
        match self {
            VmState::Waiting => "no VMM is attached to its socket",
            VmState::Attached => "a VMM is attached, but nothing in its guest answers yet",
            VmState::Booted => {
                "the guest's kernel runs, but its ringdown-agent has not called: it may still be starting, or not run at all (docs/agent-install.md)"
            }
            VmState::Joined => {
                "its VMM has a vsock device of its own, and its ringdown-agent has not called: it may still be starting, or not run at all (docs/agent-install.md)"
            }
            VmState::Ready => "its agent is ready",
        }
    }
}

impl fmt::Display for VmState {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.word())
    }
}

/// What a guest's agent said about itself and its guest. It is the guest's word and nothing more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AgentInfo {
    /// Name and version of the agent.
    pub software: String,
    /// Host name of the guest.
    pub hostname: String,
    /// Identifier of this boot of the guest.
    pub boot_id: String,
    /// Changes when the guest was seen to have been resumed; empty if its agent has none.
    #[serde(default)]
    pub generation: String,
    /// What the agent can do, by name.
    #[serde(default)]
    pub capabilities: Vec<String>,
}

/// A VM as the daemon sees it now.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmStatus {
    /// Name of the VM, of which there is one in its domain.
    pub name: String,
    /// Its domain.
    #[serde(default = "default_domain")]
    pub domain: String,
    /// Other names of it.
    #[serde(default)]
    pub aliases: Vec<String>,
    /// Groups of the domain that it is in.
    #[serde(default)]
    pub groups: Vec<String>,
    /// Context identifier of the guest.
    pub cid: u32,
    /// What its line is.
    #[serde(default)]
    pub kind: LineKind,
    /// How far it has come.
    pub state: VmState,
    /// Whether its VMM is at the line now. An agent behind a serial port counts as being there for a minute longer, as the VMM may come back.
    #[serde(default)]
    pub attached: bool,
    /// Why its last VMM's connection ended, or the guest's device failed or cannot be served, if that was no orderly end. Forgotten when another VMM
    /// speaks vhost-user there, and when a guest's driver runs again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 256)]
    pub last_fault: Option<String>,
    /// When that was, as RFC 3339 has it, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_fault_time: Option<String>,
    /// Whether its last VMM was hung up on for that fault. It may run, and QEMU does not connect again by itself.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub cut_off: bool,
    /// Whether a second VMM has connected to its socket, and waits until the first leaves.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub another_waits: bool,
    /// Whether its VMM has stopped the device of a guest that has circuits, which wait: it is probably paused. Of lines without rings it is not known.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paused: bool,
    /// Why one of its sockets cannot be made, and what to do, if so: it is not served, and tried again every few seconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unavailable: Option<String>,
    /// Whether the configuration names it: where it is removed by hand, a reload adds it again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub configured: bool,
    /// Where the VMM connects. A hybrid VM, whose VMM has a vsock device of its own, has no such socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub vhost_user: Option<PathBuf>,
    /// Where the daemon and its VMM meet for the virtio-serial port of the agent, if the line is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<ChardevInfo>,
    /// The socket of the VMM of a hybrid VM, which has a vsock device of its own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub hybrid: Option<PathBuf>,
    /// Where programs of the host connect.
    #[schema(value_type = String)]
    pub host: PathBuf,
    /// Its other virtio-serial ports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub channels: Vec<ChannelStatus>,
    /// Its ports in networks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nets: Vec<VmPort>,
    /// The memory of its zero-copy circuits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub windows: Option<VmWindows>,
    /// What its agent said, while it is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<AgentInfo>,
    /// That its agent, which is there, did not answer its last caller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unanswered: Option<Unanswered>,
    /// Circuits, in any state.
    pub circuits: u32,
    /// What the VM may use, by the names of [`LIMIT_MEMBERS`](config::limits::LIMIT_MEMBERS).
    #[serde(default)]
    pub limits: BTreeMap<String, u64>,
    /// What it uses now, by the same names for what can be in use, and `granted_bytes`: the credit that is reserved for
    /// what its guest sends.
    #[serde(default)]
    pub usage: BTreeMap<String, u64>,
    /// What has happened on its line, by name.
    #[serde(default)]
    pub counters: BTreeMap<String, u64>,
}

/// What waits behind a VMM.
const ANOTHER_WAITS: &str = "another VMM waits at its socket until this one leaves";

/// What is known of a guest that is paused.
const PAUSED: &str = "its VMM has stopped its device: it is probably paused, and answers nothing until its VMM lets it go on (of QEMU: `cont`)";

impl VmStatus {
    /// What is wrong: of its line and its cards what came last, or else of its agent.
    pub fn fault(&self) -> Option<Cow<'_, str>> {
        let another = self.another_waits.then_some(ANOTHER_WAITS);
        let paused = self.paused.then_some(PAUSED);
        if let Some(reason) = &self.unavailable {
            return Some(Cow::from(format!("not served: {reason}")));
        }
        let of_agent = || self.unanswered.as_ref().map(|of| Cow::from(of.to_string()));
        another
            .map(Cow::from)
            .or_else(|| self.newest_fault())
            .or(paused.map(Cow::from))
            .or_else(of_agent)
    }

    /// Of the faults of its line and its cards the one that came last. What has no time is of now.
    fn newest_fault(&self) -> Option<Cow<'_, str>> {
        let cards = self.nets.iter().filter(|card| card.last_fault.is_some());
        let card = cards.max_by_key(|card| card.last_fault_time.as_ref());
        let is_newer = |card: &&VmPort| match (&self.last_fault, &self.last_fault_time) {
            (None, _) => !self.paused,
            (Some(_), None) => false,
            (Some(_), Some(time)) => card.last_fault_time.as_ref() > Some(time),
        };
        match card.filter(is_newer) {
            Some(card) => {
                let fault = card.last_fault.as_deref().unwrap_or_default();
                Some(Cow::from(format!("card in {}: {fault}", card.network)))
            }
            None => self.last_fault.as_deref().map(Cow::from),
        }
    }

    /// Whether nothing in its guest answers, though something did, of this VMM's or an earlier one's, and no fault says why. The driver lets go of the line in a guest that is suspended, as in one that reboots.
    pub fn is_quiet(&self) -> bool {
        let heard = self.counters.get("packets_from_guest");
        let is_unexplained = self.state == VmState::Attached && self.last_fault.is_none();
        is_unexplained && heard.is_some_and(|count| *count > 0)
    }

    /// How far it has come, in words, with what went wrong before that.
    pub fn state_in_words(&self) -> String {
        if let Some(reason) = &self.unavailable {
            return format!("it is not served, and tried again every few seconds: {reason}");
        }
        let meaning = match self.state {
            VmState::Attached if self.is_quiet() => {
                "a VMM is attached, but nothing in its guest answers now: it boots, or it sleeps, as after `ringdown suspend`, and its VMM has to wake it up (of QEMU: system_wakeup), or it has shut down and its VMM outlives it (QEMU with -no-shutdown, which `quit` ends), or its kernel has stopped: see its console"
            }
            VmState::Waiting if self.kind == LineKind::Hybrid => "no VMM listens at its socket",
            VmState::Ready if self.paused => "its agent has called",
            // Lines of other kinds are connected again.
            state => state.meaning(),
        };
        let meaning = format!("{meaning}{}", self.kept_circuits());
        match &self.last_fault {
            _ if self.another_waits => format!("{meaning}; {ANOTHER_WAITS}"),
            Some(fault) => format!("{meaning}; the last fault: {fault}"),
            None if self.state == VmState::Waiting && self.kind == LineKind::Vsock => format!(
                "{meaning} (start one with what `ringdown args {} --vmm qemu` prints; one that was cut off, as by a restart of a daemon without a keeper, has to be started anew)",
                self.full_name()
            ),
            None if self.state == VmState::Waiting && self.kind == LineKind::Serial => format!(
                "{meaning} (start one with what `ringdown args {} --vmm qemu` prints)",
                self.full_name()
            ),
            None if self.state == VmState::Waiting => format!(
                "{meaning}, {} (start one with what `ringdown args {} --vmm firecracker` prints, or `--vmm cloud-hypervisor`)",
                self.vmm_socket().display(),
                self.full_name()
            ),
            None if self.paused => format!("{meaning}; {PAUSED}"),
            None => meaning,
        }
    }

    /// What waits at a serial port that its VMM has left.
    fn kept_circuits(&self) -> String {
        match (self.kind, self.state, self.circuits) {
            (LineKind::Serial, VmState::Waiting, 1) => {
                "; one circuit waits for it, a minute at most".to_owned()
            }
            (LineKind::Serial, VmState::Waiting, count) if count > 0 => {
                format!("; {count} circuits wait for it, a minute at most")
            }
            _ => String::new(),
        }
    }

    /// The socket of a VMM with a vsock device of its own. A daemon of before named it as the VM's host socket.
    pub fn vmm_socket(&self) -> &Path {
        self.hybrid.as_ref().unwrap_or(&self.host)
    }

    /// The name by which people tell it from VMs of other domains: `web`, or `red/web`.
    pub fn full_name(&self) -> String {
        full_name(&self.domain, &self.name)
    }
}

fn default_domain() -> String {
    DEFAULT_DOMAIN.to_owned()
}

/// The answer to `GET /v1/vms`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VmList {
    /// The VMs, by name.
    pub vms: Vec<VmStatus>,
    /// What the daemon has taken over from the one before it, if a keeper has it know of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart: Option<Restart>,
    /// What cannot be had at the moment, VMs too.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unavailable: Vec<UnavailablePart>,
}

/// The answer to `GET /v1/health`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Health {
    /// Version of the daemon.
    pub version: String,
    /// Process id of the daemon.
    pub pid: u32,
    /// How many VMs there are.
    pub vms: usize,
    /// The file that a reload reads, if it was started with one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub config: Option<PathBuf>,
    /// Whether a keeper keeps what VMMs and guests hold on to, for the next daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keeper: Option<bool>,
    /// Whether the daemon was started with a keeper, and that has ended since.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keeper_ended: bool,
    /// Whether the process `ringdown-paths` has ended: nothing can be made or removed in directories that others may read or write.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub paths_ended: bool,
    /// What it has taken over from the daemon before it, if the keeper has it know of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart: Option<Restart>,
    /// What cannot be had at the moment.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub unavailable: Vec<UnavailablePart>,
}
