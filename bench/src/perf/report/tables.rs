//! Which tables there are.

use super::super::case::{Case, length};
use super::super::goals;
use super::super::results::{Point, Run};
use super::{Table, number};

const OURS: &str = "ringdown";
const ASLEEP: &str = "ringdown --spin 0";
const CAPTURED: [(&str, &str); 2] = [
    ("whole", "ringdown captured"),
    ("128 B of each", "ringdown captured in part"),
];
const PEER: &str = "vhost-device-vsock";

/// All that the run has something for.
pub(super) fn all(run: &Run) -> Vec<Table> {
    let mut tables = vec![goals::table(run)];
    for (direction, title) in [
        ("g2h", "Guest to host"),
        ("h2g", "Host to guest"),
        ("g2g", "Guest to guest"),
    ] {
        tables.push(throughput(run, direction, title));
    }
    tables.extend([
        ping_pong(run),
        connections(run),
        memory(run),
        quiet(run),
        many(run, "vms/", "Many VMs", "VMs"),
        many(run, "circuits/", "Many circuits", "circuits"),
        noisy(run),
        captured(run),
        machine(run),
        troubles(run),
    ]);
    tables.retain(|table| !table.rows.is_empty());
    tables
}

/// The cases of a run, in order, each once.
pub(crate) fn cases(run: &Run) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for point in &run.points {
        if !names.contains(&point.case.as_str()) {
            names.push(&point.case);
        }
    }
    names
}

/// Median, least and greatest; or why there is none.
pub(crate) fn cell(point: Option<&Point>, figure: &str) -> String {
    let Some(point) = point else {
        return String::new();
    };
    match (point.summary(figure), point.trouble()) {
        (Some(summary), _) if summary.count > 1 => format!(
            "{} ({}–{})",
            number(summary.median),
            number(summary.min),
            number(summary.max)
        ),
        (Some(summary), _) => number(summary.median),
        (None, Some((word, _))) => word.to_owned(),
        (None, None) => String::new(),
    }
}

fn brief(run: &Run, case: &str, subject: &str, figure: &str) -> String {
    run.median(case, subject, figure)
        .map(number)
        .unwrap_or_default()
}

/// Both medians in one cell.
fn both(run: &Run, case: &str, figure: &str) -> String {
    let (ours, peer) = (
        brief(run, case, OURS, figure),
        brief(run, case, PEER, figure),
    );
    match peer.is_empty() {
        true => ours,
        false => format!("{ours} / {peer}"),
    }
}

fn ratio(run: &Run, case: &str, over: &str, figure: &str) -> String {
    let ours = run.median(case, OURS, figure);
    match (ours, run.median(case, over, figure)) {
        (Some(ours), Some(other)) if other != 0.0 => format!("{:.2}x", ours / other),
        _ => String::new(),
    }
}

/// A table.
pub(crate) fn table(title: &str, note: &str, header: &[&str], rows: Vec<Vec<String>>) -> Table {
    Table {
        title: title.to_owned(),
        note: note.to_owned(),
        header: header.iter().map(|name| (*name).to_owned()).collect(),
        rows,
    }
}

fn throughput(run: &Run, direction: &str, title: &str) -> Table {
    let limit = if direction == "g2g" {
        "memcpy"
    } else {
        "af_unix"
    };
    let rows = cases(run).into_iter().filter_map(|name| {
        let Case::Throughput(case) = name.parse().ok()? else {
            return None;
        };
        if case.direction.to_string() != direction {
            return None;
        }
        let mut label = format!("{} x {}", length(case.message_len), case.streams);
        if let Some(mode) = name.split('/').nth(3) {
            label.push_str(&format!(", {mode}"));
        }
        let figure = "gbit_per_s";
        Some(vec![
            label,
            cell(run.point(name, limit), figure),
            cell(run.point(name, OURS), figure),
            cell(run.point(name, PEER), figure),
            ratio(run, name, limit, figure),
            ratio(run, name, PEER, figure),
            both(run, name, "subject_cpu_s_per_gib"),
            both(run, name, "wakeups_per_mib"),
            both(run, name, "kicks_per_mib"),
            both(run, name, "interrupts_per_mib"),
            brief(run, name, OURS, "fairness"),
            run.median(name, OURS, "generator_share")
                .map(percent)
                .unwrap_or_default(),
            run.median(name, OURS, "subject_starved_share")
                .map(percent)
                .unwrap_or_default(),
        ])
    });
    let note = format!(
        "Gbit/s by message length and streams. The limit is {}. From the CPU time on: ringdown / peer. Fairness is Jain's index over streams; \
         busy is the generator's share of its processor, starved the time that ringdown's threads waited for theirs. Cheap: the guest does not touch payload, and the host's program splices; pages: \
         packets in many descriptors, as Linux 6.17 sends them; checked: every byte compared.",
        match limit {
            "memcpy" => "memcpy over 4 MiB",
            _ => "AF_UNIX between two processes",
        }
    );
    table(
        title,
        &note,
        &[
            "case",
            "limit",
            "ringdown",
            "peer",
            "to limit",
            "to peer",
            "CPU s/GiB",
            "wake-ups/MiB",
            "kicks/MiB",
            "interrupts/MiB",
            "fairness",
            "busy",
            "starved",
        ],
        rows.collect(),
    )
}

