//! A run for people: tables in Markdown.

use super::case::{Case, Work};
use super::goals::GOALS;
use crate::perf::goals::judged;
use crate::perf::report::tables::{cases, cell, table, troubles};
use crate::perf::report::{Table, document, preface};
use crate::perf::results::Run;

/// The subjects, in the order of columns.
const SUBJECTS: [&str; 6] = ["ringdown", "bare", "memcpy", "unix", "tcp", "eventfd"];

/// The whole report.
pub fn markdown(run: &Run) -> String {
    let preface = preface(run, |case| Some(case.parse::<Case>().ok()?.headline().0));
    document("Bench of circuits", &preface, &tables(run))
}

/// The goals that this run can judge.
pub fn goals(run: &Run) -> Table {
    judged(GOALS, run)
}

fn tables(run: &Run) -> Vec<Table> {
    let mut tables = vec![
        goals(run),
        figures(run, "Gbit a second", "gbit_per_s", |work| {
            work != Work::RoundTrip
        }),
        figures(
            run,
            "Round trip of 64 bytes, in microseconds",
            "rtt_us",
            |work| work == Work::RoundTrip,
        ),
        troubles(run),
    ];
    tables.retain(|table| !table.rows.is_empty());
    tables
}

fn figures(run: &Run, title: &str, figure: &str, wanted: fn(Work) -> bool) -> Table {
    let measured = |subject: &&str| {
        let mut points = run.points.iter().filter(|point| point.subject == *subject);
        points.any(|point| {
            point
                .case
                .parse::<Case>()
                .is_ok_and(|case| wanted(case.work))
        })
    };
    let subjects: Vec<&str> = SUBJECTS.into_iter().filter(measured).collect();
    let names = cases(run)
        .into_iter()
        .filter(|case| case.parse::<Case>().is_ok_and(|case| wanted(case.work)));
    let rows = names.map(|case| {
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
        "A case is WORK/LENGTH/WAITING; `/1000`: so many other circuits are open between the two processes. Sockets sleep in every case.",
        &header,
        rows.collect(),
    )
}
