//! The guest's clock: what it says, its keepers, and setting it.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::time::{ClockId, Timespec};
use wire::agent::job::MAX_CLOCK_STEP_NS;

use crate::config::Config;
use crate::generation::Generation;
use crate::log::say;
use crate::tool::{Tool, find};

/// What systemd-timesyncd makes when it has set the clock by a server.
const TIMESYNC_MARK: &str = "/run/systemd/timesync/synchronized";

/// Programs that keep the clock right.
const KEEPERS: [&str; 5] = ["chronyd", "ntpd", "openntpd", "ntpd-rs", "ptp4l"];

/// The capability to set the clock, as a bit of what `/proc` shows.
const CAP_SYS_TIME: u64 = 1 << 25;

/// The bit of a file's mode that makes it run as its owner.
const SETUID: u16 = 0o4000;

/// The bits of a file's mode that let its group or all others write to it.
const WRITABLE_BY_OTHERS: u16 = 0o022;

/// How often a process is checked. What is read of it is not of one moment, as it may run another program meanwhile.
const LOOKS: [(); 3] = [(); 3];

/// How long `timedatectl` may take.
const TOOL_TIMEOUT: Duration = Duration::from_secs(3);

/// The most processes whose names are read.
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
    // Noted before, so that the watcher cannot see the jump without knowing whose it is.
    generation.steps_clock();
    let ns = unix_ns().saturating_add(step_ns);
    let time = Timespec {
        tv_sec: ns.div_euclid(1_000_000_000),
        tv_nsec: ns.rem_euclid(1_000_000_000) as _,
    };
    Ok(rustix::time::clock_settime(ClockId::Realtime, time)?)
}

/// The service that keeps the clock right in this guest, if any.
pub(crate) fn kept_by(config: &Config) -> Option<String> {
    if Path::new(TIMESYNC_MARK).exists() {
        return Some("systemd-timesyncd".to_owned());
    }
    if let Some(keeper) = keeper_among_processes(Path::new("/proc")) {
        return Some(keeper);
    }
    // It has what the kernel was last given: that its clock is synchronised, by any program.
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
    let ours = user_namespace(&proc.join("self"))?;
    numbered.map(|entry| entry.path()).find_map(|process| {
        let looks = LOOKS.map(|()| Keeper::look(&process, &ours));
        steady(looks).map(|keeper| keeper.name.to_owned())
    })
}

/// What all looks have seen, if it is the same.
fn steady<T: PartialEq>(looks: [Option<T>; LOOKS.len()]) -> Option<T> {
    let mut looks = looks.into_iter();
    let first = looks.next()?;
    looks.all(|look| look == first).then_some(first)?
}

fn user_namespace(process: &Path) -> Option<PathBuf> {
    std::fs::read_link(process.join("ns/user")).ok()
}

/// A process of our user namespace that has the name of a time service, and can set the clock.
#[derive(Debug, PartialEq)]
struct Keeper {
    name: &'static str,
    /// The file of its program: its device, by two numbers, and its own number.
    program: (u32, u32, u64),
    uid: u32,
}

impl Keeper {
    /// Any user can give a process such a name, have every capability in a user namespace, and run a setuid program by a link of any name. That
    /// program has the user's id as its real one; a keeper's ids are all the same.
    fn look(process: &Path, ours: &Path) -> Option<Keeper> {
        let name = std::fs::read_to_string(process.join("comm")).ok()?;
        let name = KEEPERS.into_iter().find(|keeper| *keeper == name.trim())?;
        let status = std::fs::read_to_string(process.join("status")).ok()?;
        let field = |name| status.lines().find_map(|line| line.strip_prefix(name));
        let mut uids = field("Uid:")?.split_ascii_whitespace();
        let uid = uids.next()?;
        let effective = u64::from_str_radix(field("CapEff:")?.trim(), 16).ok()?;
        let may_set = effective & CAP_SYS_TIME != 0 && uids.all(|other| other == uid);
        if !may_set || user_namespace(process)? != ours {
            return None;
        }
        // Last, and from what the kernel knows: the file may be in a FUSE file system of any user, which may never answer.
        let (flags, wanted) = (AtFlags::STATX_DONT_SYNC, StatxFlags::BASIC_STATS);
        let program = rustix::fs::statx(CWD, process.join("exe"), flags, wanted).ok()?;
        let is_keeper = program.stx_mode & (SETUID | WRITABLE_BY_OTHERS) == 0
            && [0, rustix::process::geteuid().as_raw()].contains(&program.stx_uid);
        is_keeper.then_some(Keeper {
            name,
            program: (
                program.stx_dev_major,
                program.stx_dev_minor,
                program.stx_ino,
            ),
            uid: uid.parse().ok()?,
        })
    }
}

