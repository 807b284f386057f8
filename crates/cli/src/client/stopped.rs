//! Whether a daemon has ended or is stopped, by the kernel's word.

use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use crate::unix;

/// Connects to a daemon's control socket. A daemon that has ended, but of which the kernel does not let go, listens there as long, and nothing is answered.
///
/// # Errors
/// The system's; of such a daemon, that nothing listens.
pub(crate) fn connect(socket: &Path, patience: Duration) -> io::Result<UnixStream> {
    let stream = unix::connect(socket, patience)?;
    match has_ended(&stream) {
        true => Err(io::ErrorKind::ConnectionRefused.into()),
        false => Ok(stream),
    }
}

/// Whether the process at the other end has ended, as one that has listened there.
pub(crate) fn has_ended(stream: impl AsFd) -> bool {
    sys::peer::process(stream.as_fd()).is_ok_and(sys::ended::has_ended)
}

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
