//! Linux's bridge with a tap for each port, as a VMM without vhost drives it: one system call for each frame.
//!
//! The bridge has no thread of its own: it works in the system calls of the senders. So its ports are shared out to both processors, which is more
//! than the others get, and what it costs is this process's time in the kernel. It lives in a network namespace of its own, with a process in it that
//! is this program again, and is gone when that ends.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rustix::param::clock_ticks_per_second;
use sys::ethernet::open_tap;

use super::case::Case;
use super::examiner::{Examiner, SAMPLE};
use super::frame::{Address, NET_HEADER_LEN, frame};
use super::generator::{Card, Span, poll};
use super::meters::Meters;
use crate::perf::measure::{Conditions, Failed};
use crate::perf::process::mortal;
use crate::perf::processor::{Placement, pin, pin_to};

/// Frames sent, and frames taken, in one turn at most.
const BURST: usize = 32;
const MOST_TAKEN: usize = 256;

/// As many frames are made beforehand.
const SLOTS: u16 = 256;

/// The longest frame that a tap may give, its header included.
const MOST_LEN: usize = (64 << 10) + 256;

/// Why a bridge cannot be made here, if so.
pub fn obstacle() -> Option<String> {
    let mut command = Command::new("unshare");
    let tried = command.args(["--net", "ip", "link", "add", "lan", "type", "bridge"]);
    match tried.stderr(Stdio::piped()).output() {
        Err(error) => Some(format!("unshare: {error}")),
        Ok(output) if !output.status.success() => {
            Some(String::from_utf8_lossy(&output.stderr).trim().to_owned())
        }
        Ok(_) if !Path::new("/dev/net/tun").exists() => Some("there is no /dev/net/tun".to_owned()),
        Ok(_) => None,
    }
}

/// Measures it, in another process.
///
/// # Errors
/// As that has them.
pub fn measure(program: &Path, case: &Case, conditions: &Conditions) -> Result<Span, Failed> {
    let mut command = mortal(Path::new("unshare"));
    command.args(["--net", "--"]).arg(program);
    command.args(["net", "bridge", "--case", &case.to_string()]);
    for (name, duration) in [
        ("--warm-up-ms", conditions.warm_up),
        ("--window-ms", conditions.window),
        ("--patience-ms", conditions.patience),
    ] {
        command.args([name, &duration.as_millis().to_string()]);
    }
    let Placement { generator, subject } = conditions.placement;
    let words =
        |error: io::Error| Failed::Error(format!("starting {}: {error}", program.display()));
    pin_to(&[generator, subject]).map_err(|error| words(error.into()))?;
    let output = command.output();
    pin(generator).map_err(|error| words(error.into()))?;
    let output = output.map_err(words)?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(Failed::Error(said));
    }
    serde_json::from_slice(&output.stdout).map_err(|error| Failed::Error(error.to_string()))
}

/// Is that other process, inside of the namespace.
pub fn drive(case: &Case, conditions: &Conditions) -> Result<Span, String> {
    ip("link add lan type bridge")?;
    let mut halves: [Vec<Tap>; 2] = Default::default();
    for port in 0..case.ports {
        halves[port % 2].push(Tap::open(case, port)?);
    }
    ip("link set lan up")?;
    let before = kernel_time();
    let Placement { generator, subject } = conditions.placement;
    let results = std::thread::scope(|scope| {
        let threads = halves
            .iter_mut()
            .zip([generator, subject])
            .map(|(taps, cpu)| {
                scope.spawn(move || {
                    pin(cpu).map_err(|error| Failed::Error(error.to_string()))?;
                    poll(taps, conditions, None)
                })
            });
        // All of them are to run before the first is waited for.
        let threads: Vec<_> = threads.collect();
        let joined = threads.into_iter().map(|thread| thread.join());
        joined.collect::<Vec<_>>()
    });
    let kernel = kernel_time() - before;
    let mut whole = Span::default();
    for result in results {
        let result = result.unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        let half = result.map_err(|failed| match failed {
            Failed::Hangs(reason) | Failed::Error(reason) => reason,
        })?;
        whole.meters = whole.meters + half.meters;
        whole.generator_s += half.generator_s / 2.0;
        whole.seconds = half.seconds.max(whole.seconds);
    }
    // The kernel's time is known of the whole only.
    let share =
        conditions.window.as_secs_f64() / (conditions.warm_up + conditions.window).as_secs_f64();
    whole.subject.time_ns = (kernel.as_nanos() as f64 * share) as u64;
    Ok(whole)
}

