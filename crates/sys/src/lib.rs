//! System calls that no safe library makes, behind functions that are safe to call. No memory is shared here.
//!
//! - [`ethernet`] opens tap devices and packet sockets.
//! - [`peer`] says whose program is at the other end of a UNIX socket.
//! - [`supervise`] starts programs of which some system calls are answered here.

pub mod ethernet;
pub mod peer;
pub mod supervise;
