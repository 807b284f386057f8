//! What root in a guest may do to others with the guest's own kernel in between: its sockets, its modules, its reset.

use crate::probe::PROGRAM;

/// The kernel's driver of the vsock device.
const DRIVER: &str = "/sys/bus/virtio/drivers/vmw_vsock_virtio_transport";

/// What becomes of the guest that attacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fate {
    /// It goes on.
    GoesOn,
    /// It boots anew.
    Reboots,
}

/// An attack by way of the kernel.
pub struct KernelAttack {
    /// Its name.
    pub name: &'static str,
    /// What the attacker does.
    pub what: &'static str,
    /// The shell line that does it.
    pub line: Line,
    /// What becomes of the guest.
    pub fate: Fate,
}

/// A shell line.
#[derive(Debug, Clone, Copy)]
pub enum Line {
    /// The probe's assault of the attack's own name.
    Assault,
    /// socat dials a port of the host with a receive buffer of this size in bytes, and does not read.
    Buffer(u32, u64),
    /// Traffic in both directions, and in the middle of it this line.
    UnderLoad(&'static str),
}

const fn assault(name: &'static str, what: &'static str) -> KernelAttack {
    KernelAttack {
        name,
        what,
        line: Line::Assault,
        fate: Fate::GoesOn,
    }
}

const fn under_load(
    name: &'static str,
    what: &'static str,
    line: &'static str,
    fate: Fate,
) -> KernelAttack {
    KernelAttack {
        name,
        what,
        line: Line::UnderLoad(line),
        fate,
    }
}

const fn buffer(name: &'static str, what: &'static str, port: u32, bytes: u64) -> KernelAttack {
    KernelAttack {
        name,
        what,
        line: Line::Buffer(port, bytes),
        fate: Fate::GoesOn,
    }
}

/// Every attack by way of the kernel. Those after which the guest boots anew come last.
pub const ATTACKS: &[KernelAttack] = &[
    assault(
        "connect-and-close",
        "1,500 connections to the host, each closed at once",
    ),
    assault(
        "half-open",
        "3,000 dials to a host program that accepts none",
    ),
    assault(
        "dials-to-nowhere",
        "1,500 dials to VMs and ports that do not exist",
    ),
    assault(
        "thousands-of-sockets",
        "2,000 connections to a host program that does nothing, held",
    ),
    assault(
        "never-reading",
        "50 connections to a host program that writes without end, none of which is read",
    ),
    assault(
        "writing-to-the-deaf",
        "50 connections to a host program that reads nothing, each written full",
    ),
    assault(
        "shutdowns",
        "1,000 connections shut down in every order, and written to afterwards",
    ),
    assault(
        "messages-to-the-deaf",
        "messages of 1, 1,000 and 60,000 bytes, as many as are taken, and one of 4 MiB, to a host program that reads none",
    ),
    assault(
        "the-same-port-again",
        "3,000 dials from one port of the guest, each thrown away at once",
    ),
    assault(
        "flood-of-the-bystander",
        "1,000 dials to another guest, half of them where it listens",
    ),
    buffer(
        "a-buffer-of-one-byte",
        "SO_VM_SOCKETS_BUFFER_SIZE of 1 byte towards a program that writes without end",
        super::CHATTY_PORT,
        1,
    ),
    buffer(
        "a-buffer-of-four-gigabytes",
        "SO_VM_SOCKETS_BUFFER_SIZE of 2^32 - 1 bytes towards a program that writes without end",
        super::CHATTY_PORT,
        u32::MAX as u64,
    ),
    under_load(
        "driver-unbound-again-and-again",
        "the kernel's driver lets go of the device and takes it back, 5 times",
        "for round in 1 2 3 4 5; do echo $device > $driver/unbind; echo $device > $driver/bind; done",
        Fate::GoesOn,
    ),
    under_load(
        "modules-unloaded",
        "the kernel's driver lets go of the device, is unloaded, and is loaded again",
        // A module is held by its sockets; they end with the device.
        "echo $device > $driver/unbind; \
         until rmmod vmw_vsock_virtio_transport 2>/dev/null; do usleep 20000; done; \
         modprobe vmw_vsock_virtio_transport",
        Fate::GoesOn,
    ),
    under_load("reboot", "`reboot -f`", "reboot -f", Fate::Reboots),
    under_load(
        "kernel-crash",
        "a crash of the guest's kernel, and its reset without a word to any device (sysrq c)",
        "echo c > /proc/sysrq-trigger",
        Fate::Reboots,
    ),
];

impl KernelAttack {
    /// The line that does it. It makes the file `done` in the directory and holds what it has until the file `judged` is there.
    pub fn shell_line(&self, directory: &str) -> String {
        let hold = format!(
            "touch {directory}/done; until [ -e {directory}/judged ]; do usleep 20000; done"
        );
        match self.line {
            Line::Assault => {
                let name = self.name;
                format!("ulimit -n 20000; exec {PROGRAM} assault {name} {directory}")
            }
            Line::Buffer(port, bytes) => {
                let bytes: String = bytes
                    .to_le_bytes()
                    .iter()
                    .map(|byte| format!("{byte:02x}"))
                    .collect();
                // Maximum, minimum and size, in the kernel's order of dependence.
                let options = format!(
                    "setsockopt=40:2:x{bytes},setsockopt=40:1:x{bytes},setsockopt=40:0:x{bytes}"
                );
                format!(
                    "socat -u VSOCK-CONNECT:2:{port},{options} EXEC:'sleep 1000' & \
                     socat=$!; {hold}; kill $socat 2>/dev/null || true"
                )
            }
            Line::UnderLoad(line) => {
                let load = format!(
                    "{PROGRAM} run connect:2:{} send:100000000 2>/dev/null & \
                     {PROGRAM} run connect:2:{} touch:{directory}/flows drain 2>/dev/null & ",
                    super::ECHO_PORT,
                    super::CHATTY_PORT
                );
                format!(
                    "{load} until [ -e {directory}/flows ]; do usleep 20000; done; \
                     driver={DRIVER}; device=$(cd $driver && ls -d virtio*); {line} || exit 1; {hold}"
                )
            }
        }
    }
}
