//! What the threads of one measurement share: its phase, its meters, and the way to end it.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Everything runs, and nothing counts yet.
pub const WARM_UP: u8 = 0;
/// What happens now counts.
pub const MEASURE: u8 = 1;
/// All threads end.
pub const STOP: u8 = 2;

/// Streams that have a meter of their own.
pub const MAX_METERS: usize = 64;

/// A counter in a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
pub struct Meter(AtomicU64);

impl Meter {
    /// Counts up. Only one thread may do so.
    pub fn add(&self, count: u64) {
        // No other thread writes: a plain addition does.
        let value = self.0.load(Ordering::Relaxed);
        self.0.store(value + count, Ordering::Relaxed);
    }

    /// Sets the value.
    pub fn set(&self, value: u64) {
        self.0.store(value, Ordering::Relaxed);
    }

    /// The value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

/// What a guest's driver counts.
#[derive(Debug, Default)]
pub struct DriverMeters {
    /// Notifications to the device.
    pub kicks: Meter,
    /// Notifications from the device.
    pub interrupts: Meter,
    /// Packets to the device.
    pub packets_out: Meter,
    /// Packets from the device.
    pub packets_in: Meter,
}

/// Shared by the threads of one measurement.
#[derive(Debug)]
pub struct Control {
    phase: AtomicU8,
    failed: AtomicBool,
    failure: Mutex<Option<String>>,
    wakers: Mutex<Vec<Waker>>,
    /// How long a dial or an answer may take before it counts as never coming.
    pub patience: Duration,
    /// Bytes received, by stream; streams beyond the last share with others of the same thread.
    pub received: Vec<Meter>,
    /// Round trips, or connections made.
    pub operations: Vec<Meter>,
    /// By guest.
    pub drivers: Vec<DriverMeters>,
}

#[derive(Debug)]
enum Waker {
    Event(OwnedFd),
    Socket(UnixStream),
}

impl Control {
    /// For this many guests.
    pub fn new(guests: usize, patience: Duration) -> Control {
        Control {
            phase: AtomicU8::new(WARM_UP),
            failed: AtomicBool::new(false),
            failure: Mutex::new(None),
            wakers: Mutex::new(Vec::new()),
            patience,
            received: (0..MAX_METERS).map(|_| Meter::default()).collect(),
            operations: (0..MAX_METERS).map(|_| Meter::default()).collect(),
            drivers: (0..guests).map(|_| DriverMeters::default()).collect(),
        }
    }

    /// [`WARM_UP`], [`MEASURE`] or [`STOP`].
    pub fn phase(&self) -> u8 {
        self.phase.load(Ordering::Relaxed)
    }

    /// Whether what happens now counts.
    pub fn counts(&self) -> bool {
        self.phase() == MEASURE
    }

    /// Whether all threads are to end.
    pub fn stopped(&self) -> bool {
        self.phase() == STOP
    }

    /// From now on, everything counts.
    pub fn start_to_measure(&self) {
        // A failure has stopped it already.
        let _ = self
            .phase
            .compare_exchange(WARM_UP, MEASURE, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Ends the measurement: wakes all waiting threads.
    pub fn stop(&self) {
        self.phase.store(STOP, Ordering::Release);
        let wakers = self.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        for waker in wakers.iter() {
            // A thread that is gone needs no waking.
            match waker {
                Waker::Event(event) => drop(rustix::io::write(event, &1_u64.to_ne_bytes())),
                Waker::Socket(socket) => drop(socket.shutdown(std::net::Shutdown::Both)),
            }
        }
    }

    /// The measurement has failed, and ends.
    pub fn fail(&self, reason: impl Into<String>) {
        if self.stopped() {
            return;
        }
        let mut failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.get_or_insert(reason.into());
        self.failed.store(true, Ordering::Release);
    }

    /// What went wrong, if anything did.
    pub fn failure(&self) -> Option<String> {
        if !self.failed.load(Ordering::Acquire) {
            return None;
        }
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner);
        failure.clone()
    }

    /// This event counter is written to at the end.
    pub fn wake_event(&self, event: OwnedFd) {
        self.add_waker(Waker::Event(event));
    }

    /// This socket is shut down at the end.
    pub fn wake_socket(&self, socket: UnixStream) {
        self.add_waker(Waker::Socket(socket));
    }

    fn add_waker(&self, waker: Waker) {
        let mut wakers = self.wakers.lock().unwrap_or_else(PoisonError::into_inner);
        if self.stopped() {
            if let Waker::Socket(socket) = &waker {
                // It may be gone.
                let _ = socket.shutdown(std::net::Shutdown::Both);
            }
        }
        wakers.push(waker);
    }

    /// Bytes received by all.
    pub fn bytes(&self) -> u64 {
        self.received.iter().map(Meter::get).sum()
    }

    /// Operations of all.
    pub fn operation_count(&self) -> u64 {
        self.operations.iter().map(Meter::get).sum()
    }
}
