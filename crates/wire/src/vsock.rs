//! The 44-byte packet header of a virtio socket device (virtio 1.2, section 5.10.6).
//!
//! A [`Header`] is a plain copy in private memory. It is taken out of guest memory once and never read there
//! again, so what was checked is what is used.

/// Size of the header on the wire, in bytes.
pub const HEADER_LEN: usize = 44;

/// The largest payload that one packet may carry, in bytes: what Linux calls `VIRTIO_VSOCK_MAX_PKT_BUF_SIZE`.
pub const MAX_PAYLOAD_LEN: u32 = 64 * 1024;

/// The context identifier of the host, which every guest sees as 2.
pub const HOST_CID: u32 = 2;

/// The lowest context identifier that a guest may have: 0 is the hypervisor, 1 is loopback, 2 is the host.
pub const MIN_GUEST_CID: u32 = 3;

/// `VMADDR_CID_ANY`, a wildcard in socket addresses and never the address of a guest.
pub const CID_ANY: u32 = u32::MAX;

/// Flag of a SHUTDOWN packet: the sender will receive no more data.
pub const SHUTDOWN_RECEIVE: u32 = 1 << 0;
/// Flag of a SHUTDOWN packet: the sender will send no more data.
pub const SHUTDOWN_SEND: u32 = 1 << 1;
/// Both directions of a SHUTDOWN packet.
pub const SHUTDOWN_BOTH: u32 = SHUTDOWN_RECEIVE | SHUTDOWN_SEND;

/// Flag of a SEQPACKET data packet: the last of its message (`VIRTIO_VSOCK_SEQ_EOM`).
pub const SEQPACKET_END_OF_MESSAGE: u32 = 1 << 0;
/// Flag of a SEQPACKET data packet: the last of its record (`VIRTIO_VSOCK_SEQ_EOR`).
pub const SEQPACKET_END_OF_RECORD: u32 = 1 << 1;

/// What a packet asks for (virtio 1.2, section 5.10.6.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u16)]
pub enum Operation {
    /// Open a connection.
    Request = 1,
    /// Accept a connection.
    Response = 2,
    /// Refuse or end a connection at once.
    Reset = 3,
    /// Announce that one or both directions will carry no more data.
    Shutdown = 4,
    /// Carry data.
    Data = 5,
    /// Announce buffer space.
    CreditUpdate = 6,
    /// Ask for an announcement of buffer space.
    CreditRequest = 7,
}

impl Operation {
    /// The operation with this number on the wire, if there is one.
    pub fn from_wire(value: u16) -> Option<Operation> {
        Some(match value {
            1 => Operation::Request,
            2 => Operation::Response,
            3 => Operation::Reset,
            4 => Operation::Shutdown,
            5 => Operation::Data,
            6 => Operation::CreditUpdate,
            7 => Operation::CreditRequest,
            _ => return None,
        })
    }
}

/// The type of a socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
#[repr(u16)]
pub enum SocketType {
    /// A stream of bytes, in order.
    Stream = 1,
    /// A sequence of messages, in order, with their bounds kept.
    SeqPacket = 2,
}

impl SocketType {
    /// The socket type with this number on the wire, if there is one.
    pub fn from_wire(value: u16) -> Option<SocketType> {
        Some(match value {
            1 => SocketType::Stream,
            2 => SocketType::SeqPacket,
            _ => return None,
        })
    }
}

/// A packet header with its fields in the machine's byte order and its operation and type still unchecked:
/// a packet of an unknown kind must be answered, so it must be representable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Header {
    /// Context identifier of the sender. The upper 32 bits are reserved and zero.
    pub src_cid: u64,
    /// Context identifier of the receiver. The upper 32 bits are reserved and zero.
    pub dst_cid: u64,
    /// Port of the sender.
    pub src_port: u32,
    /// Port of the receiver.
    pub dst_port: u32,
    /// Payload that follows the header, in bytes.
    pub len: u32,
    /// A [`SocketType`] by its number.
    pub socket_type: u16,
    /// An [`Operation`] by its number.
    pub operation: u16,
    /// Flags of the operation.
    pub flags: u32,
    /// The sender's whole receive buffer for this connection, in bytes.
    pub buf_alloc: u32,
    /// Bytes that the sender's application has consumed so far, modulo 2^32.
    pub fwd_cnt: u32,
}

impl Header {
    /// Reads a header from its wire form. Every pattern of bytes is some header.
    pub fn from_bytes(bytes: &[u8; HEADER_LEN]) -> Header {
        Header {
            src_cid: u64::from_le_bytes(field(bytes, 0)),
            dst_cid: u64::from_le_bytes(field(bytes, 8)),
            src_port: u32::from_le_bytes(field(bytes, 16)),
            dst_port: u32::from_le_bytes(field(bytes, 20)),
            len: u32::from_le_bytes(field(bytes, 24)),
            socket_type: u16::from_le_bytes(field(bytes, 28)),
            operation: u16::from_le_bytes(field(bytes, 30)),
            flags: u32::from_le_bytes(field(bytes, 32)),
            buf_alloc: u32::from_le_bytes(field(bytes, 36)),
            fwd_cnt: u32::from_le_bytes(field(bytes, 40)),
        }
    }

    /// The wire form of this header.
    pub fn to_bytes(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0..8].copy_from_slice(&self.src_cid.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.dst_cid.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.src_port.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.dst_port.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.len.to_le_bytes());
        bytes[28..30].copy_from_slice(&self.socket_type.to_le_bytes());
        bytes[30..32].copy_from_slice(&self.operation.to_le_bytes());
        bytes[32..36].copy_from_slice(&self.flags.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.buf_alloc.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.fwd_cnt.to_le_bytes());
        bytes
    }
}

/// The `N` bytes at `offset`. Both are constants of the layout above, so the range always lies inside.
fn field<const N: usize>(bytes: &[u8; HEADER_LEN], offset: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[offset..offset + N]);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_survives_its_wire_form() {
        let mut bytes = [0u8; HEADER_LEN];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = index as u8 + 1;
        }
        let header = Header::from_bytes(&bytes);
        assert_eq!(header.src_cid, 0x0807_0605_0403_0201);
        assert_eq!(header.fwd_cnt, 0x2c2b_2a29);
        assert_eq!(header.to_bytes(), bytes);
    }

    #[test]
    fn unknown_operations_and_types_are_told_apart_from_known_ones() {
        assert_eq!(Operation::from_wire(0), None);
        assert_eq!(Operation::from_wire(5), Some(Operation::Data));
        assert_eq!(Operation::from_wire(8), None);
        assert_eq!(SocketType::from_wire(0), None);
        assert_eq!(SocketType::from_wire(2), Some(SocketType::SeqPacket));
        assert_eq!(SocketType::from_wire(3), None);
    }
}
