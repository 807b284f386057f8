//! The control protocol of one device: vhost-user, spoken with the VMM on a thread of its own.
//!
//! The thread blocks where the protocol blocks, so that a VMM that stops in the middle of a message holds up none but
//! itself. It keeps what the VMM has said so far, and hands rings to the fabric's thread when they are complete; each
//! change is answered by the fabric before the VMM is.

mod another;
mod early;
mod event;
mod request;
mod session;

use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use keeper::Keeper;
use rustix::event::{EventfdFlags, PollFd, PollFlags, eventfd, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use sys::socket_file::SocketFile;
use vhost::vhost_user::{
    BackendReqHandler, Error as ProtocolError, Result as ProtocolResult,
    VhostUserBackendReqHandlerMut,
};

use crate::fault::{NOT_SHARED, NOT_VHOST_USER, fault_of};
use crate::socket::{Listener, listen_for_vmm};

use another::Another;
use request::Caller;
pub(crate) use request::{
    Answer, Identity, MESSAGES_PER_TURN, Mailbox, Message, Model, Request, RingPositions, RingStart,
};
pub(crate) use session::FEATURE_RING_PACKED;
pub(crate) use session::KEPT_VERSION;
use session::{Before, FEATURE_PROTOCOL, Keep, Session};
pub use session::{NewerKept, check_kept, is_kept, remove_kept_sockets};

/// How long no VMM is accepted after the system would not accept one, as it has no descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The thread of one line. Dropping this closes the line's socket and the VMM's connection, and does not wait for the end of the thread: it may be
/// closing a file of the VMM's, which takes as long as the server of that file likes.
#[derive(Debug)]
pub(crate) struct Frontend {
    stop: Arc<OwnedFd>,
    connection: Arc<Connection>,
    another_waits: Arc<AtomicBool>,
    /// The thread alone has the socket: its last descriptor closes what VMMs sent that were never accepted.
    file: Option<SocketFile>,
    keep: Option<Keep>,
    features_of_before: Option<u64>,
}

/// A socket at which a VMM is to connect. It is made before its line or port is opened, by the thread that asks for that: see [`crate::aside`].
#[derive(Debug)]
pub(crate) struct VmmListener {
    listener: Option<Listener>,
    keep: Option<Keep>,
    vm: String,
    network: Option<String>,
    /// A predecessor has left it.
    is_left: bool,
}

impl VmmListener {
    /// Listens at this path, for a VM and its network.
    ///
    /// # Errors
    /// When the socket cannot be had. Nothing is left behind then.
    pub(crate) fn bind(
        path: &Path,
        (vm, network): (&str, Option<&str>),
        keeper: Option<Arc<Keeper>>,
    ) -> io::Result<VmmListener> {
        let keep = keeper.map(|keeper| Keep::new(keeper, path));
        let (listener, is_left) = match &keep {
            Some(keep) => keep.listen(vm, network)?,
            None => (listen_for_vmm(path)?, false),
        };
        Ok(VmmListener {
            listener: Some(listener),
            keep,
            vm: vm.to_owned(),
            network: network.map(str::to_owned),
            is_left,
        })
    }
}

impl VmmListener {
    /// Closes it, as it was not needed. Returns the file to be removed.
    pub(crate) fn let_go(&mut self) -> Option<SocketFile> {
        let mut listener = self.listener.take()?;
        match &self.keep {
            Some(keep) if self.is_left && keep.is_for_another() => {
                listener.file.stay();
                keep.put_back(listener, &self.vm, self.network.as_deref());
                return None;
            }
            Some(keep) => keep.close(),
            None => {}
        }
        Some(listener.file)
    }
}

impl Drop for VmmListener {
    fn drop(&mut self) {
        drop(self.let_go());
    }
}

/// Another descriptor of the VMM's socket, by which the VMM is hung up on.
type Connection = Mutex<Option<UnixStream>>;

impl Frontend {
    /// Waits for a VMM at this socket. `positions` are those of its rings, if a predecessor wrote them down.
    ///
    /// # Errors
    /// When a thread cannot be had. Nothing is left behind then.
    pub(crate) fn start(
        mut socket: VmmListener,
        identity: Identity,
        model: Model,
        mailbox: Mailbox,
        positions: Option<RingPositions>,
    ) -> io::Result<Frontend> {
        let keep = socket.keep.clone();
        // Now, as what is not taken when the daemon has started is let go.
        let before = keep
            .as_ref()
            .and_then(|keep| keep.take(&identity, &model, positions));
        let features_of_before = before.as_ref().map(Before::features);
        let stop = Arc::new(eventfd(0, EventfdFlags::CLOEXEC)?);
        let connection = Arc::new(Mutex::new(None));
        let taken = socket.listener.take();
        let Listener { socket, file } = taken.ok_or_else(|| io::Error::other("no listener"))?;
        let another_waits = Arc::new(AtomicBool::new(false));
        let (thread_stop, thread_connection) = (Arc::clone(&stop), Arc::clone(&connection));
        let is_another = Arc::clone(&another_waits);
        let name = format!("vhost-{}", identity.vm);
        let caller = Caller { identity, mailbox };
        let kept = keep.clone();
        std::thread::Builder::new()
            .name(name)
            .stack_size(256 * 1024)
            .spawn(move || {
                let another = Another::new(&socket, &thread_stop, &is_another);
                serve(
                    another,
                    &socket,
                    &thread_stop,
                    &thread_connection,
                    &caller,
                    &model,
                    (kept.as_ref(), before),
                );
            })?;
        Ok(Frontend {
            stop,
            connection,
            another_waits,
            file: Some(file),
            keep,
            features_of_before,
        })
    }

    /// The features of the device, if a predecessor left a VMM, which this one goes on with.
    pub(crate) fn features_of_before(&self) -> Option<u64> {
        self.features_of_before
    }

    /// The file of its socket, which is removed with this otherwise, unless it is for another daemon.
    pub(crate) fn take_file(&mut self) -> Option<SocketFile> {
        let is_for_another = self.keep.as_ref().is_some_and(Keep::is_for_another);
        (!is_for_another).then(|| self.file.take()).flatten()
    }

    /// Whether a second VMM waits for the first to leave.
    pub(crate) fn another_waits(&self) -> bool {
        self.another_waits.load(Ordering::Relaxed)
    }
}

impl Drop for Frontend {
    fn drop(&mut self) {
        let _ = rustix::io::write(&*self.stop, &1u64.to_ne_bytes());
        if let Some(keep) = self.keep.as_ref().filter(|keep| keep.is_for_another()) {
            keep.give_back();
            if let Some(file) = &mut self.file {
                file.stay();
            }
            return;
        }
        if let Some(keep) = &self.keep {
            keep.close();
        }
        let connection = self.connection.lock();
        if let Some(stream) = &*connection.unwrap_or_else(PoisonError::into_inner) {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// Puts this in place of what was there, and returns that. It has to be dropped by a thread of the VMM's, and not under the lock, which the worker takes:
/// to close a VMM's socket is to close all files that it sent and that were not received.
fn replace(connection: &Connection, stream: Option<UnixStream>) -> Option<UnixStream> {
    let mut connection = sys::lock(connection);
    std::mem::replace(&mut *connection, stream)
}

fn serve(
    mut another: Another<'_>,
    listener: &OwnedFd,
    stop: &OwnedFd,
    connection: &Connection,
    caller: &Caller,
    model: &Model,
    (keep, mut before): (Option<&Keep>, Option<Before>),
) {
    let (vm, network) = (&caller.identity.vm, caller.identity.network.as_deref());
    loop {
        let before = before.take();
        let kept = before.as_ref().map(|before| before.stream.try_clone());
        let next = match (kept, another.take()) {
            (Some(stream), _) => with_copy(stream),
            (None, Some(waited)) => Ok(Some(waited)),
            (None, None) => match wait_for_vmm(listener, stop) {
                Ok(true) => accept(listener),
                Ok(false) => return,
                Err(error) => {
                    tracing::error!(vm, %error, "cannot wait for a VMM any more");
                    return;
                }
            },
        };
        let (stream, copy) = match next {
            Ok(Some(accepted)) => accepted,
            Ok(None) => continue,
            Err(error) => {
                tracing::warn!(vm, %error, "cannot accept a VMM");
                stop_requested(stop, ACCEPT_PAUSE);
                continue;
            }
        };
        drop(replace(connection, Some(copy)));
        match before {
            None => tracing::info!(vm, network, "VMM connected"),
            Some(_) => tracing::info!(vm, network, "went on with the VMM of the daemon before"),
        }
        // The stop may have been asked for between the poll and now; then the loop below ends at once.
        let fault = match stop_requested(stop, Duration::ZERO) {
            true => None,
            false => converse(stream, &mut another, caller, model, (keep, before)),
        };
        let copy = replace(connection, None);
        let is_left = match (keep, &copy) {
            (Some(keep), Some(stream)) => !let_go(keep, stream, stop),
            _ => false,
        };
        drop(copy);
        let words = fault.clone();
        let _ = caller.call(Request::Detach { fault });
        // Said when nothing of it is left.
        match words {
            None if is_left => tracing::info!(vm, network, "left the VMM to the next daemon"),
            None => tracing::info!(vm, network, "VMM disconnected"),
            Some(error) => {
                tracing::warn!(vm, network, %error, "the VMM's connection ended with an error")
            }
        }
    }
}

/// Has the keeper let go of a VMM, unless the thread ends because the daemon ends, or cannot start: then the VMM is the next one's. Returns whether
/// it has let go.
fn let_go(keep: &Keep, stream: &UnixStream, stop: &OwnedFd) -> bool {
    if keep.is_for_another() && stop_requested(stop, Duration::ZERO) {
        return false;
    }
    // Files that were sent and not received are closed with the last descriptor of the connection, which may be the keeper's. Here that may take as long as the
    // VMM likes, and none of its connections is accepted meanwhile.
    let _ = stream.shutdown(std::net::Shutdown::Both);
    let mut bytes = [0; 4096];
    // Without room for descriptors, the kernel closes them.
    while let Ok((1.., _)) | Err(Errno::INTR) = recv(stream, &mut bytes, RecvFlags::DONTWAIT) {}
    keep.hang_up();
    true
}

/// Whether a VMM has connected, and not the thread's end been asked for.
fn wait_for_vmm(listener: &OwnedFd, stop: &OwnedFd) -> Result<bool, Errno> {
    let mut wanted = [
        PollFd::new(listener, PollFlags::IN),
        PollFd::new(stop, PollFlags::IN),
    ];
    match poll(&mut wanted, None) {
        Ok(_) => Ok(wanted[1].revents().is_empty()),
        Err(Errno::INTR) => Ok(true),
        Err(error) => Err(error),
    }
}

/// The connection of a VMM that waits, and another descriptor of it; none if it has left.
fn accept(listener: &OwnedFd) -> io::Result<Option<(UnixStream, UnixStream)>> {
    match rustix::net::accept_with(listener, rustix::net::SocketFlags::CLOEXEC) {
        Ok(socket) => with_copy(Ok(UnixStream::from(socket))),
        Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// A connection, and another descriptor of it.
fn with_copy(stream: io::Result<UnixStream>) -> io::Result<Option<(UnixStream, UnixStream)>> {
    let stream = stream?;
    let copy = stream.try_clone()?;
    Ok(Some((stream, copy)))
}

/// Whether the thread is to end: by now, or within `patience`.
fn stop_requested(stop: &OwnedFd, patience: Duration) -> bool {
    let mut wanted = [PollFd::new(stop, PollFlags::IN)];
    let patience = rustix::event::Timespec {
        tv_sec: patience.as_secs() as i64,
        tv_nsec: patience.subsec_nanos().into(),
    };
    matches!(poll(&mut wanted, Some(&patience)), Ok(ready) if ready > 0)
}

/// Speaks with one VMM until it goes away or breaks the protocol. Returns what was wrong.
fn converse(
    stream: UnixStream,
    another: &mut Another<'_>,
    caller: &Caller,
    model: &Model,
    (keep, before): (Option<&Keep>, Option<Before>),
) -> Option<String> {
    let mut has_spoken = before.is_some();
    let early = stream.try_clone().map_err(ProtocolError::SocketError);
    let begun = early.and_then(|early| Ok((early, begin(stream, caller, model, keep, before)?)));
    let (early, (session, mut handler)) = match begun {
        Ok(begun) => begun,
        Err(error) => return fault_of(&error),
    };
    loop {
        if !another.wait_beside(&early, &caller.identity.vm) {
            return None;
        }
        locked(&session).set_answering(true);
        let handled = enabled_early(&early, &session).and_then(|is_done| match is_done {
            true => Ok(()),
            false => handler.handle_request(),
        });
        let mut session = locked(&session);
        match handled {
            Ok(()) if has_spoken => (),
            Ok(()) => match caller.call(Request::Speak) {
                Ok(_) => has_spoken = true,
                Err(error) => return fault_of(&error),
            },
            Err(ProtocolError::InvalidMessage | ProtocolError::PartialMessage) if !has_spoken => {
                return Some(NOT_VHOST_USER.to_owned());
            }
            Err(error) => return fault_of(&error).or_else(|| session.missed()),
        }
        session.keep();
        session.set_answering(false);
    }
}

/// What was said on a connection, and the peer there.
type Begun = (Arc<Mutex<Session>>, BackendReqHandler<Mutex<Session>>);

/// Begins to answer a VMM, or goes on with what a predecessor heard from it.
fn begin(
    stream: UnixStream,
    caller: &Caller,
    model: &Model,
    keep: Option<&Keep>,
    before: Option<Before>,
) -> ProtocolResult<Begun> {
    let is_unseen = before.as_ref().is_some_and(Before::is_unseen);
    let (kept, said) = match before {
        Some(before) => (Some(before.open), Some(before.said)),
        None => (
            keep.map(|keep| keep.open(&stream, model))
                .transpose()
                .map_err(ProtocolError::SocketError)?,
            None,
        ),
    };
    let mut session = Session::new(caller.clone(), model.clone(), kept);
    caller.call(Request::Attach)?;
    let Some(said) = said else {
        let session = Arc::new(Mutex::new(session));
        let handler = BackendReqHandler::from_stream(stream, Arc::clone(&session));
        return Ok((session, handler));
    };
    caller.call(Request::Speak)?;
    if is_unseen {
        let fault = NOT_SHARED;
        tracing::warn!(vm = caller.identity.vm, "{fault}");
        caller.call(Request::Suspect { fault })?;
    }
    let features = said.features();
    session.resume(said)?;
    // The handler has a state of its own, which only messages change: it gets the features again, on a connection whose place the VMM's then takes.
    let session = Arc::new(Mutex::new(session));
    let (mut vmm, ours) = UnixStream::pair().map_err(ProtocolError::SocketError)?;
    let mut handler = BackendReqHandler::from_stream(ours, Arc::clone(&session));
    for message in early::features_again(features) {
        vmm.write_all(&message)
            .map_err(ProtocolError::SocketError)?;
        handler.handle_request()?;
    }
    let replaced = sys::descriptors::replace(&handler, &stream);
    replaced.map_err(|error| ProtocolError::SocketError(error.into()))?;
    Ok((session, handler))
}

fn locked(session: &Mutex<Session>) -> MutexGuard<'_, Session> {
    sys::lock(session)
}

/// Does what the next message asks, if it enables a ring before there are features; see [`early`].
fn enabled_early(stream: &UnixStream, session: &Mutex<Session>) -> ProtocolResult<bool> {
    let mut session = locked(session);
    if session.features & FEATURE_PROTOCOL != 0 {
        return Ok(false);
    }
    let Some(enable) = early::take(stream)? else {
        return Ok(false);
    };
    let done = session.set_vring_enable(enable.ring, enable.enabled);
    enable.answer(stream, done)?;
    Ok(true)
}
