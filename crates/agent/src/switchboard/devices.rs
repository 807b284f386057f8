//! Windows as the kernel shows them: device-DAX on virtio-pmem.
//!
//! A window is a device `daxA.B` of the bus `nd`, which has a UUID, and below it one `daxC.D` of the bus `dax`, of which there is the node `/dev/daxC.D`.
//!
//! **Taking a window away** is to unbind the device of the bus *nd* from its driver, and to bind it again. Then the kernel has removed the `dax` device and made a new one: a mapping of the
//! old one raises SIGBUS for ever, and its descriptor cannot be mapped any more. It would not do to unbind the `dax` device from `device_dax`: when that is bound again,
//! mappings and descriptors from before are as good as new, and a program that had kept one would read what the next circuit writes.
//!
//! Unbinding waits until no program has pages of the window pinned (a program can, with `vmsplice` or io_uring), so it can take as long as that program lives.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::fs::{Mode, OFlags};
use wire::switchboard::{Hex16, window};

/// The most windows that are checked.
pub(super) const MAX_WINDOWS: usize = 64;

/// The most entries of a directory of devices that are read.
const MAX_ENTRIES: usize = 1024;

/// The driver of the bus `nd` that makes `dax` devices.
const DRIVER: &str = "bus/nd/drivers/dax_pmem";

/// Owner of the node of a window: root. Programs get descriptors.
const NODE_MODE: u32 = 0o600;

/// How long a device may take to appear or to go once the kernel was asked, and to be opened. Of the first open after that, the
/// kernel sometimes says that there is no such device.
const PATIENCE: Duration = Duration::from_secs(5);

/// How often that is checked. There is nothing to wait for: the kernel has done it when it returns, but for that first open.
const LOOK: Duration = Duration::from_millis(2);

/// Where the kernel shows devices.
#[derive(Debug, Clone)]
pub(super) struct Devices {
    sysfs: PathBuf,
    nodes: PathBuf,
}

/// A window that is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Device {
    /// Its name for the host.
    pub(super) uuid: Hex16,
    /// Its name on the bus `nd`.
    pub(super) name: String,
}

impl Default for Devices {
    fn default() -> Devices {
        Devices::at("/sys", "/dev")
    }
}

impl Devices {
    pub(super) fn at(sysfs: impl Into<PathBuf>, nodes: impl Into<PathBuf>) -> Devices {
        Devices {
            sysfs: sysfs.into(),
            nodes: nodes.into(),
        }
    }

    /// All windows. In a guest without such devices there are none.
    pub(super) fn list(&self) -> Vec<Device> {
        let Ok(entries) = fs::read_dir(self.sysfs.join("bus/nd/devices")) else {
            return Vec::new();
        };
        let mut found: Vec<Device> = Vec::new();
        for entry in entries.take(MAX_ENTRIES).flatten() {
            let Some(name) = dax_name(&entry.file_name()) else {
                continue;
            };
            let text = crate::guest::read_limited(&entry.path().join("uuid"), 64);
            let uuid = text.ok().and_then(|text| {
                Hex16::parse_hyphenated(&String::from_utf8_lossy(&text)).filter(window::is_name)
            });
            let Some(uuid) = uuid else {
                continue;
            };
            // Two with one name cannot be distinguished: the first is as good.
            if found.len() < MAX_WINDOWS && found.iter().all(|known| known.uuid != uuid) {
                found.push(Device { uuid, name });
            }
        }
        found
    }

    /// Takes a window away from the programs that have it mapped, and gives its length in bytes. Waits as long as the kernel does.
    ///
    /// # Errors
    /// The kernel's reason: then a program may have it mapped still.
    pub(super) fn reset(&self, name: &str) -> io::Result<u64> {
        let device = self.device(name);
        let driver = self.sysfs.join(DRIVER);
        if device.join("driver").exists() {
            tell(&driver.join("unbind"), name)?;
            eventually(|| match device.join("driver").exists() {
                true => Err(not_done("the kernel has not unbound it")),
                false => Ok(()),
            })?;
        }
        tell(&driver.join("bind"), name)?;
        let child = eventually(|| self.child(name))?;
        self.keep_to_ourselves(&child)?;
        // What it takes after it was bound is over before it is wanted.
        drop(self.open(name)?);
        let text = crate::guest::read_limited(&device.join(&child).join("size"), 32)?;
        let text = String::from_utf8_lossy(&text);
        let len = text.trim().parse();
        len.map_err(|_| not_done("its size is no number"))
    }

    /// Opens a window for a program.
    pub(super) fn open(&self, name: &str) -> io::Result<OwnedFd> {
        eventually(|| {
            let node = self.nodes.join(self.child(name)?);
            let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NOFOLLOW;
            Ok(rustix::fs::open(node, flags, Mode::empty())?)
        })
    }

    /// What becomes readable when there may be a new device.
    pub(super) fn watch(&self) -> io::Result<OwnedFd> {
        let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
        inotify::add_watch(&watch, &self.nodes, WatchFlags::CREATE)?;
        Ok(watch)
    }

    fn device(&self, name: &str) -> PathBuf {
        self.sysfs.join("bus/nd/devices").join(name)
    }

    /// The name of the `dax` device of a window, which its node has too.
    fn child(&self, name: &str) -> io::Result<String> {
        let entries = fs::read_dir(self.device(name))?;
        let mut names = entries.take(MAX_ENTRIES).flatten();
        let found = names.find_map(|entry| {
            dax_name(&entry.file_name()).filter(|_| entry.path().join("size").exists())
        });
        found.ok_or_else(|| io::ErrorKind::NotFound.into())
    }

    /// The node is root's alone, whatever a rule of the guest's device manager thinks of it.
    fn keep_to_ourselves(&self, child: &str) -> io::Result<()> {
        let node = self.nodes.join(child);
        let metadata = eventually(|| fs::symlink_metadata(&node))?;
        let kind = metadata.file_type();
        if !kind.is_char_device() && !kind.is_file() {
            return Err(not_done("its node is no device"));
        }
        let own = rustix::process::geteuid().as_raw();
        if metadata.uid() != own {
            std::os::unix::fs::lchown(&node, Some(own), None)?;
        }
        if metadata.permissions().mode() & 0o777 != NODE_MODE {
            fs::set_permissions(&node, fs::Permissions::from_mode(NODE_MODE))?;
        }
        Ok(())
    }
}

/// `dax`, a number, a dot and a number.
fn dax_name(name: &std::ffi::OsStr) -> Option<String> {
    let name = name.to_str()?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let (first, second) = name.strip_prefix("dax")?.split_once('.')?;
    (is_number(first) && is_number(second)).then(|| name.to_owned())
}

/// A word for the kernel.
fn tell(attribute: &Path, word: &str) -> io::Result<()> {
    let mut file: File = OpenOptions::new().write(true).open(attribute)?;
    file.write_all(word.as_bytes())
}

fn not_done(words: &'static str) -> io::Error {
    io::Error::other(words)
}

/// Tries until it works.
fn eventually<T>(mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match attempt() {
            Err(_) if Instant::now() < deadline => std::thread::sleep(LOOK),
            result => return result,
        }
    }
}

#[cfg(test)]
mod tests;
