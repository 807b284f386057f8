//! A guest with one ring for each direction. What it sends lies in its memory from the beginning.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use guestmem::guest::Range;
use guestmem_driver::{Arena, DriverQueue};
use rustix::event::{EventfdFlags, eventfd};
use rustix::net::SendFlags;

/// The rings, of both kinds of devices.
pub const RX: usize = 0;
pub const TX: usize = 1;

/// Entries of each ring.
pub const RING: u16 = 256;

/// Where the guest sees its memory.
const BASE: u64 = 1 << 32;

/// Event indices, and virtio 1. Without the protocol's features rings are enabled from the start.
const FEATURES: u64 = 1 << 29 | 1 << 32;

/// Numbers of requests (vhost-user, "Front-end message types").
mod request {
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
}

pub struct Guest {
    vmm: UnixStream,
    arena: Arc<Arena>,
    rings: [DriverQueue; 2],
    /// For both rings: descriptors are few where guests are a thousand.
    kick: OwnedFd,
    packet: Option<Range>,
    buffer_len: u32,
}

impl Guest {
    /// One whose rings run as soon as the fabric has taken what its VMM says. All its buffers, of this length, are posted. It may be one that is not interrupted.
    pub fn connect(socket: &Path, buffer_len: u32, is_called: bool) -> io::Result<Guest> {
        let buffers = usize::from(RING) * buffer_len as usize;
        let arena = Arc::new(Arena::new((buffers + (64 << 10)).next_multiple_of(4096))?);
        let queue = || DriverQueue::new(Arc::clone(&arena), BASE, RING, true, false);
        let mut guest = Guest {
            vmm: UnixStream::connect(socket)?,
            rings: [queue(), queue()],
            kick: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            arena,
            packet: None,
            buffer_len,
        };
        for _ in 0..RING {
            let place = guest.arena.allocate(buffer_len as usize, 8);
            guest.post(place as u64);
        }
        guest.rings[RX].kick_needed();
        guest.set_up(is_called)?;
        Ok(guest)
    }

    fn set_up(&self, is_called: bool) -> io::Result<()> {
        let vmm = &self.vmm;
        send(vmm, request::SET_OWNER, &[], None)?;
        send(vmm, request::SET_FEATURES, &[FEATURES], None)?;
        let region = self.arena.region(BASE)?;
        let table = [1, BASE, region.size, region.frontend_address, 0];
        send(
            vmm,
            request::SET_MEM_TABLE,
            &table,
            Some(region.file.as_fd()),
        )?;
        for index in [RX, TX] {
            let setup = self.rings[index].setup();
            let with = |value: u64| [index as u64 | value << 32];
            send(vmm, request::SET_VRING_NUM, &with(RING.into()), None)?;
            let (table, used, available) = (setup.descriptors, setup.used, setup.available);
            let places = [index as u64, table, used, available, 0];
            send(vmm, request::SET_VRING_ADDR, &places, None)?;
            send(vmm, request::SET_VRING_BASE, &with(0), None)?;
            let kick = Some(self.kick.as_fd());
            if is_called {
                // Where its interrupts go does not matter: it never sleeps.
                let call = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
                send(vmm, request::SET_VRING_CALL, &with(0), Some(call.as_fd()))?;
            }
            send(vmm, request::SET_VRING_KICK, &with(0), kick)?;
        }
        Ok(())
    }

    fn post(&mut self, place: u64) {
        let buffer = Range {
            address: BASE + place,
            len: self.buffer_len,
        };
        // As many are posted as come back.
        let _ = self.rings[RX].add(&[], &[buffer], place);
    }

    /// What is sent from now on.
    pub fn set_packet(&mut self, bytes: &[u8]) {
        let place = self.arena.allocate(bytes.len(), 8);
        self.arena.write(place, bytes);
        self.packet = Some(Range {
            address: BASE + place as u64,
            len: bytes.len() as u32,
        });
    }

    /// Sends the packet so many times.
    pub fn send(&mut self, times: u64) {
        let packet = self.packet;
        for _ in 0..times {
            let added = packet.map(|packet| self.rings[TX].add(&[packet], &[], 0));
            assert!(matches!(added, Some(Ok(()))), "the ring has room");
        }
        if self.rings[TX].kick_needed() {
            self.kick();
        }
    }

    /// How many packets there is room for.
    pub fn room(&self) -> u64 {
        self.rings[TX].free_descriptors() as u64
    }

    /// Takes back what was sent. Returns how much that is.
    pub fn take_sent(&mut self) -> u64 {
        std::iter::from_fn(|| self.rings[TX].take_used()).count() as u64
    }

    /// Shows the beginning of each packet that has come to `look`, and posts its buffer again. Returns how many there were.
    pub fn take_received(&mut self, mut look: impl FnMut(&[u8; 44])) -> u64 {
        let mut count = 0;
        let mut beginning = [0; 44];
        while let Some((place, _)) = self.rings[RX].take_used() {
            self.arena.read(place as usize, &mut beginning);
            look(&beginning);
            self.post(place);
            count += 1;
        }
        if self.rings[RX].kick_needed() {
            self.kick();
        }
        count
    }

    fn kick(&self) {
        // Only a full counter refuses.
        let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
    }
}

fn send(
    vmm: &UnixStream,
    request: u32,
    words: &[u64],
    descriptor: Option<BorrowedFd<'_>>,
) -> io::Result<()> {
    let mut bytes = [request, 1, 8 * words.len() as u32]
        .map(u32::to_le_bytes)
        .concat();
    bytes.extend(words.iter().flat_map(|word| word.to_le_bytes()));
    let descriptors: Vec<_> = descriptor.into_iter().collect();
    sys::descriptors::send(vmm, &bytes, &descriptors, SendFlags::empty())?;
    Ok(())
}
