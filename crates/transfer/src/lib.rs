//! Files and trees of files, from one side of a connection to the other, either way: `ringdown cp` and `ringdown sync`, and the agent's part
//! in them.
//!
//! What passes is said in [`wire::agent::transfer`]. Here are its two ends, which are the same in the guest and on the host: [`send()`]
//! walks and reads, [`receive()`] creates and writes. Both block on one connection ([`Channel`]), with a deadline on every wait.
//!
//! # How a receiver is safe from its sender
//! - An entry has a name, never a path, and is created below a descriptor of the directory that was entered last. Directories are opened one
//!   name at a time with `O_NOFOLLOW`, so neither words nor a symbolic link that was sent before lead out of the destination.
//! - A file is written under a name of ours, which must not exist (`O_EXCL`), and takes its own name when it is complete. What it replaces
//!   has to be a file or a symbolic link: never a directory, a device, a socket or a pipe.
//! - A request for certain sources gets these at the top, and nothing else.
//! - Sizes, counts and depths have limits; what was announced is compared with the room there is before the first byte is written, and with
//!   what then comes.
//!
//! # How it goes on after a broken connection
//! Sender and receiver keep nothing between connections but what the starter of the transfer holds in its memory: the [`Position`] of the
//! last entry in place. The walk is in the order of names, so it can begin anywhere. Of the file that was under way, the receiver has a partial
//! file whose name says which transfer and which content it belongs to, and whose size says how far it got: chunks are written in
//! order, and only when their checksum was right.
//!
//! [`Position`]: wire::agent::transfer::Position

mod channel;
mod destination;
mod error;
mod file;
mod observer;
mod partial;
mod receive;
mod remove;
mod send;
mod source;
mod walk;

pub use channel::{Channel, STALL_TIMEOUT};
pub use destination::{Destination, Target};
pub use error::Stop;
pub use observer::{Arrival, Observer, Silent};
pub use partial::LeftOver;
pub use receive::{Arrived, Receive, receive};
pub use send::{Send, send};
pub use source::Source;

#[cfg(test)]
mod tests;
