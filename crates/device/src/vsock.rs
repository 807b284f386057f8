//! What a VMM learns about the vsock device of a line (virtio 1.2, section 5.10).

use crate::frontend::Model;

/// Ring 0: packets to the guest.
pub(crate) const RX: usize = 0;
/// Ring 1: packets from the guest.
pub(crate) const TX: usize = 1;
/// Ring 2: events to the guest. QEMU keeps it to itself.
pub(crate) const EVENT: usize = 2;
/// How many rings a virtio-vsock device has (virtio 1.2, section 5.10.2).
pub(crate) const RINGS: usize = 3;

/// Feature bits of the device (virtio 1.2, section 5.10.3).
const FEATURE_STREAM: u64 = 1 << 0;
pub(crate) const FEATURE_SEQPACKET: u64 = 1 << 1;

/// The device of the guest with this context identifier, which is its configuration (virtio 1.2, section 5.10.4).
pub(crate) fn model(cid: u32) -> Model {
    Model {
        features: FEATURE_STREAM | FEATURE_SEQPACKET,
        rings: RINGS,
        config: u64::from(cid).to_le_bytes().to_vec(),
        may_repeat_regions: false,
    }
}
