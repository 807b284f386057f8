//! Answers the program's calls, those of a user one after the other ([`Listener::serve`]), but for dials, each of which has a thread while it lasts.

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use rustix::net::sockopt::{socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, getsockname};
use sys::supervise::{self, Listener, PendingCall, SystemCall, Thread};

use super::address::{Address, CarriedName, MAX_ADDRESS_LEN, VsockAddress};
use super::dial::{self, DialError};
use super::route::Route;

/// So many dials go on at once. Further ones are made one after the other, and other calls of the user wait for them meanwhile.
const MAX_DIALS: usize = 256;

/// The stack of a dial's thread, in bytes: it asks the daemon over HTTP, without recursion.
const DIAL_STACK_LEN: usize = 512 << 10;

/// The bits of `socket`'s second argument that are the type; the others are flags.
const SOCKET_TYPE_MASK: u64 = 0xf;

/// The source of VMs' places.
pub trait Directory: Send + Sync {
    /// The host socket of the VM with this CID, or why there is none. It takes no longer than this.
    fn by_cid(&self, cid: u32, timeout: Duration) -> Result<PathBuf, DialError>;
    /// The same of the VM of this full name.
    fn by_name(&self, name: &str, timeout: Duration) -> Result<PathBuf, DialError>;
}

/// How a command is run.
pub struct Settings {
    /// The VMs.
    pub directory: Box<dyn Directory>,
    /// Paths of UNIX sockets that lead to VMs.
    pub routes: Vec<Route>,
    /// How long a call may take.
    pub timeout: Duration,
    /// Whether each dial is reported on standard error.
    pub verbose: bool,
}

/// Answers the calls of one command.
pub struct Supervisor {
    listener: Listener,
    settings: Settings,
    dials: AtomicUsize,
    /// Whether there may be a socket with a name of ours.
    has_carried: AtomicBool,
}

/// What a program wants to connect to, and what leads there.
#[derive(Debug, Clone)]
enum Destination {
    Vsock(VsockAddress),
    Route(Route),
}

impl Supervisor {
    pub fn new(listener: Listener, settings: Settings) -> Supervisor {
        Supervisor {
            listener,
            settings,
            dials: AtomicUsize::new(0),
            has_carried: AtomicBool::new(false),
        }
    }

    /// Answers calls for as long as a process of the command lives.
    pub fn run(self: Arc<Supervisor>) {
        let own = Arc::clone(&self);
        if let Err(error) = self.listener.serve(Arc::new(move |call| own.take(call))) {
            // Without its listener, the command's calls fail and do not hang.
            eprintln!("ringdown run: cannot watch the command any more: {error}");
        }
    }

    fn take(self: &Arc<Supervisor>, call: PendingCall) {
        match call.call {
            SystemCall::Socket => self.socket(&call),
            SystemCall::Connect => match self.destination(&call) {
                Ok(Some(destination)) => self.dial_apart(call, destination),
                Ok(None) => self.let_through(&call),
                Err(errno) => self.answer(&call, Err(errno)),
            },
            SystemCall::GetSockName | SystemCall::GetPeerName => match self.name(&call) {
                Ok(Some(())) => self.answer(&call, Ok(())),
                Ok(None) => self.let_through(&call),
                Err(errno) => self.answer(&call, Err(errno)),
            },
            // It is not watched.
            _ => self.let_through(&call),
        }
    }

    /// A call whose thread has ended needs no answer, and no other failure is possible.
    fn answer(&self, call: &PendingCall, result: Result<(), Errno>) {
        let _ = self.listener.answer(call, result.map(|()| 0));
    }

    fn let_through(&self, call: &PendingCall) {
        let _ = self.listener.let_through(call);
    }

    /// `socket(AF_VSOCK, …)`: an AF_UNIX socket in its place.
    fn socket(&self, call: &PendingCall) {
        let made = stand_in(&call.arguments).and_then(|(socket, close_on_exec)| {
            let given = self
                .listener
                .answer_with_descriptor(call, socket.as_fd(), close_on_exec);
            given.map_err(supervise::errno)
        });
        if let Err(errno) = made {
            self.answer(call, Err(errno));
        }
    }

