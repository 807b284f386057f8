//! The addresses of a network: the one at which the network itself answers, and those around it.

use std::fmt;
use std::net::{Ipv4Addr, Ipv6Addr};

use wire::ethernet::MacAddress;

/// The IPv4 addresses of a network.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv4Subnet {
    /// The address at which the network itself answers: an address of a host in the subnet.
    pub own: Ipv4Addr,
    /// How many leading bits the addresses of the subnet have in common.
    pub prefix_len: u8,
}

/// The IPv6 addresses of a network: those whose first 64 bits are the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ipv6Subnet {
    /// The address at which the network itself answers.
    pub own: Ipv6Addr,
}

impl Ipv4Subnet {
    /// The subnet's first address, which belongs to no host.
    pub fn base(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.own.to_bits() & !self.host_mask())
    }

    /// The subnet's last address, for broadcasts.
    pub fn broadcast(self) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.own.to_bits() | self.host_mask())
    }

    /// The address of the host with this number, if a host can have it.
    pub fn host(self, number: u32) -> Option<Ipv4Addr> {
        let is_host = number > 0 && number < self.host_mask();
        is_host.then(|| Ipv4Addr::from_bits(self.base().to_bits() | number))
    }

    /// The number of the host with this address, if it is one of the subnet.
    pub fn number(self, address: Ipv4Addr) -> Option<u32> {
        let number = address.to_bits() ^ self.base().to_bits();
        (self.host(number) == Some(address)).then_some(number)
    }

    /// Whether the two have an address in common.
    pub fn overlaps(self, other: Ipv4Subnet) -> bool {
        self.base() <= other.broadcast() && other.base() <= self.broadcast()
    }

    fn host_mask(self) -> u32 {
        u32::MAX
            .checked_shr(u32::from(self.prefix_len))
            .unwrap_or(0)
    }
}

impl fmt::Display for Ipv4Subnet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/{}", self.own, self.prefix_len)
    }
}

impl Ipv6Subnet {
    /// The first 64 bits of its addresses.
    pub fn prefix(self) -> u64 {
        // The upper half fits.
        (self.own.to_bits() >> 64) as u64
    }

    /// The address that a guest makes for itself from the prefix and its MAC address (RFC 4291, appendix A), unless it was set otherwise.
    pub fn of_mac(self, mac: MacAddress) -> Ipv6Addr {
        let identifier = u64::from_be_bytes(mac.interface_identifier());
        Ipv6Addr::from_bits(u128::from(self.prefix()) << 64 | u128::from(identifier))
    }
}

impl fmt::Display for Ipv6Subnet {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}/64", self.own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subnet(own: [u8; 4], prefix_len: u8) -> Ipv4Subnet {
        let own = own.into();
        Ipv4Subnet { own, prefix_len }
    }

    #[test]
    fn hosts_are_between_the_first_address_and_the_last() {
        let small = subnet([10, 64, 7, 9], 30);
        assert_eq!(small.base(), Ipv4Addr::new(10, 64, 7, 8));
        assert_eq!(small.broadcast(), Ipv4Addr::new(10, 64, 7, 11));
        let hosts = [0, 1, 2, 3, 4].map(|number| small.host(number).map(|host| host.octets()[3]));
        assert_eq!(hosts, [None, Some(9), Some(10), None, None]);
        let numbers = [7, 8, 9, 10, 11, 12].map(|last| small.number([10, 64, 7, last].into()));
        assert_eq!(numbers, [None, None, Some(1), Some(2), None, None]);
        let large = subnet([10, 64, 0, 1], 16);
        assert_eq!(large.host(65_534), Some([10, 64, 255, 254].into()));
        assert_eq!(large.host(65_535), None);
    }

    #[test]
    fn subnets_overlap_when_one_is_inside_the_other() {
        let wide = subnet([10, 64, 0, 1], 16);
        assert!(wide.overlaps(subnet([10, 64, 9, 1], 24)));
        assert!(subnet([10, 64, 9, 1], 24).overlaps(wide));
        assert!(!wide.overlaps(subnet([10, 65, 0, 1], 24)));
    }

    #[test]
    fn a_guest_makes_its_address_of_prefix_and_mac() {
        let own = "fd00:1:2:3::1".parse().unwrap();
        let found = Ipv6Subnet { own }.of_mac(MacAddress([0x02, 0, 0x5e, 0x10, 0, 0xff]));
        assert_eq!(found.to_string(), "fd00:1:2:3:0:5eff:fe10:ff");
    }
}
