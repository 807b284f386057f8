//! Limits, each stated beside what it bounds.

use std::time::Duration;

/// What one VM may use. Everything that a guest or a host program can make grow has its limit here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Circuits that one line may have at once, in any state.
    pub circuits: u32,
    /// Dials of one line that have not been answered yet.
    pub half_open: u32,
    /// Resets for packets without a circuit that wait for room in one line's ring. More are dropped and counted:
    /// such a reset is a courtesy.
    pub orphan_resets: usize,
    /// Credit that a flow gets when there is plenty, in bytes: what Linux uses by default.
    pub grant_bytes: u32,
    /// The most that a flow between guests may be granted, in bytes, however much its receiver offers.
    pub max_grant_bytes: u32,
    /// The least that a flow is granted, in bytes, when the line has used its share up.
    pub min_grant_bytes: u32,
    /// What the grants of one line's flows may add up to, in bytes, before new flows get `min_grant_bytes`.
    pub line_grant_bytes: u64,
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
            orphan_resets: 1024,
            grant_bytes: 256 * 1024,
            max_grant_bytes: 4 * 1024 * 1024,
            min_grant_bytes: 16 * 1024,
            line_grant_bytes: 256 * 1024 * 1024,
            quantum_bytes: 128 * 1024,
            handshake: Duration::from_secs(10),
            linger: Duration::from_secs(8),
            credit_poll: Duration::from_millis(50),
        }
    }
}
