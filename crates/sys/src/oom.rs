//! Which process the kernel ends when memory runs out: `oom_score_adj` of proc(5).
//!
//! It needs `unsafe` for what a child does between fork and exec.

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::fs::{Mode, OFlags};

/// Has a program that is started be chosen like any other, if this process is spared. What is spared as well would outlive everything that it pushes out.
pub fn spare_no_child(command: &mut Command) {
    let own = std::fs::read_to_string("/proc/self/oom_score_adj").unwrap_or_default();
    if !own.starts_with('-') {
        return;
    }
    let reset = || {
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let file = rustix::fs::open(c"/proc/self/oom_score_adj", flags, Mode::empty())?;
        rustix::io::write(file, b"0")?;
        Ok(())
    };
    // SAFETY: there are only system calls on memory that was there before, none of which takes a lock.
    unsafe { command.pre_exec(reset) };
}
