//! Services of the host that guests may call, and ports of guests that the host offers to others: plain data, checked when it was read.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use policy::{Callee, full_name};
use wire::agent::forward::Place;

/// The most services that one daemon offers.
pub const MAX_SERVICES: usize = 1024;

/// The most published ports of one daemon.
pub const MAX_PUBLISHES: usize = 1024;

/// Connections at once to one service, when nothing else is said.
pub const DEFAULT_MAX_CONNECTIONS: u32 = 1024;

/// The most connections at once that one service can be given.
pub const MOST_CONNECTIONS: u32 = 65_536;

/// How long a service may take to answer, when nothing else is said.
pub const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// The longest that a service can be given to answer, in milliseconds.
pub const MAX_CONNECT_TIMEOUT_MS: u64 = 600_000;

/// The most words of a service's command: the program and its arguments.
pub const MAX_COMMAND_WORDS: usize = 256;

/// The mode of a published UNIX socket, when nothing else is said: for this user alone.
pub const DEFAULT_SOCKET_MODE: u32 = 0o600;

/// A service of the host: guests of its domain call CID 2 at its port.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// Its name, of which there is one in its domain.
    pub name: String,
    /// The domain whose guests may call it. A rule can let guests of other domains in.
    pub domain: String,
    /// The port of CID 2 by which it is called, of which there is one in its domain. Never one of Ringdown's own.
    pub port: u32,
    /// What answers.
    pub target: ServiceTarget,
    /// Whether the service first gets the caller: a header of the PROXY protocol, version 2. Never for a command or for egress.
    pub proxy_protocol: bool,
    /// Connections at once, from 1 to [`MOST_CONNECTIONS`].
    pub max_connections: u32,
    /// How long the service may take to answer, at most [`MAX_CONNECT_TIMEOUT_MS`].
    pub connect_timeout: Duration,
}

/// What answers a service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ServiceTarget {
    /// A TCP server: `host:port`, where an IPv6 address has its brackets. The host may be a name, which is resolved for each call.
    Tcp(String),
    /// A UDP server: `host:port`, as for TCP.
    Udp(String),
    /// A UNIX stream socket, from the root.
    Unix(PathBuf),
    /// A UNIX sequenced-packet socket, from the root.
    UnixSeqpacket(PathBuf),
    /// A program that is started for each call, from the root, and its arguments. Never empty.
    Command(Vec<String>),
    /// The egress proxy: SOCKS5 and HTTP CONNECT.
    Egress,
}

impl fmt::Display for PublishListen {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PublishListen::Tcp(address) => write!(formatter, "tcp:{address}"),
            PublishListen::Udp(address) => write!(formatter, "udp:{address}"),
            PublishListen::Unix { path, .. } => write!(formatter, "unix:{}", path.display()),
        }
    }
}

impl fmt::Display for ServiceTarget {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ServiceTarget::Tcp(server) => write!(formatter, "tcp:{server}"),
            ServiceTarget::Udp(server) => write!(formatter, "udp:{server}"),
            ServiceTarget::Unix(path) => write!(formatter, "unix:{}", path.display()),
            ServiceTarget::UnixSeqpacket(path) => {
                write!(formatter, "unix-seqpacket:{}", path.display())
            }
            ServiceTarget::Command(words) => {
                let program = words.first().map(String::as_str);
                write!(formatter, "the program {}", program.unwrap_or_default())
            }
            ServiceTarget::Egress => formatter.write_str("the egress proxy"),
        }
    }
}

/// A guest's port that others can reach by an address of the host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publish {
    /// Its name, of which there is one in this daemon.
    pub name: String,
    /// Where the daemon listens.
    pub listen: PublishListen,
    /// Its callee.
    pub to: PublishedPort,
    /// Whether the guest first gets the caller: a header of the PROXY protocol, version 2.
    pub proxy_protocol: bool,
}

/// Where the daemon listens for a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PublishListen {
    /// A TCP address: `address:port`, where an IPv6 address has its brackets. Never a name.
    Tcp(String),
    /// A UDP address, as for TCP.
    Udp(String),
    /// A UNIX stream socket.
    Unix {
        /// Its path, from the root.
        path: PathBuf,
        /// Its permissions, at most 0o777.
        mode: u32,
    },
}

/// What listens in a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublishedPort {
    /// The VM's domain.
    pub domain: String,
    /// The VM's name in its domain, never an alias.
    pub vm: String,
    /// The port there.
    pub port: GuestPort,
}

/// A port of a guest, as it is published.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GuestPort {
    /// A vsock port.
    Vsock(u32),
    /// A TCP port or a UNIX socket, to which the guest's agent connects.
    Agent(Place),
}

impl GuestPort {
    /// The vsock port that is called.
    pub fn called(&self) -> u32 {
        match self {
            GuestPort::Vsock(port) => *port,
            GuestPort::Agent(_) => wire::agent::PORT,
        }
    }
}

/// As the configuration has it.
impl fmt::Display for GuestPort {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            GuestPort::Vsock(port) => port.fmt(formatter),
            GuestPort::Agent(place @ Place::Tcp { .. }) => write!(formatter, "tcp:{place}"),
            GuestPort::Agent(place @ Place::Unix { .. }) => write!(formatter, "unix:{place}"),
        }
    }
}

impl PublishedPort {
    /// The VM's full name: `web`, or `red/web` where the domain is not the [`DEFAULT_DOMAIN`].
    pub fn full_name(&self) -> String {
        full_name(&self.domain, &self.vm)
    }
}

impl Service {
    /// Whether a call to it reaches what a call to the other reaches, in the same way. How many may call, and how long they wait, is no part of that.
    pub fn is_the_same_to_callers(&self, other: &Service) -> bool {
        (&self.name, &self.domain, &self.target) == (&other.name, &other.domain, &other.target)
            && self.proxy_protocol == other.proxy_protocol
    }

    /// It, as it is asked about.
    pub fn as_callee(&self) -> Callee<'_> {
        Callee::Service {
            domain: &self.domain,
            name: &self.name,
        }
    }

    /// Its full name: `registry`, or `red/registry` where the domain is not the [`DEFAULT_DOMAIN`].
    pub fn full_name(&self) -> String {
        full_name(&self.domain, &self.name)
    }
}
