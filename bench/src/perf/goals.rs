//! What is to be reached, and whether it is.

use super::report::{Table, number};
use super::results::Run;

const OURS: &str = "ringdown";
const ASLEEP: &str = "ringdown --spin 0";
const PEER: &str = "vhost-device-vsock";

/// A generator that is busier than this is itself the limit: only the subject's own cost counts then.
const BUSY: f64 = 0.85;

/// What a figure is compared with.
pub enum Reference {
    /// This many times another subject's figure of the same case.
    Times(f64, &'static str),
    /// This many times another case's figure of ours.
    TimesCase(f64, &'static str),
    /// A figure as it is.
    Figure(f64),
}

/// On which side of it a figure is to lie.
pub enum Bound {
    /// Not below.
    AtLeast(Reference),
    /// Not above.
    AtMost(Reference),
}

/// One goal.
pub struct Goal {
    subject: &'static str,
    title: &'static str,
    case: &'static str,
    figure: &'static str,
    bound: Bound,
    /// Once it is met: the number that is to be reached from then on, in the terms of the bound.
    raised: Option<f64>,
}

/// A goal of this project's program.
pub const fn goal(
    title: &'static str,
    case: &'static str,
    figure: &'static str,
    bound: Bound,
) -> Goal {
    Goal {
        subject: OURS,
        title,
        case,
        figure,
        bound,
        raised: None,
    }
}

/// A goal that was met, with what has to be reached now: about a tenth less than was.
const fn raised(to: f64, goal: Goal) -> Goal {
    Goal {
        raised: Some(to),
        ..goal
    }
}

/// The same goal for a daemon that sleeps at once.
const fn asleep(goal: Goal) -> Goal {
    Goal {
        subject: ASLEEP,
        ..goal
    }
}

use Bound::{AtLeast, AtMost};
use Reference::{Figure, Times, TimesCase};

const AF_UNIX: &str = "af_unix";
const RATE: &str = "gbit_per_s";
const COST: &str = "subject_cpu_s_per_gib";
const CONNECTS: &str = "connections_per_s";

/// All goals.
pub const GOALS: &[Goal] = &[
    raised(
        0.9,
        goal(
            "guest→host 64K, 1 stream",
            "g2h/64K/1",
            RATE,
            AtLeast(Times(0.80, AF_UNIX)),
        ),
    ),
    raised(
        1.4,
        goal(
            "guest→host 64K, 1 stream, cheap mode",
            "g2h/64K/1/cheap",
            RATE,
            AtLeast(Times(0.80, AF_UNIX)),
        ),
    ),
    raised(
        4.9,
        goal(
            "guest→host 64K, 1 stream",
            "g2h/64K/1",
            RATE,
            AtLeast(Times(4.0, PEER)),
        ),
    ),
    goal(
        "guest→host 128K, 1 stream",
        "g2h/128K/1",
        RATE,
        AtLeast(Times(0.80, AF_UNIX)),
    ),
    raised(
        4.4,
        goal(
            "guest→host 128K, 1 stream",
            "g2h/128K/1",
            RATE,
            AtLeast(Times(4.0, PEER)),
        ),
    ),
    goal(
        "guest→host 4K, 4 streams",
        "g2h/4K/4",
        RATE,
        AtLeast(Times(1.2, AF_UNIX)),
    ),
    goal(
        "host→guest 64K, 1 stream",
        "h2g/64K/1",
        RATE,
        AtLeast(Times(0.70, AF_UNIX)),
    ),
    raised(
        1.2,
        goal(
            "host→guest 64K, 1 stream, cheap mode",
            "h2g/64K/1/cheap",
            RATE,
            AtLeast(Times(0.70, AF_UNIX)),
        ),
    ),
    raised(
        4.1,
        goal(
            "host→guest 64K, 1 stream",
            "h2g/64K/1",
            RATE,
            AtLeast(Times(4.0, PEER)),
        ),
    ),
    goal(
        "host→guest 128K, 1 stream",
        "h2g/128K/1",
        RATE,
        AtLeast(Times(0.70, AF_UNIX)),
    ),
    goal(
        "host→guest 128K, 1 stream",
        "h2g/128K/1",
        RATE,
        AtLeast(Times(4.0, PEER)),
    ),
    goal(
        "host→guest 4K, 4 streams",
        "h2g/4K/4",
        RATE,
        AtLeast(Times(1.0, AF_UNIX)),
    ),
    goal(
        "guest↔guest 64K, 1 stream",
        "g2g/64K/1",
        RATE,
        AtLeast(Times(0.40, "memcpy")),
    ),
    raised(
        0.43,
        goal(
            "guest↔guest 64K, 1 stream, cheap mode",
            "g2g/64K/1/cheap",
            RATE,
            AtLeast(Times(0.40, "memcpy")),
        ),
    ),
    goal(
        "guest↔guest 64K above guest→host",
        "g2g/64K/1",
        RATE,
        AtLeast(TimesCase(1.0, "g2h/64K/1")),
    ),
    goal(
        "guest↔guest 4K, 1 stream",
        "g2g/4K/1",
        RATE,
        AtLeast(Times(4.0, PEER)),
    ),
    raised(
        0.62,
        goal(
            "ping-pong 64 B host-guest-host, mean",
            "pingpong/h-g/64",
            "mean_us",
            AtMost(Times(1.0, AF_UNIX)),
        ),
    ),
    asleep(goal(
        "ping-pong 64 B host-guest-host, mean, without looking before sleeping",
        "pingpong/h-g/64",
        "mean_us",
        AtMost(Times(1.5, AF_UNIX)),
    )),
    raised(
        0.25,
        goal(
            "ping-pong 64 B guest-guest, mean",
            "pingpong/g-g/64",
            "mean_us",
            AtMost(Times(0.4, PEER)),
        ),
    ),
    goal(
        "connections, guest→host, one at a time",
        "connect/g2h/1",
        CONNECTS,
        AtLeast(Times(3.0, PEER)),
    ),
    raised(
        2.9,
        goal(
            "connections, guest→host, 16 in parallel",
            "connect/g2h/16",
            CONNECTS,
            AtLeast(Times(2.5, PEER)),
        ),
    ),
    goal(
        "connections, host→guest, one at a time",
        "connect/h2g/1",
        CONNECTS,
        AtLeast(Times(3.0, PEER)),
    ),
    raised(
        2.8,
        goal(
            "connections, host→guest, 16 in parallel",
            "connect/h2g/16",
            CONNECTS,
            AtLeast(Times(2.5, PEER)),
        ),
    ),
    goal(
        "daemon CPU s per GiB, guest→host 64K",
        "g2h/64K/1",
        COST,
        AtMost(Times(0.25, PEER)),
    ),
    goal(
        "daemon CPU s per GiB, host→guest 64K",
        "h2g/64K/1",
        COST,
        AtMost(Times(0.20, PEER)),
    ),
    goal(
        "daemon CPU s per GiB, guest↔guest 4K",
        "g2g/4K/1",
        COST,
        AtMost(Times(0.25, PEER)),
    ),
    goal(
        "daemon CPU s per GiB, guest↔guest 64K",
        "g2g/64K/1",
        COST,
        AtMost(Figure(0.15)),
    ),
    raised(
        440.0,
        goal(
            "idle circuit, bytes",
            "idle/g2h/10000",
            "pss_bytes_each",
            AtMost(Figure(1024.0)),
        ),
    ),
    goal(
        "idle circuit, descriptors",
        "idle/g2h/10000",
        "descriptors_each",
        AtMost(Figure(1.0)),
    ),
    goal(
        "idle daemon, 16 quiet VMs, CPU ms per s",
        "quiet/16",
        "cpu_ms_per_s",
        AtMost(Figure(0.0)),
    ),
    goal(
        "idle daemon, 16 quiet VMs, wake-ups per s",
        "quiet/16",
        "wakeups_per_s",
        AtMost(Figure(0.0)),
    ),
];

impl Goal {
    /// The cases that it takes to judge it.
    pub fn cases(&self) -> Vec<&'static str> {
        let (AtLeast(reference) | AtMost(reference)) = &self.bound;
        match reference {
            TimesCase(_, case) => vec![self.case, case],
            Times(..) | Figure(_) => vec![self.case],
        }
    }

    fn reference(&self) -> &Reference {
        let (AtLeast(reference) | AtMost(reference)) = &self.bound;
        reference
    }

    fn wanted(&self) -> String {
        let word = match self.bound {
            AtLeast(_) => "at least",
            AtMost(_) => "at most",
        };
        match self.reference() {
            Times(factor, subject) => format!("{word} {factor:.2}x {subject}"),
            TimesCase(factor, case) => format!("{word} {factor:.2}x {case}"),
            Figure(figure) => format!("{word} {}", number(*figure)),
        }
    }

    /// The cells behind the title; none when the run does not know the case.
    fn judge(&self, run: &Run) -> Option<[String; 4]> {
        let point = run.point(self.case, self.subject)?;
        let Some(value) = point.summary(self.figure).map(|summary| summary.median) else {
            let (word, reason) = point.trouble()?;
            return Some([
                self.wanted(),
                word.to_owned(),
                String::new(),
                format!("MISSED: {reason}"),
            ]);
        };
        let (compared, factor) = match self.reference() {
            Times(factor, subject) => {
                let other = run.point(self.case, subject)?;
                match other.summary(self.figure) {
                    Some(summary) => (summary.median, *factor),
                    None => {
                        let word = other.trouble().map_or("knows nothing", |(word, _)| word);
                        return Some([
                            self.wanted(),
                            number(value),
                            String::new(),
                            format!("met: the other {word}"),
                        ]);
                    }
                }
            }
            TimesCase(factor, case) => (run.median(case, OURS, self.figure)?, *factor),
            Figure(figure) => (*figure, 1.0),
        };
        let meets = |factor: f64| match self.bound {
            AtLeast(_) => value >= factor * compared,
            AtMost(_) => value <= factor * compared,
        };
        let met = meets(factor);
        let raised = self.raised.map(|raised| match self.reference() {
            Figure(figure) => (raised, meets(raised / figure)),
            _ => (raised, meets(raised)),
        });
        let reached = match self.reference() {
            Figure(_) => String::new(),
            _ => format!("{:.2}x", value / compared),
        };
        Some([
            self.wanted(),
            number(value),
            reached,
            self.verdict(run, met, raised),
        ])
    }

    fn verdict(&self, run: &Run, met: bool, raised: Option<(f64, bool)>) -> String {
        let share = run
            .median(self.case, self.subject, "generator_share")
            .unwrap_or(0.0);
        match met {
            true => match raised {
                Some((to, true)) => format!("met, and as raised to {}", number(to)),
                Some((to, false)) => format!("met; not as raised to {}", number(to)),
                None => "met".to_owned(),
            },
            false if self.figure == RATE && share > BUSY => format!(
                "MISSED; the generator is {:.0} % busy: judge by the CPU cost",
                share * 100.0
            ),
            false => "MISSED".to_owned(),
        }
    }
}

/// The goals that this run can judge.
pub fn table(run: &Run) -> Table {
    judged(GOALS, run)
}

/// Those of these goals that this run can judge.
pub fn judged(goals: &[Goal], run: &Run) -> Table {
    let rows = goals.iter().filter_map(|goal| {
        let [wanted, value, reached, verdict] = goal.judge(run)?;
        Some(vec![goal.title.to_owned(), wanted, value, reached, verdict])
    });
    Table {
        title: "Goals".to_owned(),
        note: "Ratios of medians of one run. Where the generator is over 85 % busy, it is itself the limit, and the subject is to be \
               judged by its CPU cost."
            .to_owned(),
        header: ["case", "goal", "reached", "ratio", "verdict"]
            .map(str::to_owned)
            .to_vec(),
        rows: rows.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_name_cases_that_exist() {
        for goal in GOALS {
            for case in goal.cases() {
                assert!(case.parse::<crate::perf::case::Case>().is_ok(), "{case}");
            }
        }
    }
}
