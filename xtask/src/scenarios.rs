//! The scenarios with real guests, several suites at a time: a suite mostly waits for its guests to boot and to answer, so two of them
//! take little longer than one. The tests of one suite share guests, so a suite is what can be moved.

use std::fs;
use std::path::PathBuf;
use std::process::{ExitStatus, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};
use e2e::spawn::{scratch_directory, spawn};

use crate::suites::{self, Suite};

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
    let mut suites = suites::build(&["--package", "ringdown-e2e"])?;
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
