//! The device's part of a circuit: the host program's socket, and the bytes on their way.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use vsock::{CircuitId, Side};
use wire::agent::Secret;
use wire::vsock::SocketType;

use crate::caller::Who;
use crate::dialer::Connected;
use crate::host_socket::HostSocket;
use crate::kept::{Kept, Parcel};
use crate::relay::Relay;
use crate::remainder::Remainder;
use crate::slow::Party;

pub(crate) struct CircuitIo {
    pub(crate) id: CircuitId,
    pub(crate) socket_type: SocketType,
    pub(crate) host: Option<HostSocket>,
    /// The other socket, if no guest's ring is involved: the callee, until the two are joined.
    pub(crate) answered_by: Option<Connected>,
    /// Two sockets that have been joined.
    pub(crate) relay: Option<Box<Relay>>,
    /// What is left of them when everything has passed.
    pub(crate) remainder: Option<Remainder>,
    /// Among those that are checked in this turn.
    pub(crate) scheduled: bool,
    /// The socket to a VMM that has yet to say whether its guest answers.
    pub(crate) ringing: Option<OwnedFd>,
    /// What goes to the guest before anything else, once it has answered.
    pub(crate) proof: Option<Secret>,
    /// Whose socket is called, if it is another's.
    pub(crate) callee: Option<Party>,
    /// What a reply to its call knows it by. Made when first needed.
    life: Option<Arc<()>>,
    /// The caller, if it was not a guest.
    pub(crate) who: Option<Who>,
    /// By the side that sent. Made when first needed: most circuits never keep anything.
    kept: [Option<Box<Kept>>; 2],
}

impl CircuitIo {
    pub(crate) fn new(id: CircuitId, socket_type: SocketType) -> CircuitIo {
        CircuitIo {
            id,
            socket_type,
            host: None,
            answered_by: None,
            relay: None,
            remainder: None,
            scheduled: false,
            ringing: None,
            proof: None,
            callee: None,
            life: None,
            who: None,
            kept: [None, None],
        }
    }

    pub(crate) fn life(&mut self) -> &Arc<()> {
        self.life.get_or_insert_default()
    }

    pub(crate) fn kept(&mut self, from: Side) -> Option<&mut Kept> {
        self.kept[from.index()].as_deref_mut()
    }

    pub(crate) fn kept_or_new(&mut self, from: Side) -> &mut Kept {
        self.kept[from.index()].get_or_insert_default()
    }

    pub(crate) fn take_kept(&mut self, from: Side) -> Option<Box<Kept>> {
        self.kept[from.index()].take()
    }

    pub(crate) fn put_kept(&mut self, from: Side, kept: Box<Kept>) {
        self.kept[from.index()] = Some(kept);
    }

    pub(crate) fn keeps_something(&self, from: Side) -> bool {
        self.kept[from.index()]
            .as_ref()
            .is_some_and(|kept| !kept.is_empty())
    }

    /// Whether bytes of it are in memory of our own.
    pub(crate) fn has_stored(&self) -> bool {
        let mut parcels = self.kept.iter().flatten().flat_map(|kept| kept.iter());
        parcels.any(|parcel| matches!(parcel, Parcel::Stored { .. }))
    }

    pub(crate) fn is_stream(&self) -> bool {
        self.socket_type == SocketType::Stream
    }
}
