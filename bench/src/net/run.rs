//! A run: every case, interleaved, with what is compared measured in the same minute.

use std::time::Duration;

use super::case::Case;
use super::measure::measure;
use super::subject::Subject;
use super::techniques::CASES;
use crate::perf::measure::{Conditions, Failed};
use crate::perf::processor::load;
use crate::perf::progress::{Progress, line_of};
use crate::perf::results::{Environment, Outcome, Point, Round, Run};

/// What starting and ending a subject takes, in about.
const OVERHEAD: Duration = Duration::from_millis(1500);

/// What is to be measured, and how.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The cases, in order.
    pub cases: Vec<Case>,
    /// What is measured in each.
    pub subjects: Vec<Subject>,
    /// What is measured beside in some of them: the techniques, one by one.
    pub steps: Vec<Subject>,
    /// Rounds of each case.
    pub rounds: usize,
    /// How long each measurement takes, and where.
    pub conditions: Conditions,
}

impl Plan {
    /// Measures everything.
    pub fn run(&self, environment: Environment, progress: &Progress) -> Run {
        Run::record(environment, self.rounds, &self.conditions, |run| {
            let measurements: usize = self
                .cases
                .iter()
                .map(|case| self.subjects(case).len())
                .sum();
            progress.begin(self.expected() * (measurements * self.rounds) as u32);
            for case in &self.cases {
                self.run_case(case, run, progress);
            }
            progress.end();
        })
    }

    /// A bridge has no rings: what differs in them only need not be measured twice.
    fn subjects(&self, case: &Case) -> Vec<&Subject> {
        let steps = match CASES.contains(&case.to_string().as_str()) {
            true => self.steps.as_slice(),
            false => &[],
        };
        let fitting = |subject: &&Subject| subject.has_rings() || !(case.packed || case.asleep);
        self.subjects.iter().filter(fitting).chain(steps).collect()
    }

    fn expected(&self) -> Duration {
        self.conditions.warm_up + self.conditions.window + OVERHEAD
    }

    fn run_case(&self, case: &Case, run: &mut Run, progress: &Progress) {
        let name = case.to_string();
        let subjects = self.subjects(case);
        for round in 0..self.rounds {
            for subject in &subjects {
                let title = subject.name();
                if !run.point(&name, title).is_some_and(Point::is_hopeless) {
                    progress.tell(&format!("{name} {title} {}/{}", round + 1, self.rounds));
                    let outcome = match measure(subject, case, &self.conditions) {
                        Ok(mut figures) => {
                            // What nothing happened for has no figure for each.
                            figures.retain(|_, figure| figure.is_finite());
                            Outcome::Figures(figures)
                        }
                        Err(Failed::Hangs(reason)) => Outcome::Hangs(reason),
                        Err(Failed::Error(reason)) => Outcome::Failed(reason),
                    };
                    let load = load();
                    run.add(&name, title, Round { outcome, load });
                }
                progress.advance(self.expected());
            }
        }
        let names: Vec<&str> = subjects.iter().map(|subject| subject.name()).collect();
        progress.line(&line_of(run, &name, &names, ("gbit_per_s", "Gbit/s")));
    }
}
