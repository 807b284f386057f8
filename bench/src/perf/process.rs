//! A child process that is measured, or that something measured needs.

use std::fs;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::processor::pin_to;

/// How long it may take to begin.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// How long it may take to end after the signal.
const PATIENCE_AT_END: Duration = Duration::from_secs(1);

/// A command for a program that ends with the thread that starts it, whatever becomes of that.
pub fn mortal(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "--"]).arg(program);
    command
}

/// A running program with a directory of its own. Dropping it ends it.
#[derive(Debug)]
pub struct Process {
    child: Child,
    _input: Option<ChildStdin>,
    directory: TempDir,
}

impl Process {
    /// Starts a command on these processors, its output in a log in the directory; then this thread goes back to the first of `own`.
    pub fn start(
        mut command: Command,
        directory: TempDir,
        processors: &[usize],
        own: usize,
    ) -> io::Result<Process> {
        let log = fs::File::create(directory.path().join("log"))?;
        command
            // Some end when their standard input does: it stays open as long as they are wanted.
            .stdin(Stdio::piped())
            .stdout(log.try_clone()?)
            .stderr(log);
        // What is started inherits the place.
        pin_to(processors)?;
        let child = command.spawn();
        pin_to(&[own])?;
        let mut child = child?;
        Ok(Process {
            _input: child.stdin.take(),
            child,
            directory,
        })
    }

    /// Waits until something is there that it makes when it is ready.
    ///
    /// # Errors
    /// In words, when it ends before, or takes too long.
    pub fn wait_until(&mut self, ready: impl Fn(&Process) -> bool) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
        while !ready(self) {
            if let Some(how) = self.ended() {
                return Err(how);
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

    /// Whether it has said that every socket listens, as `ringdown serve` does. A socket that is only there may refuse yet.
    pub fn has_said_ready(&self) -> bool {
        self.log().lines().any(|line| line == "ready")
    }

    /// Its directory.
    pub fn directory(&self) -> &Path {
        self.directory.path()
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

    /// Everything it has said.
    pub fn log(&self) -> String {
        let log = fs::read(self.directory.path().join("log")).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    /// Its last words.
    pub fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        let tail = lines[lines.len().saturating_sub(3)..].join(" / ");
        // Where it ran says nothing, and differs from run to run.
        tail.replace(&self.directory.path().display().to_string(), "")
    }

    fn stop(&mut self) {
        // It may have ended.
        let _ = kill_process(self.pid(), Signal::TERM);
        let until = Instant::now() + PATIENCE_AT_END;
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

impl Drop for Process {
    fn drop(&mut self) {
        self.stop();
    }
}
