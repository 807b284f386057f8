//! Looking again for a moment before going to sleep.
//!
//! To be woken on another processor costs a sleeper tens of microseconds, several times what it takes to handle a small
//! packet; a poll that is still running when the next one comes saves that time, and the guest saves its notification. But a
//! processor that looks in vain is taken from others. So we look only while the last things came in quick succession,
//! not much longer than they let us wait, and never longer than a limit; after two vain looks we sleep at once, until a few
//! sleeps in a row turn out to have been so short that looking would have been the better choice. Where it never is, because
//! the one that should answer needs the very processor that we look on, ever more of them are needed.

use std::time::Duration;

/// Vain looks in a row that end the looking.
const VAIN_LOOKS: u32 = 2;

/// Short sleeps in a row that begin it, at first and at most.
const SHORT_SLEEPS: std::ops::RangeInclusive<u32> = 2..=4096;

/// The weight of the newest wait in the average, as a power of two: one eighth.
const SHIFT: u32 = 3;

/// How much longer than the average wait a look may take.
const MARGIN: u32 = 4;

/// Whether, and for how long, to look before sleeping.
#[derive(Debug)]
pub(crate) struct Spin {
    limit: Duration,
    average_wait: Duration,
    worth_it: bool,
    /// Outcomes in a row that speak against what we do.
    against: u32,
    /// Short sleeps in a row that it takes to begin.
    needed: u32,
    /// Whether a look has found something since it began.
    found_any: bool,
}

impl Spin {
    /// Never polls for longer than `limit`; zero never polls.
    pub(crate) fn new(limit: Duration) -> Spin {
        Spin {
            limit,
            average_wait: limit / MARGIN,
            worth_it: false,
            against: 0,
            needed: *SHORT_SLEEPS.start(),
            found_any: false,
        }
    }

    /// How long to look now.
    pub(crate) fn patience(&self) -> Duration {
        if self.worth_it {
            (self.average_wait * MARGIN).min(self.limit)
        } else {
            Duration::ZERO
        }
    }

    /// A look has found something after this time.
    pub(crate) fn found(&mut self, after: Duration) {
        self.against = 0;
        self.found_any = true;
        self.learn(after);
    }

    /// A look was in vain.
    pub(crate) fn missed(&mut self) {
        self.against += 1;
        self.learn(self.limit);
        if self.against >= VAIN_LOOKS {
            self.worth_it = false;
            self.against = 0;
            self.needed = match self.found_any {
                true => *SHORT_SLEEPS.start(),
                false => (self.needed * 2).min(*SHORT_SLEEPS.end()),
            };
        }
    }

    /// A sleep has ended, after this time, because something came.
    pub(crate) fn slept(&mut self, time: Duration) {
        if self.worth_it {
            return;
        }
        if time >= self.limit {
            self.against = 0;
            return;
        }
        self.learn(time);
        self.against += 1;
        if self.against >= self.needed {
            self.worth_it = true;
            self.against = 0;
            self.found_any = false;
        }
    }

    fn learn(&mut self, wait: Duration) {
        self.average_wait += wait.min(self.limit) / (1 << SHIFT);
        self.average_wait -= self.average_wait / ((1 << SHIFT) + 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(100);
    const SOON: Duration = Duration::from_micros(20);

    fn busy() -> Spin {
        let mut spin = Spin::new(LIMIT);
        spin.slept(SOON);
        spin.slept(SOON);
        spin
    }

    #[test]
    fn an_idle_fabric_never_looks() {
        let mut spin = Spin::new(LIMIT);
        assert_eq!(spin.patience(), Duration::ZERO);
        for _ in 0..100 {
            spin.slept(LIMIT);
        }
        assert_eq!(spin.patience(), Duration::ZERO);
    }

    #[test]
    fn short_sleeps_in_a_row_make_it_look() {
        let mut spin = Spin::new(LIMIT);
        spin.slept(SOON);
        spin.slept(LIMIT);
        spin.slept(SOON);
        assert_eq!(spin.patience(), Duration::ZERO, "not in a row");
        spin.slept(SOON);
        assert!(spin.patience() > SOON);
    }

    #[test]
    fn vain_looks_in_a_row_end_it() {
        let mut spin = busy();
        spin.missed();
        spin.found(SOON);
        spin.missed();
        assert!(spin.patience() > Duration::ZERO, "not in a row");
        spin.missed();
        assert_eq!(spin.patience(), Duration::ZERO);
    }

    #[test]
    fn it_looks_for_a_few_times_the_usual_wait_and_never_beyond_the_limit() {
        let mut spin = busy();
        for _ in 0..100 {
            spin.found(Duration::from_micros(5));
        }
        let patience = spin.patience();
        assert!(patience >= Duration::from_micros(15) && patience <= Duration::from_micros(25));
        for _ in 0..100 {
            spin.found(LIMIT * 2);
        }
        assert_eq!(spin.patience(), LIMIT);
    }

    #[test]
    fn looking_that_never_finds_anything_becomes_rare() {
        let mut spin = Spin::new(LIMIT);
        let mut looks = 0;
        for _ in 0..100_000 {
            match spin.patience() {
                Duration::ZERO => spin.slept(SOON),
                _ => {
                    looks += 1;
                    spin.missed();
                }
            }
        }
        assert!(looks < 100, "{looks} looks");
        // It is given another chance now and then, and taken up again at once when it helps.
        assert!(looks > 20, "{looks} looks");
    }

    #[test]
    fn a_limit_of_zero_never_looks() {
        let mut spin = Spin::new(Duration::ZERO);
        for _ in 0..10 {
            spin.slept(Duration::ZERO);
        }
        assert_eq!(spin.patience(), Duration::ZERO);
    }
}
