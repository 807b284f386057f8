//! `ringdown shutdown`, `reboot` and `suspend`: asks the guest, and waits until the VM's line says that it was done.
//!
//! That its agent is gone does not mean that a guest is off: an agent ends early in a shutdown, databases late. What counts is that the
//! guest's driver has let go of the line, or its VMM has. Of a VM with a serial port only its agent and its VMM can be seen, and of one whose
//! VMM has a vsock device of its own its agent, and whether the VMM's socket is served: there an agent that stays away counts.

use std::collections::BTreeSet;
use std::io;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use api::{LineKind, VmState, VmStatus};
use rustix::process::{Resource, getrlimit};
use wire::agent::job::Power;

use super::print;
use crate::arguments::{Reboot, Shutdown, Suspend};
use crate::client::{Client, say_if_slow};
use crate::failure::Failure;
use crate::jobs::power::{Underway, ask, is_awake};
use crate::unix;

/// How often the line is polled.
const LOOK: Duration = Duration::from_millis(250);

/// How long an agent may be silent until its guest is taken to be asleep, each of two times.
const SILENCE: Duration = Duration::from_secs(2);

/// For how long the agent of a VM has to be away until it counts as off, if nothing else can be seen of it.
const AWAY: Duration = Duration::from_secs(10);

/// For how long a VMM has to be away from a serial port until its guest counts as off, and from any line until it does not come back of a reboot. QEMU that
/// was only cut off is back within a second, and a VMM that starts a guest anew by a new connection, too.
const UNPLUGGED: Duration = Duration::from_secs(3);

/// For how long the agent of a VM that runs is waited for.
const CALL_PATIENCE: Duration = Duration::from_secs(10);

/// `ringdown shutdown`.
///
/// # Errors
/// [`Failure`] when a guest did not do it.
pub fn shutdown(client: &Client, options: &Shutdown) -> Result<(), Failure> {
    let order = Order {
        action: if options.suspend {
            Power::Suspend
        } else {
            Power::Shutdown
        },
        force: options.force,
        timeout: options.timeout.0,
    };
    match &options.name {
        Some(name) => order.give(client, name),
        None => all(client, &order),
    }
}

/// `ringdown reboot`.
///
/// # Errors
/// [`Failure`] when the guest did not do it.
pub fn reboot(client: &Client, options: &Reboot) -> Result<(), Failure> {
    let order = Order {
        action: Power::Reboot,
        force: options.force,
        timeout: options.timeout.0,
    };
    order.give(client, &options.name)
}

/// `ringdown suspend`.
///
/// # Errors
/// [`Failure`] when the guest did not do it.
pub fn suspend(client: &Client, options: &Suspend) -> Result<(), Failure> {
    let order = Order {
        action: Power::Suspend,
        force: false,
        timeout: options.timeout.0,
    };
    order.give(client, &options.name)
}

/// How a VM is polled.
type Find<'a> = &'a dyn Fn(&str) -> Result<Option<VmStatus>, Failure>;

/// What is to become of a guest.
struct Order {
    action: Power,
    force: bool,
    timeout: Duration,
}

/// Why a reboot cannot be waited for any longer.
const VMM_LEFT: &str = "its VMM has ended (it may have been started so as not to reboot, as QEMU's -no-reboot does): start it again";

/// How the wait for it ended.
enum End {
    Done,
    NotInTime,
    /// The VMM of a guest that reboots has left its line.
    VmmLeft,
}

/// What became of it.
enum Outcome {
    Done(String),
    LeftAlone(String),
    Failed(String),
}

impl Order {
    /// Give it to one VM, and say what became of it.
    fn give(&self, client: &Client, name: &str) -> Result<(), Failure> {
        let mut vm = client.show(name)?;
        if vm.paused || !matches!(vm.state, VmState::Waiting | VmState::Ready) {
            // It may have been asleep or paused a moment ago, or its agent may be starting again. If it does not come, the state is the answer.
            let patience = CALL_PATIENCE.min(self.timeout);
            vm = client
                .wait_ready(name, patience)
                .map_or(vm, |ready| ready.vm);
        }
        let full_name = vm.full_name();
        let what = || Some(self.waited_for(&client.find(&full_name).ok()??));
        let outcome = say_if_slow(self.timeout, what, || {
            self.carry_out(&|name| client.find(name), &vm)
        });
        match outcome {
            Outcome::Done(words) => print(&format!("{}: {words}\n", vm.full_name())),
            // A guest that is off neither comes back nor falls asleep.
            Outcome::LeftAlone(words)
                if vm.state == VmState::Waiting && self.action == Power::Shutdown =>
            {
                print(&format!("{}: {words}\n", vm.full_name()))
            }
            Outcome::LeftAlone(words) if vm.state == VmState::Waiting => {
                Err(Failure::failed(format!("VM {:?}: {words}", vm.full_name())))
            }
            Outcome::LeftAlone(words) => {
                let name = vm.full_name();
                let words = format!("VM {name:?} cannot be asked to {}: {words}", self.asked());
                Err(Failure::failed(words))
            }
            Outcome::Failed(words) => {
                Err(Failure::failed(format!("VM {:?}: {words}", vm.full_name())))
            }
        }
    }

