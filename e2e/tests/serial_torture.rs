//! Files and a log over virtio-serial, while the line is cut and its ends are killed again and again.
//!
//! A guest without vsock writes numbered lines into a file, which `ringdown logs --follow` shows, and `ringdown cp` brings a file to the guest
//! and back, again and again. Meanwhile the connection between QEMU and the daemon is cut inside of frames, the daemon is killed and started
//! again, and at last the agent is killed, which the guest's init starts again. In the end both files are the same and each line is there once.
//!
//! `make serial-torture` runs the full form. A seed is printed; `RINGDOWN_TORTURE_SEED` sets it, so that kinds and paces are the same again.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

#[path = "serial_torture/proxy.rs"]
mod proxy;
#[path = "serial_torture/random.rs"]
mod random;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus};
use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use e2e::pattern::Pattern;
use e2e::{
    CommandSpec, Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Meeting, Running, is_full, log_tail,
    spawn,
};
use serde_json::Value;

use proxy::Proxy;
use random::Random;

const MIB: u64 = 1024 * 1024;

/// The VM.
const VM: &str = "attic";

/// How long anything that must happen may take when nothing is struck any more.
const PATIENCE: Duration = Duration::from_secs(300);

/// A strike that waits for bytes to pass comes after this time at the latest: the connection may have to wait for something itself.
const LONGEST_PACE: Duration = Duration::from_secs(5);

/// One of so many strikes comes soon after the last one, into the middle of the recovery from it.
const SOON: u64 = 4;

/// How soon, at most.
const SOON_MS: u64 = 400;

/// How many bytes a copy moves before a party is killed: a command that cannot begin fails at once, as it should.
const BEGUN_BYTES: u64 = MIB / 4;

/// Writes numbered lines until it is stopped, and then prints how many there are. Now and then the file gets another name and a new one is begun, as
/// logrotate does.
const WRITER: &str = r#"
    i=1
    while [ ! -e /tmp/enough ]; do
        j=0; while [ $j -lt 25 ]; do echo "line $i"; i=$((i + 1)); j=$((j + 1)); done >> /tmp/torture.log
        [ $((i % 5000)) = 1 ] && mv /tmp/torture.log /tmp/torture.log.1
        usleep 100000
    done
    echo $i"#;

/// Only one at a time: they need the machine for themselves.
static ALONE: Mutex<()> = Mutex::new(());

/// What is struck.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Strike {
    /// The connection between QEMU and the daemon is cut.
    Cut,
    /// The daemon is killed and started again.
    Daemon,
    /// The agent is killed; the guest's init starts it again.
    Agent,
}

/// How much of everything.
#[derive(Debug, Clone, Copy)]
struct Size {
    /// The length of the file, in bytes.
    file_bytes: u64,
    /// How often the host's side is struck.
    host_strikes: u64,
    /// How often the agent is killed.
    agent_strikes: u64,
    /// How long all of it may take once the guest is up.
    deadline: Duration,
}

#[test]
fn qemu_listens() {
    let size = if is_full() {
        size(256, 200, 200, 3600)
    } else {
        size(16, 12, 4, 600)
    };
    torture(Kernel::V6_12, Meeting::QemuListens, size);
}

#[test]
fn qemu_connects() {
    // QEMU takes a second to come back each time.
    let size = if is_full() {
        size(64, 60, 30, 3600)
    } else {
        size(8, 4, 1, 600)
    };
    torture(Kernel::V6_1, Meeting::QemuConnects, size);
}

fn size(file_mib: u64, host_strikes: u64, agent_strikes: u64, deadline_s: u64) -> Size {
    Size {
        file_bytes: file_mib * MIB,
        host_strikes,
        agent_strikes,
        deadline: Duration::from_secs(deadline_s),
    }
}

fn torture(kernel: Kernel, meeting: Meeting, size: Size) {
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let seed = std::env::var("RINGDOWN_TORTURE_SEED").map_or_else(
        |_| {
            let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap();
            now.as_millis() as u64 % 1_000_000
        },
        |text| text.parse().unwrap(),
    );
    eprintln!("{kernel}, {meeting:?}: RINGDOWN_TORTURE_SEED={seed}");
    let mut torture = Torture::start(kernel, meeting, size, Random::new(seed));
    let mut log = Log::follow(&torture);
    torture.strike_while_copying(
        &[Strike::Cut, Strike::Cut, Strike::Daemon],
        size.host_strikes,
    );
    torture.strike_while_copying(&[Strike::Agent], size.agent_strikes);
    log.end(&torture);
    torture.tell(&log);
}

