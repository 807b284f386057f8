//! Answers the program's calls, those of a user one after the other ([`Listener::serve`]); what may take long has a thread while it lasts.
//!
//! A program can have each look into it, and each question to its sockets, take for ever. So none is made while a lock is held that other users' calls need.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use sys::supervise::{Listener, PendingCall, SystemCall, Thread, errno};

use super::address::{Family, Given, MAX_ADDRESS_LEN};
use super::datagrams::Datagrams;
use super::names::Names;
use super::resolver::Resolver;
use super::servers::Servers;
use super::sockets::{Kind, Progress, Socket, Sockets, number_of};
use super::way::Way;
use super::{address, names};
use crate::share::Places;

mod connect;
mod datagram;
mod maker;
mod options;
mod own;

pub(super) use connect::{is_of_guest, say};
use maker::{Maker, make_callers};

/// So many calls may wait at once for the host, or for an answer to a question; of a user alone, 544. Further ones fail with `EAGAIN`.
const MAX_WAITING: usize = if cfg!(test) { 256 } else { 2048 };

/// Places for calls that are announced: twice as many as there are ports to announce from, so that a user alone has 68 calls, and two together leave ports. Further ones are made in another way.
const ANNOUNCED: usize = 256;

/// The stack of a thread of such a call, in bytes.
const STACK_LEN: usize = 128 << 10;

/// The bits of `socket`'s second argument that are the type; the others are flags.
const SOCKET_TYPE_MASK: u64 = 0xf;

const PROTOCOL_ICMP: u32 = 1;
const PROTOCOL_TCP: u32 = 6;
pub(crate) const PROTOCOL_UDP: u32 = 17;
const PROTOCOL_ICMPV6: u32 = 58;
const PROTOCOL_UDPLITE: u32 = 136;

/// What becomes of a call.
enum Outcome {
    /// The kernel does it.
    Kernel,
    /// It returns this.
    Returns(u32),
    /// It has been answered, or will be.
    Elsewhere,
}

const SUCCESS: Outcome = Outcome::Returns(0);

/// Answers the calls of one program and its descendants.
pub(crate) struct Supervisor {
    listener: Listener,
    way: Arc<dyn Way>,
    sockets: Arc<Mutex<Sockets>>,
    names: Arc<Mutex<Names>>,
    resolver: Resolver,
    /// Where datagram sockets of the kernel's own come from, if there are such.
    datagrams: Option<Datagrams>,
    waiting: Arc<Places>,
    announced: Arc<Places>,
    manner: Manner,
    /// Held while a caller at a listener is taken, by the listener's number.
    turns: Mutex<HashMap<u64, Weak<Mutex<()>>>>,
}

/// How calls are answered.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Manner {
    /// Whether the kernel has TCP. Otherwise [`loopback`](super::loopback) is in its place.
    pub(crate) has_tcp: bool,
    /// Whether questions for names are answered here, whatever server is asked.
    pub(crate) resolves: bool,
    pub(crate) is_verbose: bool,
}

impl Supervisor {
    /// With the source of datagram sockets come the sockets at which their questions arrive.
    ///
    /// # Errors
    /// The system has no descriptor or no thread left.
    pub(crate) fn new(
        listener: Listener,
        way: Arc<dyn Way>,
        datagrams: Option<(Datagrams, Vec<OwnedFd>)>,
        manner: Manner,
    ) -> io::Result<Supervisor> {
        let sockets = Arc::default();
        let names = Arc::default();
        let (datagrams, questions) = datagrams.unzip();
        let (known, questions) = (Arc::clone(&names), questions.unwrap_or_default());
        let servers = Servers::new(Arc::clone(&way), manner.is_verbose);
        let servers = (!manner.resolves).then(|| Arc::new(servers));
        Ok(Supervisor {
            listener,
            way,
            resolver: Resolver::start(Arc::clone(&sockets), known, questions, servers)?,
            datagrams,
            sockets,
            names,
            waiting: Places::new(MAX_WAITING),
            announced: Places::new(ANNOUNCED),
            manner,
            turns: Mutex::default(),
        })
    }

