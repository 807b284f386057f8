//! The guest's generation: an identifier that changes when the guest was seen to go on from a state that it was in before, or elsewhere.
//!
//! A guest that is resumed from a snapshot believes that nothing has happened. What gives it away:
//! - Linux (5.18 and later, with its driver `vmgenid`) says in its log that the VM generation identifier has changed, which VMMs change
//!   when they restore a VM (QEMU with `-device vmgenid`, Firecracker, Cloud Hypervisor, Hyper-V, VMware). No release of it notifies programs in
//!   another way: the uevent that was to do so was taken out again before one had it.
//! - The wall clock or the clock that counts sleep jumps against the clock that does not: the time was set, or the guest slept.
//! - The hardware's clock jumps against the guest's: the guest was stopped, and the host's time went on.
//! - The host says another boot identifier than the last time: the guest was moved, or kept over a reboot of the host.
//!
//! What is not seen: a snapshot that is resumed within [`RTC_JUMP`], by a VMM without a generation identifier, on the same host. And a
//! jump of the clock is no proof: a change of the generation means "perhaps", and acting on it in vain must do no harm.

use std::fs::File;
use std::io::{self, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::time::{ClockId, Timespec};

use crate::log::say;
use crate::stream::until;

/// How often the clocks are compared.
const LOOK: Duration = Duration::from_secs(1);

/// How long it may take to ask the clocks once, so that they are comparable, and how often it is tried.
const MAX_LOOK: Duration = Duration::from_millis(100);
const LOOK_ATTEMPTS: usize = 3;

/// How often the hardware's clock is read: that costs an exit to the host or several.
const RTC_LOOK: Duration = Duration::from_secs(5);

/// How far clocks of the kernel may part between two looks. An adjustment by NTP slews by half a millisecond a second.
const JUMP: Duration = Duration::from_millis(500);

/// How far the hardware's clock, which has whole seconds, may part from the kernel's.
pub const RTC_JUMP: Duration = Duration::from_secs(3);

/// For how long the agent leaves a clock alone that a program in the guest has set: until the change of the generation that this makes, too,
/// has passed.
const HANDS_OFF: Duration = Duration::from_secs(60);

/// Where the hardware's clock is read.
const RTC: &str = "/sys/class/rtc/rtc0/since_epoch";

/// Where the kernel's log is read.
const KERNEL_LOG: &str = "/dev/kmsg";

/// The longest record of it, in bytes: the kernel's own limit.
const MAX_RECORD_LEN: usize = 8192;

/// The current generation, for each hello.
#[derive(Debug)]
pub struct Generation {
    current: Mutex<String>,
    /// The connections by which hosts know this guest, with a number each: they have the old one.
    uplinks: Mutex<Vec<(u64, OwnedFd)>>,
    /// Counts the connections.
    known: AtomicU64,
    /// The boot identifier of the host, as it said last.
    host: Mutex<String>,
    /// Counts how often the agent itself has set the clock, which is no sign of anything.
    steps: AtomicU64,
    /// When another program in the guest last set it.
    set_by_others: Mutex<Option<Instant>>,
}

impl Default for Generation {
    /// A new one.
    fn default() -> Generation {
        Generation {
            current: Mutex::new(random_identifier()),
            uplinks: Mutex::default(),
            known: AtomicU64::new(0),
            host: Mutex::default(),
            steps: AtomicU64::new(0),
            set_by_others: Mutex::default(),
        }
    }
}

impl Generation {
    /// The identifier, 32 hexadecimal digits.
    pub fn current(&self) -> String {
        sys::lock(&self.current).clone()
    }

    /// The guest is another one from here on.
    pub fn renew(&self, why: &str) {
        *sys::lock(&self.current) = random_identifier();
        say!("this guest seems to have been resumed ({why}): it has a new generation");
        for (_, uplink) in sys::lock(&self.uplinks).iter() {
            // The agent dials again when it sees the end, and says the new generation then.
            let _ = rustix::net::shutdown(uplink, rustix::net::Shutdown::Both);
        }
    }

    /// The host has the current generation from this connection: hang up when it changes, for as long as what this gives lives. There
    /// is one for each way to the host.
    pub(crate) fn known_on(&self, uplink: &OwnedFd) -> io::Result<Known<'_>> {
        let number = self.known.fetch_add(1, Ordering::Relaxed);
        sys::lock(&self.uplinks).push((number, uplink.try_clone()?));
        Ok(Known {
            generation: self,
            number,
        })
    }

    /// The host said this boot identifier.
    pub(crate) fn host_is(&self, boot_id: &str) {
        if boot_id.is_empty() {
            return;
        }
        let before = std::mem::replace(&mut *sys::lock(&self.host), boot_id.to_owned());
        if !before.is_empty() && before != boot_id {
            self.renew("its host is another one, or was started again");
        }
    }

    /// The agent is about to set the clock.
    pub(crate) fn steps_clock(&self) {
        self.steps.fetch_add(1, Ordering::AcqRel);
    }

    /// Whether a program in the guest has just set the clock: it is theirs then, and not to be set back at once.
    pub(crate) fn clock_is_of_others(&self) -> bool {
        sys::lock(&self.set_by_others).is_some_and(|then| then.elapsed() < HANDS_OFF)
    }

    /// Watch for what gives a resumed guest away, for ever.
    pub(crate) fn watch(&self) -> ! {
        let log = match kernel_log() {
            Ok(log) => Some(log),
            Err(error) => {
                say!(
                    "cannot read {KERNEL_LOG}, so a new VM generation identifier is not noticed: {error}"
                );
                None
            }
        };
        let mut clocks = Clocks::look(true);
        let mut steps = self.steps.load(Ordering::Acquire);
        let mut looks = 0_u64;
        let mut next_rtc = Instant::now() + RTC_LOOK;
        loop {
            if wait_for_kernel(log.as_ref(), Instant::now() + LOOK) {
                self.renew("the VM generation identifier has changed");
            }
            let with_rtc = Instant::now() >= next_rtc;
            if with_rtc {
                next_rtc = Instant::now() + RTC_LOOK;
            }
            let now = Clocks::look(with_rtc);
            let steps_now = self.steps.load(Ordering::Acquire);
            looks = if steps == steps_now { looks + 1 } else { 0 };
            steps = steps_now;
            // A step is counted before it is made, so the look after the one that finds it counted may still see it happen.
            if looks > 1 {
                if clocks.wall_jumped(&now) && !clocks.slept(&now) {
                    *sys::lock(&self.set_by_others) = Some(Instant::now());
                }
                if let Some(why) = clocks.jumped(&now) {
                    self.renew(why);
                }
            }
            clocks = now.or_those_of(clocks);
        }
    }
}

