//! What is to be reached, and whether it is.

use crate::perf::goals::Bound::{AtLeast, AtMost};
use crate::perf::goals::Reference::{Figure, Times, TimesCase};
use crate::perf::goals::{Goal, goal};

const RATE: &str = "gbit_per_s";
const TIME: &str = "rtt_us";

/// All goals.
pub const GOALS: &[Goal] = &[
    goal(
        "in place, 64 KiB, Gbit/s",
        "in-place/64K/spin",
        RATE,
        AtLeast(Figure(137.0)),
    ),
    goal(
        "in place, 128 KiB, Gbit/s",
        "in-place/128K/spin",
        RATE,
        AtLeast(Figure(137.0)),
    ),
    goal(
        "beside the bare ring, in place, 64 KiB",
        "in-place/64K/spin",
        RATE,
        AtLeast(Times(0.95, "bare")),
    ),
    goal(
        "beside the bare ring, in place, 128 KiB",
        "in-place/128K/spin",
        RATE,
        AtLeast(Times(0.95, "bare")),
    ),
    goal(
        "beside the bare ring, one copy, 64 KiB",
        "one-copy/64K/spin",
        RATE,
        AtLeast(Times(0.95, "bare")),
    ),
    goal(
        "beside a UNIX socket, 64 KiB",
        "in-place/64K/spin",
        RATE,
        AtLeast(Times(2.5, "unix")),
    ),
    goal(
        "beside TCP, 64 KiB",
        "in-place/64K/spin",
        RATE,
        AtLeast(Times(8.0, "tcp")),
    ),
    goal(
        "round trip, spinning",
        "rtt/64/spin",
        TIME,
        AtMost(Times(1.3, "bare")),
    ),
    goal(
        "round trip, sleeping",
        "rtt/64/sleep",
        TIME,
        AtMost(Times(1.05, "eventfd")),
    ),
    goal(
        "among 1,000 others, in place, 64 KiB",
        "in-place/64K/spin/1000",
        RATE,
        AtLeast(TimesCase(0.97, "in-place/64K/spin")),
    ),
    goal(
        "among 1,000 others, round trip, spinning",
        "rtt/64/spin/1000",
        TIME,
        AtMost(TimesCase(1.03, "rtt/64/spin")),
    ),
];

#[cfg(test)]
mod tests {
    use super::super::case::Case;
    use super::*;

    #[test]
    fn goals_name_cases_that_exist() {
        for goal in GOALS {
            for case in goal.cases() {
                assert!(case.parse::<Case>().is_ok(), "{case}");
            }
        }
    }
}
