//! virtio-serial ports of a guest, and how QEMU and the host's program meet for each.

use std::path::PathBuf;

/// The port through which the agent of a guest without vsock is reached.
pub const AGENT_PORT: &str = "org.ringdown.agent.0";

/// Who of QEMU and the host's program listens at a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meeting {
    /// The host's program listens; QEMU connects, and again a second after each loss.
    QemuConnects,
    /// QEMU listens, whether somebody is there or not.
    QemuListens,
}

/// A port of a guest: `/dev/virtio-ports/NAME`, without udev found by its name under `/sys/class/virtio-ports`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Port {
    /// Its name in the guest.
    pub name: String,
    /// The socket at its other end.
    pub socket: PathBuf,
    /// Who listens there.
    pub meeting: Meeting,
}

impl Port {
    /// The options of QEMU that make it; `number` tells it from the guest's other ports.
    pub(crate) fn options(&self, number: usize) -> [(&'static str, String); 2] {
        let socket = self.socket.display();
        let meeting = match self.meeting {
            Meeting::QemuConnects => "reconnect=1",
            Meeting::QemuListens => "server=on,wait=off",
        };
        let name = &self.name;
        [
            (
                "-chardev",
                format!("socket,id=port{number},path={socket},{meeting}"),
            ),
            (
                "-device",
                format!("virtserialport,chardev=port{number},name={name}"),
            ),
        ]
    }
}
