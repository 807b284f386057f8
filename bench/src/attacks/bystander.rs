//! Two VMs that have nothing to do with the attack.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::daemon::Daemon;
use crate::guest::{Connection, Received, State, VirtualGuest, drive};

use super::scene::ECHO_PORT;

/// How long one exchange may take while an attack lasts.
const PATIENCE: Duration = Duration::from_secs(10);

/// A thread on which `alice` and `bob` talk to each other and to the host, until it is dropped.
pub(super) struct Bystander {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<Result<(), String>>>,
}

#[derive(Default)]
struct Shared {
    rounds: AtomicU64,
    resting: AtomicBool,
    stop: AtomicBool,
}

impl Bystander {
    pub(super) fn start(daemon: &Daemon) -> Bystander {
        let shared = Arc::new(Shared::default());
        let (alice, bob) = (daemon.vhost_socket("alice"), daemon.vhost_socket("bob"));
        let theirs = Arc::clone(&shared);
        let thread = std::thread::spawn(move || talk(&alice, &bob, &theirs));
        Bystander {
            shared,
            thread: Some(thread),
        }
    }

    /// How many exchanges have succeeded.
    pub(super) fn rounds(&self) -> u64 {
        self.shared.rounds.load(Ordering::Acquire)
    }

    /// Waits until two more exchanges have begun and succeeded.
    pub(super) fn wait_for_rounds(&self) -> Result<(), String> {
        let wanted = self.rounds() + 2;
        let until = Instant::now() + PATIENCE;
        while self.rounds() < wanted {
            if Instant::now() > until || !self.is_well() {
                return Err("the bystanders got no further".to_owned());
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Lets it be quiet, or go on.
    pub(super) fn rest(&self, resting: bool) {
        self.shared.resting.store(resting, Ordering::Release);
    }

    fn is_well(&self) -> bool {
        self.thread
            .as_ref()
            .is_some_and(|thread| !thread.is_finished())
    }

    /// Ends it. Returns what was wrong, if anything was.
    pub(super) fn stop(&mut self) -> Result<(), String> {
        self.shared.stop.store(true, Ordering::Release);
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(_)) => Err("a bystander panicked".to_owned()),
            None => Ok(()),
        }
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        // The receiver may be gone.
        let _ = self.stop();
    }
}

fn talk(alice: &Path, bob: &Path, shared: &Shared) -> Result<(), String> {
    let attach = |path| VirtualGuest::attach(path).map_err(|error| error.to_string());
    let (mut alice, mut bob) = (attach(alice)?, attach(bob)?);
    bob.listen(1);
    let host = alice
        .connect(2, ECHO_PORT)
        .map_err(|error| format!("alice calls the host: {error}"))?;
    let near = alice.dial(bob.cid(), 1, wire::vsock::SocketType::Stream);
    let far = drive(&mut [&mut alice, &mut bob], PATIENCE, |guests| {
        (guests[0].state(near) == State::Connected).then(|| guests[1].try_accept(1))?
    });
    let far = far.map_err(|_| "bob was not reached".to_owned())?;
    let mut round = 0_u64;
    while !shared.stop.load(Ordering::Acquire) {
        if shared.resting.load(Ordering::Acquire) {
            std::thread::sleep(Duration::from_millis(2));
            continue;
        }
        exchange(&mut alice, &mut bob, [host, near, far], round)?;
        round += 1;
        shared.rounds.store(round, Ordering::Release);
    }
    Ok(())
}

/// A few bytes to the host and back, and from alice to bob and back.
fn exchange(
    alice: &mut VirtualGuest,
    bob: &mut VirtualGuest,
    [host, near, far]: [Connection; 3],
    round: u64,
) -> Result<(), String> {
    let sent = round.to_le_bytes().repeat(125);
    for circuit in [host, near] {
        alice
            .send(circuit, &sent)
            .map_err(|error| format!("alice could not send: {error}"))?;
    }
    let mut arrived = [Vec::new(), Vec::new(), Vec::new()];
    let done = drive(&mut [alice, bob], PATIENCE, |guests| {
        let mut receive = |guest: usize, circuit, into: usize| match guests[guest].try_receive(
            circuit,
            usize::MAX,
            &mut arrived[into],
        ) {
            Received::Bytes(_) | Received::Nothing => Ok(()),
            other => Err(format!("a bystander's circuit ended: {other:?}")),
        };
        let received = receive(0, host, 0)
            .and_then(|()| receive(0, near, 1))
            .and_then(|()| receive(1, far, 2));
        if let Err(error) = received {
            return Some(Err(error));
        }
        let mut back = std::mem::take(&mut arrived[2]);
        match guests[1].try_send(far, &back) {
            Ok(len) => arrived[2] = back.split_off(len),
            Err(error) => return Some(Err(format!("bob could not send: {error}"))),
        }
        let whole = arrived[..2].iter().all(|bytes| bytes.len() >= sent.len());
        whole.then_some(Ok(()))
    });
    done.map_err(|_| format!("round {round} did not end"))??;
    if arrived[..2].iter().any(|bytes| *bytes != sent) {
        return Err(format!("round {round} brought other bytes than were sent"));
    }
    match [&*alice, &*bob]
        .iter()
        .flat_map(|guest| guest.violations())
        .next()
    {
        Some(violation) => Err(violation.clone()),
        None => Ok(()),
    }
}
