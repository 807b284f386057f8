//! The header before each frame of a virtio network device (virtio 1.2, section 5.1.6), and what may be believed of it.
//!
//! A driver that leaves checksums and segmentation to the device describes here what has yet to be done. Every field is the guest's and may be wrong;
//! worse, completing a checksum *writes* two bytes at a place that the guest has chosen, after filters have checked the frame. So
//! [`NetHeader::check`] holds the description against the frame itself and makes an [`Offload`] of it, in which the places are those of the frame's
//! own headers. The receiver's header is written anew from that, never copied from the sender.

use thiserror::Error;

use crate::ethernet::{
    Fragment, HEADER_LEN as ETHERNET_HEADER_LEN, Head, Layer3, Neighbour, Transport,
};

#[cfg(test)]
mod tests;

/// Length of the header where `VIRTIO_F_VERSION_1` was negotiated, in bytes.
pub const NET_HEADER_LEN: usize = 12;

/// The most segments that one frame may ask to be cut into: 64 KiB at 48 bytes each, which is the smallest segment that Linux's TCP makes.
pub const MAX_SEGMENTS: usize = 1366;

/// The same for UDP: as many as Linux makes of one datagram's memory.
pub const MAX_UDP_SEGMENTS: usize = 128;

/// The longest headers that are repeated before each segment, in bytes: Ethernet with a tag, IPv6, extensions and TCP with room to spare.
pub const MAX_SEGMENT_HEADER_LEN: usize = 256;

/// Flag: the checksum of layer 4 has yet to be completed.
pub const FLAG_NEEDS_CHECKSUM: u8 = 1;
/// Flag, from device to driver: the checksum was found right.
pub const FLAG_DATA_VALID: u8 = 2;

/// No segmentation.
pub const GSO_NONE: u8 = 0;
/// Segmentation of TCP over IPv4.
pub const GSO_TCP4: u8 = 1;
/// Fragmentation of UDP, which is not offered.
pub const GSO_UDP_FRAGMENTS: u8 = 3;
/// Segmentation of TCP over IPv6.
pub const GSO_TCP6: u8 = 4;
/// Segmentation of UDP over IPv4 or IPv6.
pub const GSO_UDP: u8 = 5;
/// Beside a type for TCP: the segment says that congestion was answered, which only the first of its segments may say.
pub const GSO_ECN: u8 = 0x80;

/// The header as it stands before a frame: numbers in the machine's byte order, nothing checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NetHeader {
    /// [`FLAG_NEEDS_CHECKSUM`] and others.
    pub flags: u8,
    /// [`GSO_TCP4`] and others.
    pub gso_type: u8,
    /// Length of all headers that are repeated before each segment, in bytes; a hint.
    pub header_len: u16,
    /// Payload of each segment but the last, in bytes.
    pub gso_size: u16,
    /// Where the checksum begins, in bytes from the start of the frame.
    pub checksum_start: u16,
    /// Where it is to be written, in bytes from there.
    pub checksum_offset: u16,
    /// How many of the receiver's buffers the frame takes; for the device to say.
    pub buffers: u16,
}

impl NetHeader {
    /// Reads a header. Every pattern of bytes is one.
    #[inline]
    pub fn decode(bytes: &[u8; NET_HEADER_LEN]) -> NetHeader {
        let field = |offset: usize| u16::from_le_bytes([bytes[offset], bytes[offset + 1]]);
        NetHeader {
            flags: bytes[0],
            gso_type: bytes[1],
            header_len: field(2),
            gso_size: field(4),
            checksum_start: field(6),
            checksum_offset: field(8),
            buffers: field(10),
        }
    }

