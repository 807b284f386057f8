//! Two guests on one daemon, and a test program between them.

use std::cell::Cell;
use std::fmt::{self, Display, Formatter};
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use clap::ValueEnum;
use e2e::control::Running;
use e2e::{CommandSpec, Daemon, DaemonSpec, Guest, GuestSpec, LOG_TAIL_LINES};

use super::outcome::{self, Case, Traffic, Verdict};
use super::programs::Built;
use super::{Program, Suite};
use crate::progress::Progress;

/// Context identifiers of the guests.
const CIDS: [u64; 2] = [3, 4];

/// Their names.
const NAMES: [&str; 2] = ["a", "b"];

/// The first TCP port of the connection that keeps both ends in step. Every start uses the next: a server of 6.1 cannot listen where an
/// earlier connection lingers.
const FIRST_CONTROL_PORT: u32 = 4000;

/// Packets of the control connection wait for the next multiple of this time at either end, in microseconds. Some cases take a line over
/// TCP as proof that a packet which was sent before over vsock has arrived: "double bind connect" binds to a port again when
/// the server's line says that it may, and fails if the server's reset is still on its way. On a busy machine it can be.
const CONTROL_DELAY_US: u32 = 10_000;

/// How long neither end may say anything before both are ended, in seconds. The programs' own patience is 10 s for each step.
const STALL_LIMIT_S: u64 = 60;

/// How long one start of a program may take, in seconds.
const RUN_LIMIT_S: u64 = 900;

/// How long the daemon may take to forget the last circuits, in seconds. A guest that gets no answer to its close gives up after 8.
const RELEASE_LIMIT_S: u64 = 30;

/// What the daemon counts and two stock kernels never give reason to.
const FAULT_COUNTERS: &[&str] = &[
    "spoofed_packets",
    "malformed_packets",
    "resets_dropped",
    "ended_credit_violation",
    "ended_line_down",
    "ended_memory_fault",
    "ended_message_too_long",
    "ended_ports_in_use",
    "ended_protocol_violation",
    "ended_timed_out",
];

/// How often the outputs are polled.
const LOOK_INTERVAL: Duration = Duration::from_millis(500);

/// The virtio number of a vsock device (virtio 1.2, section 5), as sysfs shows it.
const VSOCK_DEVICE: &str = "0x0013";

/// The bit of VIRTIO_VSOCK_F_SEQPACKET (virtio 1.2, section 5.10.3).
const SEQPACKET_BIT: usize = 1;

/// Which guest is the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Direction {
    /// The client is on a, the server on b.
    A,
    /// The client is on b, the server on a.
    B,
}

impl Direction {
    /// The client's position, and the server's.
    fn ends(self) -> (usize, usize) {
        match self {
            Direction::A => (0, 1),
            Direction::B => (1, 0),
        }
    }
}

impl Display for Direction {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        let (client, server) = self.ends();
        write!(
            formatter,
            "client on {}, server on {}",
            NAMES[client], NAMES[server]
        )
    }
}

/// The daemon and its guests.
pub struct Pair {
    guests: Vec<Guest>,
    daemon: Daemon,
    next_control_port: Cell<u32>,
    /// How much of the daemon's log has been shown, in bytes.
    shown_log: Cell<usize>,
}

/// What one start of a program left.
struct Attempt {
    /// By end: the client's, the server's.
    texts: [String; 2],
    /// Exit codes; none for an end that had to be killed.
    codes: [Option<i32>; 2],
}

impl Pair {
    /// Boots two guests that have the programs, with a network of their own.
    pub fn boot(suite: &Suite, built: &Built) -> Result<Pair> {
        let mut spec = DaemonSpec::new().arguments(&["--allow", "from=*,to=*,port=*"]);
        for (name, cid) in NAMES.iter().zip(CIDS) {
            spec = spec.vm(name, cid);
        }
        let daemon = Daemon::start(spec)?;
        let wires = e2e::spawn::scratch_directory()?;
        let wire = |index: usize| wires.join(NAMES[index]).display().to_string();
        let specs = (0..NAMES.len())
            .map(|index| {
                let network = network_arguments(index, &wire(index), &wire(1 - index));
                let network: Vec<&str> = network.iter().map(String::as_str).collect();
                // No agent: the tests count the sockets of the guest.
                GuestSpec::new(NAMES[index], suite.kernel)
                    .without_agent()
                    .attached(&daemon)
                    .qemu(&network)
            })
            .collect();
        let guests = Guest::boot_all(specs)?;
        let pair = Pair {
            guests,
            daemon,
            next_control_port: Cell::new(FIRST_CONTROL_PORT),
            shown_log: Cell::new(0),
        };
        for (index, guest) in pair.guests.iter().enumerate() {
            prepare(guest, index)?;
            for program in suite.programs {
                let content = fs::read(built.directory.join(program.name))?;
                guest.write_file(&format!("/tmp/{}", program.name), content, 0o755)?;
            }
        }
        // The first packets on a new network may be lost; the tests wait for none.
        pair.guests[0].wait_until(
            &format!("ping -c 1 -W 1 {}", address(1)),
            Duration::from_secs(30),
        )?;
        Ok(pair)
    }