/// A connection on which the host was sent the generation.
#[derive(Debug)]
pub(crate) struct Known<'a> {
    generation: &'a Generation,
    number: u64,
}

impl Drop for Known<'_> {
    /// The copy of the descriptor goes, so that the connection can end.
    fn drop(&mut self) {
        sys::lock(&self.generation.uplinks).retain(|(number, _)| *number != self.number);
    }
}

fn random_identifier() -> String {
    let mut bytes = [0; 16];
    // Without randomness (before the kernel has gathered any), the time has to do: it only has to be another one.
    if rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::NONBLOCK) != Ok(16) {
        let now = rustix::time::clock_gettime(ClockId::Realtime);
        bytes[..8].copy_from_slice(&now.tv_sec.to_le_bytes());
        bytes[8..].copy_from_slice(&i64::from(now.tv_nsec as u32).to_le_bytes());
    }
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What clocks say beyond the one that only counts while the guest runs, in nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Clocks {
    wall: Option<i128>,
    boot: Option<i128>,
    rtc: Option<i128>,
}

impl Clocks {
    fn look(with_rtc: bool) -> Clocks {
        let mut looks = (0..LOOK_ATTEMPTS).map(|_| Clocks::look_once(with_rtc));
        // Of one that took long (the agent, or its processor, had to wait meanwhile) nothing could be concluded.
        let quick = looks.find(|(_, took)| *took <= MAX_LOOK.as_nanos() as i128);
        quick.map_or_else(
            || Clocks {
                wall: None,
                boot: None,
                rtc: None,
            },
            |(clocks, _)| clocks,
        )
    }

