//! A network namespace of this process's own (network_namespaces(7)).
//!
//! It needs `unsafe` for `unshare`, which can also take a thread's descriptors away from others; not with these flags.

use rustix::io::Errno;
use rustix::thread::{UnshareFlags, unshare_unsafe};

/// Moves this thread, and what it starts, into a new network namespace, in which there is a loopback interface that is down. Where the thread has not the right to that, it
/// moves into a new user namespace first; a process of several threads cannot. Sockets that are open stay where they are.
///
/// # Errors
/// The system's reason: it has no namespaces, or does not let this user have one.
pub fn enter_network() -> Result<(), Errno> {
    match enter(UnshareFlags::NEWNET) {
        Err(Errno::PERM) => enter(UnshareFlags::NEWUSER | UnshareFlags::NEWNET),
        entered => entered,
    }
}

fn enter(flags: UnshareFlags) -> Result<(), Errno> {
    // SAFETY: `FILES` is not among the flags, so all threads keep the descriptors that they share.
    unsafe { unshare_unsafe(flags) }
}