    /// Whether none of the program's processes is left.
    pub(crate) fn is_over(&self) -> bool {
        self.listener.is_over()
    }

    /// Answers calls for as long as a process of the program lives.
    pub(crate) fn run(self: &Arc<Supervisor>) {
        let own = Arc::clone(self);
        if let Err(error) = self.listener.serve(Arc::new(move |call| own.take(call))) {
            // Without its listener, the program's calls fail and do not hang.
            eprintln!("ringdown-agent run: cannot watch the program any more: {error}");
        }
    }

    fn take(self: &Arc<Supervisor>, call: PendingCall) {
        let call = Arc::new(call);
        let outcome = match call.call {
            SystemCall::Socket => self.socket(&call),
            SystemCall::Connect => self.connect(&call),
            SystemCall::Bind => self.bind(&call),
            SystemCall::Listen => self.listen(&call),
            SystemCall::Accept | SystemCall::Accept4 => self.accept(&call),
            SystemCall::GetSockName | SystemCall::GetPeerName => self.name(&call),
            SystemCall::GetSockOpt => self.get_option(&call),
            SystemCall::SetSockOpt => self.set_option(&call),
            SystemCall::IoControl => self.count_readable(&call),
            SystemCall::SendTo => self.send_to(&call),
            SystemCall::ReceiveFrom => self.receive_from(&call),
            // They are not watched.
            SystemCall::SendMessage | SystemCall::ReceiveMessage | SystemCall::IoUringSetup => {
                Ok(Outcome::Kernel)
            }
        };
        self.carry_out(&call, outcome);
    }

    /// A call whose thread has ended needs no answer, and no other failure is possible.
    fn carry_out(&self, call: &PendingCall, outcome: Result<Outcome, Errno>) {
        let _ = match outcome {
            Ok(Outcome::Kernel) => self.listener.let_through(call),
            Ok(Outcome::Returns(value)) => self.listener.answer(call, Ok(value)),
            Ok(Outcome::Elsewhere) => Ok(()),
            Err(errno) => self.listener.answer(call, Err(errno)),
        };
    }

    /// Does what may take long in a thread of its own, and then answers the call.
    fn wait_apart(
        self: &Arc<Supervisor>,
        call: &Arc<PendingCall>,
        work: impl FnOnce(&Supervisor, &PendingCall) -> Result<Outcome, Errno> + Send + 'static,
    ) -> Result<Outcome, Errno> {
        let place = self.waiting.take(call.caller.user).ok_or(Errno::AGAIN)?;
        let (supervisor, call) = (Arc::clone(self), Arc::clone(call));
        let work = move || {
            let outcome = work(&supervisor, &call);
            drop(place);
            supervisor.carry_out(&call, outcome);
        };
        let thread = std::thread::Builder::new()
            .name("call".into())
            .stack_size(STACK_LEN);
        let started = thread.spawn(work);
        started
            .map(|_| Outcome::Elsewhere)
            .map_err(|_| Errno::AGAIN)
    }