    /// What `uname -r` says in the guests.
    pub fn release(&self) -> Result<String> {
        self.guests[0].shell("uname -r")
    }

    /// Lines of the guests' kernel logs that report a fault.
    pub fn kernel_complaints(&self) -> Result<Vec<String>> {
        let mut complaints = Vec::new();
        for guest in &self.guests {
            let found = guest
                .shell("dmesg | grep -E 'WARNING:|BUG:|Oops|Call Trace|blocked for' || true")?;
            complaints.extend(
                found
                    .lines()
                    .map(|line| format!("{}: {line}", guest.name())),
            );
        }
        Ok(complaints)
    }

    /// What the daemon has carried, once no circuit is left or it is clear that some will stay.
    pub fn traffic(&self) -> Result<Traffic> {
        let until = Instant::now() + Duration::from_secs(RELEASE_LIMIT_S);
        loop {
            let traffic = self.traffic_now()?;
            if traffic.circuits_left == 0 || Instant::now() > until {
                return Ok(traffic);
            }
            thread::sleep(LOOK_INTERVAL);
        }
    }

    fn traffic_now(&self) -> Result<Traffic> {
        let output = self.daemon.run(&["vm", "ls", "--json"])?;
        let said: serde_json::Value =
            serde_json::from_slice(&output.stdout).with_context(|| {
                format!(
                    "`ringdown vm ls --json` failed: {}",
                    String::from_utf8_lossy(&output.stderr)
                )
            })?;
        let vms = said["vms"].as_array().context("the daemon lists no VMs")?;
        let sum = |pick: &dyn Fn(&serde_json::Value) -> Option<u64>, what: &str| {
            vms.iter()
                .map(|vm| pick(vm).ok_or_else(|| anyhow!("the daemon does not count {what}")))
                .sum::<Result<u64>>()
        };
        let counter = |name: &str| sum(&|vm| vm["counters"][name].as_u64(), name);
        let mut faults = Vec::new();
        for name in FAULT_COUNTERS {
            let count = counter(name)?;
            if count > 0 {
                faults.push(((*name).to_owned(), count));
            }
        }
        Ok(Traffic {
            circuit_ends: counter("circuits_opened")?,
            bytes: counter("bytes_from_guest")?,
            circuits_left: sum(&|vm| vm["circuits"].as_u64(), "circuits")?,
            faults,
        })
    }

    /// Runs every case of a program.
    pub fn run(
        &self,
        program: &Program,
        direction: Direction,
        progress: &Progress,
    ) -> Result<Vec<Case>> {
        let mut judged: Vec<Case> = Vec::new();
        loop {
            let done: Vec<usize> = judged.iter().map(|case| case.number).collect();
            let attempt = self.start(program, direction, &done, progress)?;
            let [client, server] = [0, 1].map(|end| outcome::parse(&attempt.texts[end]));
            let found = outcome::judge(&client, &server, &done);
            let failed = found
                .iter()
                .any(|case| matches!(case.verdict, Verdict::Failed(_)));
            let came_far = !found.is_empty();
            judged.extend(found);
            let ended_well = attempt.codes == [Some(0), Some(0)];
            if !ended_well {
                self.show(&attempt);
            }
            if !failed && !ended_well {
                // All cases are fine and yet the program is not: that has to be seen.
                judged.push(Case {
                    number: judged.len(),
                    name: "end of the program".to_owned(),
                    verdict: Verdict::Failed(attempt.end()),
                });
            }
            if !failed || !came_far || !program.can_skip {
                judged.sort_by_key(|case| case.number);
                return Ok(judged);
            }
        }
    }

    fn start(
        &self,
        program: &Program,
        direction: Direction,
        done: &[usize],
        progress: &Progress,
    ) -> Result<Attempt> {
        let port = self.next_control_port.get();
        self.next_control_port.set(port + 1);
        let ends = direction.ends();
        let skips: String = done
            .iter()
            .map(|number| format!(" --skip={number}"))
            .collect();
        let line = |own: usize, other: usize, mode: &str| {
            format!(
                "exec /tmp/{} --mode={mode} --control-port={port} --peer-cid={}{skips} \
                 {} > /tmp/{mode}.out 2>&1",
                program.name,
                CIDS[other],
                if mode == "client" {
                    format!("--control-host={}", address(other))
                } else {
                    format!("--control-host={}", address(own))
                },
            )
        };
        let limit = Duration::from_secs(RUN_LIMIT_S);
        let start = |own: usize, other: usize, mode: &str| {
            self.guests[own].shell(&format!("rm -f /tmp/{mode}.out"))?;
            self.guests[own].start_spec(CommandSpec::new(line(own, other, mode)).deadline(limit))
        };
        let server = start(ends.1, ends.0, "server")?;
        self.guests[ends.1]
            .wait_until(
                "grep -q 'Control socket listening' /tmp/server.out",
                Duration::from_secs(30),
            )
            .context("the server did not start")?;
        let client = start(ends.0, ends.1, "client")?;
        let guests = [&self.guests[ends.0], &self.guests[ends.1]];
        let texts = watch(guests, [&client, &server], progress)?;
        let codes = [client, server].map(|end| end.wait().ok().map(|output| output.code));
        Ok(Attempt {
            texts,
            codes: codes.map(|code| code.filter(|code| *code != 137)),
        })
    }