    fn carry_out(&self, find: Find<'_>, before: &VmStatus) -> Outcome {
        match before.state {
            VmState::Ready if !before.paused => {}
            VmState::Waiting => {
                // VMMs of other lines connect again.
                let may_run = match before.kind {
                    LineKind::Vsock => " (one that was cut off may still run)",
                    LineKind::Serial | LineKind::Hybrid => "",
                };
                return Outcome::LeftAlone(format!("is off: no VMM is attached{may_run}"));
            }
            _ => return Outcome::LeftAlone(before.state_in_words()),
        }
        let begun = Instant::now();
        let mut underway = match ask(&before.host, self.action, self.force_after(), self.timeout) {
            Ok(underway) => underway,
            Err(error) => return Outcome::Failed(error.to_string()),
        };
        match self.wait(find, before, &mut underway, begun) {
            Ok(End::Done) => Outcome::Done(format!(
                "{} after {:.1} s{}",
                self.done(),
                begun.elapsed().as_secs_f64(),
                match self.action {
                    Power::Suspend => "; its VMM has to wake it up (of QEMU: system_wakeup)",
                    Power::Shutdown if vmm_stays(find, &before.full_name()) =>
                        "; its VMM goes on, and has to be ended",
                    Power::Shutdown | Power::Reboot => "",
                }
            )),
            Ok(End::NotInTime) => Outcome::Failed(self.not_done(underway.way.as_deref())),
            Ok(End::VmmLeft) => Outcome::Failed(VMM_LEFT.to_owned()),
            Err(words) => Outcome::Failed(words),
        }
    }

    /// When the agent is to call the guest's kernel: in time for what comes of it to be seen.
    fn force_after(&self) -> Option<Duration> {
        self.force.then(|| self.timeout * 2 / 3)
    }

    fn not_done(&self, way: Option<&str>) -> String {
        let hint = match (self.action, self.force) {
            (Power::Suspend, _) | (Power::Reboot, true) => "",
            (Power::Reboot, false) => "; `--force` tells its kernel directly",
            (Power::Shutdown, true) => {
                "; where its agent is silent the guest has halted, and its VMM has to be ended (QEMU may go on when a guest that slept powers off: docs/qemu.md)"
            }
            (Power::Shutdown, false) => {
                "; `--force` tells its kernel directly, and where its agent is silent the guest has halted, and its VMM has to be ended (QEMU may go on when a guest that slept powers off: docs/qemu.md)"
            }
        };
        format!(
            "it has not {} within {} s, though it was asked ({}){hint}",
            self.done(),
            self.timeout.as_secs(),
            way.unwrap_or("the agent did not report how")
        )
    }

