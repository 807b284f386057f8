//! Published ports: a client of an address of the host is connected to a port of a guest.
//!
//! A connection is accepted here and then handed to the data plane, which calls the guest and carries the bytes itself. Where
//! the guest is to learn first who calls, a header has to go before them, and the bytes are carried here. Datagrams are always
//! carried here: see [`udp`]. So is what the guest's agent is to connect to: see [`agent`].

mod agent;
mod caller;
mod listen;
pub mod udp;

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, TcpListener, UdpSocket};
use std::ops::Deref;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use config::{GuestPort, Publish, PublishListen};
use device::{CallAnswer, Cut, PublishedCall, PublishedTo, SocketFile, remove_file};
use rustix::io::Errno;
use rustix::net::sockopt::set_socket_linger;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpStream, UnixStream};
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, watch};
use tokio::task::AbortHandle;
use wire::vsock::SocketType;

use self::caller::Caller;
use self::listen::{listen, set_mode};
use super::counter::{Capacity, NoRoom};
use super::exchange::{DialPlace, MAX_DIALS_OF_PORT};
use super::identity::{Transport, published_header};
use super::relay::{CircuitEnd, Socket, relay};
use super::rules::Share;
use super::shared::{Expected, Shared, count};
use super::tcp;

pub use self::listen::{PublishError, check_address};

/// Connections that one published port carries at once because a header goes before them. Others are the data plane's to count.
pub const MAX_CARRIED: u32 = 1024;

/// The part of them that one caller may have: one in so many.
pub const CALLER_SHARE: u32 = 2;

/// The most that wait to be accepted: the system lets one more wait than it is asked for, and fewer at a TCP port.
const MAX_WAITING: usize = device::BACKLOG as usize + 1;

/// How long a listener rests when the system has no descriptor for the next connection.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// The ports that are published.
pub(crate) struct Published {
    shared: Arc<Shared>,
    runtime: Handle,
    open: Mutex<Vec<Open>>,
}

/// A port as it is published at some time.
pub(crate) struct Standing {
    publish: Publish,
    /// Whether it is still published like this. It is changed by the thread that judges calls to guests, between two of them.
    is_published: Arc<AtomicBool>,
    /// Whether those waiting when it came into force may wait still, as there was no descriptor to accept them with.
    turns_away_first: AtomicBool,
    /// Places for its calls that wait for the data plane.
    dials: Arc<Semaphore>,
}

impl Standing {
    fn new(publish: Publish, turns_away_first: bool) -> Arc<Standing> {
        Arc::new(Standing {
            publish,
            is_published: Arc::new(AtomicBool::new(true)),
            turns_away_first: AtomicBool::new(turns_away_first),
            dials: Arc::new(Semaphore::new(MAX_DIALS_OF_PORT)),
        })
    }
}

impl Deref for Standing {
    type Target = Publish;

    fn deref(&self) -> &Publish {
        &self.publish
    }
}

/// A port that is published.
struct Open {
    publish: watch::Sender<Arc<Standing>>,
    task: AbortHandle,
    listener: Arc<Listener>,
    /// Removed at once when the port is closed: by the time that the task ends, the path may be another socket's.
    file: Option<SocketFile>,
}

impl Drop for Open {
    /// The task owns the listener, which closes with it.
    fn drop(&mut self) {
        let published = &self.publish.borrow().is_published;
        published.store(false, Ordering::Release);
        self.task.abort();
        if let Some(file) = self.file.take() {
            remove_file(file);
        }
    }
}

/// Ports that can be published: those that are not yet open listen, and do not accept. Dropping it closes them.
pub struct PreparedPublishes(Vec<(Publish, Option<Bound>)>, Expected);

/// A listener, a second descriptor of it, and the file of its socket if it has one.
type Bound = (Listener, Listener, Option<SocketFile>);

