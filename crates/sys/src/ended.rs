//! Whether a process has ended, also where the kernel does not let go of it.
//!
//! A thread ends no sooner than the call in which it is, whatever signal comes: close(2) of a file of a FUSE file system waits for that file system's answer. Until then no
//! parent can wait for the process and its pidfd does not become readable; it keeps its descriptors, and with them locks, listeners and connections. Its program runs no more.

use std::fs;
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::thread::sleep;
use std::time::Duration;

/// How often in a row threads that wait in the kernel are checked before they count as ended, and the time between two checks.
const LOOKS: u32 = 10;
const PAUSE: Duration = Duration::from_millis(20);

/// How often a process is checked that ends and has much to give back: for five seconds.
const MOST_LOOKS: u32 = 250;

/// A thread's flag in the kernel: it has begun to end.
const PF_EXITING: u64 = 0x4;

/// SIGKILL in a set of signals.
const KILL: u64 = 1 << 8;

/// What was found to have ended: a process in a sandbox cannot look.
static NOTED: Mutex<Vec<i32>> = Mutex::new(Vec::new());

/// What becomes of a thread or a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Seen {
    /// It has ended.
    Ended,
    /// It runs its program no more, and waits for something in the kernel.
    Waits,
    /// It runs its program no more, and gives back what it has.
    Ends,
    /// It runs, or may be about to end by itself.
    Runs,
}

/// Whether no thread of a process runs its program any more, after a wait for those that end by themselves: until they have, or wait in the kernel for a fifth of a
/// second. False of one that cannot be seen from here, as there is none.
pub fn has_ended(pid: i32) -> bool {
    let mut waits = 0;
    for look in 0..MOST_LOOKS {
        if look > 0 {
            sleep(PAUSE);
        }
        match look_at(Path::new(&format!("/proc/{pid}/task"))) {
            Ok(Seen::Ends) => waits = 0,
            Ok(Seen::Waits) if waits + 1 < LOOKS => waits += 1,
            Ok(seen) => return seen != Seen::Runs,
            // It was about to end, and is gone.
            Err(_) => return look > 0,
        }
    }
    false
}

/// Remembers that a process has ended.
pub fn note(pid: i32) {
    crate::lock(&NOTED).push(pid);
}

/// Whether a process was [noted](note).
pub fn is_noted(pid: i32) -> bool {
    crate::lock(&NOTED).contains(&pid)
}

/// Whether any process was [noted](note).
pub fn is_any_noted() -> bool {
    !crate::lock(&NOTED).is_empty()
}

/// Whether a process has the lock of flock(2) on the file with this number, alone, by the kernel's word.
pub fn has_lock(pid: i32, inode: u64) -> bool {
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    locks.lines().any(|line| is_lock_of(line, pid, inode))
}

/// By a line of proc_locks(5). Its device is not always that of stat(2).
fn is_lock_of(line: &str, pid: i32, inode: u64) -> bool {
    let words: Vec<&str> = line.split_ascii_whitespace().collect();
    let [_, "FLOCK", _, "WRITE", holder, file, ..] = words[..] else {
        return false;
    };
    let number = file.rsplit(':').next().and_then(|word| word.parse().ok());
    holder.parse() == Ok(pid) && number == Some(inode)
}

/// The threads of a process: of all, the one that is farthest from its end.
fn look_at(threads: &Path) -> io::Result<Seen> {
    let mut all = Seen::Ended;
    for thread in fs::read_dir(threads)? {
        let thread = thread?.path();
        let read = |name| fs::read_to_string(thread.join(name));
        let (Ok(stat), Ok(status)) = (read("stat"), read("status")) else {
            // It has just ended, or is not to be seen.
            match thread.exists() {
                true => return Ok(Seen::Runs),
                false => continue,
            }
        };
        all = all.max(thread_of(&stat, &status));
        if all == Seen::Runs {
            break;
        }
    }
    Ok(all)
}

/// By proc_pid_stat(5) and proc_pid_status(5).
fn thread_of(stat: &str, status: &str) -> Seen {
    // The name may have any bytes, parentheses too.
    let behind_name = stat.rsplit(')').next().unwrap_or_default();
    let fields: Vec<&str> = behind_name.split_ascii_whitespace().collect();
    let flags = fields.get(6).and_then(|flags| flags.parse().ok());
    let begins_to_end = flags.is_some_and(|flags: u64| flags & PF_EXITING != 0);
    match fields.first() {
        Some(&("Z" | "X")) => Seen::Ended,
        Some(&("D" | "S")) if begins_to_end || is_killed(status) => Seen::Waits,
        Some(&"R") if begins_to_end || is_killed(status) => Seen::Ends,
        _ => Seen::Runs,
    }
}

/// Whether SIGKILL waits for the thread.
fn is_killed(status: &str) -> bool {
    let mut pending = status
        .lines()
        .filter_map(|line| line.strip_prefix("SigPnd:"));
    let pending = pending.next().map(str::trim);
    let pending = pending.and_then(|set| u64::from_str_radix(set, 16).ok());
    pending.is_some_and(|set| set & KILL != 0)
}

#[cfg(test)]
mod tests;