    fn done(&self) -> &'static str {
        match self.action {
            Power::Shutdown => "shut down",
            Power::Reboot => "rebooted",
            Power::Suspend => "suspended",
        }
    }

    /// What is waited for, of a VM that has come so far.
    fn waited_for(&self, now: &VmStatus) -> String {
        let state = match now.state {
            VmState::Ready => "its agent is still there".to_owned(),
            VmState::Waiting => "its VMM has left, and may connect again".to_owned(),
            _ => now.state_in_words(),
        };
        format!("VM {:?} to {}: {state}", now.full_name(), self.to_do())
    }

    fn asked(&self) -> &'static str {
        match self.action {
            Power::Shutdown => "shut down",
            Power::Reboot => "reboot",
            Power::Suspend => "fall asleep",
        }
    }

    fn to_do(&self) -> &'static str {
        match self.action {
            Power::Shutdown => "shut down",
            Power::Reboot => "come back of its reboot",
            Power::Suspend => "fall asleep",
        }
    }

    /// Wait until it is done, cannot be done any more, or the time is over.
    fn wait(
        &self,
        find: Find<'_>,
        before: &VmStatus,
        underway: &mut Underway,
        begun: Instant,
    ) -> Result<End, String> {
        let name = before.full_name();
        let (mut away, mut silent) = (Away::default(), 0);
        while begun.elapsed() < self.timeout {
            underway.listen(LOOK).map_err(|error| error.to_string())?;
            if self.action == Power::Suspend {
                // A guest that sleeps keeps its connections, and answers nothing.
                silent = if is_awake(&before.host, SILENCE) {
                    0
                } else {
                    silent + 1
                };
                if silent >= 2 {
                    return Ok(End::Done);
                }
                continue;
            }
            let now = match find(&name).map_err(|failure| failure.to_string())? {
                Some(now) => now,
                None => return Ok(End::Done),
            };
            away.saw(&now);
            if self.is_done(before, &now, &away) {
                return Ok(End::Done);
            }
            if self.action == Power::Reboot && Away::for_long(away.vmm, UNPLUGGED) {
                return Ok(End::VmmLeft);
            }
        }
        Ok(End::NotInTime)
    }

    fn is_done(&self, before: &VmStatus, now: &VmStatus, away: &Away) -> bool {
        let boot = |vm: &VmStatus| vm.agent.as_ref().map(|agent| agent.boot_id.clone());
        let is_another_boot = now.state == VmState::Ready && boot(before) != boot(now);
        let is_long_away = Away::for_long(away.agent, AWAY);
        match (self.action, now.state) {
            // A VMM that starts its guest again at once has shut it down all the same.
            (Power::Shutdown, VmState::Ready) | (Power::Reboot, _) => is_another_boot,
            // Behind a serial port the VMM may have been cut off only, and connect again.
            (_, VmState::Waiting) if now.kind == LineKind::Serial => {
                Away::for_long(away.vmm, UNPLUGGED)
            }
            (_, VmState::Waiting) => true,
            // Of a guest with a serial port only, nothing but its agent answers there.
            (_, VmState::Attached) => now.kind != LineKind::Serial || is_long_away,
            (_, VmState::Joined) => !is_served(now.vmm_socket()) || is_long_away,
            (_, VmState::Booted | VmState::Ready) => false,
        }
    }
}

/// Since when the parts of a VM are away.
#[derive(Default)]
struct Away {
    agent: Option<Instant>,
    vmm: Option<Instant>,
}

impl Away {
    fn saw(&mut self, now: &VmStatus) {
        let since = |away: &mut Option<Instant>, is_here: bool| match is_here {
            true => *away = None,
            false => *away = away.or_else(|| Some(Instant::now())),
        };
        since(&mut self.agent, now.state == VmState::Ready);
        since(&mut self.vmm, has_vmm(now));
    }

    fn for_long(since: Option<Instant>, time: Duration) -> bool {
        since.is_some_and(|since| since.elapsed() >= time)
    }
}

fn has_vmm(now: &VmStatus) -> bool {
    match now.state {
        VmState::Joined => is_served(now.vmm_socket()),
        VmState::Ready => true,
        _ => now.attached,
    }
}

/// Whether the VMM of a guest that is off is there a while later, as Firecracker is, and has not started the guest again.
fn vmm_stays(find: Find<'_>, name: &str) -> bool {
    let until = Instant::now() + UNPLUGGED;
    loop {
        let now = find(name).ok().flatten();
        let stays = now.is_some_and(|now| now.state != VmState::Ready && has_vmm(&now));
        if !stays || Instant::now() >= until {
            return stays;
        }
        std::thread::sleep(LOOK);
    }
}

/// Whether a VMM serves its socket: one that takes no callers just now does.
fn is_served(socket: &Path) -> bool {
    match unix::connect(socket, LOOK) {
        Ok(_) => true,
        Err(error) => error.kind() == io::ErrorKind::TimedOut,
    }
}

/// All VMs, or why the daemon does not say.
type AllVms = Result<Vec<VmStatus>, String>;

/// What the daemon says of all VMs, however many wait for it.
struct Lines<L> {
    look: L,
    seen: Mutex<Option<(Instant, AllVms)>>,
}

impl<L: Fn() -> AllVms> Lines<L> {
    fn new(look: L) -> Lines<L> {
        let seen = Mutex::default();
        Lines { look, seen }
    }

