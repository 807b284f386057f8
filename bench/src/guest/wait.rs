//! Waiting for devices.

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use thiserror::Error;

use super::VirtualGuest;
use crate::frontend::{RX, TX};

/// A condition is checked again after this time, since it may depend on other threads.
const SLICE: Duration = Duration::from_millis(5);

/// It took too long.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("it took too long")]
pub struct TimedOut;

/// Services guests until a condition holds, which may act on them, too.
///
/// # Errors
/// [`TimedOut`] when it does not hold within `patience`.
pub fn drive<T>(
    guests: &mut [&mut VirtualGuest],
    patience: Duration,
    mut until: impl FnMut(&mut [&mut VirtualGuest]) -> Option<T>,
) -> Result<T, TimedOut> {
    let deadline = Instant::now() + patience;
    loop {
        for guest in guests.iter_mut() {
            guest.service();
        }
        if let Some(value) = until(guests) {
            return Ok(value);
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(TimedOut);
        }
        let guests = guests.iter().map(|guest| &**guest);
        wait(guests, None, left.min(SLICE));
    }
}

/// Waits for an interrupt of one of the guests, or until this descriptor of the caller's is readable; a few milliseconds at most.
pub fn wait_also<'a>(
    guests: impl IntoIterator<Item = &'a VirtualGuest>,
    descriptor: Option<BorrowedFd<'a>>,
) {
    wait(guests, descriptor, SLICE);
}

fn wait<'a>(
    guests: impl IntoIterator<Item = &'a VirtualGuest>,
    descriptor: Option<BorrowedFd<'a>>,
    limit: Duration,
) {
    let mut wanted: Vec<PollFd<'_>> = guests
        .into_iter()
        .flat_map(|guest| [RX, TX].map(|index| &guest.rings.calls[index]))
        .map(|call| PollFd::new(call, PollFlags::IN))
        .collect();
    wanted.extend(descriptor.map(|descriptor| PollFd::from_borrowed_fd(descriptor, PollFlags::IN)));
    let limit = Timespec {
        tv_sec: 0,
        tv_nsec: limit.subsec_nanos().into(),
    };
    // Whatever ends it, the guests are polled next.
    let _ = poll(&mut wanted, Some(&limit));
}
