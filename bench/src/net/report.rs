//! A run for people: tables in Markdown.

use super::case::Case;
use super::goals::GOALS;
use super::techniques::{CASES, STEPS};
use crate::perf::goals::judged;
use crate::perf::report::tables::{cases, cell, percent, table, troubles};
use crate::perf::report::{Table, document, number, preface};
use crate::perf::results::Run;

/// The subjects, in the order of columns.
const SUBJECTS: [&str; 4] = ["ringdown", "testpmd", "ovs-dpdk", "bridge"];

/// The whole report.
pub fn markdown(run: &Run) -> String {
    let preface = preface(run, |case| {
        case.parse::<Case>().ok().map(|_| "mframes_per_s")
    });
    document("Bench of the switch", &preface, &tables(run))
}

/// The goals that this run can judge.
pub fn goals(run: &Run) -> Table {
    judged(GOALS, run)
}

fn tables(run: &Run) -> Vec<Table> {
    let mut tables = vec![
        goals(run),
        rates(run, "Millions of frames a second", "mframes_per_s"),
        rates(run, "Gbit a second", "gbit_per_s"),
        costs(run),
        steps(run),
        troubles(run),
    ];
    tables.retain(|table| !table.rows.is_empty());
    tables
}

/// Only subjects that the run has.
fn subjects(run: &Run) -> Vec<&'static str> {
    let measured = |subject: &&str| run.points.iter().any(|point| point.subject == *subject);
    SUBJECTS.into_iter().filter(measured).collect()
}

fn rates(run: &Run, title: &str, figure: &str) -> Table {
    let subjects = subjects(run);
    let rows = cases(run).into_iter().map(|case| {
        let cells = subjects
            .iter()
            .map(|subject| cell(run.point(case, subject), figure));
        std::iter::once(case.to_owned()).chain(cells).collect()
    });
    let header: Vec<&str> = std::iter::once("case")
        .chain(subjects.iter().copied())
        .collect();
    table(
        title,
        "Of all ports together, as they arrived. A case is LENGTH/FLOWS/PORTS/RINGS; `asleep`: the guests wait for interrupts.",
        &header,
        rows.collect(),
    )
}

fn steps(run: &Run) -> Table {
    let mut rows = Vec::new();
    for case in CASES {
        let mut before: Option<f64> = None;
        for (name, _) in STEPS {
            let Some(rate) = run.median(case, name, "mframes_per_s") else {
                continue;
            };
            let text = |figure: &str| {
                run.median(case, name, figure)
                    .map(number)
                    .unwrap_or_default()
            };
            rows.push(vec![
                case.to_owned(),
                name.to_owned(),
                cell(run.point(case, name), "mframes_per_s"),
                before
                    .map(|before| format!("{:.2}x", rate / before))
                    .unwrap_or_default(),
                text("gbit_per_s"),
                text("subject_cpu_s_per_mframe"),
                text("kicks_per_kframe"),
                text("interrupts_per_kframe"),
            ]);
            before = Some(rate);
        }
    }
    table(
        "What each technique brings",
        "Guests that sleep until they are interrupted; each line switches one thing more on. Moderation: the switch holds interrupts back for a moment \
         after each. Combining: the guest hands over all that it has at once. Suppression: both sides look in shared memory whether the other one wants \
         to be notified. Batching: the switch decides about a batch, and copies and notifies by destination.",
        &[
            "case",
            "switched on",
            "Mframes/s",
            "times",
            "Gbit/s",
            "CPU s",
            "kicks",
            "interrupts",
        ],
        rows,
    )
}

fn costs(run: &Run) -> Table {
    let mut rows = Vec::new();
    for case in cases(run) {
        for subject in subjects(run) {
            let figure = |name: &str| run.median(case, subject, name);
            if figure("mframes_per_s").is_none() {
                continue;
            }
            let text = |name: &str| figure(name).map(number).unwrap_or_default();
            let share = |name: &str| figure(name).map(percent).unwrap_or_default();
            rows.push(vec![
                case.to_owned(),
                subject.to_owned(),
                text("subject_cpu_s_per_mframe"),
                share("subject_share"),
                share("generator_share"),
                text("kicks_per_kframe"),
                text("interrupts_per_kframe"),
                share("lost_share"),
            ]);
        }
    }
    table(
        "What it costs",
        "Processor time of the subject for a million frames that arrived (of the bridge: the time of its users in the kernel, on both processors); \
         the subject's and the generator's share of a processor; notifications for a thousand frames; the share of frames sent that did not arrive.",
        &[
            "case",
            "subject",
            "CPU s",
            "busy",
            "generator",
            "kicks",
            "interrupts",
            "lost",
        ],
        rows,
    )
}