    /// The header's bytes.
    #[inline]
    pub fn encode(&self) -> [u8; NET_HEADER_LEN] {
        let mut bytes = [self.flags, self.gso_type, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        let fields = [
            self.header_len,
            self.gso_size,
            self.checksum_start,
            self.checksum_offset,
            self.buffers,
        ];
        for (place, field) in bytes[2..].chunks_exact_mut(2).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    /// What is left to do for a frame, if that is plain from the frame itself and was agreed on.
    ///
    /// `head` is the frame's snapshot, `frame_len` the frame's length in bytes, `negotiated` what the sender may leave to others.
    /// Flags that are not known are ignored, as the specification asks.
    #[inline]
    pub fn check(
        &self,
        head: &[u8],
        frame_len: usize,
        negotiated: Offloads,
    ) -> Result<Offload, NetHeaderError> {
        if self.flags & FLAG_NEEDS_CHECKSUM == 0 && self.gso_type == GSO_NONE {
            // The plain case. Lengths of headers mean nothing then, but those that cannot be are no honest driver's.
            return match usize::from(self.header_len) > frame_len {
                true => Err(NetHeaderError::HeaderLen {
                    header_len: self.header_len,
                    frame_len,
                }),
                false => Ok(Offload::NONE),
            };
        }
        self.check_offload(head, frame_len, negotiated)
    }

    fn check_offload(
        &self,
        snapshot: &[u8],
        frame_len: usize,
        negotiated: Offloads,
    ) -> Result<Offload, NetHeaderError> {
        if usize::from(self.header_len) > frame_len {
            return Err(NetHeaderError::HeaderLen {
                header_len: self.header_len,
                frame_len,
            });
        }
        if self.flags & FLAG_NEEDS_CHECKSUM == 0 {
            return Err(NetHeaderError::SegmentsWithoutChecksum);
        }
        if !negotiated.checksum {
            return Err(NetHeaderError::NotNegotiated { gso_type: GSO_NONE });
        }
        let packet = Packet::parse(snapshot, frame_len).ok_or(NetHeaderError::Unreadable)?;
        let checksum = Checksum {
            start: self.checksum_start,
            offset: self.checksum_offset,
        };
        packet.check_place(checksum, frame_len)?;
        let segmentation = match self.gso_type {
            GSO_NONE => None,
            _ => Some(self.check_segments(&packet, frame_len, negotiated)?),
        };
        Ok(Offload {
            checksum: Some(checksum),
            segmentation,
        })
    }

    fn check_segments(
        &self,
        packet: &Packet,
        frame_len: usize,
        negotiated: Offloads,
    ) -> Result<Segmentation, NetHeaderError> {
        let gso_type = self.gso_type;
        let ecn = gso_type & GSO_ECN != 0;
        let (kind, is_tcp) = match (gso_type & !GSO_ECN, packet.is_ipv6) {
            (GSO_TCP4, false) => (SegmentKind::Tcp4, true),
            (GSO_TCP6, true) => (SegmentKind::Tcp6, true),
            (GSO_UDP, false) if !ecn => (SegmentKind::Udp4, false),
            (GSO_UDP, true) if !ecn => (SegmentKind::Udp6, false),
            _ => return Err(NetHeaderError::WrongType { gso_type }),
        };
        let segmentation = Segmentation {
            kind,
            ecn,
            size: self.gso_size,
            header_len: 0,
        };
        if !segmentation.is_taken_by(negotiated) {
            return Err(NetHeaderError::NotNegotiated { gso_type });
        }
        let layer4_len = match packet.transport {
            Transport::Tcp { header_len, .. } if is_tcp => header_len,
            Transport::Udp { .. } if !is_tcp => 8,
            _ => return Err(NetHeaderError::WrongType { gso_type }),
        };
        // What is cut is all of the frame: padding behind the packet would become payload.
        if usize::from(self.checksum_start) != packet.layer4 || packet.end != frame_len {
            return Err(NetHeaderError::Unreadable);
        }
        let header_len = packet.layer4 + layer4_len;
        let payload_len = frame_len.saturating_sub(header_len);
        if self.gso_size == 0 || payload_len == 0 {
            return Err(NetHeaderError::NoPayload {
                gso_size: self.gso_size,
                payload_len,
            });
        }
        let segments = payload_len.div_ceil(usize::from(self.gso_size));
        let max = if is_tcp {
            MAX_SEGMENTS
        } else {
            MAX_UDP_SEGMENTS
        };
        if segments > max {
            return Err(NetHeaderError::TooManySegments { segments, max });
        }
        match u16::try_from(header_len) {
            Ok(len) if header_len <= MAX_SEGMENT_HEADER_LEN => Ok(Segmentation {
                header_len: len,
                ..segmentation
            }),
            _ => Err(NetHeaderError::Unreadable),
        }
    }
}

/// What the check needs to know of a frame that leaves its checksum to others.
pub(crate) struct Packet {
    pub(crate) is_ipv6: bool,
    /// Where IP begins.
    pub(crate) layer3: usize,
    /// Where the header behind IP begins.
    pub(crate) layer4: usize,
    /// Where the IP packet ends.
    pub(crate) end: usize,
    pub(crate) transport: Transport,
}

impl Packet {
    /// Nothing for frames whose header behind IP is not in plain sight: fragments, other types, and what contradicts itself.
    pub(crate) fn parse(snapshot: &[u8], frame_len: usize) -> Option<Packet> {
        let head = Head::parse(snapshot)?;
        let (is_ipv6, header_len, total_len, fragment, transport) =
            match head.layer3(snapshot, frame_len) {
                Layer3::Ipv4(ip) => (
                    false,
                    ip.header_len,
                    ip.total_len,
                    ip.fragment,
                    ip.transport,
                ),
                Layer3::Ipv6(ip) => (true, ip.header_len, ip.total_len, ip.fragment, ip.transport),
                _ => return None,
            };
        let readable = !matches!(transport, Transport::Hidden | Transport::Cut);
        (readable && fragment == Fragment::Whole).then_some(Packet {
            is_ipv6,
            layer3: head.layer3,
            layer4: head.layer3 + header_len,
            end: head.layer3 + total_len,
            transport,
        })
    }

    /// Whether writing a checksum there changes nothing that a filter has read: in headers that are understood it may
    /// only go where their checksum is. With UDP it may be that of a packet inside, as tunnels have it.
    fn check_place(&self, checksum: Checksum, frame_len: usize) -> Result<(), NetHeaderError> {
        let (start, offset) = (usize::from(checksum.start), usize::from(checksum.offset));
        let own = start == self.layer4;
        let right = match self.transport {
            Transport::Tcp { .. } => own && offset == 16,
            Transport::Udp { .. } => (own && offset == 6) || start >= self.layer4 + 8,
            // Neighbour discovery is judged with its checksum, which is not to be written again.
            Transport::Icmpv6 { kind, .. } => own && offset == 2 && !Neighbour::has_type(kind),
            _ => start >= self.layer4,
        };
        if right && start >= ETHERNET_HEADER_LEN && start + offset + 2 <= frame_len {
            Ok(())
        } else {
            Err(NetHeaderError::ChecksumPlace {
                start: checksum.start,
                offset: checksum.offset,
                layer4: self.layer4,
                frame_len,
            })
        }
    }
}

/// What a network device can leave to the other side, or take from it unfinished.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Offloads {
    /// Checksums of layer 4.
    pub checksum: bool,
    /// Segmentation of TCP over IPv4.
    pub tso4: bool,
    /// Segmentation of TCP over IPv6.
    pub tso6: bool,
    /// Segmentation of TCP that says congestion was answered.
    pub ecn: bool,
    /// Segmentation of UDP over IPv4.
    pub uso4: bool,
    /// Segmentation of UDP over IPv6.
    pub uso6: bool,
}

impl Offloads {
    /// Nothing is offloaded.
    pub const NONE: Offloads = Offloads {
        checksum: false,
        tso4: false,
        tso6: false,
        ecn: false,
        uso4: false,
        uso6: false,
    };
    /// Everything.
    pub const ALL: Offloads = Offloads {
        checksum: true,
        tso4: true,
        tso6: true,
        ecn: true,
        uso4: true,
        uso6: true,
    };
}

/// A checksum that has yet to be completed: the sum from `start` to the end of the frame is to be written at `start + offset`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Checksum {
    /// In bytes from the start of the frame.
    pub start: u16,
    /// In bytes from there.
    pub offset: u16,
}

