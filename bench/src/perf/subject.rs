//! What is measured: a program with vhost-user sockets, started anew for every measurement.

use std::fs;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::processor::{Placement, pin};

/// How long it may take to begin, and to end when told to.
const PATIENCE: Duration = Duration::from_secs(20);

/// A kind of program with vhost-user-vsock devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    /// This project's.
    Ringdown,
    /// This project's, told to sleep at once instead of looking first.
    RingdownAsleep,
    /// vhost-device-vsock of rust-vmm.
    VhostDeviceVsock,
}

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
        let log = fs::File::create(directory.path().join("log")).map_err(words)?;
        let mut command = self.command(directory.path(), vms);
        command
            // Some end when their standard input does: it stays open as long as they are wanted.
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(log);
        // What is started inherits the place.
        pin(placement.subject).map_err(|error| words(error.into()))?;
        let child = command.spawn().map_err(words);
        pin(placement.generator).map_err(|error| words(error.into()))?;
        let mut child = child?;
        let mut running = Running {
            _input: child.stdin.take(),
            child,
            directory,
        };
        running.wait_until_ready(vms)?;
        Ok(running)
    }

    fn command(&self, directory: &Path, vms: usize) -> Command {
        // Whatever becomes of this process, what it has started ends with it.
        let mut command = Command::new("setpriv");
        command
            .args(["--pdeathsig", "KILL", "--"])
            .arg(&self.program);
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
                Kind::Ringdown | Kind::RingdownAsleep => {
                    format!("name=vm{vm},cid={cid},vhost-user={vhost},host={host}")
                }
                Kind::VhostDeviceVsock => {
                    format!("guest-cid={cid},socket={vhost},uds-path={host}")
                }
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
    child: Child,
    _input: Option<ChildStdin>,
    directory: TempDir,
}

impl Running {
    fn wait_until_ready(&mut self, vms: usize) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
        let missing = |running: &Running| {
            (0..vms).any(|vm| !running.vhost_socket(vm).exists())
                || self::host_is_missing(running, vms)
        };
        while missing(self) {
            if let Ok(Some(status)) = self.child.try_wait() {
                return Err(format!("it ended with {status}: {}", self.log_tail()));
            }
            if Instant::now() > until {
                return Err(format!(
                    "it was not ready in {PATIENCE:?}: {}",
                    self.log_tail()
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Where the VM's VMM connects.
    pub fn vhost_socket(&self, vm: usize) -> PathBuf {
        vhost_path(self.directory.path(), vm)
    }

    /// Where programs that dial the VM connect.
    pub fn host_socket(&self, vm: usize) -> PathBuf {
        host_path(self.directory.path(), vm)
    }

    /// Where a program listens that the VM reaches at this port of the host.
    pub fn listener_path(&self, vm: usize, port: u32) -> PathBuf {
        let mut path = self.host_socket(vm).into_os_string();
        path.push(format!("_{port}"));
        PathBuf::from(path)
    }

    /// Its process.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Whether it has ended by itself, and how, in words.
    pub fn ended(&mut self) -> Option<String> {
        let status = self.child.try_wait().ok().flatten()?;
        let how = match status.signal() {
            Some(signal) => format!("it was ended by signal {signal}"),
            None => format!("it ended with {status}"),
        };
        Some(format!("{how}: {}", self.log_tail()))
    }

    /// The last words of its log.
    pub fn log_tail(&self) -> String {
        let log = fs::read(self.directory.path().join("log")).unwrap_or_default();
        let log = String::from_utf8_lossy(&log);
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(3)..].join(" / ");
        // Where it ran says nothing, and differs from run to run.
        tail.replace(&self.directory.path().display().to_string(), "")
    }

    fn stop(&mut self) {
        // It may have ended.
        let _ = kill_process(self.pid(), Signal::TERM);
        let until = Instant::now() + Duration::from_secs(1);
        while Instant::now() < until {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The peer makes its host sockets after its vhost-user sockets; ours come before.
fn host_is_missing(running: &Running, vms: usize) -> bool {
    (0..vms).any(|vm| !running.host_socket(vm).exists())
}

impl Drop for Running {
    fn drop(&mut self) {
        self.stop();
    }
}
