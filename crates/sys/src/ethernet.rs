//! Descriptors through which whole Ethernet frames go to the host and come from it: tap devices and packet sockets.
//!
//! They are opened here because the calls that do so take C structures, which no safe library offers without a good deal else. Every frame
//! has a virtio header in front, of [`Opened::header_len`] bytes, so that checksums and segmentation can be left to the other side, as between
//! two guests (Linux, Documentation/networking/tuntap.rst, and `packet(7)`).

use std::ffi::CString;
use std::fs::OpenOptions;
use std::io;
use std::mem;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

/// A way to the host, which does not block.
#[derive(Debug)]
pub struct Opened {
    /// Reads and writes one frame at a time.
    pub descriptor: OwnedFd,
    /// Length of the virtio header before each frame, in bytes.
    pub header_len: usize,
    /// Segments of UDP may be left to the host, and come from it.
    pub udp_segments: bool,
    /// Frames come without their outermost VLAN tag, which comes beside them.
    pub tags_beside: bool,
}

/// A VLAN tag that the system has taken off a frame, as it stood behind the addresses.
pub type Tag = [u8; 4];

impl Opened {
    /// Whether it is the packet socket of an interface that was removed. It stays so, also if there is another one of that name.
    pub fn is_orphaned(&self) -> bool {
        if !self.tags_beside {
            return false;
        }
        // SAFETY: a `sockaddr_ll` is plain numbers: zeros are a value of it.
        let mut address: libc::sockaddr_ll = unsafe { mem::zeroed() };
        let mut len = mem::size_of_val(&address) as libc::socklen_t;
        // SAFETY: the system writes no more than `len` bytes of the address, which outlives the call.
        let named = checked(unsafe {
            libc::getsockname(
                self.descriptor.as_raw_fd(),
                (&raw mut address).cast(),
                &raw mut len,
            )
        });
        // No interface has such a number.
        named.is_ok() && address.sll_ifindex <= 0
    }

    /// Reads a frame with its virtio header, and says how long both are. The system takes the outermost tag off what comes to a packet
    /// socket (`packet(7)`, `PACKET_AUXDATA`): it comes beside the frame, and the header says where things are without it.
    ///
    /// # Errors
    /// What the system reports, such as that there is nothing (`WouldBlock`).
    pub fn read(&self, buffer: &mut [u8]) -> io::Result<(usize, Option<Tag>)> {
        if !self.tags_beside {
            let len = rustix::io::read(&self.descriptor, buffer)?;
            return Ok((len, None));
        }
        let mut piece = libc::iovec {
            iov_base: buffer.as_mut_ptr().cast(),
            iov_len: buffer.len(),
        };
        // Room for one `tpacket_auxdata` with its header, aligned as a header has to be.
        let mut control = [0_u64; 8];
        // SAFETY: a `msghdr` is pointers and numbers: zeros are a value of it.
        let mut message: libc::msghdr = unsafe { mem::zeroed() };
        message.msg_iov = &raw mut piece;
        message.msg_iovlen = 1;
        message.msg_control = control.as_mut_ptr().cast();
        message.msg_controllen = mem::size_of_val(&control) as _;
        // SAFETY: the message names the buffer and the control room with their lengths; both are borrowed for writing and outlive the call.
        let len = unsafe { libc::recvmsg(self.descriptor.as_raw_fd(), &raw mut message, 0) };
        let len = usize::try_from(len).map_err(|_| io::Error::last_os_error())?;
        // SAFETY: the system has filled in the control room and its length.
        let first = unsafe { libc::CMSG_FIRSTHDR(&raw const message) };
        if first.is_null() {
            return Ok((len, None));
        }
        // SAFETY: it is not null, so the room holds a whole header there.
        let header = unsafe { first.read_unaligned() };
        // SAFETY: this computes a length and touches nothing.
        let needed = unsafe { libc::CMSG_LEN(mem::size_of::<libc::tpacket_auxdata>() as u32) };
        let is_auxdata = header.cmsg_level == libc::SOL_PACKET
            && header.cmsg_type == libc::PACKET_AUXDATA
            && header.cmsg_len as usize >= needed as usize;
        if !is_auxdata {
            return Ok((len, None));
        }
        // SAFETY: behind the header are as many bytes as a `tpacket_auxdata` has, which is plain numbers.
        let behind = unsafe { libc::CMSG_DATA(first) }.cast::<libc::tpacket_auxdata>();
        // SAFETY: as above; they need not be aligned.
        let auxiliary = unsafe { behind.read_unaligned() };
        Ok((len, tag(&auxiliary)))
    }
}

