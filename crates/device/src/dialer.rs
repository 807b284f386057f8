//! Calls of guests that somebody else puts through: to services of the host, and to the directory.
//!
//! The fabric's thread must not wait for a name to be resolved or a connection to be made. It hands the call to a [`Dialer`] and goes
//! on; whoever has taken it answers later, from any thread, with a connected socket. From then on the fabric sends and receives
//! on that socket itself, straight from and to guest memory, so that a service costs no copy more than a plain socket does.

use std::os::fd::OwnedFd;
use std::sync::mpsc::Sender;

use switch::{Address, CircuitId, Reason, RuleId, ServiceId};
use wire::vsock::SocketType;

use crate::Waker;

/// What a guest has called.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Called {
    /// A service.
    Service(ServiceId),
    /// The directory of names.
    Directory,
}

/// A guest's call. It is answered once, by [`Reply`].
#[derive(Debug)]
pub struct ServiceCall {
    /// What is called.
    pub called: Called,
    /// Who calls.
    pub vm: Address,
    /// The port that the call comes from. Below 1024 the guest's kernel vouches for a privileged program.
    pub source_port: u32,
    /// The port of the service.
    pub port: u32,
    /// The rule that allows the call, of the policy that is in force now.
    pub rule: Option<RuleId>,
    /// The type of the guest's socket, which the socket that is given back must have too.
    pub socket_type: SocketType,
    /// How to answer.
    pub reply: Reply,
}

/// Takes calls. It must not block.
pub type Dialer = Box<dyn FnMut(ServiceCall) + Send>;

/// The answer to a call. To drop it is to say that the call has failed.
#[derive(Debug)]
pub struct Reply {
    way: Option<Way>,
}

#[derive(Debug)]
struct Way {
    circuit: CircuitId,
    answers: Sender<Dialled>,
    waker: Waker,
}

/// Something that is dropped when a circuit has ended: what stands for a connection in somebody's count.
pub type Hold = Box<dyn Send>;

/// The host's end of a circuit.
pub(crate) struct Connected {
    pub(crate) socket: OwnedFd,
    pub(crate) hold: Option<Hold>,
}

/// An answer on its way to the fabric.
pub(crate) struct Dialled {
    pub(crate) circuit: CircuitId,
    pub(crate) result: Result<Connected, Reason>,
}

impl Reply {
    pub(crate) fn new(circuit: CircuitId, answers: Sender<Dialled>, waker: Waker) -> Reply {
        Reply {
            way: Some(Way {
                circuit,
                answers,
                waker,
            }),
        }
    }

    /// The call is put through. The socket is connected, does not block, and is a stream (UNIX or TCP) or a UNIX socket of
    /// messages, as the guest's is. If the guest has hung up in the meantime, it is closed. `hold` is dropped with it.
    pub fn connected(mut self, socket: OwnedFd, hold: Option<Hold>) {
        self.send(Ok(Connected { socket, hold }));
    }

    /// The call cannot be put through.
    pub fn failed(mut self, reason: Reason) {
        self.send(Err(reason));
    }

    fn send(&mut self, result: Result<Connected, Reason>) {
        if let Some(way) = self.way.take() {
            // The fabric may have ended, and with it the call.
            let _ = way.answers.send(Dialled {
                circuit: way.circuit,
                result,
            });
            way.waker.wake();
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        self.send(Err(Reason::HostFailed));
    }
}