/// It does not block.
enum Listener {
    Tcp(TcpListener),
    Udp(UdpSocket),
    Unix(UnixListener),
}

impl Listener {
    fn try_clone(&self) -> io::Result<Listener> {
        Ok(match self {
            Listener::Tcp(listener) => Listener::Tcp(listener.try_clone()?),
            Listener::Udp(socket) => Listener::Udp(socket.try_clone()?),
            Listener::Unix(listener) => Listener::Unix(listener.try_clone()?),
        })
    }

    /// Hangs up on clients not yet accepted.
    ///
    /// # Errors
    /// Some may wait still, as there is no descriptor to accept them with.
    fn turn_away_waiting(&self) -> io::Result<()> {
        turn_away(|| match self {
            Listener::Tcp(listener) => {
                let (caller, _) = listener.accept()?;
                // It is cut off, whether it has sent anything or not.
                Ok(set_socket_linger(&caller, Some(Duration::ZERO))?)
            }
            Listener::Unix(listener) => listener.accept().map(drop),
            // They were for the guest that was named then.
            Listener::Udp(socket) => socket.recv_from(&mut [0]).map(drop),
        })
    }
}

/// Accepts with this as many as can have waited before the first. One that cannot be accepted any more is one of them.
fn turn_away(mut accept: impl FnMut() -> io::Result<()>) -> io::Result<()> {
    for _ in 0..MAX_WAITING {
        let Err(error) = accept() else {
            continue;
        };
        match Errno::from_io_error(&error) {
            Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => return Err(error),
            _ if error.kind() == io::ErrorKind::WouldBlock => break,
            _ => {}
        }
    }
    Ok(())
}

impl Published {
    pub(crate) fn new(shared: Arc<Shared>, runtime: Handle) -> Published {
        Published {
            shared,
            runtime,
            open: Mutex::default(),
        }
    }

    /// Makes the missing listeners.
    pub(crate) fn prepare(
        &self,
        publishes: Vec<Publish>,
    ) -> Result<PreparedPublishes, PublishError> {
        // Not while they are listened for: the directory of a socket may hold that up.
        let open: Vec<PublishListen> = {
            let open = sys::lock(&self.open);
            let listens = open.iter().map(|open| open.publish.borrow().listen.clone());
            listens.collect()
        };
        // Before they listen: a guest that connects then waits to be accepted, and is taken for a caller from outside when the port is published.
        let expected = self.shared.expect(&publishes);
        let prepared = publishes.into_iter().map(|publish| {
            let is_open = open.iter().any(|open| is_same_place(open, &publish.listen));
            let listener = match is_open {
                true => None,
                false => Some(listen(&publish)?),
            };
            Ok((publish, listener))
        });
        let prepared = prepared.collect::<Result<_, _>>()?;
        Ok(PreparedPublishes(prepared, expected))
    }

    /// Publishes these ports and no others. One that was published at the same place goes on listening, and its connections go on.
    pub(crate) fn set(&self, prepared: PreparedPublishes) {
        let PreparedPublishes(prepared, expected) = prepared;
        let mut open = sys::lock(&self.open);
        let mut old = std::mem::take(&mut *open);
        for (publish, listener) in prepared {
            let at = old
                .iter()
                .position(|open| is_same_place(&open.publish.borrow().listen, &publish.listen));
            match (at, listener) {
                (Some(at), _) => {
                    let kept = old.swap_remove(at);
                    // Not otherwise: its directory may hold up lookups, and this is the thread of all calls.
                    let has_other_mode = kept.publish.borrow().listen != publish.listen;
                    if let (true, PublishListen::Unix { path, mode }, Some(file)) =
                        (has_other_mode, &publish.listen, &kept.file)
                    {
                        set_mode(file, path, *mode);
                    }
                    let is_changed = kept.publish.borrow().publish != publish;
                    if is_changed {
                        // They may have come by a mode that lets them in no longer, and called another.
                        let turns_away_first = kept.listener.turn_away_waiting().is_err();
                        let next = Standing::new(publish, turns_away_first);
                        let before = kept.publish.send_replace(next);
                        before.is_published.store(false, Ordering::Release);
                    }
                    open.push(kept);
                }
                (None, Some(bound)) => open.push(self.open(publish, bound)),
                // It was open when this was prepared, and has been closed since: the caller prepares and sets without others in between.
                (None, None) => {
                    tracing::error!(
                        name = publish.name,
                        "a published port was closed while it was to be kept"
                    );
                }
            }
        }
        drop(old);
        expected.put_in_force();
    }

