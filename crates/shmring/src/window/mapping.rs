//! The pages of a window, in the order in which they are used here: the header, then each ring, twice in a row if its length allows.

use std::fs::File;
use std::os::unix::fs::FileTypeExt;
use std::ptr::NonNull;

use guestmem::fault::MAX_MAPPINGS;
use guestmem::guest::MemoryError;
use guestmem::span::{GuardedSpan, page_len};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

use super::Window;
use crate::error::WindowError;
use crate::layout::Layout;
use crate::spec::WindowSpec;

/// Pages of device DAX have this size, and nothing smaller can be mapped.
const DEVICE_PAGE_LEN: usize = 2 << 20;

pub(super) fn create(spec: &WindowSpec) -> Result<File, WindowError> {
    let layout = Layout::new(spec)?;
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(memfd_create("ringdown-circuit", flags).map_err(map_error)?);
    file.set_len(layout.window_len() as u64)
        .map_err(WindowError::Map)?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    fcntl_add_seals(&file, seals).map_err(map_error)?;
    Window::format(&file, 0, spec)?;
    Ok(file)
}

#[cfg(test)]
pub(super) fn pair(spec: &WindowSpec) -> (Mapping, Mapping) {
    let file = create(spec).unwrap();
    let map = || Mapping::new(&file, 0, spec).unwrap();
    (map(), map())
}

fn map_error(error: rustix::io::Errno) -> WindowError {
    WindowError::Map(error.into())
}

/// A span that cannot be had is no fault of the window's file.
fn span_error(error: MemoryError) -> WindowError {
    match error {
        MemoryError::Map(error) => WindowError::Map(error),
        MemoryError::TooManyMappings => WindowError::TooManyMappings { max: MAX_MAPPINGS },
        other => WindowError::File(other),
    }
}

#[derive(Debug)]
pub(super) struct Mapping {
    span: GuardedSpan,
    layout: Layout,
    is_mirrored: bool,
}

impl Mapping {
    pub(super) fn new(file: &File, offset: u64, spec: &WindowSpec) -> Result<Mapping, WindowError> {
        let metadata = file.metadata().map_err(WindowError::Map)?;
        let is_device = metadata.file_type().is_char_device();
        if !metadata.is_file() && !is_device {
            return Err(MemoryError::NotARegularFile.into());
        }
        let page_len = match is_device {
            true => DEVICE_PAGE_LEN,
            false => page_len(file)?,
        };
        let layout = Layout::new(spec)?;
        if layout.data_offset % page_len != 0 {
            return Err(WindowError::PageLen {
                found: spec.page_len,
                least: page_len as u64,
            });
        }
        if offset % page_len as u64 != 0 {
            return Err(WindowError::Misaligned { offset, page_len });
        }
        let needed = layout.window_len() as u64;
        // A device does not say how long it is; mapping too much of it fails.
        let found = metadata.len().saturating_sub(offset);
        let end = offset
            .checked_add(needed)
            .and_then(|end| i64::try_from(end).ok());
        if end.is_none() || (!is_device && found < needed) {
            return Err(WindowError::FileTooShort { needed, found });
        }

        let is_mirrored = layout.ring_len % page_len == 0;
        let copies = if is_mirrored { 2 } else { 1 };
        let len = layout.data_offset + (2 * copies * layout.ring_len).next_multiple_of(page_len);
        // Address space first, so that what follows goes to places that are ours, and becomes one span in the table.
        let span = GuardedSpan::reserve(len, page_len).map_err(span_error)?;
        let mut mapping = Mapping {
            span,
            layout,
            is_mirrored,
        };
        mapping.show(file, offset, copies)?;
        Ok(mapping)
    }

    /// Puts the file's pages into the span.
    fn show(&mut self, file: &File, offset: u64, copies: usize) -> Result<(), WindowError> {
        let Layout {
            ring_len,
            data_offset,
        } = self.layout;
        self.place(file, offset, 0, data_offset)?;
        let data = offset + data_offset as u64;
        if !self.is_mirrored {
            // Rings that are smaller than a page lie in the same one.
            return self.place(file, data, data_offset, self.span.len() - data_offset);
        }
        for ring in 0..2 {
            for copy in 0..copies {
                let at = data_offset + (copies * ring + copy) * ring_len;
                self.place(file, data + (ring * ring_len) as u64, at, ring_len)?;
            }
        }
        Ok(())
    }

    fn place(&mut self, file: &File, from: u64, at: usize, len: usize) -> Result<(), WindowError> {
        // SAFETY: the span was made with the length of this file's pages.
        unsafe { self.span.show(at, file, from, len) }.map_err(WindowError::Map)
    }

    pub(super) fn layout(&self) -> Layout {
        self.layout
    }

    #[inline]
    pub(super) fn header(&self) -> NonNull<u8> {
        self.span.base()
    }

    #[inline]
    pub(super) fn ring(&self, index: usize) -> NonNull<u8> {
        let copies = if self.is_mirrored { 2 } else { 1 };
        let offset = self.layout.data_offset + index * copies * self.layout.ring_len;
        assert!(index < 2, "a window has two rings");
        // SAFETY: both rings lie inside the span.
        unsafe { self.span.base().add(offset) }
    }

    #[inline]
    pub(super) fn is_mirrored(&self) -> bool {
        self.is_mirrored
    }

    #[inline]
    pub(super) fn is_poisoned(&self) -> bool {
        self.span.is_poisoned()
    }
}
