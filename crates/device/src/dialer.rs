//! Calls of guests that another puts through: to services of the host, and to the directory.
//!
//! The fabric's thread must not wait for a name to be resolved or a connection to be made. It hands the call to a [`Dialer`] and goes
//! on; its taker answers later, from any thread, with a connected socket. From then on the fabric sends and receives
//! on that socket itself, straight from and to guest memory, so that a service costs no copy more than a plain socket does.

use std::fmt;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use policy::{Address, ServiceId};
use vsock::{CircuitId, Reason};
use wire::vsock::SocketType;

use crate::slow::Party;

/// What a guest has called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Called {
    /// A service.
    Service(ServiceId),
    /// The directory of names.
    Directory,
    /// Gives windows to the circuits of the guest's programs.
    Switchboard,
    /// A program of the host that listens at the call's port: see [`Fabric::set_listening`](crate::Fabric::set_listening).
    Listener,
}

/// A guest's call. It is answered once, by [`Reply`].
#[derive(Debug)]
pub struct ServiceCall {
    /// What is called.
    pub called: Called,
    /// The circuit that the call becomes when it is put through.
    pub circuit: CircuitId,
    /// The caller.
    pub vm: Address,
    /// The port that the call comes from. Below 1024 the guest's kernel vouches for a privileged program.
    pub source_port: u32,
    /// The port of the service.
    pub port: u32,
    /// The label of the rule that allows the call. Its number is another rule's once a new policy is in force.
    pub rule: Option<String>,
    /// The type of the guest's socket, which the socket that is given back must have too.
    pub socket_type: SocketType,
    /// How to answer.
    pub reply: Reply,
}

/// Takes calls. It must not block.
pub type Dialer = Box<dyn Fn(ServiceCall) + Send>;

/// What a call is answered: a socket, or why there is none.
pub type Answer = Result<Connected, Reason>;

/// Something that is dropped when a circuit has ended: what stands for a connection in a count.
pub type Hold = Box<dyn Send>;

/// The host's end of a circuit.
pub struct Connected {
    /// It is connected and does not block: a stream (UNIX or TCP), or a UNIX socket of messages, as the guest's is.
    pub socket: OwnedFd,
    /// It is dropped behind the socket, at once: it may keep the connection open.
    pub hold: Option<Hold>,
    /// For its sharers: whether an end of the socket is one.
    pub cut: Option<Cut>,
    /// If wanted, set when the socket is ended here first.
    pub ended_first: Option<EndedFirst>,
    /// How many bytes are in a stream socket that are not for the guest. They stay there as long as nothing else comes, so that the other
    /// side can be shown a reset.
    pub unread: usize,
    /// The other end is in this process, so that calls on the socket cannot be made slow.
    pub peer_is_ours: bool,
    /// Whose the other end is, if not ours.
    pub(crate) party: Option<Party>,
}

/// Whether a socket was closed before its time, which a UNIX socket has no way to say. Both of its sides have it, and set it before they
/// close the socket.
pub type Cut = Arc<AtomicBool>;

/// Whether we have ended what we send before the other side has ended. A TCP connection of which that is true keeps its port for a while after it
/// (TIME_WAIT).
pub type EndedFirst = Arc<AtomicBool>;

impl Connected {
    /// A socket whose every end is one.
    pub fn new(socket: OwnedFd, hold: Option<Hold>) -> Connected {
        Connected {
            socket,
            hold,
            cut: None,
            ended_first: None,
            unread: 0,
            peer_is_ours: false,
            party: None,
        }
    }

    /// A socket that one process shares with itself.
    pub fn with_cut(socket: OwnedFd, cut: Cut) -> Connected {
        Connected {
            cut: Some(cut),
            peer_is_ours: true,
            ..Connected::new(socket, None)
        }
    }
}

/// Sets what the other side reads, if there is such: that the end which follows is none, or that it comes first.
pub(crate) fn mark(flag: Option<&Arc<AtomicBool>>) {
    if let Some(flag) = flag {
        flag.store(true, Ordering::Release);
    }
}

/// Whether the other side has said so.
pub(crate) fn is_cut(cut: Option<&Cut>) -> bool {
    cut.is_some_and(|cut| cut.load(Ordering::Acquire))
}

/// The way back to the guest. To drop it is to say that the call has failed.
pub struct Reply {
    answer: Option<Box<dyn FnOnce(Answer) + Send>>,
    /// Gone with the circuit, if there is one.
    circuit: Option<Weak<()>>,
}

impl Reply {
    /// A way back that ends in this function, which is called exactly once, on any thread.
    pub fn new(answer: impl FnOnce(Answer) + Send + 'static) -> Reply {
        Reply {
            answer: Some(Box::new(answer)),
            circuit: None,
        }
    }

    /// The same for as long as this circuit lives: what comes later is for nothing.
    pub fn of_circuit(circuit: &Arc<()>, answer: impl FnOnce(Answer) + Send + 'static) -> Reply {
        Reply {
            answer: Some(Box::new(answer)),
            circuit: Some(Arc::downgrade(circuit)),
        }
    }

    /// Whether the call is still to be put through. It is not when its guest has hung up, or a new policy has ended its circuit.
    pub fn is_awaited(&self) -> bool {
        let circuit = self.circuit.as_ref();
        circuit.is_none_or(|circuit| circuit.strong_count() > 0)
    }

    /// The call is put through. If the guest has hung up in the meantime, the socket is closed.
    pub fn connected(self, socket: OwnedFd, hold: Option<Hold>) {
        self.put_through(Connected::new(socket, hold));
    }

    /// The same, for a socket with more to it.
    pub fn put_through(self, connected: Connected) {
        self.answer(Ok(connected));
    }

    /// The call cannot be put through.
    pub fn failed(self, reason: Reason) {
        self.answer(Err(reason));
    }

    fn answer(mut self, answer: Answer) {
        if let Some(function) = self.answer.take() {
            function(answer);
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(function) = self.answer.take() {
            function(Err(Reason::HostFailed));
        }
    }
}

impl fmt::Debug for Reply {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Reply")
    }
}

impl fmt::Debug for Connected {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = formatter.debug_struct("Connected");
        shown.field("socket", &self.socket).finish_non_exhaustive()
    }
}

/// What carries streams to a guest.
pub struct Carrier(Box<dyn FnMut(u32, Reply) + Send>);

impl Carrier {
    /// A carrier that is asked for a stream to a port of its guest by this function, which must not block. It answers when the guest has,
    /// with a UNIX stream socket that does not block.
    pub fn new(dial: impl FnMut(u32, Reply) + Send + 'static) -> Carrier {
        Carrier(Box::new(dial))
    }

    pub(crate) fn ask(&mut self, port: u32, reply: Reply) {
        (self.0)(port, reply);
    }
}

impl fmt::Debug for Carrier {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Carrier")
    }
}
