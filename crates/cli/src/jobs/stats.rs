//! A guest's figures, once or at an interval.

use std::fmt::Write;
use std::time::{Duration, Instant};

use wire::agent::job::{Answer, Ask, Disk, NetworkLink, Stats};

use super::{Job, unexpected};
use crate::guest::{Agent, GuestError, printable};
use crate::size::show_bytes as bytes;

/// Give `each` so many pairs of figures, each with those before it; 0 goes on without end, and waits for a guest that is paused. It says whether to go on.
/// However the agent spreads its answers, there are not more, they do not come faster than twice as often as they were asked for, and with a number of them
/// there is one deadline for all.
pub fn watch(
    agent: Agent<'_>,
    interval: Duration,
    count: u32,
    mut each: impl FnMut(&Stats, &Stats) -> bool,
) -> Result<(), GuestError> {
    let interval_ms = u32::try_from(interval.as_millis()).unwrap_or(u32::MAX);
    let ask = Ask::Stats {
        interval_ms,
        // Rates are what changed between two answers, so there is one answer more.
        count: match count {
            0 => 0,
            count => count.saturating_add(1),
        },
    };
    let mut job = Job::ask(agent, ask)?;
    let all = interval
        .saturating_mul(count)
        .saturating_add(agent.patience);
    job.wait_for((count > 0).then_some(all));
    let mut before: Option<Box<Stats>> = None;
    let (mut given, mut due) = (0, Instant::now());
    while count == 0 || given < count {
        let now = match job.answer()? {
            Answer::Stats(stats) => stats,
            Answer::Done => {
                return Err(GuestError::Protocol(format!(
                    "it ended after {given} reports, and more were asked for"
                )));
            }
            other => return Err(unexpected(&other)),
        };
        if let Some(before) = &before {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            due = Instant::now() + interval / 2;
            if !each(before, &now) {
                return Ok(());
            }
            given = given.saturating_add(1);
        }
        before = Some(now);
    }
    Ok(())
}

/// The figures for a person. What the guest calls its things is made harmless.
pub fn report(name: &str, before: &Stats, now: &Stats) -> String {
    let mut text = String::new();
    let [one, five, fifteen] = now.load.map(|hundredths| f64::from(hundredths) / 100.0);
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{name}  up {}, load {one:.2} {five:.2} {fifteen:.2}, {} tasks",
        uptime(now.uptime_ms),
        now.tasks
    );
    let _ = writeln!(text, "  cpu   {}", processors(before, now));
    let memory = &now.memory;
    let _ = writeln!(
        text,
        "  mem   {} of {} used, {} cached; swap {} of {}",
        bytes(memory.total.saturating_sub(memory.available)),
        bytes(memory.total),
        bytes(memory.cached),
        bytes(memory.swap_total.saturating_sub(memory.swap_free)),
        bytes(memory.swap_total)
    );
    for fs in &now.file_systems {
        let used = fs.size.saturating_sub(fs.free);
        let _ = writeln!(
            text,
            "  fs    {} ({}): {} of {} used, {:.0} %",
            printable(&fs.mounted_at),
            printable(&fs.kind),
            bytes(used),
            bytes(fs.size),
            percent(used, used.saturating_add(fs.available))
        );
    }
    text.push_str(&rates(before, now));
    text
}

/// What disks and network links did in between.
fn rates(before: &Stats, now: &Stats) -> String {
    let mut text = String::new();
    let seconds = now.uptime_ms.saturating_sub(before.uptime_ms).max(1) as f64 / 1000.0;
    let rate = |now: u64, old: u64| bytes((now.saturating_sub(old) as f64 / seconds) as u64);
    for disk in &now.disks {
        let unknown = Disk::default();
        let old = before
            .disks
            .iter()
            .find(|old| old.name == disk.name)
            .unwrap_or(&unknown);
        let _ = writeln!(
            text,
            "  disk  {}: reads {}/s, writes {}/s, busy {:.0} %",
            printable(&disk.name),
            rate(disk.read_bytes, old.read_bytes),
            rate(disk.written_bytes, old.written_bytes),
            disk.busy_ms.saturating_sub(old.busy_ms) as f64 / seconds / 10.0
        );
    }
    for link in &now.links {
        let unknown = NetworkLink::default();
        let old = before
            .links
            .iter()
            .find(|old| old.name == link.name)
            .unwrap_or(&unknown);
        let _ = writeln!(
            text,
            "  net   {}: receives {}/s, sends {}/s, {} errors, {} drops",
            printable(&link.name),
            rate(link.received_bytes, old.received_bytes),
            rate(link.sent_bytes, old.sent_bytes),
            link.receive_errors.saturating_add(link.send_errors),
            link.receive_drops.saturating_add(link.send_drops)
        );
    }
    text
}

