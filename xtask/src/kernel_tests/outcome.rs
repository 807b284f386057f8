//! What the programs said, and the table of it.

use std::collections::BTreeMap;
use std::fmt::{self, Display, Formatter};

use super::Program;

/// What came of one case.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    /// Both ends passed.
    Passed,
    /// An end left it out by itself, for the reason given. Nothing was shown then, so it counts as a failure.
    LeftOut(String),
    /// An end did not pass, and this is what it said.
    Failed(String),
}

/// One case, as judged.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// Its number in its program.
    pub number: usize,
    /// Its name, as the program gives it.
    pub name: String,
    /// What came of it.
    pub verdict: Verdict,
}

/// Finds what one end said about the cases it came to.
///
/// It writes `3 - NAME...` when it begins a case, then what goes wrong, and `ok` when nothing did, or `skipped`.
pub fn parse(text: &str) -> Vec<Case> {
    let mut cases: Vec<(usize, String, String)> = Vec::new();
    for line in text.lines() {
        if let Some((number, name, rest)) = header(line) {
            cases.push((number, name.to_owned(), rest.to_owned()));
        } else if line.starts_with("All tests have been executed") {
            break;
        } else if let Some((_, _, said)) = cases.last_mut() {
            said.push('\n');
            said.push_str(line);
        }
    }
    cases
        .into_iter()
        .map(|(number, name, said)| Case {
            number,
            name,
            verdict: verdict(&said),
        })
        .collect()
}

fn header(line: &str) -> Option<(usize, &str, &str)> {
    let (number, rest) = line.split_once(" - ")?;
    let (name, rest) = rest.split_once("...")?;
    Some((number.parse().ok()?, name, rest))
}

fn verdict(said: &str) -> Verdict {
    let said = said.trim();
    let remarks = said.strip_suffix("ok").map(str::trim);
    match remarks {
        // SIOCOUTQ's case is like this: it says that it is left out, and then `ok`.
        Some(remarks) if remarks.to_ascii_lowercase().contains("skipped") => {
            Verdict::LeftOut(remarks.to_owned())
        }
        Some(_) => Verdict::Passed,
        None if said == "skipped" => Verdict::LeftOut("skipped".to_owned()),
        None if said.is_empty() => Verdict::Failed("no word".to_owned()),
        None => Verdict::Failed(said.replace('\n', "; ")),
    }
}

/// Puts together what both ends said: cases in their order, up to the first that failed. What follows that one is
/// of no meaning, because its end took the other end along.
pub fn judge(client: &[Case], server: &[Case], not_asked_for: &[usize]) -> Vec<Case> {
    let by_number = |cases: &[Case]| -> BTreeMap<usize, Case> {
        cases
            .iter()
            .filter(|case| !not_asked_for.contains(&case.number))
            .map(|case| (case.number, case.clone()))
            .collect()
    };
    let (client, server) = (by_number(client), by_number(server));
    let mut judged = Vec::new();
    let mut numbers: Vec<usize> = client.keys().chain(server.keys()).copied().collect();
    numbers.sort_unstable();
    numbers.dedup();
    for number in numbers {
        let ends = [
            ("client", client.get(&number)),
            ("server", server.get(&number)),
        ];
        let Some(name) = ends
            .iter()
            .find_map(|(_, case)| case.map(|case| case.name.clone()))
        else {
            continue;
        };
        let mut left_out = None;
        let mut failures = Vec::new();
        for (end, case) in ends {
            match case.map(|case| &case.verdict) {
                Some(Verdict::Passed) => {}
                Some(Verdict::LeftOut(reason)) => left_out = Some(format!("{end}: {reason}")),
                Some(Verdict::Failed(reason)) => failures.push(format!("{end}: {reason}")),
                None => failures.push(format!("{end}: never came to it")),
            }
        }
        let failed = !failures.is_empty();
        judged.push(Case {
            number,
            name,
            verdict: match left_out {
                _ if failed => Verdict::Failed(failures.join(" | ")),
                Some(reason) => Verdict::LeftOut(reason),
                None => Verdict::Passed,
            },
        });
        if failed {
            break;
        }
    }
    judged
}

/// What the daemon says that it carried, over both lines.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Traffic {
    /// Ends of circuits set up; a circuit between two guests has two.
    pub circuit_ends: u64,
    /// Payload taken from the guests, in bytes.
    pub bytes: u64,
    /// Ends of circuits that it still holds.
    pub circuits_left: u64,
    /// Counters that stock kernels must leave at zero and did not, by name.
    pub faults: Vec<(String, u64)>,
}

