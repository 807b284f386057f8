//! What has been counted on a line.

use crate::{Reason, SetUpTimes};

/// Counters of one line since it was added. All only grow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counters {
    /// Packets that the guest sent.
    pub packets_from_guest: u64,
    /// Packets that were sent to the guest.
    pub packets_to_guest: u64,
    /// Payload that the guest sent, in bytes.
    pub bytes_from_guest: u64,
    /// Payload that was sent to the guest, in bytes.
    pub bytes_to_guest: u64,
    /// Circuits set up, by either side.
    pub circuits_opened: u64,
    /// Packets dropped because their source was not the line's own context identifier.
    pub spoofed: u64,
    /// Packets dropped because nothing could be made of them.
    pub malformed: u64,
    /// Times that the guest was not heard for a moment, as it had sent too many packets without payload.
    pub throttles: u64,
    /// Resets that were due for packets without a circuit and were dropped, as too many were waiting.
    pub resets_dropped: u64,
    /// How long calls took to be answered by the guest, or for the guest by the host.
    pub set_up: SetUpTimes,
    /// Dials refused and circuits cut short, by [`Reason::index`].
    pub ended: [u64; Reason::ALL.len()],
}

/// By hand, since the standard library has it for arrays of up to 32 elements.
impl Default for Counters {
    fn default() -> Counters {
        Counters {
            packets_from_guest: 0,
            packets_to_guest: 0,
            bytes_from_guest: 0,
            bytes_to_guest: 0,
            circuits_opened: 0,
            spoofed: 0,
            malformed: 0,
            throttles: 0,
            resets_dropped: 0,
            set_up: SetUpTimes::default(),
            ended: [0; Reason::ALL.len()],
        }
    }
}
