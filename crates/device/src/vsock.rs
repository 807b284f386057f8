//! What a VMM learns about the vsock device of a line (virtio 1.2, section 5.10).

use ::vsock::{EndRegister, GuestEnd};
use guestmem::queue::Records;
use wire::vsock::SocketType;

use crate::frontend::Model;

/// Ring 0: packets to the guest.
pub(crate) const RX: usize = 0;
/// Ring 1: packets from the guest.
pub(crate) const TX: usize = 1;
/// Ring 2: events to the guest. QEMU keeps it to itself.
pub(crate) const EVENT: usize = 2;
/// How many rings a virtio-vsock device has (virtio 1.2, section 5.10.2).
pub(crate) const RINGS: usize = 3;

/// Circuits of a guest that a successor of this process resets. Of what is over, the guest learns when it next sends something.
const KEPT_CIRCUITS: usize = 65_536;

/// Feature bits of the device (virtio 1.2, section 5.10.3).
const FEATURE_STREAM: u64 = 1 << 0;
pub(crate) const FEATURE_SEQPACKET: u64 = 1 << 1;

/// The device of the guest with this context identifier, which is its configuration (virtio 1.2, section 5.10.4).
pub(crate) fn model(cid: u32) -> Model {
    Model {
        features: FEATURE_STREAM | FEATURE_SEQPACKET,
        rings: RINGS,
        config: u64::from(cid).to_le_bytes().to_vec(),
        kept_circuits: KEPT_CIRCUITS,
        may_repeat_regions: false,
    }
}

/// Where the ends of a guest's circuits are kept for a successor of this process: port, peer's CID and port, type of socket.
#[derive(Debug)]
pub(crate) struct KeptEnds(Records);

impl KeptEnds {
    pub(crate) fn new(records: Records) -> KeptEnds {
        KeptEnds(records)
    }
}

impl EndRegister for KeptEnds {
    fn set(&mut self, place: usize, end: GuestEnd) {
        let (cid, port) = end.peer;
        let record = [end.port, cid, port, (end.socket_type as u16).into()];
        self.0.set(place, record);
    }

    fn truncate(&mut self, len: usize) {
        self.0.truncate(len);
    }
}

/// What a predecessor has kept; what makes no sense is left out.
pub(crate) fn kept_ends(records: &[[u32; 4]]) -> Vec<GuestEnd> {
    let end = |[port, peer_cid, peer_port, socket_type]: &[u32; 4]| {
        let of_type = |known: &SocketType| u32::from(*known as u16) == *socket_type;
        let socket_type = [SocketType::Stream, SocketType::SeqPacket]
            .into_iter()
            .find(of_type)?;
        Some(GuestEnd {
            port: *port,
            peer: (*peer_cid, *peer_port),
            socket_type,
        })
    };
    records.iter().filter_map(end).collect()
}
