//! Asking for memory before it is wanted.
//!
//! What another processor wrote last takes a hundred cycles and more to arrive. One such wait hides little; a batch of frames whose beginnings were
//! all asked for when their chains were taken waits once.
//!
//! They are asked for into the second level of the cache: a batch of 256 frames has 32 KiB of beginnings, which would leave little else in the
//! first. With a driver on another processor, a frame of 64 bytes from ring to ring, 256 at a time, took 57 ns without, 45 ns with the first
//! level and 38 ns with the second.

/// Bytes that arrive together.
const LINE_LEN: usize = 64;

/// What will be done with what is asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Use {
    /// It will be read.
    Read,
    /// It will be written: other processors had better forget it now.
    Write,
}

/// Asks for the beginning of a piece of `len` bytes: the two lines in which a packet's headers lie. It has no effect that a program could
/// observe, and where the processor knows no such thing it does nothing.
#[inline]
pub(crate) fn beginning(piece: *const u8, len: usize, to: Use) {
    line(piece, to);
    if len > LINE_LEN {
        line(piece.wrapping_add(LINE_LEN), to);
    }
}

#[inline]
fn line(place: *const u8, to: Use) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch};
        match to {
            // SAFETY: a prefetch is a hint; it reads nothing into the program and never faults, whatever the address.
            Use::Read => unsafe { _mm_prefetch::<_MM_HINT_T0>(place.cast()) },
            // SAFETY: as above.
            Use::Write => unsafe { _mm_prefetch::<_MM_HINT_ET0>(place.cast()) },
        }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = (place, to);
}
