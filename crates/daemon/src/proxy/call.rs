//! What the data plane asks of the proxy, and what the proxy asks of the data plane.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use switch::{Address, RuleId};
use wire::vsock::SocketType;

/// A service, by the number that the daemon chose for it. A number is never given to a second service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceId(pub u32);

/// The directory port, which every domain has ([`wire::directory::PORT`]).
pub const DIRECTORY: ServiceId = ServiceId(0);

/// A guest has called a service of the host. It is to be answered once, by `reply`.
#[derive(Debug)]
pub struct ServiceCall {
    /// Which service.
    pub service: ServiceId,
    /// Who calls.
    pub vm: Address,
    /// The port it calls from.
    pub source_port: u32,
    /// The port that it called.
    pub port: u32,
    /// The rule that allows the call, if one was needed.
    pub rule: Option<RuleId>,
    /// Stream or sequenced packets.
    pub socket_type: SocketType,
    /// Where the answer goes.
    pub reply: Reply,
}

/// What a call is answered: a socket, or why there is none.
pub type Answer = Result<Connected, Refusal>;

/// The host's end of a circuit.
pub struct Connected {
    /// A connected socket that does not block.
    pub socket: OwnedFd,
    /// What stands for the connection in a count. To be dropped when the circuit has ended.
    pub hold: Option<Box<dyn Send>>,
}

/// The way back to the guest. Dropping it refuses the call.
pub struct Reply(Option<Box<dyn FnOnce(Answer) + Send>>);

impl Reply {
    /// A way back that ends in this function, which is called exactly once.
    pub fn new(answer: impl FnOnce(Answer) + Send + 'static) -> Reply {
        Reply(Some(Box::new(answer)))
    }

    /// The call has reached its service.
    pub fn connected(self, socket: OwnedFd, hold: Option<Box<dyn Send>>) {
        self.answer(Ok(Connected { socket, hold }));
    }

    /// The call has come to nothing.
    pub fn failed(self, refusal: Refusal) {
        self.answer(Err(refusal));
    }

    fn answer(mut self, answer: Answer) {
        if let Some(function) = self.0.take() {
            function(answer);
        }
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        if let Some(function) = self.0.take() {
            function(Err(Refusal::HostFailed));
        }
    }
}

impl std::fmt::Debug for Reply {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str("Reply")
    }
}

impl std::fmt::Debug for Connected {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter
            .debug_struct("Connected")
            .field("socket", &self.socket)
            .finish_non_exhaustive()
    }
}

/// Why a service could not be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    /// There is no such service, or no longer.
    #[error("there is no such service any more")]
    NoService,
    /// Nobody listens there.
    #[error("nobody listens there")]
    NoListener,
    /// The service takes streams and the call is for messages, or the other way round.
    #[error("the service has another socket type (stream and seqpacket do not mix)")]
    WrongType,
    /// The listener does not take calls as fast as they come.
    #[error("the listener's backlog is full")]
    BacklogFull,
    /// There is no way to the service's host.
    #[error("there is no route to it")]
    Unreachable,
    /// Nobody knows the name of the service's host.
    #[error("nobody knows its name")]
    UnknownName,
    /// The service did not answer in time.
    #[error("it did not answer in time")]
    TimedOut,
    /// The service, or the VM, has as many connections as it may.
    #[error("there are as many connections as may be")]
    ConnectionLimit,
    /// More calls are being put through than the proxy looks after.
    #[error("too many calls are being put through at once")]
    Busy,
    /// Something else went wrong on the host.
    #[error("the host's side of the call failed")]
    HostFailed,
}

/// Somebody has come in by a published port. The socket becomes the host's end of a circuit to the guest; where that is
/// refused it is closed.
#[derive(Debug)]
pub struct PublishedCall {
    /// The guest's full name.
    pub vm: String,
    /// The guest's port.
    pub port: u32,
    /// A connected socket that does not block.
    pub socket: OwnedFd,
    /// Stream or sequenced packets.
    pub socket_type: SocketType,
    /// The name of the published port.
    pub published: String,
    /// Where the call comes from, if it has an address.
    pub peer: Option<SocketAddr>,
}

/// The data plane, as far as the proxy needs it. Its methods may be called from any thread.
pub trait Exchange: Send + Sync + 'static {
    /// Calls a guest. Does not wait for its answer.
    fn dial_guest(&self, call: PublishedCall);

    /// By which CID a VM (`vm`, a full name) reaches another: `db` of its own domain or `blue/db` of another. Nothing if no rule lets
    /// it call that one.
    fn resolve(&self, vm: &str, name: &str) -> Option<u32>;
}
