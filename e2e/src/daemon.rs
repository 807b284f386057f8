//! The real daemon, as a child of the test.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output as ProcessOutput, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use rustix::process::{Pid, Signal, kill_process};

use crate::shared::ShowLogs;
use crate::{LOG_TAIL_LINES, log_tail, spawn};

/// How long the daemon may take to say `ready`, and to end after SIGTERM, in seconds.
const DEADLINE_S: u64 = 20;

/// Whether QEMU or the daemon listens at the socket of a serial line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meeting {
    /// The daemon listens; QEMU connects, and again a second after each loss.
    QemuConnects,
    /// QEMU listens, with or without a client.
    QemuListens,
}

/// How a daemon is to be started.
#[derive(Debug, Clone, Default)]
pub struct DaemonSpec {
    /// The VMs: name and CID. Their sockets are `<name>.vhost` and `<name>.sock` in the runtime directory.
    pub vms: Vec<(String, u64)>,
    /// The VMs without vsock, and how the daemon and their VMMs meet at `<name>.serial` in the runtime directory.
    pub serial_vms: Vec<(String, Meeting)>,
    /// How many windows of 16 MiB each VM with vsock shares with the host, and as many with other VMs. They are added at `<name>.qmp` in the runtime directory.
    pub windows: Option<u32>,
    /// Further arguments of `ringdown serve`.
    pub arguments: Vec<String>,
    /// Environment variables, `RUST_LOG` for instance.
    pub environment: Vec<(String, String)>,
    /// The runtime directory of an earlier daemon, instead of a new one.
    pub runtime_directory: Option<PathBuf>,
}

impl DaemonSpec {
    /// A daemon without VMs.
    pub fn new() -> DaemonSpec {
        DaemonSpec::default()
    }

    /// Adds a VM.
    #[must_use]
    pub fn vm(mut self, name: &str, cid: u64) -> DaemonSpec {
        self.vms.push((name.to_owned(), cid));
        self
    }

    /// Adds a VM that has no vsock device but a virtio-serial port for its agent.
    #[must_use]
    pub fn serial_vm(mut self, name: &str, meeting: Meeting) -> DaemonSpec {
        self.serial_vms.push((name.to_owned(), meeting));
        self
    }

    /// Gives each VM with vsock so many windows with the host, and as many with other VMs.
    #[must_use]
    pub fn windows(mut self, count: u32) -> DaemonSpec {
        self.windows = Some(count);
        self
    }

    /// Adds arguments of `ringdown serve`.
    #[must_use]
    pub fn arguments(mut self, arguments: &[&str]) -> DaemonSpec {
        self.arguments
            .extend(arguments.iter().map(|argument| (*argument).to_owned()));
        self
    }
}

/// A running `ringdown serve`. Dropping it sends SIGTERM and demands a clean end.
#[derive(Debug)]
pub struct Daemon {
    runtime_directory: PathBuf,
    log: PathBuf,
    process: Mutex<Process>,
}

#[derive(Debug)]
struct Process {
    child: Child,
    status: Option<ExitStatus>,
}

/// The `ringdown` program under test: `$RINGDOWN_BIN`, else the newest build in the target directory of this test.
pub fn ringdown_program() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("RINGDOWN_BIN").filter(|path| !path.is_empty()) {
        return Ok(PathBuf::from(path));
    }
    let own = std::env::current_exe().context("cannot find the path of this test")?;
    // target/<profile>/deps/<test>: the target directory is three up.
    let target = own
        .ancestors()
        .nth(3)
        .ok_or_else(|| anyhow!("{} is not in a target directory", own.display()))?;
    ["release", "debug"]
        .map(|profile| target.join(profile).join("ringdown"))
        .into_iter()
        .filter_map(|path| Some((fs::metadata(&path).ok()?.modified().ok()?, path)))
        .max()
        .map(|(_, path)| path)
        .ok_or_else(|| {
            anyhow!(
                "there is no ringdown program in {}: run `cargo build --release -p ringdown-cli`",
                target.display()
            )
        })
}

