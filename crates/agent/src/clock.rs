//! The guest's clock: what it says, who keeps it right, and setting it.

use std::path::Path;
use std::time::{Duration, Instant};

use rustix::time::{ClockId, Timespec};
use wire::agent::job::MAX_CLOCK_STEP_NS;

use crate::config::Config;
use crate::generation::Generation;
use crate::log::say;
use crate::session::Options;
use crate::tool::{Tool, find};

/// What systemd-timesyncd makes when it has set the clock by a server.
const TIMESYNC_MARK: &str = "/run/systemd/timesync/synchronized";

/// Programs that keep the clock right.
const KEEPERS: [&str; 5] = ["chronyd", "ntpd", "openntpd", "ntpd-rs", "ptp4l"];

/// How long `timedatectl` may take.
const TOOL_TIMEOUT: Duration = Duration::from_secs(3);

/// The most processes whose names are looked at.
const MAX_PROCESSES: usize = 65_536;

/// What the clock says, in nanoseconds since 1970.
pub(crate) fn unix_ns() -> i64 {
    let now = rustix::time::clock_gettime(ClockId::Realtime);
    now.tv_sec
        .saturating_mul(1_000_000_000)
        .saturating_add(i64::from(now.tv_nsec as u32))
}

/// Move the clock by so many nanoseconds.
///
/// # Errors
/// The agent may not, or the time is none that the kernel takes.
pub(crate) fn step(generation: &Generation, step_ns: i64) -> std::io::Result<()> {
    // Told before, so that the watcher cannot see the jump without knowing whose it is.
    generation.steps_clock();
    let ns = unix_ns().saturating_add(step_ns);
    let time = Timespec {
        tv_sec: ns.div_euclid(1_000_000_000),
        tv_nsec: ns.rem_euclid(1_000_000_000) as _,
    };
    Ok(rustix::time::clock_settime(ClockId::Realtime, time)?)
}

/// Who keeps the clock right in this guest, if somebody does.
pub(crate) fn kept_by(config: &Config) -> Option<String> {
    if Path::new(TIMESYNC_MARK).exists() {
        return Some("systemd-timesyncd".to_owned());
    }
    if let Some(keeper) = keeper_among_processes(Path::new("/proc")) {
        return Some(keeper);
    }
    // It tells what the kernel was told: that its clock is synchronised, by whomever.
    let program = find(&config.search_path, "timedatectl")?;
    let output = Tool::new(&program)
        .arguments(["show", "--property=NTPSynchronized", "--value"])
        .run(Instant::now() + TOOL_TIMEOUT);
    let is_kept =
        output.is_ok_and(|output| output.succeeded && output.stdout.trim_ascii() == b"yes");
    is_kept.then(|| "a time service".to_owned())
}

fn keeper_among_processes(proc: &Path) -> Option<String> {
    let processes = std::fs::read_dir(proc).ok()?.flatten().take(MAX_PROCESSES);
    let numbered = processes.filter(|entry| {
        let name = entry.file_name();
        name.as_encoded_bytes().iter().all(u8::is_ascii_digit)
    });
    numbered
        .filter_map(|entry| std::fs::read_to_string(entry.path().join("comm")).ok())
        .find_map(|name| {
            let keeper = KEEPERS.into_iter().find(|keeper| *keeper == name.trim())?;
            Some(keeper.to_owned())
        })
}

/// Set the clock by what the host said in its hello, unless the configuration or the guest's own time service stands against it. The
/// host said it at some time between `begun` and now.
pub(crate) fn follow(options: &Options, host_unix_ns: u64, begun: Instant) {
    let time = options.config.time;
    let Ok(host_ns) = i64::try_from(host_unix_ns) else {
        return;
    };
    if options.generation.clock_is_of_others() {
        return;
    }
    if !time.sync || host_ns == 0 || options.config.allow("time").is_err() {
        return;
    }
    let elapsed = begun.elapsed();
    let Some(step_ns) = needed_step(unix_ns(), host_ns, elapsed, time.threshold) else {
        return;
    };
    let off = Duration::from_nanos(step_ns.unsigned_abs());
    if let Some(keeper) = kept_by(&options.config) {
        say!("the clock is {off:.1?} off the host's; it is left alone because {keeper} keeps it");
        return;
    }
    match step(&options.generation, step_ns) {
        Ok(()) => say!("the clock was {off:.1?} off and is set by the host's"),
        Err(error) => say!("the clock is {off:.1?} off and cannot be set: {error}"),
    }
}

/// By how much to move the clock, if it is worth it: if it is off by more than the threshold whenever in that time the host said it.
fn needed_step(ours_ns: i64, host_ns: i64, elapsed: Duration, threshold: Duration) -> Option<i64> {
    let half_ns = i64::try_from(elapsed.as_nanos() / 2).ok()?;
    let step_ns = host_ns.checked_add(half_ns)?.checked_sub(ours_ns)?;
    let is_certain =
        step_ns.unsigned_abs() > (threshold.as_nanos() as u64).checked_add(half_ns as u64)?;
    (is_certain && step_ns.unsigned_abs() <= MAX_CLOCK_STEP_NS as u64).then_some(step_ns)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_set_only_if_it_is_surely_off() {
        const SECOND: i64 = 1_000_000_000;
        let threshold = Duration::from_secs(1);
        let step = |ours, host, elapsed| needed_step(ours, host, elapsed, threshold);
        let zero = Duration::ZERO;
        assert_eq!(step(100 * SECOND, 100 * SECOND, zero), None);
        assert_eq!(step(100 * SECOND, 101 * SECOND, zero), None);
        assert_eq!(step(100 * SECOND, 101 * SECOND + 1, zero), Some(SECOND + 1));
        assert_eq!(step(103 * SECOND, 100 * SECOND, zero), Some(-3 * SECOND));
        // In two seconds the host's word may be two seconds old.
        let two = Duration::from_secs(2);
        assert_eq!(step(102 * SECOND, 99 * SECOND, two), None);
        assert_eq!(step(102 * SECOND, 98 * SECOND, two), Some(-3 * SECOND));
        assert_eq!(step(0, i64::MAX, zero), None, "beyond a hundred years");
        assert_eq!(step(i64::MIN, i64::MAX, zero), None);
    }

    #[test]
    fn a_keeper_is_known_by_its_name() {
        let proc = tempfile::tempdir().unwrap();
        let process = |number: &str, name: &str| {
            let directory = proc.path().join(number);
            std::fs::create_dir(&directory).unwrap();
            std::fs::write(directory.join("comm"), format!("{name}\n")).unwrap();
        };
        process("1", "init");
        process("self", "chronyd");
        assert_eq!(keeper_among_processes(proc.path()), None);
        process("77", "chronyd");
        assert_eq!(
            keeper_among_processes(proc.path()),
            Some("chronyd".to_owned())
        );
    }
}