    /// A VM as it was a moment ago, asked for at this time. An answer, or that there is none, is for all that waited for it: a daemon that hangs is
    /// waited for once, and not by one VM after the other.
    fn find(&self, name: &str, asked: Instant) -> Result<Option<VmStatus>, Failure> {
        // What is there is whole at every moment.
        let mut seen = sys::lock(&self.seen);
        let fresh = |at: &Instant| *at >= asked || at.elapsed() < LOOK;
        if !seen.as_ref().is_some_and(|(at, _)| fresh(at)) {
            let vms = (self.look)();
            *seen = Some((Instant::now(), vms));
        }
        match seen.as_ref() {
            Some((_, Err(words))) => Err(Failure::failed(words)),
            Some((_, Ok(vms))) => Ok(vms.iter().find(|vm| vm.full_name() == name).cloned()),
            None => Ok(None),
        }
    }
}

/// Descriptors of one VM whose guest is asked: its connection, that which finds out whether it is awake, and one to spare.
const DESCRIPTORS_OF_VM: u64 = 3;

/// Descriptors of this process for all of them: standard streams, and those of a question to the daemon.
const DESCRIPTORS_OF_ALL: u64 = 32;

/// How many VMs this process has descriptors for at once.
fn most_at_once(descriptors: Option<u64>) -> usize {
    let most = descriptors
        .unwrap_or(u64::MAX)
        .saturating_sub(DESCRIPTORS_OF_ALL);
    let vms = usize::try_from(most / DESCRIPTORS_OF_VM).unwrap_or(usize::MAX);
    vms.clamp(1, config::MAX_VMS)
}

