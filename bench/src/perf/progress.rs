//! What is seen while a run goes on.

use std::cell::Cell;
use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use super::case::Case;
use super::results::Run;
use super::run::Measured;

/// A bar on a terminal, lines elsewhere, or nothing.
pub struct Progress {
    bar: Option<ProgressBar>,
    lines: bool,
    began: Cell<Instant>,
    expected: Cell<Duration>,
    done: Cell<Duration>,
}

impl Progress {
    /// On standard error.
    pub fn shown() -> Progress {
        let terminal = std::io::stderr().is_terminal();
        Progress::new(terminal.then(ProgressBar::no_length), true)
    }

    /// Says nothing.
    pub fn hidden() -> Progress {
        Progress::new(None, false)
    }

    fn new(bar: Option<ProgressBar>, lines: bool) -> Progress {
        Progress {
            bar,
            lines,
            began: Cell::new(Instant::now()),
            expected: Cell::new(Duration::ZERO),
            done: Cell::new(Duration::ZERO),
        }
    }

    pub(crate) fn begin(&self, expected: Duration) {
        self.began.set(Instant::now());
        self.expected.set(expected);
        let text = format!(
            "about {} min {} s to go",
            expected.as_secs() / 60,
            expected.as_secs() % 60
        );
        match &self.bar {
            Some(bar) => {
                bar.set_length(expected.as_millis() as u64);
                let style = ProgressStyle::with_template("{bar:30} {percent:>3}% {msg}");
                bar.set_style(style.expect("the template is right"));
                bar.enable_steady_tick(Duration::from_millis(500));
            }
            None if self.lines => eprintln!("[bench] {text}"),
            None => {}
        }
    }

    pub(crate) fn tell(&self, text: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{} left: {text}", self.left()));
        }
    }

    pub(crate) fn advance(&self, expected: Duration) {
        self.done.set(self.done.get() + expected);
        if let Some(bar) = &self.bar {
            bar.set_position(self.done.get().as_millis() as u64);
        }
    }

    pub(crate) fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(text),
            None if self.lines => eprintln!("[{} left] {text}", self.left()),
            None => {}
        }
    }

    pub(crate) fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }

    /// Time left, from the plan and from how true it has been so far.
    fn left(&self) -> String {
        let (done, expected) = (
            self.done.get().as_secs_f64(),
            self.expected.get().as_secs_f64(),
        );
        let elapsed = self.began.get().elapsed().as_secs_f64();
        // In the first seconds the plan knows better than what has passed.
        let pace = if done < 5.0 { 1.0 } else { elapsed / done };
        let left = ((expected - done) * pace).max(0.0) as u64;
        format!("{:2}:{:02}", left / 60, left % 60)
    }
}

/// The figure that a case is about, with its unit.
pub fn headline(case: &Case) -> (&'static str, &'static str) {
    match case {
        Case::Throughput(_) | Case::Vms(_) | Case::Circuits(_) | Case::Memcpy(_) => {
            ("gbit_per_s", "Gbit/s")
        }
        Case::PingPong { .. } | Case::Eventfd { .. } => ("mean_us", "us"),
        Case::Connect { .. } => ("connections_per_s", "/s"),
        Case::IdleCircuits { .. } => ("pss_bytes_each", "bytes each"),
        Case::QuietVms(_) => ("wakeups_per_s", "wake-ups/s"),
        Case::Noisy => ("p99_times", "times p99"),
    }
}

/// What a case came to, in a line.
pub(crate) fn case_line(run: &Run, case: &Case, measured: &[Measured]) -> String {
    let subjects: Vec<&str> = measured.iter().map(Measured::name).collect();
    line_of(run, &case.to_string(), &subjects, headline(case))
}

/// What a case of this name came to for these subjects, in a line.
pub(crate) fn line_of(
    run: &Run,
    name: &str,
    subjects: &[&str],
    (figure, unit): (&str, &str),
) -> String {
    let parts: Vec<String> = subjects
        .iter()
        .map(|subject| {
            let point = run.point(name, subject);
            let value = match point.and_then(|point| point.summary(figure)) {
                Some(summary) => super::report::number(summary.median),
                None => point
                    .and_then(super::results::Point::trouble)
                    .map_or("nothing", |(word, _)| word)
                    .to_owned(),
            };
            format!("{subject} {value}")
        })
        .collect();
    format!("{name:<20} {} {unit}", parts.join("  "))
}
