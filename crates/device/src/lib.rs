//! Where bytes enter and leave: virtio-vsock lines over vhost-user, and the sockets of the host.
//!
//! # Theory of operation
//!
//! A [`Fabric`] owns a [`Switch`](::vsock::Switch) and everything the switch decides about: the rings of every guest, the sockets
//! of programs on the host, and the bytes that have left one and not yet reached the other. One thread runs it. A breath of
//! the data path is the same for every packet:
//!
//! 1. **Drain** what a guest has sent, up to a batch. The header is copied out once; the payload stays where it is.
//! 2. **Decide**: the switch gets each header and says which circuit the payload belongs to.
//! 3. **Carry out**, grouped by destination. For a program on the host, the packets of one circuit become one `sendmsg`
//!    straight from guest memory. For another guest they wait, *parked* in the sender's own descriptors, until its ring has
//!    room, and are then copied once, from memory to memory.
//! 4. **Notify once** per ring. Before the thread sleeps it looks again for a moment, if that has been worth it lately.
//!
//! What a host program's socket does not take is *stored* in memory of our own, bounded by the credit that the guest was
//! shown. A guest whose receiver is slow may park a share of its ring; what it sends beyond that is stored too, so that
//! its other circuits are never held up.
//!
//! From the host to a guest, one `recvmsg` fills as many of the guest's buffers as are posted, and the headers are
//! written afterwards.

mod aside;
mod bound;
mod caller;
mod capture;
mod circuit;
mod closer;
mod connect;
mod decision;
mod dialer;
mod fabric;
mod fault;
mod frontend;
mod handshakes;
mod host_socket;
mod journals;
mod kept;
mod line;
mod nap;
pub mod net;
mod orders;
mod reactor;
mod relay;
mod remainder;
mod ring;
mod slow;
mod snapshot;
mod socket;
mod spin;
mod tally;
mod turns;
mod vsock;
pub mod window;

pub use aside::{Ticket, remove_file};
pub use bound::Bound;
pub use caller::CallAnswer;
pub use capture::{CaptureOptions, CaptureSink, MAX_CAPTURES, NotTaken};
pub use connect::connect_to;
pub use decision::{Decision, DecisionCallee, DecisionCaller, DecisionSink, Observation, Observer};
pub use dialer::{
    Answer, Called, Carrier, Connected, Cut, Dialer, EndedFirst, Hold, Reply, ServiceCall,
};
pub use fabric::{
    Arrival, ArrivalSink, Attachment, CaptureError, CaptureFilter, Change, Changed, CircuitFilter,
    CircuitProspect, CircuitSlice, FORMATS, Fabric, HybridConfig, LineConfig, LineProspect,
    LineSnapshot, NewLine, OpenLineError, ProgramCall, PublishedCall, PublishedTo, RefusedLine,
    SerialConfig, Survey, TakenOver,
};
pub use fault::{MAX_FAULT_CHARS, NO_CARD, NO_VSOCK_DEVICE, NOT_SHARED};
pub use frontend::{NewerKept, check_kept, is_kept, remove_kept_sockets};
pub use line::AgentSecret;
pub use orders::{Orders, Turns};
pub use reactor::Waker;
pub use remainder::{Left, end_in_order, left_in, next_look};
pub use ring::RingCounts;
pub use snapshot::{CircuitSnapshot, Credentials, Endpoint};
pub use socket::{BACKLOG, keep_own_apart, listen_without_descriptors};
pub use sys::socket_file::SocketFile;
