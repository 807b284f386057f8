//! The scenarios with real guests, several suites at a time: a suite mostly waits for its guests to boot and to answer, so two of them
//! take little longer than one. The tests of one suite share guests, so a suite is what can be moved.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use e2e::spawn::{scratch_directory, spawn};
use serde_json::Value;

/// How long nothing may be said.
const SILENCE: Duration = Duration::from_secs(60);

/// Between two looks at a suite that runs.
const PAUSE: Duration = Duration::from_millis(50);

#[derive(Debug, clap::Args)]
pub struct ScenariosArguments {
    /// How many suites run at a time.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=16))]
    at_once: u8,
}

/// A program with tests.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Suite {
    name: String,
    program: PathBuf,
    /// Of its source, in bytes.
    len: u64,
}

/// What is common to those who run suites.
struct Queue {
    waiting: Mutex<Vec<Suite>>,
    directory: PathBuf,
    package: PathBuf,
    failed: Mutex<Vec<String>>,
    /// What one suite has printed is not mixed with what another has.
    output: Mutex<()>,
}

/// Builds all suites and runs them.
///
/// # Errors
/// When they cannot be built, or one of them has failed.
pub fn run(arguments: &ScenariosArguments) -> Result<()> {
    let started = Instant::now();
    let mut suites = build()?;
    ensure!(!suites.is_empty(), "there are no suites of scenarios");
    // The longest last, as the last one is taken first: that which is begun late keeps the others waiting.
    suites.sort_by_key(|suite| suite.len);
    let count = suites.len();
    let at_once = arguments.at_once;
    eprintln!("[scenarios] {count} suites, {at_once} at a time");
    let queue = Queue {
        waiting: Mutex::new(suites),
        directory: scratch_directory()?,
        package: PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../e2e")),
        failed: Mutex::default(),
        output: Mutex::default(),
    };
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| queue.work());
        }
    });
    let seconds = started.elapsed().as_secs();
    let failed = queue
        .failed
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    if !failed.is_empty() {
        bail!("of {count} suites these failed: {}", failed.join(", "));
    }
    eprintln!("[scenarios] all {count} suites passed ({seconds} s)");
    Ok(())
}

/// The suites, as Cargo has built them.
fn build() -> Result<Vec<Suite>> {
    let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
    let built = Command::new(cargo)
        .args(["test", "--package", "ringdown-e2e", "--no-run"])
        .args(["--message-format", "json-render-diagnostics"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    ensure!(built.status.success(), "the scenarios do not build");
    let said = String::from_utf8(built.stdout).context("cargo does not write UTF-8")?;
    said.lines()
        .filter_map(|line| suite(line).transpose())
        .collect()
}

/// The suite that a message of Cargo's is about, if it is about one.
fn suite(message: &str) -> Result<Option<Suite>> {
    let message: Value = serde_json::from_str(message).context("cargo does not write JSON")?;
    let (target, is_test) = (&message["target"], message["profile"]["test"] == true);
    let Some(program) = message["executable"].as_str().filter(|_| is_test) else {
        return Ok(None);
    };
    let source = target["src_path"]
        .as_str()
        .context("a target without a source")?;
    let name = target["name"].as_str().context("a target without a name")?;
    Ok(Some(Suite {
        name: name.to_owned(),
        program: program.into(),
        len: fs::metadata(source).map_or(0, |file| file.len()),
    }))
}

impl Queue {
    /// Runs suites until there are no more.
    fn work(&self) {
        loop {
            let next = lock(&self.waiting).pop();
            let Some(suite) = next else {
                return;
            };
            if let Err(error) = self.run(&suite) {
                eprintln!("[scenarios] {}: {error:#}", suite.name);
                lock(&self.failed).push(suite.name);
            }
        }
    }

    fn run(&self, suite: &Suite) -> Result<()> {
        let name = &suite.name;
        let path = self.directory.join(format!("{name}.log"));
        let log = fs::File::create(&path)?;
        let errors = log.try_clone()?;
        let started = Instant::now();
        let mut child = spawn(&suite.program, [], |command| {
            // As `cargo test` does.
            command.current_dir(&self.package);
            command.stdin(Stdio::null()).stdout(log).stderr(errors);
        })?;
        let mut said = started;
        let status: ExitStatus = loop {
            if let Some(status) = child.try_wait()? {
                break status;
            }
            if said.elapsed() >= SILENCE {
                eprintln!(
                    "[scenarios] {name} runs for {} s",
                    started.elapsed().as_secs()
                );
                said = Instant::now();
            }
            thread::sleep(PAUSE);
        };
        let text = fs::read(&path)?;
        let _alone = lock(&self.output);
        println!("     Running {name} ({} s)", started.elapsed().as_secs());
        print!("{}", String::from_utf8_lossy(&text));
        ensure!(status.success(), "{status}");
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suite_is_a_program_with_tests() {
        let message = |executable: &str, test: bool| {
            format!(
                r#"{{"reason":"compiler-artifact","target":{{"name":"jobs","src_path":"/nowhere"}},"profile":{{"test":{test}}},"executable":{executable}}}"#
            )
        };
        let expected = Suite {
            name: "jobs".to_owned(),
            program: "/target/jobs-1".into(),
            len: 0,
        };
        let found = suite(&message("\"/target/jobs-1\"", true)).unwrap();
        assert_eq!(found, Some(expected));
        for other in [
            message("\"/target/guest\"", false),
            message("null", true),
            r#"{"reason":"build-finished","success":true}"#.to_owned(),
        ] {
            assert_eq!(suite(&other).unwrap(), None, "{other}");
        }
        assert!(suite("warning: no JSON").is_err());
    }
}
