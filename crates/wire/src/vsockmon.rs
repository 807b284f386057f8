//! Packets of vsock as captures show them: what Linux's vsockmon device has in front of each (`linux/vsockmon.h`), and Wireshark dissects.
//!
//! A packet is a *monitor header*, which has both ends, whatever carries it; for a packet of virtio its own header; and the payload, if
//! it is data. Numbers are little-endian.

use crate::vsock::{HEADER_LEN, Header, Operation};

/// Size of the monitor header, in bytes.
pub const MONITOR_HEADER_LEN: usize = 32;

/// Size of everything that stands before the payload of a packet of virtio, in bytes.
pub const HEADERS_LEN: usize = MONITOR_HEADER_LEN + HEADER_LEN;

/// What a packet is for (`enum af_vsockmon_op`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u16)]
pub enum Purpose {
    /// Unknown.
    Unknown = 0,
    /// To open a connection, or to accept one.
    Connect = 1,
    /// To end one, in one direction or as a whole.
    Disconnect = 2,
    /// To keep the account of credit.
    Control = 3,
    /// To carry data.
    Payload = 4,
}

impl Purpose {
    /// What a packet with this operation is for.
    pub fn of(operation: u16) -> Purpose {
        match Operation::from_wire(operation) {
            Some(Operation::Request | Operation::Response) => Purpose::Connect,
            Some(Operation::Reset | Operation::Shutdown) => Purpose::Disconnect,
            Some(Operation::CreditUpdate | Operation::CreditRequest) => Purpose::Control,
            Some(Operation::Data) => Purpose::Payload,
            None => Purpose::Unknown,
        }
    }
}

/// An end of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// Context identifier.
    pub cid: u64,
    /// Port.
    pub port: u32,
}

// What carries a packet (`enum af_vsockmon_transport`).
const NO_TRANSPORT: u16 = 1;
const VIRTIO: u16 = 2;

/// All that stands before the payload of a packet of virtio.
pub fn virtio_headers(header: &Header) -> [u8; HEADERS_LEN] {
    let mut bytes = [0; HEADERS_LEN];
    let source = Place {
        cid: header.src_cid,
        port: header.src_port,
    };
    let destination = Place {
        cid: header.dst_cid,
        port: header.dst_port,
    };
    let purpose = Purpose::of(header.operation);
    let (monitor, own) = bytes.split_at_mut(MONITOR_HEADER_LEN);
    monitor.copy_from_slice(&monitor_header(
        source,
        destination,
        purpose,
        (VIRTIO, HEADER_LEN as u16),
    ));
    own.copy_from_slice(&header.to_bytes());
    bytes
}

/// What stands before the payload of a packet that has no header of its own, as a stream carried it.
pub fn plain_header(
    source: Place,
    destination: Place,
    purpose: Purpose,
) -> [u8; MONITOR_HEADER_LEN] {
    monitor_header(source, destination, purpose, (NO_TRANSPORT, 0))
}

/// A monitor header in front of a transport's header, of this kind and length.
fn monitor_header(
    source: Place,
    destination: Place,
    purpose: Purpose,
    (transport, len): (u16, u16),
) -> [u8; MONITOR_HEADER_LEN] {
    let mut bytes = [0; MONITOR_HEADER_LEN];
    bytes[0..8].copy_from_slice(&source.cid.to_le_bytes());
    bytes[8..16].copy_from_slice(&destination.cid.to_le_bytes());
    bytes[16..20].copy_from_slice(&source.port.to_le_bytes());
    bytes[20..24].copy_from_slice(&destination.port.to_le_bytes());
    bytes[24..26].copy_from_slice(&(purpose as u16).to_le_bytes());
    bytes[26..28].copy_from_slice(&transport.to_le_bytes());
    bytes[28..30].copy_from_slice(&len.to_le_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packet_of_virtio_has_both_headers() {
        let header = Header {
            src_cid: 3,
            dst_cid: 2,
            src_port: 0x0a0b_0c0d,
            dst_port: 5432,
            len: 7,
            socket_type: 1,
            operation: Operation::Data as u16,
            ..Header::default()
        };
        let bytes = virtio_headers(&header);
        assert_eq!(bytes[..8], [3, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[8..16], [2, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[16..24], [0x0d, 0x0c, 0x0b, 0x0a, 0x38, 0x15, 0, 0]);
        assert_eq!(bytes[24..32], [4, 0, 2, 0, 44, 0, 0, 0]);
        assert_eq!(bytes[32..], header.to_bytes());
    }

    #[test]
    fn a_packet_without_a_header_of_its_own_says_so() {
        let place = |cid, port| Place { cid, port };
        let bytes = plain_header(place(9, 1), place(2, 1007), Purpose::Connect);
        assert_eq!(bytes[24..], [1, 0, 1, 0, 0, 0, 0, 0]);
    }

    #[test]
    fn every_operation_has_a_purpose() {
        let purposes: Vec<u16> = (0..9)
            .map(|operation| Purpose::of(operation) as u16)
            .collect();
        assert_eq!(purposes, [0, 1, 1, 2, 2, 4, 3, 3, 0]);
    }
}
