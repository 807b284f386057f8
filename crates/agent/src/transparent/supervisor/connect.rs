//! `connect`, `bind` and `listen`.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::fs::{OFlags, fcntl_getfl};
use rustix::io::Errno;
use rustix::net::sockopt::{self, Timeout};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use sys::supervise::{PendingCall, errno};
use wire::destination::{Destination, Host};

use super::super::address::{Family, Given};
use super::super::names::Meaning;
use super::super::resolver::DNS_PORT;
use super::super::sockets::{Kind, Progress, Socket, number_of};
use super::super::way;
use super::{Outcome, SUCCESS, Supervisor, is_connected, make_callers, options, own_address};
use crate::share::Place;

/// How long a call may take: a little longer than Linux tries with TCP.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(140);

/// How long a name server of the guest's own may take to be connected. It takes long only if its queue is full.
const NAME_SERVER_PATIENCE: Duration = Duration::from_secs(2);

/// A stream that is to be connected.
pub(super) struct Dial {
    pub(super) socket: OwnedFd,
    pub(super) number: u64,
    family: Family,
    /// How far it had come before.
    progress: Progress,
    /// How far it has come if the call fails.
    failed: Progress,
    pub(super) to: SocketAddr,
}

/// What has become of a call.
enum Dialled {
    Done,
    /// The socket is being connected. What becomes of that comes over the announcer.
    GoesOn {
        destination: Destination,
        announcer: Announcer,
        deadline: Instant,
    },
}

/// The connection over which a call was announced, and its place.
struct Announcer {
    socket: OwnedFd,
    _place: Place,
}

impl Supervisor {
    pub(super) fn connect(
        self: &Arc<Supervisor>,
        call: &Arc<PendingCall>,
    ) -> Result<Outcome, Errno> {
        let Some((socket, number)) = self.file(call)? else {
            return Ok(Outcome::Kernel);
        };
        let Some((family, kind)) = self.kind_of(number) else {
            return Ok(Outcome::Kernel);
        };
        let to = match self.given(call, family)? {
            Given::Address(to) => Some(to),
            Given::Unspecified => None,
            Given::Foreign => return Err(Errno::AFNOSUPPORT),
        };
        match (kind, to) {
            (Kind::Datagram(_), to) => return self.connect_datagram(number, to),
            (Kind::Stream(Progress::Connecting), Some(_)) if is_connected(&socket) => {
                return Err(Errno::ISCONN);
            }
            (Kind::Stream(_), Some(_)) => {}
            (Kind::Stream(Progress::Local), None) => return Ok(Outcome::Kernel),
            // A circuit ends with its socket only.
            (Kind::Stream(Progress::Connected), None) => return Err(Errno::OPNOTSUPP),
            (Kind::Stream(_), None) => return Ok(SUCCESS),
        }
        let (Some(to), mut sockets) = (to, self.sockets()) else {
            return Ok(Outcome::Kernel);
        };
        let Some(remembered) = sockets.get_mut(number) else {
            return Ok(Outcome::Kernel);
        };
        let Kind::Stream(progress) = remembered.kind else {
            return Ok(Outcome::Kernel);
        };
        match progress {
            Progress::Connecting => return Err(Errno::ALREADY),
            Progress::Connected => return Err(Errno::ISCONN),
            Progress::Local if is_of_guest(to.ip()) => return Ok(Outcome::Kernel),
            Progress::New | Progress::Spent | Progress::Local | Progress::Bound => {}
        }
        let is_kernels = is_of_guest(to.ip()) && !self.is_resolvers(to);
        if !is_kernels {
            remembered.kind = Kind::Stream(Progress::Connecting);
        }
        drop(sockets);
        let mut dial = Dial {
            socket,
            number,
            family,
            progress,
            failed: Progress::Spent,
            to,
        };
        if is_kernels && !self.manner.has_tcp {
            return self.wait_apart(call, move |own, call| own.dial_own(call, &mut dial));
        }
        if is_kernels {
            let own = self.kernel_socket(call, family);
            let own = own.map_err(|_| Errno::CONNREFUSED)?;
            self.replace(call, &mut dial, own, Progress::Local)?;
            // It waits in the program, for as long as that lives. It reads the address again, as with a socket that was bound: another one leads where the guest's kernel leads.
            return Ok(Outcome::Kernel);
        }
        let started = self.wait_apart(call, move |own, call| own.dial(call, dial));
        if started.is_err() {
            self.set_progress(number, progress);
        }
        started
    }

    pub(super) fn kind_of(&self, number: u64) -> Option<(Family, Kind)> {
        let mut sockets = self.sockets();
        let socket = sockets.get_mut(number)?;
        Some((socket.family, socket.kind.clone()))
    }

