//! A VM as it is planned: complete, and nothing of it shared with another.

use std::path::{Path, PathBuf};

use vsock::Limits;

use crate::net::PortSpec;
use crate::{Channel, Chardev, PortRequest, WindowsSpec, full_name};

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
    /// Where the VMM connects: the vhost-user socket. A hybrid VM, whose VMM has a vsock device of its own, has none.
    pub vhost_user: Option<PathBuf>,
    /// How the VMM and the daemon meet for the virtio-serial port of the agent: of a VM whose guest has no vsock, instead of the
    /// vhost-user socket.
    pub serial: Option<Chardev>,
    /// The socket of the VMM of a hybrid VM, and the stem of the sockets at which that VMM calls.
    pub hybrid: Option<PathBuf>,
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
    /// Whether its VMM has a vsock device of its own.
    pub fn is_hybrid(&self) -> bool {
        self.hybrid.is_some()
    }

    /// The kind of its line, if its guest can call its host alone.
    pub fn host_only_kind(&self) -> Option<&'static str> {
        match () {
            () if self.serial.is_some() => Some("serial"),
            () if self.is_hybrid() => Some("hybrid"),
            () => None,
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
            self.vhost_user.as_deref(),
            self.serial.as_ref().map(Chardev::path),
            self.hybrid.as_deref(),
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
