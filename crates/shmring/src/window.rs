//! A window, mapped.

use std::fs::File;
use std::sync::atomic::{AtomicU64, Ordering};

use self::mapping::Mapping;
use crate::error::{CircuitError, WindowError};
use crate::layout::{self, Layout};
use crate::span::Span;
use crate::spec::{Side, WindowSpec};
use crate::sync::store_and_fence;

#[cfg_attr(miri, path = "window/simulated.rs")]
mod mapping;

/// One mapped window. It is unmapped when both its ends are gone.
#[derive(Debug)]
pub struct Window {
    spec: WindowSpec,
    layout: Layout,
    mapping: Mapping,
}

impl Window {
    /// Makes a window in a memfd of its own, which can neither shrink nor grow any more. Map it with [`attach`](Self::attach), and hand the
    /// file to the other party.
    ///
    /// # Errors
    /// What is asked for is impossible, or what the system reports.
    pub fn create(spec: &WindowSpec) -> Result<File, WindowError> {
        mapping::create(spec)
    }

    /// Writes the header of a window: the owner of the file does it before each of its lives. Everything else in the header and the fields of the
    /// rings is set to zero. The caller zeroes the rings themselves if they hold bytes of earlier users.
    ///
    /// # Errors
    /// As [`attach`](Self::attach).
    pub fn format(file: &File, offset: u64, spec: &WindowSpec) -> Result<(), WindowError> {
        check(spec)?;
        let mapping = Mapping::new(file, offset, spec)?;
        let layout = mapping.layout();
        let window = Window {
            spec: *spec,
            layout,
            mapping,
        };
        for offset in (0..layout::HEADER_LEN).step_by(8) {
            window.store(offset, 0, Ordering::Relaxed);
        }
        for (offset, _, value) in header(spec, layout) {
            window.store(offset, value, Ordering::Release);
        }
        Ok(())
    }

    /// Maps the window that begins at `offset` in this file. The file is not needed after.
    ///
    /// The file must be an ordinary one in memory (a memfd, hugetlbfs) or a device that can be mapped (device DAX), and must be open for reading and writing.
    ///
    /// # Errors
    /// The header does not say what `spec` says; an offset that is no multiple of the page size; a file that is too short or of another
    /// kind; or what the system reports.
    pub fn attach(file: &File, offset: u64, spec: &WindowSpec) -> Result<Window, WindowError> {
        check(spec)?;
        let mapping = Mapping::new(file, offset, spec)?;
        let layout = mapping.layout();
        let window = Window {
            spec: *spec,
            layout,
            mapping,
        };
        for (offset, field, expected) in header(spec, layout) {
            let found = window.load(offset, Ordering::Acquire);
            if found != expected {
                return Err(WindowError::Header {
                    field,
                    found,
                    expected,
                });
            }
        }
        Ok(window)
    }

    /// Writes any word into the header, the fields of the rings included: what a hostile peer can do.
    #[cfg(feature = "hostile")]
    pub fn scribble(&self, offset: usize, value: u64) {
        self.store(offset, value, Ordering::SeqCst);
    }

