//! The copies themselves.

use std::ptr;
use std::sync::atomic::{Ordering, compiler_fence};

use super::{GuestMemory, MemoryError, Range, Walk};

pub(super) fn read(
    memory: &GuestMemory,
    ranges: &[Range],
    offset: usize,
    into: &mut [u8],
) -> Result<(), MemoryError> {
    let mut source = Walk::new(memory, ranges, offset, into.len())?;
    let mut rest = into;
    while !rest.is_empty() {
        let (place, available) = source.here()?;
        let (piece, after) = rest.split_at_mut(available.min(rest.len()));
        // SAFETY: the source is mapped for at least as long as the piece is, since `available` bounds it, and the piece
        // is exclusively borrowed private memory.
        unsafe { move_bytes(place.as_ptr(), piece.as_mut_ptr(), piece.len()) };
        source.advance(piece.len());
        rest = after;
    }
    Ok(())
}

pub(super) fn write(
    memory: &GuestMemory,
    ranges: &[Range],
    offset: usize,
    from: &[u8],
) -> Result<(), MemoryError> {
    let mut target = Walk::new(memory, ranges, offset, from.len())?;
    let mut rest = from;
    while !rest.is_empty() {
        let (place, room) = target.here()?;
        let (piece, after) = rest.split_at(room.min(rest.len()));
        // SAFETY: the target is mapped for at least as long as the piece is, since `room` bounds it, and the piece is
        // private memory.
        unsafe { move_bytes(piece.as_ptr(), place.as_ptr(), piece.len()) };
        target.advance(piece.len());
        rest = after;
    }
    Ok(())
}

/// One `memmove` per pair of contiguous pieces.
pub(super) fn copy(
    mut source: Walk<'_>,
    mut target: Walk<'_>,
    len: usize,
) -> Result<(), MemoryError> {
    let mut left = len;
    while left > 0 {
        let (from, available) = source.here()?;
        let (to, room) = target.here()?;
        let step = available.min(room).min(left);
        // SAFETY: both places are mapped for at least `step` bytes, which bounds both.
        unsafe { move_bytes(from.as_ptr(), to.as_ptr(), step) };
        source.advance(step);
        target.advance(step);
        left -= step;
    }
    Ok(())
}

/// Moves bytes of which at least one side is shared. Overlap is allowed, since a guest may ask for a copy onto itself. (In the C
/// library `memmove` and `memcpy` are the same routine.)
///
/// The fences keep the optimiser from reading shared memory again, or earlier, in place of the copy: see "Racing bytes" at the
/// door of the crate.
///
/// # Safety
/// Both places are valid for `len` bytes, `from` for reads and `to` for writes.
#[inline]
unsafe fn move_bytes(from: *const u8, to: *mut u8, len: usize) {
    compiler_fence(Ordering::SeqCst);
    // SAFETY: the caller's promise.
    unsafe { ptr::copy(from, to, len) };
    compiler_fence(Ordering::SeqCst);
}
