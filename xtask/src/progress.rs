//! Lines that say what is being done and how far it is.

use std::time::Instant;

/// A task of a known number of steps, reported on standard error.
#[derive(Debug)]
pub struct Progress {
    task: &'static str,
    step: usize,
    step_count: usize,
    started: Instant,
}

impl Progress {
    /// Begins `task`, which will take `step_count` steps.
    pub fn new(task: &'static str, step_count: usize) -> Progress {
        Progress {
            task,
            step: 0,
            step_count,
            started: Instant::now(),
        }
    }

    /// Begins the next step.
    pub fn step(&mut self, what: impl std::fmt::Display) {
        self.step += 1;
        eprintln!("[{} {}/{}] {what}", self.task, self.step, self.step_count);
    }

    /// Adds a remark to the current step.
    pub fn note(&self, what: impl std::fmt::Display) {
        eprintln!("[{} {}/{}]   {what}", self.task, self.step, self.step_count);
    }

    /// Ends the task.
    pub fn done(&self, what: impl std::fmt::Display) {
        eprintln!(
            "[{}] {what} ({:.1} s)",
            self.task,
            self.started.elapsed().as_secs_f64()
        );
    }
}
