//! A run's results, as they are kept.

use std::collections::BTreeMap;
use std::time::Instant;

use serde::{Deserialize, Serialize};

use super::measure::Conditions;
use super::processor::{load, stolen};

/// The form of the file. Another one has another number.
pub const FORMAT: u32 = 1;

/// A run.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Run {
    /// [`FORMAT`].
    pub format: u32,
    /// Where it was.
    pub environment: Environment,
    /// How it was done.
    pub settings: Settings,
    /// What came out, in the order in which it was measured.
    pub points: Vec<Point>,
}

impl Run {
    /// A run with all that is measured meanwhile, and with how the machine was at its end.
    pub fn record(
        environment: Environment,
        rounds: usize,
        conditions: &Conditions,
        measure: impl FnOnce(&mut Run),
    ) -> Run {
        let start = Instant::now();
        let stolen_before = stolen();
        let mut run = Run {
            format: FORMAT,
            environment,
            settings: Settings {
                rounds,
                warm_up_ms: conditions.warm_up.as_millis() as u64,
                window_ms: conditions.window.as_millis() as u64,
            },
            points: Vec::new(),
        };
        measure(&mut run);
        let stolen_after = stolen();
        let environment = &mut run.environment;
        environment.load_after = load();
        environment.seconds = start.elapsed().as_secs_f64();
        environment.stolen_share = (stolen_after.0 - stolen_before.0) as f64
            / (stolen_after.1 - stolen_before.1).max(1) as f64;
        run
    }
}

/// Where a run was made. No names and no paths.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Environment {
    /// Day, in UTC: 2026-11-20.
    pub date: String,
    /// The processor, in its own words.
    pub cpu: String,
    /// How many there are.
    pub cpus: usize,
    /// Whether the machine is itself a virtual one.
    pub virtual_machine: bool,
    /// The kernel's version.
    pub kernel: String,
    /// The commit of this project.
    pub commit: String,
    /// Whether there were changes beside the commit.
    pub dirty: bool,
    /// What was measured beside this project, with its version.
    pub peer: Option<String>,
    /// Generator and subject had a processor each.
    pub apart: bool,
    /// Load average over the last minute, when the run began.
    pub load_before: f64,
    /// The same when it ended.
    pub load_after: f64,
    /// Share of the processors' time that the machine's own host took away meanwhile.
    pub stolen_share: f64,
    /// How long it took, in seconds.
    pub seconds: f64,
}

/// How a run was made.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Settings {
    /// Rounds of each case.
    pub rounds: usize,
    /// Warm-up of each measurement, in milliseconds.
    pub warm_up_ms: u64,
    /// Length of each measurement, in milliseconds.
    pub window_ms: u64,
}

/// Everything about one case and one subject.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Point {
    /// The case's name.
    pub case: String,
    /// What was measured: `ringdown`, `vhost-device-vsock`, `af_unix`, `memcpy`, `machine`.
    pub subject: String,
    /// By round.
    pub rounds: Vec<Round>,
}

/// One measurement.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Round {
    /// How it went.
    #[serde(flatten)]
    pub outcome: Outcome,
    /// Load average at its end.
    pub load: f64,
}

/// How a measurement went.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    /// With these figures.
    Figures(BTreeMap<String, f64>),
    /// Nothing more happened.
    Hangs(String),
    /// It could not be done, or came out wrong.
    Failed(String),
}

/// The middle of several measurements, and how far they lie apart.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Summary {
    /// The median.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
    /// The first quartile.
    pub lower: f64,
    /// The third quartile.
    pub upper: f64,
    /// How many.
    pub count: usize,
}

impl Summary {
    /// Of these values; none of none.
    pub fn of(values: &[f64]) -> Option<Summary> {
        let mut sorted: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
        sorted.sort_by(f64::total_cmp);
        let (min, max) = (*sorted.first()?, *sorted.last()?);
        Some(Summary {
            median: quantile(&sorted, 0.5),
            min,
            max,
            lower: quantile(&sorted, 0.25),
            upper: quantile(&sorted, 0.75),
            count: sorted.len(),
        })
    }

    /// The distance of the quartiles as a share of the median.
    pub fn spread(&self) -> f64 {
        match self.median == 0.0 {
            true => 0.0,
            false => (self.upper - self.lower) / self.median.abs(),
        }
    }
}

/// Between the two nearest values, in proportion.
fn quantile(sorted: &[f64], share: f64) -> f64 {
    let place = share * (sorted.len() - 1) as f64;
    let below = sorted[place.floor() as usize];
    let above = sorted[place.ceil() as usize];
    below + (above - below) * place.fract()
}

