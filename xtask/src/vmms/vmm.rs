//! The VMMs: how each is started with what `ringdown args` prints for it, and what it offers.

use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

use super::lab::{DIRECTORY, Lab};

/// Memory of an inner guest.
const MEMORY: &str = "256M";

/// A VMM with a line of one kind.
#[derive(Debug, PartialEq, Eq)]
pub struct Vmm {
    /// How the table names it.
    pub title: &'static str,
    /// The name of its VM.
    pub vm: &'static str,
    /// Its name in the outer machine.
    pub program: &'static str,
    /// The variable that says where it is; without one it is in the layer.
    variable: Option<&'static str>,
    /// Whether its line is of its own vsock device.
    pub is_hybrid: bool,
    /// Why its line does not come back without a keeper, where it does not.
    pub no_reconnect: Option<&'static str>,
    /// Why it has no reset of the guest, where it has none.
    pub no_reset: Option<&'static str>,
    command: Command,
}

#[derive(Debug, PartialEq, Eq)]
enum Command {
    Qemu,
    CloudHypervisor,
    Firecracker,
    Alioth,
}

/// QEMU, which the peer runs in, too.
pub const QEMU: Vmm = Vmm {
    title: "QEMU",
    vm: "qemu",
    program: "qemu-system-x86_64",
    variable: None,
    is_hybrid: false,
    no_reconnect: Some("a vsock device of QEMU does not connect again"),
    no_reset: None,
    command: Command::Qemu,
};

/// All of them.
pub const VMMS: [&Vmm; 5] = [
    &QEMU,
    &Vmm {
        title: "Cloud Hypervisor",
        vm: "ch",
        variable: Some("RINGDOWN_VMM_CLOUD_HYPERVISOR"),
        program: "cloud-hypervisor",
        no_reconnect: None,
        command: Command::CloudHypervisor,
        ..QEMU
    },
    &Vmm {
        title: "Cloud Hypervisor, hybrid",
        vm: "chv",
        variable: Some("RINGDOWN_VMM_CLOUD_HYPERVISOR"),
        program: "cloud-hypervisor",
        no_reconnect: None,
        command: Command::CloudHypervisor,
        is_hybrid: true,
        ..QEMU
    },
    &Vmm {
        title: "Firecracker, hybrid",
        vm: "fc",
        variable: Some("RINGDOWN_VMM_FIRECRACKER"),
        program: "firecracker",
        command: Command::Firecracker,
        is_hybrid: true,
        no_reconnect: None,
        no_reset: Some("Firecracker ends when its guest is reset"),
    },
    &Vmm {
        title: "Alioth",
        vm: "alioth",
        variable: Some("RINGDOWN_VMM_ALIOTH"),
        program: "alioth",
        no_reconnect: Some("a vhost-user device of Alioth does not connect again"),
        command: Command::Alioth,
        ..QEMU
    },
];

impl Vmm {
    /// Where it is on this machine, or why it is left out. One in the layer is nowhere here.
    pub fn find(&self) -> Result<Option<PathBuf>, String> {
        let Some(variable) = self.variable else {
            return Ok(None);
        };
        let path = std::env::var_os(variable).filter(|path| !path.is_empty());
        match path.map(PathBuf::from) {
            Some(path) if path.is_file() => Ok(Some(path)),
            Some(path) => Err(format!(
                "{variable} is {}, which is not there",
                path.display()
            )),
            None => Err(format!("{variable} is not set")),
        }
    }

    /// What it says of its version.
    pub fn version(&self, lab: &Lab) -> Result<String> {
        let said = lab.shell(&format!("{} --version", self.program))?;
        Ok(said.lines().next().unwrap_or_default().to_owned())
    }

    /// The socket of its own vsock device.
    pub fn socket(&self) -> String {
        format!("/run/ringdown/{}.vsock", self.vm)
    }

    /// Adds this VM to the daemon, with these further options of `vm add`.
    pub fn add(&self, lab: &Lab, vm: &str, options: &str) -> Result<()> {
        let hybrid = match self.is_hybrid {
            true => format!("--hybrid {}", self.socket()),
            false => String::new(),
        };
        lab.shell(&format!("ringdown vm add {vm} {hybrid} {options}"))
            .map(drop)
    }

    /// Starts the VMM with what is printed for this VM, in the background.
    pub fn start(&self, lab: &Lab, vm: &str) -> Result<()> {
        // What a guest that is emulated twice pays for at each boot and no scenario is about.
        let line = format!(
            "console=ttyS0 quiet panic=-1 no_timer_check cryptomgr.notests nokaslr i8042.noaux i8042.nokbd mitigations=off ringdown.name={vm}"
        );
        let command = match self.command {
            Command::Qemu => format!(
                "qemu-system-x86_64 -nodefaults -no-user-config -display none -accel kvm -cpu host -kernel vmlinux -initrd initramfs -append '{line}' \
                 -serial file:{vm}.console $(ringdown args {vm} --vmm qemu --memory {MEMORY} --accel kvm)"
            ),
            Command::CloudHypervisor => {
                // For a hybrid line nothing is printed of the memory.
                let memory = match self.is_hybrid {
                    true => format!("--memory size={MEMORY}"),
                    false => String::new(),
                };
                format!(
                    "cloud-hypervisor --kernel vmlinux --initramfs initramfs --cmdline '{line}' --cpus boot=1 --serial file={vm}.console --console off \
                     {memory} $(ringdown args {vm} --vmm cloud-hypervisor --memory {MEMORY})"
                )
            }
            Command::Firecracker => {
                let configuration = firecracker(lab, vm, &format!("{line} reboot=k"))?;
                lab.write_file(&format!("{vm}.json"), &configuration)?;
                format!("firecracker --no-api --config-file {vm}.json --enable-pci")
            }
            // It wants a terminal.
            Command::Alioth => format!(
                "alioth boot --kernel bzImage --initramfs initramfs --cmdline '{line}' --cpu count=1 \
                 $(ringdown args {vm} --vmm alioth --memory {MEMORY}) < /dev/ttyS0"
            ),
        };
        // The program's number is what the shell's was.
        lab.shell(&format!(
            "cd {DIRECTORY} && rm -f {vm}.console {socket} && (eval \"exec {command}\" > {vm}.log 2>&1 < /dev/null & echo $! > {vm}.pid)",
            socket = self.socket()
        ))
        .map(drop)
    }
}

/// A configuration of Firecracker with what is printed for the VM. Its console is its output.
fn firecracker(lab: &Lab, vm: &str, line: &str) -> Result<String> {
    let printed = lab.shell(&format!("ringdown args {vm} --vmm firecracker"))?;
    let printed: Value = serde_json::from_str(&printed).context("what is printed is no JSON")?;
    let mut configuration = json!({
        "boot-source": {
            "kernel_image_path": "vmlinux", "initrd_path": "initramfs", "boot_args": line,
        },
        "drives": [],
        "machine-config": { "vcpu_count": 1, "mem_size_mib": 256 },
    });
    let printed = printed
        .as_object()
        .context("what is printed is no object")?;
    ensure!(printed.contains_key("vsock"), "nothing of vsock is printed");
    for (key, value) in printed {
        configuration[key] = value.clone();
    }
    Ok(configuration.to_string())
}
