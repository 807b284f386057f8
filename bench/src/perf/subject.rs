//! What is measured: a program with vhost-user sockets, started anew for every measurement.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::process::Pid;

use super::capture::Capture;
use super::measure::Figures;
use super::process::{Process, mortal};
use super::processor::Placement;

/// A kind of program with vhost-user-vsock devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// This project's.
    Ringdown,
    /// This project's, without busy polling.
    RingdownAsleep,
    /// This project's, while everything that passes is captured.
    RingdownCaptured,
    /// This project's, while [`SNAPLEN`] bytes of each packet are captured.
    RingdownCapturedInPart,
    /// vhost-device-vsock of rust-vmm.
    VhostDeviceVsock,
}

/// How much of each packet is captured in part, in bytes: the headers, and a little of the payload.
const SNAPLEN: u32 = 128;

/// A program that can be measured.
#[derive(Debug, Clone)]
pub struct Subject {
    /// What it is.
    pub kind: Kind,
    /// Where its program is.
    pub program: PathBuf,
}

/// The context identifier of the first VM; the others follow.
pub const FIRST_CID: u32 = 3;

impl Subject {
    /// Its name in results.
    pub fn name(&self) -> &'static str {
        match self.kind {
            Kind::Ringdown => "ringdown",
            Kind::RingdownAsleep => "ringdown --spin 0",
            Kind::RingdownCaptured => "ringdown captured",
            Kind::RingdownCapturedInPart => "ringdown captured in part",
            Kind::VhostDeviceVsock => "vhost-device-vsock",
        }
    }

    /// Starts it for this many VMs, on its processor.
    ///
    /// # Errors
    /// In words, when it does not start.
    pub fn start(&self, vms: usize, placement: Placement) -> Result<Running, String> {
        let words = |error: io::Error| format!("starting {}: {error}", self.program.display());
        let directory = tempfile::tempdir().map_err(words)?;
        let command = self.command(directory.path(), vms);
        let process = Process::start(
            command,
            directory,
            &[placement.subject],
            placement.generator,
        );
        let mut running = Running {
            process: process.map_err(words)?,
            capture: None,
        };
        match self.kind {
            Kind::VhostDeviceVsock => running.wait_for_sockets(vms)?,
            _ => running.process.wait_until(Process::has_said_ready)?,
        }
        let snaplen = match self.kind {
            Kind::RingdownCaptured => None,
            Kind::RingdownCapturedInPart => Some(SNAPLEN),
            _ => return Ok(running),
        };
        let directory = running.process.directory();
        let capture = Capture::begin(&self.program, directory, snaplen, placement)?;
        running.capture = Some(capture);
        Ok(running)
    }

    fn command(&self, directory: &Path, vms: usize) -> Command {
        let mut command = mortal(&self.program);
        if self.kind != Kind::VhostDeviceVsock {
            command.arg("serve").arg("--runtime-dir").arg(directory);
            command.args(["--allow", "from=*,to=*,port=*"]);
        }
        if self.kind == Kind::RingdownAsleep {
            command.args(["--spin", "0"]);
        }
        for vm in 0..vms {
            let cid = FIRST_CID + vm as u32;
            let vhost = vhost_path(directory, vm);
            let host = host_path(directory, vm);
            let (vhost, host) = (vhost.display(), host.display());
            command.arg("--vm").arg(match self.kind {
                Kind::VhostDeviceVsock => {
                    format!("guest-cid={cid},socket={vhost},uds-path={host}")
                }
                _ => format!("name=vm{vm},cid={cid},vhost-user={vhost},host={host}"),
            });
        }
        command
    }
}

fn vhost_path(directory: &Path, vm: usize) -> PathBuf {
    directory.join(format!("vm{vm}.vhost"))
}

fn host_path(directory: &Path, vm: usize) -> PathBuf {
    directory.join(format!("vm{vm}.sock"))
}

/// A running program. Dropping it ends it.
#[derive(Debug)]
pub struct Running {
    process: Process,
    capture: Option<Capture>,
}

impl Running {
    fn wait_for_sockets(&mut self, vms: usize) -> Result<(), String> {
        // The peer makes its host sockets after its vhost-user sockets.
        self.process.wait_until(|process| {
            let directory = process.directory();
            (0..vms)
                .all(|vm| vhost_path(directory, vm).exists() && host_path(directory, vm).exists())
        })
    }

    /// Where the VM's VMM connects.
    pub fn vhost_socket(&self, vm: usize) -> PathBuf {
        vhost_path(self.process.directory(), vm)
    }

    /// Where programs that dial the VM connect.
    pub fn host_socket(&self, vm: usize) -> PathBuf {
        host_path(self.process.directory(), vm)
    }

    /// Where a program listens that the VM reaches at this port of the host.
    pub fn listener_path(&self, vm: usize, port: u32) -> PathBuf {
        let mut path = self.host_socket(vm).into_os_string();
        path.push(format!("_{port}"));
        PathBuf::from(path)
    }

    /// Its process.
    pub fn pid(&self) -> Pid {
        self.process.pid()
    }

    /// Ends it. Returns what there is to say of the capture beside it, if there was one.
    ///
    /// # Errors
    /// In words, when that had nothing to say.
    pub fn end(mut self) -> Result<Figures, String> {
        let capture = self.capture.take();
        capture.map_or_else(|| Ok(Figures::new()), Capture::end)
    }

    /// Whether it has ended by itself, and how, in words.
    pub fn ended(&mut self) -> Option<String> {
        self.process.ended()
    }
}
