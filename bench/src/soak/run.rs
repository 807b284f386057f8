//! The course of a soak.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use super::guests;
use super::path::Path;
use super::programs;
use super::scene::{CALLEE, CALLER, Scene, port_of};
use super::tally::{Counts, Phase, Tally};
use super::watch::Sample;

/// Programs of the host that call: each waits for the end of its call before the next.
const PROGRAMS: usize = 16;

/// How long the scene may take to come to rest.
const REST_PATIENCE: Duration = Duration::from_secs(120);

/// How often the clock is read.
const TURN: Duration = Duration::from_millis(50);

/// How a soak is to be.
#[derive(Debug, Clone)]
pub struct Options {
    /// The `ringdown` program.
    pub program: PathBuf,
    /// How long calls are made, the warm-up included.
    pub duration: Duration,
    /// How long they are made before the first rest.
    pub warm_up: Duration,
    /// How long they are made between two idle spans.
    pub between_rests: Duration,
    /// Calls per second.
    pub rate: f64,
    /// How often the policy is read anew; never without it.
    pub reload_every: Option<Duration>,
    /// The paths that are taken.
    pub paths: Vec<Path>,
    /// How often a line is shown on standard error; never without it.
    pub progress_every: Option<Duration>,
}

/// What came of it.
#[derive(Debug, Clone)]
pub struct Report {
    /// How long calls were made.
    pub load: Duration,
    /// What happened on each path.
    pub counts: BTreeMap<Path, Counts>,
    /// What went wrong, and how often.
    pub failures: BTreeMap<String, u64>,
    /// How often the policy was read anew.
    pub reloads: u64,
    /// What the daemon held at the start, at every rest and at the end, with the time of load behind it.
    pub samples: Vec<(String, Sample)>,
    /// What it held more at a rest than at the first.
    pub leaks: Vec<String>,
    /// The end of the daemon's log, when something went wrong.
    pub log_tail: String,
}

impl Report {
    /// Whether everything was as it should be, and something was at all.
    pub fn is_good(&self) -> bool {
        self.failures.is_empty() && self.leaks.is_empty() && self.calls() > 0
    }

    /// Calls of all kinds and outcomes.
    pub fn calls(&self) -> u64 {
        self.counts
            .values()
            .map(|counts| counts.echoed + counts.denied + counts.cut + counts.late + counts.failed)
            .sum()
    }
}

/// Makes calls for as long as is asked.
///
/// # Errors
/// When it cannot begin, or the scene does not come to rest.
pub fn run(options: &Options) -> Result<Report, String> {
    let mut scene = Scene::start(&options.program, &options.paths)
        .map_err(|error| format!("the scene: {error}"))?;
    let tally = Tally::default();
    let plans = plans(&scene, options);
    let (report, violations) = thread::scope(|scope| {
        let (ready, is_ready) = channel();
        let (plan, shared) = (&plans.guests, &tally);
        let guests = scope.spawn(move || guests::play(plan, shared, &ready));
        for _ in 0..PROGRAMS {
            scope.spawn(|| programs::call_in_turn(&plans.programs, &tally));
        }
        for path in standing(options).filter(|path| !path.is_from_guest()) {
            let (plan, tally) = (&plans.programs, &tally);
            scope.spawn(move || programs::stand(plan, path, tally));
        }
        // Calls fail before; and if they do not start, their own output has the reason.
        let report = match is_ready.recv() {
            Ok(()) => Course::new(options, &scene, &tally).run(),
            Err(_) => Err("the guests have not come".to_owned()),
        };
        tally.set_phase(Phase::End);
        let violations = guests.join().unwrap_or_else(|_| Err("a panic".to_owned()));
        (report, violations)
    });
    let violations = violations?;
    let mut report = report?;
    // Standing circuits have ended since, and may have said how.
    report.counts = tally.counts();
    report.failures = tally.failures();
    for violation in violations {
        *report
            .failures
            .entry(format!("the device: {violation}"))
            .or_default() += 1;
    }
    if !report.is_good() {
        report.log_tail = scene.daemon.log_tail();
    }
    if !scene.daemon.stop() {
        let failure = "the daemon did not end cleanly".to_owned();
        report.failures.insert(failure, 1);
    }
    Ok(report)
}