pub(crate) fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

fn ping_pong(run: &Run) -> Table {
    let mut rows = Vec::new();
    for name in cases(run) {
        let Ok(Case::PingPong { .. }) = name.parse() else {
            continue;
        };
        for subject in ["af_unix", OURS, ASLEEP, PEER] {
            let Some(point) = run.point(name, subject) else {
                continue;
            };
            let mut row = vec![format!(
                "{} {subject}",
                name.trim_start_matches("pingpong/")
            )];
            row.extend(
                ["mean_us", "p1_us", "p50_us", "p99_us", "p99_9_us"]
                    .map(|figure| cell(Some(point), figure)),
            );
            row.extend(
                [
                    "subject_cpu_us_each",
                    "wakeups_each",
                    "kicks_each",
                    "interrupts_each",
                ]
                .map(|figure| brief(run, name, subject, figure)),
            );
            rows.push(row);
        }
    }
    table(
        "Ping-pong",
        "Microseconds for a message there and back: h-g from a program of the host, g-g from a guest to another.",
        &[
            "case",
            "mean",
            "p1",
            "p50",
            "p99",
            "p99.9",
            "CPU us",
            "wake-ups",
            "kicks",
            "interrupts",
        ],
        rows,
    )
}

fn connections(run: &Run) -> Table {
    let rows = cases(run).into_iter().filter_map(|name| {
        let Case::Connect { .. } = name.parse().ok()? else {
            return None;
        };
        let figure = "connections_per_s";
        Some(vec![
            name.trim_start_matches("connect/").to_owned(),
            cell(run.point(name, "af_unix"), figure),
            cell(run.point(name, OURS), figure),
            cell(run.point(name, PEER), figure),
            ratio(run, name, PEER, figure),
            both(run, name, "subject_cpu_us_each"),
            both(run, name, "wakeups_each"),
            brief(run, name, OURS, "generator_share"),
        ])
    });
    table(
        "Connections per second",
        "By who dials and how many at once. A connection is dialled, answered, and hung up.",
        &[
            "case",
            "af_unix",
            "ringdown",
            "peer",
            "to peer",
            "CPU us each",
            "wake-ups each",
            "busy",
        ],
        rows.collect(),
    )
}

fn memory(run: &Run) -> Table {
    let rows = by_subject(
        run,
        "idle/",
        &[
            "circuits",
            "pss_bytes_each",
            "anonymous_bytes_each",
            "descriptors_each",
        ],
    );
    table(
        "Idle circuits",
        "What each circuit takes of the process on which nothing happens.",
        &[
            "case",
            "circuits made",
            "bytes (PSS)",
            "bytes (anonymous)",
            "descriptors",
        ],
        rows,
    )
}

fn quiet(run: &Run) -> Table {
    let rows = by_subject(run, "quiet/", &["cpu_ms_per_s", "wakeups_per_s"]);
    table(
        "Quiet VMs",
        "What the process does while no guest does anything.",
        &["case", "CPU ms/s", "wake-ups/s"],
        rows,
    )
}

fn noisy(run: &Run) -> Table {
    let figures = [
        "p50_alone_us",
        "p99_alone_us",
        "p50_beside_us",
        "p99_beside_us",
        "p99_times",
    ];
    table(
        "A quiet VM beside a noisy one",
        "Ping-pong of 64 bytes with a quiet guest, alone and while another guest sends as fast as it can. Both share the generator's processor.",
        &[
            "case",
            "p50 alone",
            "p99 alone",
            "p50 beside",
            "p99 beside",
            "p99 times",
        ],
        by_subject(run, "noisy", &figures),
    )
}

fn captured(run: &Run) -> Table {
    let mut rows = Vec::new();
    for name in cases(run) {
        let figure = match name.starts_with("pingpong/") {
            true => "mean_us",
            false => "gbit_per_s",
        };
        for (of, subject) in CAPTURED {
            let Some(point) = run.point(name, subject) else {
                continue;
            };
            let ratio = match (point.summary(figure), run.median(name, OURS, figure)) {
                (Some(captured), Some(alone)) => format!("{:.2}x", captured.median / alone),
                _ => String::new(),
            };
            let lost = run.median(name, subject, "lost_share");
            rows.push(vec![
                format!("{name} {of}"),
                brief(run, name, OURS, figure),
                cell(Some(point), figure),
                ratio,
                lost.map(percent).unwrap_or_default(),
            ]);
        }
    }
    table(
        "Captures",
        "Gbit/s, and microseconds there and back of ping-pong, while `ringdown capture` takes all that passes, without a reader of packets. Its reader has no processor \
         of its own. What it loses is counted; nothing waits for it.",
        &["case", "alone", "captured", "ratio", "lost"],
        rows,
    )
}

fn by_subject(run: &Run, prefix: &str, figures: &[&str]) -> Vec<Vec<String>> {
    run.points
        .iter()
        .filter(|point| point.case.starts_with(prefix))
        .map(|point| {
            let name = format!("{} {}", point.case, point.subject);
            let cells = figures.iter().map(|figure| cell(Some(point), figure));
            std::iter::once(name).chain(cells).collect()
        })
        .collect()
}

