//! `ringdown upgrade`: one daemon follows another.
//!
//! The sandboxed daemon can start no program, and what it could exec would have its sandbox. So this command starts the new one, or has systemd do so.
//! What it starts and its user are taken from the kernel's word about the process at the control socket. A process can change its own command line: that is read
//! again as one of `ringdown serve`, and may not leave the sandbox.

mod binary;
mod running;
mod surroundings;

use std::fs::File;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use api::{HandOver, Health, Program};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;
use serde::Serialize;

use crate::client::{Client, ClientError, is_stopped, say_if_slow};
use crate::failure::Failure;
use crate::lines::note;
use binary::Binary;
pub use running::Running;
use running::Start;

/// How long a new daemon is watched after it has begun to serve.
const WATCH: Duration = Duration::from_secs(1);

/// How long a daemon that hands over may take to end: twice as long as programs of services and of channels are waited for.
const END_PATIENCE: Duration = Duration::from_secs(45);

/// How often a new daemon is looked for.
const LOOK_INTERVAL: Duration = Duration::from_millis(5);

/// What an upgrade would do.
#[derive(Debug, Serialize)]
pub struct Plan {
    /// The daemon that runs.
    pub daemon: HandOver,
    /// Its process.
    pub pid: i32,
    /// The unit of systemd that it is of.
    pub unit: Option<String>,
    /// The new program's path.
    pub binary: String,
    /// What the new program says of itself.
    pub next: Program,
    /// What is in the way.
    pub hindrance: Option<String>,
    /// What keeps the old program from going on again once the new one has.
    pub no_way_back: Option<String>,
}

/// An upgrade that can be begun.
pub struct Upgrade {
    /// What it would do.
    pub plan: Plan,
    running: Running,
    start: Option<Start>,
    next: Binary,
}

impl Upgrade {
    /// Checks the daemon and at the new program.
    ///
    /// # Errors
    /// [`Failure`] when one of them cannot be checked.
    pub fn prepare(client: &Client, binary: Option<&Path>) -> Result<Upgrade, Failure> {
        let running = Running::at(client)?;
        let pid = running.pid.as_raw_nonzero().get();
        if is_stopped(pid) {
            return Err(ClientError::Stopped { pid }.into());
        }
        let daemon = client.hand_over_prospect()?;
        let path = match binary {
            Some(path) => path.to_owned(),
            None => running.program()?,
        };
        let next = Binary::open(&path, rustix::process::geteuid().as_raw())?;
        let program = next.ask()?;
        // Before anything ends: after that it cannot be checked any more.
        let start = running.is_seen().then(|| running.starts()).transpose();
        let hindrance = match (&start, hindrance(&running, binary, &daemon, &program)?) {
            (_, Some(words)) => Some(words),
            (Err(words), None) => Some(words.clone()),
            (Ok(Some(start)), None) => unlike(client, start, &next)?,
            (Ok(None), None) => None,
        };
        let no_way_back = api::reads(&daemon.formats, &program.formats).err();
        Ok(Upgrade {
            plan: Plan {
                pid,
                unit: running.unit.as_ref().map(|unit| unit.name.clone()),
                binary: path.display().to_string(),
                daemon,
                next: program,
                hindrance,
                no_way_back,
            },
            running,
            start: start.ok().flatten(),
            next,
        })
    }

