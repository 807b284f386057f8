//! The driver's side of a virtqueue: a guest in user space.
//!
//! For tests, fuzzers and benches. An [`Arena`] is the guest's memory, a [`DriverQueue`] does with a queue in it what Linux's
//! `virtio_ring` does: a free list of descriptors, indirect tables, event indices, a kick only when the device wants
//! one; a [`StreamQueue`] does one thing only, and fast. For hostile tests it also writes to any field of the queue ([`DriverQueue::set_available_index`] and its like).
//!
//! It is no part of what faces a guest. Misuse panics, as it should in a test.

mod arena;
mod packed;
mod queue;
mod split;
mod stream;
mod tables;
#[cfg(not(miri))]
mod window;

pub use arena::Arena;
pub use queue::{DriverQueue, Full, RawDescriptor};
pub use stream::{Returned, StreamOptions, StreamQueue};
#[cfg(not(miri))]
pub use window::Window;