fn tag(auxiliary: &libc::tpacket_auxdata) -> Option<Tag> {
    if auxiliary.tp_status & libc::TP_STATUS_VLAN_VALID == 0 {
        return None;
    }
    let kind = match auxiliary.tp_status & libc::TP_STATUS_VLAN_TPID_VALID {
        0 => libc::ETH_P_8021Q as u16,
        _ => auxiliary.tp_vlan_tpid,
    };
    let ([a, b], [c, d]) = (kind.to_be_bytes(), auxiliary.tp_vlan_tci.to_be_bytes());
    Some([a, b, c, d])
}

/// Opens the tap device of this name, which is made if it is not there and then lives as long as the descriptor.
///
/// # Errors
/// `InvalidInput` for a name that no device can have; otherwise the system's error: no permission (CAP_NET_ADMIN, unless the device belongs to the
/// user), or the device is already open.
pub fn open_tap(name: &str) -> io::Result<Opened> {
    let mut request = interface_request(name)?;
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    // The flags are in the lower 16 bits.
    request.ifr_ifru.ifru_flags = flags as i16;
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC)
        .open("/dev/net/tun")?;
    let descriptor = OwnedFd::from(file);
    // SAFETY: TUNSETIFF takes an `ifreq`, which it reads and fills in with the name; it outlives the call.
    checked(unsafe { libc::ioctl(descriptor.as_raw_fd(), libc::TUNSETIFF, &mut request) })?;
    let header_len: libc::c_int = 12;
    // SAFETY: TUNSETVNETHDRSZ reads an int.
    checked(unsafe { libc::ioctl(descriptor.as_raw_fd(), libc::TUNSETVNETHDRSZ, &header_len) })?;
    let tcp = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;
    let udp = libc::TUN_F_USO4 | libc::TUN_F_USO6;
    let offload = |flags: libc::c_uint| {
        // SAFETY: TUNSETOFFLOAD takes its argument by value.
        checked(unsafe {
            libc::ioctl(
                descriptor.as_raw_fd(),
                libc::TUNSETOFFLOAD,
                libc::c_ulong::from(flags),
            )
        })
    };
    // Kernels before 6.2 know no segments of UDP.
    let udp_segments = offload(tcp | udp).is_ok();
    if !udp_segments {
        offload(tcp)?;
    }
    Ok(Opened {
        descriptor,
        header_len: 12,
        udp_segments,
        tags_beside: false,
    })
}

/// Opens a packet socket on the interface of this name, which takes all its frames and none of those that the host itself sends there.
///
/// # Errors
/// `InvalidInput` for a name that no interface can have, `NotFound` for one that none has; otherwise what the system reports, such as that the
/// process may not (CAP_NET_RAW).
pub fn open_packet_socket(interface: &str) -> io::Result<Opened> {
    let request = interface_request(interface)?;
    let protocol = (libc::ETH_P_ALL as u16).to_be();
    // SAFETY: no pointers are involved. Protocol 0 takes no frames before the socket is bound.
    let descriptor = checked(unsafe {
        libc::socket(
            libc::AF_PACKET,
            libc::SOCK_RAW | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC,
            0,
        )
    })?;
    // SAFETY: the descriptor is new and has no other owner.
    let descriptor = unsafe { OwnedFd::from_raw_fd(descriptor) };
    // SAFETY: the name ends with a zero, as `interface_request` sees to.
    let index = unsafe { libc::if_nametoindex(request.ifr_name.as_ptr()) };
    if index == 0 {
        return Err(io::Error::from(io::ErrorKind::NotFound));
    }
    for option in [
        libc::PACKET_VNET_HDR,
        libc::PACKET_AUXDATA,
        libc::PACKET_IGNORE_OUTGOING,
    ] {
        let one: libc::c_int = 1;
        set_option(&descriptor, option, &one)?;
    }
    let everything = libc::packet_mreq {
        // As the system wants it.
        mr_ifindex: index as libc::c_int,
        mr_type: libc::PACKET_MR_PROMISC as libc::c_ushort,
        mr_alen: 0,
        mr_address: [0; 8],
    };
    set_option(&descriptor, libc::PACKET_ADD_MEMBERSHIP, &everything)?;
    let address = libc::sockaddr_ll {
        sll_family: libc::AF_PACKET as u16,
        sll_protocol: protocol,
        sll_ifindex: index as libc::c_int,
        sll_hatype: 0,
        sll_pkttype: 0,
        sll_halen: 0,
        sll_addr: [0; 8],
    };
    // SAFETY: the address is a `sockaddr_ll` of that size, which is only read.
    checked(unsafe {
        libc::bind(
            descriptor.as_raw_fd(),
            (&raw const address).cast(),
            mem::size_of_val(&address) as libc::socklen_t,
        )
    })?;
    Ok(Opened {
        descriptor,
        header_len: 10,
        udp_segments: false,
        tags_beside: true,
    })
}