/// Into what a frame is to be cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SegmentKind {
    /// TCP over IPv4.
    Tcp4,
    /// TCP over IPv6.
    Tcp6,
    /// UDP over IPv4.
    Udp4,
    /// UDP over IPv6.
    Udp6,
}

/// How a frame is to be cut into several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segmentation {
    /// Into what.
    pub kind: SegmentKind,
    /// Whether it says that congestion was answered.
    pub ecn: bool,
    /// Payload of each but the last, in bytes. Not 0.
    pub size: u16,
    /// Length of all headers that are repeated before each, in bytes, as found in the frame.
    pub header_len: u16,
}

impl Segmentation {
    /// Whether a receiver takes the frame uncut.
    pub fn is_taken_by(&self, receiver: Offloads) -> bool {
        let kind = match self.kind {
            SegmentKind::Tcp4 => receiver.tso4,
            SegmentKind::Tcp6 => receiver.tso6,
            SegmentKind::Udp4 => receiver.uso4,
            SegmentKind::Udp6 => receiver.uso6,
        };
        kind && receiver.checksum && (receiver.ecn || !self.ecn)
    }
}

/// What is left to do for a frame: checked, and in terms of the frame's own headers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Offload {
    /// The checksum of layer 4.
    pub checksum: Option<Checksum>,
    /// Segmentation. If there is some, there is a checksum too.
    pub segmentation: Option<Segmentation>,
}

/// What to do before a frame goes to a receiver.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Finish {
    /// Nothing: the receiver takes the frame as it is.
    Nothing,
    /// The checksum is to be completed.
    Checksum(Checksum),
    /// The frame is to be cut into segments, whose checksums are complete then.
    Segments,
}

impl Offload {
    /// The frame is finished.
    pub const NONE: Offload = Offload {
        checksum: None,
        segmentation: None,
    };

