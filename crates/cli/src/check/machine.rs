//! The machine: what VMMs need, and what the daemon needs.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, MemfdFlags, Mode, OFlags, access, open};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use super::Finding;

/// Descriptors for a handful of VMs with a few hundred circuits each. A socket that listens takes two: its own and its directory's.
const ENOUGH_DESCRIPTORS: u64 = 16 * 1024;

/// Programs that are VMMs.
const VMMS: [&str; 5] = [
    "qemu-system-x86_64",
    "qemu-system-aarch64",
    "cloud-hypervisor",
    "firecracker",
    "virtqemud",
];

pub(super) fn look() -> Vec<Finding> {
    vec![
        kvm(),
        vmms(&std::env::var_os("PATH").unwrap_or_default()),
        shared_memory(),
        descriptors(getrlimit(Resource::Nofile).maximum),
        files_confined(daemon::sandbox::kernel_confines_files()),
        calls_confined(fs::read_to_string("/proc/sys/kernel/seccomp/actions_avail").ok()),
    ]
}

pub(super) fn kvm() -> Finding {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    acceleration(Path::new("/dev/kvm"), &cpuinfo)
}

/// KVM may answer as it should where it is nested in another hypervisor, and its guests fail all the same: only a guest would show that.
pub(super) fn acceleration(device: &Path, cpuinfo: &str) -> Finding {
    let about = "KVM";
    let path = device.display();
    // Opening asks more than access(2) does: of the device itself, and of the cgroup's list of devices.
    match open(device, OFlags::RDWR | OFlags::CLOEXEC, Mode::empty()) {
        Ok(_) if is_virtual(cpuinfo) => Finding::warning(
            about,
            format!(
                "this machine is itself a VM: {path} can be opened, but guests may not boot with it, so `ringdown args` prints network cards for -accel tcg"
            ),
            "if guests boot with it, take the faster cards of `ringdown args NAME --vmm qemu --accel kvm`; if not, start their QEMU with -accel tcg, which is \
             some ten times slower, or look for nested virtualization at this machine's host",
        ),
        Ok(_) => Finding::fine(
            about,
            format!(
                "{path} can be used, and `ringdown args` prints network cards for it: to emulate a guest all the same, print them with --accel tcg"
            ),
        ),
        Err(Errno::NOENT) => Finding::warning(
            about,
            format!("there is no {path}: guests are emulated, which is some ten times slower"),
            "switch virtualization on in the firmware and `modprobe kvm_intel` or `modprobe kvm_amd`; in a VM, have its host nest virtualization",
        ),
        Err(error) => Finding::warning(
            about,
            format!("this user may not use {path}: {error}"),
            "`adduser USER kvm` for the user that runs the VMM, and log in again",
        ),
    }
}

/// Whether the processor says that there is a hypervisor beneath (x86: CPUID leaf 1, ECX bit 31).
fn is_virtual(cpuinfo: &str) -> bool {
    let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
    flags.is_some_and(|flags| flags.split_whitespace().any(|flag| flag == "hypervisor"))
}

pub(super) fn vmms(path: &std::ffi::OsStr) -> Finding {
    let about = "VMMs";
    let is_there = |name: &&str| {
        std::env::split_paths(path).any(|directory| {
            let file: PathBuf = directory.join(name);
            access(&file, Access::EXEC_OK).is_ok()
        })
    };
    let found: Vec<&str> = VMMS.into_iter().filter(is_there).collect();
    if found.is_empty() {
        let remedy =
            "install one (Debian: `apt install qemu-system-x86`), or put its directory into PATH";
        return Finding::warning(about, "no VMM is in PATH", remedy);
    }
    Finding::fine(about, found.join(", "))
}

/// Guests' memory is a sealed memfd that the VMM shares with the daemon, and so is a window of a circuit.
fn shared_memory() -> Finding {
    let about = "memory sharing";
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match rustix::fs::memfd_create("check", flags) {
        Ok(_) => Finding::fine(about, "memory can be shared with VMMs"),
        Err(error) => Finding::error(
            about,
            format!("memory cannot be shared with VMMs: {error}"),
            "run a kernel with CONFIG_MEMFD_CREATE, and let no sandbox around ringdown refuse memfd_create",
        ),
    }
}

pub(super) fn descriptors(maximum: Option<u64>) -> Finding {
    let about = "open files";
    match maximum {
        Some(maximum) if maximum < ENOUGH_DESCRIPTORS => Finding::warning(
            about,
            format!(
                "a process may open {maximum} files; each circuit to a program of the host needs one, each socket that listens two"
            ),
            format!(
                "LimitNOFILE={ENOUGH_DESCRIPTORS} or more in ringdown.service, or `ulimit -Hn {ENOUGH_DESCRIPTORS}` as root"
            ),
        ),
        Some(maximum) => Finding::fine(about, format!("a process may open {maximum}")),
        None => Finding::fine(about, "a process may open any number"),
    }
}

pub(super) fn files_confined(is_known: bool) -> Finding {
    let about = "sandbox: files";
    if is_known {
        return Finding::fine(about, "this kernel has Landlock");
    }
    Finding::warning(
        about,
        "this kernel has no Landlock: the daemon is confined to its system calls, but not to its files",
        "boot with `landlock` among the names of `lsm=`, or a kernel with CONFIG_SECURITY_LANDLOCK",
    )
}

pub(super) fn calls_confined(actions: Option<String>) -> Finding {
    let about = "sandbox: calls";
    let actions = actions.unwrap_or_default();
    if actions
        .split_whitespace()
        .any(|action| action == "kill_process")
    {
        return Finding::fine(about, "this kernel has seccomp");
    }
    Finding::error(
        about,
        "this kernel has no seccomp filters that end a process: the daemon does not start with its sandbox",
        "run a kernel from 4.14 on with CONFIG_SECCOMP_FILTER, or `ringdown serve --sandbox=off`",
    )
}