/// The longest packet that the interface of this name sends, in bytes.
///
/// # Errors
/// `InvalidInput` for a name that no interface can have; otherwise what the system reports, such as that there is none.
pub fn mtu_of(interface: &str) -> io::Result<u32> {
    let mut request = interface_request(interface)?;
    // SAFETY: no pointers are involved. Any socket will do.
    let socket =
        checked(unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) })?;
    // SAFETY: the descriptor is new and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(socket) };
    // SAFETY: SIOCGIFMTU takes an `ifreq` with a name, and fills in the number; it outlives the call.
    checked(unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFMTU as _, &raw mut request) })?;
    // SAFETY: that is the field which was filled in; every pattern of bytes is a number.
    let mtu = unsafe { request.ifr_ifru.ifru_mtu };
    Ok(u32::try_from(mtu).unwrap_or(0))
}

fn set_option<T>(descriptor: &OwnedFd, option: libc::c_int, value: &T) -> io::Result<()> {
    // SAFETY: the value is only read, as many bytes as it has. The options that are set here are plain C structures.
    checked(unsafe {
        libc::setsockopt(
            descriptor.as_raw_fd(),
            libc::SOL_PACKET,
            option,
            (&raw const *value).cast(),
            mem::size_of::<T>() as libc::socklen_t,
        )
    })
    .map(|_| ())
}

/// What calls about an interface take: its name, and otherwise zeros.
fn interface_request(name: &str) -> io::Result<libc::ifreq> {
    let name = CString::new(name)?;
    let bytes = name.as_bytes_with_nul();
    // SAFETY: an `ifreq` is an array of characters and a union of plain numbers: zeros are a value of it.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    let is_name = bytes.len() > 1 && bytes.len() <= request.ifr_name.len();
    // With a pattern the system would choose the name.
    if !is_name || name.as_bytes().iter().any(|byte| b"%/".contains(byte)) {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "the name of an interface has 1 to {} characters, without % and /",
                libc::IFNAMSIZ - 1
            ),
        ));
    }
    for (place, byte) in request.ifr_name.iter_mut().zip(bytes) {
        *place = *byte as libc::c_char;
    }
    Ok(request)
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        result => Ok(result),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_no_interface_can_have_are_refused() {
        for name in ["", "tap%d", "a/b", "sixteen-letters-", "nul\0"] {
            let tap = open_tap(name).unwrap_err();
            assert_eq!(tap.kind(), io::ErrorKind::InvalidInput, "{name:?}");
            let socket = open_packet_socket(name).unwrap_err();
            assert_eq!(socket.kind(), io::ErrorKind::InvalidInput, "{name:?}");
        }
        assert!(interface_request("fifteen-letters").is_ok());
    }

    #[test]
    fn an_interface_has_an_mtu() {
        // As Linux makes it, in each network namespace.
        assert_eq!(mtu_of("lo").unwrap(), 65_536);
        assert!(mtu_of("no-such-one").is_err());
    }
}
