//! A run: every case, interleaved, with what is compared measured in the same minute.

use std::path::PathBuf;
use std::time::Duration;

use super::case::{Case, Direction, Throughput};
use super::guest::Payload;
use super::limits::{self, Limits};
use super::measure::{Conditions, Failed, Figures};
use super::processor::load;
use super::progress::Progress;
use super::results::{Environment, Outcome, Point, Round, Run};
use super::ring::TransmitLayout;
use super::subject::{Kind, Subject};
use super::{connect, latency, scale, throughput};

/// How long quiet VMs are watched.
const QUIET: Duration = Duration::from_secs(10);

/// The cases that are measured while they are captured, too: much in few packets, much in many, and little.
const CAPTURED: [&str; 4] = ["g2g/64K/1", "g2g/4K/1", "g2h/64K/1", "pingpong/h-g/64"];

/// What is measured.
#[derive(Debug, Clone)]
pub enum Measured {
    /// A program with devices.
    Program(Subject),
    /// AF_UNIX between two processes.
    AfUnix(Limits),
    /// Copies of 4 MiB: the limit of what goes from memory to memory.
    Memcpy,
    /// The machine itself.
    Machine,
}

impl Measured {
    /// Its name in results.
    pub fn name(&self) -> &'static str {
        match self {
            Measured::Program(subject) => subject.name(),
            Measured::AfUnix(_) => "af_unix",
            Measured::Memcpy => "memcpy",
            Measured::Machine => "machine",
        }
    }

    fn measure(&self, case: &Case, conditions: &Conditions) -> Result<Figures, Failed> {
        match self {
            Measured::Program(subject) => measure_program(subject, case, conditions),
            Measured::AfUnix(limits) => match case {
                Case::Throughput(case) => limits.throughput(case, conditions),
                Case::PingPong { message_len, .. } => limits.ping_pong(*message_len, conditions),
                Case::Connect { parallel, .. } => limits.connect(*parallel, conditions),
                _ => Err(Failed::Error("AF_UNIX knows no such case".to_owned())),
            },
            Measured::Memcpy => Ok(limits::memcpy(4 << 20, conditions.window / 2)),
            Measured::Machine => measure_machine(case, conditions),
        }
    }
}

fn measure_program(
    subject: &Subject,
    case: &Case,
    conditions: &Conditions,
) -> Result<Figures, Failed> {
    match *case {
        Case::Throughput(case) => throughput::measure(subject, &case, conditions),
        Case::PingPong {
            direction,
            message_len,
        } => latency::measure(subject, direction, message_len, conditions),
        Case::Connect {
            direction,
            parallel,
        } => connect::measure(subject, direction, parallel, conditions),
        Case::IdleCircuits { direction, count } => {
            scale::idle_circuits(subject, direction, count, conditions)
        }
        Case::QuietVms(count) => {
            // In short runs, ten seconds would be most of it.
            let window = QUIET.min(conditions.window * 40);
            scale::quiet_vms(subject, count, window, conditions)
        }
        Case::Vms(count) => scale::vms(subject, count, conditions),
        Case::Circuits(count) => scale::circuits(subject, count, conditions),
        Case::Noisy => scale::noisy(subject, conditions),
        Case::Memcpy(_) | Case::Eventfd { .. } => {
            Err(Failed::Error("only the machine knows this case".to_owned()))
        }
    }
}

fn measure_machine(case: &Case, conditions: &Conditions) -> Result<Figures, Failed> {
    let placement = conditions.placement;
    match *case {
        Case::Memcpy(len) => Ok(limits::memcpy(len, conditions.window / 2)),
        Case::Eventfd { apart } => {
            let other = match apart {
                true => placement.subject,
                false => placement.generator,
            };
            limits::eventfd_round_trip((placement.generator, other), conditions)
        }
        _ => Err(Failed::Error("the machine knows no such case".to_owned())),
    }
}