impl Daemon {
    /// Starts the daemon and waits for its `ready` line.
    pub fn start(spec: DaemonSpec) -> Result<Daemon> {
        let runtime_directory = match spec.runtime_directory {
            Some(directory) => directory,
            None => spawn::scratch_directory()?,
        };
        let log = runtime_directory.join("daemon.log");
        let mut arguments = vec![
            "serve".to_owned(),
            "--runtime-dir".to_owned(),
            runtime_directory.display().to_string(),
        ];
        for (name, cid) in &spec.vms {
            arguments.push("--vm".to_owned());
            let mut vm = format!(
                "name={name},cid={cid},vhost-user={},host={}",
                vhost_path(&runtime_directory, name).display(),
                host_path(&runtime_directory, name).display()
            );
            if let Some(count) = spec.windows {
                let qmp = qmp_path(&runtime_directory, name);
                vm.push_str(&format!(",windows={count}x16M,qmp={}", qmp.display()));
            }
            arguments.push(vm);
        }
        for (name, meeting) in &spec.serial_vms {
            let key = match meeting {
                Meeting::QemuConnects => "serial",
                Meeting::QemuListens => "serial-connect",
            };
            arguments.push("--vm".to_owned());
            arguments.push(format!(
                "name={name},{key}={},host={}",
                serial_path(&runtime_directory, name).display(),
                host_path(&runtime_directory, name).display()
            ));
        }
        arguments.extend(spec.arguments);
        let log_file = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .open(&log)?;
        let mut child = spawn::spawn(ringdown_program()?, arguments, move |command| {
            command
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .stderr(log_file)
                .envs(spec.environment);
        })?;
        let lines = read_lines(&mut child)?;
        let daemon = Daemon {
            runtime_directory,
            log,
            process: Mutex::new(Process {
                child,
                status: None,
            }),
        };
        if let Err(error) = daemon.wait_for_ready(&lines) {
            // It never came up: its end need not be clean, and the reason is what counts.
            daemon.kill()?;
            let said = log_tail(&daemon.log, LOG_TAIL_LINES);
            return Err(error.context(format!(
                "the daemon did not start\n--- daemon ---\n{said}\n---"
            )));
        }
        Ok(daemon)
    }

    /// The directory of its sockets.
    pub fn runtime_directory(&self) -> &Path {
        &self.runtime_directory
    }

    /// The socket that a VM's VMM connects to.
    pub fn vhost_socket(&self, name: &str) -> PathBuf {
        vhost_path(&self.runtime_directory, name)
    }

    /// The socket where the daemon and the VMM of a VM without vsock meet.
    pub fn serial_socket(&self, name: &str) -> PathBuf {
        serial_path(&self.runtime_directory, name)
    }

    /// The socket where host programs say `CONNECT <port>`.
    pub fn host_socket(&self, name: &str) -> PathBuf {
        host_path(&self.runtime_directory, name)
    }

    /// The path where a host program listens for a guest's dials to CID 2 and `port`.
    pub fn listener_path(&self, name: &str, port: u32) -> PathBuf {
        let mut path = self.host_socket(name).into_os_string();
        path.push(format!("_{port}"));
        PathBuf::from(path)
    }

    /// A `ringdown` command that talks to this daemon, not yet started.
    pub fn command(&self, arguments: &[&str]) -> Result<Command> {
        let mut command = Command::new(ringdown_program()?);
        command
            .args(arguments)
            .env("RINGDOWN_RUNTIME_DIR", &self.runtime_directory)
            .stdin(Stdio::null());
        Ok(command)
    }

    /// Runs a `ringdown` command to its end and gives what it left.
    pub fn run(&self, arguments: &[&str]) -> Result<ProcessOutput> {
        self.command(arguments)?
            .output()
            .context("cannot run ringdown")
    }

    /// The process number.
    pub fn process_id(&self) -> u32 {
        self.process().child.id()
    }

    /// How many descriptors the daemon has open: tests compare it before and after, to find leaks.
    pub fn descriptor_count(&self) -> Result<usize> {
        Ok(fs::read_dir(format!("/proc/{}/fd", self.process_id()))?.count())
    }

    /// Its resident memory in bytes, with the pages of its guests that it has touched.
    pub fn resident_bytes(&self) -> Result<u64> {
        self.status_bytes("VmRSS:")
    }

    /// The memory that is its own, resident, in bytes: without its program and the memory of its guests.
    pub fn own_bytes(&self) -> Result<u64> {
        self.status_bytes("RssAnon:")
    }

    fn status_bytes(&self, key: &str) -> Result<u64> {
        let text = fs::read_to_string(format!("/proc/{}/status", self.process_id()))?;
        let kib = text
            .lines()
            .find_map(|line| line.strip_prefix(key))
            .and_then(|rest| rest.split_whitespace().next())
            .ok_or_else(|| anyhow!("the daemon has no memory: has it ended?"))?;
        Ok(kib.parse::<u64>()? * 1024)
    }