    /// Any bytes of the ring that this side writes into: what a hostile peer can touch at any time.
    #[cfg(feature = "hostile")]
    pub fn any_span(&self, ring: Side, position: u64, len: usize) -> Span<'_> {
        self.span(ring, position, len)
    }

    /// One window in two mappings.
    #[cfg(test)]
    pub(super) fn pair(spec: &WindowSpec) -> (Window, Window) {
        let (first, second) = mapping::pair(spec);
        let window = |mapping: Mapping| Window {
            spec: *spec,
            layout: mapping.layout(),
            mapping,
        };
        (window(first), window(second))
    }

    /// What the window is like.
    pub fn spec(&self) -> &WindowSpec {
        &self.spec
    }

    /// Of one ring, in bytes.
    pub fn ring_len(&self) -> usize {
        self.layout.ring_len
    }

    /// Whether pages were taken away: what is read there is zeros now.
    #[inline]
    pub fn is_revoked(&self) -> bool {
        self.mapping.is_poisoned()
    }

    #[inline]
    pub(super) fn check_revoked(&self) -> Result<(), CircuitError> {
        match self.is_revoked() {
            true => Err(CircuitError::Revoked),
            false => Ok(()),
        }
    }

    #[inline]
    pub(super) fn generation(&self) -> u64 {
        self.spec.identity.generation
    }

    #[inline]
    pub(super) fn load(&self, offset: usize, ordering: Ordering) -> u64 {
        u64::from_le(self.field(offset).load(ordering))
    }

    #[inline]
    pub(super) fn store(&self, offset: usize, value: u64, ordering: Ordering) {
        self.field(offset).store(value.to_le(), ordering);
    }

    /// Stores with release, and goes on behind a full fence.
    #[inline]
    pub(super) fn publish(&self, offset: usize, value: u64) {
        store_and_fence(self.field(offset), value.to_le());
    }

    /// `len` bytes of a ring from a running count on. No more than the ring has.
    #[inline]
    pub(super) fn span(&self, ring: Side, position: u64, len: usize) -> Span<'_> {
        let ring_len = self.layout.ring_len;
        assert!(len <= ring_len, "a span of {len} in a ring of {ring_len}");
        let base = self.mapping.ring(ring.index());
        let start = (position & (ring_len as u64 - 1)) as usize;
        // SAFETY: the start lies inside the ring, which is mapped.
        let here = unsafe { base.add(start) };
        let first = match self.mapping.is_mirrored() {
            true => len,
            false => len.min(ring_len - start),
        };
        // SAFETY: from here on `first` bytes are mapped: up to the ring's end, or as many again behind it if it is mapped twice. The rest
        // lies at the ring's start, before the span's own, since the span is no longer than the ring. The window is mapped while it is borrowed.
        unsafe { Span::new(here, first, base, len - first) }
    }

    #[inline]
    fn field(&self, offset: usize) -> &AtomicU64 {
        assert!(
            offset % 8 == 0 && offset < layout::HEADER_LEN,
            "no field at {offset}"
        );
        // SAFETY: the offset lies inside the header, which is mapped.
        let place = unsafe { self.mapping.header().add(offset) };
        // SAFETY: the place is aligned, since the header begins at a page, and mapped for as long as `self` is borrowed; others access it at any time,
        // which an atomic allows.
        unsafe { AtomicU64::from_ptr(place.as_ptr().cast()) }
    }
}

fn check(spec: &WindowSpec) -> Result<(), WindowError> {
    let generation = spec.identity.generation;
    match (1..=layout::MAX_GENERATION).contains(&generation) {
        true => Ok(()),
        false => Err(WindowError::Generation { found: generation }),
    }
}

/// The fields of the header: their places, names and values. The magic comes last, so that a header without the rest has none.
fn header(spec: &WindowSpec, layout: Layout) -> [(usize, &'static str, u64); 7] {
    let nonce = u128::from_le_bytes(spec.identity.nonce);
    let version = u64::from(layout::VERSION) | u64::from(spec.kind.code()) << 32;
    [
        (layout::HEADER_VERSION_AND_KIND, "version and kind", version),
        (layout::HEADER_RING_LEN, "ring length", spec.ring_len),
        (
            layout::HEADER_DATA_OFFSET,
            "offset of the rings",
            layout.data_offset as u64,
        ),
        (
            layout::HEADER_GENERATION,
            "generation",
            spec.identity.generation,
        ),
        (layout::HEADER_NONCE, "nonce", nonce as u64),
        (layout::HEADER_NONCE + 8, "nonce", (nonce >> 64) as u64),
        (layout::HEADER_MAGIC, "magic", layout::MAGIC),
    ]
}