    /// Closes them all.
    pub(crate) fn close(&self) {
        sys::lock(&self.open).clear();
    }

    fn open(&self, publish: Publish, (listener, kept, file): Bound) -> Open {
        let name = publish.name.clone();
        tracing::info!(
            name,
            listen = %publish.listen,
            vm = publish.to.full_name(),
            port_in_guest = %publish.to.port,
            "published a port"
        );
        let sender = watch::Sender::new(Standing::new(publish, false));
        let kept = Arc::new(kept);
        let port = Port {
            shared: self.shared.clone(),
            publish: sender.subscribe(),
            listener: kept.clone(),
            carried: Capacity::default(),
        };
        let task = self.runtime.spawn(async move {
            let result = match listener {
                Listener::Tcp(listener) => port.serve_tcp(listener).await,
                Listener::Unix(listener) => port.serve_unix(listener).await,
                Listener::Udp(socket) => udp::serve(port.shared, socket, port.publish).await,
            };
            if let Err(error) = result {
                tracing::error!(name, %error, "a published port has failed");
            }
        });
        Open {
            publish: sender,
            task: task.abort_handle(),
            listener: kept,
            file,
        }
    }
}

fn is_same_place(one: &PublishListen, other: &PublishListen) -> bool {
    match (one, other) {
        (PublishListen::Unix { path: one, .. }, PublishListen::Unix { path: other, .. }) => {
            one == other
        }
        (one, other) => one == other,
    }
}

/// What a task needs that accepts for a published port.
struct Port {
    shared: Arc<Shared>,
    publish: watch::Receiver<Arc<Standing>>,
    /// As [`Open`] has it.
    listener: Arc<Listener>,
    carried: Capacity,
}

impl Port {
    /// Leaves callers in the backlog for a while, so that a machine without descriptors is not asked in a loop.
    async fn rest(&self, error: io::Error) {
        // A caller that has hung up before it was accepted is no reason to rest.
        if error.kind() != io::ErrorKind::ConnectionAborted {
            let name = self.publish.borrow().name.clone();
            tracing::warn!(name, %error, "cannot accept at a published port");
            tokio::time::sleep(ACCEPT_REST).await;
        }
    }