/// The guest, the line to it, and what has been done to them.
struct Torture {
    size: Size,
    meeting: Meeting,
    random: Random,
    /// The file that is copied, and its SHA-256.
    file: PathBuf,
    digest: String,
    // In this order: the guest ends before what it is connected to.
    guest: Guest,
    proxy: Proxy,
    daemon: Daemon,
    started: Instant,
    strikes: BTreeMap<Strike, u64>,
    copies: u64,
    resumed: u64,
    copied_in: Duration,
    /// Sums of the counters of the serial line of all daemons that there were.
    counters: BTreeMap<String, u64>,
}

impl Torture {
    fn start(kernel: Kernel, meeting: Meeting, size: Size, mut random: Random) -> Torture {
        let directory = spawn::scratch_directory().unwrap();
        let file = directory.join("file");
        write_pattern(&file, random.below(1000), size.file_bytes);
        let digest = digest(&file);
        let daemon = start_daemon(&directory, meeting);
        let chardev = directory.join("chardev");
        let (near, far) = match meeting {
            Meeting::QemuListens => (daemon.serial_socket(VM), chardev.clone()),
            Meeting::QemuConnects => (chardev.clone(), daemon.serial_socket(VM)),
        };
        let proxy = Proxy::start(&near, far, random.fork());
        // A file that has arrived, one that is arriving, and as much again as the guest's memory file system must leave free.
        let memory_mib = 256 + 3 * u32::try_from(size.file_bytes / MIB).unwrap();
        let spec = GuestSpec::new(VM, kernel)
            .memory_mib(memory_mib)
            .attached(&daemon)
            .redirected(&daemon.serial_socket(VM), &chardev);
        Torture {
            size,
            meeting,
            random,
            file,
            digest,
            guest: Guest::boot(spec).unwrap(),
            proxy: proxy.unwrap(),
            daemon,
            started: Instant::now(),
            strikes: BTreeMap::new(),
            copies: 0,
            resumed: 0,
            copied_in: Duration::ZERO,
            counters: BTreeMap::new(),
        }
    }

    /// Copies the file there and back until it has struck `count` times, with these in any order and then again.
    fn strike_while_copying(&mut self, kinds: &[Strike], count: u64) {
        // Strikes that come soon need few bytes, the others twice the half of this on average: so one copy each way is about enough.
        let bytes_between = 2 * self.size.file_bytes / count;
        let mut struck = 0;
        let mut ahead = kinds.to_vec();
        let mut kind = self.random.take_from(&mut ahead);
        let mut copy = Copy::to_guest(self);
        let mut pace = Pace::draw(self, bytes_between);
        loop {
            if let Some(status) = copy.child.try_wait().unwrap() {
                self.finish(copy, status);
                if struck == count && self.copies % 2 == 0 {
                    break;
                }
                copy = if self.copies % 2 == 0 {
                    Copy::to_guest(self)
                } else {
                    Copy::from_guest(self)
                };
            }
            if struck < count && pace.is_over(self) {
                let has_begun = self.proxy.passed_bytes() > copy.begun_at + BEGUN_BYTES;
                if kind == Strike::Cut || has_begun {
                    self.strike(kind);
                    struck += 1;
                    self.show(struck, count);
                    if ahead.is_empty() {
                        ahead = kinds.to_vec();
                    }
                    kind = self.random.take_from(&mut ahead);
                    pace = Pace::draw(self, bytes_between);
                }
            }
            assert!(
                self.started.elapsed() < self.size.deadline,
                "it takes too long: {struck} of {count} strikes, {} copies",
                self.copies
            );
            thread::sleep(Duration::from_millis(2));
        }
    }

    fn strike(&mut self, kind: Strike) {
        match kind {
            Strike::Cut => self.proxy.cut(),
            Strike::Daemon => {
                self.add_counters();
                self.daemon.kill().unwrap();
                let directory = self.daemon.runtime_directory().to_path_buf();
                self.daemon = start_daemon(&directory, self.meeting);
            }
            Strike::Agent => self
                .guest
                .wait_until("killall -9 ringdown-agent 2>/dev/null", PATIENCE)
                .unwrap(),
        }
        *self.strikes.entry(kind).or_default() += 1;
    }