    /// Where a connect is to go, if that is our business.
    fn destination(&self, call: &PendingCall) -> Result<Option<Destination>, Errno> {
        let thread = Thread(call.thread);
        let [_, pointer, len, ..] = call.arguments;
        let mut bytes = [0; MAX_ADDRESS_LEN];
        // The kernel finds fault with what is longer, or cannot be read.
        let Some(bytes) = bytes.get_mut(..len as u32 as usize) else {
            return Ok(None);
        };
        if self.listener.read(call, bytes, pointer).is_err() {
            return Ok(None);
        }
        Ok(match Address::parse(bytes) {
            Address::Vsock(address) => Some(Destination::Vsock(address)),
            Address::TooShort => return Err(Errno::INVAL),
            Address::Path(path) => self
                .route(thread, Path::new(std::ffi::OsStr::from_bytes(&path)))
                .map(Destination::Route),
            Address::Other => None,
        })
    }

    fn route(&self, thread: Thread, path: &Path) -> Option<Route> {
        let routes = &self.settings.routes;
        if routes.is_empty() {
            return None;
        }
        let path = match path.is_absolute() {
            true => path.to_owned(),
            false => thread.resolve(path),
        };
        routes.iter().find(|route| route.path == path).cloned()
    }

    fn dial_apart(self: &Arc<Supervisor>, call: PendingCall, destination: Destination) {
        if self.dials.fetch_add(1, Ordering::Relaxed) >= MAX_DIALS {
            self.dial(&call, &destination);
            return;
        }
        let supervisor = Arc::clone(self);
        let job = Arc::new((call, destination));
        let theirs = Arc::clone(&job);
        let started = std::thread::Builder::new()
            .name("dial".into())
            .stack_size(DIAL_STACK_LEN)
            .spawn(move || supervisor.dial(&theirs.0, &theirs.1));
        if started.is_err() {
            self.dial(&job.0, &job.1);
        }
    }

    fn dial(&self, call: &PendingCall, destination: &Destination) {
        let dialled = self.try_dial(call, destination);
        self.dials.fetch_sub(1, Ordering::Relaxed);
        match dialled {
            Ok(None) => self.let_through(call),
            Ok(Some(())) => {
                self.tell(destination, "connected");
                self.answer(call, Ok(()));
            }
            Err(error) => {
                self.tell(destination, &error);
                self.answer(call, Err(errno(destination, &error)));
            }
        }
    }

    /// None if the socket is none that we carry.
    fn try_dial(
        &self,
        call: &PendingCall,
        destination: &Destination,
    ) -> Result<Option<()>, DialError> {
        let thread = Thread(call.thread);
        // Descriptors are ints.
        let socket = thread.descriptor(call.arguments[0] as i32);
        let Ok(socket) = socket else {
            return Ok(None);
        };
        if !is_stream(&socket)? {
            return Ok(None);
        }
        let (user, own) = (thread.user(), rustix::process::geteuid().as_raw());
        // What was read until now was this program's, and not that of one with its number now.
        self.listener.still_pending(call)?;
        // The daemon sees this process call, and a program that has given up its user's rights is not to have them by that.
        if !user.as_ref().is_ok_and(|user| *user == own) {
            return Err(DialError::OtherUser { own });
        }
        let (directory, timeout) = (&self.settings.directory, self.settings.timeout);
        let deadline = Instant::now() + timeout;
        let (host_socket, port) = match destination {
            Destination::Vsock(VsockAddress { cid, port }) => {
                (directory.by_cid(*cid, timeout), *port)
            }
            Destination::Route(route) => (directory.by_name(&route.vm, timeout), route.port),
        };
        let host_socket = host_socket.map_err(|error| match Instant::now() < deadline {
            true => error,
            false => DialError::TimedOut,
        })?;
        match dial::dial(socket.as_fd(), &host_socket, port, deadline) {
            Ok(host_port) => self.christen(&socket, destination, host_port),
            // It was refused before, and the program tries again.
            Err(DialError::Connected) if dial::is_over(socket.as_fd()) => {
                let fresh = fresh(&socket)?;
                let host_port = dial::dial(fresh.as_fd(), &host_socket, port, deadline)?;
                self.christen(&fresh, destination, host_port);
                self.listener.replace(call, &socket, &fresh)?;
            }
            Err(error) => return Err(error),
        }
        Ok(Some(()))
    }

    /// Has the socket know its peer, if its program could ask.
    fn christen(&self, socket: &OwnedFd, destination: &Destination, host_port: u32) {
        let Destination::Vsock(peer) = *destination else {
            return;
        };
        let name = CarriedName { peer, host_port };
        let mut unique = [0; 8];
        let named = rustix::rand::getrandom(&mut unique[..], rustix::rand::GetRandomFlags::empty())
            .and_then(|_| name.to_address(u64::from_ne_bytes(unique)))
            .and_then(|address| rustix::net::bind(socket, &address));
        // Without a name it is an AF_UNIX socket to its program, and works as well.
        if named.is_ok() {
            self.has_carried.store(true, Ordering::Release);
        }
    }