    fn set_progress(&self, number: u64, progress: Progress) {
        if let Some(socket) = self.sockets().get_mut(number) {
            socket.kind = Kind::Stream(progress);
        }
    }

    /// Where an address leads that is not the guest's own.
    fn target(&self, to: SocketAddr) -> Result<Destination, Errno> {
        let host = match self.names().meaning_of(to.ip()) {
            Meaning::Name(name) => Host::Name(name),
            Meaning::Nothing => return Err(Errno::HOSTUNREACH),
            Meaning::Itself => Host::from(to.ip()),
        };
        let is_group = match &host {
            Host::Address(IpAddr::V4(ip)) => ip.is_multicast() || ip.is_broadcast(),
            Host::Address(IpAddr::V6(ip)) => ip.is_multicast(),
            Host::Name(_) => false,
        };
        if is_group {
            return Err(Errno::NETUNREACH);
        }
        // As Linux says of port 0.
        Destination::new(host, to.port()).map_err(|_| Errno::CONNREFUSED)
    }

    /// The call is answered when this process has no copy of the socket any more: one that its program closes then is closed.
    fn dial(&self, call: &PendingCall, mut dial: Dial) -> Result<Outcome, Errno> {
        match self.try_dial(call, &mut dial) {
            Ok(Dialled::Done) => Ok(SUCCESS),
            Ok(Dialled::GoesOn {
                destination,
                announcer,
                deadline,
            }) => {
                let number = dial.number;
                drop(dial);
                let _ = self.listener.answer(call, Err(Errno::INPROGRESS));
                let connected = way::outcome(announcer.socket, deadline);
                // The kernel takes such a socket for one that is being connected.
                self.end(number, &destination, connected, Progress::Spent);
                Ok(Outcome::Elsewhere)
            }
            Err(errno) => {
                self.set_progress(dial.number, dial.failed);
                Err(errno)
            }
        }
    }

    fn try_dial(&self, call: &PendingCall, dial: &mut Dial) -> Result<Dialled, Errno> {
        let to = dial.to;
        if self.is_resolvers(to) {
            return self.dial_resolver(call, dial);
        }
        let destination = match self.target(to) {
            Ok(destination) => destination,
            Err(errno) => {
                self.say(to, Err(errno));
                return Err(errno);
            }
        };
        if dial.progress != Progress::New {
            let fresh = self.way.socket().map_err(errno)?;
            self.replace(call, dial, fresh, Progress::Connecting)?;
        }
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let announced = self.announce(call, dial, &destination, deadline);
        if let Err(errno) = announced {
            self.say(&destination, Err(errno));
        }
        if let Some(announcer) = announced? {
            return self.dial_announced(dial, destination, announcer, deadline);
        }
        let opened = way::open(&*self.way, dial.socket.as_fd(), &destination, deadline);
        self.say(&destination, opened);
        opened?;
        self.set_addresses(dial);
        self.set_progress(dial.number, Progress::Connected);
        Ok(Dialled::Done)
    }

    /// Not if the user has as many such calls as it may have.
    fn announce(
        &self,
        call: &PendingCall,
        dial: &Dial,
        destination: &Destination,
        deadline: Instant,
    ) -> Result<Option<Announcer>, Errno> {
        let Some(place) = self.announced.take(call.caller.user) else {
            return Ok(None);
        };
        let announced = self.way.announce(
            dial.socket.as_fd(),
            (destination, call.caller.account),
            deadline,
        )?;
        Ok(announced.map(|socket| Announcer {
            socket,
            _place: place,
        }))
    }

    fn set_addresses(&self, dial: &Dial) {
        let own = own_address(dial.to, self.way.own_port(dial.socket.as_fd()).into());
        if let Some(socket) = self.sockets().get_mut(dial.number) {
            (socket.peer, socket.own) = (Some(dial.to), Some(own));
            socket.error = None;
        }
    }

    /// The host knows where the call is to go, and answers it when it is known what has become of it. So the kernel's word about the socket is true, and a non-blocking one
    /// is being connected meanwhile, as it would be by TCP.
    fn dial_announced(
        &self,
        dial: &mut Dial,
        destination: Destination,
        announcer: Announcer,
        deadline: Instant,
    ) -> Result<Dialled, Errno> {
        self.set_addresses(dial);
        let connected = match self.way.begin(dial.socket.as_fd()) {
            Ok(()) => Ok(()),
            Err(Errno::INPROGRESS) => {
                return Ok(Dialled::GoesOn {
                    destination,
                    announcer,
                    deadline,
                });
            }
            Err(Errno::CONNRESET) => way::outcome(announcer.socket, deadline),
            Err(errno) => {
                way::withdraw(announcer.socket);
                Err(way::unreachable(errno))
            }
        };
        self.end(dial.number, &destination, connected, Progress::New);
        if connected.is_err() {
            dial.failed = Progress::New;
            // The kernel has one too, which is about the same call.
            let _ = rustix::net::sockopt::socket_error(&dial.socket);
        }
        connected.map(|()| Dialled::Done)
    }