fn many(run: &Run, prefix: &str, title: &str, what: &str) -> Table {
    let rows = cases(run)
        .into_iter()
        .filter(|name| name.starts_with(prefix))
        .map(|name| {
            vec![
                format!("{} {what}", &name[prefix.len()..]),
                cell(run.point(name, OURS), "gbit_per_s"),
                cell(run.point(name, PEER), "gbit_per_s"),
                both(run, name, "subject_cpu_s_per_gib"),
                both(run, name, "wakeups_per_mib"),
                brief(run, name, OURS, "fairness"),
                brief(run, name, OURS, "generator_share"),
            ]
        });
    table(
        title,
        "Guest to host, 64 KiB messages, all of them busy: Gbit/s altogether. From the CPU time on: ringdown / peer.",
        &[
            "case",
            "ringdown",
            "peer",
            "CPU s/GiB",
            "wake-ups/MiB",
            "fairness",
            "busy",
        ],
        rows.collect(),
    )
}

fn machine(run: &Run) -> Table {
    let rows = run
        .points
        .iter()
        .filter(|point| point.subject == "machine")
        .map(|point| {
            vec![
                point.case.clone(),
                cell(Some(point), "gbit_per_s"),
                cell(Some(point), "mean_us"),
                cell(Some(point), "p99_us"),
            ]
        });
    table(
        "The machine",
        "Copies from memory to memory, and round trips of event counters between two processors and on one.",
        &["case", "Gbit/s", "mean us", "p99 us"],
        rows.collect(),
    )
}

/// What hung or failed, and why.
pub(crate) fn troubles(run: &Run) -> Table {
    let rows = run.points.iter().filter_map(|point| {
        let (word, reason) = point.trouble()?;
        Some(vec![
            point.case.clone(),
            point.subject.clone(),
            word.to_owned(),
            reason.to_owned(),
        ])
    });
    table(
        "What did not work",
        "",
        &["case", "subject", "what", "why"],
        rows.collect(),
    )
}

const RATE: &str = "gbit_per_s";
const CONNECTIONS: &str = "connections_per_s";
const COST: &str = "subject_cpu_s_per_gib";

/// Title, case, limit, figure and unit of the lines for docs/performance.md.
const SHORT: &[(&str, &str, &str, &str, &str)] = &[
    (
        "guest→host, 64 KiB, 1 stream",
        "g2h/64K/1",
        "af_unix",
        RATE,
        "Gbit/s",
    ),
    (
        "guest→host, 4 KiB, 4 streams",
        "g2h/4K/4",
        "af_unix",
        RATE,
        "Gbit/s",
    ),
    (
        "host→guest, 64 KiB, 1 stream",
        "h2g/64K/1",
        "af_unix",
        RATE,
        "Gbit/s",
    ),
    (
        "guest↔guest, 64 KiB, 1 stream",
        "g2g/64K/1",
        "memcpy",
        RATE,
        "Gbit/s",
    ),
    (
        "round trip host–guest, 64 B",
        "pingpong/h-g/64",
        "af_unix",
        "mean_us",
        "µs",
    ),
    (
        "round trip guest–guest, 64 B",
        "pingpong/g-g/64",
        "af_unix",
        "mean_us",
        "µs",
    ),
    (
        "connections, one at a time",
        "connect/g2h/1",
        "af_unix",
        CONNECTIONS,
        "/s",
    ),
    (
        "connections, 16 in parallel",
        "connect/g2h/16",
        "af_unix",
        CONNECTIONS,
        "/s",
    ),
    (
        "daemon CPU, guest→host 64 KiB",
        "g2h/64K/1",
        "",
        COST,
        "s/GiB",
    ),
    (
        "daemon CPU, host→guest 64 KiB",
        "h2g/64K/1",
        "",
        COST,
        "s/GiB",
    ),
    (
        "memory of an idle circuit",
        "idle/g2h/10000",
        "",
        "pss_bytes_each",
        "B",
    ),
    (
        "wake-ups with 16 quiet VMs",
        "quiet/16",
        "",
        "wakeups_per_s",
        "/s",
    ),
];

/// For docs/performance.md.
pub(super) fn short(run: &Run) -> Table {
    let lines = SHORT
        .iter()
        .filter(|(_, case, ..)| run.point(case, OURS).is_some());
    let rows = lines.map(|(title, case, limit, figure, unit)| {
        let value = |subject: &str| {
            let point = run.point(case, subject);
            match point.and_then(|point| point.summary(figure)) {
                Some(summary) => format!("{} {unit}", number(summary.median)),
                None => point
                    .and_then(Point::trouble)
                    .map_or("—", |(word, _)| word)
                    .to_owned(),
            }
        };
        vec![(*title).to_owned(), value(OURS), value(PEER), value(limit)]
    });
    table(
        "In short",
        "",
        &["", "Ringdown", PEER, "limit (AF_UNIX, memcpy)"],
        rows.collect(),
    )
}
