//! The rings of a zero-copy circuit: one window of shared memory for each connection, and two byte rings in it, one each way.
//!
//! # Theory of operation
//!
//! The maker of a window writes its header and hands the file to two parties. Each maps it with [`Window::attach`] and takes its two ends by
//! [`Window::split`]: a [`Producer`] of one ring, a [`Consumer`] of the other.
//!
//! A ring has two running counts of bytes, *head* (produced) and *tail* (released), each written by one end only. The bytes between them belong to
//! the consumer, the others to the producer. A count is published with release and read with acquire, so an end that sees the count sees the bytes.
//!
//! **Sleeping.** An idle end may busy-poll or sleep. Before it sleeps it writes at which count of the other end it wants to be woken (its *event*, as
//! in virtio's event index), and checks once more behind a full fence. The other end publishes its count and reads the event, with a full fence in
//! between. So one of the two sees the other: either the sleeper finds the new count, or the publisher finds the event and answers `true`, which
//! means "wake the other side now". The caller does the waking. While no end sleeps, the event's cache line does not change, and reading it costs
//! nothing.
//!
//! **Ends.** Beside its count each end has a state: open, finished (no more bytes come, or no more are wanted: a half-close), or reset. Finished is
//! written after the last count and read before it: an end that sees it, and then finds no byte, has seen all. A change of state always wakes the
//! other side, whatever its event is.
//!
//! # Trust
//!
//! The other party can write anywhere in the window at any time. So an end keeps its own count privately and never reads it back; it reads the
//! other's once, and checks it: it may not go back, nor be further on than there were bytes or is room. Anything else is an error that ends the
//! connection. Nothing that the peer writes is used as an address or a length without that check. The bytes themselves can change even after they
//! were published: they are copied out before they are judged, and no reference to them is ever made, see [`Span`]. With a false event a peer can
//! cause needless wake-ups, one for each publication, and on its own circuit only.
//!
//! When the pages of a window are taken away (its device was unbound, its file truncated), [`guestmem::fault`] puts empty memory in their place, and
//! what is published or released after fails with [`CircuitError::Revoked`].
//!
//! # Racing bytes
//!
//! The copies are made as in [`guestmem`], for the reasons given there. Miri runs the rings with ordinary memory in place of a mapped file:
//! `MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-permissive-provenance -Zmiri-ignore-leaks" cargo +nightly miri test -p ringdown-shmring --lib`.
//! `loom` enumerates what the two ends on two threads can see of each other: `make interleavings`.
//!
//! # Limits
//!
//! A ring has [`MIN_RING_LEN`] to [`MAX_RING_LEN`] bytes. Counts have 64 bits and would wrap after some thirty years at 20 GB/s; nothing goes wrong then.
//!
//! # Rings that never end
//!
//! The rings' pages are mapped twice in a row, so that a span that goes over a ring's end goes on in the second mapping: every span is contiguous. Where pages
//! are larger than the ring that cannot be, and spans have two pieces there.

#[cfg(all(feature = "hostile", not(loom)))]
pub mod bare;
mod error;
#[cfg_attr(loom, allow(dead_code))] // A modelled window has no header.
mod layout;
mod ring;
#[cfg_attr(loom, path = "span/modelled.rs")]
mod span;
mod spec;
mod sync;
#[cfg_attr(loom, path = "window/modelled.rs")]
mod window;

#[cfg(test)]
#[cfg(loom)]
#[path = "tests/interleavings.rs"]
mod interleavings;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

pub use error::{CircuitError, WindowError};
pub use ring::{Consumer, Peeked, Producer, Reservation};
pub use span::Span;
pub use spec::{
    Identity, Kind, MAX_PAGE_LEN, MAX_RING_LEN, MIN_RING_LEN, Side, WindowSpec, system_page_len,
};
pub use window::Window;