    /// What the clocks say, and how long it took to ask them.
    fn look_once(with_rtc: bool) -> (Clocks, i128) {
        let clock = |id| nanoseconds(rustix::time::clock_gettime(id));
        let begun = clock(ClockId::Monotonic);
        let rtc = with_rtc
            .then(|| std::fs::read_to_string(RTC).ok())
            .flatten()
            .and_then(|text| text.trim().parse::<i128>().ok());
        let (wall, boot) = (clock(ClockId::Realtime), clock(ClockId::Boottime));
        let ended = clock(ClockId::Monotonic);
        let clocks = Clocks {
            wall: Some(wall - ended),
            boot: Some(boot - ended),
            rtc: rtc.map(|seconds| seconds * 1_000_000_000 - ended),
        };
        (clocks, ended - begun)
    }

    /// What was not seen this time stays as it was: the hardware's clock is read less often.
    fn or_those_of(self, earlier: Clocks) -> Clocks {
        Clocks {
            wall: self.wall.or(earlier.wall),
            boot: self.boot.or(earlier.boot),
            rtc: self.rtc.or(earlier.rtc),
        }
    }

    fn slept(&self, now: &Clocks) -> bool {
        is_apart(self.boot, now.boot, JUMP)
    }

    fn wall_jumped(&self, now: &Clocks) -> bool {
        is_apart(self.wall, now.wall, JUMP)
    }

    fn jumped(&self, now: &Clocks) -> Option<&'static str> {
        if self.slept(now) {
            return Some("it has slept");
        }
        if is_apart(self.rtc, now.rtc, RTC_JUMP) {
            return Some("the hardware's clock has jumped");
        }
        self.wall_jumped(now).then_some("the clock was set")
    }
}

fn is_apart(before: Option<i128>, after: Option<i128>, limit: Duration) -> bool {
    let both = before.zip(after);
    both.is_some_and(|(before, after)| (after - before).unsigned_abs() > limit.as_nanos())
}

fn nanoseconds(time: Timespec) -> i128 {
    i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
}

/// The kernel's log, from now on.
fn kernel_log() -> io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let mut log = File::from(rustix::fs::open(KERNEL_LOG, flags, Mode::empty())?);
    log.seek(SeekFrom::End(0))?;
    Ok(log)
}

/// Wait until `deadline`, or until the kernel says that the generation has changed: whether it did.
fn wait_for_kernel(log: Option<&File>, deadline: Instant) -> bool {
    let Some(log) = log else {
        std::thread::sleep(deadline.saturating_duration_since(Instant::now()));
        return false;
    };
    while Instant::now() < deadline {
        let mut poll = [PollFd::new(log, PollFlags::IN)];
        match rustix::event::poll(&mut poll, Some(&until(deadline))) {
            Ok(0) => return false,
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => {
                std::thread::sleep(LOOK);
                return false;
            }
        }
        // One record at a time.
        let mut record = [0; MAX_RECORD_LEN];
        match rustix::io::read(log, &mut record) {
            Ok(len) if reports_generation(&record[..len]) => return true,
            // PIPE says that records were overwritten before they were read: the next read gives what is left.
            Ok(_) | Err(Errno::AGAIN | Errno::INTR | Errno::PIPE) => {}
            Err(_) => {
                std::thread::sleep(LOOK);
                return false;
            }
        }
    }
    false
}

