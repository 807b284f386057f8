//! A file whose lock is held.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::thread;

use crate::{Holding, faults, missing_memory};

/// A file whose lock is held: a program that writes to it sleeps until it is let go, and no signal wakes it.
///
/// A thread writes a byte to its end, from memory that is not provided. It gets there when this is dropped, and is zero.
pub struct HeldFile {
    _holding: Holding,
}

impl HeldFile {
    /// Holds it from now on. None, and a line that says so, where this user may not: root may.
    ///
    /// # Errors
    /// What the system says.
    pub fn at(file: &Path) -> io::Result<Option<HeldFile>> {
        let Some(faults) = faults()? else {
            return Ok(None);
        };
        let memory = missing_memory(&faults)?;
        let file = File::options().append(true).open(file)?;
        let writes = thread::spawn(move || {
            // SAFETY: the memory is mapped for good, and no other uses it.
            unsafe { libc::write(file.as_raw_fd(), memory as *const libc::c_void, 1) };
        });
        let _holding = Holding::until_fault(faults, writes)?;
        Ok(Some(HeldFile { _holding }))
    }
}
