//! Orderings and fences: those of the machine, or those of `loom`, which enumerates what other threads may see.
//!
//! Built with `--cfg loom` the fields of the rings and of the table of spans are loom's atomics, and the modules called `interleavings`
//! take the place of the other tests. Everything else stays as it is.

#[cfg(loom)]
pub(crate) use loom::sync::atomic::fence;
pub(crate) use std::sync::atomic::Ordering;
#[cfg(not(loom))]
pub(crate) use std::sync::atomic::fence;
