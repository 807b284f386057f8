//! What no honest driver does.

use guestmem::guest::Range;
use guestmem_driver::{DriverQueue, Full};
use wire::vsock::Header;

use super::rings::NO_SLOT;
use super::{Connection, GUEST_BASE, VirtualGuest};
use crate::frontend::TX;

impl VirtualGuest {
    /// Sends a packet with any header: its `len` need not be the payload's.
    pub fn inject(&mut self, header: Header, payload: &[u8]) {
        self.send_packet(header, payload.to_vec());
    }

    /// Puts a chain of any ranges into the transmit ring, and notifies the device if it wants to know.
    ///
    /// # Errors
    /// When the ring has no room for it.
    pub fn inject_chain(&mut self, readable: &[Range], writable: &[Range]) -> Result<(), Full> {
        self.rings.queues[TX].add(readable, writable, u64::MAX)?;
        self.tampered = true;
        self.kick(TX);
        Ok(())
    }

    /// Puts a chain of any ranges into the transmit ring, if there is room. The guest goes on as before.
    pub fn try_chain(&mut self, readable: &[Range], writable: &[Range]) -> bool {
        // The slot of no packet: nothing is reclaimed for it.
        let added = self.rings.queues[TX].add(readable, writable, NO_SLOT);
        self.kick(TX);
        added.is_ok()
    }

    /// A ring, to write anything into it. The guest is not serviced any more: what the device gives back may be anything.
    pub fn tamper(&mut self, index: usize) -> &mut DriverQueue {
        self.tampered = true;
        &mut self.rings.queues[index]
    }

    /// Dials are neither accepted nor refused from now on: they are strays (see [`keep_strays`](Self::keep_strays)).
    pub fn leave_dials_unanswered(&mut self) {
        self.mute = true;
        self.keep_strays();
    }

    /// Forgets a socket without a reset.
    pub fn forget(&mut self, connection: Connection) {
        if let Some(socket) = self.sockets.remove(&connection.0) {
            self.by_key.remove(&socket.key);
        }
    }

    /// Writes into fresh memory of the guest. Returns its guest address.
    pub fn place(&mut self, bytes: &[u8]) -> u64 {
        let offset = self.arena.allocate(bytes.len().max(1), 64);
        self.arena.write(offset, bytes);
        GUEST_BASE + offset as u64
    }
}
