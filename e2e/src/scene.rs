//! A daemon with guests, and the probe in them: what most scenarios begin with.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};

use crate::control::Running;
use crate::probe::PROGRAM;
use crate::{CommandSpec, Daemon, DaemonSpec, Guest, GuestSpec, Kernel, Output, ShowLogs};

/// How long a probe may take, in seconds. Some wait for others on purpose.
pub const PROBE_DEADLINE_S: u64 = 300;

/// One daemon and its guests, which are named as their VMs.
#[derive(Debug)]
pub struct Scene {
    /// The guests, in the order in which they were asked for.
    pub guests: Vec<Guest>,
    /// The daemon.
    pub daemon: Daemon,
}

impl Scene {
    /// Starts a daemon and boots guests for some of its VMs.
    ///
    /// # Errors
    /// When one of them does not come up.
    pub fn start(daemon: DaemonSpec, guests: &[(&str, Kernel)]) -> Result<Scene> {
        let specs = guests
            .iter()
            .map(|(name, kernel)| GuestSpec::new(*name, *kernel))
            .collect();
        Scene::start_with(daemon, specs)
    }

    /// The same with guests of any kind, which are attached to their VMs here.
    ///
    /// # Errors
    /// When one of them does not come up.
    pub fn start_with(daemon: DaemonSpec, guests: Vec<GuestSpec>) -> Result<Scene> {
        let has_windows = daemon.windows.is_some();
        let daemon = Daemon::start(daemon)?;
        let specs = guests
            .into_iter()
            .map(|spec| match has_windows {
                true => spec.window_drivers(),
                false => spec,
            })
            .map(|spec| spec.attached(&daemon))
            .collect();
        let guests = Guest::boot_all(specs)?;
        Ok(Scene { guests, daemon })
    }

    /// The guest of this name.
    ///
    /// # Panics
    /// When there is none: the test has a wrong name.
    pub fn guest(&self, name: &str) -> &Guest {
        self.guests
            .iter()
            .find(|guest| guest.name() == name)
            .unwrap_or_else(|| panic!("the scene has no guest {name}"))
    }
}

impl ShowLogs for Scene {
    fn show_logs(&self) {
        self.daemon.show_log();
        self.guests.show_logs();
    }
}

impl Guest {
    /// Starts the probe ([`crate::probe::script`]) with these steps.
    ///
    /// # Errors
    /// When the guest cannot be reached.
    pub fn probe(&self, steps: &str) -> Result<Running> {
        self.start_probe(&format!("run {steps}"))
    }

    /// Starts the probe with a first step that listens, and waits until it does.
    ///
    /// # Errors
    /// When it does not come to listen.
    pub fn probe_listening(&self, steps: &str) -> Result<Running> {
        let file = ready_file();
        let (first, rest) = steps.split_once(' ').unwrap_or((steps, ""));
        let running = self.probe(&format!("{first} touch:{file} {rest}"))?;
        self.wait_until(&format!("[ -e {file} ]"), Duration::from_secs(60))
            .with_context(|| format!("probe {steps}"))?;
        Ok(running)
    }

    /// Runs the probe to its end, which must be a success, and returns what it printed.
    ///
    /// # Errors
    /// With what it said, when a step went wrong.
    pub fn probe_to_end(&self, steps: &str) -> Result<String> {
        finished(self.probe(steps)?)
    }

    /// Starts one of the probe's crowds ([`crate::probe::crowd`]).
    ///
    /// # Errors
    /// When the guest cannot be reached.
    pub fn start_probe(&self, arguments: &str) -> Result<Running> {
        let line = format!("ulimit -n 20000; exec {PROGRAM} {arguments}");
        let deadline = Duration::from_secs(PROBE_DEADLINE_S);
        self.start_spec(CommandSpec::new(line).deadline(deadline))
    }

    /// Starts a crowd's server and waits until it listens.
    ///
    /// # Errors
    /// When it does not come to listen.
    pub fn serve(&self, port: &str, mode: &str) -> Result<Running> {
        let file = ready_file();
        let running = self.start_probe(&format!("serve {port} {mode} {file}"))?;
        self.wait_until(&format!("[ -e {file} ]"), Duration::from_secs(60))?;
        Ok(running)
    }
}

/// A file that no other probe uses, for a probe to make when it listens.
fn ready_file() -> String {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    format!("/tmp/.listens-{}", COUNTER.fetch_add(1, Ordering::Relaxed))
}

/// Waits for a probe, which must have succeeded, and returns what it printed.
///
/// # Errors
/// With what it said, when a step went wrong.
pub fn finished(probe: Running) -> Result<String> {
    let output: Output = probe.wait()?;
    if output.code != 0 {
        bail!(
            "the probe ends with {}: {}\n{}",
            output.code,
            output.text(),
            output.error_text()
        );
    }
    Ok(output.text())
}

/// How long a step of a probe took by the guest's clock, from what it said on standard error.
///
/// # Errors
/// When there is no such step.
pub fn step_us(output: &Output, step: &str) -> Result<u64> {
    output
        .error_text()
        .lines()
        .find_map(|line| {
            line.strip_prefix(step)?
                .strip_prefix(": ")?
                .strip_suffix(" us")
        })
        .and_then(|text| text.parse().ok())
        .with_context(|| format!("the probe did not do {step}: {}", output.error_text()))
}
