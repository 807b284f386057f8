//! When to interrupt a guest that has been given frames.
//!
//! # Theory of operation
//!
//! An interrupt costs a guest thousands of cycles, more than it needs for dozens of frames, and a guest that is interrupted for each
//! frame does nothing else (Rizzo, Lettieri, Maffione: "Speeding Up Packet I/O in Virtual Machines", 2013). So as with the
//! moderation of a network card, the first frame into an idle ring interrupts at once, and after that there is at most one interrupt
//! in a *window* of time. No guest waits longer than a window, and a guest that answers each frame with one of its own waits for none,
//! as its round takes longer than the shortest window.
//!
//! The window adapts: while each interrupt is for many frames it doubles, since the guest lives on throughput; as soon as one is for
//! few it is halved.
//!
//! A window is no use to a guest whose buffers run out meanwhile: what else comes for it is dropped. So a guest that sleeps is interrupted before
//! the window is over once a part of its ring has been filled since.
//!
//! This is beside what the guest asks for itself with event indices: an interrupt that it does not want is never sent.

use std::time::Duration;

use policy::Time;

/// The shortest window that adapts, below the round trip of the fastest guest.
const MIN_WINDOW: Duration = Duration::from_micros(10);

/// The longest one: what a guest that reads from a full pipe does not notice.
const MAX_WINDOW: Duration = Duration::from_micros(160);

/// Frames for an interrupt from which on a longer window is tried.
const MANY: u32 = 32;

/// Frames for an interrupt up to which a shorter one is.
const FEW: u32 = 4;

/// This part of a ring may be filled while an interrupt is held back.
const HELD_PART: u16 = 4;

/// How a port's interrupts are held back.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ModerationSetting {
    /// By a window between 10 and 160 µs, as the traffic is.
    #[default]
    Adaptive,
    /// Not at all.
    Off,
    /// By a window of this length.
    Window(Duration),
}

impl ModerationSetting {
    fn first_window(self) -> Duration {
        match self {
            ModerationSetting::Adaptive => MIN_WINDOW,
            ModerationSetting::Off => Duration::ZERO,
            ModerationSetting::Window(window) => window,
        }
    }
}

/// What to do about an interrupt that a guest wants.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Due {
    /// Send it.
    Now,
    /// Send it then: call [`Moderation::expire`].
    At(Time),
    /// It will be sent anyhow, at a time that was said before.
    Known,
}

/// The interrupts of one ring.
#[derive(Debug)]
pub(super) struct Moderation {
    setting: ModerationSetting,
    window: Duration,
    /// Until then there is no further interrupt.
    quiet_until: Time,
    /// Frames since the last interrupt.
    frames: u32,
    owed: bool,
    /// Frames since one was pending.
    held: u32,
    /// With so many of them it is sent at once.
    most_held: u32,
}

impl Moderation {
    /// For a ring with so many entries.
    pub(super) fn new(setting: ModerationSetting, entries: u16) -> Moderation {
        Moderation {
            setting,
            window: setting.first_window(),
            quiet_until: Time::ZERO,
            frames: 0,
            owed: false,
            held: 0,
            most_held: u32::from(entries / HELD_PART).max(1),
        }
    }

    /// Goes on with another setting. A pending interrupt keeps its time.
    pub(super) fn set(&mut self, setting: ModerationSetting) {
        self.setting = setting;
        self.window = setting.first_window();
    }

    /// The guest has been given frames.
    pub(super) fn count(&mut self, frames: u32) {
        self.frames = self.frames.saturating_add(frames);
        if self.owed {
            self.held = self.held.saturating_add(frames);
        }
    }

    /// An interrupt is pending, and cannot wait longer: want it.
    pub(super) fn is_pressing(&self) -> bool {
        self.owed && self.held >= self.most_held
    }

