//! A virtio-vsock driver that behaves as Linux's does, on one thread, with every event in the caller's hand.
//!
//! # Theory of operation
//!
//! A [`VirtualGuest`] owns the guest's memory, its rings and its sockets. Nothing happens behind the caller's back:
//! [`VirtualGuest::service`] takes what the device has given back, answers as Linux's driver would, fills the receive ring again
//! and returns. The calls that wait ([`VirtualGuest::connect`] and its like) service this guest only; [`drive`] waits for a
//! condition over several guests at once, so that two guests on one thread can talk to each other. A guest that is
//! not serviced is a paused one.
//!
//! What a correct device never does is recorded in [`VirtualGuest::violations`]: data beyond the credit, data behind the end of data, packets for
//! another guest, lengths that do not agree. Tests demand that the list stays empty.

mod config;
mod connection;
mod hostile;
mod layout;
mod lifecycle;
mod receive;
mod rings;
mod sockets;
mod wait;

use std::collections::{HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::Arc;

use guestmem_driver::Arena;
use wire::vsock::{Header, Operation};

use crate::frontend::Vmm;

pub use config::{GuestConfig, ReceiveLayout};
pub use connection::{Connection, Received, State};
pub use layout::Layout;
pub use lifecycle::AttachError;
pub use sockets::{ConnectError, SendError};
pub use wait::{TimedOut, drive, wait_also};

use self::connection::{Key, Socket};
use self::rings::Rings;

/// Where the guest's memory begins, in its own addresses.
pub const GUEST_BASE: u64 = 0x4000_0000;

/// Replies that may wait for room in the transmit ring before no more packets are read, as in Linux.
const MAX_QUEUED_REPLIES: usize = 128;

/// Violations that are written down in full; more are only counted.
const MAX_VIOLATIONS: usize = 32;

/// A guest.
pub struct VirtualGuest {
    config: GuestConfig,
    path: PathBuf,
    arena: Arc<Arena>,
    vmm: Option<Vmm>,
    cid: u64,
    rings: Rings,
    sockets: HashMap<u32, Socket>,
    next_socket: u32,
    by_key: HashMap<Key, u32>,
    listeners: HashMap<u32, Listener>,
    next_port: u32,
    /// Packets that wait for room in the transmit ring.
    queued: VecDeque<Packet>,
    violations: Vec<String>,
    violation_count: u64,
    counts: Counts,
    /// Headers of packets that belong to no socket, when they are asked for.
    strays: Option<Vec<Header>>,
    /// Dials without a listener are kept with the strays, and not refused.
    mute: bool,
    /// The device does not reclaim or refill: descriptors have been tampered with.
    tampered: bool,
}

#[derive(Debug)]
struct Listener {
    socket_type: u16,
    accepted: VecDeque<u32>,
    backlog: usize,
}

/// A packet yet to be put into the ring.
#[derive(Debug)]
struct Packet {
    header: Header,
    payload: Vec<u8>,
}

/// What has gone through the rings since the guest was attached.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Packets from the device.
    pub received_packets: u64,
    /// Packets to the device.
    pub sent_packets: u64,
    /// Notifications sent to the device.
    pub kicks: u64,
    /// Wake-ups by the device.
    pub interrupts: u64,
    /// Announcements of room that the device sent.
    pub credit_updates: u64,
    /// Resets from the device.
    pub resets: u64,
    /// Events that said that every circuit is gone.
    pub transport_resets: u64,
}

impl VirtualGuest {
    /// The guest's own context identifier.
    pub fn cid(&self) -> u32 {
        self.cid as u32
    }

    /// How this guest was made.
    pub fn config(&self) -> &GuestConfig {
        &self.config
    }

    /// What has gone through the rings.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// What the device did and never should.
    pub fn violations(&self) -> &[String] {
        &self.violations
    }

    /// The VMM's connection, to say other things on it.
    ///
    /// # Panics
    /// If the guest is not attached.
    pub fn vmm(&mut self) -> &mut Vmm {
        self.vmm.as_mut().expect("the guest is attached")
    }

    /// The guest's memory.
    pub fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }

    /// From now on, packets that belong to no socket are kept for [`take_strays`](Self::take_strays), and not answered.
    pub fn keep_strays(&mut self) {
        self.strays.get_or_insert_default();
    }

    /// Packets from the device that belonged to no socket.
    pub fn take_strays(&mut self) -> Vec<Header> {
        self.strays.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Lets the layout of further packets be another.
    pub fn set_layout(&mut self, layout: Layout) {
        self.config.layout = layout;
    }

    fn violation(&mut self, text: String) {
        self.violation_count += 1;
        if self.violations.len() < MAX_VIOLATIONS {
            self.violations.push(text);
        }
    }

    /// A header with this guest as its source and no circuit behind it.
    pub fn header(&self, operation: Operation, peer_cid: u32, local: u32, remote: u32) -> Header {
        Header {
            src_cid: self.cid,
            dst_cid: u64::from(peer_cid),
            src_port: local,
            dst_port: remote,
            socket_type: 1,
            operation: operation as u16,
            buf_alloc: self.config.buffer_bytes,
            ..Header::default()
        }
    }
}
