use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::{self, NonNull};

/// Registers of a device, as the system shows them in a file: a `resource` of a PCI device in sysfs, for a driver in user
/// space. Every access is one volatile access of its own width, in the order of the program.
///
/// Registers are little-endian, as everything in virtio 1 is (virtio 1.2, section 4.1.3.1).
#[derive(Debug)]
pub struct Window {
    base: NonNull<u8>,
    /// In bytes.
    len: usize,
}

// SAFETY: registers belong to no thread; they are accessed through raw pointers only.
unsafe impl Send for Window {}

macro_rules! accessors {
    ($load:ident, $store:ident, $integer:ty) => {
        /// Reads a register.
        ///
        /// # Panics
        /// If it is not all in the window, or not at a multiple of its width.
        pub fn $load(&self, offset: usize) -> $integer {
            let place = self.place(offset, size_of::<$integer>()).cast();
            // SAFETY: the place is inside the mapping, which lives as long as `self`, and aligned. What the device makes of being
            // read does not concern memory of this process.
            <$integer>::from_le(unsafe { ptr::read_volatile(place) })
        }

        /// Writes a register.
        ///
        /// # Panics
        /// If it is not all in the window, or not at a multiple of its width.
        pub fn $store(&self, offset: usize, value: $integer) {
            let place = self.place(offset, size_of::<$integer>()).cast();
            // SAFETY: as for the load. No Rust object is behind the place.
            unsafe { ptr::write_volatile(place, value.to_le()) };
        }
    };
}

impl Window {
    /// Maps `len` bytes of the file, from its beginning on.
    pub fn map(file: &File, len: usize) -> io::Result<Window> {
        if len == 0 {
            return Err(io::Error::from(io::ErrorKind::InvalidInput));
        }
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a new mapping at a place that the kernel chooses touches nothing that exists.
        let base = unsafe {
            libc::mmap(
                ptr::null_mut(),
                len,
                protection,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base =
            NonNull::new(base.cast()).expect("mmap places nothing at address zero unless asked to");
        Ok(Window { base, len })
    }

    accessors!(load_u8, store_u8, u8);
    accessors!(load_u16, store_u16, u16);
    accessors!(load_u32, store_u32, u32);

    fn place(&self, offset: usize, width: usize) -> *mut u8 {
        assert!(
            offset < self.len && self.len - offset >= width && offset % width == 0,
            "a register of {width} bytes at {offset} in a window of {}",
            self.len
        );
        // SAFETY: the offset was just found to lie inside the mapping.
        unsafe { self.base.as_ptr().add(offset) }
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and nothing else refers to it.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use std::os::unix::fs::FileExt;

    use super::super::Arena;
    use super::*;

    #[test]
    fn registers_are_little_endian_and_of_their_width() {
        let arena = Arena::new(4096).unwrap();
        let window = Window::map(arena.file(), 4096).unwrap();
        window.store_u32(8, 0x0403_0201);
        window.store_u16(12, 0x0605);
        window.store_u8(14, 7);
        let mut bytes = [0; 8];
        arena.file().read_exact_at(&mut bytes, 8).unwrap();
        assert_eq!(bytes, [1, 2, 3, 4, 5, 6, 7, 0]);
        assert_eq!(window.load_u32(8), 0x0403_0201);
        assert_eq!(window.load_u16(10), 0x0403);
        assert_eq!(window.load_u8(13), 6);
        window.store_u32(4092, 1);
    }

    #[test]
    #[should_panic = "a register of 4 bytes at 4093"]
    fn a_register_that_is_not_all_inside_is_refused() {
        let arena = Arena::new(4096).unwrap();
        let window = Window::map(arena.file(), 4096).unwrap();
        window.load_u32(4093);
    }

    #[test]
    #[should_panic = "a register of 2 bytes at 7"]
    fn a_register_across_its_alignment_is_refused() {
        let arena = Arena::new(4096).unwrap();
        Window::map(arena.file(), 4096).unwrap().store_u16(7, 0);
    }

    #[test]
    fn an_empty_window_is_refused() {
        let arena = Arena::new(4096).unwrap();
        assert!(Window::map(arena.file(), 0).is_err());
    }
}
