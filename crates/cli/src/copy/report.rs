//! What is printed about a transfer, for a person or a script.

use std::io::{self, IsTerminal, Stderr};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::Serialize;
use transfer::{Arrival, Observer};
use wire::agent::transfer::{MAX_PATH_LEN, Position, Totals};

use crate::guest::printable;
use crate::lines::Budgeted;

/// The most entries that could not be copied that the JSON lists; of the others it has the number.
const MAX_LISTED: usize = 10_000;

/// The most bytes that their paths and reasons may have: a guest chooses the paths, and how many there are.
const MAX_LISTED_LEN: usize = 4 * 1024 * 1024;

/// The most of a path that is shown, in bytes: Linux opens no longer one at once.
const MAX_SHOWN_PATH_LEN: usize = MAX_PATH_LEN + 1;

/// What happened so far.
#[derive(Debug)]
pub struct Report {
    summary: Summary,
    bar: ProgressBar,
    /// Each entry that fails is reported at once, on standard error, behind these words, as far as the budget goes; without words they are kept for the JSON.
    prefix: Option<String>,
    lines: Budgeted<Stderr>,
    /// How many bytes the kept ones have.
    listed_len: usize,
    started: Instant,
    /// The last entry in place.
    pub(super) position: Option<Position>,
    /// Whether the destination is a directory, once that is known.
    pub(super) into_directory: Option<bool>,
    /// Grows with whatever moves on.
    pub(super) steps: u64,
}

/// What was copied, for scripts.
#[derive(Debug, Default, Serialize)]
struct Summary {
    files: u64,
    directories: u64,
    symlinks: u64,
    removed: u64,
    unchanged: u64,
    /// Bytes of files, holes not counted.
    bytes: u64,
    duration_ms: u64,
    /// How often the connection broke and the transfer went on.
    resumed: u64,
    complete: bool,
    failed_count: u64,
    failed: Vec<Failed>,
    /// How many of them are not in `failed`.
    failed_left_out: u64,
}

#[derive(Debug, Serialize)]
struct Failed {
    path: String,
    reason: String,
}

impl Report {
    /// Nothing yet. The bar is shown on a terminal, unless it must be quiet.
    pub fn new(quiet: bool, prefix: Option<String>) -> Report {
        let target = if quiet || !io::stderr().is_terminal() {
            ProgressDrawTarget::hidden()
        } else {
            ProgressDrawTarget::stderr_with_hz(10)
        };
        let bar = ProgressBar::with_draw_target(Some(0), target);
        // Constant, and a test draws it.
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style);
        }
        Report {
            summary: Summary::default(),
            bar,
            prefix,
            lines: Budgeted::new(io::stderr()),
            listed_len: 0,
            started: Instant::now(),
            position: None,
            into_directory: None,
            steps: 0,
        }
    }

    /// The connection broke, and it is tried to go on.
    pub(super) fn breaks(&mut self, why: &str) {
        self.bar.set_message(format!("waiting: {}", printable(why)));
    }

    /// It goes on: what was under way counts again.
    pub(super) fn resumes(&mut self) {
        self.summary.resumed += 1;
        self.bar.set_position(self.summary.bytes);
        self.bar.set_message("");
    }

    /// Everything is sent again: what was in place is so no more.
    pub(super) fn starts_anew(&mut self) {
        let resumed = self.summary.resumed;
        self.summary = Summary {
            resumed,
            ..Summary::default()
        };
        self.listed_len = 0;
        self.position = None;
    }

    /// How many entries could not be copied as they were meant.
    pub fn failed_count(&self) -> u64 {
        self.summary.failed_count
    }

    /// It is over: the bar goes away.
    pub fn end(&mut self, complete: bool) {
        self.summary.duration_ms = self
            .started
            .elapsed()
            .as_millis()
            .try_into()
            .unwrap_or(u64::MAX);
        self.summary.complete = complete && self.summary.failed_count == 0;
        self.bar.finish_and_clear();
        self.lines.count();
    }

    /// Whether there is more to say than what failed.
    pub fn has_summary(&self) -> bool {
        let summary = &self.summary;
        let arrived = summary.files + summary.directories + summary.symlinks;
        summary.failed_count == 0 || arrived + summary.unchanged + summary.removed > 0
    }

    /// All of it, as JSON.
    pub fn json(&self) -> &impl Serialize {
        &self.summary
    }

    /// Whether a bar is shown.
    pub fn has_bar(&self) -> bool {
        !self.bar.is_hidden()
    }

    /// What was done, in a line.
    pub fn line(&self) -> String {
        let summary = &self.summary;
        let seconds = (summary.duration_ms as f64 / 1000.0).max(0.001);
        let rate = (summary.bytes as f64 / seconds) as u64;
        let mut line = format!(
            "copied {}, {} in {seconds:.1} s, {}/s",
            files(summary.files),
            indicatif::BinaryBytes(summary.bytes),
            indicatif::BinaryBytes(rate)
        );
        if summary.unchanged > 0 {
            line.push_str(&format!("; {} unchanged", summary.unchanged));
        }
        if summary.removed > 0 {
            line.push_str(&format!("; {} removed", summary.removed));
        }
        if summary.resumed > 0 {
            line.push_str(&format!("; the connection broke {} times", summary.resumed));
        }
        line
    }
}

