//! One measurement, and a run of them.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::case::{Case, Subject, Work};
use super::end::{expected_sum, make};
use super::other::Other;
use crate::perf::measure::{Conditions, Failed, Figures};
use crate::perf::processor::load;
use crate::perf::progress::{Progress, line_of};
use crate::perf::results::{Environment, Outcome, Point, Round, Run};

/// What starting and ending a process takes, in about.
const OVERHEAD: Duration = Duration::from_millis(50);

/// Between two reads of the clock while a round trip takes less than one.
const ROUND_TRIPS_PER_CLOCK: u64 = 64;

/// What is to be measured, and how.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The cases, in order.
    pub cases: Vec<Case>,
    /// Rounds of each case.
    pub rounds: usize,
    /// How long each measurement takes, and where.
    pub conditions: Conditions,
}

impl Plan {
    /// Measures everything.
    pub fn run(&self, environment: Environment, progress: &Progress) -> Run {
        Run::record(environment, self.rounds, &self.conditions, |run| {
            let measurements: usize = self.cases.iter().map(|case| case.subjects().len()).sum();
            progress.begin(self.expected() * (measurements * self.rounds) as u32);
            for cases in self.interleaved() {
                self.run_cases(&cases, run, progress);
            }
            progress.end();
        })
    }

    fn expected(&self) -> Duration {
        self.conditions.warm_up + self.conditions.window + OVERHEAD
    }

    /// Cases whose rounds take turns: one, and the same among others, which are compared with each other.
    fn interleaved(&self) -> Vec<Vec<Case>> {
        let mut groups: Vec<Vec<Case>> = Vec::new();
        for case in &self.cases {
            match groups
                .iter_mut()
                .find(|group| group[0].is_but_for_others(case))
            {
                Some(group) => group.push(*case),
                None => groups.push(vec![*case]),
            }
        }
        groups
    }

    fn run_cases(&self, cases: &[Case], run: &mut Run, progress: &Progress) {
        for round in 0..self.rounds {
            for case in cases {
                self.run_round(round, case, run, progress);
            }
        }
        for case in cases {
            let names: Vec<&str> = case
                .subjects()
                .iter()
                .map(|subject| subject.name())
                .collect();
            progress.line(&line_of(run, &case.to_string(), &names, case.headline()));
        }
    }

    fn run_round(&self, round: usize, case: &Case, run: &mut Run, progress: &Progress) {
        let name = case.to_string();
        for subject in case.subjects() {
            let title = subject.name();
            if !run.point(&name, title).is_some_and(Point::is_hopeless) {
                progress.tell(&format!("{name} {title} {}/{}", round + 1, self.rounds));
                let outcome = match measure(*subject, case, &self.conditions) {
                    Ok(figures) => Outcome::Figures(figures),
                    Err(Failed::Hangs(reason)) => Outcome::Hangs(reason),
                    Err(Failed::Error(reason)) => Outcome::Failed(reason),
                };
                let load = load();
                run.add(&name, title, Round { outcome, load });
            }
            progress.advance(self.expected());
        }
    }
}

/// Measures one subject in one case.
///
/// # Errors
/// It could not be done, or a sum was wrong.
pub fn measure(subject: Subject, case: &Case, conditions: &Conditions) -> Result<Figures, Failed> {
    if subject == Subject::Memcpy {
        return Ok(memcpy(case.message_len, conditions));
    }
    let mut other = Other::start(subject, case, conditions)?;
    match case.work {
        Work::RoundTrip => round_trips(&mut other, case, conditions),
        Work::InPlace | Work::OneCopy => throughput(&mut other, case.message_len, conditions),
    }
}

fn throughput(other: &mut Other, len: usize, conditions: &Conditions) -> Result<Figures, Failed> {
    let mut first = 0;
    let mut read_for = |time: Duration| -> Result<(u64, Duration), Failed> {
        let start = Instant::now();
        let mut messages = 0;
        loop {
            let sum = other.end.sum(len)?;
            if sum != expected_sum(len, first) {
                return Err(Failed::Error(format!(
                    "the message that begins with {first} sums up to {sum}, expected {}",
                    expected_sum(len, first)
                )));
            }
            first += len as u64 / 8;
            messages += 1;
            let elapsed = start.elapsed();
            if elapsed >= time {
                return Ok((messages, elapsed));
            }
        }
    };
    read_for(conditions.warm_up)?;
    let (messages, elapsed) = read_for(conditions.window)?;
    let rate = (messages * len as u64 * 8) as f64 / elapsed.as_secs_f64() / 1e9;
    Ok(Figures::from([("gbit_per_s".to_owned(), rate)]))
}

fn round_trips(other: &mut Other, case: &Case, conditions: &Conditions) -> Result<Figures, Failed> {
    let mut message = vec![0; case.message_len];
    let mut number = 0;
    let mut go_for = |time: Duration| -> Result<(u64, Duration), Failed> {
        let start = Instant::now();
        let mut count = 0;
        loop {
            for _ in 0..ROUND_TRIPS_PER_CLOCK {
                let mut next = number;
                make(&mut message, &mut next);
                other.end.send(&message)?;
                other.end.receive(&mut message)?;
                if message[..8] != u64::to_ne_bytes(number) {
                    return Err(Failed::Error("another message came back".to_owned()));
                }
                number = next;
            }
            count += ROUND_TRIPS_PER_CLOCK;
            let elapsed = start.elapsed();
            if elapsed >= time {
                return Ok((count, elapsed));
            }
        }
    };
    go_for(conditions.warm_up)?;
    let (count, elapsed) = go_for(conditions.window)?;
    let each_us = elapsed.as_secs_f64() * 1e6 / count as f64;
    Ok(Figures::from([("rtt_us".to_owned(), each_us)]))
}

/// How fast one process copies messages within as much memory as a ring has.
fn memcpy(len: usize, conditions: &Conditions) -> Figures {
    let memory = super::end::RING_LEN as usize;
    let source = vec![1_u8; memory];
    let mut target = vec![0_u8; memory];
    let mut copy_for = |time: Duration| {
        let start = Instant::now();
        let mut bytes = 0_u64;
        loop {
            for (from, to) in source.chunks_exact(len).zip(target.chunks_exact_mut(len)) {
                to.copy_from_slice(black_box(from));
                bytes += len as u64;
            }
            black_box(&mut target);
            let elapsed = start.elapsed();
            if elapsed >= time {
                return bytes as f64 * 8.0 / elapsed.as_secs_f64() / 1e9;
            }
        }
    };
    copy_for(conditions.warm_up);
    let rate = copy_for(conditions.window);
    Figures::from([("gbit_per_s".to_owned(), rate)])
}