fn standing(options: &Options) -> impl Iterator<Item = Path> {
    options
        .paths
        .iter()
        .copied()
        .filter(|path| *path != Path::Toggled)
}

struct Plans {
    guests: guests::Plan,
    programs: programs::Plan,
}

fn plans(scene: &Scene, options: &Options) -> Plans {
    let schedule = |from_guest: bool| {
        let paths = options.paths.iter().copied();
        let paths: Vec<Path> = paths
            .filter(|path| path.is_from_guest() == from_guest)
            .collect();
        Path::schedule(&paths)
    };
    let (guests, programs) = (schedule(true), schedule(false));
    let whole = (guests.len() + programs.len()).max(1) as f64;
    let rate = |part: &[Path]| options.rate * part.len() as f64 / whole;
    Plans {
        guests: guests::Plan {
            sockets: scene.vhost_sockets(),
            rate: rate(&guests),
            schedule: guests,
            standing: standing(options)
                .filter(|path| path.is_from_guest())
                .collect(),
            callee: CALLEE.1,
            port_of,
            egress_request: scene.egress_request(),
        },
        programs: programs::Plan {
            places: scene.places.clone(),
            rate: rate(&programs),
            schedule: programs,
            tickets: programs::Tickets::default(),
            number: AtomicU64::new(0),
        },
    }
}

struct Course<'a> {
    options: &'a Options,
    scene: &'a Scene,
    tally: &'a Tally,
    /// Load behind the current span.
    behind: Duration,
    reloads: u64,
    reload_at: Instant,
    progress_at: Instant,
    samples: Vec<(String, Sample)>,
    leaks: Vec<String>,
}

