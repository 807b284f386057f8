//! What the data plane asks of the proxy, and what the proxy asks of the data plane.

use std::os::fd::OwnedFd;

use device::{Called, PublishedCall};
use switch::{Address, Reason, RuleId};
use wire::vsock::SocketType;

/// A guest has called a service of the host, or the directory. It is to be answered once, by `reply`.
#[derive(Debug)]
pub struct ServiceCall {
    /// What is called.
    pub called: Called,
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
pub type Answer = Result<Connected, Reason>;

/// The host's end of a circuit.
pub struct Connected {
    /// A connected socket that does not block.
    pub socket: OwnedFd,
    /// What stands for the connection in a count. To be dropped when the circuit has ended.
    pub hold: Option<Hold>,
}

/// Something that lasts as long as a circuit.
pub type Hold = Box<dyn Send>;

/// The way back to the guest. Dropping it refuses the call.
pub struct Reply(Option<Box<dyn FnOnce(Answer) + Send>>);

impl Reply {
    /// A way back that ends in this function, which is called exactly once.
    pub fn new(answer: impl FnOnce(Answer) + Send + 'static) -> Reply {
        Reply(Some(Box::new(answer)))
    }

    /// The call has reached its service.
    pub fn connected(self, socket: OwnedFd, hold: Option<Hold>) {
        self.answer(Ok(Connected { socket, hold }));
    }

    /// The call has come to nothing.
    pub fn failed(self, reason: Reason) {
        self.answer(Err(reason));
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
            function(Err(Reason::HostFailed));
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

/// The data plane, as far as the proxy needs it. Its methods may be called from any thread and return soon.
pub trait Exchange: Send + Sync + 'static {
    /// Calls a guest for somebody who has come in by a published port. Does not wait for its answer.
    fn dial_guest(&self, call: PublishedCall);

    /// By which CID a VM (`vm`, a full name) reaches another: `db` of its own domain or `blue/db` of another. Nothing if no rule lets
    /// it call that one.
    fn resolve(&self, vm: &str, name: &str) -> Option<u32>;

    /// The port of a service of a VM's own domain. Nothing if no rule lets it call that one.
    fn resolve_service(&self, vm: &str, name: &str) -> Option<u32>;
}