impl Traffic {
    /// What is wrong with it.
    fn complaints(&self) -> Vec<String> {
        let mut complaints = Vec::new();
        if self.circuit_ends == 0 || self.bytes == 0 {
            complaints.push("nothing passed through Ringdown".to_owned());
        }
        if self.circuits_left > 0 {
            complaints.push(format!(
                "Ringdown still holds {} ends of circuits",
                self.circuits_left
            ));
        }
        complaints.extend(
            self.faults
                .iter()
                .map(|(counter, count)| format!("Ringdown counts {count} as {counter}")),
        );
        complaints
    }
}

impl Display for Traffic {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "Ringdown carried {} circuits with {} bytes",
            self.circuit_ends / 2,
            self.bytes
        )
    }
}

/// Everything that came of one suite.
#[derive(Debug)]
pub struct Report {
    release: String,
    source_version: String,
    runs: Vec<Run>,
    /// What else went wrong: lines of the guests' kernel logs, and findings from the daemon's counters.
    complaints: Vec<String>,
    traffic: Option<Traffic>,
}

#[derive(Debug)]
struct Run {
    program: &'static str,
    expected_cases: usize,
    direction: String,
    cases: Vec<Case>,
}

impl Run {
    fn passed(&self) -> usize {
        self.cases
            .iter()
            .filter(|case| case.verdict == Verdict::Passed)
            .count()
    }

    fn missing(&self) -> usize {
        self.expected_cases.saturating_sub(self.cases.len())
    }
}

impl Report {
    /// Nothing yet, for guests with the kernel `release` and programs of `source_version`.
    pub fn new(release: &str, source_version: &str) -> Report {
        Report {
            release: release.to_owned(),
            source_version: source_version.to_owned(),
            runs: Vec::new(),
            complaints: Vec::new(),
            traffic: None,
        }
    }

    /// Ends the report with what the guests' kernels complained of and what the daemon carried.
    pub fn close(&mut self, kernel_complaints: Vec<String>, traffic: Traffic) {
        self.complaints.extend(
            kernel_complaints
                .into_iter()
                .map(|line| format!("the kernel said: {line}")),
        );
        self.complaints.extend(traffic.complaints());
        self.traffic = Some(traffic);
    }

    /// Adds what came of one program in one direction.
    pub fn add(&mut self, program: &Program, direction: String, cases: Vec<Case>) {
        self.runs.push(Run {
            program: program.name,
            expected_cases: program.expected_cases,
            direction,
            cases,
        });
    }

    /// How many cases did not pass or are missing, and how much else went wrong.
    pub fn failure_count(&self) -> usize {
        let cases: usize = self
            .runs
            .iter()
            .map(|run| run.cases.len() - run.passed() + run.missing())
            .sum();
        cases + self.complaints.len()
    }
}

