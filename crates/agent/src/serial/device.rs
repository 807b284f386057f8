//! Finding a port by its name, and being notified when it comes.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::SerialPort;

/// Where udev names ports.
const BY_NAME: &str = "/dev/virtio-ports";

/// Where the kernel lists them, in guests without udev too.
const LIST: &str = "/sys/class/virtio-ports";

/// Where their devices are.
const DEVICES: &str = "/dev";

/// The most ports that are checked. The kernel has 31 for one device.
const MAX_PORTS: usize = 512;

/// A device is there before its name is: for so long after one came it is looked for again and again.
const SETTLING: Duration = Duration::from_secs(10);

/// Looks for a port.
#[derive(Debug)]
pub(super) struct Finder {
    port: SerialPort,
    /// Reports new devices, if the system can.
    watch: Option<OwnedFd>,
    settled_at: Option<Instant>,
    is_settling: bool,
}

impl Finder {
    pub(super) fn new(port: &SerialPort) -> Finder {
        let watch = match port {
            SerialPort::Named(_) => watch_devices().ok(),
            SerialPort::Socket(_) => None,
        };
        Finder {
            port: port.clone(),
            watch,
            settled_at: None,
            is_settling: true,
        }
    }

    /// What shows that there may be a port, once it is not to be expected at any moment.
    pub(super) fn awaited(&self) -> Option<BorrowedFd<'_>> {
        match self.is_settling {
            true => None,
            false => self.watch.as_ref().map(AsFd::as_fd),
        }
    }

    /// The port.
    ///
    /// # Errors
    /// `WouldBlock` if there is none; otherwise the system's reason.
    pub(super) fn open(&mut self, now: Instant) -> io::Result<OwnedFd> {
        let has_news = self.take_news();
        if has_news || self.settled_at.is_none() {
            self.settled_at = Some(now + SETTLING);
        }
        self.is_settling = self.settled_at.is_some_and(|at| now < at);
        let opened = match &self.port {
            SerialPort::Socket(path) => connect(path),
            SerialPort::Named(name) => find(name).and_then(|path| {
                let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC | OFlags::NOCTTY;
                Ok(rustix::fs::open(&path, flags, Mode::empty())?)
            }),
        };
        if opened.is_ok() {
            // When it is gone, another may come at any moment.
            self.settled_at = None;
            self.is_settling = true;
        }
        opened
    }

    /// Whether a device has come since the last time.
    fn take_news(&self) -> bool {
        let Some(watch) = &self.watch else {
            return false;
        };
        let mut events = [0; 4096];
        let mut has_news = false;
        while rustix::io::read(watch, &mut events).is_ok_and(|count| count > 0) {
            has_news = true;
        }
        has_news
    }
}

fn watch_devices() -> io::Result<OwnedFd> {
    let watch = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK)?;
    inotify::add_watch(&watch, DEVICES, WatchFlags::CREATE)?;
    Ok(watch)
}

fn find(name: &str) -> io::Result<PathBuf> {
    let named = Path::new(BY_NAME).join(name);
    if named.exists() {
        return Ok(named);
    }
    let none = || io::Error::from(io::ErrorKind::WouldBlock);
    let ports = std::fs::read_dir(LIST).map_err(|_| none())?;
    for port in ports.take(MAX_PORTS).flatten() {
        let its_name = crate::guest::read_limited(&port.path().join("name"), 256);
        let is_it = its_name.is_ok_and(|bytes| bytes.trim_ascii() == name.as_bytes());
        let device = Path::new(DEVICES).join(port.file_name());
        if is_it && device.exists() {
            return Ok(device);
        }
    }
    Err(none())
}

fn connect(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}
