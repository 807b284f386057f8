use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::OpenOptionsExt;

/// A frame may come with its checksum to be completed, and as TCP to be cut, over either IP (Linux, include/uapi/linux/if_tun.h).
const OFFLOADS: libc::c_ulong = 0x01 | 0x02 | 0x04;

/// Length of the header in front of a frame, in bytes: that of virtio 1.
const HEADER_LEN: libc::c_int = 12;

/// Opens a tap of this name in this thread's network namespace, making it if it is not there, as a VMM without vhost does: each read and
/// write is one frame with a virtio header, not cut and not summed up. It does not block.
///
/// # Errors
/// What the system reports; `InvalidInput` for a name that is empty or longer than 15 bytes.
pub fn open_tap(name: &str) -> io::Result<File> {
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains('\0') {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let file = File::options()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open("/dev/net/tun")?;
    // SAFETY: a request of zeros is a valid one.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (place, byte) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *place = byte as libc::c_char;
    }
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: the request is of the type that this call reads and writes.
    succeed(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF, &mut request) })?;
    // SAFETY: this call reads one integer.
    succeed(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETVNETHDRSZ, &HEADER_LEN) })?;
    // SAFETY: this call takes a number.
    succeed(unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETOFFLOAD, OFFLOADS) })?;
    Ok(file)
}

fn succeed(result: libc::c_int) -> io::Result<()> {
    match result {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_no_interface_can_have_is_refused() {
        for name in ["", "a-name-of-16-chr", "a\0b"] {
            let error = open_tap(name).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{name:?}");
        }
    }
}
