//! Orderings and fences: those of the machine, or those of `loom`, which enumerates what other threads may see.
//!
//! Built with `--cfg loom` the fields of the rings and of the table of spans are loom's atomics, and the modules called `interleavings`
//! take the place of the other tests. Everything else stays as it is.

pub use std::sync::atomic::Ordering;

#[cfg(loom)]
use loom::sync::atomic::fence;
#[cfg(not(any(loom, all(target_arch = "x86_64", not(miri)))))]
use std::sync::atomic::fence;

/// The full fence: stores before it are visible to all threads before any load behind it.
///
/// On x86-64 a locked instruction, and not the `MFENCE` of [`std::sync::atomic::fence`]: either orders all that these rings are made of (Intel SDM, volume 3,
/// "Memory Ordering"), and the latter takes longer, as it orders more: a circuit's round trip
/// took 1.46 times that of a ring without checks with it, and takes 1.26 to 1.38 times that without.
#[inline]
pub fn full_fence() {
    #[cfg(all(target_arch = "x86_64", not(miri), not(loom)))]
    // SAFETY: the word on top of the stack is ours, and stays what it is; the compiler takes it that any memory may be read and written here.
    unsafe {
        std::arch::asm!("lock or dword ptr [rsp], 0");
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri), not(loom))))]
    fence(Ordering::SeqCst);
}
