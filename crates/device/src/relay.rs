//! Circuits with two sockets of the host's and no ring: a hybrid line's, when it calls or is called by anything but a guest
//! with rings.
//!
//! The fabric sets them up like all others and then has nothing to do with their bytes. It hands both sockets to a
//! [`Relayer`], hears when they are closed, and can end them.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::Sender;

use rustix::net::{Shutdown, shutdown};
use switch::CircuitId;

use crate::Waker;
use crate::caller::reset;

/// Two connected sockets to pass bytes between, in both directions. They do not block.
#[derive(Debug)]
pub struct Relay {
    /// The caller's: a UNIX stream, or TCP.
    pub caller: Arc<OwnedFd>,
    /// The socket of who has the call: a UNIX stream, or TCP.
    pub callee: Arc<OwnedFd>,
    /// To be dropped when both directions are over.
    pub end: RelayEnd,
}

/// Takes over relays. It must not block.
pub type Relayer = Box<dyn FnMut(Relay) + Send>;

/// Says that a relay is over when it is dropped. Until then the circuit counts against the limits.
#[derive(Debug)]
pub struct RelayEnd {
    circuit: CircuitId,
    ended: Sender<CircuitId>,
    waker: Waker,
}

impl RelayEnd {
    pub(crate) fn new(circuit: CircuitId, ended: Sender<CircuitId>, waker: Waker) -> RelayEnd {
        RelayEnd {
            circuit,
            ended,
            waker,
        }
    }
}

impl Drop for RelayEnd {
    fn drop(&mut self) {
        // The fabric may have ended, and with it the circuit.
        let _ = self.ended.send(self.circuit);
        self.waker.wake();
    }
}

/// Ends a relay from outside: whoever passes the bytes finds both sockets at their end.
pub(crate) fn end(sockets: &[Arc<OwnedFd>; 2], cut_short: bool) {
    for socket in sockets {
        if cut_short {
            reset(socket);
        }
        // It fails only when the other side is gone, which is as good.
        let _ = shutdown(socket, Shutdown::Both);
    }
}