/// Set the clock by what the host said in its hello, unless the configuration or the guest's own time service stands against it. The
/// host said it at some time between `begun` and now.
pub(crate) fn follow(config: &Config, generation: &Generation, host_unix_ns: u64, begun: Instant) {
    let time = config.time;
    let Ok(host_ns) = i64::try_from(host_unix_ns) else {
        return;
    };
    if generation.clock_is_of_others() {
        return;
    }
    if !time.sync || host_ns == 0 || config.allow("time").is_err() {
        return;
    }
    let elapsed = begun.elapsed();
    let Some(step_ns) = needed_step(unix_ns(), host_ns, elapsed, time.threshold) else {
        return;
    };
    let off = Duration::from_nanos(step_ns.unsigned_abs());
    if let Some(keeper) = kept_by(config) {
        say!("the clock is {off:.1?} off the host's; it is left alone because {keeper} keeps it");
        return;
    }
    match step(generation, step_ns) {
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
    use std::os::unix::fs::PermissionsExt;

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

    /// In a directory like `/proc`, by its name, ids, capabilities and user namespace, and its program.
    fn make_process(proc: &Path, number: &str, words: [&str; 4], exe: &Path) {
        let [name, uids, mask, namespace] = words;
        let directory = proc.join(number);
        std::fs::create_dir_all(directory.join("ns")).unwrap();
        std::fs::write(directory.join("comm"), format!("{name}\n")).unwrap();
        let status = format!("Name:\t{name}\nUid:\t{uids}\nGid:\t1\t1\t1\t1\nCapEff:\t{mask}\n");
        std::fs::write(directory.join("status"), status).unwrap();
        std::os::unix::fs::symlink(namespace, directory.join("ns/user")).unwrap();
        std::os::unix::fs::symlink(exe, directory.join("exe")).unwrap();
    }

    #[test]
    fn a_file_system_that_never_answers_is_asked_of_no_program() {
        let test = "clock::tests::a_file_system_that_never_answers_is_asked_of_no_program";
        if !silent_fuse::has_own_mounts(test) {
            return;
        }
        let proc = tempfile::tempdir().unwrap();
        let place = proc.path().join("of-user");
        std::fs::create_dir(&place).unwrap();
        let fuse = silent_fuse::SilentFuse::at(&place).unwrap();
        let (own, other) = ("user:[1]", "user:[2]");
        let (all, none) = ("000001ffffffffff", "0000000000000000");
        let (same, real) = ("0\t0\t0\t0", "1000\t0\t0\t0");
        make_process(proc.path(), "self", ["x", same, all, own], &place);
        // Its way alone asks the file system.
        let deeper = place.join("chronyd");
        for (number, words) in [
            ("10", ["chronyd", same, all, other]),
            ("11", ["chronyd", same, none, own]),
            ("12", ["chronyd", real, all, own]),
        ] {
            make_process(proc.path(), number, words, &deeper);
        }
        assert_eq!(keeper_among_processes(proc.path()), None);
        // A keeper by all else, whose program is looked at.
        make_process(proc.path(), "13", ["chronyd", same, all, own], &place);
        keeper_among_processes(proc.path());
        assert!(!fuse.was_asked());
    }

    #[test]
    fn a_keeper_has_its_name_and_may_set_the_clock() {
        let proc = tempfile::tempdir().unwrap();
        let program = |name: &str, mode| {
            let path = proc.path().join(name);
            std::fs::write(&path, "").unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            path
        };
        let (ordinary, setuid) = (program("busybox", 0o755), program("su", 0o4755));
        let of_all = program("mine", 0o777);
        let process_of =
            |number: &str, name: &str, uids: &str, mask: &str, namespace: &str, exe: &Path| {
                make_process(proc.path(), number, [name, uids, mask, namespace], exe);
            };
        let process = |number: &str, name: &str, mask: &str, namespace: &str, exe: &Path| {
            process_of(number, name, "100\t100\t100\t100", mask, namespace, exe);
        };
        let (own, other) = ("user:[1]", "user:[2]");
        let (all, time, none) = ("000001ffffffffff", "0000000002000000", "0000000000000000");
        process("self", "chronyd", all, own, &ordinary);
        process("1", "init", all, own, &ordinary);
        // What any user can have.
        process("60", "chronyd", none, own, &ordinary);
        process("61", "chronyd", "00000001fdffffff", own, &ordinary);
        process("62", "chronyd", all, other, &ordinary);
        process("63", "chronyd", all, own, &setuid);
        process("64", "chronyd", all, own, &of_all);
        // A setuid program whose file was read of before or after it ran.
        for (number, uids) in [
            ("65", "1000\t0\t0\t0"),
            ("66", "1000\t1000\t0\t1000"),
            ("67", "0\t0\t1000\t0"),
        ] {
            process_of(number, "chronyd", uids, all, own, &ordinary);
        }
        assert_eq!(keeper_among_processes(proc.path()), None);
        // chronyd gives up all capabilities but that to set the clock.
        process("77", "chronyd", time, own, &ordinary);
        let keeper = keeper_among_processes(proc.path());
        assert_eq!(keeper, Some("chronyd".to_owned()));
    }

    #[test]
    fn what_runs_another_program_meanwhile_is_no_keeper() {
        let keeper = |program, uid| {
            Some(Keeper {
                name: "chronyd",
                program: (1, 1, program),
                uid,
            })
        };
        let looks = || [keeper(7, 0), keeper(7, 0), keeper(7, 0)];
        assert_eq!(steady(looks()), keeper(7, 0));
        for index in 0..looks().len() {
            for other in [None, keeper(8, 0), keeper(7, 1000)] {
                let mut looks = looks();
                looks[index] = other;
                assert_eq!(steady(looks), None);
            }
        }
        assert_eq!(steady::<Keeper>([None, None, None]), None);
    }
}