    /// What the next caller comes in by: how the port is published by the time that the caller has come, or before.
    async fn accepted<T>(
        &self,
        publish: &mut watch::Receiver<Arc<Standing>>,
        poll_accept: impl Fn(&mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Option<(T, Arc<Standing>)> {
        loop {
            let standing = publish.borrow_and_update().clone();
            if standing.turns_away_first.load(Ordering::Acquire) {
                match self.listener.turn_away_waiting() {
                    Ok(()) => standing.turns_away_first.store(false, Ordering::Release),
                    Err(error) => self.rest(error).await,
                }
                continue;
            }
            tokio::select! {
                biased;
                // Callers that are accepted from now on get what is published then.
                changed = publish.changed() => changed.ok()?,
                accepted = poll_fn(&poll_accept) => match accepted {
                    Ok(caller) => return Some((caller, standing)),
                    Err(error) => self.rest(error).await,
                },
            }
        }
    }

    async fn serve_tcp(&self, listener: TcpListener) -> io::Result<()> {
        let listener = tokio::net::TcpListener::from_std(listener)?;
        let mut publish = self.publish.clone();
        let accept = |context: &mut Context<'_>| listener.poll_accept(context);
        while let Some(((stream, peer), standing)) = self.accepted(&mut publish, accept).await {
            // A connection that is gone already is found out when it is used.
            let _ = tcp::set_options(&stream);
            let ends = stream.local_addr().ok().map(|local| (peer, local));
            // It may have to wait, and the port may be closed meanwhile.
            stream.begin();
            self.take_tcp(standing, stream, ends).await;
        }
        Ok(())
    }

    async fn take_tcp(
        &self,
        publish: Arc<Standing>,
        stream: TcpStream,
        ends: Option<(SocketAddr, SocketAddr)>,
    ) {
        let caller = Caller::at(ends.map(|(peer, _)| peer));
        if let Some(port) = direct(&publish) {
            if let Ok(stream) = stream.into_std() {
                self.dial(&publish, port, caller, stream.into()).await;
            }
            return;
        }
        let header = match publish.proxy_protocol {
            true => published_header(&publish.name, ends, None, Transport::Stream),
            false => Vec::new(),
        };
        let before = Before { header, caller };
        self.carry(publish, stream, before);
    }

    async fn serve_unix(&self, listener: UnixListener) -> io::Result<()> {
        let listener = tokio::net::UnixListener::from_std(listener)?;
        let mut publish = self.publish.clone();
        let accept = |context: &mut Context<'_>| listener.poll_accept(context);
        while let Some(((stream, _), standing)) = self.accepted(&mut publish, accept).await {
            self.take_unix(standing, stream).await;
        }
        Ok(())
    }

    async fn take_unix(&self, publish: Arc<Standing>, stream: UnixStream) {
        let user = stream.peer_cred().ok().map(|peer| peer.uid());
        let caller = Caller::of_user(user);
        if let Some(port) = direct(&publish) {
            if let Ok(stream) = stream.into_std() {
                self.dial(&publish, port, caller, stream.into()).await;
            }
            return;
        }
        let header = match publish.proxy_protocol {
            true => published_header(&publish.name, None, user, Transport::Stream),
            false => Vec::new(),
        };
        let before = Before { header, caller };
        self.carry(publish, stream, before);
    }

    /// Has the data plane carry it. Until it has a place, the next callers stay in the backlog.
    async fn dial(&self, publish: &Arc<Standing>, port: u32, caller: Caller, socket: OwnedFd) {
        let outgoing = Outgoing::to_port(publish, port, caller, socket, None);
        dial_guest(&self.shared, publish, outgoing).await;
    }

    /// Carries it here.
    fn carry<S: Socket + Send + 'static>(
        &self,
        publish: Arc<Standing>,
        mut client: S,
        before: Before,
    ) where
        for<'a> S::Reader<'a>: Send,
        for<'a> S::Writer<'a>: Send,
    {
        client.begin();
        let caller = &before.caller.holder();
        let (limit, room) = match publish.to.port {
            GuestPort::Vsock(_) => {
                let share = MAX_CARRIED / CALLER_SHARE;
                (MAX_CARRIED, self.carried.take(caller, MAX_CARRIED, share))
            }
            GuestPort::Agent(_) => {
                let (vm, limit) = (publish.to.full_name(), agent::MAX_CARRIED);
                let agents = &self.shared.agents;
                (limit, agents.take(&vm, caller, limit, limit / CALLER_SHARE))
            }
        };
        let permit = match room {
            Ok(permit) => permit,
            Err(none) => return log_no_room(&publish, none, limit, caller),
        };
        let shared = self.shared.clone();
        tokio::spawn(async move {
            match publish.to.port.clone() {
                GuestPort::Vsock(port) => {
                    carry_to_port(&shared, &publish, port, &mut client, &before).await;
                }
                GuestPort::Agent(place) => {
                    agent::carry(&shared, &publish, &place, &mut client, before).await;
                }
            }
            drop(permit);
        });
    }
}

/// What is known of a caller before anything of it is carried.
struct Before {
    /// What the guest gets first.
    header: Vec<u8>,
    caller: Caller,
}

/// The vsock port, where the data plane can carry the bytes itself.
fn direct(publish: &Publish) -> Option<u32> {
    match publish.to.port {
        GuestPort::Vsock(port) if !publish.proxy_protocol => Some(port),
        GuestPort::Vsock(_) | GuestPort::Agent(_) => None,
    }
}

async fn carry_to_port(
    shared: &Shared,
    publish: &Arc<Standing>,
    port: u32,
    client: &mut impl Socket,
    before: &Before,
) {
    let Ok((mut guest, theirs, cut)) = CircuitEnd::pair() else {
        return;
    };
    if guest.stream.write_all(&before.header).await.is_ok() {
        let outgoing = Outgoing::to_port(publish, port, before.caller, theirs, Some(cut));
        dial_guest(shared, publish, outgoing).await;
        relay(client, &mut guest, &Share::default()).await;
    }
}

/// Writes down why a caller of a published port is not connected.
fn log_refusal(publish: &Publish, error: &dyn fmt::Display) {
    let (vm, to) = (publish.to.full_name(), &publish.to.port);
    tracing::warn!(name = publish.name, vm, %to, %error, "refused a caller of a published port");
}

/// Writes down that a caller is turned away, as there is no room for its connection.
fn log_no_room(publish: &Publish, none: NoRoom, limit: u32, caller: &str) {
    let name = &publish.name;
    match none {
        NoRoom::Full => tracing::warn!(
            name,
            limit,
            "a published port carries as many connections as it may"
        ),
        NoRoom::Share => tracing::warn!(
            name,
            limit = limit / CALLER_SHARE,
            caller,
            "a published port carries as many connections of one caller as it may"
        ),
    }
}

/// A call of a guest for a caller; see [`PublishedCall`].
struct Outgoing {
    to: PublishedTo,
    caller: Caller,
    answer: CallAnswer,
    socket: OwnedFd,
    socket_type: SocketType,
    cut: Option<Cut>,
    /// The bytes are carried here, and not by the caller itself.
    is_carried: bool,
}

impl Outgoing {
    /// A stream to a port, of which it is written down why it is refused.
    fn to_port(
        publish: &Arc<Standing>,
        port: u32,
        caller: Caller,
        socket: OwnedFd,
        cut: Option<Cut>,
    ) -> Outgoing {
        let publish = Arc::clone(publish);
        let answer = CallAnswer::new(move |result| {
            if let Err(reason) = result {
                log_refusal(&publish, &reason);
            }
        });
        Outgoing {
            to: PublishedTo::Port(port),
            caller,
            answer,
            socket,
            socket_type: SocketType::Stream,
            is_carried: cut.is_some(),
            cut,
        }
    }
}

/// Calls the guest of a published port, once there is a place.
async fn dial_guest(shared: &Shared, publish: &Standing, outgoing: Outgoing) {
    // Before there is a data plane the socket is closed, as when the guest refuses.
    if let Some(exchange) = shared.exchange.get() {
        let place = DialPlace::take(&publish.dials, &shared.dials).await;
        count(&shared.counts.published);
        let call = PublishedCall {
            name: publish.name.as_str().into(),
            peer: outgoing.caller.peer(),
            outsider: outgoing.caller.outsider(),
            vm: publish.to.full_name(),
            to: outgoing.to,
            answer: outgoing.answer,
            socket: outgoing.socket,
            socket_type: outgoing.socket_type,
            cut: outgoing.cut,
            peer_is_ours: outgoing.is_carried,
            is_published: publish.is_published.clone(),
        };
        exchange.dial_guest(call, place);
    }
}

#[cfg(test)]
mod tests;
