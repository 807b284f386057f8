//! One queue of all programs with tests: those of units, and the scenarios with real guests. Many of them wait, for a guest or for a time to
//! pass. So as many run as there are processors, and further ones while a processor has nothing to do. The tests of one suite share guests and
//! ports, so a suite is what can be moved.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use e2e::spawn::{scratch_directory, spawn};

use crate::suites::{self, Suite};

/// How long nothing may be said of a suite that runs.
const SILENCE: Duration = Duration::from_secs(60);

/// How long a suite may run: several times what the longest takes on a busy machine. One that hangs is ended, as its output says where.
const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Between two turns of the queue.
const PAUSE: Duration = Duration::from_millis(50);

/// How long the processors are watched before one more suite is started than there are processors.
const WATCH: Duration = Duration::from_millis(1000);

/// What part of one processor has to be idle for that.
const SPARE: f64 = 0.5;

/// How many suites run for each processor at most, since each takes memory for its guests.
const MOST_EACH: usize = 3;

/// How many lines of a panic are repeated at the end.
const PANIC_LINES: usize = 6;

/// How many panics of a suite are, its last ones: a test may catch hundreds before it fails.
const PANICS: usize = 10;

/// How many of the longest suites are listed at the end.
const LISTED: usize = 12;

/// Which tests run, and how many at a time.
#[derive(Debug, clap::Args)]
pub struct TestsArguments {
    /// How many suites run at a time, instead of what the processors allow.
    #[arg(long, value_parser = clap::value_parser!(u8).range(1..=16))]
    at_once: Option<u8>,
    /// Leave out what needs no guest.
    #[arg(long)]
    scenarios: bool,
}

/// What a suite took, in seconds.
#[derive(Debug, Clone, Copy, serde::Serialize, serde::Deserialize)]
struct Took {
    /// From its start to its end.
    time: u64,
    /// Of processors, with all programs that it has started and waited for: its guests too.
    processor: u64,
}

/// A suite that runs.
struct Running {
    suite: Suite,
    child: Child,
    log: PathBuf,
    limit: Duration,
    started: Instant,
    said: Instant,
}

/// Builds the suites and runs them.
///
/// # Errors
/// When they cannot be built, or one of them has failed.
pub fn run(arguments: &TestsArguments) -> Result<()> {
    let mut suites = suites::build(match arguments.scenarios {
        true => suites::SCENARIOS,
        false => suites::ALL,
    })?;
    let times_path = suites
        .first()
        .and_then(|suite| suite.program.parent())
        .context("there are no tests")?
        .join("tests-took.json");
    let mut times = read_times(&times_path);
    order(&mut suites, &times);
    let (started, idle) = (Instant::now(), idle_ticks());
    let names: BTreeSet<_> = suites.iter().map(Suite::full_name).collect();
    let count = suites.len();
    eprintln!("[tests] {count} suites");
    let failed = run_all(suites, &places(arguments), LIMIT, &mut times)?;
    fs::write(&times_path, serde_json::to_vec(&times)?)?;
    times.retain(|name, _| names.contains(name));
    eprintln!(
        "[tests] the longest, in seconds: {}",
        most(&times, |took| took.time)
    );
    eprintln!(
        "[tests] of processors, in seconds: {}; all {}",
        most(&times, |took| took.processor),
        times.values().map(|took| took.processor).sum::<u64>()
    );
    if let (Some(before), Some(now)) = (idle, idle_ticks()) {
        let idle = now.saturating_sub(before) / rustix::param::clock_ticks_per_second();
        eprintln!("[tests] all processors together had nothing to do for {idle} s");
    }
    if !failed.is_empty() {
        bail!("of {count} suites these failed:\n{}", failed.join("\n"));
    }
    let seconds = started.elapsed().as_secs();
    eprintln!("[tests] all {count} suites passed ({seconds} s)");
    Ok(())
}

/// How many suites run at least and at most while there are enough of them.
fn places(arguments: &TestsArguments) -> (usize, usize) {
    let processors = thread::available_parallelism().map_or(1, usize::from);
    match arguments.at_once {
        Some(count) => (count.into(), count.into()),
        None => (processors, processors * MOST_EACH),
    }
}

/// Runs suites from the end of the list, and returns those that failed, each with its panics.
fn run_all(
    mut waiting: Vec<Suite>,
    (least, most): &(usize, usize),
    limit: Duration,
    times: &mut BTreeMap<String, Took>,
) -> Result<Vec<String>> {
    let directory = scratch_directory()?;
    let (mut running, mut failed) = (Vec::new(), Vec::new());
    let mut watch = Watch::new();
    while !waiting.is_empty() || !running.is_empty() {
        let has_place = running.len() < *least || (running.len() < *most && watch.has_spare());
        if let Some(suite) = has_place.then(|| waiting.pop()).flatten() {
            running.push(Running::start(suite, &directory, limit)?);
            watch = Watch::new();
            continue;
        }
        thread::sleep(PAUSE);
        let mut index = 0;
        while let Some(one) = running.get_mut(index) {
            let Some((is_success, took)) = one.look()? else {
                index += 1;
                continue;
            };
            let one = running.remove(index);
            let name = one.suite.full_name();
            let output = one.print(took)?;
            match is_success {
                true => {
                    times.insert(name, took);
                }
                false => failed.push(format!("{name}{}", panics(&output))),
            }
        }
    }
    Ok(failed)
}

