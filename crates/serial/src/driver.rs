//! One thread that runs a link over a port's descriptor and the sockets of its channels.
//!
//! Each turn takes what the port has, hands it to the sockets, fetches from the sockets what the port takes, and writes it. Then the thread sleeps in
//! one poll until a descriptor or a timer has something. A descriptor that has nothing to say for the moment is not polled: a port without its other
//! end says so without pause, and so does a socket whose program is gone while its last bytes wait for credit.

mod line;
mod runner;
mod socket;

use std::fmt;
use std::io;
use std::os::fd::OwnedFd;
#[cfg(test)]
use std::sync::atomic::AtomicU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, eventfd};
use wire::serial::{Refusal, RefusalKind};

use crate::port::{Options, Port, Status, Stream};
use runner::Runner;

/// Called once from the driver's thread when the peer has answered. If it accepted, nothing has been written to the socket yet, and nothing is read
/// from or written to it before this returns. It must not wait.
pub type Answered = Box<dyn FnOnce(Result<(), Refusal>) + Send>;

/// Dials that may wait for the driver's thread. Further ones are refused at once.
const MAX_DIALS_WAITING: usize = 1024;

/// Starts drivers.
#[derive(Debug)]
pub struct Driver;

impl Driver {
    /// Starts a thread for this port.
    ///
    /// # Errors
    /// The system has no thread or no descriptors left.
    pub fn start(name: &str, port: Box<dyn Port>, options: Options) -> io::Result<Handle> {
        let shared = Arc::new(Shared {
            dials: Mutex::new(Vec::new()),
            is_stopping: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            status: Mutex::new(Status::default()),
            #[cfg(test)]
            turns: AtomicU64::new(0),
        });
        let runner = Runner::new(port, options, Arc::clone(&shared))?;
        let thread = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || runner.run())?;
        Ok(Handle {
            shared,
            thread: Some(thread),
        })
    }
}

/// What a driver's thread and its handle share.
struct Shared {
    dials: Mutex<Vec<Dial>>,
    is_stopping: AtomicBool,
    wake: OwnedFd,
    status: Mutex<Status>,
    /// How often the thread has slept, for the test that an idle one does.
    #[cfg(test)]
    turns: AtomicU64,
}

impl Shared {
    fn wake(&self) {
        // It only fails if the thread was woken often enough already.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    fn take_dials(&self) -> Vec<Dial> {
        std::mem::take(&mut *self.dials.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A channel to be opened.
struct Dial {
    port: u32,
    stream: Stream,
    answered: Answered,
}

/// A running driver. It ends when this is dropped, or by [`Handle::stop`].
pub struct Handle {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl fmt::Debug for Handle {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = formatter.debug_struct("Handle");
        shown
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}

impl Handle {
    /// Opens a channel to a port of the peer for this stream, which the driver owns from here on. If the channel is refused the socket is
    /// closed after `answered` was called. Where there is no peer, that is at once.
    pub fn dial(&self, port: u32, stream: Stream, answered: Answered) {
        let mut dials = self
            .shared
            .dials
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if dials.len() < MAX_DIALS_WAITING {
            dials.push(Dial {
                port,
                stream,
                answered,
            });
            drop(dials);
            self.shared.wake();
        } else {
            drop(dials);
            let words = "too many connections to the serial port are being made";
            answered(Err(Refusal::new(RefusalKind::Busy, words)));
        }
    }

    /// How the link is doing.
    pub fn status(&self) -> Status {
        *self
            .shared
            .status
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Resets all channels, closes the port and waits for the thread.
    pub fn stop(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.shared.is_stopping.store(true, Ordering::Release);
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // A panic was printed where it happened, and there is nothing left to clean up.
            let _ = thread.join();
        }
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.end();
    }
}

#[cfg(test)]
mod tests;
