//! Memory that another party can write: guest regions, virtqueues, and the copies between them and sockets.
//!
//! This is the one room of the house with `unsafe` code in it. Everything it offers to the others is safe to call,
//! whatever the guest, its virtual machine monitor (VMM) or the caller does:
//!
//! - [`guest`] maps the regions that a VMM hands over and copies bytes in, out, and from guest to guest.
//! - [`queue`] is the device side of a virtqueue, split or packed (virtio 1.2, sections 2.7 and 2.8).
//! - [`io`] lets a socket read from, and write to, guest memory without a copy of ours in between.
//! - [`circuit`] is a pair of byte rings in a window of shared memory: one connection between two programs.
//! - [`ethernet`] opens tap devices and packet sockets.
//! - [`fault`] keeps the process alive when a region's file is truncated under it.
//! - [`peer`] tells the groups of whoever is at the other end of a socket.
//! - [`supervise`] starts programs of which some system calls are answered here.
//! - `driver`, behind the feature of that name, plays the guest in user space for tests, fuzzers and benches.
//!
//! # Why the rings are written here
//!
//! There are good libraries for guest memory and for virtqueues (`vm-memory`, `virtio-queue`). They are not used, because
//! the rings are what this project exists for: completions out of order and published in batches, chains that stay
//! parked in the guest, a hostile layout reported with its numbers, no allocation and no lock per packet.
//!
//! # Racing bytes
//!
//! A guest can write to its memory at any time, also while we read it. Rust's memory model has no word for a writer
//! outside the program; within it, an unsynchronised read beside a write is a data race. What is done about it, as in
//! `vm-memory`:
//!
//! - No slice and no reference to guest memory is ever made, so that the compiler is never told that such bytes stay
//!   as they are. There are raw pointers, and for the fields of the rings an atomic that lives for a single access.
//! - Every field of a ring is read once, atomically, into a private variable; what was checked is what is used.
//! - Payload moves with the primitives behind `memcpy` and `memmove`, or in the kernel. Either may see a mixture of old and
//!   new bytes; nothing is concluded from them, since what arrives in private memory is plain bytes, for which every
//!   value is valid. A compiler fence on either side of the copy keeps the optimiser from reading the source again
//!   where the program reads its copy.
//!
//! What remains is a race in the letter between our copy and the guest's write, with a writer that the compiler cannot
//! see; its outcome is some bytes, and it is the guest that gets them wrong.
//!
//! Miri runs the copies and the rings, two threads over one ring included, with ordinary memory in place of a mapped file:
//! `MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-permissive-provenance -Zmiri-ignore-leaks" cargo +nightly miri test -p ringdown-memory --lib`.
//!
//! `loom` enumerates what two threads that share a ring, or the table of spans in [`fault`], can see of each other: `make interleavings`.
//!
//! # Ownership of the mapping
//!
//! A region is unmapped when nothing refers to it any more: a queue and a snapshot of the memory hold it by reference count.
//! Removing a region from a memory therefore unmaps no page that is in use. A thread for nothing else unmaps it: the last reference to
//! a file of gigabytes takes the kernel as long to free as the file is large.

pub mod circuit;
#[cfg(feature = "driver")]
pub mod driver;
#[cfg(not(any(miri, loom)))]
pub mod ethernet;
#[cfg_attr(miri, allow(dead_code))] // There are no mappings there, and no faults.
pub mod fault;
pub mod guest;
pub mod io;
pub mod peer;
pub mod queue;
#[cfg(not(any(miri, loom)))]
pub mod supervise;

#[cfg_attr(loom, path = "area/modelled.rs")]
mod area;
mod prefetch;
mod region;
mod sync;