    /// What has to be done for a receiver that takes no more than this.
    #[inline]
    pub fn finish_for(&self, receiver: Offloads) -> Finish {
        match (self.segmentation, self.checksum) {
            (Some(segmentation), _) if !segmentation.is_taken_by(receiver) => Finish::Segments,
            (None, Some(checksum)) if !receiver.checksum => Finish::Checksum(checksum),
            _ => Finish::Nothing,
        }
    }

    /// The length of the longest frame that this one stands for, in bytes: its own, or that of its segments.
    #[inline]
    pub fn longest_segment_len(&self, frame_len: usize) -> usize {
        self.segmentation.map_or(frame_len, |segmentation| {
            frame_len.min(usize::from(segmentation.header_len) + usize::from(segmentation.size))
        })
    }

    /// How many frames this one stands for, with those that it is to be cut into.
    #[inline]
    pub fn segments(&self, frame_len: usize) -> usize {
        self.segmentation.map_or(1, |segmentation| {
            let payload_len = frame_len.saturating_sub(segmentation.header_len.into());
            payload_len.div_ceil(usize::from(segmentation.size).max(1))
        })
    }

    /// The offload of the same frame with `inserted` bytes more, or fewer if negative, before its layer 3: a tag put in or taken out.
    #[must_use]
    pub fn shifted(&self, inserted: i16) -> Offload {
        Offload {
            checksum: self.checksum.map(|checksum| Checksum {
                start: checksum.start.saturating_add_signed(inserted),
                ..checksum
            }),
            segmentation: self.segmentation.map(|segmentation| Segmentation {
                header_len: segmentation.header_len.saturating_add_signed(inserted),
                ..segmentation
            }),
        }
    }

    /// The header for a receiver that takes the frame as it is, in `buffers` of its buffers.
    #[inline]
    pub fn header(&self, buffers: u16) -> NetHeader {
        let mut header = NetHeader {
            buffers,
            ..NetHeader::default()
        };
        if let Some(checksum) = self.checksum {
            header.flags = FLAG_NEEDS_CHECKSUM;
            header.checksum_start = checksum.start;
            header.checksum_offset = checksum.offset;
        }
        if let Some(segmentation) = self.segmentation {
            header.gso_type = match segmentation.kind {
                SegmentKind::Tcp4 => GSO_TCP4,
                SegmentKind::Tcp6 => GSO_TCP6,
                SegmentKind::Udp4 | SegmentKind::Udp6 => GSO_UDP,
            };
            if segmentation.ecn {
                header.gso_type |= GSO_ECN;
            }
            header.gso_size = segmentation.size;
            header.header_len = segmentation.header_len;
        }
        header
    }
}

/// Why a header is not believed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum NetHeaderError {
    /// Headers longer than the frame.
    #[error("the headers are said to be {header_len} bytes long, the frame is {frame_len}")]
    HeaderLen {
        /// What the header says.
        header_len: u16,
        /// The frame's length in bytes.
        frame_len: usize,
    },
    /// A type of segmentation, or with [`GSO_NONE`] a checksum, that the driver did not negotiate.
    #[error(
        "an offload is used that the driver did not negotiate (gso_type {gso_type:#x}, 0 is the checksum)"
    )]
    NotNegotiated {
        /// What the header says.
        gso_type: u8,
    },
    /// A type of segmentation that does not exist or is not for what the frame carries.
    #[error("gso_type {gso_type:#x} does not fit what the frame carries")]
    WrongType {
        /// What the header says.
        gso_type: u8,
    },
    /// Segmentation without a checksum to complete.
    #[error("a frame is to be segmented that does not leave its checksum to be completed")]
    SegmentsWithoutChecksum,
    /// The checksum is not where the frame's headers have theirs.
    #[error(
        "a checksum from {start} on, to be written {offset} bytes further, does not fit a frame of {frame_len} bytes whose layer 4 begins at {layer4}"
    )]
    ChecksumPlace {
        /// What the header says.
        start: u16,
        /// What the header says.
        offset: u16,
        /// Where layer 4 begins.
        layer4: usize,
        /// The frame's length in bytes.
        frame_len: usize,
    },
    /// The frame's own headers do not say where layer 4 is: fragments, other types, contradictions, padding behind what is to be segmented.
    #[error("an offload is asked for, but the frame's headers do not say where it applies")]
    Unreadable,
    /// Nothing to cut, or into nothing.
    #[error("a payload of {payload_len} bytes cannot be cut into segments of {gso_size}")]
    NoPayload {
        /// What the header says.
        gso_size: u16,
        /// How much there is, in bytes.
        payload_len: usize,
    },
    /// More segments than [`MAX_SEGMENTS`], or [`MAX_UDP_SEGMENTS`].
    #[error("a frame would become {segments} segments, more than {max}")]
    TooManySegments {
        /// How many.
        segments: usize,
        /// How many there may be.
        max: usize,
    },
}
