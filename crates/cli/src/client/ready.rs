//! Waiting for a guest.

use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use api::{VmState, VmStatus};
use hyper::Method;
use rustix::fs::{Access, access};
use rustix::io::Errno;

use super::{ANSWER_TIMEOUT, Client, ClientError, resource};
use crate::failure::Failure;
use crate::guest::GuestError;
use crate::lines::note;

/// How long commands wait for a guest before they say so.
pub const QUIET_WAIT: Duration = Duration::from_secs(2);

/// Does this, and says something once it has taken [`QUIET_WAIT`], if it may take longer. Where the system has no more threads, nothing is said.
pub fn say_if_slow<T>(limit: Duration, say: impl FnOnce() + Send, work: impl FnOnce() -> T) -> T {
    let (done, is_done) = channel::<()>();
    std::thread::scope(|scope| {
        if limit > QUIET_WAIT {
            let teller = std::thread::Builder::new().name("teller".into());
            let _ = teller.spawn_scoped(scope, move || {
                // It ends when the other end is dropped.
                if is_done.recv_timeout(QUIET_WAIT) == Err(RecvTimeoutError::Timeout) {
                    say();
                }
            });
        }
        let result = work();
        drop(done);
        result
    })
}

impl Client {
    /// One VM, once its agent is there, for a command that connects to it. Waits for `timeout` at most, and after [`QUIET_WAIT`] says on standard error
    /// what for.
    ///
    /// # Errors
    /// A name that no VM can have, [`GuestError::Denied`] at once, or [`ClientError`]; its problem says how far the VM had come.
    pub fn wait_ready(&self, name: &str, timeout: Duration) -> Result<VmStatus, Failure> {
        let vm = self.show(name)?;
        if vm.state == VmState::Ready {
            return Ok(vm);
        }
        if access(&vm.host, Access::WRITE_OK) == Err(Errno::ACCESS) {
            return Err(GuestError::Denied { path: vm.host }.into());
        }
        let say = || self.tell_of_waiting(name, timeout.saturating_sub(QUIET_WAIT));
        say_if_slow(timeout, say, || self.await_ready(name, timeout))
    }

    /// Says what is waited for, and for how long.
    fn tell_of_waiting(&self, name: &str, left: Duration) {
        let Ok(vm) = self.show(name) else { return };
        let line = format!(
            "waiting up to {} s more for VM {:?}: {}",
            left.as_secs(),
            vm.full_name(),
            vm.state_in_words()
        );
        note(&line);
    }

    /// The same without a word.
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
