//! A measurement from its first connection to its report, with what is shown meanwhile.

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use wire::agent::bench::Outcome;

use super::guests::GuestStream;
use super::host::HostStream;
use super::report::{Interval, Measurement};
use super::{BenchError, Kind, Parties, Plan};
use crate::guest::Deadline;

/// How long all streams together may take to be connected. A guest without KVM on a busy machine is slow.
const SETUP_TIMEOUT: Duration = Duration::from_secs(60);

/// How often a line is shown.
const SHOW_INTERVAL: Duration = Duration::from_secs(1);

/// How long it may take until a signal is seen.
const LOOK_INTERVAL: Duration = Duration::from_millis(50);

/// The exit code of a program that SIGINT ended.
const INTERRUPTED: i32 = 130;

/// What SIGINT and SIGTERM do: the first ends the measurement, which is then reported as far as it came; the second, and
/// one that comes while nothing is measured, ends the process.
#[derive(Debug)]
pub struct Interrupt {
    seen: Arc<AtomicBool>,
    ends_process: Arc<AtomicBool>,
}

impl Interrupt {
    /// From now on.
    ///
    /// # Errors
    /// The handlers cannot be set up.
    pub fn catch() -> Result<Interrupt, BenchError> {
        let interrupt = Interrupt {
            seen: Arc::default(),
            ends_process: Arc::new(AtomicBool::new(true)),
        };
        for signal in [SIGINT, SIGTERM] {
            let ends_process = Arc::clone(&interrupt.ends_process);
            flag::register_conditional_shutdown(signal, INTERRUPTED, ends_process)
                .and_then(|_| flag::register(signal, Arc::clone(&interrupt.ends_process)))
                .and_then(|_| flag::register(signal, Arc::clone(&interrupt.seen)))
                .map_err(|source| BenchError::Local {
                    what: "receive signals",
                    source,
                })?;
        }
        Ok(interrupt)
    }

    /// Signals do what they do anyhow.
    #[cfg(test)]
    pub(super) fn never() -> Interrupt {
        Interrupt {
            seen: Arc::default(),
            ends_process: Arc::default(),
        }
    }

    /// Whether one came during a measurement.
    pub fn has_come(&self) -> bool {
        self.seen.load(Ordering::Acquire)
    }

    fn ends_process(&self, ends: bool) {
        // One that came before keeps ending the process.
        self.ends_process
            .store(ends || self.has_come(), Ordering::Release);
    }
}

/// How far one stream is, and whether it is enough.
#[derive(Debug)]
pub(super) struct Progress {
    bytes: AtomicU64,
    enough: Arc<AtomicBool>,
}

impl Progress {
    pub(super) fn is_enough(&self) -> bool {
        self.enough.load(Ordering::Acquire)
    }