impl Running {
    fn start(suite: Suite, directory: &Path, limit: Duration) -> Result<Running> {
        let log = directory.join(format!("{}.log", suite.full_name().replace('/', "-")));
        let output = fs::File::create(&log)?;
        let errors = output.try_clone()?;
        let child = spawn(&suite.program, [], |command| {
            // As `cargo test` does.
            command.current_dir(&suite.directory);
            command.stdin(Stdio::null()).stdout(output).stderr(errors);
        })?;
        let started = Instant::now();
        Ok(Running {
            suite,
            child,
            log,
            limit,
            started,
            said: started,
        })
    }

    /// Whether it has succeeded, and what it took, if it has ended.
    fn look(&mut self) -> Result<Option<(bool, Took)>> {
        // Once it is waited for, its row in /proc is gone.
        let processor = processor_seconds(self.child.id());
        if let Some(status) = self.child.try_wait()? {
            let time = self.started.elapsed().as_secs();
            return Ok(Some((status.success(), Took { time, processor })));
        }
        let (name, elapsed) = (self.suite.full_name(), self.started.elapsed());
        if elapsed >= self.limit {
            eprintln!(
                "[tests] {name} is ended: it has run for {} s",
                elapsed.as_secs()
            );
            self.child.kill()?;
        } else if self.said.elapsed() >= SILENCE {
            eprintln!("[tests] {name} runs for {} s", elapsed.as_secs());
            self.said = Instant::now();
        }
        Ok(None)
    }

    /// Prints its output in one piece, and returns it.
    fn print(&self, Took { time, processor }: Took) -> Result<String> {
        let text = String::from_utf8_lossy(&fs::read(&self.log)?).into_owned();
        let name = self.suite.full_name();
        println!("     Running {name} ({time} s, {processor} s of processors)");
        print!("{text}");
        Ok(text)
    }
}

/// Where tests have panicked, and the first lines of each message.
fn panics(output: &str) -> String {
    let lines: Vec<&str> = output.lines().collect();
    let is_panic = |at: &usize| lines[*at].contains(" panicked at ");
    let starts: Vec<usize> = (0..lines.len()).filter(is_panic).collect();
    let last = starts.len().saturating_sub(PANICS);
    starts[last..]
        .iter()
        .flat_map(|at| lines[*at..].iter().take(PANIC_LINES))
        .map(|line| format!("\n  {line}"))
        .collect()
}

/// What processors have left.
struct Watch {
    since: Instant,
    idle: Option<u64>,
}

impl Watch {
    fn new() -> Watch {
        Watch {
            since: Instant::now(),
            idle: idle_ticks(),
        }
    }

    /// Whether enough of a processor was idle for long enough; then the next time begins.
    fn has_spare(&mut self) -> bool {
        let elapsed = self.since.elapsed();
        if elapsed < WATCH {
            return false;
        }
        let before = std::mem::replace(self, Watch::new());
        let (Some(then), Some(now)) = (before.idle, self.idle) else {
            return false;
        };
        let per_second = rustix::param::clock_ticks_per_second();
        now.saturating_sub(then) as f64 >= SPARE * per_second as f64 * elapsed.as_secs_f64()
    }
}

/// What a program, and those that it has waited for, took of processors; nothing if that is not known.
fn processor_seconds(pid: u32) -> u64 {
    let row = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    processor_ticks(&row) / rustix::param::clock_ticks_per_second()
}

/// Fields 14 to 17 of a row as proc_pid_stat(5) describes it, behind the name, which may have anything in it.
fn processor_ticks(row: &str) -> u64 {
    let fields = row.rsplit(')').next().unwrap_or_default();
    let times = fields.split_whitespace().skip(11).take(4);
    times.filter_map(|ticks| ticks.parse::<u64>().ok()).sum()
}

/// For how long processors have had nothing to do since the machine's start, in ticks.
fn idle_ticks() -> Option<u64> {
    let text = fs::read_to_string("/proc/stat").ok()?;
    text.lines().next()?.split_whitespace().nth(4)?.parse().ok()
}

/// Puts the longest last, from where suites are taken: that which is begun late keeps the whole waiting. What has not run here yet comes
/// first, by the length of its source, which says of scenarios how many there are.
fn order(suites: &mut [Suite], times: &BTreeMap<String, Took>) {
    suites.sort_by_key(|suite| {
        let took = times.get(&suite.full_name());
        let seconds = took.map_or(u64::MAX, |took| took.time);
        (seconds, suite.package == "e2e", suite.len)
    });
}

