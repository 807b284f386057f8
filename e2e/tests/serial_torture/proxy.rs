//! A proxy between the socket of QEMU's character device and the daemon, which cuts the connection on demand.
//!
//! Before it cuts, it passes on some of what it holds, at random, so that frames end anywhere, and drops the rest and all that still comes for a
//! while. What is in the buffers of its sockets is lost with them. When one side goes, it lets go of the other, as if both were connected directly.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::random::Random;

/// The most that it holds of each direction, in bytes, besides what is in the sockets' buffers.
const HELD_BYTES: u64 = 65_536;

/// For how long it drops what comes before it cuts, at most, in milliseconds.
const LONGEST_DROP_MS: u64 = 40;

/// The wait between two looks for a side that is not there.
const LOOK_INTERVAL: Duration = Duration::from_millis(2);

/// A running proxy. Dropping it ends the connection and its threads.
pub(crate) struct Proxy {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What has gone through it.
#[derive(Debug, Default)]
pub(crate) struct Figures {
    pub(crate) connections: AtomicU64,
    /// Both ways.
    pub(crate) passed_bytes: AtomicU64,
    pub(crate) dropped_bytes: AtomicU64,
}

struct Shared {
    /// Where the one side comes to.
    near: UnixListener,
    /// Where the other listens.
    far: PathBuf,
    is_over: AtomicBool,
    /// What comes is dropped.
    is_cutting: AtomicBool,
    /// Both ends of the connection, while there is one.
    connection: Mutex<Option<[UnixStream; 2]>>,
    random: Mutex<Random>,
    figures: Figures,
}

impl Proxy {
    /// Listens at `near` for the one side, and connects to the other at `far`.
    pub(crate) fn start(near: &Path, far: PathBuf, random: Random) -> io::Result<Proxy> {
        let near = UnixListener::bind(near)?;
        near.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            near,
            far,
            is_over: AtomicBool::new(false),
            is_cutting: AtomicBool::new(false),
            connection: Mutex::new(None),
            random: Mutex::new(random),
            figures: Figures::default(),
        });
        let for_thread = Arc::clone(&shared);
        let thread = Some(thread::spawn(move || for_thread.run()));
        Ok(Proxy { shared, thread })
    }

    /// What has gone through it so far.
    pub(crate) fn figures(&self) -> &Figures {
        &self.shared.figures
    }

    /// Bytes that went through it, both ways.
    pub(crate) fn passed_bytes(&self) -> u64 {
        self.figures().passed_bytes.load(Ordering::Relaxed)
    }

    /// Whether QEMU and the daemon are connected through it.
    pub(crate) fn is_connected(&self) -> bool {
        self.shared.connection().is_some()
    }

    /// Cuts the connection, if there is one, and returns when it is gone.
    pub(crate) fn cut(&self) {
        let shared = &self.shared;
        let number = shared.figures.connections.load(Ordering::Acquire);
        shared.is_cutting.store(true, Ordering::Release);
        thread::sleep(Duration::from_millis(shared.below(LONGEST_DROP_MS)));
        shared.close();
        while self.is_connected() && shared.figures.connections.load(Ordering::Acquire) == number {
            thread::sleep(LOOK_INTERVAL);
        }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Release);
        self.shared.close();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn run(&self) {
        while !self.is_over.load(Ordering::Acquire) {
            match self.meet() {
                Some([near, far]) => self.carry_both(&near, &far),
                None => thread::sleep(LOOK_INTERVAL),
            }
        }
    }

    /// A connection to each side. What the one says before the other is there waits for it.
    fn meet(&self) -> Option<[UnixStream; 2]> {
        let (near, _) = self.near.accept().ok()?;
        near.set_nonblocking(false).ok()?;
        while !self.is_over.load(Ordering::Acquire) {
            if let Ok(far) = UnixStream::connect(&self.far) {
                return Some([near, far]);
            }
            thread::sleep(LOOK_INTERVAL);
        }
        None
    }

    fn carry_both(&self, near: &UnixStream, far: &UnixStream) {
        let (Ok(near_too), Ok(far_too)) = (near.try_clone(), far.try_clone()) else {
            return;
        };
        self.is_cutting.store(false, Ordering::Release);
        self.figures.connections.fetch_add(1, Ordering::AcqRel);
        *self.connection() = Some([near_too, far_too]);
        if self.is_over.load(Ordering::Acquire) {
            self.close();
        }
        thread::scope(|scope| {
            scope.spawn(|| self.carry(near, far));
            self.carry(far, near);
        });
        *self.connection() = None;
    }

    /// Carries one direction until it ends, and ends the other then.
    fn carry(&self, mut from: &UnixStream, mut to: &UnixStream) {
        let mut buffer = vec![0; HELD_BYTES as usize];
        let mut is_cut = false;
        loop {
            let length = 1 + self.below(HELD_BYTES) as usize;
            let count = match from.read(&mut buffer[..length]) {
                Ok(0) | Err(_) => break,
                Ok(count) => count,
            };
            let kept = match (is_cut, self.is_cutting.load(Ordering::Acquire)) {
                (false, false) => count,
                (false, true) => self.below(count as u64 + 1) as usize,
                (true, _) => 0,
            };
            is_cut |= kept < count;
            if to.write_all(&buffer[..kept]).is_err() {
                break;
            }
            self.figures
                .passed_bytes
                .fetch_add(kept as u64, Ordering::Relaxed);
            let dropped = (count - kept) as u64;
            self.figures
                .dropped_bytes
                .fetch_add(dropped, Ordering::Relaxed);
        }
        self.close();
    }

    fn below(&self, limit: u64) -> u64 {
        let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
        random.below(limit)
    }

    fn close(&self) {
        for stream in self.connection().iter().flatten() {
            // It may have ended by itself.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    fn connection(&self) -> MutexGuard<'_, Option<[UnixStream; 2]>> {
        self.connection
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}
