//! What outlives the daemon.
//!
//! A VMM does not connect again when its vhost-user socket is closed, so a daemon that ends would cut every guest off. The *keeper* is a second process
//! that has copies of the daemon's descriptors, each set of them under a key and with bytes that only the daemon understands. The kernel closes a socket
//! when the last copy goes: the VMM sees nothing of the daemon's end, and the next daemon gets all items and goes on.
//!
//! The keeper reads nothing that a guest or a VMM wrote, and nothing of the items. It serves one daemon at a time, of its own user.
//!
//! # Protocol
//!
//! Messages on a UNIX socket of type SEQPACKET, of [`MAX_MESSAGE_BYTES`] at most: a byte that says which it is, the key's length in bytes (16 bits, little endian),
//! the key, and the value. Descriptors go along (`SCM_RIGHTS`).
//!
//! | message | from | meaning |
//! | --- | --- | --- |
//! | `A` | daemon | attach: the answer is every item (`P`) and then `E`, or `B` if another daemon is attached. The value of `E` is for how long none was attached, in milliseconds (64 bits, little endian), if one was before. A daemon that has ended, but of which the kernel does not let go, is attached no more |
//! | `P` | both | an item: key, value, descriptors. It replaces the one with this key |
//! | `D` | daemon | drop the item with this key |
//! | `R` | anyone | release: drop all and end. The answer is `E`, or `B` if a daemon is attached |
//!
//! There is no answer to `P` and `D`: what was sent is received though the sender ends.

mod client;
mod hold;
mod message;

pub use client::{Item, Keeper, KeeperError, release};
pub use hold::{HoldError, Holder};
pub use message::MAX_MESSAGE_BYTES;

#[cfg(test)]
mod tests;