    /// Shows what both ends said in an attempt that ended badly, and what the daemon has logged since the last one.
    fn show(&self, attempt: &Attempt) {
        for (end, text) in ["client", "server"].iter().zip(&attempt.texts) {
            let said: Vec<&str> = text
                .lines()
                .filter(|line| !line.ends_with("...skipped"))
                .collect();
            eprintln!("--- {end} ---\n{}", said.join("\n"));
        }
        let log = self.daemon.log_text();
        let new = log.get(self.shown_log.get()..).unwrap_or_default();
        let lines: Vec<&str> = new.lines().collect();
        let tail = &lines[lines.len().saturating_sub(LOG_TAIL_LINES)..];
        eprintln!("--- daemon ---\n{}\n---", tail.join("\n"));
        self.shown_log.set(log.len());
    }
}

impl Attempt {
    fn end(&self) -> String {
        let code = |code: Option<i32>| {
            code.map_or("was killed".to_owned(), |code| format!("ended with {code}"))
        };
        format!(
            "the client {}, the server {}",
            code(self.codes[0]),
            code(self.codes[1])
        )
    }
}

/// The network card of a guest, whose packets go from the socket `own` to the socket `other`.
fn network_arguments(index: usize, own: &str, other: &str) -> [String; 6] {
    [
        "-netdev".to_owned(),
        format!(
            "dgram,id=net0,local.type=unix,local.path={own},remote.type=unix,remote.path={other}"
        ),
        "-device".to_owned(),
        format!(
            "virtio-net-pci,netdev=net0,mac=52:54:00:00:00:0{}",
            CIDS[index]
        ),
        "-object".to_owned(),
        format!("filter-buffer,id=delay0,netdev=net0,interval={CONTROL_DELAY_US}"),
    ]
}

/// The network address of a guest.
fn address(index: usize) -> String {
    format!("10.77.0.{}", CIDS[index])
}

/// Makes a guest ready: its network, and what the tests need of the kernel.
fn prepare(guest: &Guest, index: usize) -> Result<()> {
    guest.shell("modprobe virtio_net && modprobe vsock_diag")?;
    // The card appears a moment after its driver.
    guest.wait_until("[ -e /sys/class/net/eth0 ]", Duration::from_secs(30))?;
    guest.shell(&format!(
        "ip addr add {}/24 dev eth0 && ip link set eth0 up",
        address(index)
    ))?;
    let features = guest.shell(&format!(
        "for device in /sys/bus/virtio/devices/*; do \
         [ $(cat $device/device) = {VSOCK_DEVICE} ] && cat $device/features; done; true"
    ))?;
    ensure!(
        features.as_bytes().get(SEQPACKET_BIT) == Some(&b'1'),
        "guest {}: its vsock device has no VIRTIO_VSOCK_F_SEQPACKET (its features, bit 0 first: {features:?}): \
         it needs QEMU 6.2 or later and a daemon that offers it",
        guest.name()
    );
    Ok(())
}

/// Waits until both ends have ended, reports the cases meanwhile, and ends programs that print nothing any more.
fn watch(guests: [&Guest; 2], ends: [&Running; 2], progress: &Progress) -> Result<[String; 2]> {
    let stall_limit = Duration::from_secs(STALL_LIMIT_S);
    let started = Instant::now();
    let mut heard_at = started;
    let mut texts = [String::new(), String::new()];
    let mut told = 0;
    loop {
        let ended = ends.map(Running::has_ended) == [true, true];
        let now = [
            guests[0].shell("cat /tmp/client.out 2>/dev/null || true")?,
            guests[1].shell("cat /tmp/server.out 2>/dev/null || true")?,
        ];
        if now != texts {
            heard_at = Instant::now();
            texts = now;
        }
        let cases = outcome::parse(&texts[0]);
        for case in cases.iter().skip(told) {
            progress.note(format!("{} - {}", case.number, case.name));
        }
        told = told.max(cases.len());
        if ended {
            return Ok(texts);
        }
        if heard_at.elapsed() > stall_limit || started.elapsed() > Duration::from_secs(RUN_LIMIT_S)
        {
            progress.note("no more output: it is ended");
            ends.iter().for_each(|end| end.kill());
            heard_at = Instant::now();
        }
        thread::sleep(LOOK_INTERVAL);
    }
}