    /// It is known what has become of a call that was announced. The program asks for the reason where its call did not fail itself (`SO_ERROR`).
    fn end(
        &self,
        number: u64,
        destination: &Destination,
        connected: Result<(), Errno>,
        failed: Progress,
    ) {
        self.say(destination, connected);
        if let Some(socket) = self.sockets().get_mut(number) {
            socket.error = connected.err().filter(|_| failed == Progress::Spent);
            socket.kind = Kind::Stream(match connected {
                Ok(()) => Progress::Connected,
                Err(_) => failed,
            });
            if connected.is_err() {
                (socket.peer, socket.own) = (None, None);
            }
        }
    }

    /// Questions for names, over a stream: a name server of the guest's own has them, or else the resolver, which has the other end of what takes the place of the program's socket.
    fn dial_resolver(&self, call: &PendingCall, dial: &mut Dial) -> Result<Dialled, Errno> {
        if is_of_guest(dial.to.ip()) {
            if let Ok(own) = self.dial_name_server(call, dial.family, dial.to) {
                self.replace(call, dial, own, Progress::Local)?;
                return Ok(Dialled::Done);
            }
        }
        let (family, kind) = (AddressFamily::UNIX, SocketType::STREAM);
        let (socket, end) = socketpair(family, kind, SocketFlags::CLOEXEC, None)?;
        self.resolver
            .serve_stream(end, call.caller.user)
            .map_err(errno)?;
        self.replace(call, dial, socket, Progress::Connected)?;
        let own = own_address(dial.to, dial.number);
        if let Some(socket) = self.sockets().get_mut(dial.number) {
            (socket.peer, socket.own) = (Some(dial.to), Some(own));
        }
        Ok(Dialled::Done)
    }

    /// A connection to a name server of the guest's own, if there is one.
    fn dial_name_server(
        &self,
        call: &PendingCall,
        family: Family,
        to: SocketAddr,
    ) -> Result<OwnedFd, Errno> {
        let socket = self.kernel_socket(call, family)?;
        sockopt::set_socket_timeout(&socket, Timeout::Send, Some(NAME_SERVER_PATIENCE))?;
        rustix::net::connect(&socket, &to)?;
        Ok(socket)
    }

    /// Puts another socket into the place of the program's, at each of the process's descriptors of it, with its mode and its options.
    pub(super) fn replace(
        &self,
        call: &PendingCall,
        dial: &mut Dial,
        fresh: OwnedFd,
        progress: Progress,
    ) -> Result<(), Errno> {
        let is_nonblocking = fcntl_getfl(&dial.socket)?.contains(OFlags::NONBLOCK);
        rustix::io::ioctl_fionbio(&fresh, is_nonblocking)?;
        make_callers(call, &fresh)?;
        let number = number_of(fresh.as_fd()).ok_or(Errno::NOMEM)?;
        let mut socket = Socket::new(call.caller.user, dial.family, Kind::Stream(progress));
        if let Some(old) = self.sockets().get_mut(dial.number) {
            for (level, option, value) in old.options() {
                socket.set_option(*level, *option, value.clone());
            }
        }
        copy_options(&dial.socket, &fresh)?;
        if progress == Progress::Local {
            let reuses_port = socket.option(options::SOL_SOCKET, options::SO_REUSEPORT);
            if reuses_port.is_some_and(|value| value.iter().any(|byte| *byte != 0)) {
                sockopt::set_socket_reuseport(&fresh, true)?;
            }
            for (level, option, value) in socket.options() {
                // What the kernel does not take, it would not have taken before.
                let (level, option) = (*level as i32, *option as i32);
                if !needs_rights(level, option) {
                    let _ = sys::sockets::set_option(fresh.as_fd(), level, option, value);
                }
            }
        }
        let added = self.sockets().add(number, socket);
        added.map_err(|_| Errno::NOBUFS)?;
        self.listener.replace(call, &dial.socket, &fresh)?;
        self.sockets().remove(dial.number);
        (dial.socket, dial.number) = (fresh, number);
        Ok(())
    }