impl<'a> Course<'a> {
    fn new(options: &'a Options, scene: &'a Scene, tally: &'a Tally) -> Course<'a> {
        Course {
            options,
            scene,
            tally,
            behind: Duration::ZERO,
            reloads: 0,
            reload_at: Instant::now(),
            progress_at: Instant::now(),
            samples: Vec::new(),
            leaks: Vec::new(),
        }
    }

    fn run(mut self) -> Result<Report, String> {
        let sample = self.sample()?;
        self.samples.push(("start".to_owned(), sample));
        let mut span = self.options.warm_up;
        while self.behind < self.options.duration {
            self.load(span.min(self.options.duration - self.behind));
            self.rest()?;
            span = self.options.between_rests;
        }
        Ok(Report {
            load: self.behind,
            counts: self.tally.counts(),
            failures: self.tally.failures(),
            reloads: self.reloads,
            samples: self.samples,
            leaks: self.leaks,
            log_tail: String::new(),
        })
    }

    fn load(&mut self, span: Duration) {
        let began = Instant::now();
        self.reload_at = began + self.options.reload_every.unwrap_or_default();
        self.tally.set_phase(Phase::Load(began));
        while began.elapsed() < span {
            thread::sleep(TURN.min(span.saturating_sub(began.elapsed())));
            self.maybe_reload();
            self.maybe_tell(self.behind + began.elapsed());
        }
        self.tally.set_phase(Phase::Rest);
        self.behind += began.elapsed();
    }

    fn maybe_reload(&mut self) {
        let Some(every) = self.options.reload_every else {
            return;
        };
        if Instant::now() < self.reload_at {
            return;
        }
        self.reload_at += every;
        self.tally.change_policy();
        self.reloads += 1;
        // By turns it is closed and opened; every other time that it is closed, what goes through it ends.
        let result = self
            .scene
            .reload(self.reloads % 2 == 0, self.reloads % 4 == 3);
        if let Err(error) = result {
            self.tally.fail(format!("reload: {error}"));
        }
        self.tally.change_policy();
    }

    /// Waits until nothing but standing circuits is left, and checks the daemon.
    fn rest(&mut self) -> Result<(), String> {
        let deadline = Instant::now() + REST_PATIENCE;
        let stand = standing(self.options).count();
        let circuits: u64 = standing(self.options).map(Path::circuits).sum();
        let first = self.samples.get(1).map(|(_, sample)| *sample);
        let mut last = None;
        let sample = loop {
            let sample = self.sample()?;
            let is_quiet = self.tally.in_flight() == 0
                && self.tally.standing() == stand
                && sample.circuits == circuits
                && match first {
                    Some(first) => sample.descriptors <= first.descriptors,
                    // What is not closed yet must not count as what is always there.
                    None => last.replace(sample.descriptors) == Some(sample.descriptors),
                };
            if is_quiet || Instant::now() > deadline {
                break sample;
            }
            thread::sleep(TURN);
        };
        let label = format!("{} s", self.behind.as_secs());
        self.judge(&label, &sample, first.as_ref(), (stand, circuits));
        if self.options.progress_every.is_some() {
            eprintln!("[soak] at rest after {label}: {sample}");
        }
        self.samples.push((label, sample));
        Ok(())
    }

    fn judge(
        &mut self,
        label: &str,
        sample: &Sample,
        first: Option<&Sample>,
        (stand, circuits): (usize, u64),
    ) {
        let (in_flight, standing) = (self.tally.in_flight(), self.tally.standing());
        let mut leaks = Vec::new();
        if sample.circuits != circuits {
            leaks.push(format!(
                "{} circuits at rest, expected {circuits} for {stand} standing",
                sample.circuits
            ));
        }
        if in_flight > 0 || standing != stand {
            leaks.push(format!(
                "{in_flight} calls do not end, {standing} of {stand} circuits stand"
            ));
        }
        leaks.extend(first.iter().flat_map(|first| sample.leaks_since(first)));
        let leaks = leaks.into_iter();
        self.leaks
            .extend(leaks.map(|leak| format!("after {label}: {leak}")));
    }

    fn sample(&self) -> Result<Sample, String> {
        Sample::of(&self.scene.daemon, &[CALLER, CALLEE.0])
            .map_err(|error| format!("the daemon does not say how it is: {error}"))
    }

    fn maybe_tell(&mut self, elapsed: Duration) {
        let Some(every) = self.options.progress_every else {
            return;
        };
        if Instant::now() < self.progress_at {
            return;
        }
        self.progress_at = Instant::now() + every;
        let counts = self.tally.counts();
        let calls: u64 = counts.values().map(|counts| counts.echoed).sum();
        let denied: u64 = counts.values().map(|counts| counts.denied).sum();
        let failed: u64 = self.tally.failures().values().sum();
        let held = self
            .sample()
            .map_or_else(|error| error, |sample| sample.to_string());
        eprintln!(
            "[soak] {} of {}: {calls} calls, {denied} denied, {failed} failures, {} reloads; {held}",
            clock(elapsed),
            clock(self.options.duration),
            self.reloads,
        );
        for (reason, count) in self.tally.failures() {
            eprintln!("[soak] failed {count} times: {reason}");
        }
    }
}

fn clock(duration: Duration) -> String {
    let seconds = duration.as_secs();
    format!(
        "{}:{:02}:{:02}",
        seconds / 3600,
        seconds / 60 % 60,
        seconds % 60
    )
}

impl fmt::Display for Report {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.load.as_secs_f64();
        writeln!(
            formatter,
            "{} of calls, {} calls ({:.0} per second), {} reloads",
            clock(self.load),
            self.calls(),
            self.calls() as f64 / seconds.max(1e-3),
            self.reloads
        )?;
        writeln!(
            formatter,
            "{:<26}{:>10}{:>10}{:>8}{:>8}{:>8}{:>12}",
            "path", "echoed", "denied", "cut", "late", "failed", "MiB"
        )?;
        for (path, counts) in &self.counts {
            writeln!(
                formatter,
                "{path:<26}{:>10}{:>10}{:>8}{:>8}{:>8}{:>12.1}",
                counts.echoed,
                counts.denied,
                counts.cut,
                counts.late,
                counts.failed,
                counts.bytes as f64 / f64::from(1 << 20)
            )?;
        }
        for (label, sample) in &self.samples {
            writeln!(formatter, "at rest {label:>8}: {sample}")?;
        }
        for (reason, count) in &self.failures {
            writeln!(formatter, "failed {count} times: {reason}")?;
        }
        for leak in &self.leaks {
            writeln!(formatter, "leaked {leak}")?;
        }
        if !self.log_tail.is_empty() {
            writeln!(
                formatter,
                "--- the daemon's log ends ---\n{}\n---",
                self.log_tail
            )?;
        }
        Ok(())
    }
}
