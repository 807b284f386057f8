//! The guest's switchboard: programs of the guest get circuits of it, zero-copy ones where there is a window for them.
//!
//! Programs come to a UNIX socket ([`programs`]) and name their callee, or where they want to be called. The call itself is an ordinary vsock connection
//! ([`calls`]): it is made, or not, as that of any other program. Beside that the agent reports to the host ([`link`]) that a window is wanted for it, and the host decides from the connection that it
//! carries. If it gives a window, which is a device of this guest ([`devices`]), the agent hands the device's descriptor to that one program; if not, the connection
//! carries the bytes. So whatever is missing (windows, an answer, the host's switchboard at all), there is a circuit, as long as there is a connection.
//!
//! # Theory of operation
//!
//! The agent never maps a window, and keeps no descriptor of one. With the descriptor a program gets one end of a socket pair, the *lease*, whose other end the agent keeps:
//! when the program has closed it, or has ended, the window is taken away ([`windows`]), and only then does the host hear that it is released. Resets have threads of their
//! own, since a program can make one take long; it holds up no other window.
//!
//! One thread, `switchboard`, keeps the session with the host and watches leases and new devices; it sleeps without a timer while nothing happens. Each program that has asked has a thread.
//! All of them share [`Shared`] behind one lock, which no thread keeps while it waits.
//!
//! Once the host was notified that a call is there (`DIALLED`, `ACCEPTED`), only its answer decides what the call becomes: if none comes, the call ends. Otherwise one side could believe in a
//! window and the other in a stream.

mod calls;
mod devices;
mod leaving;
mod link;
mod network;
mod programs;
mod room;
mod windows;

use std::collections::{BTreeSet, HashMap};
use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use wire::switchboard::link::{Circuit, FromAgent};
use wire::switchboard::{Kind, Place, Side};

use crate::log::say;
use devices::Devices;
use link::Session;
use network::{Network, Vsock};
use programs::Seats;
use windows::{Reset, Windows};

/// The stack of a thread, in bytes.
const STACK_SIZE: usize = 128 * 1024;

/// How long a request waits for room among the lines to the host. Then a call becomes a stream without asking.
const ROOM_TIMEOUT: Duration = Duration::from_secs(if cfg!(test) { 2 } else { 10 });

/// The guest's switchboard.
#[derive(Debug)]
pub struct Switchboard {
    network: Box<dyn Network>,
    devices: Devices,
    shared: Mutex<Shared>,
    /// Wakes the thread `switchboard`.
    wake: Arc<OwnedFd>,
    /// Is notified when there is more room among the lines to the host.
    room: Arc<Condvar>,
    /// Callers that wait for the host's answer, or for the program that they call.
    callers: Arc<Seats>,
}

/// What all threads have together.
#[derive(Debug, Default)]
struct Shared {
    session: Option<Session>,
    windows: Windows,
    /// Calls that wait for the host's answer, by their number: each has a program's seat, or a caller's.
    waiting: HashMap<u64, Waiting>,
    /// Where programs of this guest take circuits.
    listening: BTreeSet<u32>,
    last_id: u64,
}

/// A call whose answer is waited for.
struct Waiting {
    /// Whose program makes it, or takes it.
    user: u32,
    side: Side,
    kind: Kind,
    ring: u64,
    /// Is called once, must not wait, and does not take the lock.
    tell: Box<dyn FnOnce(Decision) + Send>,
}

impl std::fmt::Debug for Waiting {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(formatter, "{} of {}", self.side, self.kind)
    }
}

/// What becomes of a call.
#[derive(Debug)]
enum Decision {
    /// It gets this window.
    Window(Loan),
    /// Its connection carries the bytes.
    Stream { peer: Place },
    /// Unknown: the session with the host has ended.
    Lost,
}

/// A window that is lent to a call. Unless a program gets it, it goes back when this is dropped, which takes the lock.
#[derive(Debug)]
struct Loan {
    switchboard: Arc<Switchboard>,
    circuit: Circuit,
    is_attached: bool,
}

impl Loan {
    /// From now on a program has the window, until this lease ends. Not if it was taken away meanwhile.
    fn attach(mut self, lease: OwnedFd) -> bool {
        let Circuit {
            uuid, generation, ..
        } = self.circuit;
        let windows = &mut sys::lock(&self.switchboard.shared).windows;
        self.is_attached = windows.attach(uuid, generation, lease);
        wake(&self.switchboard.wake);
        self.is_attached
    }
}

impl Drop for Loan {
    fn drop(&mut self) {
        if !self.is_attached {
            let Circuit {
                uuid, generation, ..
            } = self.circuit;
            self.switchboard.end(uuid, generation);
        }
    }
}

impl Switchboard {
    /// The switchboard of this guest.
    ///
    /// # Errors
    /// The system has no descriptors left.
    pub fn new() -> io::Result<Arc<Switchboard>> {
        Switchboard::with(Box::new(Vsock), Devices::default())
    }

    fn with(network: Box<dyn Network>, devices: Devices) -> io::Result<Arc<Switchboard>> {
        Ok(Arc::new(Switchboard {
            network,
            devices,
            shared: Mutex::default(),
            wake: Arc::new(new_wake()?),
            room: Arc::default(),
            callers: Arc::default(),
        }))
    }

