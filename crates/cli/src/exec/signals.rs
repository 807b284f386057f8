//! This process's signals, for the command in the guest.

use std::io;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2, SIGWINCH};
use signal_hook::iterator::{Handle, Signals};
use sys::foreground::ignored_signals;

/// The signals that are the command's; and SIGWINCH, which reports the terminal's new size.
const FORWARDED: [i32; 6] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGUSR1, SIGUSR2];

/// So many requests to end, within so much time, end the client whatever the guest does.
const IMPATIENCE: (u32, Duration) = (3, Duration::from_secs(2));

/// What to do about signals.
pub(super) trait Receiver: Send + 'static {
    /// Forward a signal by its number. Must not block.
    fn forward(&self, signal: u8);
    /// The local terminal has a new size. Must not block.
    fn resized(&self);
    /// The command is asked to end, by a signal that was forwarded. Must not block.
    fn asks_to_end(&self);
    /// The user wants to leave now.
    fn give_up(&self);
    /// Whether the command is not there to take signals any more: then they end this process as usual.
    fn is_over(&self) -> bool;
    /// This process is about to be ended by a signal: put things in order.
    fn before_death(&self);
}

/// Let a thread receive this process's signals until the handle is closed. Those that this process's parent chose
/// to ignore (as nohup does) stay ignored.
///
/// # Errors
/// The handlers or the thread cannot be set up.
pub(super) fn receive(receiver: impl Receiver) -> io::Result<Handle> {
    let ignored = ignored_signals();
    let wanted = FORWARDED
        .into_iter()
        .filter(|signal| ignored & (1 << (signal - 1)) == 0);
    let mut signals = Signals::new(wanted.chain([SIGWINCH]))?;
    let handle = signals.handle();
    std::thread::Builder::new()
        .name("signals".into())
        .spawn(move || {
            let mut impatience = Impatience::default();
            for signal in signals.forever() {
                if signal == SIGWINCH {
                    receiver.resized();
                } else if receiver.is_over() {
                    receiver.before_death();
                    let _ = signal_hook::low_level::emulate_default_handler(signal);
                } else {
                    receiver.forward(signal as u8);
                    if signal != SIGUSR1 && signal != SIGUSR2 {
                        receiver.asks_to_end();
                        if impatience.grows(Instant::now()) {
                            receiver.give_up();
                        }
                    }
                }
            }
        })?;
    Ok(handle)
}

/// Counts requests to end that follow each other closely.
#[derive(Debug, Default)]
struct Impatience {
    count: u32,
    since: Option<Instant>,
}

impl Impatience {
    /// One more request, now; true if that is enough.
    fn grows(&mut self, now: Instant) -> bool {
        let (limit, window) = IMPATIENCE;
        match self.since {
            Some(since) if now.duration_since(since) <= window => self.count += 1,
            _ => (self.since, self.count) = (Some(now), 1),
        }
        self.count >= limit
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_requests_in_two_seconds_are_enough() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut impatience = Impatience::default();
        assert!(!impatience.grows(at(0)));
        assert!(!impatience.grows(at(1000)));
        assert!(impatience.grows(at(2000)));
        let mut patience = Impatience::default();
        assert!(!patience.grows(at(0)));
        assert!(!patience.grows(at(1000)));
        assert!(!patience.grows(at(2001)));
    }
}
