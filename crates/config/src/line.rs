//! A VM as it is planned: complete, and nothing of it shared with another.

use std::path::{Path, PathBuf};

use policy::{Callee, Caller};
use vsock::Limits;

use crate::net::PortSpec;
use crate::{Channel, Chardev, PortRequest, WindowsSpec, full_name};

/// Where the daemon and a VMM meet for a VM's line, which is the line's kind. `P` is a path that a person may leave open.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VmmSocket<P = PathBuf> {
    /// The vhost-user socket, where the VMM connects.
    Vsock(P),
    /// The socket of a VMM that has a vsock device of its own, and the stem of the sockets at which that VMM calls.
    Hybrid(PathBuf),
    /// The virtio-serial port of the agent, of a guest that has no vsock.
    Serial(Chardev<P>),
}

impl VmmSocket<Option<PathBuf>> {
    /// What was meant: a socket that was left open has this suffix.
    pub(crate) fn or_at(&self, default: impl FnOnce(&str) -> PathBuf) -> VmmSocket {
        match self {
            VmmSocket::Vsock(path) => {
                VmmSocket::Vsock(path.clone().unwrap_or_else(|| default("vhost")))
            }
            VmmSocket::Hybrid(path) => VmmSocket::Hybrid(path.clone()),
            VmmSocket::Serial(chardev) => VmmSocket::Serial(chardev.or_at(|| default("serial"))),
        }
    }
}

impl VmmSocket {
    /// Its socket, at whichever end the listener is.
    pub fn path(&self) -> &Path {
        match self {
            VmmSocket::Vsock(path) | VmmSocket::Hybrid(path) => path,
            VmmSocket::Serial(chardev) => chardev.path(),
        }
    }

    /// The key that says it.
    pub(crate) fn key(&self) -> &'static str {
        match self {
            VmmSocket::Vsock(_) => "vhost-user",
            VmmSocket::Hybrid(_) => "hybrid",
            VmmSocket::Serial(Chardev::Listen(_)) => "serial",
            VmmSocket::Serial(Chardev::Connect(_)) => "serial-connect",
        }
    }
}

/// Everything that the worker must know to open the line of one VM. It has been validated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineSpec {
    /// The domain of the VM.
    pub domain: String,
    /// Name of the VM, of which there is one in its domain.
    pub name: String,
    /// Other names of it, of which there is one in its domain too.
    pub aliases: Vec<String>,
    /// Every group of the domain that it is in, sorted.
    pub groups: Vec<String>,
    /// The groups that it was put into by its own description, rather than by theirs.
    pub own_groups: Vec<String>,
    /// Context identifier of the guest, of which there is one in its domain.
    pub cid: u32,
    /// Where its VMM is met.
    pub vmm: VmmSocket,
    /// Where programs of the host connect, and the stem of the sockets that the guest's dials reach if it is no hybrid VM.
    pub host: PathBuf,
    /// The VM's other virtio-serial ports.
    pub channels: Vec<Channel<Chardev>>,
    /// Its ports in networks as they were asked for.
    pub port_requests: Vec<PortRequest>,
    /// Its ports in networks, which are no part of the line.
    pub ports: Vec<PortSpec>,
    /// The memory of its zero-copy circuits.
    pub windows: Option<WindowsSpec>,
    /// The control socket of its QEMU.
    pub qmp: Option<PathBuf>,
    /// What the VM may use.
    pub limits: Limits,
}

impl LineSpec {
    /// The VM, as it calls.
    pub fn as_caller(&self) -> Caller<'_> {
        Caller::vm(&self.domain, &self.name, &self.groups)
    }

    /// The VM, as it is called.
    pub fn as_callee(&self) -> Callee<'_> {
        Callee::vm(&self.domain, &self.name, &self.groups)
    }

    /// The socket of its VMM, if that has a vsock device of its own.
    pub fn hybrid(&self) -> Option<&Path> {
        match &self.vmm {
            VmmSocket::Hybrid(path) => Some(path),
            _ => None,
        }
    }

    /// How the daemon and its VMM meet for the virtio-serial port of the agent, if the line is one.
    pub fn serial(&self) -> Option<&Chardev> {
        match &self.vmm {
            VmmSocket::Serial(chardev) => Some(chardev),
            _ => None,
        }
    }

    /// The kind of its line, if its guest can call its host alone.
    pub fn host_only_kind(&self) -> Option<&'static str> {
        match self.vmm {
            VmmSocket::Vsock(_) => None,
            VmmSocket::Hybrid(_) => Some("hybrid"),
            VmmSocket::Serial(_) => Some("serial"),
        }
    }

    /// Every socket that is the VM's, the daemon's and the VMM's.
    pub fn sockets(&self) -> impl Iterator<Item = &Path> {
        let of_ports = self.ports.iter().map(|port| port.socket.as_path());
        self.own_sockets().chain(of_ports)
    }

    /// Those of its sockets that are not of a port in a network.
    pub fn own_sockets(&self) -> impl Iterator<Item = &Path> {
        let own = [
            Some(self.vmm.path()),
            Some(self.host.as_path()),
            self.qmp.as_deref(),
        ];
        let channels = self.channels.iter();
        let of_channels =
            channels.flat_map(|channel| [Some(channel.chardev.path()), channel.listens_at()]);
        own.into_iter().chain(of_channels).flatten()
    }

    /// The name by which the daemon and people tell it from VMs of other domains: `web`, or `red/web`.
    pub fn full_name(&self) -> String {
        full_name(&self.domain, &self.name)
    }
}