/// A case with what it is measured for.
struct Step {
    case: Case,
    measured: Vec<Measured>,
    rounds: usize,
}

/// What is to be measured, and how.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The cases, in order.
    pub cases: Vec<Case>,
    /// This project's program.
    pub ringdown: PathBuf,
    /// The peer's program, if it is there.
    pub peer: Option<PathBuf>,
    /// This program itself.
    pub bench: PathBuf,
    /// Rounds of each case.
    pub rounds: usize,
    /// How long each measurement takes, and where.
    pub conditions: Conditions,
}

/// Every case of the full run.
pub fn full_matrix() -> Vec<Case> {
    let mut cases = vec![
        Case::Memcpy(16 << 10),
        Case::Memcpy(512 << 10),
        Case::Memcpy(4 << 20),
        Case::Memcpy(256 << 20),
        Case::Eventfd { apart: true },
        Case::Eventfd { apart: false },
    ];
    for direction in Direction::ALL {
        for kib in [4, 64, 128] {
            for streams in [1, 2, 4, 16, 64] {
                let case = Throughput::new(direction, kib << 10, streams);
                cases.push(Case::Throughput(case));
            }
        }
    }
    cases.extend(modes());
    for direction in [Direction::HostToGuest, Direction::GuestToGuest] {
        cases.extend([64, 512, 4096].map(|message_len| Case::PingPong {
            direction,
            message_len,
        }));
    }
    for direction in [Direction::GuestToHost, Direction::HostToGuest] {
        cases.extend([1, 16].map(|parallel| Case::Connect {
            direction,
            parallel,
        }));
    }
    cases.extend(
        [Direction::GuestToHost, Direction::GuestToGuest].map(|direction| Case::IdleCircuits {
            direction,
            count: 10_000,
        }),
    );
    cases.push(Case::QuietVms(16));
    cases.extend([1, 4, 16, 64].map(Case::Vms));
    cases.extend([1, 10, 100, 1000, 10_000].map(Case::Circuits));
    cases.push(Case::Noisy);
    cases
}

/// The main case of each direction in the other modes.
fn modes() -> Vec<Case> {
    let mut cases = Vec::new();
    for direction in [Direction::GuestToHost, Direction::HostToGuest] {
        for kib in [64, 128] {
            let mut case = Throughput::new(direction, kib << 10, 1);
            case.payload = Payload::Untouched;
            cases.push(Case::Throughput(case));
        }
    }
    let mut case = Throughput::new(Direction::GuestToGuest, 64 << 10, 1);
    case.payload = Payload::Untouched;
    cases.push(Case::Throughput(case));
    for direction in [Direction::GuestToHost, Direction::GuestToGuest] {
        let mut case = Throughput::new(direction, 64 << 10, 1);
        case.layout = TransmitLayout::Pages;
        cases.push(Case::Throughput(case));
    }
    for direction in Direction::ALL {
        for (kib, streams) in [(4, 1), (4, 64), (64, 1), (64, 16), (128, 1), (128, 4)] {
            let mut case = Throughput::new(direction, kib << 10, streams);
            case.payload = Payload::Checked;
            cases.push(Case::Throughput(case));
        }
    }
    cases
}

/// The cases that goals are about.
pub fn quick_matrix() -> Vec<Case> {
    let mut names: Vec<&str> = super::goals::GOALS
        .iter()
        .flat_map(|goal| goal.cases())
        .collect();
    let mut seen = std::collections::HashSet::new();
    names.retain(|name| seen.insert(*name));
    names
        .into_iter()
        .map(|name| name.parse().expect("goals name cases that exist"))
        .collect()
}

impl Plan {
    fn steps(&self) -> Vec<Step> {
        self.cases.iter().map(|case| self.step(*case)).collect()
    }

