//! Where attacks happen, and how they are judged.

use std::any::Any;
use std::io;
use std::os::unix::net::{UnixListener, UnixStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tempfile::TempDir;

use crate::daemon::Daemon;
use crate::frontend::raw::{RawVmm, request};
use crate::guest::{GuestConfig, Received, VirtualGuest};
use crate::host::{self, Echo};

use super::Attack;
use super::bystander::Bystander;
use super::log;

/// Where every VM finds a service that sends everything back.
pub(super) const ECHO_PORT: u32 = 7;

/// How long anything that must happen may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// At rest is a daemon that uses at most one tick of its processor's clock in this time.
const REST_WINDOW: Duration = Duration::from_millis(60);
const REST_USE: Duration = Duration::from_millis(10);

/// The line that is attacked from unless the attack says otherwise, with the limits that every VM has.
const MALLORY: &str = "mallory";

/// A line whose guest may send 1,000 packets without payload in a second.
pub(super) const TERSE: &str = "terse";

/// A line whose guest may dial 100 times in a second.
pub(super) const SHY: &str = "shy";

/// A line with room for 1,000 messages and 150,000 bytes that wait.
pub(super) const SMALL: &str = "small";

/// Lines with less than the usual limits, so that it does not take long to be over them.
const LIMITED: &[&str] = &[
    "name=terse,cid=7,limits.control-messages-per-second=1000",
    "name=shy,cid=8,limits.connects-per-second=100",
    "name=small,cid=9,limits.buffered-messages=1000,limits.buffered-bytes=150000",
];

/// How much private memory an attack may cost, in bytes: less than a single VM's share of credit.
const MEMORY_BOUND: u64 = 96 << 20;

/// How much an attack may write into the log at once and in each second, in bytes: the audit alone writes 100 lines of a source.
const LOG_BOUND: u64 = 64 << 10;
const LOG_RATE: u64 = 48 << 10;

/// How many lines of one kind the log takes at once; later one each second.
const LOG_LINES: u64 = 100;

/// A daemon with a host full of VMs, on which attacks are tried one after the other.
pub struct Arena {
    daemon: Daemon,
    echoes: Vec<Echo>,
    bystander: Bystander,
    _service: UnixListener,
    _directory: TempDir,
}

/// What came of an attack.
#[derive(Debug)]
pub struct Verdict {
    /// What was wrong, if anything.
    pub failures: Vec<String>,
    /// How long the attack itself took.
    pub duration: Duration,
    /// Exchanges of the bystanders meanwhile.
    pub rounds: u64,
    /// Private memory of the daemon at its end, compared to before, in bytes.
    pub growth_bytes: i64,
    /// What it added to the log, in bytes.
    pub log_bytes: u64,
}

impl Arena {
    /// Starts a daemon of this program.
    pub fn start(program: &Path) -> io::Result<Arena> {
        let vms = [(MALLORY, 3), ("victim", 4), ("alice", 5), ("bob", 6)];
        let mut arguments = vec!["--allow", "from=*,to=*,port=*"];
        arguments.extend(LIMITED.iter().flat_map(|vm| ["--vm", vm]));
        let directory = tempfile::tempdir()?;
        let config = directory.path().join("ringdown.toml");
        std::fs::write(&config, log::services(directory.path()))?;
        let config = config.display().to_string();
        arguments.extend(["--config", &config]);
        let service = log::serve(directory.path())?;
        let daemon = Daemon::start(program, &vms, &arguments)?;
        let echoes = [MALLORY, TERSE, SHY, SMALL, "victim", "alice"]
            .iter()
            .map(|name| Echo::start(&daemon.listener_path(name, ECHO_PORT)))
            .collect::<io::Result<_>>()?;
        let bystander = Bystander::start(&daemon);
        Ok(Arena {
            daemon,
            echoes,
            bystander,
            _service: service,
            _directory: directory,
        })
    }

    /// Tries an attack, and says what came of it.
    pub fn attempt(&mut self, attack: &Attack) -> Verdict {
        let mut failures = Vec::new();
        // The line works before, so that what is seen afterwards is the attack's doing.
        check(&mut failures, "before the attack", self.line_works(MALLORY));
        // The first time, the bystanders may still be about to attach.
        check(
            &mut failures,
            "bystanders",
            self.bystander.wait_for_rounds(),
        );
        let descriptors = self.settled_descriptors();
        let (memory, log_start) = (self.daemon.private_bytes(), self.daemon.log_bytes());
        let rounds = self.bystander.rounds();
        let start = Instant::now();
        let mut scene = Scene {
            daemon: &self.daemon,
            bystander: &self.bystander,
            attacker: MALLORY,
            log: log_start,
            start,
            held: Vec::new(),
            memory_bound: MEMORY_BOUND,
        };
        let outcome = catch_unwind(AssertUnwindSafe(|| (attack.run)(&mut scene)));
        check(&mut failures, "the attack", outcome.map_err(panic_text));
        if let Some(text) = attack.outcome.log() {
            check(&mut failures, "the log", scene.wait_for_log(text));
        }
        let duration = start.elapsed();
        check(
            &mut failures,
            "bystanders",
            self.bystander.wait_for_rounds(),
        );
        let rounds = self.bystander.rounds() - rounds;
        check(&mut failures, "rest", self.comes_to_rest());
        let growth_bytes = self.daemon.private_bytes() as i64 - memory as i64;
        let log_bytes = self.daemon.log_bytes() - log_start;
        if growth_bytes > scene.memory_bound as i64 {
            failures.push(format!("it cost {} KiB of memory", growth_bytes >> 10));
        }
        if log_bytes > LOG_BOUND + LOG_RATE * (start.elapsed().as_secs() + 1) {
            failures.push(format!("it cost {} KiB of log", log_bytes >> 10));
        }
        scene.held.clear();
        let attacker = scene.attacker;
        check(&mut failures, "a fresh VM", self.line_works(attacker));
        check(&mut failures, "leak", self.descriptors_return(descriptors));
        if !self.daemon.is_running() {
            failures.push(format!("the daemon died:\n{}", self.daemon.log_tail()));
        }
        Verdict {
            failures,
            duration,
            rounds,
            growth_bytes,
            log_bytes,
        }
    }

    /// Ends everything. Returns what was wrong with the bystanders.
    ///
    /// # Errors
    /// In words, what they saw that they should not.
    pub fn finish(mut self) -> Result<(), String> {
        let result = self.bystander.stop();
        self.echoes.clear();
        result
    }

    /// A fresh VM on the attacker's line reaches the host and is reached.
    fn line_works(&self, attacker: &str) -> Result<(), String> {
        let path = self.daemon.vhost_socket(attacker);
        let mut guest = VirtualGuest::attach(&path).map_err(|error| error.to_string())?;
        let circuit = guest
            .connect(2, ECHO_PORT)
            .map_err(|error| format!("it cannot call: {error}"))?;
        guest
            .send(circuit, b"hello")
            .map_err(|error| error.to_string())?;
        match guest.receive(circuit, 5) {
            Ok(bytes) if bytes == b"hello" => Ok(()),
            other => Err(format!("its echo was {other:?}")),
        }
    }

    fn settled_descriptors(&self) -> usize {
        let mut before = self.daemon.descriptor_count();
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
            let after = self.daemon.descriptor_count();
            if after == before {
                break;
            }
            before = after;
        }
        before
    }

    fn descriptors_return(&self, wanted: usize) -> Result<(), String> {
        let until = Instant::now() + PATIENCE;
        while self.daemon.descriptor_count() > wanted {
            if Instant::now() > until {
                let found = self.daemon.descriptors();
                return Err(format!(
                    "{} descriptors of {wanted}: {found:?}",
                    found.len()
                ));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// The daemon has nothing to do while the bystanders are quiet, whatever the attacker still holds.
    fn comes_to_rest(&self) -> Result<(), String> {
        self.bystander.rest(true);
        let until = Instant::now() + PATIENCE;
        let mut used = Duration::MAX;
        while used > REST_USE && Instant::now() < until {
            let before = self.daemon.processor_time();
            std::thread::sleep(REST_WINDOW);
            used = self.daemon.processor_time() - before;
        }
        self.bystander.rest(false);
        match used <= REST_USE {
            true => Ok(()),
            false => Err(format!("it does not rest: {used:?} in {REST_WINDOW:?}")),
        }
    }
}

fn check(failures: &mut Vec<String>, what: &str, result: Result<(), String>) {
    if let Err(error) = result {
        failures.push(format!("{what}: {error}"));
    }
}

fn panic_text(panic: Box<dyn Any + Send>) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
    text.unwrap_or_else(|| "a panic without words".to_owned())
}

/// What an attack has at hand.
pub struct Scene<'a> {
    /// The daemon.
    pub(super) daemon: &'a Daemon,
    bystander: &'a Bystander,
    attacker: &'static str,
    log: u64,
    start: Instant,
    held: Vec<Box<dyn Any>>,
    memory_bound: u64,
}

impl Scene<'_> {
    /// The attack comes from another line than `mallory`'s.
    pub(super) fn attack_from(&mut self, attacker: &'static str) {
        self.attacker = attacker;
    }

    /// How many exchanges the bystanders have had.
    pub(super) fn bystanders_rounds(&self) -> u64 {
        self.bystander.rounds()
    }

    /// What the daemon says about the attacker's line.
    pub(super) fn status(&self) -> serde_json::Value {
        let status = self.daemon.vm_status(self.attacker);
        status.expect("the daemon knows the VM")
    }

    /// One of the counters of the attacker's line.
    pub(super) fn counter(&self, name: &str) -> u64 {
        let count = self.status()["counters"][name].as_u64();
        count.expect("there is such a counter")
    }

    /// The attacker's guest.
    pub(super) fn attach(&self) -> VirtualGuest {
        self.attach_with(GuestConfig::default())
    }

    pub(super) fn attach_with(&self, config: GuestConfig) -> VirtualGuest {
        VirtualGuest::attach_with(&self.daemon.vhost_socket(self.attacker), config)
            .expect("the attacker attaches")
    }

    /// A guest that the attacker may call.
    pub(super) fn victim(&self) -> VirtualGuest {
        self.victim_with(GuestConfig::default())
    }

    pub(super) fn victim_with(&self, config: GuestConfig) -> VirtualGuest {
        VirtualGuest::attach_with(&self.daemon.vhost_socket("victim"), config)
            .expect("the victim attaches")
    }

    /// Holds on to something until the attack has been judged.
    pub(super) fn keep(&mut self, held: impl Any) {
        self.held.push(Box::new(held));
    }

    /// States how much memory this attack may cost, in bytes.
    pub(super) fn allow_memory(&mut self, bytes: u64) {
        self.memory_bound = bytes;
    }

    /// A bare connection to the attacker's vhost-user socket.
    pub(super) fn raw(&self) -> RawVmm {
        RawVmm::connect(&self.daemon.vhost_socket(self.attacker)).expect("the socket listens")
    }

    /// The same, with an owner and features set.
    pub(super) fn raw_with_features(&self) -> RawVmm {
        let raw = self.raw();
        let features = crate::guest::GuestConfig::default().features;
        raw.send(request::SET_OWNER, &[], &[]).expect("it is open");
        raw.send(request::SET_FEATURES, &features.to_le_bytes(), &[])
            .expect("it is open");
        raw
    }

    pub(super) fn host_socket(&self) -> PathBuf {
        self.daemon.host_socket(self.attacker)
    }

    /// A program of the host that listens for circuits.
    pub(super) fn listen_for_circuits(&self, port: u32) -> circuit::Listener {
        let socket = self.daemon.control_socket().with_file_name("circuit.sock");
        let connector = circuit::Connector::new().socket(socket);
        connector.listen(port).expect("the port is free")
    }

    /// A listener at this port, for the attacker's dials.
    pub(super) fn listen(&mut self, port: u32) -> UnixListener {
        let path = self.daemon.listener_path(self.attacker, port);
        let listener = host::listen(&path).expect("the path is free");
        self.keep(Removed(path));
        listener
    }

    /// The attacker's guest with a circuit to a program of the host.
    pub(super) fn circuit(&mut self) -> (VirtualGuest, crate::guest::Connection, UnixStream) {
        let listener = self.listen(80);
        let mut guest = self.attach();
        let circuit = guest.connect(2, 80).expect("there is a listener");
        let program = host::accept(&listener).expect("a call came");
        (guest, circuit, program)
    }

    /// Waits until the log has this text, written since the attack began.
    pub(super) fn wait_for_log(&self, text: &str) -> Result<(), String> {
        self.wait_for_log_until(text, Instant::now() + PATIENCE)
    }

    /// The same, for a moment only.
    pub(super) fn wait_briefly_for_log(&self, text: &str) -> Result<(), String> {
        self.wait_for_log_until(text, Instant::now() + Duration::from_millis(5))
    }

    /// The log has lines with this text, and no more of them than its budget for one kind, since the attack began.
    pub(super) fn assert_bounded(&self, text: &str) {
        let since = self.daemon.log_since(self.log);
        let lines = since.lines().filter(|line| line.contains(text)).count() as u64;
        let most = LOG_LINES + self.start.elapsed().as_secs() + 1;
        assert!(
            (1..=most).contains(&lines),
            "{lines} lines of {most} that say {text:?}"
        );
    }

    fn wait_for_log_until(&self, text: &str, until: Instant) -> Result<(), String> {
        loop {
            let since = self.daemon.log_since(self.log);
            if since.contains(text) {
                return Ok(());
            }
            if Instant::now() > until {
                let tail = since.len().saturating_sub(1500);
                let tail = since.get(tail..).unwrap_or_default();
                return Err(format!("{text:?} is not in it:\n{tail}"));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// A path that is removed in the end.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        // The attack may have done so.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// The attacker's guest is as well as any: nothing was done to its line.
pub(super) fn assert_works(guest: &mut VirtualGuest) {
    let circuit = guest.connect(2, ECHO_PORT).expect("it can call");
    guest.send(circuit, b"still here").expect("it can send");
    let echo = guest.receive(circuit, 10);
    assert_eq!(echo.as_deref(), Ok(&b"still here"[..]));
    guest.close(circuit);
}

/// This circuit has been reset.
pub(super) fn assert_reset(guest: &mut VirtualGuest, circuit: crate::guest::Connection) {
    let (_, ended) = guest.receive_to_end(circuit);
    assert_eq!(ended, Received::Reset);
}
