//! The outer machine: a guest whose processor has virtualization, in which real VMMs run guests of their own on KVM.
//!
//! Where the machine has no KVM that works, the outer machine's processor is emulated, and its SVM with it.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::accelerator::{self, Accelerator};
use e2e::images::Images;
use e2e::{CommandSpec, Guest, GuestSpec, Kernel, Output, Running, ringdown_program, spawn};

use super::kernel::vmlinux;
use super::vmm::Vmm;
use crate::images::{cpio::Archive, programs::is_static};

/// Memory of the outer machine, in MiB.
const MEMORY_MIB: u32 = 2048;
/// How long a guest of the outer machine may take to come up, and anything else that waits for one. Idle, an emulated one takes half a minute.
pub const PATIENCE: Duration = Duration::from_secs(400);
/// How long anything else may take.
const DEADLINE: Duration = Duration::from_secs(480);
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Where the lab's files are in the outer machine; the daemon and the VMMs run there.
pub const DIRECTORY: &str = "/lab";

const KEEPER: &str = "/run/keeper";

/// The layer with QEMU.
pub const LAYER: &str = "qemu";

/// The VM that others call and are called by.
pub const PEER: &str = "peer";
pub const PEER_CID: u64 = 100;
/// The port to which calls between the peer and the other VMs are allowed.
pub const OPEN_PORT: u32 = 5000;
/// A port of the host that leads to the peer's.
pub const REDIRECTED_PORT: u32 = 5001;
/// A port to which no call is allowed.
pub const CLOSED_PORT: u32 = 6000;

/// The outer machine.
#[derive(Debug)]
pub struct Lab {
    outer: Guest,
}

/// What the outer machine is emulated with, or not.
pub fn accelerator() -> Result<Accelerator> {
    accelerator::choose()
}

impl Lab {
    /// Boots the outer machine with these VMMs, and starts the keeper and the daemon in it.
    pub fn boot(vmms: &[(&Vmm, Option<PathBuf>)]) -> Result<Lab> {
        let directory = spawn::scratch_directory()?;
        let archive = directory.join("lab");
        fs::write(&archive, files_of_the_lab(vmms, &directory)?)?;
        let accelerator = accelerator()?;
        let mut spec = GuestSpec::new("lab", Kernel::V6_12)
            .without_agent()
            .memory_mib(MEMORY_MIB)
            .layer(LAYER)
            .qemu(&["-smp", "2,maxcpus=2"]);
        if accelerator == Accelerator::Tcg {
            spec = spec.qemu(&["-cpu", "max"]);
        }
        // Under load an emulated time stamp counter is taken for a broken one, and what takes its place is slow.
        for word in ["mitigations=off", "tsc=nowatchdog"] {
            spec.kernel_arguments.push(word.to_owned());
        }
        spec.archives.push(archive);
        spec.boot_deadline = PATIENCE;
        let lab = Lab {
            outer: Guest::boot(spec)?,
        };
        let _ = fs::remove_dir_all(directory);
        lab.shell("modprobe kvm_amd nested=0 npt=1 || modprobe kvm_intel; test -c /dev/kvm")
            .context("the outer machine has no KVM: its processor has no virtualization")?;
        lab.start_keeper()?;
        lab.start_daemon()?;
        Ok(lab)
    }

    /// The kernel that runs in all machines.
    pub fn release(&self) -> String {
        self.outer.release()
    }

    fn start_keeper(&self) -> Result<()> {
        self.shell(&format!(
            "cd {DIRECTORY} && mkdir -p /run/ringdown && (ringdown hold --socket {KEEPER} > keeper.log 2>&1 &)"
        ))?;
        self.wait_until("the keeper is ready", &format!("test -S {KEEPER}"))
    }

    /// Starts the daemon, and waits until it is ready.
    pub fn start_daemon(&self) -> Result<()> {
        self.shell(&format!(
            "cd {DIRECTORY} && rm -f ready && (ringdown serve --config ringdown.toml --keeper {KEEPER} > ready 2>> daemon.log & echo $! > daemon.pid)"
        ))?;
        self.wait_until(
            "the daemon is ready",
            &format!("grep -q ready {DIRECTORY}/ready"),
        )
    }

    /// Ends the daemon with this signal, and starts the next one.
    pub fn restart_daemon(&self, signal: &str) -> Result<()> {
        self.end_daemon(signal)?;
        self.start_daemon()
    }