/// Whether a record, `PRIORITY,SEQUENCE,TIME,FLAGS;MESSAGE`, says that the generation identifier has changed. What programs write into
/// the kernel's log has another facility than the kernel's own, which is 0.
fn reports_generation(record: &[u8]) -> bool {
    let record = String::from_utf8_lossy(record);
    let Some((prefix, message)) = record.split_once(';') else {
        return false;
    };
    let priority = prefix.split(',').next().and_then(|text| text.parse().ok());
    priority.is_some_and(|priority: u32| priority < 8)
        && message.starts_with("random: ")
        && message.contains("virtual machine fork")
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i128 = 1_000_000_000;

    #[test]
    fn a_new_generation_is_another_one_and_is_told() {
        let generation = Generation::default();
        let first = generation.current();
        assert_eq!(first.len(), 32);
        let (uplink, mut host) = std::os::unix::net::UnixStream::pair().unwrap();
        let uplink = OwnedFd::from(uplink);
        let known = generation.known_on(&uplink).unwrap();
        generation.renew("a test");
        assert_ne!(generation.current(), first);
        let read = std::io::Read::read(&mut host, &mut [0]);
        assert_eq!(read.unwrap(), 0, "the host is called again");
        drop(known);
        assert!(
            sys::lock(&generation.uplinks).is_empty(),
            "the connection can end"
        );
    }

    #[test]
    fn another_host_makes_another_generation() {
        let generation = Generation::default();
        let first = generation.current();
        for same in ["", "one", "one", "", "one"] {
            generation.host_is(same);
        }
        assert_eq!(generation.current(), first);
        generation.host_is("two");
        assert_ne!(generation.current(), first);
    }

    #[test]
    fn clocks_that_part_give_a_resumed_guest_away() {
        let clocks = |wall, boot, rtc| Clocks {
            wall: Some(wall),
            boot: Some(boot),
            rtc,
        };
        let before = clocks(100 * SECOND, 0, Some(100 * SECOND));
        let jumped = |now: Clocks| before.jumped(&now).is_some();
        assert!(!jumped(before));
        assert!(!jumped(clocks(100 * SECOND + SECOND / 2, 0, None)));
        assert!(jumped(clocks(100 * SECOND + SECOND / 2 + 1, 0, None)));
        assert!(jumped(clocks(99 * SECOND, 0, None)));
        assert!(jumped(clocks(100 * SECOND, SECOND, None)));
        assert!(!jumped(clocks(100 * SECOND, 0, Some(103 * SECOND))));
        assert!(jumped(clocks(100 * SECOND, 0, Some(104 * SECOND))));
        assert!(jumped(clocks(100 * SECOND, 0, Some(90 * SECOND))));
    }

    #[test]
    fn the_clock_of_the_hardware_is_kept_between_two_looks() {
        let with = Clocks {
            wall: Some(1),
            boot: Some(2),
            rtc: Some(3),
        };
        let without = Clocks { rtc: None, ..with };
        assert_eq!(without.or_those_of(with), with);
        assert!(Clocks::look(false).jumped(&Clocks::look(false)).is_none());
    }

    #[test]
    fn the_kernel_is_believed_and_nobody_else_in_its_log() {
        let words = "random: crng reseeded due to virtual machine fork\n";
        let reports = |record: String| reports_generation(record.as_bytes());
        assert!(reports(format!("5,1234,4603949,-;{words}")));
        assert!(reports(format!("5,1234,4603949,-,caller=T1;{words}")));
        assert!(
            !reports(format!("13,1234,4603949,-;{words}")),
            "a program said it"
        );
        assert!(!reports(format!("5,1234,4603949,-;somebody: {words}")));
        assert!(!reports(
            "5,1234,4603949,-;random: crng init done\n".to_owned()
        ));
        assert!(!reports(words.to_owned()));
        assert!(!reports(String::new()));
    }
}
