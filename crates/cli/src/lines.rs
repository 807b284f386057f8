//! Lines to standard error that a guest can cause.

use std::io::Write;
use std::time::Duration;

use policy::{Time, TokenBucket};

use crate::guest::{printable, printable_lines};

/// Lines at once, and seconds until as many may be written again: as many as the daemon's log takes of one kind. Callers here and in the guest cause as many
/// as they like.
pub(crate) const LINES: u64 = 100;

/// How often the lines that were not written are counted.
pub(crate) const WINDOW: Duration = Duration::from_secs(1);

/// Write a line to standard error in which words may be a guest's. With standard error closed there is no place for it.
pub(crate) fn note(words: &str) {
    let _ = writeln!(std::io::stderr(), "{}", printable_lines(words));
}

/// Lines to a person, within a budget.
#[derive(Debug)]
pub(crate) struct Budgeted<W> {
    out: W,
    bucket: TokenBucket,
    held_back: u64,
    /// When [`tell`](Budgeted::tell) has written the count last.
    counted: Time,
}

impl<W: Write> Budgeted<W> {
    pub(crate) fn new(out: W) -> Budgeted<W> {
        Budgeted {
            out,
            bucket: TokenBucket::new(1, Duration::from_secs(LINES)),
            held_back: 0,
            counted: Time::ZERO,
        }
    }

    /// Whether there is a place for one more line; otherwise it is counted.
    pub(crate) fn admits(&mut self, now: Time) -> bool {
        let admitted = self.bucket.take(now);
        self.held_back += u64::from(!admitted);
        admitted
    }

    /// Write a line that was admitted.
    pub(crate) fn write(&mut self, words: &str) {
        // With standard error closed there is no place for the line.
        let _ = writeln!(self.out, "{}", printable(words));
    }

    pub(crate) fn say(&mut self, words: &str, now: Time) {
        if self.admits(now) {
            self.write(words);
        }
    }

    /// The same where nothing else has the count written: it comes before a line, when the last one was a while ago.
    pub(crate) fn tell(&mut self, words: &str, now: Time) {
        if now >= self.counted + WINDOW {
            self.count();
            self.counted = now;
        }
        self.say(words, now);
    }

    /// Whether lines were not written of which the count is not written either.
    pub(crate) fn holds_back(&self) -> bool {
        self.held_back > 0
    }

    /// Write how many lines were not written, if there are any.
    pub(crate) fn count(&mut self) {
        let lines = match std::mem::take(&mut self.held_back) {
            0 => return,
            1 => "1 more line".to_owned(),
            count => format!("{count} more lines"),
        };
        let _ = writeln!(self.out, "suppressed {lines} like these");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_callers_without_end_are_written_in_part_and_counted() {
        let mut lines = Budgeted::new(Vec::new());
        let second = Duration::from_secs(1);
        let start = second;
        for _ in 0..50_000 {
            lines.say("cannot connect to localhost:80", start);
        }
        lines.count();
        lines.count();
        lines.say("a second later", start + second);
        lines.say("one too many", start + second);
        lines.count();
        let written = String::from_utf8(lines.out).unwrap();
        let written: Vec<_> = written.lines().collect();
        let (before, after) = written.split_at(LINES as usize);
        assert!(
            before
                .iter()
                .all(|line| *line == "cannot connect to localhost:80")
        );
        let expected = [
            "suppressed 49900 more lines like these",
            "a second later",
            "suppressed 1 more line like these",
        ];
        assert_eq!(after, expected);
    }
}
