//! Where threads run, and how much of the processors they have had.

use std::fs;
use std::time::Duration;

use rustix::process::Pid;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

/// The two processors of a measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Placement {
    /// Of guests and programs.
    pub generator: usize,
    /// Of what is measured.
    pub subject: usize,
}

impl Placement {
    /// The first two processors that this process may use; the same one twice if it may use one only.
    pub fn find() -> rustix::io::Result<Placement> {
        let allowed = sched_getaffinity(None)?;
        let mut usable = (0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu));
        let generator = usable.next().unwrap_or(0);
        Ok(Placement {
            generator,
            subject: usable.next().unwrap_or(generator),
        })
    }

    /// Whether the two are different ones.
    pub fn is_apart(self) -> bool {
        self.generator != self.subject
    }
}

/// Lets the calling thread, and what it starts from now on, run on this processor only.
pub fn pin(cpu: usize) -> rustix::io::Result<()> {
    pin_to(&[cpu])
}

/// The same with several.
pub fn pin_to(cpus: &[usize]) -> rustix::io::Result<()> {
    let mut set = CpuSet::new();
    for cpu in cpus {
        set.set(*cpu);
    }
    sched_setaffinity(None, &set)
}

/// Gives this process, and what it starts from now on, a priority of -20 to 19.
pub fn set_priority(nice: i32) -> rustix::io::Result<()> {
    rustix::process::setpriority_process(None, nice)?;
    // Where the kernel shares processors among sessions first, priorities are the sessions'. Not every kernel does.
    let _ = fs::write("/proc/self/autogroup", nice.to_string());
    Ok(())
}

/// Processor time of this process so far.
pub fn own_time() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// What a process has used so far, all its threads together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Processor time in nanoseconds.
    pub time_ns: u64,
    /// Time in nanoseconds that its threads could have run and had no processor, since others had it.
    pub waited_ns: u64,
    /// How often a thread went to sleep and was woken.
    pub wakeups: u64,
}

impl Usage {
    /// Of this process. What cannot be read counts as zero.
    pub fn of(pid: Pid) -> Usage {
        let mut usage = Usage::default();
        let tasks = format!("/proc/{}/task", pid.as_raw_nonzero());
        for task in fs::read_dir(tasks).into_iter().flatten().flatten() {
            let read = |name: &str| fs::read_to_string(task.path().join(name)).unwrap_or_default();
            let times = read("schedstat");
            let mut times = times.split_whitespace();
            usage.time_ns += number(times.next());
            usage.waited_ns += number(times.next());
            let status = read("status");
            let line = status
                .lines()
                .find_map(|line| line.strip_prefix("voluntary_ctxt_switches:"));
            usage.wakeups += number(line);
        }
        usage
    }

    /// What was used since.
    #[must_use]
    pub fn since(self, before: Usage) -> Usage {
        Usage {
            time_ns: self.time_ns.saturating_sub(before.time_ns),
            waited_ns: self.waited_ns.saturating_sub(before.waited_ns),
            wakeups: self.wakeups.saturating_sub(before.wakeups),
        }
    }
}

fn number(text: Option<&str>) -> u64 {
    text.and_then(|text| text.trim().parse().ok()).unwrap_or(0)
}

/// Memory of a process.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Memory {
    /// Its share of resident memory, in bytes (`Pss`).
    pub proportional: u64,
    /// Resident memory that belongs to no file, in bytes (`Anonymous`).
    pub anonymous: u64,
    /// Open descriptors.
    pub descriptors: u64,
}

impl Memory {
    /// Of this process. What cannot be read counts as zero.
    pub fn of(pid: Pid) -> Memory {
        let directory = format!("/proc/{}", pid.as_raw_nonzero());
        let rollup = fs::read_to_string(format!("{directory}/smaps_rollup")).unwrap_or_default();
        let field = |name: &str| {
            let line = rollup.lines().find_map(|line| line.strip_prefix(name));
            number(line.and_then(|rest| rest.split_whitespace().next())) * 1024
        };
        Memory {
            proportional: field("Pss:"),
            anonymous: field("Anonymous:"),
            descriptors: fs::read_dir(format!("{directory}/fd")).map_or(0, Iterator::count) as u64,
        }
    }
}

/// Time that the machine's processors were taken away by its host, and all time, in clock ticks since its start.
pub fn stolen() -> (u64, u64) {
    let stat = fs::read_to_string("/proc/stat").unwrap_or_default();
    let fields: Vec<u64> = stat
        .lines()
        .next()
        .unwrap_or_default()
        .split_whitespace()
        .skip(1)
        .map(|text| number(Some(text)))
        .collect();
    // user, nice, system, idle, iowait, irq, softirq, steal; what guests have had is in user already.
    (
        fields.get(7).copied().unwrap_or(0),
        fields.iter().take(8).sum(),
    )
}

/// The load average of the last minute.
pub fn load() -> f64 {
    let text = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split_whitespace()
        .next()
        .and_then(|text| text.parse().ok())
        .unwrap_or(0.0)
}
