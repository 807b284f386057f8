//! What a connection costs under `ringdown-agent run`, beside the same program over a network card with the guest's own TCP, in the same guest and by turns.
//!
//! Both ways end at one server of the host: egress calls it at the loopback, TCP at the far end of the tap that is the network's uplink. All of it is in a network namespace
//! that is made for it.

mod report;
mod server;

use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use clap::Args;
use e2e::{CommandSpec, Daemon, DaemonSpec, Guest, GuestSpec, Kernel, spawn};

use crate::progress::Progress;
use report::{Report, What};

/// What `cargo xtask transparent-price` takes.
#[derive(Debug, Args)]
pub struct TransparentPriceArguments {
    /// How much is sent each way, in MiB.
    #[arg(long, default_value_t = 64)]
    mib: usize,
    /// How often each is measured; the median counts.
    #[arg(long, default_value_t = 7)]
    rounds: usize,
    /// How many connections are opened one after the other.
    #[arg(long, default_value_t = 50)]
    connections: usize,
    /// How many are open at once.
    #[arg(long, default_value_t = 200)]
    held: usize,
    /// Keep what was measured in a new directory below this one.
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

/// How long one measurement may take.
const DEADLINE: Duration = Duration::from_secs(120);

/// The host's end of the network, in its own namespace.
const HOST: &str = "10.77.0.1";
const TAP: &str = "rd-price";

/// Set in the environment of the process inside the namespace.
const INSIDE: &str = "RINGDOWN_PRICE_INSIDE";

/// How the program reaches the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    Run,
    Network,
}

/// Measures, prints a table, and keeps it if that was asked for.
pub fn run(arguments: &TransparentPriceArguments) -> Result<()> {
    if std::env::var_os(INSIDE).is_none() {
        return enter_namespace();
    }
    let mut progress = Progress::new("transparent-price", arguments.rounds + 1);
    progress.step("a daemon, and a guest with a vsock device and a card in a network");
    let bench = Bench::start()?;
    let mut report = Report::new(arguments, &bench.guest.release())?;
    // What is done for the first time loads programs.
    bench.round(arguments, &mut Report::new(arguments, "")?)?;
    for round in 0..arguments.rounds {
        progress.step(format!("round {}", round + 1));
        bench.round(arguments, &mut report)?;
    }
    print!("{}", report.table());
    if let Some(directory) = &arguments.output {
        progress.done(format!("kept in {}", report.keep(directory)?.display()));
    }
    Ok(())
}

/// Does all of it again in a network namespace, where a tap and its address are in no other's way.
fn enter_namespace() -> Result<()> {
    let mut command = Command::new("unshare");
    if !rustix::process::geteuid().is_root() {
        command.arg("--map-root-user");
    }
    let status = command
        .arg("--net")
        .arg("--")
        .arg(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .env(INSIDE, "1")
        .status()
        .context("cannot run unshare")?;
    ensure!(status.success(), "inside of the namespace: {status}");
    Ok(())
}

fn ip(words: &str) -> Result<()> {
    let status = Command::new("ip").args(words.split(' ')).status();
    let status = status.context("cannot run ip")?;
    ensure!(status.success(), "ip {words}: {status}");
    Ok(())
}

struct Bench {
    guest: Guest,
    daemon: Daemon,
    port: u16,
}

fn configuration(port: u16) -> String {
    format!(
        r#"
[[network]]
name = "lan"
ipv4 = "10.77.0.2/24"
uplink = {{ tap = "{TAP}", gateway = "{HOST}" }}

[[vm]]
name = "box"
cid = 3
networks = ["lan"]

[[service]]
name = "egress"
port = 3128
egress = true

[hosts]
"server.test" = "127.0.0.1"

[[rule]]
from = "box"
to = "service:egress"
action = "allow"

[[rule]]
from = "box"
to = ["name:server.test", "address:127.0.0.1"]
port = {port}
action = "allow"
"#
    )
}

impl Bench {
    fn start() -> Result<Bench> {
        ip("link set lo up")?;
        let listener = TcpListener::bind("0.0.0.0:0")?;
        let port = listener.local_addr()?.port();
        thread::spawn(move || server::serve(&listener));
        let directory = spawn::scratch_directory()?;
        let file = directory.join("ringdown.toml");
        fs::write(&file, configuration(port))?;
        let mut spec = DaemonSpec::new().arguments(&["--config", &file.display().to_string()]);
        spec.runtime_directory = Some(directory);
        let daemon = Daemon::start(spec)?;
        ip(&format!("address add {HOST}/24 dev {TAP}"))?;
        ip(&format!("link set {TAP} up"))?;
        let spec = GuestSpec::new("box", Kernel::V6_12)
            .memory_mib(1024)
            .attached(&daemon)
            .layer("net")
            .layer("lan");
        let guest = Guest::boot(spec)?;
        let script = include_bytes!("../../guest/price.py");
        guest.write_file("/tmp/price.py", script, 0o644)?;
        guest.shell(
            "modprobe virtio_net && ip link set eth0 up && udhcpc -i eth0 -n -q -t 20 -T 1 2>&1",
        )?;
        guest.shell(&format!("ping -c 1 -W 20 {HOST}"))?;
        Ok(Bench {
            guest,
            daemon,
            port,
        })
    }

    fn line(&self, way: Way, what: &str, count: usize) -> String {
        let (run, host) = match way {
            Way::Run => ("ringdown-agent run -- ", "server.test"),
            Way::Network => ("", HOST),
        };
        format!(
            "{run}python3 /tmp/price.py {what} {host} {} {count}",
            self.port
        )
    }

    /// Everything once, so that what is compared was measured within a minute of each other.
    fn round(&self, arguments: &TransparentPriceArguments, report: &mut Report) -> Result<()> {
        for (what, word, count) in [
            (What::In, "in", arguments.mib << 20),
            (What::Out, "out", arguments.mib << 20),
            (What::Connect, "connect", arguments.connections),
        ] {
            for way in [Way::Run, Way::Network] {
                let spec = CommandSpec::new(self.line(way, word, count)).deadline(DEADLINE);
                let output = self.guest.run_spec(spec)?;
                report.add(what, way, figure(&output)?);
            }
        }
        for way in [Way::Run, Way::Network] {
            self.hold(way, arguments.held, report)?;
        }
        Ok(())
    }

    /// What connections that do nothing need, in the guest and in the daemon.
    fn hold(&self, way: Way, count: usize, report: &mut Report) -> Result<()> {
        let before = self.daemon.own_bytes()?;
        let spec = CommandSpec::new(self.line(way, "hold", count)).deadline(DEADLINE);
        let running = self.guest.start_spec(spec)?;
        let until = Instant::now() + DEADLINE;
        while self.guest.run("[ -e /tmp/held ]")?.code != 0 {
            ensure!(
                Instant::now() < until && !running.has_ended(),
                "the connections were not opened"
            );
            thread::sleep(Duration::from_millis(100));
        }
        let each = self.daemon.own_bytes()?.saturating_sub(before) as f64 / count as f64;
        self.guest.shell("rm /tmp/held")?;
        let output = running.wait()?;
        report.add(What::GuestMemory, way, figure(&output)?);
        report.add(What::DaemonMemory, way, each);
        Ok(())
    }
}

fn figure(output: &e2e::Output) -> Result<f64> {
    let text = output.text();
    text.trim()
        .parse()
        .with_context(|| format!("it printed {text:?} and {}", output.error_text()))
}