    /// True while it runs.
    pub fn is_running(&self) -> bool {
        let mut process = self.process();
        if process.status.is_none() {
            process.status = process.child.try_wait().ok().flatten();
        }
        process.status.is_none()
    }

    /// Everything it has logged.
    pub fn log_text(&self) -> String {
        fs::read(&self.log)
            .map(|bytes| String::from_utf8_lossy(&bytes).into_owned())
            .unwrap_or_default()
    }

    /// Waits until the log has a line that contains `text`.
    pub fn wait_for_log(&self, text: &str, deadline: Duration) -> Result<()> {
        let until = Instant::now() + deadline;
        while !self.log_text().contains(text) {
            if Instant::now() > until {
                bail!("the daemon did not log {text:?}");
            }
            thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }

    /// Sends SIGTERM and waits for a clean end.
    pub fn stop(&self) -> Result<()> {
        let mut process = self.process();
        if process.status.is_none() {
            process.status = process.child.try_wait()?;
        }
        if process.status.is_none() {
            let id = i32::try_from(process.child.id())
                .ok()
                .and_then(Pid::from_raw)
                .context("no process number")?;
            kill_process(id, Signal::TERM).context("cannot signal the daemon")?;
            process.status = Some(wait_with_deadline(&mut process.child)?);
        }
        match process.status {
            Some(status) if status.success() => Ok(()),
            Some(status) => bail!("the daemon ended with {status}"),
            None => bail!("the daemon has no end"),
        }
    }

    /// Kills it, as a crash would.
    pub fn kill(&self) -> Result<()> {
        let mut process = self.process();
        if process.status.is_none() {
            process.child.kill()?;
            process.child.wait()?;
            // What was asked for is a clean end as far as `drop` is concerned.
            process.status = Some(ExitStatus::default());
        }
        Ok(())
    }

    /// Shows the end of the log on standard error.
    pub fn show_log(&self) {
        eprintln!(
            "--- daemon: the end of its log ---\n{}\n---",
            log_tail(&self.log, LOG_TAIL_LINES)
        );
    }

    fn wait_for_ready(&self, lines: &Receiver<String>) -> Result<()> {
        let until = Instant::now() + Duration::from_secs(DEADLINE_S);
        loop {
            match lines.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(line) if line.split_whitespace().next() == Some("ready") => return Ok(()),
                Ok(_) => {}
                Err(RecvTimeoutError::Timeout) => {
                    bail!("it did not say `ready` within {DEADLINE_S} s")
                }
                Err(RecvTimeoutError::Disconnected) => bail!("it ended without saying `ready`"),
            }
        }
    }

    fn process(&self) -> MutexGuard<'_, Process> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let failed = self.stop();
        if failed.is_err() {
            let _ = self.kill();
        }
        if thread::panicking() {
            self.show_log();
        } else if let Err(error) = failed {
            self.show_log();
            panic!("{error:#}");
        }
    }
}

impl ShowLogs for Daemon {
    fn show_logs(&self) {
        self.show_log();
    }
}

fn vhost_path(runtime_directory: &Path, name: &str) -> PathBuf {
    runtime_directory.join(format!("{name}.vhost"))
}

fn serial_path(runtime_directory: &Path, name: &str) -> PathBuf {
    runtime_directory.join(format!("{name}.serial"))
}

fn qmp_path(runtime_directory: &Path, name: &str) -> PathBuf {
    runtime_directory.join(format!("{name}.qmp"))
}

fn host_path(runtime_directory: &Path, name: &str) -> PathBuf {
    runtime_directory.join(format!("{name}.sock"))
}

/// The child's standard output, line by line, read to its end so that the child never waits for a reader.
fn read_lines(child: &mut Child) -> Result<Receiver<String>> {
    let output = child
        .stdout
        .take()
        .context("the daemon has no standard output")?;
    let (sender, receiver) = channel();
    thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            // After `ready` there is no reader any more.
            let _ = sender.send(line);
        }
    });
    Ok(receiver)
}

fn wait_with_deadline(child: &mut Child) -> Result<ExitStatus> {
    let until = Instant::now() + Duration::from_secs(DEADLINE_S);
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() > until {
            bail!("the daemon did not end within {DEADLINE_S} s of SIGTERM");
        }
        thread::sleep(Duration::from_millis(10));
    }
}
