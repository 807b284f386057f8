//! Programs that run as another user.
//!
//! It needs `unsafe` for what a child does between fork and exec.

use std::os::unix::process::CommandExt;
use std::process::Command;

use rustix::process::{Gid, Uid};
use rustix::thread::{set_thread_gid, set_thread_groups, set_thread_uid};

/// Has a program that is started run as this user and its group, and in no other group. This comes behind all that the child does by
/// [`pre_exec`](CommandExt::pre_exec) so far, where [`Command::uid`] comes before it: a process that has changed its user may not write its own `oom_score_adj`.
pub fn run_as(command: &mut Command, uid: u32, gid: u32) {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    let change = move || {
        set_thread_groups(&[])?;
        set_thread_gid(gid)?;
        set_thread_uid(uid)?;
        Ok(())
    };
    // SAFETY: there are only system calls, none of which takes a lock, and the child has a single thread.
    unsafe { command.pre_exec(change) };
}
