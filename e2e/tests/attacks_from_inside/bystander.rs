//! The guest that has nothing to do with the attack.

use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail, ensure};
use e2e::hostile::ECHO_PORT;
use e2e::pattern::Pattern;
use e2e::{Scene, host};

/// How long one exchange may take while an attack lasts.
const PATIENCE: Duration = Duration::from_secs(10);

/// Bytes of an exchange: more than a packet, and no multiple of one.
const EXCHANGE_BYTES: u64 = 10_001;

/// Between two exchanges of a slow bystander.
const SLOW_PAUSE: Duration = Duration::from_millis(100);

/// The port of the host that the bystander dials.
const CALL_PORT: u32 = 85;

/// A thread that exchanges data with the guest `alice` over two circuits, one dialled by each side.
pub struct Bystander {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

#[derive(Default)]
struct Shared {
    rounds: AtomicU64,
    resting: AtomicBool,
    slow: AtomicBool,
    stop: AtomicBool,
    /// What it saw that it should not.
    trouble: Mutex<Option<String>>,
}

impl Bystander {
    /// Opens both circuits and starts.
    pub fn start(scene: &Scene) -> Result<Bystander> {
        let alice = scene.guest("alice");
        // They go on until the guest ends.
        drop(alice.serve(&ECHO_PORT.to_string(), "echo")?);
        let listener = UnixListener::bind(scene.daemon.listener_path("alice", CALL_PORT))?;
        drop(alice.start_probe(&format!("call 2 {CALL_PORT}"))?);
        let (called, _) = listener.accept()?;
        let dialled = host::dial(&scene.daemon.host_socket("alice"), ECHO_PORT)?;
        let mut circuits = [called, dialled];
        for circuit in &circuits {
            circuit.set_read_timeout(Some(PATIENCE))?;
            circuit.set_write_timeout(Some(PATIENCE))?;
        }
        let shared = Arc::new(Shared::default());
        let theirs = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            if let Err(error) = talk(&mut circuits, &theirs) {
                *theirs.trouble() = Some(format!("{error:#}"));
            }
        });
        Ok(Bystander { shared, thread })
    }

    /// How many exchanges have succeeded.
    pub fn rounds(&self) -> u64 {
        self.shared.rounds.load(Ordering::Acquire)
    }

    /// Waits until two more exchanges have succeeded, of which one began after the call.
    pub fn goes_on(&self) -> Result<()> {
        let wanted = self.rounds() + 2;
        let until = Instant::now() + 2 * PATIENCE;
        while self.rounds() < wanted {
            self.is_well()?;
            ensure!(Instant::now() < until, "its exchanges come no further");
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// An error when its exchanges have ended, with the reason.
    pub fn is_well(&self) -> Result<()> {
        match &*self.shared.trouble() {
            Some(trouble) => bail!("its exchanges have ended: {trouble}"),
            None => Ok(()),
        }
    }

    /// Lets it be quiet, or go on.
    pub fn rest(&self, resting: bool) {
        self.shared.resting.store(resting, Ordering::Release);
    }

    /// Lets it pause between exchanges, so that it leaves the processors to a guest that boots, or go on as fast as it can.
    pub fn slow(&self, slow: bool) {
        self.shared.slow.store(slow, Ordering::Release);
    }

    /// Ends it. The error is what it saw that it should not.
    pub fn stop(self) -> Result<()> {
        self.shared.stop.store(true, Ordering::Release);
        self.thread
            .join()
            .map_err(|_| anyhow!("the bystander panicked"))?;
        match self.shared.trouble().take() {
            Some(trouble) => bail!(trouble),
            None => Ok(()),
        }
    }
}

impl Shared {
    fn trouble(&self) -> MutexGuard<'_, Option<String>> {
        self.trouble.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn talk(circuits: &mut [UnixStream; 2], shared: &Shared) -> Result<()> {
    let mut patterns = [1, 2].map(|seed| (Pattern::new(seed), Pattern::new(seed)));
    while !shared.stop.load(Ordering::Acquire) {
        if shared.resting.load(Ordering::Acquire) {
            thread::sleep(Duration::from_millis(2));
            continue;
        }
        if shared.slow.load(Ordering::Acquire) {
            thread::sleep(SLOW_PAUSE);
        }
        let round = shared.rounds.load(Ordering::Acquire);
        for (circuit, (sent, _)) in circuits.iter_mut().zip(&mut patterns) {
            host::send(circuit, sent, EXCHANGE_BYTES).with_context(|| format!("round {round}"))?;
        }
        for (circuit, (_, received)) in circuits.iter_mut().zip(&mut patterns) {
            host::receive(circuit, received, EXCHANGE_BYTES)
                .with_context(|| format!("round {round}"))?;
        }
        shared.rounds.store(round + 1, Ordering::Release);
    }
    Ok(())
}
