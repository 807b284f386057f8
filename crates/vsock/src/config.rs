//! Limits, each stated beside what it bounds.

use std::time::Duration;

/// What one VM may use. Everything that a guest or a host program can make grow has its limit here, and so has how often it
/// may cause work. Each line has its own.
///
/// # What a line can cost in memory
///
/// Payload that waits for a receiver, parked in the sender's descriptors or stored, is reserved for when a circuit is set
/// up: at most `line_grant_bytes`, and `min_grant_bytes` for each circuit. Messages that programs of the host have sent to
/// the guest take as much again, and one message. Messages need some 200 bytes each beside their payload, for
/// `kept_messages` of them at most. A circuit itself takes less than 1 KiB.
///
/// # How often
///
/// *Who dials pays.* A guest's dials, to the host or to another guest, are taken from its own `connects_per_second`; the
/// guest that is called is protected by its `half_open` and `circuits`, and loses nothing of its own budget by being
/// called. Of these two, and of `line_grant_bytes`, one other VM has a quarter of the called guest's at most, and at least one; all other VMs and published
/// ports together leave it a quarter, which is for its own dials and for programs of its host. Host programs have a budget of their own for each guest, `host_connects_per_second`: a program that may open
/// the socket of one VM can neither use up what its guest may dial nor keep the worker busy. A dial too many is
/// refused at once. What is refused for another reason that is known at once (no VM has the identifier, no rule allows
/// it, a limit is reached) costs no other VM anything and is not taken from these budgets: it is a packet without payload like others.
///
/// *Packets without payload* cost the sender no credit, so nothing else bounds them. Each takes one of
/// `controls_per_second`: announcements and questions of credit, dials and answers, shutdowns, resets, and whatever makes no
/// sense. None of them may be dropped: an announcement that is lost may be the one that the other side waits for, a
/// shutdown that is lost is an end of data that never comes. So a guest that sends too many is not heard for a
/// moment, the time in which its debt is paid ([`Switch::throttled_until`](crate::Switch::throttled_until)): its packets wait
/// in its own ring, which is the back-pressure that every driver knows. Nothing is lost, and only that guest is
/// slower. A call pays for two such packets of the guest that it is sent to, the answer and the confirmation of the end; as many of
/// them are kept paid as `half_open` answers. Data waits with the rest, as the ring has one order; a packet of data by itself costs nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Circuits that one line may have at once, in any state. With 0 it has none.
    pub circuits: u32,
    /// Dials of one line that have not been answered yet. With 0 there are no calls.
    pub half_open: u32,
    /// Dials that the guest may make in a second, as many at once after a second of quiet. With 0 it cannot call.
    pub connects_per_second: u32,
    /// Dials that programs of the host may make to the guest in a second. With 0 it cannot be called by them.
    pub host_connects_per_second: u32,
    /// Packets without payload that the guest may send in a second, a tenth of them at once. With 0 it may send any number.
    /// Linux (6.1 and 6.12, `virtio_transport_stream_do_dequeue`) announces credit at most once for each read of a program, and
    /// needs some four such packets for a connection that is made and ended.
    pub controls_per_second: u32,
    /// Resets for packets without a circuit that wait for room in one line's ring. More are dropped and counted:
    /// such a reset is a courtesy.
    pub orphan_resets: usize,
    /// Credit that a flow gets when there is plenty, in bytes: what Linux uses by default.
    pub grant_bytes: u32,
    /// The most that a flow to a program of the host may be granted, in bytes, as long as the program keeps up.
    pub max_host_grant_bytes: u32,
    /// The most that a flow between guests may be granted, in bytes, however much its receiver offers.
    pub max_grant_bytes: u32,
    /// The least that a flow is granted, in bytes, when the line has used its share up.
    pub min_grant_bytes: u32,
    /// What the grants of one line's flows may add up to, in bytes, before new flows get `min_grant_bytes`. Also what
    /// messages of host programs may add up to that the guest has not taken, before the next one stays in its socket.
    pub line_grant_bytes: u64,
    /// Messages, or parts of them, that the guest has sent and that are stored for their receivers. Their bytes are bounded
    /// by the grants; this is for messages of few bytes. A circuit whose message is beyond it ends.
    pub kept_messages: u32,
    /// One turn of a circuit in its line's round, in bytes: not less than two receive buffers of a guest (8 KiB), or
    /// messages would be cut into more packets than their receiver takes.
    pub quantum_bytes: u32,
    /// How long a guest or a host program may take to answer a dial.
    pub handshake: Duration,
    /// How long a guest has to confirm the end of a circuit: what Linux calls `VSOCK_CLOSE_TIMEOUT`.
    pub linger: Duration,
    /// How long to wait before a silent receiver is asked again what it has consumed.
    pub credit_poll: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            circuits: 16 * 1024,
            half_open: 2 * 1024,
            // More than one worker sets up, less than a guest can ask for.
            connects_per_second: 50_000,
            host_connects_per_second: 50_000,
            controls_per_second: 500_000,
            orphan_resets: 1024,
            grant_bytes: 256 * 1024,
            max_host_grant_bytes: 1024 * 1024,
            max_grant_bytes: 4 * 1024 * 1024,
            min_grant_bytes: 16 * 1024,
            line_grant_bytes: 256 * 1024 * 1024,
            kept_messages: 64 * 1024,
            quantum_bytes: 128 * 1024,
            handshake: Duration::from_secs(10),
            linger: Duration::from_secs(8),
            credit_poll: Duration::from_millis(50),
        }
    }
}
