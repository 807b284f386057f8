//! Socket addresses as programs have them in their memory, and the name by which a carried socket knows them.

use rustix::net::SocketAddrUnix;

/// The family of vsock addresses (`AF_VSOCK`).
pub const AF_VSOCK: u16 = 40;

/// The family of UNIX sockets.
const AF_UNIX: u16 = 1;

/// The longest address that is read, in bytes. It is what the kernel takes at most (`sockaddr_storage`).
pub const MAX_ADDRESS_LEN: usize = 128;

/// The length of `sockaddr_vm`, in bytes.
pub const VSOCK_ADDRESS_LEN: usize = 16;

/// The CID of the host.
const CID_HOST: u32 = 2;

/// Where a program wants to connect to, as far as that may concern us.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Address {
    /// A port of a VM.
    Vsock(VsockAddress),
    /// A UNIX socket in the file system.
    Path(Vec<u8>),
    /// An address of AF_VSOCK that is too short to be one.
    TooShort,
    /// Anything else.
    Other,
}

/// A CID and a port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VsockAddress {
    /// The CID.
    pub cid: u32,
    /// The port.
    pub port: u32,
}

impl Address {
    /// Reads what the program gave to the kernel.
    pub fn parse(bytes: &[u8]) -> Address {
        let Some((family, rest)) = bytes.split_first_chunk() else {
            return Address::Other;
        };
        match u16::from_ne_bytes(*family) {
            AF_VSOCK => VsockAddress::parse(bytes).map_or(Address::TooShort, Address::Vsock),
            AF_UNIX => {
                let len = rest.iter().position(|byte| *byte == 0);
                match &rest[..len.unwrap_or(rest.len())] {
                    // Abstract names begin with a zero.
                    [] => Address::Other,
                    path => Address::Path(path.to_owned()),
                }
            }
            _ => Address::Other,
        }
    }
}

impl VsockAddress {
    fn parse(bytes: &[u8]) -> Option<VsockAddress> {
        let bytes: &[u8; VSOCK_ADDRESS_LEN] = bytes.first_chunk()?;
        let number = |at| Some(u32::from_ne_bytes(*bytes.get(at..)?.first_chunk()?));
        Some(VsockAddress {
            port: number(4)?,
            cid: number(8)?,
        })
    }

    /// As `sockaddr_vm`.
    pub fn to_bytes(self) -> [u8; VSOCK_ADDRESS_LEN] {
        let mut bytes = [0; VSOCK_ADDRESS_LEN];
        bytes[..2].copy_from_slice(&AF_VSOCK.to_ne_bytes());
        bytes[4..8].copy_from_slice(&self.port.to_ne_bytes());
        bytes[8..12].copy_from_slice(&self.cid.to_ne_bytes());
        bytes
    }
}

/// The abstract name of a socket that is connected for AF_VSOCK: what it is connected to, and which port of the host it is itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CarriedName {
    /// The other end.
    pub peer: VsockAddress,
    /// The host's port.
    pub host_port: u32,
}

/// How such names begin.
const PREFIX: &str = "ringdown-run/";

impl CarriedName {
    /// The name, made the only one of its kind by a number of its own.
    pub fn to_address(self, unique: u64) -> rustix::io::Result<SocketAddrUnix> {
        let CarriedName { peer, host_port } = self;
        let VsockAddress { cid, port } = peer;
        let name = format!("{PREFIX}{cid}/{port}/{host_port}/{unique:x}");
        SocketAddrUnix::new_abstract_name(name.as_bytes())
    }

    /// Reads the name of a socket, if it is one of ours. A program can give itself such a name; it then deceives itself only.
    pub fn of(address: &SocketAddrUnix) -> Option<CarriedName> {
        let name = std::str::from_utf8(address.abstract_name()?).ok()?;
        let mut numbers = name.strip_prefix(PREFIX)?.split('/');
        let mut number = || numbers.next()?.parse().ok();
        Some(CarriedName {
            peer: VsockAddress {
                cid: number()?,
                port: number()?,
            },
            host_port: number()?,
        })
    }

    /// The socket's own address.
    pub fn host(self) -> VsockAddress {
        VsockAddress {
            cid: CID_HOST,
            port: self.host_port,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vsock_address_is_read_and_written() {
        let address = VsockAddress {
            cid: 5,
            port: 0x0102_0304,
        };
        let bytes = address.to_bytes();
        assert_eq!(Address::parse(&bytes), Address::Vsock(address));
        let mut longer = bytes.to_vec();
        longer.push(0xff);
        assert_eq!(Address::parse(&longer), Address::Vsock(address));
        assert_eq!(Address::parse(&bytes[..15]), Address::TooShort);
        assert_eq!(Address::parse(&bytes[..2]), Address::TooShort);
        assert_eq!(Address::parse(&bytes[..1]), Address::Other);
        assert_eq!(Address::parse(&[]), Address::Other);
    }

    #[test]
    fn a_path_ends_at_its_zero_or_with_the_address() {
        let unix = |rest: &[u8]| Address::parse(&[&AF_UNIX.to_ne_bytes()[..], rest].concat());
        let path = |bytes: &[u8]| Address::Path(bytes.to_owned());
        assert_eq!(unix(b"/run/db\0rest"), path(b"/run/db"));
        assert_eq!(unix(b"/run/\xff"), path(b"/run/\xff"));
        for other in [&b""[..], b"\0", b"\0abstract"] {
            assert_eq!(unix(other), Address::Other);
        }
        assert_eq!(Address::parse(&[2, 0, 0, 80, 127, 0, 0, 1]), Address::Other);
    }

    #[test]
    fn a_name_says_both_ends() {
        let name = CarriedName {
            peer: VsockAddress {
                cid: u32::MAX - 1,
                port: u32::MAX,
            },
            host_port: 1 << 30,
        };
        let address = name.to_address(u64::MAX).unwrap();
        assert_eq!(CarriedName::of(&address), Some(name));
        assert_eq!(name.host().to_bytes()[8..12], 2u32.to_ne_bytes());
        for other in [
            "ringdown-run/1/2",
            "ringdown-run/1/2/x/4",
            "ringdown-run/1/2/4294967296/4",
            "other",
        ] {
            let address = SocketAddrUnix::new_abstract_name(other.as_bytes()).unwrap();
            assert_eq!(CarriedName::of(&address), None, "{other}");
        }
        assert_eq!(
            CarriedName::of(&SocketAddrUnix::new("/run/db").unwrap()),
            None
        );
    }
}
