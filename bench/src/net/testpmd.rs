//! DPDK's testpmd as a wire between pairs of vhost-user ports, the fastest thing of its kind: it looks all the time, decides nothing,
//! and copies every frame twice.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::subject::Running;
use crate::perf::process::{Process, mortal};
use crate::perf::processor::Placement;

/// Where Debian has it.
const PROGRAM: &str = "/usr/bin/dpdk-testpmd";

/// Memory for its buffers, in MiB.
const MEMORY_MIB: u32 = 1024;

/// The program, if it is there.
pub fn find() -> Option<PathBuf> {
    let program = PathBuf::from(PROGRAM);
    program.is_file().then_some(program)
}

/// Its version, as the package has it.
pub fn version() -> Option<String> {
    package_version("dpdk-dev").map(|version| format!("DPDK {version}"))
}

pub(super) fn package_version(package: &str) -> Option<String> {
    let mut command = Command::new("dpkg-query");
    let output = command.args(["-W", "-f", "${Version}", package]).output();
    let text = String::from_utf8(output.ok()?.stdout).ok()?;
    let version = text.split('-').next()?.trim();
    (!version.is_empty()).then(|| version.to_owned())
}

/// DPDK's arguments everywhere: neither hugepages, nor devices, nor files of its own.
pub(super) fn without_privileges(memory_mib: u32) -> String {
    format!("--no-huge -m {memory_mib} --no-pci --no-shconf --no-telemetry")
}

pub(super) fn start(program: &Path, ports: usize, placement: Placement) -> Result<Running, String> {
    if !placement.is_apart() {
        return Err("it takes a processor for itself, and there is one".to_owned());
    }
    let words = |error: std::io::Error| format!("starting {}: {error}", program.display());
    let directory = tempfile::tempdir().map_err(words)?;
    let sockets: Vec<PathBuf> = (0..ports)
        .map(|port| directory.path().join(format!("port{port}")))
        .collect();
    let (main, worker) = (placement.generator, placement.subject);
    let mut command = mortal(program);
    // The main thread waits at its prompt and costs nothing.
    command
        .args(["-l", &format!("{main},{worker}")])
        .args(["--main-lcore", &main.to_string()])
        .args(without_privileges(MEMORY_MIB).split(' '));
    for (port, socket) in sockets.iter().enumerate() {
        command.arg("--vdev").arg(format!(
            "net_vhost{port},iface={},tso=1,legacy-ol-flags=1",
            socket.display()
        ));
    }
    command
        .args(["--", "-i", "--auto-start", "--forward-mode=io"])
        .args(["--nb-cores=1", "--no-lsc-interrupt"])
        .env("XDG_RUNTIME_DIR", directory.path());
    let process = Process::start(command, directory, &[main, worker], main);
    let mut process = process.map_err(words)?;
    process.wait_until(|process| process.log().contains("packet forwarding"))?;
    Ok(Running::listening(vec![process], sockets))
}
