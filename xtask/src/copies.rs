//! How fast files and commands get into a guest: `ringdown cp` and `exec` over vsock and over virtio-serial, beside scp and ssh over the same
//! vsock line and beside QEMU's own guest agent, in one guest and by turns.
//!
//! Rates of an emulated guest say little by themselves. Ratios of one run, in the same guest, say what is quicker, and by how much.

mod guest_agent;
mod report;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use e2e::pattern::Pattern;
use e2e::{Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Meeting, host, newer, spawn};

use crate::progress::Progress;
use guest_agent::GuestAgent;
use report::{Report, Series};

/// The two VMs that are one guest: over vsock, and over its serial port.
const VSOCK: &str = "vsock";
const SERIAL: &str = "serial";

/// How much QEMU's agent carries each time: at its speed, what others carry would take minutes.
const GUEST_AGENT_BYTES: usize = 1 << 20;

/// How much of a file is in one command of QEMU's agent. It does better with large ones; most clients use 4 to 48 KiB.
const GUEST_AGENT_CHUNK_BYTES: usize = 48 * 1024;

/// How often a command is started in each round.
const COMMANDS: usize = 5;

/// What `cargo xtask copies` takes.
#[derive(Debug, Args)]
pub struct CopiesArguments {
    /// How long the file is that is copied, in MiB.
    #[arg(long, default_value_t = 64)]
    mib: usize,
    /// How often each is measured; the median counts.
    #[arg(long, default_value_t = 5)]
    rounds: usize,
    /// Keep what was measured in a new directory below this one.
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// Measures, prints a table, and keeps it if that was asked for.
pub fn run(arguments: &CopiesArguments) -> Result<()> {
    let mut progress = Progress::new("copies", arguments.rounds + 1);
    progress.step("a daemon, and a guest with a vsock device and virtio-serial ports");
    let mut bench = Bench::start(arguments.mib << 20)?;
    let mut report = Report::new(arguments.mib, arguments.rounds, &bench.guest.release())?;
    // What is done for the first time loads programs and makes keys.
    bench.round(&mut Report::new(0, 0, "")?)?;
    for round in 0..arguments.rounds {
        progress.step(format!("round {}", round + 1));
        bench.round(&mut report)?;
    }
    print!("{}", report.table());
    if let Some(directory) = &arguments.output {
        progress.done(format!("kept in {}", report.keep(directory)?.display()));
    }
    Ok(())
}

struct Bench {
    guest: Guest,
    daemon: Daemon,
    agent: GuestAgent,
    _sshd: e2e::Running,
    directory: PathBuf,
    ssh_options: Vec<String>,
    bytes: usize,
    expected: String,
}

impl Bench {
    fn start(bytes: usize) -> Result<Bench> {
        let daemon = DaemonSpec::new().vm(VSOCK, 3);
        let daemon = Daemon::start(daemon.serial_vm(SERIAL, Meeting::QemuConnects))?;
        let directory = spawn::scratch_directory()?;
        let qemu_agent = directory.join("qga");
        let spec = GuestSpec::new("copies", Kernel::V6_12)
            .with_tools()
            .layer("jobs")
            .memory_mib(512 + 4 * (bytes >> 20) as u32)
            .attached_as(&daemon, VSOCK)
            .attached_as(&daemon, SERIAL)
            .qemu(
                &guest_agent::arguments(&qemu_agent)
                    .each_ref()
                    .map(String::as_str),
            );
        let guest = Guest::boot(spec)?;
        let ssh_options = let_in(&guest, &daemon, &directory)?;
        // One sshd for each connection, with no program in between.
        let sshd = guest
            .start("exec socat VSOCK-LISTEN:22,reuseaddr,fork 'EXEC:/usr/sbin/sshd -i,nofork'")?;
        drop(host::dial_when_open(
            &daemon.host_socket(VSOCK),
            22,
            Duration::from_secs(60),
        )?);
        let agent = GuestAgent::start(&guest, &qemu_agent)?;
        fs::write(directory.join("file"), Pattern::new(0).take(bytes))?;
        Ok(Bench {
            guest,
            daemon,
            agent,
            _sshd: sshd,
            directory,
            ssh_options,
            bytes,
            expected: host::digest_of(bytes as u64),
        })
    }

    /// Everything once, so that what is compared was measured within a minute of each other.
    fn round(&mut self, report: &mut Report) -> Result<()> {
        for vm in [VSOCK, SERIAL] {
            let there = format!("{vm}:/tmp/file");
            let command = format!("ringdown cp, {vm}");
            self.both_ways(report, &command, |bench, from, to| {
                let place = |path: &Path, in_guest| match in_guest {
                    true => there.clone(),
                    false => path.display().to_string(),
                };
                let (from, to) = (place(from.0, from.1), place(to.0, to.1));
                succeeded(bench.daemon.run(&["cp", "--quiet", &from, &to])?)
            })?;
        }
        self.both_ways(report, "scp, vsock", |bench, from, to| {
            let place = |path: &Path, in_guest| match in_guest {
                true => "root@guest:/tmp/file".to_owned(),
                false => path.display().to_string(),
            };
            let mut command = bench.ssh("scp");
            command
                .arg("-q")
                .args([place(from.0, from.1), place(to.0, to.1)]);
            succeeded(command.output()?)
        })?;
        self.guest_agents_files(report)?;
        for _ in 0..COMMANDS {
            self.commands(report)?;
        }
        Ok(())
    }