    /// `socket(AF_INET, …)` and `socket(AF_INET6, …)`: one that stands in for it.
    fn socket(&self, call: &PendingCall) -> Result<Outcome, Errno> {
        let [domain, kind, protocol, ..] = call.arguments;
        let Some(family) = Family::of(domain) else {
            return Ok(Outcome::Kernel);
        };
        // What has left the network of the run has no way out by it.
        if !Thread(call.thread).shares_network() {
            return Ok(Outcome::Kernel);
        }
        let flags =
            SocketFlags::from_bits((kind & !SOCKET_TYPE_MASK) as u32).ok_or(Errno::INVAL)?;
        if !(SocketFlags::NONBLOCK | SocketFlags::CLOEXEC).contains(flags) {
            return Err(Errno::INVAL);
        }
        let kind = SocketType::from_raw((kind & SOCKET_TYPE_MASK) as u32);
        let (socket, kind) = match (kind, protocol as u32) {
            (SocketType::STREAM, 0 | PROTOCOL_TCP) => {
                let socket = self.way.socket().map_err(errno)?;
                (socket, Kind::Stream(Progress::New))
            }
            (SocketType::DGRAM, 0 | PROTOCOL_UDP | PROTOCOL_UDPLITE) => match &self.datagrams {
                Some(datagrams) => {
                    let socket = datagrams.socket(family, protocol as u32, call.caller.user);
                    // From now on it is the kernel's business.
                    return self.give(call, &socket.map_err(no_datagrams)?, flags);
                }
                None if protocol as u32 == PROTOCOL_UDPLITE => return Err(Errno::PROTONOSUPPORT),
                None => self.datagram_pair()?,
            },
            // As where the range of groups that may ping is empty.
            (SocketType::DGRAM, PROTOCOL_ICMP | PROTOCOL_ICMPV6) => return Err(Errno::ACCESS),
            (SocketType::STREAM | SocketType::DGRAM, _) => return Err(Errno::PROTONOSUPPORT),
            (SocketType::RAW, _) => return Err(Errno::PERM),
            _ => return Err(Errno::SOCKTNOSUPPORT),
        };
        let number = self.remember(&socket, Socket::new(call.caller.user, family, kind))?;
        let given = self.give(call, &socket, flags);
        if given.is_err() {
            self.sockets().remove(number);
        }
        given
    }

    /// Has the call return a descriptor of this socket.
    fn give(
        &self,
        call: &PendingCall,
        socket: &OwnedFd,
        flags: SocketFlags,
    ) -> Result<Outcome, Errno> {
        make_callers(call, socket)?;
        rustix::io::ioctl_fionbio(socket, flags.contains(SocketFlags::NONBLOCK))?;
        let close_on_exec = flags.contains(SocketFlags::CLOEXEC);
        let given = self
            .listener
            .answer_with_descriptor(call, socket.as_fd(), close_on_exec);
        given.map_err(errno)?;
        Ok(Outcome::Elsewhere)
    }

    /// A socket of the guest's own kernel, made as the call would have made it.
    fn kernel_socket(&self, call: &PendingCall, family: Family) -> Result<OwnedFd, Errno> {
        let socket = Maker::of(call)?.make(|| kernel_socket(family))?;
        self.listener.still_pending(call)?;
        Ok(socket)
    }

    /// Remembers a socket before its program has it.
    fn remember(&self, socket: &OwnedFd, remembered: Socket) -> Result<u64, Errno> {
        let number = number_of(socket.as_fd()).ok_or(Errno::NOMEM)?;
        let user = remembered.user;
        let end = match &remembered.kind {
            Kind::Datagram(end) => Some(Arc::clone(end)),
            Kind::Stream(_) => None,
        };
        let added = self.sockets().add(number, remembered);
        added.map_err(|_| Errno::NOBUFS)?;
        if let Some(end) = end {
            self.resolver.serve(&end, number, user).map_err(errno)?;
        }
        Ok(number)
    }

