//! Frames that no program would send: bytes as they are, past the guest's own stack.

use std::io::stdin;
use std::os::fd::AsRawFd;

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::ifaddrs::getifaddrs;
use nix::sys::socket::{AddressFamily, LinkAddr, MsgFlags, SockFlag, SockType, sendto, socket};

/// The longest frame that a line may hold, in bytes.
const MAX_LEN: usize = 9_018;

/// Sends through the interface what the lines of standard input say: how many times, and the frame in hexadecimal, in which `xx` stands for
/// a byte that is another one each time.
pub fn main(interface: &str) -> Result<()> {
    let address = address_of(interface)?;
    let socket = socket(
        AddressFamily::Packet,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        None,
    )?;
    for line in stdin().lines() {
        let line = line?;
        let (count, frame) = line
            .split_once(' ')
            .with_context(|| format!("expected a number and a frame, found {line:?}"))?;
        let count: u32 = super::number(count)?;
        for number in 0..count {
            let frame = bytes(frame, number)?;
            loop {
                match sendto(socket.as_raw_fd(), &frame, &address, MsgFlags::empty()) {
                    Ok(_) => break,
                    // The card's queue is full.
                    Err(Errno::ENOBUFS | Errno::EINTR) => std::thread::yield_now(),
                    Err(error) => bail!("cannot send through {interface}: {error}"),
                }
            }
        }
    }
    Ok(())
}

/// The address of the interface as the socket takes it.
fn address_of(interface: &str) -> Result<LinkAddr> {
    let found = getifaddrs()?.find_map(|entry| {
        let address = entry.address?;
        let is_it = entry.interface_name == interface;
        address.as_link_addr().filter(|_| is_it).copied()
    });
    found.with_context(|| format!("there is no interface {interface}"))
}

/// The bytes of a frame; those that vary are of `number`, its lowest first.
fn bytes(frame: &str, number: u32) -> Result<Vec<u8>> {
    if frame.len() % 2 != 0 || frame.len() > 2 * MAX_LEN || !frame.is_ascii() {
        bail!("expected at most {MAX_LEN} bytes in hexadecimal, found {frame:?}");
    }
    let mut varying = number.to_le_bytes().into_iter().cycle();
    let pairs = (0..frame.len()).step_by(2).map(|at| &frame[at..at + 2]);
    pairs
        .map(|pair| match pair {
            "xx" => Ok(varying.next().unwrap_or_default()),
            pair => u8::from_str_radix(pair, 16)
                .with_context(|| format!("{pair:?} is no byte in hexadecimal")),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

    use super::*;

    #[test]
    fn what_varies_is_another_each_time() {
        assert_eq!(bytes("02xx0axx", 0x0102).unwrap(), [2, 2, 10, 1]);
        assert_eq!(bytes("02xx0axx", 0x0103).unwrap(), [2, 3, 10, 1]);
        for wrong in ["0", "0g", "é"] {
            bytes(wrong, 0).unwrap_err();
        }
        bytes(&"00".repeat(MAX_LEN), 0).unwrap();
        bytes(&"00".repeat(MAX_LEN + 1), 0).unwrap_err();
    }
}