impl Run {
    /// The point of a case and subject.
    pub fn point(&self, case: &str, subject: &str) -> Option<&Point> {
        self.points
            .iter()
            .find(|point| point.case == case && point.subject == subject)
    }

    /// A figure over all rounds.
    pub fn summary(&self, case: &str, subject: &str, figure: &str) -> Option<Summary> {
        self.point(case, subject)?.summary(figure)
    }

    /// The median of a figure over all rounds.
    pub fn median(&self, case: &str, subject: &str, figure: &str) -> Option<f64> {
        Some(self.summary(case, subject, figure)?.median)
    }

    /// Keeps what one measurement came to.
    pub fn add(&mut self, case: &str, subject: &str, round: Round) {
        let known = self
            .points
            .iter_mut()
            .find(|point| point.case == case && point.subject == subject);
        match known {
            Some(point) => point.rounds.push(round),
            None => self.points.push(Point {
                case: case.to_owned(),
                subject: subject.to_owned(),
                rounds: vec![round],
            }),
        }
    }
}

impl Point {
    /// A figure over all rounds that came to figures.
    pub fn summary(&self, figure: &str) -> Option<Summary> {
        let values: Vec<f64> = self
            .rounds
            .iter()
            .filter_map(|round| match &round.outcome {
                Outcome::Figures(figures) => figures.get(figure).copied(),
                Outcome::Hangs(_) | Outcome::Failed(_) => None,
            })
            .collect();
        Summary::of(&values)
    }

    /// Whether it is not worth trying again: it has hung once, or failed twice, and never worked.
    pub fn is_hopeless(&self) -> bool {
        let worked = |round: &Round| matches!(round.outcome, Outcome::Figures(_));
        let hung = |round: &Round| matches!(round.outcome, Outcome::Hangs(_));
        !self.rounds.iter().any(worked) && (self.rounds.iter().any(hung) || self.rounds.len() >= 2)
    }

    /// What went wrong in the first round in which something did, in a word and in full.
    pub fn trouble(&self) -> Option<(&'static str, &str)> {
        self.rounds.iter().find_map(|round| match &round.outcome {
            Outcome::Figures(_) => None,
            Outcome::Hangs(reason) => Some(("hangs", reason.as_str())),
            Outcome::Failed(reason) => Some(("fails", reason.as_str())),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_median_and_quartiles() {
        let summary = Summary::of(&[5.0, 1.0, 3.0, 2.0, 4.0]).unwrap();
        assert_eq!(
            (
                summary.min,
                summary.lower,
                summary.median,
                summary.upper,
                summary.max
            ),
            (1.0, 2.0, 3.0, 4.0, 5.0)
        );
        assert!((summary.spread() - 2.0 / 3.0).abs() < 1e-9);
        assert_eq!(Summary::of(&[1.0, 2.0]).unwrap().median, 1.5);
        assert_eq!(Summary::of(&[]), None);
        assert_eq!(Summary::of(&[f64::NAN]), None);
    }

    #[test]
    fn what_hangs_once_or_fails_twice_is_hopeless_unless_it_has_worked() {
        let hangs = || Outcome::Hangs(String::new());
        let fails = || Outcome::Failed(String::new());
        let works = || Outcome::Figures(BTreeMap::new());
        for (outcomes, hopeless) in [
            (vec![], false),
            (vec![hangs()], true),
            (vec![fails()], false),
            (vec![fails(), fails()], true),
            (vec![works(), hangs(), fails()], false),
        ] {
            let rounds = outcomes.into_iter();
            let point = Point {
                case: String::new(),
                subject: String::new(),
                rounds: rounds.map(|outcome| Round { outcome, load: 0.0 }).collect(),
            };
            assert_eq!(point.is_hopeless(), hopeless, "{point:?}");
        }
    }

    #[test]
    fn outcomes_survive_their_form_in_a_file() {
        let figures = BTreeMap::from([("gbit_per_s".to_owned(), 1.5)]);
        for outcome in [
            Outcome::Figures(figures),
            Outcome::Hangs("no more".to_owned()),
            Outcome::Failed("refused".to_owned()),
        ] {
            let round = Round { outcome, load: 0.5 };
            let text = serde_json::to_string(&round).unwrap();
            let back: Round = serde_json::from_str(&text).unwrap();
            assert_eq!(serde_json::to_string(&back).unwrap(), text);
        }
    }
}
