//! Looking again before sleeping.
//!
//! To be woken costs many times what it takes to handle a message, and so it pays to look for a while, if something comes soon. Whether it does is learned from what
//! happened last: looks that found something, and sleeps that were so short that a look would have, speak for it; looks in vain against it.
//! Where it never pays, it is tried ever again, seldom.

use std::hint::spin_loop;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

/// The most that speaks for looking; each vain look takes two away.
const MAX_CONFIDENCE: u8 = 8;
/// With no confidence left, one in so many waits looks all the same.
const TRY_AGAIN_AFTER: u8 = 32;
/// Between two reads of the clock.
const LOOKS_PER_CLOCK: u32 = 32;
/// A busy poller sees by the wake channel alone that the peer is gone: time for a poll there.
const SLICE: Duration = Duration::from_millis(5);

#[derive(Debug, Clone)]
pub(crate) struct Spin {
    most: Duration,
    confidence: u8,
    waits_without: u8,
}

impl Spin {
    /// Looks for up to so long. Forever, if that is the longest duration there is; never, where there is one processor.
    pub(crate) fn new(most: Duration) -> Spin {
        Spin {
            most: match has_one_processor() {
                true => Duration::ZERO,
                false => most,
            },
            confidence: MAX_CONFIDENCE / 2,
            waits_without: 0,
        }
    }

    /// Whether one looks all the time instead of sleeping, after each vain look taking one at the wake channel.
    pub(crate) fn never_sleeps(&self) -> bool {
        self.most == Duration::MAX
    }

    /// Looks until there is something, or the time is over. What `look` says when it is an error ends it, too.
    pub(crate) fn look<E>(
        &mut self,
        until: Option<Instant>,
        mut look: impl FnMut() -> Result<bool, E>,
    ) -> Result<bool, E> {
        if self.most == Duration::ZERO {
            return Ok(false);
        }
        let most = match self.never_sleeps() {
            true => SLICE,
            false => self.most,
        };
        if self.confidence == 0 && !self.never_sleeps() {
            self.waits_without += 1;
            if self.waits_without < TRY_AGAIN_AFTER {
                return Ok(false);
            }
            self.waits_without = 0;
        }
        let started = Instant::now();
        loop {
            for _ in 0..LOOKS_PER_CLOCK {
                if look()? {
                    self.confidence = (self.confidence + 1).min(MAX_CONFIDENCE);
                    return Ok(true);
                }
                spin_loop();
            }
            let now = Instant::now();
            if now.duration_since(started) >= most || until.is_some_and(|until| now >= until) {
                self.confidence = self.confidence.saturating_sub(2);
                return Ok(false);
            }
        }
    }

    /// Learns from a sleep.
    pub(crate) fn slept(&mut self, time: Duration) {
        // Half of a short sleep is the wake-up itself.
        if time < self.most.saturating_mul(2) {
            self.confidence = (self.confidence + 1).min(MAX_CONFIDENCE);
        }
    }
}

/// Whether the machine has one processor only: then busy polling keeps the peer from running. The affinity of this process does not matter: its peer
/// may use another processor.
fn has_one_processor() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        let online = std::fs::read_to_string("/sys/devices/system/cpu/online");
        online.is_ok_and(|ranges| !ranges.trim_end().contains([',', '-']))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A spinner as on a machine with several processors.
    fn spin(most: Duration) -> Spin {
        Spin {
            most,
            ..Spin::new(most)
        }
    }

    #[test]
    fn what_is_there_is_found_and_what_is_not_is_given_up() {
        let mut looks = 0;
        let found = spin(Duration::from_secs(60)).look(None, || -> Result<bool, ()> {
            looks += 1;
            Ok(looks == 1000)
        });
        assert_eq!((found, looks), (Ok(true), 1000));
        let none = || -> Result<bool, ()> { Ok(false) };
        assert_eq!(spin(Duration::from_micros(5)).look(None, none), Ok(false));
        assert_eq!(spin(Duration::MAX).look(None, none), Ok(false), "a slice");
        let now = Some(Instant::now());
        assert_eq!(spin(Duration::from_secs(60)).look(now, none), Ok(false));
        assert_eq!(spin(Duration::from_secs(9)).look(None, || Err(7)), Err(7));
    }

    #[test]
    fn no_time_to_look_means_not_one_look() {
        let found = spin(Duration::ZERO).look(None, || -> Result<bool, ()> { panic!("a look") });
        assert_eq!(found, Ok(false));
    }

    #[test]
    fn vain_looks_become_rare_and_short_sleeps_bring_them_back() {
        let mut spin = spin(Duration::from_micros(1));
        let looked = |spin: &mut Spin| {
            let mut any = false;
            let _ = spin.look(None, || -> Result<bool, ()> {
                any = true;
                Ok(false)
            });
            any
        };
        while spin.confidence > 0 {
            assert!(looked(&mut spin));
        }
        let tries = (0..10 * u32::from(TRY_AGAIN_AFTER)).filter(|_| looked(&mut spin));
        assert_eq!(tries.count(), 10);
        spin.slept(Duration::from_secs(1));
        assert!(!looked(&mut spin));
        spin.slept(Duration::ZERO);
        assert!(looked(&mut spin));
    }
}
