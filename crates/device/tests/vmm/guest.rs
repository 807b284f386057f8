//! A guest whose VMM and driver say what they are set to, with no help from the code under test.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use device::Fabric;
use guestmem_driver::{Arena, DriverQueue, RawDescriptor};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::SendFlags;
use wire::vsock::{HEADER_LEN, Header};

use crate::turn_until;

pub const RX: usize = 0;
pub const TX: usize = 1;

/// Entries of each ring.
pub const RING: u16 = 256;

/// Entries of a table: as many as a chain may have.
pub const TABLE: u16 = 1024;

/// Where the guest sees its memory.
const BASE: u64 = 1 << 32;

/// Version 1, indirect tables, and sockets of messages. Without the protocol's features rings are enabled from the start.
const FEATURES: u64 = 1 << 32 | 1 << 28 | 1 << 1;

/// That of the protocol itself: rings are enabled by a message.
const FEATURE_PROTOCOL: u64 = 1 << 30;

/// Numbers of requests (vhost-user, "Front-end message types").
pub mod request {
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const RESET_DEVICE: u32 = 34;
}

/// Notifications are asked for by event indices.
const FEATURE_EVENT_INDEX: u64 = 1 << 29;

pub struct Guest {
    pub vmm: UnixStream,
    pub arena: Arc<Arena>,
    features: u64,
    queues: [DriverQueue; 2],
    kicks: [OwnedFd; 2],
    calls: [OwnedFd; 2],
}

impl Guest {
    /// A guest whose rings run when this returns, with those of the guests of all other lines.
    pub fn attach(fabric: &mut Fabric, socket: &Path) -> Guest {
        let guest = Guest::connect(socket);
        turn_until(fabric, "the driver runs", |fabric| {
            fabric.lines().iter().all(|line| line.report.up)
        });
        guest
    }

    /// A guest that has said everything for its rings to run.
    pub fn connect(socket: &Path) -> Guest {
        let guest = Guest::begin(socket, FEATURES);
        for index in [RX, TX] {
            guest.set_up(index);
            guest.send_kick(index);
        }
        guest
    }

    /// The same with event indices.
    pub fn connect_with_event_indices(socket: &Path) -> Guest {
        let guest = Guest::begin(socket, FEATURES | FEATURE_EVENT_INDEX);
        for index in [RX, TX] {
            guest.set_up(index);
            guest.send_kick(index);
        }
        guest
    }

    /// A VMM that has yet to set rings up, and enables them by messages.
    pub fn connect_without_rings(socket: &Path) -> Guest {
        Guest::begin(socket, FEATURES | FEATURE_PROTOCOL)
    }