    /// `bind`: the program wants to listen, or does not care where it calls from. Only its own guest can call it.
    pub(super) fn bind(&self, call: &PendingCall) -> Result<Outcome, Errno> {
        let Some((socket, number)) = self.file(call)? else {
            return Ok(Outcome::Kernel);
        };
        let Some((family, kind)) = self.kind_of(number) else {
            return Ok(Outcome::Kernel);
        };
        let progress = match kind {
            Kind::Stream(Progress::Local) => return Ok(Outcome::Kernel),
            Kind::Stream(progress) => progress,
            Kind::Datagram(_) => return self.bind_datagram(call, number, family),
        };
        let to = match self.given(call, family)? {
            Given::Address(to) => to,
            Given::Unspecified => family.unspecified(),
            Given::Foreign => return Err(Errno::AFNOSUPPORT),
        };
        if !matches!(progress, Progress::New | Progress::Spent) {
            return Err(Errno::INVAL);
        }
        let mut dial = Dial {
            socket,
            number,
            family,
            progress,
            failed: Progress::Spent,
            to,
        };
        if !self.manner.has_tcp {
            return self.bind_own(call, &mut dial);
        }
        let own = self.kernel_socket(call, family);
        let own = own.map_err(|_| Errno::ADDRNOTAVAIL)?;
        self.replace(call, &mut dial, own, Progress::Local)?;
        // With the program's rights, not those of this process.
        Ok(Outcome::Kernel)
    }

    /// `listen`, of a socket that was not bound: the kernel chooses a port.
    pub(super) fn listen(&self, call: &PendingCall) -> Result<Outcome, Errno> {
        let Some((socket, number)) = self.file(call)? else {
            return Ok(Outcome::Kernel);
        };
        let Some((family, Kind::Stream(progress))) = self.kind_of(number) else {
            return Ok(Outcome::Kernel);
        };
        match progress {
            Progress::Local | Progress::Bound => return Ok(Outcome::Kernel),
            Progress::New | Progress::Spent => {}
            Progress::Connecting | Progress::Connected => return Err(Errno::INVAL),
        }
        let mut dial = Dial {
            socket,
            number,
            family,
            progress,
            failed: Progress::Spent,
            to: family.unspecified(),
        };
        if !self.manner.has_tcp {
            self.bind_own(call, &mut dial)?;
            return Ok(Outcome::Kernel);
        }
        let own = self.kernel_socket(call, family);
        let own = own.map_err(|_| Errno::ADDRNOTAVAIL)?;
        self.replace(call, &mut dial, own, Progress::Local)?;
        Ok(Outcome::Kernel)
    }

    /// `connect` of a datagram socket: its questions' server.
    fn connect_datagram(&self, number: u64, to: Option<SocketAddr>) -> Result<Outcome, Errno> {
        let mut sockets = self.sockets();
        let Some(socket) = sockets.get_mut(number) else {
            return Ok(Outcome::Kernel);
        };
        match to {
            Some(to) if to.port() != DNS_PORT => return Err(Errno::NETUNREACH),
            Some(to) => socket.own = Some(own_address(to, number)),
            None => {}
        }
        socket.peer = to;
        Ok(SUCCESS)
    }

    /// Whether the resolver has this address.
    fn is_resolvers(&self, to: SocketAddr) -> bool {
        self.manner.resolves && to.port() == DNS_PORT
    }

    fn say(&self, to: impl std::fmt::Display, result: Result<(), Errno>) {
        if self.manner.is_verbose {
            say(to, result);
        }
    }
}

/// What became of a call, for a person that asks.
pub(in super::super) fn say(to: impl std::fmt::Display, result: Result<(), Errno>) {
    match result {
        Ok(()) => eprintln!("ringdown-agent run: {to}: connected"),
        Err(errno) => eprintln!("ringdown-agent run: {to}: {errno}{}", way::meaning(errno)),
    }
}

/// Copies what the program may have set of `SOL_SOCKET`. Not the sizes of buffers: of a socket that they were set on TCP adapts them no more.
fn copy_options(from: &OwnedFd, to: &OwnedFd) -> Result<(), Errno> {
    sockopt::set_socket_reuseaddr(to, sockopt::socket_reuseaddr(from)?)?;
    sockopt::set_socket_keepalive(to, sockopt::socket_keepalive(from)?)?;
    sockopt::set_socket_linger(to, sockopt::socket_linger(from)?)?;
    for timeout in [Timeout::Recv, Timeout::Send] {
        sockopt::set_socket_timeout(to, timeout, sockopt::socket_timeout(from, timeout)?)?;
    }
    Ok(())
}

/// Whether the kernel checks this option's setter, which here would be this process: `TCP_CONGESTION`.
fn needs_rights(level: i32, option: i32) -> bool {
    (level, option) == (6, 13)
}

/// Whether an address is the guest's own.
pub(in super::super) fn is_of_guest(address: IpAddr) -> bool {
    let address = address.to_canonical();
    address.is_loopback() || address.is_unspecified()
}