    /// Serves the guest's programs from here on.
    ///
    /// # Errors
    /// The system has no threads left. That programs cannot reach the switchboard is said in the log only.
    pub fn start(self: &Arc<Self>) -> io::Result<()> {
        if let Some(path) = programs::path() {
            self.offer(&path)?;
        }
        let switchboard = Arc::clone(self);
        spawn("switchboard", move || switchboard.keep_session())
    }

    /// The host is there, perhaps after a while in which it was not.
    pub(crate) fn host_is_there(&self) {
        wake(&self.wake);
    }

    /// Takes windows away, each in a thread of its own.
    fn reset(self: &Arc<Self>, resets: Vec<Reset>) {
        for device in resets {
            let switchboard = Arc::clone(self);
            let uuid = device.uuid;
            let reset = move || {
                let result = switchboard.devices.reset(&device.name);
                if let Err(error) = &result {
                    say!(
                        "cannot take the window {uuid} ({}) from its program, and it is not used any more: {error}",
                        device.name
                    );
                }
                switchboard.was_reset(&device, result.ok());
            };
            if let Err(error) = spawn("window-reset", reset) {
                say!("cannot start a thread: {error}");
                sys::lock(&self.shared).windows.was_reset(uuid, None);
            }
        }
    }

    fn was_reset(&self, device: &Reset, len: Option<u64>) {
        let mut shared = sys::lock(&self.shared);
        let said = shared.windows.was_reset(device.uuid, len);
        if let (Some(said), Some(_)) = (said, shared.welcomed()) {
            shared.say(None, &said);
        }
    }

    /// The lock, once there is room for what a request of this user leads to; not if the host does not read for too long. Other users' requests go on meanwhile.
    fn with_room(&self, user: u32) -> Option<MutexGuard<'_, Shared>> {
        let deadline = Instant::now() + ROOM_TIMEOUT;
        let mut shared = sys::lock(&self.shared);
        loop {
            // Without a session nothing is said.
            if shared
                .welcomed()
                .is_none_or(|session| session.has_room(user))
            {
                return Some(shared);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return None;
            }
            let waited = self.room.wait_timeout(shared, left);
            (shared, _) = waited.unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// A program of this user begins to take circuits at a port. Not if there is no room for it.
    fn listens(&self, user: u32, port: u32) -> bool {
        let Some(mut shared) = self.with_room(user) else {
            return false;
        };
        shared.listening.insert(port);
        if shared.welcomed().is_some() {
            shared.say(Some(user), &FromAgent::Listen { port });
        }
        true
    }

    /// It ends that.
    fn listens_no_more(&self, user: u32, port: u32) {
        let mut shared = sys::lock(&self.shared);
        shared.listening.remove(&port);
        if shared.welcomed().is_some() {
            shared.say(Some(user), &FromAgent::Unlisten { port });
        }
    }

    /// Asks the host for a window for a call of this user's program, of which it makes what waits and the words, each with the call's number: no number if there is no session, or no room.
    fn ask(
        &self,
        user: u32,
        waiting: impl FnOnce(u64) -> Waiting,
        words: impl FnOnce(u64) -> FromAgent,
    ) -> Option<u64> {
        let mut shared = self.with_room(user)?;
        shared.welcomed()?;
        shared.last_id += 1;
        let id = shared.last_id;
        shared.waiting.insert(id, waiting(id));
        match shared.say(Some(user), &words(id)) {
            true => Some(id),
            false => {
                shared.waiting.remove(&id);
                None
            }
        }
    }

    /// The call with this number was taken. Not if the host was not notified of it, and never will be.
    fn dialled(&self, id: u64, cid: u32, port: u32) -> bool {
        let mut shared = sys::lock(&self.shared);
        let user = shared.waiting.get(&id).map(|call| call.user);
        user.is_some() && shared.say(user, &FromAgent::Dialled { id, cid, port })
    }

    /// The call with this number has come to nothing.
    fn give_up(&self, id: u64) {
        let mut shared = sys::lock(&self.shared);
        // Without it the host has decided already, or knows nothing of it any more.
        if let Some(call) = shared.waiting.remove(&id) {
            shared.say(Some(call.user), &FromAgent::GiveUp { id });
        }
    }
}

impl Shared {
    /// The session, if the host has answered.
    fn welcomed(&mut self) -> Option<&mut Session> {
        self.session
            .as_mut()
            .filter(|session| session.is_welcomed())
    }

    /// Says a line to the host, to which a request of this user has led, if one has; not if there is no session.
    fn say(&mut self, user: Option<u32>, said: &FromAgent) -> bool {
        let session = self.session.as_mut();
        session.is_some_and(|session| session.say(user, said))
    }
}

/// What wakes a thread that polls it.
fn new_wake() -> io::Result<OwnedFd> {
    let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
    Ok(rustix::event::eventfd(0, flags)?)
}

fn wake(descriptor: &OwnedFd) {
    // It fails only when it has been written to 2^64 times and is readable anyhow.
    let _ = rustix::io::write(descriptor, &1_u64.to_ne_bytes());
}

fn spawn(name: &str, run: impl FnOnce() + Send + 'static) -> io::Result<()> {
    let builder = std::thread::Builder::new().name(name.into());
    builder.stack_size(STACK_SIZE).spawn(run).map(drop)
}

#[cfg(test)]
mod tests;