    /// A copy has ended: it must have succeeded, and be the same.
    fn finish(&mut self, copy: Copy, status: ExitStatus) {
        let said = fs::read_to_string(&copy.output).unwrap();
        let errors = log_tail(&copy.errors, 20);
        assert!(status.success(), "cp ends with {status}: {said}{errors}");
        let report: Value = serde_json::from_str(&said).unwrap();
        let report = &report["summary"];
        assert_eq!(report["complete"], true, "{said}");
        self.resumed += report["resumed"].as_u64().unwrap();
        self.copied_in += copy.started.elapsed();
        let found = match &copy.arrives_at {
            Some(path) => {
                let found = digest(path);
                fs::remove_file(path).unwrap();
                self.guest.shell("rm /tmp/there").unwrap();
                found
            }
            None => {
                let spec = CommandSpec::new("sha256sum /tmp/there").deadline(PATIENCE);
                let output = self.guest.run_spec(spec).unwrap();
                first_word(&output.text())
            }
        };
        assert_eq!(found, self.digest, "the copy differs: {said}");
        self.copies += 1;
    }

    /// Adds what the daemon has counted on the serial line. Another daemon begins at zero.
    fn add_counters(&mut self) {
        let output = self.daemon.run(&["vm", "ls", "--json"]).unwrap();
        let list: Value = serde_json::from_slice(&output.stdout).unwrap();
        let counters = list["vms"][0]["counters"].as_object().unwrap();
        for (name, value) in counters {
            if let Some(name) = name.strip_prefix("serial_") {
                *self.counters.entry(name.to_owned()).or_default() += value.as_u64().unwrap();
            }
        }
    }

    /// Progress, as it takes minutes.
    fn show(&self, struck: u64, count: u64) {
        if is_full() && (struck % 10 == 0 || struck == count) {
            let elapsed = self.started.elapsed().as_secs();
            let passed = self.proxy.passed_bytes() / MIB;
            eprintln!(
                "[torture] {elapsed} s: {struck} of {count} strikes, {} copies, {passed} MiB carried",
                self.copies
            );
        }
    }

    fn tell(&mut self, log: &Log) {
        self.add_counters();
        let figures = self.proxy.figures();
        let count = |number: &std::sync::atomic::AtomicU64| number.load(Ordering::Relaxed);
        eprintln!(
            "[torture] {:.1} s; strikes {:?}; {} copies of {} MiB in {:.1} s, gone on {} times; {} lines, gone on {} times; \
             {} connections, {} bytes, {} dropped by the proxy alone; the daemons' side of the line: {:?}",
            self.started.elapsed().as_secs_f32(),
            self.strikes,
            self.copies,
            self.size.file_bytes / MIB,
            self.copied_in.as_secs_f32(),
            self.resumed,
            log.lines,
            log.resumed(),
            count(&figures.connections),
            self.proxy.passed_bytes(),
            count(&figures.dropped_bytes),
            self.counters
        );
    }
}

/// When to strike next.
#[derive(Debug)]
enum Pace {
    /// At this time.
    At(Instant),
    /// When so many bytes have passed, or at this time.
    Passed(u64, Instant),
}

impl Pace {
    fn draw(torture: &mut Torture, bytes_between: u64) -> Pace {
        let now = Instant::now();
        if torture.random.below(SOON) == 0 {
            let wait = Duration::from_millis(torture.random.below(SOON_MS));
            return Pace::At(now + wait);
        }
        let bytes = torture.random.below(2 * bytes_between);
        Pace::Passed(torture.proxy.passed_bytes() + bytes, now + LONGEST_PACE)
    }

    /// A line that is down already has nothing to be cut.
    fn is_over(&self, torture: &Torture) -> bool {
        let now = Instant::now();
        torture.proxy.is_connected()
            && match self {
                Pace::At(at) => now >= *at,
                Pace::Passed(bytes, at) => torture.proxy.passed_bytes() >= *bytes || now >= *at,
            }
    }
}

/// A `ringdown cp` under way. It is killed when dropped.
struct Copy {
    child: Child,
    output: PathBuf,
    errors: PathBuf,
    /// Where it writes to, if that is on the host.
    arrives_at: Option<PathBuf>,
    /// What the proxy had carried when it began.
    begun_at: u64,
    started: Instant,
}

impl Copy {
    fn to_guest(torture: &Torture) -> Copy {
        let here = torture.file.display().to_string();
        Copy::start(torture, &here, &format!("{VM}:/tmp/there"), None)
    }