    /// Lets one upgrade of a daemon be done at a time, until what is returned is dropped.
    ///
    /// # Errors
    /// [`Failure`] when another one is under way.
    pub fn lock(client: &Client) -> Result<File, Failure> {
        let directory = client.socket().parent().unwrap_or(Path::new("/"));
        let failed = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::NotFound => client.unreachable(error).into(),
            _ => Failure::failed(format!("cannot lock {}: {error}", directory.display())),
        };
        let file = File::open(directory).map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(file),
            Err(Errno::WOULDBLOCK) => Err(Failure::failed(
                "another upgrade of this daemon is under way: wait for its end, and look at `ringdown check`",
            )),
            Err(error) => Err(failed(error.into())),
        }
    }

    /// Has the new program follow, or the old one again. Returns what the new daemon says of itself.
    ///
    /// # Errors
    /// [`Failure`] that says which program serves now, if one does.
    pub fn run(&self, client: &Client, timeout: Duration) -> Result<Health, Failure> {
        if let Some(hindrance) = &self.plan.hindrance {
            return Err(Failure::failed(hindrance));
        }
        if let Some(unit) = &self.running.unit {
            unit.restart()?;
            return self.serves(client, timeout, None).map_err(|words| {
                Failure::failed(format!(
                    "{unit} does not serve: {words}; see `journalctl -u {unit}`. What is kept waits for a daemon that starts"
                ))
            });
        }
        let uid = self.running.uid;
        let start = self.start.as_ref();
        let Some(start) = start.filter(|_| rustix::process::geteuid().as_raw() == uid) else {
            return Err(Failure::failed(format!(
                "the daemon runs as the user {uid}: run this as that user, as by `sudo -u '#{uid}' ringdown upgrade`"
            )));
        };
        match client.hand_over() {
            // It ends, and may do so before it has answered. One that is silent has the order: it would end at any time, with nothing behind it.
            Ok(())
            | Err(
                ClientError::HungUp { .. }
                | ClientError::Broken { .. }
                | ClientError::Silent { .. }
                | ClientError::NoDaemon { .. },
            ) => {}
            Err(error) => return Err(error.into()),
        }
        self.await_end()?;
        let words = match start.start(&self.next) {
            Ok(mut next) => match self.serves(client, timeout, Some(&mut next)) {
                Ok(health) => return Ok(health),
                Err(words) => {
                    end(&mut next);
                    words
                }
            },
            Err(error) => format!("it cannot be started: {error}"),
        };
        match self.another(client, Duration::ZERO) {
            Some(another) => another,
            None => self.go_back(client, timeout, start, &words),
        }
    }

    /// Waits for a daemon that something else has started, such as a supervisor: the lock of the runtime directory lets no second one serve.
    fn another(&self, client: &Client, timeout: Duration) -> Option<Result<Health, Failure>> {
        let health = self.serves(client, timeout, None).ok()?;
        let runs = std::fs::metadata(format!("/proc/{}/exe", health.pid));
        let runs = runs.map(|file| (file.dev(), file.ino()));
        let who = format!(
            "process {} serves, which something else has started, such as a supervisor",
            health.pid
        );
        Some(match runs.is_ok_and(|runs| self.next.is(runs)) {
            true => {
                note(&who);
                Ok(health)
            }
            false => Err(Failure::failed(format!(
                "{who}, and not the new program: version {}. Put that in the place of the old one, and have the supervisor restart it",
                health.version
            ))),
        })
    }

    /// Waits until the old daemon has ended. It is killed if it does not: it has let go of what goes on, and none would serve.
    fn await_end(&self) -> Result<(), Failure> {
        let what = || Some("the daemon to end: programs of services are given some seconds".into());
        if say_if_slow(END_PATIENCE, what, || self.running.wait(END_PATIENCE)) {
            return Ok(());
        }
        note(&format!(
            "the daemon has not ended in {} s, and is killed",
            END_PATIENCE.as_secs()
        ));
        self.running.kill()
    }

    fn go_back(
        &self,
        client: &Client,
        timeout: Duration,
        start: &Start,
        words: &str,
    ) -> Result<Health, Failure> {
        let again = start.start(&start.old).map_err(|error| error.to_string());
        let served = again.and_then(|mut old| self.serves(client, timeout, Some(&mut old)));
        let another = served.is_err().then(|| self.another(client, timeout));
        if let Some(another) = another.flatten() {
            return another;
        }
        Err(Failure::failed(match served {
            Ok(health) => format!(
                "the new program does not serve: {words}. The old one goes on, version {}",
                health.version
            ),
            Err(again) => format!(
                "the new program does not serve: {words}. Nor does the old one: {again}. What is kept waits for a daemon that starts"
            ),
        }))
    }

    /// Waits until a daemon serves that is another process than the one before, and this one if one is named; and then, whether that stays.
    fn serves(
        &self,
        client: &Client,
        timeout: Duration,
        mut child: Option<&mut Child>,
    ) -> Result<Health, String> {
        let begun = Instant::now();
        let client = &client.clone().with_patience(timeout.max(WATCH));
        let mut served: Option<(Instant, Health)> = None;
        loop {
            let ended = child.as_deref_mut().map(Child::try_wait);
            if let Some(Ok(Some(status))) = ended {
                return Err(format!("it has ended ({status}); its log says why"));
            }
            if served.is_none() {
                let process = running::process_at(client.socket()).ok();
                let is_next = |pid| match &child {
                    Some(child) => u32::try_from(pid).is_ok_and(|pid| pid == child.id()),
                    None => pid != self.plan.pid,
                };
                let health = process.filter(|pid| is_next(*pid));
                let health = health.and_then(|_| client.health().ok());
                served = health.map(|health| (Instant::now(), health));
            }
            match &served {
                Some((since, health)) if since.elapsed() >= WATCH => return Ok(health.clone()),
                None if begun.elapsed() >= timeout => {
                    return Err(format!("it has not answered in {} s", timeout.as_secs()));
                }
                _ => {}
            }
            std::thread::sleep(LOOK_INTERVAL);
        }
    }
}

/// What is in the way by what the daemon and the new program say of themselves, and by what runs the daemon.
fn hindrance(
    running: &Running,
    binary: Option<&Path>,
    daemon: &HandOver,
    program: &Program,
) -> Result<Option<String>, Failure> {
    if let (Some(unit), Some(binary)) = (&running.unit, binary) {
        let started = running.program()?;
        if started != binary {
            return Ok(Some(format!(
                "{unit} starts {}: install the new program there, and leave --binary out",
                started.display()
            )));
        }
    }
    if daemon.hindrance.is_some() {
        return Ok(daemon.hindrance.clone());
    }
    if !daemon.keeper {
        return Ok(Some(
            "there is no keeper, so VMs would be cut off: `ringdown hold` and `serve --keeper` keep them".to_owned(),
        ));
    }
    let reads = api::reads(&program.formats, &daemon.formats);
    let unread = reads.map_err(|words| format!("the new program cannot go on: {words}"));
    let pid = running.pid.as_raw_nonzero().get();
    let around = || surroundings::hindrance(pid).filter(|_| running.unit.is_none());
    Ok(unread.err().or_else(around))
}

/// What the new program would not serve as the daemon does.
fn unlike(client: &Client, start: &Start, next: &Binary) -> Result<Option<String>, Failure> {
    let served = match start.dry_run(next) {
        Ok(served) => served,
        Err(words) => return Ok(Some(format!("the new program would not start: {words}"))),
    };
    let vms = client.list()?.vms.into_iter();
    let missing = vms.filter(|vm| vm.configured && !served.contains(&vm.full_name()));
    let missing: Vec<String> = missing.map(|vm| vm.full_name()).collect();
    Ok((!missing.is_empty()).then(|| {
        format!(
            "the configuration has no {} any more: `ringdown reload` first, if that is meant",
            missing.join(", ")
        )
    }))
}

fn end(daemon: &mut Child) {
    // It may have ended.
    let _ = daemon.kill();
    let _ = daemon.wait();
}
