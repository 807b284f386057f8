//! Ethernet frames, as far as a switch has to understand them.
//!
//! A switch that serves untrusted guests decides on a *snapshot*: a private copy of a frame's first [`SNAPSHOT_LEN`] bytes, which is also
//! what is delivered, so that what was checked is what arrives. Everything here reads such a snapshot and the length of the whole
//! frame; nothing allocates, and every pattern of bytes has a meaning, [`Layer3::Malformed`] at worst.
//!
//! [`Head`] is what each frame needs: addresses, VLAN tag and type. [`Head::layer3`] reads on, for filters and offloads. A reader has to know
//! what it could *not* see: [`Transport::Hidden`] is a header that exists beyond the snapshot, [`Transport::Cut`] one that should exist and does not.

mod address;
mod arp;
mod ipv4;
mod ipv6;
mod neighbour;
#[cfg(test)]
mod tests;
mod transport;

pub use address::{InvalidMacAddress, MacAddress};
pub use arp::Arp;
pub use ipv4::{Fragment, Ipv4};
pub use ipv6::{Ipv6, MAX_EXTENSION_HEADERS};
pub use neighbour::{Neighbour, NeighbourMessage};
pub use transport::{Transport, protocol};

/// How much of a frame is copied out before it is judged, in bytes: two tags, IPv6 with some extension headers, and a TCP header or a neighbour message.
pub const SNAPSHOT_LEN: usize = 128;
/// Two addresses and a type, in bytes.
pub const HEADER_LEN: usize = 14;
/// What an 802.1Q tag adds to it, in bytes.
pub const TAG_LEN: usize = 4;
/// Where a tag is inserted, and found.
pub const TAG_OFFSET: usize = 12;

/// What a frame carries: its type field, which below 0x0600 is a length (IEEE 802.3, section 3.2.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct EtherType(pub u16);

impl EtherType {
    /// IPv4.
    pub const IPV4: EtherType = EtherType(0x0800);
    /// ARP.
    pub const ARP: EtherType = EtherType(0x0806);
    /// IPv6.
    pub const IPV6: EtherType = EtherType(0x86dd);
    /// An 802.1Q tag.
    pub const VLAN: EtherType = EtherType(0x8100);
    /// An 802.1ad tag, of a provider's network.
    pub const PROVIDER_VLAN: EtherType = EtherType(0x88a8);

    /// Whether this is the length of an 802.3 frame rather than a type.
    pub fn is_length(self) -> bool {
        self.0 < 0x0600
    }

    /// Whether another tag follows that receivers look behind: those of 802.1Q and 802.1ad, and what switches from before 802.1ad use for it.
    pub fn is_tag(self) -> bool {
        matches!(
            self,
            EtherType::VLAN | EtherType::PROVIDER_VLAN | EtherType(0x9100 | 0x9200 | 0x9300)
        )
    }
}

/// The two bytes of a tag behind its type (IEEE 802.1Q, section 9.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct TagControl(pub u16);

impl TagControl {
    /// The VLAN, 0 in a tag that carries a priority only.
    pub fn vlan(self) -> u16 {
        self.0 & 0x0fff
    }

    /// The same priority in another VLAN.
    #[must_use]
    pub fn with_vlan(self, vlan: u16) -> TagControl {
        TagControl(self.0 & 0xf000 | vlan & 0x0fff)
    }

    /// The whole tag, as it stands in a frame at [`TAG_OFFSET`].
    pub fn to_bytes(self) -> [u8; TAG_LEN] {
        let [type_high, type_low] = EtherType::VLAN.0.to_be_bytes();
        let [high, low] = self.0.to_be_bytes();
        [type_high, type_low, high, low]
    }
}

/// The Ethernet header of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// Its receiver.
    pub destination: MacAddress,
    /// The claimed sender.
    pub source: MacAddress,
    /// The outermost 802.1Q tag, if there is one.
    pub tag: Option<TagControl>,
    /// What follows that tag.
    pub ethertype: EtherType,
    /// Where that begins, in bytes from the start of the frame.
    pub layer3: usize,
}

impl Head {
    /// Reads the header of a frame, unless the snapshot is too short for it.
    #[inline]
    pub fn parse(snapshot: &[u8]) -> Option<Head> {
        let (header, rest) = snapshot.split_first_chunk::<HEADER_LEN>()?;
        let [d0, d1, d2, d3, d4, d5, s0, s1, s2, s3, s4, s5, t0, t1] = *header;
        let mut head = Head {
            destination: MacAddress([d0, d1, d2, d3, d4, d5]),
            source: MacAddress([s0, s1, s2, s3, s4, s5]),
            tag: None,
            ethertype: EtherType(u16::from_be_bytes([t0, t1])),
            layer3: HEADER_LEN,
        };
        if head.ethertype == EtherType::VLAN {
            let [c0, c1, t0, t1] = *rest.first_chunk::<TAG_LEN>()?;
            head.tag = Some(TagControl(u16::from_be_bytes([c0, c1])));
            head.ethertype = EtherType(u16::from_be_bytes([t0, t1]));
            head.layer3 = HEADER_LEN + TAG_LEN;
        }
        Some(head)
    }

    /// Reads what follows. `snapshot` is what the header was read from, `frame_len` the length of the whole frame in bytes.
    #[inline]
    pub fn layer3(&self, snapshot: &[u8], frame_len: usize) -> Layer3 {
        // A caller that says too little of the frame's length has its snapshot believed.
        let frame_len = frame_len.max(snapshot.len());
        let bytes = snapshot.get(self.layer3..).unwrap_or_default();
        let len = frame_len.saturating_sub(self.layer3);
        match self.ethertype {
            EtherType::IPV4 => Ipv4::parse(bytes, len).map_or(Layer3::Malformed, Layer3::Ipv4),
            EtherType::IPV6 => Ipv6::parse(bytes, len).map_or(Layer3::Malformed, Layer3::Ipv6),
            EtherType::ARP => Arp::parse(bytes).map_or(Layer3::Malformed, Layer3::Arp),
            tag if tag.is_tag() => match bytes.first_chunk() {
                Some(control) => Layer3::Tagged(TagControl(u16::from_be_bytes(*control))),
                None => Layer3::Malformed,
            },
            length if length.is_length() => Layer3::Length {
                // Of an access point the last bit says only that it is a group; Linux does not read what follows it.
                snap: matches!(bytes, [0xaa | 0xab, ..] | [_, 0xaa | 0xab, ..]),
            },
            _ => Layer3::Other,
        }
    }
}

/// What a frame carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layer3 {
    /// ARP for IPv4 over Ethernet.
    Arp(Arp),
    /// IPv4.
    Ipv4(Ipv4),
    /// IPv6.
    Ipv6(Ipv6),
    /// Another tag: the one behind the outermost 802.1Q tag, or one of another kind.
    Tagged(TagControl),
    /// An 802.3 frame with a length.
    Length {
        /// Whether a SNAP header follows (RFC 1042), behind which some receivers find any other type.
        snap: bool,
    },
    /// Anything else.
    Other,
    /// Headers that contradict themselves or the length of the frame.
    Malformed,
}

fn be16(bytes: &[u8], offset: usize) -> Option<u16> {
    let field = bytes.get(offset..)?.first_chunk()?;
    Some(u16::from_be_bytes(*field))
}
