//! Small wrappers of system calls, most of which no safe library makes, and of locks. No memory is shared here.
//!
//! - [`descriptors`] passes descriptors along with bytes, and raises the limit of their number.
//! - [`ended`] says whether a process has ended, also where the kernel does not let go of it.
//! - [`ethernet`] opens tap devices and packet sockets.
//! - [`foreground`] is the parent of one command: its signals, its exit code.
//! - [`links`] finds files by paths that no other user can lead astray.
//! - [`namespaces`] gives this process a network namespace of its own.
//! - [`oom`] has programs be ended like others when memory runs out.
//! - [`peer`] says whose program is at the other end of a UNIX socket.
//! - [`regular`] opens ordinary files alone.
//! - [`socket_file`] makes and removes the files of UNIX sockets that listen, and says what stands in their way.
//! - [`sockets`] sets options of sockets.
//! - [`supervise`] starts programs of which some system calls are answered here.
//! - [`user`] starts programs as another user.

pub mod descriptors;
pub mod ended;
pub mod ethernet;
pub mod foreground;
pub mod links;
pub mod namespaces;
pub mod oom;
pub mod peer;
pub mod regular;
pub mod socket_file;
pub mod sockets;
pub mod supervise;
pub mod tcp_callers;
pub mod user;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks, also after a thread has panicked with the lock: for what is whole at each step.
pub fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