    /// `getsockname` and `getpeername`: of a socket that we have connected, the addresses that the program knows. None if it is not one.
    fn name(&self, call: &PendingCall) -> Result<Option<()>, Errno> {
        if !self.has_carried.load(Ordering::Acquire) {
            return Ok(None);
        }
        let [descriptor, pointer, len_pointer, ..] = call.arguments;
        let Ok(socket) = Thread(call.thread).descriptor(descriptor as i32) else {
            return Ok(None);
        };
        let Some(name) = carried_name(&socket) else {
            return Ok(None);
        };
        let address = match call.call {
            SystemCall::GetPeerName => name.peer,
            _ => name.host(),
        };
        let bytes = address.to_bytes();
        self.listener
            .write_address(call, &bytes, pointer, len_pointer)?;
        Ok(Some(()))
    }

    fn tell(&self, destination: &Destination, what: impl std::fmt::Display) {
        if !self.settings.verbose {
            return;
        }
        match destination {
            Destination::Vsock(VsockAddress { cid, port }) => {
                eprintln!("ringdown run: CID {cid}, port {port}: {what}");
            }
            Destination::Route(Route { path, vm, port }) => {
                eprintln!("ringdown run: {} ({vm}:{port}): {what}", path.display());
            }
        }
    }
}

/// The socket that a program gets that asks for one of AF_VSOCK, and whether it is to be closed when another program is executed.
fn stand_in(arguments: &[u64; 6]) -> Result<(OwnedFd, bool), Errno> {
    let [_, kind, protocol, ..] = *arguments;
    let flags = SocketFlags::from_bits((kind & !SOCKET_TYPE_MASK) as u32).ok_or(Errno::INVAL)?;
    if !(SocketFlags::NONBLOCK | SocketFlags::CLOEXEC).contains(flags) {
        return Err(Errno::INVAL);
    }
    // AF_VSOCK takes its own number as a protocol.
    if ![0, AddressFamily::VSOCK.as_raw().into()].contains(&(protocol as u32)) {
        return Err(Errno::PROTONOSUPPORT);
    }
    if (kind & SOCKET_TYPE_MASK) as u32 != SocketType::STREAM.as_raw() {
        return Err(Errno::SOCKTNOSUPPORT);
    }
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        flags | SocketFlags::CLOEXEC,
        None,
    )?;
    Ok((socket, flags.contains(SocketFlags::CLOEXEC)))
}

/// Another socket like this one, not connected.
fn fresh(socket: &OwnedFd) -> Result<OwnedFd, Errno> {
    let mut flags = SocketFlags::CLOEXEC;
    flags.set(
        SocketFlags::NONBLOCK,
        fcntl_getfl(socket)?.contains(OFlags::NONBLOCK),
    );
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)
}

/// Whether this is a stream socket of AF_UNIX. What is none at all is the kernel's to complain about.
fn is_stream(socket: &OwnedFd) -> Result<bool, Errno> {
    match (socket_domain(socket), socket_type(socket)) {
        (Ok(domain), Ok(kind)) => Ok(domain == AddressFamily::UNIX && kind == SocketType::STREAM),
        (Err(Errno::NOTSOCK), _) => Ok(false),
        (Err(errno), _) | (_, Err(errno)) => Err(errno),
    }
}

fn carried_name(socket: &OwnedFd) -> Option<CarriedName> {
    let address = SocketAddrUnix::try_from(getsockname(socket).ok()?).ok()?;
    CarriedName::of(&address)
}

/// The error that a program expects of a socket of that family.
fn errno(destination: &Destination, error: &DialError) -> Errno {
    match (destination, error) {
        (Destination::Vsock(_), DialError::Unreachable(_)) => Errno::NODEV,
        (Destination::Vsock(_), DialError::Refused(_)) => Errno::CONNRESET,
        (Destination::Route(_), DialError::Unreachable(_)) => Errno::NOENT,
        (Destination::Route(_), DialError::Refused(_)) => Errno::CONNREFUSED,
        (_, DialError::Denied(_) | DialError::OtherUser { .. }) => Errno::ACCESS,
        (_, DialError::TimedOut) => Errno::TIMEDOUT,
        (_, DialError::Connected) => Errno::ISCONN,
        (_, DialError::System(errno)) => *errno,
    }
}
