//! MAC addresses.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The address of a network interface (EUI-48).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// Broadcast.
    pub const BROADCAST: MacAddress = MacAddress([0xff; 6]);
    /// All zero: no frame may be from here or to here.
    pub const ZERO: MacAddress = MacAddress([0; 6]);

    /// Whether this is a group address; broadcast is one, too.
    pub fn is_multicast(self) -> bool {
        self.0[0] & 1 != 0
    }

    /// Whether this is the broadcast address.
    pub fn is_broadcast(self) -> bool {
        self == MacAddress::BROADCAST
    }

    /// Whether it is locally administered, not assigned by a vendor.
    pub fn is_local(self) -> bool {
        self.0[0] & 2 != 0
    }

    /// Whether one interface may have it: neither a group nor zero.
    pub fn is_assignable(self) -> bool {
        !self.is_multicast() && self != MacAddress::ZERO
    }

    /// Whether it is for the next switch only and never forwarded: 01:80:C2:00:00:00 to :0F (IEEE 802.1Q, section 8.6.3).
    pub fn is_link_local(self) -> bool {
        self.0[..5] == [0x01, 0x80, 0xc2, 0x00, 0x00] && self.0[5] <= 0x0f
    }

    /// Its 48 bits as a number.
    #[inline]
    pub fn to_u64(self) -> u64 {
        let [a, b, c, d, e, f] = self.0;
        u64::from_be_bytes([0, 0, a, b, c, d, e, f])
    }

    /// The address with these 48 bits.
    pub fn from_u64(bits: u64) -> MacAddress {
        let [_, _, a, b, c, d, e, f] = bits.to_be_bytes();
        MacAddress([a, b, c, d, e, f])
    }

    /// The last 64 bits of the IPv6 addresses that a host makes of it by itself (RFC 4291, appendix A).
    pub fn interface_identifier(self) -> [u8; 8] {
        let [a, b, c, d, e, f] = self.0;
        [a ^ 2, b, c, 0xff, 0xfe, d, e, f]
    }

    /// The address whose [`interface_identifier`](Self::interface_identifier) this is, if it has that form.
    pub fn from_interface_identifier(identifier: [u8; 8]) -> Option<MacAddress> {
        match identifier {
            [a, b, c, 0xff, 0xfe, d, e, f] => Some(MacAddress([a ^ 2, b, c, d, e, f])),
            _ => None,
        }
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, f] = self.0;
        write!(formatter, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
    }
}

impl fmt::Debug for MacAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, formatter)
    }
}

/// A text that is no MAC address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error(
    "a MAC address is six numbers of two hexadecimal digits with colons between them, such as 52:54:00:12:34:56"
)]
pub struct InvalidMacAddress;

impl FromStr for MacAddress {
    type Err = InvalidMacAddress;

    fn from_str(text: &str) -> Result<MacAddress, InvalidMacAddress> {
        let mut parts = text.split([':', '-']);
        let mut address = MacAddress::ZERO;
        for byte in &mut address.0 {
            let part = parts.next().ok_or(InvalidMacAddress)?;
            // The parser of numbers would take a sign.
            if part.len() != 2 || !part.bytes().all(|digit| digit.is_ascii_hexdigit()) {
                return Err(InvalidMacAddress);
            }
            *byte = u8::from_str_radix(part, 16).map_err(|_| InvalidMacAddress)?;
        }
        match parts.next() {
            None => Ok(address),
            Some(_) => Err(InvalidMacAddress),
        }
    }
}

impl TryFrom<String> for MacAddress {
    type Error = InvalidMacAddress;

    fn try_from(text: String) -> Result<MacAddress, InvalidMacAddress> {
        text.parse()
    }
}

impl From<MacAddress> for String {
    fn from(address: MacAddress) -> String {
        address.to_string()
    }
}
