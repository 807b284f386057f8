//! This project's daemon with one network.

use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};

use super::frame::Address;
use super::subject::Running;
use super::techniques::Techniques;
use crate::perf::process::{Process, mortal};
use crate::perf::processor::Placement;

/// The first VM's context identifier; the others follow.
const FIRST_CID: usize = 3;

/// The configuration: VMs with a port each and the addresses that their frames have, everything else as it is by default.
fn configuration(sockets: &[PathBuf], network: &str) -> String {
    let mut text = format!("[[network]]\nname = \"lan\"\nipv4 = \"10.77.0.1/24\"\n{network}");
    for (port, socket) in sockets.iter().enumerate() {
        let Address { mac, ipv4, .. } = Address::of(port);
        let mac = mac.map(|byte| format!("{byte:02x}")).join(":");
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "\n[[vm]]\nname = \"vm{port}\"\ncid = {}\n\n[[vm.net]]\nnetwork = \"lan\"\nmac = \"{mac}\"\nipv4 = \"{ipv4}\"\nvhost-user = \"{}\"\n",
            FIRST_CID + port,
            socket.display()
        );
    }
    text
}

/// Starts it.
pub(super) fn start(
    program: &Path,
    techniques: Techniques,
    ports: usize,
    placement: Placement,
) -> Result<Running, String> {
    let words = |error: std::io::Error| format!("starting {}: {error}", program.display());
    let directory = tempfile::tempdir().map_err(words)?;
    let sockets: Vec<PathBuf> = (0..ports)
        .map(|port| directory.path().join(format!("port{port}")))
        .collect();
    let file = directory.path().join("ringdown.toml");
    fs::write(&file, configuration(&sockets, techniques.network())).map_err(words)?;
    let mut command = mortal(program);
    command
        .arg("serve")
        .arg("--config")
        .arg(&file)
        .arg("--runtime-dir")
        .arg(directory.path())
        .args(techniques.arguments());
    let (own, place) = (placement.generator, placement.subject);
    let process = Process::start(command, directory, &[place], own);
    let mut process = process.map_err(words)?;
    process.wait_until(Process::has_said_ready)?;
    Ok(Running::listening(vec![process], sockets))
}