    fn from_guest(torture: &Torture) -> Copy {
        let path = torture.file.with_extension("back");
        let back = path.display().to_string();
        Copy::start(torture, &format!("{VM}:/tmp/there"), &back, Some(path))
    }

    fn start(torture: &Torture, from: &str, to: &str, arrives_at: Option<PathBuf>) -> Copy {
        let directory = spawn::scratch_directory().unwrap();
        let (output, errors) = (directory.join("output"), directory.join("errors"));
        let words = ["cp", "--json", "--wait", "120", from, to];
        let mut command = torture.daemon.command(&words).unwrap();
        Copy {
            child: start_into(&mut command, &output, &errors),
            output,
            errors,
            arrives_at,
            begun_at: torture.proxy.passed_bytes(),
            started: Instant::now(),
        }
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A file of the guest that grows, and what `ringdown logs --follow` shows of it.
struct Log {
    child: Child,
    output: PathBuf,
    errors: PathBuf,
    writer: Option<Running>,
    lines: usize,
}

impl Log {
    fn follow(torture: &Torture) -> Log {
        let directory = spawn::scratch_directory().unwrap();
        let (output, errors) = (directory.join("output"), directory.join("errors"));
        torture
            .guest
            .shell("echo line 0 > /tmp/torture.log")
            .unwrap();
        let words = ["logs", "--wait", "120", "--follow", VM, "/tmp/torture.log"];
        let mut command = torture.daemon.command(&words).unwrap();
        let child = start_into(&mut command, &output, &errors);
        let mut log = Log {
            child,
            output,
            errors,
            writer: None,
            lines: 1,
        };
        log.wait_for("line 0\n");
        let spec = CommandSpec::new(WRITER).deadline(torture.size.deadline + PATIENCE);
        log.writer = Some(torture.guest.start_spec(spec).unwrap());
        log
    }

    /// Has the last line written, and sees that each has come once, in its turn.
    fn end(&mut self, torture: &Torture) {
        torture.guest.shell("touch /tmp/enough").unwrap();
        let written = self.writer.take().unwrap().wait().unwrap();
        self.lines = written.text().parse().unwrap();
        self.wait_for(&format!("line {}\n", self.lines - 1));
        let text = fs::read_to_string(&self.output).unwrap();
        for (number, line) in text.lines().enumerate() {
            assert_eq!(
                line,
                format!("line {number}"),
                "a line is lost, doubled or broken"
            );
        }
        assert_eq!(text.lines().count(), self.lines);
    }

    /// How often it has reported that the connection is back.
    fn resumed(&self) -> usize {
        let errors = fs::read_to_string(&self.errors).unwrap();
        errors.matches("reconnected to the guest").count()
    }

    fn wait_for(&mut self, text: &str) {
        let until = Instant::now() + PATIENCE;
        while !fs::read_to_string(&self.output).unwrap().ends_with(text) {
            let errors = log_tail(&self.errors, 20);
            let shown = log_tail(&self.output, 1);
            assert!(
                self.child.try_wait().unwrap().is_none(),
                "it has ended: {errors}"
            );
            assert!(
                Instant::now() < until,
                "{text:?} does not come, after {shown:?}: {errors}"
            );
            thread::sleep(Duration::from_millis(50));
        }
    }
}

impl Drop for Log {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn start_daemon(directory: &Path, meeting: Meeting) -> Daemon {
    let mut spec = DaemonSpec::new().serial_vm(VM, meeting);
    spec.runtime_directory = Some(directory.to_path_buf());
    Daemon::start(spec).unwrap()
}

fn start_into(command: &mut Command, output: &Path, errors: &Path) -> Child {
    command
        .stdout(File::create(output).unwrap())
        .stderr(File::create(errors).unwrap())
        .spawn()
        .unwrap()
}

fn write_pattern(path: &Path, seed: u64, total: u64) {
    let mut file = File::create(path).unwrap();
    let mut pattern = Pattern::new(seed);
    for _ in 0..total / MIB {
        file.write_all(&pattern.take(MIB as usize)).unwrap();
    }
    // Not a multiple of anything.
    file.write_all(&pattern.take(12_345)).unwrap();
}

/// The SHA-256 of a file, by a program that is as fast in a test as elsewhere.
fn digest(path: &Path) -> String {
    let output = Command::new("sha256sum").arg(path).output().unwrap();
    assert!(output.status.success());
    first_word(&String::from_utf8(output.stdout).unwrap())
}

fn first_word(text: &str) -> String {
    text.split_whitespace().next().unwrap_or("").to_owned()
}