/// What took most, the greatest first.
fn most(times: &BTreeMap<String, Took>, seconds: fn(&Took) -> u64) -> String {
    let mut times: Vec<_> = times.iter().collect();
    times.sort_by_key(|(_, took)| std::cmp::Reverse(seconds(took)));
    let listed = times.iter().take(LISTED);
    let listed: Vec<_> = listed
        .map(|(name, took)| format!("{name} {}", seconds(took)))
        .collect();
    listed.join(", ")
}

/// How many seconds suites took the last time; nothing if that is not known.
fn read_times(path: &Path) -> BTreeMap<String, Took> {
    let text = fs::read(path).unwrap_or_default();
    serde_json::from_slice(&text).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn suite(package: &str, name: &str, program: &str, len: u64) -> Suite {
        Suite {
            package: package.to_owned(),
            name: name.to_owned(),
            is_library: false,
            program: program.into(),
            directory: "/".into(),
            len,
        }
    }

    fn took(time: u64) -> Took {
        let processor = time;
        Took { time, processor }
    }

    #[test]
    fn all_four_times_of_a_program_count() {
        let row = "7 (a) b) S 1 1 1 0 -1 4194560 9 9 0 0 100 200 300 400 20 0 1 0";
        assert_eq!(processor_ticks(row), 1000);
        assert_eq!(processor_ticks(""), 0);
    }

    #[test]
    fn every_suite_runs_and_those_that_fail_are_named() {
        let suites = vec![
            suite("e2e", "boot", "/bin/true", 1),
            suite("wire", "frames", "/bin/false", 1),
            suite("e2e", "many", "/bin/true", 1),
            suite("wire", "gone", "/nonexistent/program", 1),
        ];
        for places in [(1, 1), (2, 6)] {
            let mut times = BTreeMap::new();
            let mut failed = run_all(suites.clone(), &places, LIMIT, &mut times).unwrap();
            failed.sort();
            assert_eq!(failed, ["wire/frames", "wire/gone"]);
            let passed: Vec<_> = times.keys().collect();
            assert_eq!(passed, ["e2e/boot", "e2e/many"]);
        }
    }

    #[test]
    fn the_last_panics_of_a_suite_are_repeated() {
        let output = "test a ... ok\nthread 'b' (7) panicked at b.rs:1:2:\nleft\nnote";
        let expected = "\n  thread 'b' (7) panicked at b.rs:1:2:\n  left\n  note";
        assert_eq!(panics(output), expected);
        assert_eq!(panics("test a ... FAILED"), "");
        let many: String = (0..50)
            .map(|number| format!("thread 'b' panicked at {number}\n\n\n\n\n\n\n"))
            .collect();
        let repeated = panics(&many);
        assert_eq!(repeated.matches(" panicked at ").count(), PANICS);
        assert!(repeated.contains(" panicked at 49\n"), "{repeated}");
    }

    #[test]
    fn a_suite_that_hangs_is_ended_and_has_failed() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("hangs");
        fs::write(&program, "#!/bin/sh\nexec sleep 600\n").unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let suites = vec![suite("e2e", "hangs", program.to_str().unwrap(), 1)];
        let mut times = BTreeMap::new();
        let failed = run_all(suites, &(1, 1), Duration::from_millis(1), &mut times).unwrap();
        assert_eq!(failed, ["e2e/hangs"]);
        assert!(times.is_empty());
    }

    #[test]
    fn the_longest_is_taken_first() {
        let mut suites = vec![
            suite("wire", "unknown", "", 9),
            suite("e2e", "short", "", 9),
            suite("e2e", "large", "", 7),
            suite("wire", "long", "", 1),
            suite("e2e", "small", "", 6),
        ];
        let times = [("e2e/short", took(1)), ("wire/long", took(60))];
        order(
            &mut suites,
            &times.map(|(name, took)| (name.to_owned(), took)).into(),
        );
        let names: Vec<_> = suites.iter().map(|suite| &*suite.name).collect();
        assert_eq!(names, ["short", "long", "unknown", "small", "large"]);
    }

    #[test]
    fn the_longest_are_listed_first() {
        let times = (0..20).map(|s| (format!("e2e/{s:02}"), took(s))).collect();
        let listed = most(&times, |took| took.time);
        assert!(listed.starts_with("e2e/19 19, e2e/18 18, "), "{listed}");
        assert!(listed.ends_with(", e2e/08 8"), "{listed}");
    }

    #[test]
    fn times_that_are_damaged_or_gone_are_unknown() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("times");
        assert!(read_times(&path).is_empty());
        fs::write(&path, "{").unwrap();
        assert!(read_times(&path).is_empty());
    }
}