    /// The guest wants an interrupt.
    pub(super) fn want(&mut self, now: Time) -> Due {
        if now >= self.quiet_until || self.is_pressing() {
            self.sent(now);
            return Due::Now;
        }
        match std::mem::replace(&mut self.owed, true) {
            true => Due::Known,
            false => Due::At(self.quiet_until),
        }
    }

    /// The time that was said has come. Returns whether one is still pending.
    pub(super) fn expire(&mut self, now: Time) -> bool {
        let owed = std::mem::take(&mut self.owed);
        if owed {
            self.sent(now);
        }
        owed
    }

    fn sent(&mut self, now: Time) {
        if self.setting == ModerationSetting::Adaptive {
            self.window = match self.frames {
                MANY.. => (self.window * 2).min(MAX_WINDOW),
                ..=FEW => (self.window / 2).max(MIN_WINDOW),
                _ => self.window,
            };
        }
        self.frames = 0;
        self.owed = false;
        self.held = 0;
        self.quiet_until = now + self.window;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_micros(50);

    fn moderation(setting: ModerationSetting) -> Moderation {
        Moderation::new(setting, 256)
    }

    fn at(micros: u64) -> Time {
        Duration::from_micros(1000 + micros)
    }

    #[test]
    fn the_first_frame_into_an_idle_ring_interrupts_at_once() {
        let mut moderation = moderation(ModerationSetting::Window(WINDOW));
        assert_eq!(moderation.want(at(0)), Due::Now);
        assert_eq!(moderation.want(at(50)), Due::Now, "idle again");
    }

    #[test]
    fn there_is_one_interrupt_in_a_window() {
        let mut moderation = moderation(ModerationSetting::Window(WINDOW));
        assert_eq!(moderation.want(at(0)), Due::Now);
        assert_eq!(moderation.want(at(1)), Due::At(at(50)));
        assert_eq!(moderation.want(at(49)), Due::Known);
        assert!(moderation.expire(at(50)));
        assert_eq!(moderation.want(at(51)), Due::At(at(100)));
    }

    #[test]
    fn a_ring_that_fills_up_does_not_wait_for_the_window() {
        let mut moderation = moderation(ModerationSetting::Window(WINDOW));
        moderation.count(1000);
        assert_eq!(moderation.want(at(0)), Due::Now);
        moderation.count(1000);
        assert_eq!(
            moderation.want(at(1)),
            Due::At(at(50)),
            "it was awake meanwhile"
        );
        moderation.count(63);
        assert!(!moderation.is_pressing());
        moderation.count(1);
        assert!(moderation.is_pressing());
        assert_eq!(moderation.want(at(2)), Due::Now);
        assert!(!moderation.is_pressing());
        assert_eq!(moderation.want(at(3)), Due::At(at(52)));
    }

    #[test]
    fn an_interrupt_that_was_sent_meanwhile_is_not_owed() {
        let mut moderation = moderation(ModerationSetting::Window(WINDOW));
        assert_eq!(moderation.want(at(0)), Due::Now);
        assert_eq!(moderation.want(at(1)), Due::At(at(50)));
        // The turn came later than the timer.
        assert_eq!(moderation.want(at(60)), Due::Now);
        assert!(!moderation.expire(at(61)));
    }

    #[test]
    fn without_moderation_each_wish_is_granted() {
        let mut moderation = moderation(ModerationSetting::Off);
        for micros in [0, 0, 1] {
            assert_eq!(moderation.want(at(micros)), Due::Now);
        }
    }

    #[test]
    fn the_window_grows_with_bulk_and_shrinks_without() {
        let mut moderation = moderation(ModerationSetting::Adaptive);
        let mut now = at(0);
        for _ in 0..10 {
            moderation.count(MANY);
            assert_eq!(moderation.want(now), Due::Now);
            now += MAX_WINDOW;
        }
        assert_eq!(moderation.window, MAX_WINDOW);
        for _ in 0..10 {
            moderation.count(1);
            assert_eq!(moderation.want(now), Due::Now);
            now += MAX_WINDOW;
        }
        assert_eq!(moderation.window, MIN_WINDOW);
    }
}
