//! A VMM's words on a vhost-user socket, right or wrong, byte by byte; nothing is waited for here.

use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;

use guestmem::guest::RegionSpec;
use guestmem::queue::QueueSetup;
use rustix::net::SendFlags;

/// Numbers of requests (vhost-user, "Front-end message types").
pub(crate) mod request {
    pub(crate) const GET_FEATURES: u32 = 1;
    pub(crate) const SET_FEATURES: u32 = 2;
    pub(crate) const SET_OWNER: u32 = 3;
    pub(crate) const SET_MEM_TABLE: u32 = 5;
    pub(crate) const SET_VRING_NUM: u32 = 8;
    pub(crate) const SET_VRING_ADDR: u32 = 9;
    pub(crate) const SET_VRING_BASE: u32 = 10;
    pub(crate) const GET_VRING_BASE: u32 = 11;
    pub(crate) const SET_VRING_KICK: u32 = 12;
    pub(crate) const SET_VRING_CALL: u32 = 13;
    pub(crate) const GET_PROTOCOL_FEATURES: u32 = 15;
    pub(crate) const SET_PROTOCOL_FEATURES: u32 = 16;
    pub(crate) const SET_VRING_ENABLE: u32 = 18;
    pub(crate) const GET_CONFIG: u32 = 24;
    pub(crate) const RESET_DEVICE: u32 = 34;
    pub(crate) const ADD_MEM_REG: u32 = 37;
    pub(crate) const REM_MEM_REG: u32 = 38;
    /// One above the highest that the specification knows.
    pub(crate) const BEHIND_LAST: u32 = 45;
}

/// Header flags of an ordinary message: version 1.
pub(crate) const VERSION: u32 = 1;
/// Header flag: an answer is wanted.
pub(crate) const NEED_REPLY: u32 = 1 << 3;

/// The features that QEMU asks for: streams, messages, indirect descriptors, event indices, protocol features, virtio 1.
pub(crate) const FEATURES: u64 = 3 | 1 << 28 | 1 << 29 | 1 << 30 | 1 << 32;
/// The protocol features that QEMU asks for: multiqueue, answers, configuration space, memory slots, reset.
pub(crate) const PROTOCOL_FEATURES: u64 = 1 | 1 << 3 | 1 << 9 | 1 << 13 | 1 << 15;

/// A message with any header.
pub(crate) fn message(request: u32, flags: u32, len: u32, payload: &[u8]) -> Vec<u8> {
    let mut bytes = words(&[request, flags, len]);
    bytes.extend_from_slice(payload);
    bytes
}

/// Numbers of 32 bits in a row, little-endian.
pub(crate) fn words(numbers: &[u32]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect()
}

/// Numbers of 64 bits in a row, little-endian.
pub(crate) fn quads(numbers: &[u64]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect()
}

/// The payload that describes one region.
pub(crate) fn region_payload(region: &RegionSpec) -> Vec<u8> {
    quads(&[
        region.guest_address,
        region.size,
        region.frontend_address,
        region.file_offset,
    ])
}

/// The payload that says where a ring is.
pub(crate) fn address_payload(index: u32, setup: &QueueSetup) -> Vec<u8> {
    let mut payload = words(&[index, 0]);
    payload.extend(quads(&[setup.descriptors, setup.used, setup.available, 0]));
    payload
}

/// Sends bytes with descriptors. Says how many bytes went out: fewer than all, or `WouldBlock`, when the socket is full.
///
/// # Errors
/// What the system reports.
pub(crate) fn send_bytes(
    stream: &UnixStream,
    bytes: &[u8],
    files: &[BorrowedFd<'_>],
) -> io::Result<usize> {
    let flags = SendFlags::DONTWAIT;
    Ok(sys::descriptors::send(stream, bytes, files, flags)?)
}