impl Display for Report {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> fmt::Result {
        writeln!(
            formatter,
            "Kernel {}, tests of linux-source {}",
            self.release, self.source_version
        )?;
        for run in &self.runs {
            writeln!(
                formatter,
                "  {}, {}: {} of {} passed ({} expected)",
                run.program,
                run.direction,
                run.passed(),
                run.cases.len(),
                run.expected_cases,
            )?;
            for case in &run.cases {
                let verdict = match &case.verdict {
                    Verdict::Passed => "ok".to_owned(),
                    Verdict::LeftOut(reason) => format!("LEFT OUT: {reason}"),
                    Verdict::Failed(reason) => format!("FAILED: {reason}"),
                };
                writeln!(
                    formatter,
                    "    {:>2}  {:<48} {verdict}",
                    case.number, case.name
                )?;
            }
            if run.missing() > 0 {
                writeln!(formatter, "    FAILED: {} cases are missing", run.missing())?;
            }
        }
        for complaint in &self.complaints {
            writeln!(formatter, "  FAILED: {complaint}")?;
        }
        if let Some(traffic) = &self.traffic {
            writeln!(formatter, "  {traffic}")?;
        }
        let asked: usize = self
            .runs
            .iter()
            .map(|run| run.cases.len() + run.missing())
            .sum();
        let passed: usize = self.runs.iter().map(Run::passed).sum();
        writeln!(formatter, "  In all: {passed} of {asked} passed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: &str = "Control socket connected to 10.0.0.2:4000.\n\
        0 - SOCK_STREAM connection reset...ok\n\
        1 - SOCK_STREAM bind only...skipped\n\
        2 - SOCK_STREAM MSG_ZEROCOPY empty MSG_ERRQUEUE...ok\n\
        3 - SIOCOUTQ...Test skipped, SIOCOUTQ not supported.\nok\n\
        4 - SHUT_RD...send: Broken pipe\n";

    fn case(number: usize, name: &str, verdict: Verdict) -> Case {
        Case {
            number,
            name: name.to_owned(),
            verdict,
        }
    }

    #[test]
    fn every_end_of_a_case_is_told_apart() {
        let left_out = "Test skipped, SIOCOUTQ not supported.".to_owned();
        assert_eq!(
            parse(CLIENT),
            [
                case(0, "SOCK_STREAM connection reset", Verdict::Passed),
                case(
                    1,
                    "SOCK_STREAM bind only",
                    Verdict::LeftOut("skipped".to_owned())
                ),
                case(
                    2,
                    "SOCK_STREAM MSG_ZEROCOPY empty MSG_ERRQUEUE",
                    Verdict::Passed
                ),
                case(3, "SIOCOUTQ", Verdict::LeftOut(left_out)),
                case(
                    4,
                    "SHUT_RD",
                    Verdict::Failed("send: Broken pipe".to_owned())
                ),
            ]
        );
    }

    #[test]
    fn the_last_line_of_newer_programs_is_no_part_of_a_case() {
        let text =
            "7 - Connect...ok\nAll tests have been executed. Waiting other peer...recv timed out\n";
        assert_eq!(parse(text), [case(7, "Connect", Verdict::Passed)]);
    }

    #[test]
    fn a_case_passes_only_at_both_ends_and_a_failure_ends_the_row() {
        let server = "0 - SOCK_STREAM connection reset...ok\n\
            1 - SOCK_STREAM bind only...skipped\n\
            2 - SOCK_STREAM MSG_ZEROCOPY empty MSG_ERRQUEUE...accept timed out\n";
        let judged = judge(&parse(CLIENT), &parse(server), &[1]);
        assert_eq!(judged.len(), 2);
        assert_eq!(judged[0].verdict, Verdict::Passed);
        assert_eq!(
            judged[1].verdict,
            Verdict::Failed("server: accept timed out".to_owned())
        );
    }

    #[test]
    fn a_case_that_one_end_never_began_has_failed() {
        let judged = judge(
            &parse("0 - A...ok\n1 - B...ok\n"),
            &parse("0 - A...ok\n"),
            &[],
        );
        assert_eq!(
            judged[1].verdict,
            Verdict::Failed("server: never came to it".to_owned())
        );
    }

    #[test]
    fn missing_cases_and_those_left_out_count_as_failures() {
        let program = Program {
            name: "vsock_test",
            expected_cases: 4,
            can_skip: true,
        };
        let mut report = Report::new("6.12", "6.12-1");
        let cases = vec![
            case(0, "A", Verdict::Passed),
            case(1, "B", Verdict::LeftOut("not supported".to_owned())),
        ];
        report.add(&program, "client on a".to_owned(), cases);
        assert_eq!(report.failure_count(), 3);
        let text = report.to_string();
        assert!(text.contains("1 of 2 passed (4 expected)"), "{text}");
        assert!(text.contains("2 cases are missing"), "{text}");
        assert!(text.contains("In all: 1 of 4 passed"), "{text}");
    }

    #[test]
    fn a_kernel_that_complains_and_a_daemon_that_carried_nothing_fail() {
        let good = || Traffic {
            circuit_ends: 200,
            bytes: 1000,
            circuits_left: 0,
            faults: Vec::new(),
        };
        let failures = |complaints: &[&str], traffic| {
            let mut report = Report::new("6.12", "6.12-1");
            let complaints = complaints.iter().map(|line| (*line).to_owned()).collect();
            report.close(complaints, traffic);
            report.failure_count()
        };
        assert_eq!(failures(&[], good()), 0);
        assert_eq!(failures(&["a: BUG: it is broken"], good()), 1);
        for bad in [
            Traffic {
                circuit_ends: 0,
                ..good()
            },
            Traffic { bytes: 0, ..good() },
            Traffic {
                circuits_left: 1,
                ..good()
            },
            Traffic {
                faults: vec![("ended_credit_violation".to_owned(), 1)],
                ..good()
            },
        ] {
            assert_eq!(failures(&[], bad.clone()), 1, "{bad:?}");
        }
    }
}
