//! Memory that a guest can write: its regions, its virtqueues, and the copies between them and sockets.
//!
//! Everything here is safe to call, whatever the guest, its virtual machine monitor (VMM) or the caller does, except for the few functions that
//! another crate with unsafe code needs. In layers, each of which imports only those above it:
//!
//! - [`sync`] and `prefetch` are fences and hints of the processor.
//! - [`fault`] keeps the process alive when a region's file is truncated under it.
//! - [`error`] says what can go wrong; [`span`] is about addresses of this process and the files shown there.
//! - [`region`] is one mapped region, [`area`] a checked stretch of it with the fields of a ring.
//! - [`guest`] maps the regions that a VMM hands over and copies bytes in, out, and from guest to guest.
//! - [`io`] lets a socket read from, and write to, guest memory without a copy of ours in between.
//! - [`journal`] has what a successor of this process goes on with: records that change together.
//! - [`queue`] is the device side of a virtqueue, split or packed (virtio 1.2, sections 2.7 and 2.8).
//!
//! The driver's side, for tests, fuzzers and benches, is the crate `guestmem-driver` in `testkit`.
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
//! - No slice and no reference to guest memory is ever made, so that the compiler never assumes that such bytes stay as they are. There are raw
//!   pointers, and for the fields of the rings an atomic that lives for a single access.
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
//! `MIRIFLAGS="-Zmiri-disable-isolation -Zmiri-permissive-provenance -Zmiri-ignore-leaks" cargo +nightly miri test -p ringdown-guestmem --lib`.
//!
//! `loom` enumerates what two threads that share a ring, or the table of spans in [`fault`], can see of each other: `make interleavings`.
//!
//! # Ownership of the mapping
//!
//! A region is unmapped when nothing refers to it any more: a queue and a snapshot of the memory hold it by reference count.
//! Removing a region from a memory therefore unmaps no page that is in use. A thread for nothing else unmaps it: the last reference to
//! a file of gigabytes takes the kernel as long to free as the file is large.

#[cfg_attr(loom, path = "area/modelled.rs")]
pub mod area;
pub mod crash;
pub mod error;
#[cfg_attr(miri, allow(dead_code))] // There are no mappings there, and no faults.
pub mod fault;
pub mod guest;
pub mod io;
pub mod journal;
pub mod queue;
pub mod region;
#[cfg(not(miri))]
pub mod span;
pub mod sync;

mod prefetch;

// A crate that imports this one has types of a second copy of it in the tests here: so the driver is a part of them, and names this crate as others do.
#[cfg(test)]
extern crate self as guestmem;
#[cfg(test)]
#[path = "../../../testkit/guestmem-driver/src/lib.rs"]
pub mod guestmem_driver;
