//! Waiting for a guest.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use api::{VmState, VmStatus};
use hyper::Method;
use rustix::fs::{Access, access};
use rustix::io::Errno;

use super::{ANSWER_TIMEOUT, Client, ClientError, resource};
use crate::failure::Failure;
use crate::guest::{self, Agent, Connection, Deadline, GuestError};
use crate::lines::note;

/// How long commands wait for a guest before they say so, and then between checks of what changed.
const QUIET_WAIT: Duration = Duration::from_secs(2);

/// How often a VM in which something runs is asked about.
const PAUSE_WAIT: Duration = Duration::from_secs(5);

/// What an agent has for its answer at least, however long its guest was waited for.
const LEAST_PATIENCE: Duration = Duration::from_secs(2);

/// A VM whose agent is there.
#[derive(Debug)]
pub struct Ready {
    pub vm: VmStatus,
    /// What is left of the wait, for the agent's answer.
    patience: Duration,
}

impl Ready {
    fn new(vm: VmStatus, left: Duration) -> Ready {
        let patience = left.clamp(LEAST_PATIENCE, guest::ANSWER_TIMEOUT);
        Ready { vm, patience }
    }

    /// Where its agent is called.
    pub fn agent(&self) -> Agent<'_> {
        Agent {
            host_socket: &self.vm.host,
            patience: self.patience,
        }
    }
}

/// Does this, and says on standard error what it waits for once it has taken [`QUIET_WAIT`], if it may take longer, and again when that has changed.
/// Where the system has no more threads, nothing is said.
pub fn say_if_slow<T>(
    limit: Duration,
    what: impl Fn() -> Option<String> + Send,
    work: impl FnOnce() -> T,
) -> T {
    if limit <= QUIET_WAIT {
        return work();
    }
    let in_words = |words: &str, elapsed| {
        let left = limit.saturating_sub(elapsed).as_secs();
        format!("waiting up to {left} s more for {words}")
    };
    say_meanwhile(QUIET_WAIT, what, in_words, work)
}

/// Does this, and meanwhile asks `what` time and again: what is new of that is said on standard error.
fn say_meanwhile<T>(
    interval: Duration,
    what: impl Fn() -> Option<String> + Send,
    in_words: impl Fn(&str, Duration) -> String + Send,
    work: impl FnOnce() -> T,
) -> T {
    let (done, is_done) = channel::<()>();
    std::thread::scope(|scope| {
        let teller = std::thread::Builder::new().name("teller".into());
        let _ = teller.spawn_scoped(scope, move || {
            let (mut elapsed, mut said) = (Duration::ZERO, None);
            // It ends when the other end is dropped.
            while is_done.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                elapsed += interval;
                let now = what();
                if let Some(words) = now.as_ref().filter(|_| now != said) {
                    note(&in_words(words, elapsed));
                }
                said = now;
            }
        });
        let result = work();
        drop(done);
        result
    })
}

/// Reaches an agent as [`Connection::open_by`] does, and says what it waits for as [`say_if_slow`] does.
pub(crate) fn reach_agent(agent: Agent<'_>, capability: &str) -> Result<Connection, GuestError> {
    let what = || Some("the guest's agent to answer".to_owned());
    let deadline = Deadline::after(agent.patience);
    say_if_slow(agent.patience, what, || {
        Connection::open_by(agent.host_socket, capability, deadline)
    })
}

impl Client {
    /// One VM, once its agent is there and it is not paused, for a command that connects to it. Waits for `timeout` at most, of which the agent's answer
    /// has the rest, and says what for as
    /// [`say_if_slow`] does.
    ///
    /// # Errors
    /// A name that no VM can have, [`GuestError::Denied`] at once, or [`ClientError`]; its problem says how far the VM had come.
    pub fn wait_ready(&self, name: &str, timeout: Duration) -> Result<Ready, Failure> {
        let begun = Instant::now();
        let vm = self.show(name)?;
        if vm.state == VmState::Ready && !vm.paused {
            return Ok(Ready::new(vm, timeout));
        }
        if access(&vm.host, Access::WRITE_OK) == Err(Errno::ACCESS) {
            return Err(GuestError::Denied { path: vm.host }.into());
        }
        let what = || {
            let vm = self.show(name).ok()?;
            let state = vm.state_in_words();
            Some(format!("VM {:?}: {state}", vm.full_name()))
        };
        let vm = say_if_slow(timeout, what, || self.await_ready(name, timeout))?;
        Ok(Ready::new(vm, timeout.saturating_sub(begun.elapsed())))
    }

    /// Does this in a guest, and says meanwhile that its VM is paused, which leaves it silent.
    pub fn say_if_paused<T>(&self, vm: &VmStatus, work: impl FnOnce() -> T) -> T {
        let name = vm.full_name();
        let what = || {
            let vm = self.show(&name).ok().filter(|vm| vm.paused)?;
            Some(vm.state_in_words())
        };
        let in_words = |state: &str, _| format!("VM {name:?}: {state}");
        say_meanwhile(PAUSE_WAIT, what, in_words, work)
    }

    /// [`wait_ready`](Self::wait_ready) without a word.
    ///
    /// # Errors
    /// A name that no VM can have, or [`ClientError`]; its problem says how far the VM had come.
    pub fn await_ready(&self, name: &str, timeout: Duration) -> Result<VmStatus, Failure> {
        Ok(self.ask_ready(&resource(name)?, timeout)?)
    }

    fn ask_ready(&self, vm: &str, timeout: Duration) -> Result<VmStatus, ClientError> {
        let target = format!("{vm}?wait=ready&timeout_ms={}", timeout.as_millis());
        self.ask(Method::GET, &target, Vec::new(), timeout + ANSWER_TIMEOUT)
    }
}
