//! The store of a publisher.

#[cfg(not(loom))]
use std::sync::atomic::AtomicU64;

#[cfg(loom)]
use loom::sync::atomic::AtomicU64;

use guestmem::sync::Ordering;
#[cfg(not(all(target_arch = "x86_64", not(miri), not(loom))))]
use guestmem::sync::full_fence;

/// Stores a value with release, and behind it has the [full fence](guestmem::sync::full_fence): what a publisher does before it looks for a sleeper.
///
/// On x86-64 one exchange, which is locked by itself, in place of a store and a fence: the machine orders all loads behind it. The language alone would
/// not promise that for a relaxed load, so this is no more than x86-64's; what loom and Miri go through is the other branch.
#[inline]
pub(crate) fn store_and_fence(word: &AtomicU64, value: u64) {
    #[cfg(all(target_arch = "x86_64", not(miri), not(loom)))]
    {
        word.swap(value, Ordering::SeqCst);
        std::sync::atomic::compiler_fence(Ordering::SeqCst);
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri), not(loom))))]
    {
        word.store(value, Ordering::Release);
        full_fence();
    }
}