    /// Stops the rings, as for a pause.
    pub fn stop_rings(&self, fabric: &mut Fabric) {
        // A header of three numbers of 32 bits, and where a ring would go on.
        const REPLY_LEN: usize = 20;
        let none: [BorrowedFd<'_>; 0] = [];
        for index in [RX, TX] {
            let ring = quads(&[index as u64]);
            send(&self.vmm, request::GET_VRING_BASE, &ring, &none);
        }
        let mut replies = Vec::new();
        self.vmm.set_nonblocking(true).unwrap();
        turn_until(fabric, "the rings are stopped", |_| {
            let _ = (&self.vmm).take(64).read_to_end(&mut replies);
            replies.len() == 2 * REPLY_LEN
        });
        self.vmm.set_nonblocking(false).unwrap();
    }

    /// Kicks before it says anything else of its rings, and enables them at the end, as Alioth does.
    pub fn start_kick_first(&self) {
        let rings = [RX, TX];
        for index in rings {
            self.send_kick(index);
        }
        for index in rings {
            self.set_up(index);
        }
        self.enable();
    }

    pub fn enable(&self) {
        self.set_enabled(true);
    }

    pub fn set_enabled(&self, enabled: bool) {
        let none: [BorrowedFd<'_>; 0] = [];
        for index in [RX, TX] {
            let enabled = quads(&[index as u64 | u64::from(enabled) << 32]);
            send(&self.vmm, request::SET_VRING_ENABLE, &enabled, &none);
        }
    }

    /// The guest notifies by other descriptors from now on.
    pub fn renew_kicks(&mut self) {
        self.kicks = [RX, TX].map(|_| eventfd(0, EventfdFlags::CLOEXEC).unwrap());
    }

    /// Returns when everything that was sent has been answered.
    pub fn wait_for_answer(&self, mut turn: impl FnMut()) {
        let none: [BorrowedFd<'_>; 0] = [];
        self.vmm.set_nonblocking(true).unwrap();
        send(&self.vmm, request::GET_FEATURES, &[], &none);
        let mut reply = [0; 20];
        while (&self.vmm).read(&mut reply).is_err() {
            turn();
        }
        self.vmm.set_nonblocking(false).unwrap();
    }

    /// The driver starts anew, with rings elsewhere.
    pub fn renew_rings(&mut self) {
        let queue = || DriverQueue::new(Arc::clone(&self.arena), BASE, RING, false, true);
        self.queues = [queue(), queue()];
    }

    /// A guest that has said what it can and where its memory is.
    fn begin(socket: &Path, features: u64) -> Guest {
        let arena = Arc::new(Arena::new(64 << 20).unwrap());
        let queue = || DriverQueue::new(Arc::clone(&arena), BASE, RING, false, true);
        let event = || eventfd(0, EventfdFlags::CLOEXEC).unwrap();
        let guest = Guest {
            vmm: UnixStream::connect(socket).unwrap(),
            queues: [queue(), queue()],
            kicks: [event(), event()],
            calls: [event(), event()],
            arena,
            features,
        };
        let none: [BorrowedFd<'_>; 0] = [];
        send(&guest.vmm, request::SET_OWNER, &[], &none);
        send(
            &guest.vmm,
            request::SET_FEATURES,
            &quads(&[features]),
            &none,
        );
        guest.share();
        guest
    }

    pub fn set_up(&self, index: usize) {
        use request::*;
        let none: [BorrowedFd<'_>; 0] = [];
        let setup = self.queues[index].setup();
        let number = |value: u64| quads(&[index as u64 | value << 32]);
        send(&self.vmm, SET_VRING_NUM, &number(RING.into()), &none);
        let places = [setup.descriptors, setup.used, setup.available, 0];
        let places = [number(0), quads(&places)].concat();
        send(&self.vmm, SET_VRING_ADDR, &places, &none);
        send(&self.vmm, SET_VRING_BASE, &number(0), &none);
        let call = [self.calls[index].as_fd()];
        send(&self.vmm, SET_VRING_CALL, &number(0), &call);
    }

    pub fn send_kick(&self, index: usize) {
        let kick = [self.kicks[index].as_fd()];
        let number = quads(&[index as u64]);
        send(&self.vmm, request::SET_VRING_KICK, &number, &kick);
    }

    /// Hands over its memory.
    pub fn share(&self) {
        let region = self.arena.region(BASE).unwrap();
        let table = quads(&[1, BASE, region.size, region.frontend_address, 0]);
        let file = [region.file.as_fd()];
        send(&self.vmm, request::SET_MEM_TABLE, &table, &file);
    }

    /// A packet in memory: its header, and as many bytes of payload as it says.
    pub fn packet(&self, header: &Header) -> RawDescriptor {
        let len = HEADER_LEN + header.len as usize;
        let place = self.arena.allocate(len, 8);
        self.arena.write(place, &header.to_bytes());
        RawDescriptor {
            address: BASE + place as u64,
            len: len as u32,
            flags: 0,
            next: 0,
        }
    }

    /// The same packet or buffer, described by a table of [`TABLE`] descriptors: one of a header's length, and others of one byte.
    pub fn in_pieces(&self, whole: RawDescriptor) -> RawDescriptor {
        let place = self.arena.allocate(16 * usize::from(TABLE), 16);
        let header = HEADER_LEN as u32;
        for index in 0..TABLE {
            let (offset, len) = match index {
                0 => (0, header),
                // What the packet does not have is read again.
                _ => (
                    header + u32::from(index - 1) % (whole.len - header).max(1),
                    1,
                ),
            };
            let is_last = index + 1 == TABLE;
            let piece = RawDescriptor {
                address: whole.address + u64::from(offset),
                len,
                flags: whole.flags | if is_last { 0 } else { RawDescriptor::NEXT },
                next: if is_last { 0 } else { index + 1 },
            };
            let offset = place + 16 * usize::from(index);
            self.arena.write(offset, &piece.to_bytes());
        }
        RawDescriptor {
            address: BASE + place as u64,
            len: 16 * u32::from(TABLE),
            flags: RawDescriptor::INDIRECT,
            next: 0,
        }
    }

    /// Room for a packet.
    pub fn buffer(&self, len: usize) -> RawDescriptor {
        RawDescriptor {
            address: BASE + self.arena.allocate(len, 8) as u64,
            len: len as u32,
            flags: RawDescriptor::WRITE,
            next: 0,
        }
    }

    /// Makes a chain of this descriptor available `count` times, without a notification.
    pub fn offer(&mut self, ring: usize, descriptor: RawDescriptor, count: u16) {
        let queue = &mut self.queues[ring];
        let first = queue.available_index();
        for index in (0..count).map(|step| first.wrapping_add(step) % RING) {
            queue.write_descriptor(index, descriptor);
            queue.set_available_entry(index, index);
        }
        queue.set_available_index(first.wrapping_add(count));
    }

    /// Makes one chain available and notifies if it is asked to, in the order of a driver (virtio 1.2, section 2.7.13).
    pub fn say(&mut self, ring: usize, descriptor: RawDescriptor) {
        let before = self.queues[ring].available_index();
        self.offer(ring, descriptor, 1);
        fence(Ordering::SeqCst);
        if self.wants_notification(ring, before) {
            self.kick(ring);
        }
    }

    /// Replaces a descriptor, of the guest or the device.
    pub fn replace(&mut self, ring: usize, index: u16, descriptor: RawDescriptor) {
        self.queues[ring].write_descriptor(index, descriptor);
    }

    /// Makes available what its ring does not have.
    pub fn offer_what_is_not_there(&mut self, ring: usize) {
        let queue = &mut self.queues[ring];
        let index = queue.available_index();
        queue.set_available_entry(index, RING);
        queue.set_available_index(index + 1);
    }

    pub fn kick(&self, ring: usize) {
        assert_eq!(
            rustix::io::write(&self.kicks[ring], &1u64.to_ne_bytes()),
            Ok(8)
        );
    }

    /// Whether the device wants to be notified of what is made available.
    pub fn is_asked_to_notify(&self, ring: usize) -> bool {
        self.wants_notification(ring, self.queues[ring].available_index())
    }

    fn wants_notification(&self, ring: usize, of: u16) -> bool {
        const NO_NOTIFY: u16 = 1;
        let queue = &self.queues[ring];
        match self.features & FEATURE_EVENT_INDEX != 0 {
            true => queue.available_event() == of,
            false => queue.used_flags() & NO_NOTIFY == 0,
        }
    }

    /// It looks for what is given back, and need not be interrupted.
    pub fn want_no_interrupts(&mut self, ring: usize) {
        self.queues[ring].disable_interrupts();
    }

    /// How many chains of this ring have been given back.
    pub fn given_back(&self, ring: usize) -> u16 {
        self.queues[ring].used_index()
    }

    /// The VMM is gone; the guest's memory is still there to be read.
    pub fn hang_up(&self) {
        self.vmm.shutdown(std::net::Shutdown::Both).unwrap();
    }
}

pub fn quads(numbers: &[u64]) -> Vec<u8> {
    numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect()
}

/// Sends a message.
pub fn send(vmm: &UnixStream, request: u32, payload: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let mut bytes = [request, 1, payload.len() as u32]
        .map(u32::to_le_bytes)
        .concat();
    bytes.extend_from_slice(payload);
    let sent = sys::descriptors::send(vmm, &bytes, descriptors, SendFlags::empty());
    assert_eq!(sent.unwrap(), bytes.len());
}