fn ip(arguments: &str) -> Result<(), String> {
    let output = Command::new("ip").args(arguments.split(' ')).output();
    let output = output.map_err(|error| format!("ip: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!(
            "ip {arguments}: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        )),
    }
}

/// How long this process has been in the kernel.
fn kernel_time() -> Duration {
    let stat = fs::read_to_string("/proc/self/stat").unwrap_or_default();
    // The name, in parentheses, may contain anything; the numbers begin behind it.
    let rest = stat.rsplit(')').next().unwrap_or_default();
    let ticks: u64 = rest
        .split_whitespace()
        .nth(12)
        .and_then(|text| text.parse().ok())
        .unwrap_or(0);
    Duration::from_millis(ticks * 1000 / clock_ticks_per_second())
}

/// One port's tap, and the VMM behind it.
struct Tap {
    file: File,
    case: Case,
    /// By slot, with their headers.
    frames: Vec<Vec<u8>>,
    examiner: Examiner,
    buffer: Vec<u8>,
    meters: Meters,
}

impl Tap {
    fn open(case: &Case, port: usize) -> Result<Tap, String> {
        let name = format!("port{port}");
        let tap = open_tap(&name).map_err(|error| format!("{name}: {error}"))?;
        let file = File::from(tap.descriptor);
        // The host itself has nothing to say on this network.
        let quiet = format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6");
        if Path::new(&quiet).exists() {
            fs::write(&quiet, "1").map_err(|error| format!("{quiet}: {error}"))?;
        }
        ip(&format!("link set {name} master lan up"))?;
        let (own, partner) = (Address::of(port), Address::of(port ^ 1));
        let frames = (0..SLOTS).map(|slot| {
            let mut bytes = case.kind.net_header().to_vec();
            bytes.extend(frame(case.kind, own, partner, case.flows, slot));
            bytes
        });
        Ok(Tap {
            file,
            case: *case,
            frames: frames.collect(),
            examiner: Examiner::new(case.kind, case.flows, own, partner, case.checked),
            buffer: vec![0; MOST_LEN],
            meters: Meters::default(),
        })
    }

    fn receive(&mut self) -> Result<bool, String> {
        for taken in 0..MOST_TAKEN {
            let len = match self.file.read(&mut self.buffer) {
                Ok(len) => len.wrapping_sub(NET_HEADER_LEN),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(taken > 0),
                Err(error) => return Err(format!("a tap: {error}")),
            };
            let (header, bytes) = self.buffer.split_at_mut(NET_HEADER_LEN);
            if len != self.case.kind.len() {
                let mut head = [0; 12];
                head.copy_from_slice(&bytes[..12]);
                self.meters.foreign += 1;
                self.examiner.examine_foreign(&head, len)?;
                continue;
            }
            self.meters.received += 1;
            self.meters.bytes += len as u64;
            if self.case.checked || self.meters.received % SAMPLE == 0 {
                let bytes = &mut bytes[..self.examiner.len()];
                self.examiner.examine(header, bytes)?;
            }
        }
        Ok(true)
    }

    fn send(&mut self) -> Result<bool, String> {
        let place = NET_HEADER_LEN + self.case.kind.number_place();
        for sent in 0..BURST {
            let number = self.meters.sent + 1;
            let slot = number as usize % self.frames.len();
            let bytes = &mut self.frames[slot];
            bytes[place..place + 8].copy_from_slice(&number.to_le_bytes());
            match self.file.write(bytes) {
                Ok(_) => self.meters.sent = number,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(sent > 0),
                Err(error) => return Err(format!("a tap: {error}")),
            }
        }
        Ok(true)
    }
}

impl Card for Tap {
    fn turn(&mut self) -> Result<bool, String> {
        let received = self.receive()?;
        Ok(self.send()? | received)
    }

    fn received(&self) -> u64 {
        self.meters.received
    }

    fn meters(&mut self) -> Meters {
        self.meters
    }
}