    pub(super) fn add(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// So many bytes have passed altogether. Fewer than before are not believed.
    pub(super) fn reach(&self, bytes: u64) {
        self.bytes.fetch_max(bytes, Ordering::Relaxed);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }
}

/// The end of a stream once it is enough: an agent that always makes a little progress holds up nothing for longer.
#[derive(Debug, Default)]
pub(super) struct Ending {
    until: Option<Instant>,
}

impl Ending {
    /// Whether the stream should have ended by now, which it has so long for once it was enough.
    pub(super) fn is_overdue(&mut self, progress: &Progress, patience: Duration) -> bool {
        progress.is_enough() && {
            let now = Instant::now();
            now > *self.until.get_or_insert(now + patience)
        }
    }
}

#[derive(Debug)]
pub(super) enum Stream {
    Host(HostStream),
    Guests(GuestStream),
}

impl Stream {
    fn run(self, progress: &Progress) -> Result<Outcome, BenchError> {
        match self {
            Stream::Host(stream) => stream.run(progress),
            Stream::Guests(stream) => stream.run(progress),
        }
    }
}

/// Measure. With `show`, a line goes to standard output each second. `denials` says how many calls of the VM the policy has denied so
/// far, if that is known.
pub fn measure(
    parties: &Parties,
    plan: &Plan,
    show: bool,
    interrupt: &Interrupt,
    denials: impl Fn() -> Option<u64>,
) -> Result<Measurement, BenchError> {
    let (from, to) = parties.names(plan.kind);
    let mut measurement = Measurement::new(from, to, plan);
    if show {
        show_line(&measurement.title());
    }
    let deadline = Deadline::after(SETUP_TIMEOUT);
    let streams = connect(parties, plan, deadline, denials)?;
    interrupt.ends_process(false);
    let result = run(streams, plan, &mut measurement, show, interrupt);
    interrupt.ends_process(true);
    result?;
    if show {
        show_line(&measurement.summary());
    }
    Ok(measurement)
}

/// Connect all streams by this deadline.
pub(super) fn connect(
    parties: &Parties,
    plan: &Plan,
    deadline: Deadline,
    denials: impl Fn() -> Option<u64>,
) -> Result<Vec<Stream>, BenchError> {
    let connect = |index| {
        let seed = plan.verify.then_some(index as u64);
        let Some(other) = &parties.other else {
            let stream = HostStream::connect(&parties.vm, plan, seed, deadline)?;
            return Ok(Stream::Host(stream));
        };
        let before = denials();
        let stream = GuestStream::connect(&parties.vm, other, parties.port, plan, seed, deadline);
        stream.map(Stream::Guests).map_err(|(error, port)| {
            if error.is_unreachable() && before < denials() {
                let (from, to) = (parties.vm.name.clone(), other.name.clone());
                return BenchError::Denied { from, to, port };
            }
            error
        })
    };
    (0..plan.streams).map(connect).collect()
}

fn run(
    streams: Vec<Stream>,
    plan: &Plan,
    measurement: &mut Measurement,
    show: bool,
    interrupt: &Interrupt,
) -> Result<(), BenchError> {
    let enough = Arc::new(AtomicBool::new(false));
    let progress: Vec<Progress> = streams
        .iter()
        .map(|_| Progress {
            bytes: AtomicU64::new(0),
            enough: Arc::clone(&enough),
        })
        .collect();
    let mut outcomes: Vec<Option<(Outcome, Duration)>> = vec![None; streams.len()];
    let started = Instant::now();
    let result = std::thread::scope(|scope| {
        let (sender, ended) = channel();
        let mut failed = None;
        for (index, (stream, progress)) in streams.into_iter().zip(&progress).enumerate() {
            let sender = sender.clone();
            let thread = std::thread::Builder::new().name(format!("stream {index}"));
            let work = move || {
                let outcome = stream.run(progress);
                // The receiver lives until all streams have ended.
                let _ = sender.send((index, outcome.map(|outcome| (outcome, started.elapsed()))));
            };
            if let Err(source) = thread.spawn_scoped(scope, work) {
                enough.store(true, Ordering::Release);
                let what = "start a thread";
                failed = Some(BenchError::Local { what, source });
                break;
            }
        }
        drop(sender);
        let mut watch = Watch::new(started, plan, &progress, show);
        let watched = watch.until_all_ended(&ended, &mut outcomes, &enough, interrupt);
        measurement.intervals = watch.intervals;
        failed.map_or(watched, Err)
    });
    result?;
    measurement.finish(outcomes.into_iter().flatten(), interrupt.has_come());
    Ok(())
}

type Ended = (usize, Result<(Outcome, Duration), BenchError>);

/// What is polled while it runs.
struct Watch<'a> {
    started: Instant,
    plan: &'a Plan,
    progress: &'a [Progress],
    show: bool,
    intervals: Vec<Interval>,
    bytes: u64,
    shown: Duration,
}

impl<'a> Watch<'a> {
    fn new(started: Instant, plan: &'a Plan, progress: &'a [Progress], show: bool) -> Watch<'a> {
        Watch {
            started,
            plan,
            progress,
            show,
            intervals: Vec::new(),
            bytes: 0,
            shown: Duration::ZERO,
        }
    }

    /// Until every stream has ended; the first failure ends the others.
    fn until_all_ended(
        &mut self,
        ended: &Receiver<Ended>,
        outcomes: &mut [Option<(Outcome, Duration)>],
        enough: &AtomicBool,
        interrupt: &Interrupt,
    ) -> Result<(), BenchError> {
        let mut result = Ok(());
        loop {
            match ended.recv_timeout(LOOK_INTERVAL) {
                Ok((index, Ok(outcome))) => outcomes[index] = Some(outcome),
                Ok((_, Err(error))) => {
                    enough.store(true, Ordering::Release);
                    // What comes after the first is mostly its consequence.
                    result = result.and(Err(error));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return result,
            }
            let now = self.started.elapsed();
            if !enough.load(Ordering::Acquire) {
                self.look(now);
                if now >= self.plan.time || interrupt.has_come() {
                    enough.store(true, Ordering::Release);
                }
            }
        }
    }

    fn look(&mut self, now: Duration) {
        if now - self.shown < SHOW_INTERVAL {
            return;
        }
        let bytes: u64 = self.progress.iter().map(Progress::bytes).sum();
        let interval = Interval::new(self.shown, now, bytes.saturating_sub(self.bytes));
        if self.show {
            let round_trips = self.plan.kind == Kind::Ping;
            show_line(&interval.line(round_trips.then_some(self.plan.message_len)));
        }
        self.intervals.push(interval);
        (self.bytes, self.shown) = (bytes, now);
    }
}

/// A line for the person. One who does not listen any more does not end the measurement.
fn show_line(text: &str) {
    let mut out = io::stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_has_an_end_once_it_is_enough_whatever_progress_it_makes() {
        let progress = Progress {
            bytes: AtomicU64::new(0),
            enough: Arc::default(),
        };
        let mut ending = Ending::default();
        assert!(!ending.is_overdue(&progress, Duration::ZERO));
        progress.enough.store(true, Ordering::Release);
        assert!(!ending.is_overdue(&progress, Duration::from_secs(3600)));
        ending.until = Some(Instant::now());
        progress.add(1);
        while !ending.is_overdue(&progress, Duration::ZERO) {
            std::hint::spin_loop();
        }
    }
}