    /// The file of the call's descriptor, if it is a socket, and its number.
    ///
    /// # Errors
    /// `ENOBUFS` when this process may have no more descriptors, `ESRCH` once the call does not wait any more.
    fn file(&self, call: &PendingCall) -> Result<Option<(OwnedFd, u64)>, Errno> {
        // Descriptors are ints.
        let found = Thread(call.thread).descriptor(call.arguments[0] as i32);
        match found.map_err(errno) {
            Ok(socket) => {
                // Else it may be another process's, which has the number now.
                self.listener.still_pending(call)?;
                let number = number_of(socket.as_fd());
                Ok(number.map(|number| (socket, number)))
            }
            Err(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => Err(Errno::NOBUFS),
            // The kernel says of the descriptor what there is to say.
            Err(_) => Ok(None),
        }
    }

    /// `getsockname` and `getpeername`: the addresses that the program knows.
    fn name(&self, call: &PendingCall) -> Result<Outcome, Errno> {
        let Some((file, number)) = self.file(call)? else {
            return Ok(Outcome::Kernel);
        };
        let is_peer = call.call == SystemCall::GetPeerName;
        let has_peer = is_peer && is_connected(&file);
        let address = {
            let mut sockets = self.sockets();
            let Some(socket) = sockets.get_mut(number) else {
                return Ok(Outcome::Kernel);
            };
            let shown = match (&socket.kind, is_peer) {
                (Kind::Stream(Progress::Local), _) => return Ok(Outcome::Kernel),
                (Kind::Stream(Progress::Connected) | Kind::Datagram(_), true) => {
                    socket.peer.ok_or(Errno::NOTCONN)?
                }
                // The kernel knows first.
                (Kind::Stream(Progress::Connecting), true) if has_peer => {
                    socket.peer.ok_or(Errno::NOTCONN)?
                }
                (Kind::Stream(_), true) => return Err(Errno::NOTCONN),
                (_, false) => socket.own.unwrap_or_else(|| socket.family.unspecified()),
            };
            socket.family.shown(shown)
        };
        let bytes = address::to_bytes(address);
        let [_, pointer, len_pointer, ..] = call.arguments;
        self.listener
            .write_address(call, &bytes, pointer, len_pointer)?;
        Ok(SUCCESS)
    }

    /// Reads the address at the call's second and third argument, once: what is decided is about what was read.
    fn given(&self, call: &PendingCall, family: Family) -> Result<Given, Errno> {
        let [_, pointer, len, ..] = call.arguments;
        self.given_at(call, family, pointer, len)
    }

    fn given_at(
        &self,
        call: &PendingCall,
        family: Family,
        pointer: u64,
        len: u64,
    ) -> Result<Given, Errno> {
        let mut bytes = [0; MAX_ADDRESS_LEN];
        let bytes = bytes.get_mut(..len as u32 as usize).ok_or(Errno::INVAL)?;
        self.listener.read(call, bytes, pointer)?;
        address::parse(bytes, family)
    }

    fn sockets(&self) -> MutexGuard<'_, Sockets> {
        // Nothing panics while it holds the lock.
        sys::lock(&self.sockets)
    }

    fn names(&self) -> MutexGuard<'_, Names> {
        sys::lock(&self.names)
    }
}

/// Why there is no datagram socket: the kernel's reason, or that the process is gone that makes them.
fn no_datagrams(error: io::Error) -> Errno {
    match errno(error) {
        errno @ (Errno::AFNOSUPPORT | Errno::PROTONOSUPPORT | Errno::MFILE | Errno::NFILE) => errno,
        _ => Errno::NOBUFS,
    }
}

/// Whether the kernel has connected this socket, whatever its family. It may take for ever, as the program may have the socket's lock.
fn is_connected(socket: &OwnedFd) -> bool {
    rustix::net::getpeername(socket).is_ok()
}

/// A socket of the guest's own kernel, made by this process.
pub(crate) fn kernel_socket(family: Family) -> Result<OwnedFd, Errno> {
    let family = AddressFamily::from_raw(family.number());
    let flags = SocketFlags::CLOEXEC;
    rustix::net::socket_with(family, SocketType::STREAM, flags, None)
}

/// An address that a socket may show as its own which has none of the kernel's, with a port of those that the kernel gives.
fn own_address(like: SocketAddr, number: u64) -> SocketAddr {
    let port = 32_768 + (number % 28_232) as u16;
    (names::own_address(like.ip()), port).into()
}
