//! What a VMM learns about a port's network device (virtio 1.2, section 5.1).

use wire::net_header::Offloads;

use crate::frontend::{FEATURE_RING_PACKED, Model};

/// The most pairs of rings that a port may have, so that eight processors of a guest can send without waiting for each other.
pub const MAX_QUEUE_PAIRS: u16 = 8;

// Feature bits of the device (virtio 1.2, section 5.1.3).
const CSUM: u64 = 1 << 0;
const GUEST_CSUM: u64 = 1 << 1;
const MTU: u64 = 1 << 3;
const MAC: u64 = 1 << 5;
const GUEST_TSO4: u64 = 1 << 7;
const GUEST_TSO6: u64 = 1 << 8;
const GUEST_ECN: u64 = 1 << 9;
const HOST_TSO4: u64 = 1 << 11;
const HOST_TSO6: u64 = 1 << 12;
const HOST_ECN: u64 = 1 << 13;
pub(super) const MRG_RXBUF: u64 = 1 << 15;
const STATUS: u64 = 1 << 16;
/// The control queue is the VMM's: QEMU and Cloud Hypervisor answer it themselves, and offer to the guest what the back end allows.
const CTRL_VQ: u64 = 1 << 17;
const CTRL_RX: u64 = 1 << 18;
const CTRL_RX_EXTRA: u64 = 1 << 20;
const CTRL_MAC_ADDR: u64 = 1 << 23;
const MQ: u64 = 1 << 22;
const GUEST_USO4: u64 = 1 << 54;
const GUEST_USO6: u64 = 1 << 55;
const HOST_USO: u64 = 1 << 56;

/// The device of a port. Its configuration is the VMM's as the control queue is: QEMU warns of a network back end that offers one.
pub(super) fn model(queue_pairs: u16) -> Model {
    let multiqueue = if queue_pairs > 1 { MQ } else { 0 };
    Model {
        features: FEATURES | multiqueue,
        rings: 2 * usize::from(queue_pairs),
        config: Vec::new(),
        may_repeat_regions: queue_pairs > 1,
    }
}

const FEATURES: u64 = CSUM
    | GUEST_CSUM
    | MTU
    | MAC
    | GUEST_TSO4
    | GUEST_TSO6
    | GUEST_ECN
    | HOST_TSO4
    | HOST_TSO6
    | HOST_ECN
    | MRG_RXBUF
    | STATUS
    | CTRL_VQ
    | CTRL_RX
    | CTRL_RX_EXTRA
    | CTRL_MAC_ADDR
    | GUEST_USO4
    | GUEST_USO6
    | HOST_USO
    | FEATURE_RING_PACKED;

fn offloads(features: u64, bits: [u64; 6]) -> Offloads {
    let [checksum, tso4, tso6, ecn, uso4, uso6] = bits.map(|bit| features & bit != 0);
    Offloads {
        checksum,
        tso4,
        tso6,
        ecn,
        uso4,
        uso6,
    }
}

/// What a guest that has accepted these features may send.
pub(super) fn sends(features: u64) -> Offloads {
    offloads(
        features,
        [CSUM, HOST_TSO4, HOST_TSO6, HOST_ECN, HOST_USO, HOST_USO],
    )
}

/// What a guest that has accepted these features can be sent.
pub(super) fn takes(features: u64) -> Offloads {
    offloads(
        features,
        [
            GUEST_CSUM, GUEST_TSO4, GUEST_TSO6, GUEST_ECN, GUEST_USO4, GUEST_USO6,
        ],
    )
}