    fn step(&self, case: Case) -> Step {
        let program = |kind, program: &PathBuf| {
            Measured::Program(Subject {
                kind,
                program: program.clone(),
            })
        };
        let ours = program(Kind::Ringdown, &self.ringdown);
        let peer = self
            .peer
            .as_ref()
            .map(|path| program(Kind::VhostDeviceVsock, path));
        let af_unix = Measured::AfUnix(Limits {
            program: self.bench.clone(),
        });
        let limit = match case {
            Case::Throughput(Throughput {
                direction: Direction::GuestToGuest,
                ..
            }) => Some(Measured::Memcpy),
            Case::Throughput(_) | Case::PingPong { .. } | Case::Connect { .. } => Some(af_unix),
            _ => None,
        };
        let asleep = match case {
            Case::PingPong { .. } => Some(program(Kind::RingdownAsleep, &self.ringdown)),
            _ => None,
        };
        let is_captured = CAPTURED.contains(&case.to_string().as_str());
        let captured = [Kind::RingdownCaptured, Kind::RingdownCapturedInPart]
            .into_iter()
            .filter(|_| is_captured)
            .map(|kind| program(kind, &self.ringdown));
        let checked = matches!(case, Case::Throughput(case) if case.payload == Payload::Checked);
        let measured = match case {
            Case::Memcpy(_) | Case::Eventfd { .. } => vec![Measured::Machine],
            _ if checked => [ours].into_iter().chain(peer).collect(),
            _ => limit
                .into_iter()
                .chain([ours])
                .chain(asleep)
                .chain(captured)
                .chain(peer)
                .collect(),
        };
        let rounds = match case {
            // These show whether bytes are right, or what does not vary.
            _ if checked => 1,
            Case::IdleCircuits { .. } | Case::QuietVms(_) => 1,
            Case::Vms(_) | Case::Circuits(_) | Case::Noisy => self.rounds.min(3),
            _ => self.rounds,
        };
        Step {
            case,
            measured,
            rounds,
        }
    }

    /// How long one measurement will take, in about.
    fn expected(&self, case: &Case) -> Duration {
        let usual = self.conditions.warm_up + self.conditions.window + Duration::from_millis(60);
        match case {
            Case::QuietVms(_) => {
                QUIET.min(self.conditions.window * 40) + Duration::from_millis(500)
            }
            Case::IdleCircuits { .. } => Duration::from_millis(2500),
            Case::Noisy => usual * 2,
            Case::Circuits(count) => usual + Duration::from_micros(100) * *count as u32,
            Case::Memcpy(_) => self.conditions.window / 2,
            _ => usual,
        }
    }

    /// Measures everything.
    pub fn run(&self, environment: Environment, progress: &Progress) -> Run {
        Run::record(environment, self.rounds, &self.conditions, |run| {
            let steps = self.steps();
            let total = steps
                .iter()
                .map(|step| self.expected(&step.case) * (step.rounds * step.measured.len()) as u32);
            progress.begin(total.sum());
            for step in &steps {
                self.run_step(step, run, progress);
            }
            progress.end();
        })
    }

    fn run_step(&self, step: &Step, run: &mut Run, progress: &Progress) {
        let name = step.case.to_string();
        for round in 0..step.rounds {
            for measured in &step.measured {
                let expected = self.expected(&step.case);
                let subject = measured.name();
                if run.point(&name, subject).is_some_and(Point::is_hopeless) {
                    progress.advance(expected);
                    continue;
                }
                progress.tell(&format!("{name} {subject} {}/{}", round + 1, step.rounds));
                let outcome = match measured.measure(&step.case, &self.conditions) {
                    Ok(mut figures) => {
                        // What nothing happened for has no figure for each.
                        figures.retain(|_, figure| figure.is_finite());
                        Outcome::Figures(figures)
                    }
                    Err(Failed::Hangs(reason)) => Outcome::Hangs(reason),
                    Err(Failed::Error(reason)) => Outcome::Failed(reason),
                };
                let load = load();
                run.add(&name, subject, Round { outcome, load });
                progress.advance(expected);
            }
        }
        progress.line(&super::progress::case_line(run, &step.case, &step.measured));
    }
}