/// Do this for so many at once: a guest that takes its time holds up no other of them. Where the system has no more threads, those that there are take turns.
fn at_once<T: Sync>(all: &[T], most: usize, each: impl Fn(&T) + Sync) {
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(one) = all.get(next.fetch_add(1, Ordering::Relaxed)) {
            each(one);
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..all.len().min(most) {
            let thread = std::thread::Builder::new().name("guest".into());
            if thread.spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
}

/// Give the order to every VM, to all at once where there are descriptors for them, and say of each what became of it.
fn all(client: &Client, order: &Order) -> Result<(), Failure> {
    let vms = client.list()?.vms;
    let look = || {
        client
            .list()
            .map(|list| list.vms)
            .map_err(|error| error.to_string())
    };
    let lines = Lines::new(look);
    let most = most_at_once(getrlimit(Resource::Nofile).current);
    let (failures, printed) = (AtomicUsize::new(0), Mutex::new(Ok(())));
    let pending = Mutex::new(vms.iter().map(VmStatus::full_name).collect::<BTreeSet<_>>());
    let is_said = AtomicBool::new(false);
    // Once: each one done is reported.
    let what = || {
        let pending = sys::lock(&pending);
        let names: Vec<&str> = pending.iter().map(String::as_str).collect();
        let words = format!("these to {}: {}", order.to_do(), names.join(", "));
        (!is_said.swap(true, Ordering::Relaxed)).then_some(words)
    };
    let each = |vm: &VmStatus| {
        let find = |name: &str| lines.find(name, Instant::now());
        let words = match order.carry_out(&find, vm) {
            Outcome::Done(words) => words,
            Outcome::LeftAlone(words) if vm.state == VmState::Waiting => words,
            Outcome::LeftAlone(words) => format!("skipped: {words}"),
            Outcome::Failed(words) => {
                failures.fetch_add(1, Ordering::Relaxed);
                words
            }
        };
        let result = print(&format!("{}: {words}\n", vm.full_name()));
        if let Ok(mut printed) = printed.lock() {
            if printed.is_ok() {
                *printed = result;
            }
        }
        let mut pending = sys::lock(&pending);
        pending.remove(&vm.full_name());
    };
    say_if_slow(order.timeout, what, || at_once(&vms, most, each));
    match failures.into_inner() {
        0 => printed.into_inner().unwrap_or(Ok(())),
        1 => Err(Failure::failed("one guest failed")),
        count => Err(Failure::failed(format!("{count} guests failed"))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn as_many_guests_as_there_may_be_are_asked_at_once() {
        let all = vec![(); config::MAX_VMS];
        let met = std::sync::Barrier::new(all.len());
        at_once(&all, most_at_once(None), |()| {
            met.wait();
        });
    }

    #[test]
    fn no_more_guests_are_asked_at_once_than_there_are_descriptors_for() {
        assert_eq!(most_at_once(Some(4096)), config::MAX_VMS);
        assert_eq!(most_at_once(Some(256)), 74);
        assert_eq!(most_at_once(Some(16)), 1);
        let (now, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let met = std::sync::Barrier::new(2);
        at_once(&[(); 20], 2, |()| {
            assert!(now.fetch_add(1, Ordering::Relaxed) < 2);
            met.wait();
            now.fetch_sub(1, Ordering::Relaxed);
            done.fetch_add(1, Ordering::Relaxed);
            met.wait();
        });
        assert_eq!(done.into_inner(), 20);
    }

    #[test]
    fn a_daemon_that_does_not_answer_is_waited_for_once_by_all() {
        let looks = AtomicUsize::new(0);
        let lines = Lines::new(|| {
            looks.fetch_add(1, Ordering::Relaxed);
            Err("the daemon does not answer".to_owned())
        });
        let asked = Instant::now();
        for _ in 0..config::MAX_VMS {
            let failure = lines.find("web", asked).unwrap_err();
            assert_eq!(failure.to_string(), "the daemon does not answer");
        }
        assert_eq!(looks.load(Ordering::Relaxed), 1);
    }

    fn vm(kind: &str, state: &str, boot: Option<&str>) -> VmStatus {
        let agent = boot.map(|boot| json!({ "software": "a", "hostname": "h", "boot_id": boot }));
        serde_json::from_value(json!({
            "name": "web", "cid": 3, "kind": kind, "state": state, "host": "/nowhere/web.sock", "circuits": 0, "agent": agent
        }))
        .unwrap()
    }

    #[test]
    fn a_paused_guest_is_asked_nothing() {
        let order = Order {
            action: Power::Suspend,
            force: false,
            timeout: Duration::from_secs(1),
        };
        let mut paused = vm("vsock", "ready", None);
        paused.paused = true;
        let find = |_: &str| -> Result<Option<VmStatus>, Failure> { Ok(None) };
        match order.carry_out(&find, &paused) {
            Outcome::LeftAlone(words) => assert!(words.contains("`cont`"), "{words}"),
            Outcome::Done(words) | Outcome::Failed(words) => panic!("{words}"),
        }
    }

    #[test]
    fn the_kernel_is_told_before_the_time_is_over() {
        let order = |action, force, seconds| Order {
            action,
            force,
            timeout: Duration::from_secs(seconds),
        };
        for seconds in [1, 60, 86_400] {
            let forced = order(Power::Shutdown, true, seconds);
            assert!(forced.force_after().unwrap() < forced.timeout);
            assert!(!forced.not_done(None).contains("--force"));
        }
        let asked = order(Power::Reboot, false, 120);
        assert_eq!(asked.force_after(), None);
        let gone = asked.waited_for(&vm("serial", "waiting", None));
        assert!(gone.ends_with(": its VMM has left, and may connect again"));
        assert_eq!(
            asked.not_done(Some("reboot")),
            "it has not rebooted within 120 s, though it was asked (reboot); `--force` tells its kernel directly"
        );
        assert!(
            !order(Power::Suspend, false, 1)
                .not_done(None)
                .contains("--force")
        );
    }

    #[test]
    fn what_counts_as_done_depends_on_what_can_be_seen() {
        let just_now = Some(Instant::now());
        let long_ago = Instant::now().checked_sub(AWAY);
        let is_done = |action, kind: &str, state: &str, boot, away_since| {
            let order = Order {
                action,
                force: false,
                timeout: Duration::from_secs(1),
            };
            let before = vm(kind, "ready", Some("first"));
            let away = Away {
                agent: away_since,
                vmm: away_since,
            };
            order.is_done(&before, &vm(kind, state, boot), &away)
        };
        let shut =
            |kind, state, away_since| is_done(Power::Shutdown, kind, state, None, away_since);
        for kind in ["vsock", "serial", "hybrid"] {
            // A serial port's VMM may have been cut off only.
            assert_eq!(shut(kind, "waiting", just_now), kind != "serial", "{kind}");
            assert!(shut(kind, "waiting", long_ago), "{kind}");
            assert!(!is_done(
                Power::Shutdown,
                kind,
                "ready",
                Some("first"),
                None
            ));
            assert!(is_done(
                Power::Shutdown,
                kind,
                "ready",
                Some("second"),
                None
            ));
            assert!(is_done(Power::Reboot, kind, "ready", Some("second"), None));
            assert!(!is_done(Power::Reboot, kind, "ready", Some("first"), None));
            assert!(!is_done(Power::Reboot, kind, "waiting", None, long_ago));
        }
        assert!(
            !shut("vsock", "booted", long_ago),
            "its agent is gone, and the guest is not"
        );
        assert!(shut("vsock", "attached", just_now));
        assert!(!shut("serial", "attached", just_now));
        assert!(shut("serial", "attached", long_ago));
        // No VMM serves its socket.
        assert!(shut("hybrid", "joined", just_now));
    }
}