/// A path that a guest may have chosen, for a person: names below names may add up to more than can be read.
fn shown_path(path: &[u8]) -> String {
    let begin = &path[..path.len().min(MAX_SHOWN_PATH_LEN)];
    let mut shown = printable(&String::from_utf8_lossy(begin));
    if path.len() > begin.len() || shown.len() > MAX_SHOWN_PATH_LEN {
        let mut end = MAX_SHOWN_PATH_LEN.min(shown.len());
        while !shown.is_char_boundary(end) {
            end -= 1;
        }
        shown.truncate(end);
        shown.push('…');
    }
    shown
}

fn files(number: u64) -> String {
    match number {
        1 => "1 file".to_owned(),
        number => format!("{number} files"),
    }
}

const TEMPLATE: &str = "{percent:>3}% [{bar:25}] {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta} left {wide_msg}";

impl Observer for Report {
    fn announced(&mut self, totals: &Totals) {
        self.steps += 1;
        self.bar.set_length(totals.bytes);
    }

    fn begins(&mut self, path: &[u8], there_already: u64) {
        if there_already > 0 {
            self.bar.inc(there_already);
            self.summary.bytes += there_already;
        }
        if !self.bar.is_hidden() {
            let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
            self.bar
                .set_message(printable(&String::from_utf8_lossy(name)));
        }
    }

    fn passed(&mut self, bytes: u64) {
        self.steps += 1;
        self.bar.inc(bytes);
    }

    fn arrived(&mut self, position: &Position, arrival: Option<Arrival>) {
        self.steps += 1;
        self.position = Some(position.clone());
        match arrival {
            Some(Arrival::File { bytes }) => {
                self.summary.files += 1;
                self.summary.bytes += bytes;
            }
            Some(Arrival::Directory) => self.summary.directories += 1,
            Some(Arrival::Symlink) => self.summary.symlinks += 1,
            Some(Arrival::Removed) => self.summary.removed += 1,
            Some(Arrival::Entered) | None => {}
        }
    }

    fn failed(&mut self, path: &[u8], reason: &str) {
        self.summary.failed_count += 1;
        let shown = || (shown_path(path), printable(reason));
        let Some(what) = &self.prefix else {
            let summary = &mut self.summary;
            let (path, reason) = shown();
            let len = self.listed_len + path.len() + reason.len();
            if summary.failed.len() == MAX_LISTED || len > MAX_LISTED_LEN {
                summary.failed_left_out += 1;
                return;
            }
            self.listed_len = len;
            summary.failed.push(Failed { path, reason });
            return;
        };
        let lines = &mut self.lines;
        if lines.admits(self.started.elapsed()) {
            let (path, reason) = shown();
            self.bar
                .suspend(|| lines.write(&format!("error: {what}: {path}: {reason}")));
        }
    }

    fn unchanged(&mut self, _path: &[u8], bytes: u64) {
        self.steps += 1;
        self.summary.unchanged += 1;
        self.bar.inc(bytes);
    }

    fn proceeds(&mut self, into_directory: bool) {
        self.into_directory = Some(into_directory);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bar_can_be_drawn_and_words_of_the_guest_are_harmless() {
        ProgressStyle::with_template(TEMPLATE).unwrap();
        let mut report = Report::new(true, None);
        report.failed(b"a\x1b[2J", "reason\x07");
        report.end(true);
        let json = serde_json::to_value(report.json()).unwrap();
        assert_eq!(json["failed"][0]["path"], "a\u{fffd}[2J");
        assert_eq!(json["failed"][0]["reason"], "reason\u{fffd}");
        assert_eq!(json["complete"], false);
        assert_eq!(report.failed_count(), 1);
        assert!(!report.has_summary(), "nothing came but the failure");
        report.unchanged(b"there", 1);
        assert!(report.has_summary());
    }

    #[test]
    fn a_guest_fills_no_memory_with_what_cannot_be_copied() {
        let path = [1; 128 * 256];
        let mut silent = Report::new(true, Some("copying".to_owned()));
        let mut kept = Report::new(true, None);
        for _ in 0..20_000 {
            kept.failed(&path, "it is there");
        }
        silent.failed(b"short", "it is there");
        assert!(silent.summary.failed.is_empty(), "nothing prints them");
        let summary = &kept.summary;
        let len = summary.failed.iter().map(|it| it.path.len()).sum::<usize>();
        assert!(len > MAX_LISTED_LEN / 2 && len <= MAX_LISTED_LEN, "{len}");
        assert_eq!(
            summary.failed.len() as u64 + summary.failed_left_out,
            summary.failed_count
        );
        let longest = summary.failed.iter().map(|it| it.path.len()).max().unwrap();
        assert!(longest <= MAX_SHOWN_PATH_LEN + '…'.len_utf8(), "{longest}");
        assert!(kept.summary.failed[0].path.ends_with('…'));
        assert_eq!(shown_path(b"short"), "short");
    }
}
