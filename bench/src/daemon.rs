//! The program under test, as a child process whose appetite is measured.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// How long it may take to begin and to end.
const PATIENCE: Duration = Duration::from_secs(20);

/// A running `ringdown serve` with its sockets in a directory of its own. Dropping it demands a clean end.
#[derive(Debug)]
pub struct Daemon {
    child: Child,
    program: PathBuf,
    directory: TempDir,
    is_killed: bool,
}

impl Daemon {
    /// Starts `program`, which takes `ringdown`'s arguments, with these VMs and further arguments of `serve`, and waits
    /// until it is ready.
    ///
    /// # Errors
    /// When it cannot be started or ends at once.
    pub fn start(program: &Path, vms: &[(&str, u32)], arguments: &[&str]) -> io::Result<Daemon> {
        // As the runtime directory is by itself.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        let directory = tempfile::Builder::new().permissions(mode).tempdir()?;
        let log = fs::File::create(directory.path().join("daemon.log"))?;
        let mut command = Command::new(program);
        command
            .arg("serve")
            .arg("--runtime-dir")
            .arg(directory.path());
        for (name, cid) in vms {
            let path = |kind: &str| directory.path().join(format!("{name}.{kind}"));
            let (vhost, host) = (path("vhost"), path("sock"));
            command.arg("--vm").arg(format!(
                "name={name},cid={cid},vhost-user={},host={}",
                vhost.display(),
                host.display()
            ));
        }
        let mut child = command
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()?;
        let output = child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?;
        let (said, ready) = channel();
        // It ends with the child's standard output.
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                if line.starts_with("ready") {
                    // The receiver may be gone.
                    let _ = said.send(());
                }
            }
        });
        let daemon = Daemon {
            child,
            program: program.to_owned(),
            directory,
            is_killed: false,
        };
        match ready.recv_timeout(PATIENCE) {
            Ok(()) => Ok(daemon),
            Err(_) => Err(io::Error::other(format!(
                "the daemon did not become ready: {}",
                daemon.log_tail()
            ))),
        }
    }

    /// Where the VM's VMM connects.
    pub fn vhost_socket(&self, name: &str) -> PathBuf {
        self.directory.path().join(format!("{name}.vhost"))
    }

    /// Where programs that dial the VM connect.
    pub fn host_socket(&self, name: &str) -> PathBuf {
        self.directory.path().join(format!("{name}.sock"))
    }

    /// Where a program listens that the VM reaches at this port of the host.
    pub fn listener_path(&self, name: &str, port: u32) -> PathBuf {
        self.directory.path().join(format!("{name}.sock_{port}"))
    }

    /// Where the daemon is asked what it does.
    pub fn control_socket(&self) -> PathBuf {
        self.directory.path().join("control.sock")
    }

    /// Runs another command of the program against this daemon, and returns whether it succeeded.
    pub fn command(&self, arguments: &[&str]) -> io::Result<bool> {
        let child = Command::new(&self.program)
            .args(arguments)
            .env("RINGDOWN_RUNTIME_DIR", self.directory.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        // The pipe stays open until it has ended, since its end would end the program.
        let mut child = child;
        let held = child.stdin.take();
        let status = child.wait()?;
        drop(held);
        Ok(status.success())
    }

    /// What the control API says about a VM, as JSON.
    ///
    /// # Errors
    /// When the daemon does not answer, or knows no such VM.
    pub fn vm_status(&self, name: &str) -> io::Result<serde_json::Value> {
        let mut stream = UnixStream::connect(self.control_socket())?;
        let request =
            format!("GET /v1/vms/{name} HTTP/1.1\r\nHost: ringdown\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes())?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        match answer.split_once("\r\n\r\n") {
            Some((head, body)) if head.starts_with("HTTP/1.1 200") => {
                Ok(serde_json::from_str(body)?)
            }
            _ => Err(io::Error::other(answer)),
        }
    }

    /// Whether it runs.
    pub fn is_running(&mut self) -> bool {
        matches!(self.child.try_wait(), Ok(None))
    }

    /// Its memory that belongs to no file or guest, in bytes. Pages of guests that it has touched do not count.
    pub fn private_bytes(&self) -> u64 {
        let status = fs::read_to_string(self.proc("status")).unwrap_or_default();
        status
            .lines()
            .find_map(|line| line.strip_prefix("RssAnon:"))
            .and_then(|rest| rest.split_whitespace().next()?.parse::<u64>().ok())
            .unwrap_or(0)
            * 1024
    }

    /// Processor time that it has used, in user and kernel together.
    pub fn processor_time(&self) -> Duration {
        let stat = fs::read_to_string(self.proc("stat")).unwrap_or_default();
        // The name, in parentheses, may contain anything; the numbers begin behind it.
        let rest = stat.rsplit(')').next().unwrap_or_default();
        let field = |index: usize| {
            rest.split_whitespace()
                .nth(index)
                .and_then(|text| text.parse::<u64>().ok())
                .unwrap_or(0)
        };
        let ticks = field(11) + field(12);
        Duration::from_millis(ticks * 1000 / rustix::param::clock_ticks_per_second())
    }

    /// How many descriptors it has open.
    pub fn descriptor_count(&self) -> usize {
        fs::read_dir(self.proc("fd")).map_or(0, Iterator::count)
    }

    /// What each open descriptor is, in words of the kernel.
    pub fn descriptors(&self) -> Vec<String> {
        let Ok(entries) = fs::read_dir(self.proc("fd")) else {
            return Vec::new();
        };
        entries
            .flatten()
            .filter_map(|entry| fs::read_link(entry.path()).ok())
            .map(|target| target.display().to_string())
            .collect()
    }

    /// Size of its log, in bytes.
    pub fn log_bytes(&self) -> u64 {
        fs::metadata(self.log_path()).map_or(0, |metadata| metadata.len())
    }

    /// What is in its log from this byte on.
    pub fn log_since(&self, start: u64) -> String {
        let read = || {
            let mut file = fs::File::open(self.log_path())?;
            file.seek(SeekFrom::Start(start))?;
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            io::Result::Ok(bytes)
        };
        String::from_utf8_lossy(&read().unwrap_or_default()).into_owned()
    }

    /// Everything in its log.
    pub fn log(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.log_path()).unwrap_or_default()).into_owned()
    }

    /// Waits until its log has this text at least so many times: a thread of its own writes it.
    ///
    /// # Panics
    /// When the log does not have it within a minute.
    pub fn wait_for_log(&self, text: &str, times: usize) {
        let until = Instant::now() + Duration::from_secs(60);
        while self.log().matches(text).count() < times {
            let tail = || self.log_tail();
            assert!(
                Instant::now() < until,
                "no {text:?} in the log:\n{}",
                tail()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// The last lines of its log.
    pub fn log_tail(&self) -> String {
        let log = self.log();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(40)..].join("\n")
    }

    fn log_path(&self) -> PathBuf {
        self.directory.path().join("daemon.log")
    }

    fn proc(&self, name: &str) -> String {
        format!("/proc/{}/{name}", self.child.id())
    }

    /// Stops it where it is, or lets it go on.
    pub fn pause(&self, pauses: bool) -> io::Result<()> {
        let signal = if pauses { Signal::STOP } else { Signal::CONT };
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        Ok(kill_process(pid.ok_or(io::ErrorKind::NotFound)?, signal)?)
    }

    /// Kills it, and waits until it is gone.
    pub fn kill(&mut self) -> io::Result<()> {
        self.is_killed = true;
        self.child.kill()?;
        self.child.wait().map(drop)
    }

    /// Sends SIGTERM and waits for the end. Returns whether it was a clean one.
    pub fn stop(&mut self) -> bool {
        if let Ok(Some(status)) = self.child.try_wait() {
            return status.success();
        }
        let pid = i32::try_from(self.child.id()).ok().and_then(Pid::from_raw);
        if let Some(pid) = pid {
            // If it has just ended, the wait returns it.
            let _ = kill_process(pid, Signal::TERM);
        }
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            match self.child.try_wait() {
                Ok(Some(status)) => return status.success(),
                Ok(None) => std::thread::sleep(Duration::from_millis(2)),
                Err(_) => return false,
            }
        }
        false
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let clean = self.is_killed || self.stop();
        if !clean {
            // It may have ended by itself, badly.
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            eprintln!("--- the daemon's log ends ---\n{}\n---", self.log_tail());
        } else if !clean {
            panic!("the daemon did not end cleanly:\n{}", self.log_tail());
        }
    }
}
