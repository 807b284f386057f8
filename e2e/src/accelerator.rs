//! KVM or emulation.
//!
//! That /dev/kvm opens says little: on a machine that is itself a guest it may open and stock kernels still not boot. So a probe guest
//! decides, once per boot of this machine.

use std::fs::{self, File, OpenOptions};
use std::path::Path;
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::fs::{FlockOperation, flock};

use crate::images::{Images, Kernel, cache_directory};
use crate::{Guest, GuestSpec};

/// How long the probe guest may take, in seconds. With KVM that works it needs one or two.
const PROBE_DEADLINE_S: u64 = 20;

/// How a guest's instructions are run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// By the processor.
    Kvm,
    /// By QEMU's translator.
    Tcg,
}

impl Accelerator {
    /// QEMU's arguments for it, and for one processor.
    ///
    /// A guest in which a second one runs may die while QEMU emulates it: the kernel patches its own code by way of a breakpoint, and a processor that
    /// translates that code at the same time keeps the breakpoint. But where none may ever be added, QEMU before 8.1 leaves out the guest's
    /// memory barriers, and notifications are lost.
    pub fn qemu_arguments(self) -> &'static [&'static str] {
        match self {
            Accelerator::Kvm => &["-accel", "kvm", "-cpu", "host"],
            Accelerator::Tcg => &["-accel", "tcg", "-smp", "1,maxcpus=2"],
        }
    }
}

impl std::fmt::Display for Accelerator {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(match self {
            Accelerator::Kvm => "kvm",
            Accelerator::Tcg => "tcg",
        })
    }
}

/// The accelerator for guests on this machine: `$RINGDOWN_ACCELERATOR` (`kvm` or `tcg`) if set, else what the probe found.
pub fn choose() -> Result<Accelerator> {
    static CHOICE: OnceLock<Result<Accelerator, String>> = OnceLock::new();
    CHOICE
        .get_or_init(|| find().map_err(|error| format!("{error:#}")))
        .clone()
        .map_err(|error| anyhow!("{error}"))
}

fn find() -> Result<Accelerator> {
    match std::env::var("RINGDOWN_ACCELERATOR").as_deref() {
        Ok("kvm") => return Ok(Accelerator::Kvm),
        Ok("tcg") => return Ok(Accelerator::Tcg),
        Ok("") | Err(_) => {}
        Ok(other) => bail!("RINGDOWN_ACCELERATOR is {other:?}, expected `kvm` or `tcg`"),
    }
    if OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/kvm")
        .is_err()
    {
        return Ok(Accelerator::Tcg);
    }
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .context("cannot read the id of this boot")?;
    let cache = cache_directory();
    // One probe at a time, here and in other processes; a waiter finds the verdict.
    let lock = File::create(cache.join("accelerator.lock"))
        .with_context(|| format!("cannot write in {}: run `make images`", cache.display()))?;
    flock(&lock, FlockOperation::LockExclusive)?;
    let verdict_path = cache.join("accelerator");
    if let Some(accelerator) = read_verdict(&verdict_path, boot.trim()) {
        return Ok(accelerator);
    }
    let accelerator = probe()?;
    let partial = cache.join("accelerator.partial");
    fs::write(&partial, format!("{} {accelerator}\n", boot.trim()))?;
    fs::rename(&partial, &verdict_path)?;
    Ok(accelerator)
}

fn read_verdict(path: &Path, boot: &str) -> Option<Accelerator> {
    let text = fs::read_to_string(path).ok()?;
    match text.trim().strip_prefix(boot)?.trim() {
        "kvm" => Some(Accelerator::Kvm),
        "tcg" => Some(Accelerator::Tcg),
        _ => None,
    }
}

fn probe() -> Result<Accelerator> {
    let images = Images::open()?;
    let kernel = [Kernel::V6_1, Kernel::V6_12, Kernel::Installed]
        .into_iter()
        .find(|kernel| images.kernel(*kernel).is_ok())
        .context("there is no kernel for a probe guest: run `make images`")?;
    // A QEMU that cannot run at all says nothing about KVM, and must not be remembered.
    let version = Command::new("qemu-system-x86_64")
        .arg("--version")
        .output()
        .context("cannot run qemu-system-x86_64: run `make setup`")?;
    ensure!(
        version.status.success(),
        "qemu-system-x86_64 --version failed ({})",
        version.status
    );
    let mut spec = GuestSpec::new("probe", kernel).without_agent();
    spec.accelerator = Some(Accelerator::Kvm);
    spec.boot_deadline = Duration::from_secs(PROBE_DEADLINE_S);
    let verdict = match Guest::boot(spec) {
        Ok(_) => Accelerator::Kvm,
        Err(_) => Accelerator::Tcg,
    };
    if verdict == Accelerator::Tcg {
        eprintln!(
            "/dev/kvm is there, but a probe guest did not boot with it: guests are emulated, which is slower"
        );
    }
    Ok(verdict)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_counts_for_its_boot_only() {
        let directory = crate::spawn::scratch_directory().unwrap();
        let path = directory.join("accelerator");
        assert_eq!(read_verdict(&path, "boot-1"), None);
        fs::write(&path, "boot-1 kvm\n").unwrap();
        assert_eq!(read_verdict(&path, "boot-1"), Some(Accelerator::Kvm));
        assert_eq!(read_verdict(&path, "boot-2"), None);
        fs::write(&path, "boot-1 perhaps\n").unwrap();
        assert_eq!(read_verdict(&path, "boot-1"), None);
    }
}
