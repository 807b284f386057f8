//! The pages of a window, in the order in which they are used here: the header, then each ring, twice in a row if its length allows.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileTypeExt;
use std::ptr::NonNull;

use super::super::layout::Layout;
use super::super::{WindowError, WindowSpec};
use super::Window;
use crate::fault::{self, MAX_MAPPINGS, Registration};
use crate::guest::MemoryError;
use crate::region::{AddressSpan, page_len};

/// Pages of device DAX have this size, and nothing smaller can be mapped.
const DEVICE_PAGE_LEN: usize = 2 << 20;

pub(super) fn create(spec: &WindowSpec) -> Result<File, WindowError> {
    let layout = Layout::new(spec)?;
    let flags = libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING;
    // SAFETY: the name is a string that ends with a zero.
    let descriptor = unsafe { libc::memfd_create(c"ringdown-circuit".as_ptr(), flags) };
    if descriptor < 0 {
        return Err(last_error());
    }
    // SAFETY: the descriptor was just made and is nobody else's.
    let file = unsafe { File::from_raw_fd(descriptor) };
    file.set_len(layout.window_len() as u64)
        .map_err(WindowError::Map)?;
    let seals = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
    // SAFETY: no memory is involved.
    if unsafe { libc::fcntl(descriptor, libc::F_ADD_SEALS, seals) } < 0 {
        return Err(last_error());
    }
    Window::format(&file, 0, spec)?;
    Ok(file)
}

#[cfg(test)]
pub(super) fn pair(spec: &WindowSpec) -> (Mapping, Mapping) {
    let file = create(spec).unwrap();
    let map = || Mapping::new(&file, 0, spec).unwrap();
    (map(), map())
}

/// What the system reported last.
fn last_error() -> WindowError {
    WindowError::Map(io::Error::last_os_error())
}

/// The order of the fields is the order of their drop: the span must have left the table before its addresses can be somebody else's.
#[derive(Debug)]
pub(super) struct Mapping {
    registration: Registration,
    span: AddressSpan,
    layout: Layout,
    is_mirrored: bool,
}

impl Mapping {
    pub(super) fn new(file: &File, offset: u64, spec: &WindowSpec) -> Result<Mapping, WindowError> {
        fault::install().map_err(WindowError::Map)?;
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
        if !is_device && found < needed {
            return Err(WindowError::FileTooShort { needed, found });
        }

        let is_mirrored = layout.ring_len % page_len == 0;
        let copies = if is_mirrored { 2 } else { 1 };
        let len = layout.data_offset + (2 * copies * layout.ring_len).next_multiple_of(page_len);
        // Address space first, so that what follows goes to places that are ours, and becomes one span in the table.
        let span = AddressSpan::reserve(len, page_len).map_err(WindowError::Map)?;
        let registration = fault::register(span.base().addr().get(), len, page_len)
            .ok_or(WindowError::TooManyMappings { max: MAX_MAPPINGS })?;
        let mapping = Mapping {
            registration,
            span,
            layout,
            is_mirrored,
        };
        mapping.show(file, offset, copies)?;
        Ok(mapping)
    }

    /// Puts the file's pages into the span.
    fn show(&self, file: &File, offset: u64, copies: usize) -> Result<(), WindowError> {
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

    fn place(&self, file: &File, from: u64, at: usize, len: usize) -> Result<(), WindowError> {
        assert!(at + len <= self.span.len(), "{len} at {at} of the span");
        let from = libc::off_t::try_from(from).map_err(|_| WindowError::FileTooShort {
            needed: from,
            found: 0,
        })?;
        // SAFETY: the place is inside the span.
        let place = unsafe { self.span.base().add(at) };
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        // SAFETY: what is replaced was reserved for this, and nothing points to it yet.
        let mapped = unsafe {
            libc::mmap(
                place.as_ptr().cast(),
                len,
                protection,
                flags,
                file.as_raw_fd(),
                from,
            )
        };
        if mapped == libc::MAP_FAILED {
            return Err(last_error());
        }
        // SAFETY: this changes nothing about the memory itself; what it says holds for the new mapping only, and a failure does no harm.
        unsafe { libc::madvise(mapped, len, libc::MADV_DONTDUMP) };
        Ok(())
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
        fault::count() != 0 && self.registration.is_poisoned()
    }
}