fn processors(before: &Stats, now: &Stats) -> String {
    let (old, new) = (&before.cpu, &now.cpu);
    let parts = [
        new.user.saturating_sub(old.user),
        new.system.saturating_sub(old.system),
        new.interrupt.saturating_sub(old.interrupt),
        new.io_wait.saturating_sub(old.io_wait),
        new.stolen.saturating_sub(old.stolen),
        new.idle.saturating_sub(old.idle),
    ];
    let all = parts
        .iter()
        .fold(0_u64, |sum, part| sum.saturating_add(*part));
    let [user, system, interrupt, io_wait, stolen, _] = parts.map(|part| percent(part, all));
    format!(
        "{:.1} % of {}: user {user:.1}, system {system:.1}, interrupts {interrupt:.1}; waiting for disks {io_wait:.1}, stolen {stolen:.1}",
        user + system + interrupt,
        now.cpus
    )
}

fn percent(part: u64, all: u64) -> f64 {
    if all == 0 {
        return 0.0;
    }
    part as f64 * 100.0 / all as f64
}

fn uptime(ms: u64) -> String {
    let minutes = ms / 60_000;
    let (days, hours, minutes) = (minutes / 1440, minutes / 60 % 24, minutes % 60);
    match days {
        0 => format!("{hours}:{minutes:02}"),
        days => format!("{days} d {hours}:{minutes:02}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use wire::agent::job::{Cpu, FileSystem, Memory};

    #[test]
    fn sizes_and_times_for_people() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1023), "1023 B");
        assert_eq!(bytes(1536), "1.5 KiB");
        assert_eq!(bytes(u64::MAX), "16777216 TiB");
        assert_eq!(uptime(59_999), "0:00");
        assert_eq!(uptime(90_060_000), "1 d 1:01");
    }

    #[test]
    fn rates_are_what_changed() {
        let disk = |written_bytes, busy_ms| Disk {
            name: "v\x1bda".to_owned(),
            written_bytes,
            busy_ms,
            ..Disk::default()
        };
        let before = Stats {
            uptime_ms: 10_000,
            cpu: Cpu {
                user: 1000,
                idle: 1000,
                ..Cpu::default()
            },
            disks: vec![disk(1024, 0)],
            ..Stats::default()
        };
        let now = Stats {
            uptime_ms: 12_000,
            cpus: 2,
            cpu: Cpu {
                user: 1100,
                idle: 1300,
                ..Cpu::default()
            },
            memory: Memory {
                total: 4096,
                available: 1024,
                ..Memory::default()
            },
            file_systems: vec![FileSystem {
                mounted_at: "/".to_owned(),
                kind: "ext4".to_owned(),
                size: 1000,
                free: 500,
                available: 300,
                ..FileSystem::default()
            }],
            disks: vec![disk(1024 + 4096, 1000)],
            ..Stats::default()
        };
        let text = report("web", &before, &now);
        for expected in [
            "web  up 0:00, load 0.00 0.00 0.00, 0 tasks\n",
            "  cpu   25.0 % of 2: user 25.0,",
            "  mem   3 KiB of 4 KiB used",
            "  fs    / (ext4): 500 B of 1000 B used, 62 %\n",
            "  disk  v\u{fffd}da: reads 0 B/s, writes 2 KiB/s, busy 50 %\n",
        ] {
            assert!(text.contains(expected), "{text}");
        }
        // A guest that was restarted in between, and one that lies.
        let _ = report("web", &now, &before);
    }
}