    /// Ends the daemon and the keeper, and starts others, which know of no VM.
    pub fn forget_all(&self) -> Result<()> {
        self.end_daemon("TERM")?;
        self.shell(&format!("ringdown hold --release --socket {KEEPER}"))?;
        self.start_keeper()?;
        self.start_daemon()
    }

    fn end_daemon(&self, signal: &str) -> Result<()> {
        let process = self.shell(&format!("cat {DIRECTORY}/daemon.pid"))?;
        self.shell(&format!("kill -{signal} {process}"))?;
        self.wait_until("the daemon has ended", &format!("! kill -0 {process}"))
    }

    /// Runs a shell line in the outer machine, whatever its exit code.
    pub fn run(&self, line: &str) -> Result<Output> {
        self.outer
            .run_spec(CommandSpec::new(line).deadline(DEADLINE))
    }

    /// Starts a shell line in the outer machine.
    pub fn start(&self, line: &str) -> Result<Running> {
        self.outer
            .start_spec(CommandSpec::new(line).deadline(DEADLINE))
    }

    /// Runs a shell line in the outer machine that must succeed, and gives what it printed.
    pub fn shell(&self, line: &str) -> Result<String> {
        let output = self.run(line)?;
        ensure!(
            output.code == 0,
            "`{line}` ends with {}: {} {}",
            output.code,
            output.text(),
            output.error_text()
        );
        Ok(output.text())
    }

    /// Tries a shell line in the outer machine again and again until it succeeds.
    pub fn wait_until(&self, what: &str, line: &str) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        while self.run(line)?.code != 0 {
            if Instant::now() > until {
                bail!("in vain waited until {what}");
            }
            thread::sleep(POLL_INTERVAL);
        }
        Ok(())
    }

    /// Writes a file of the outer machine.
    pub fn write_file(&self, name: &str, content: &str) -> Result<()> {
        self.outer
            .write_file(&format!("{DIRECTORY}/{name}"), content, 0o644)
    }

    /// Keeps here what the outer machine has to say of a VM.
    pub fn keep_logs(&self, vm: &str, path: &Path) -> Result<()> {
        let output = self.run(&format!(
            "cd {DIRECTORY}; ringdown vm ls; ringdown events -n 40; tail -n 40 daemon.log {vm}.log {vm}.console; dmesg | tail -n 20"
        ))?;
        fs::write(path, output.stdout).with_context(|| format!("cannot write {}", path.display()))
    }
}

/// An archive of Ringdown, the VMMs, and what their guests boot.
fn files_of_the_lab(vmms: &[(&Vmm, Option<PathBuf>)], scratch: &Path) -> Result<Vec<u8>> {
    let images = Images::open()?;
    let initramfs = scratch.join("initramfs");
    images.write_initramfs(Kernel::V6_12, true, &[], &[], &initramfs)?;
    let image = fs::read(images.kernel_path(Kernel::V6_12)?)?;
    let ringdown = fs::read(ringdown_program()?)?;
    ensure!(
        is_static(&ringdown)?,
        "{} is not a static program: `make vmms` builds one",
        ringdown_program()?.display()
    );
    let mut archive = Archive::default();
    archive.file("usr/bin/ringdown", 0o755, &ringdown)?;
    for (vmm, path) in vmms {
        if let Some(path) = path {
            let program =
                fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
            archive.file(&format!("usr/bin/{}", vmm.program), 0o755, &program)?;
        }
    }
    let inside = |name: &str| format!("{}/{name}", DIRECTORY.trim_start_matches('/'));
    archive.file(&inside("vmlinux"), 0o644, &vmlinux(&image)?)?;
    archive.file(&inside("bzImage"), 0o644, &image)?;
    archive.file(&inside("initramfs"), 0o644, &fs::read(initramfs)?)?;
    archive.file(&inside("ringdown.toml"), 0o644, configuration().as_bytes())?;
    archive.finish()
}

fn configuration() -> String {
    format!(
        r#"
[[rule]]
from = "*"
to = "{PEER}"
port = {OPEN_PORT}
action = "allow"

[[rule]]
from = "{PEER}"
to = "*"
port = {OPEN_PORT}
action = "allow"

[[rule]]
from = "*"
to = "host"
port = {REDIRECTED_PORT}
redirect = "{PEER}:{OPEN_PORT}"
"#
    )
}
