//! A capture of all lines by this project's own command, beside which something is measured.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use super::measure::Figures;
use super::process::{PATIENCE, mortal};
use super::processor::{Placement, pin_to};

/// A capture that is under way. Dropping it ends it.
#[derive(Debug)]
pub struct Capture {
    child: Child,
}

impl Capture {
    /// Begins one of the daemon in this directory, of so many bytes of each packet. Its reader may run where the generator does, and where the
    /// daemon does, as an operator's would; what it reads goes nowhere.
    ///
    /// # Errors
    /// In words, when it does not begin.
    pub fn begin(
        program: &Path,
        runtime_dir: &Path,
        snaplen: Option<u32>,
        placement: Placement,
    ) -> Result<Capture, String> {
        let mut command = mortal(program);
        command.arg("--runtime-dir").arg(runtime_dir);
        command.args(["capture", "-w", "-"]);
        if let Some(snaplen) = snaplen {
            command.args(["--snaplen", &snaplen.to_string()]);
        }
        command.stdin(Stdio::null()).stdout(Stdio::null());
        command.stderr(Stdio::piped());
        let mut started = || -> std::io::Result<Child> {
            // What is started inherits the place.
            pin_to(&[placement.generator, placement.subject])?;
            let child = command.spawn();
            pin_to(&[placement.generator])?;
            child
        };
        let child = started().map_err(|error| format!("starting a capture: {error}"))?;
        let mut capture = Capture { child };
        capture.wait_until_it_captures(program, runtime_dir)?;
        Ok(capture)
    }

    fn wait_until_it_captures(&mut self, program: &Path, runtime_dir: &Path) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
        loop {
            let mut command = Command::new(program);
            command.arg("--runtime-dir").arg(runtime_dir).arg("metrics");
            let page = command.output().map_err(|error| error.to_string())?.stdout;
            let page = String::from_utf8_lossy(&page);
            if page
                .lines()
                .any(|line| line == "ringdown_capture_readers 1")
            {
                return Ok(());
            }
            if Instant::now() > until || !matches!(self.child.try_wait(), Ok(None)) {
                return Err(format!("the capture does not begin: {}", self.last_words()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends it. Returns how many packets it has captured and lost since it began.
    ///
    /// # Errors
    /// In words, when it does not say so.
    pub fn end(mut self) -> Result<Figures, String> {
        let words = self.last_words();
        let counts: Vec<f64> = words
            .split_ascii_whitespace()
            .filter_map(|word| word.parse().ok())
            .collect();
        let &[captured, lost] = counts.as_slice() else {
            return Err(format!("the capture ended with {words:?}"));
        };
        let figures = [
            ("captured_packets", captured),
            ("lost_packets", lost),
            ("lost_share", lost / (captured + lost)),
        ];
        let named = figures.map(|(name, figure)| (name.to_owned(), figure));
        Ok(named.into_iter().collect())
    }

    /// Ends it, and returns what it says then.
    fn last_words(&mut self) -> String {
        let _ = kill_process(Pid::from_child(&self.child), Signal::INT);
        let mut words = String::new();
        if let Some(mut errors) = self.child.stderr.take() {
            let _ = errors.read_to_string(&mut words);
        }
        let _ = self.child.wait();
        words
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        self.last_words();
    }
}