    /// Copies to the guest and back, and checks what arrived.
    fn both_ways(
        &self,
        report: &mut Report,
        command: &str,
        copy: impl Fn(&Bench, (&Path, bool), (&Path, bool)) -> Result<()>,
    ) -> Result<()> {
        let (file, back) = (self.directory.join("file"), self.directory.join("back"));
        let nowhere = Path::new("");
        self.guest.shell("rm -f /tmp/file")?;
        let taken = timed(|| copy(self, (&file, false), (nowhere, true)))?;
        report.add(Series::to_guest(command), self.bytes, taken);
        self.check("/tmp/file", &self.expected)?;
        let _ = fs::remove_file(&back);
        let taken = timed(|| copy(self, (nowhere, true), (&back, false)))?;
        report.add(Series::from_guest(command), self.bytes, taken);
        let (_, found) = host::drain_digest(&mut fs::File::open(&back)?)?;
        ensure!(
            found == self.expected,
            "{command}: what came back is not what was sent"
        );
        Ok(())
    }

    fn check(&self, path: &str, expected: &str) -> Result<()> {
        let found = self.guest.shell(&format!("sha256sum {path}"))?;
        ensure!(
            found.starts_with(expected),
            "{path} in the guest is not what was sent"
        );
        Ok(())
    }

    fn guest_agents_files(&mut self, report: &mut Report) -> Result<()> {
        let content = Pattern::new(0).take(GUEST_AGENT_BYTES);
        let agent = &mut self.agent;
        let taken = timed(|| agent.write_file("/tmp/small", &content, GUEST_AGENT_CHUNK_BYTES))?;
        report.add(
            Series::to_guest("qemu-ga guest-file-write"),
            GUEST_AGENT_BYTES,
            taken,
        );
        let mut back = Vec::new();
        let taken = timed(|| {
            back = agent.read_file("/tmp/small", GUEST_AGENT_CHUNK_BYTES)?;
            Ok(())
        })?;
        report.add(
            Series::from_guest("qemu-ga guest-file-read"),
            GUEST_AGENT_BYTES,
            taken,
        );
        ensure!(back == content, "qemu-ga gave other bytes than it got");
        self.check("/tmp/small", &host::digest_of(GUEST_AGENT_BYTES as u64))
    }

    fn commands(&mut self, report: &mut Report) -> Result<()> {
        for vm in [VSOCK, SERIAL] {
            let taken = timed(|| succeeded(self.daemon.run(&["exec", vm, "--", "true"])?))?;
            report.add(Series::command(&format!("ringdown exec, {vm}")), 0, taken);
        }
        let taken = timed(|| succeeded(self.ssh("ssh").args(["root@guest", "true"]).output()?))?;
        report.add(Series::command("ssh, vsock"), 0, taken);
        let taken = timed(|| self.agent.execute("/bin/true"))?;
        report.add(Series::command("qemu-ga guest-exec"), 0, taken);
        Ok(())
    }

    fn ssh(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.args(&self.ssh_options).stdin(Stdio::null());
        command
    }
}

/// Lets root of the guest be reached with a new key, and gives the options with which ssh and scp do it: through systemd's proxy, which
/// hands the connection over and is not in its way.
fn let_in(guest: &Guest, daemon: &Daemon, directory: &Path) -> Result<Vec<String>> {
    let key = directory.join("key");
    let made = Command::new("ssh-keygen")
        .args(["-q", "-t", "ed25519", "-N", "", "-f"])
        .arg(&key)
        .status()
        .context("cannot run ssh-keygen")?;
    ensure!(made.success(), "ssh-keygen failed");
    guest.shell("mkdir -p /root/.ssh && chmod 700 /root /root/.ssh")?;
    guest.shell("ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key")?;
    let public = fs::read(key.with_extension("pub"))?;
    guest.write_file("/root/.ssh/authorized_keys", public, 0o600)?;
    let proxy = newer::systemd_ssh_proxy()?;
    let socket = daemon.host_socket(VSOCK);
    let options = [
        format!("ProxyCommand={proxy} vsock-mux{} 22", socket.display()),
        "ProxyUseFdpass=yes".to_owned(),
        "CheckHostIP=no".to_owned(),
        "StrictHostKeyChecking=no".to_owned(),
        "UserKnownHostsFile=/dev/null".to_owned(),
        "LogLevel=ERROR".to_owned(),
        "BatchMode=yes".to_owned(),
    ];
    let first = ["-F", "none", "-i"].map(str::to_owned).into_iter();
    Ok(first
        .chain([key.display().to_string()])
        .chain(
            options
                .into_iter()
                .flat_map(|option| ["-o".to_owned(), option]),
        )
        .collect())
}

fn timed(work: impl FnOnce() -> Result<()>) -> Result<Duration> {
    let begun = Instant::now();
    work()?;
    Ok(begun.elapsed())
}

fn succeeded(output: Output) -> Result<()> {
    if !output.status.success() {
        bail!(
            "{}: {}",
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(())
}
