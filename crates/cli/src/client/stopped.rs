//! Whether a daemon is stopped, by the kernel's word.

use std::fs;
use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use crate::unix;

/// The process that listens at this control socket, if it is stopped and can be seen from here.
pub(super) fn stopped_process(socket: &Path) -> Option<i32> {
    let stream = unix::connect(socket, Duration::from_millis(100)).ok()?;
    let pid = sys::peer::process(stream.as_fd()).ok()?;
    is_stopped(pid).then_some(pid)
}

/// Whether a signal or a debugger has stopped it. It answers nothing then.
pub(crate) fn is_stopped(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    value_of(&status, "State:").is_some_and(|state| state.starts_with(['T', 't']))
}

/// A value of proc_pid_status(5).
pub(crate) fn value_of<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    let mut values = status.lines().filter_map(|line| line.strip_prefix(name));
    values.next().map(str::trim)
}
