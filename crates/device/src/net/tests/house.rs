//! Guests of a network, played in this process: their drivers and their VMMs' words.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use memory::driver::{Arena, DriverQueue};
use memory::guest::{GuestMemory, Range};
use rustix::event::{EventfdFlags, eventfd};
use switch::bridge::{BridgeLimits, PortConfig};
use wire::ethernet::MacAddress;
use wire::net_header::{NET_HEADER_LEN, NetHeader};

use crate::frontend::{Answer, Message, Request, RingStart};
use crate::net::{ModerationSetting, NetFabric, NetPortConfig};

/// Entries of each ring.
pub(super) const RING_SIZE: u16 = 64;

/// The features of a Linux guest.
pub(super) const LINUX: u64 = 1 << 0
    | 1 << 1
    | 1 << 7
    | 1 << 8
    | 1 << 9
    | 1 << 11
    | 1 << 12
    | 1 << 13
    | 1 << 15
    | 1 << 29
    | 1 << 32
    | 1 << 54
    | 1 << 55
    | 1 << 56;

/// The features of a guest that takes what no driver has to finish for it.
pub(super) const PLAIN: u64 = 1 << 29 | 1 << 32;

/// A network's name.
pub(super) const LAN: &str = "lan";

pub(super) struct House {
    pub(super) fabric: NetFabric,
    directory: tempfile::TempDir,
}

/// A guest, with its driver.
pub(super) struct Guest {
    pub(super) name: String,
    pub(super) number: usize,
    pub(super) mac: MacAddress,
    pub(super) arena: Arc<Arena>,
    pub(super) receive: DriverQueue,
    pub(super) transmit: DriverQueue,
    /// One for each ring.
    kicks: Vec<File>,
    calls: Vec<File>,
    buffer_len: u32,
}

fn event() -> File {
    let event: OwnedFd = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap();
    File::from(event)
}

/// How often an event was notified since it was asked last.
fn count(event: &File) -> u64 {
    let mut bytes = [0; 8];
    match rustix::io::read(event, &mut bytes) {
        Ok(_) => u64::from_ne_bytes(bytes),
        Err(_) => 0,
    }
}

/// The address of the guest with this number.
pub(super) fn mac(number: u8) -> MacAddress {
    MacAddress([2, 0, 0, 0, 0, number])
}

/// A frame from one guest to another, of a type that nobody looks into.
pub(super) fn frame(to: MacAddress, from: MacAddress, len: usize) -> Vec<u8> {
    let mut frame = Vec::with_capacity(len);
    frame.extend_from_slice(&to.0);
    frame.extend_from_slice(&from.0);
    frame.extend_from_slice(&[0x88, 0xb5]);
    frame.extend((14..len).map(|index| (index * 7) as u8));
    frame
}

impl House {
    pub(super) fn new() -> House {
        let mut fabric = NetFabric::new().unwrap();
        fabric.add_network(LAN, BridgeLimits::default()).unwrap();
        House {
            fabric,
            directory: tempfile::tempdir().unwrap(),
        }
    }

    /// A guest with a static address and buffers of 2 KiB.
    pub(super) fn guest(&mut self, number: u8) -> Guest {
        self.guest_with(number, PortConfig::guest(mac(number)), LINUX, 2048)
    }

    pub(super) fn guest_with(
        &mut self,
        number: u8,
        bridge: PortConfig,
        features: u64,
        buffer_len: u32,
    ) -> Guest {
        let name = format!("vm{number}");
        let config = NetPortConfig {
            network: LAN.to_owned(),
            vm: name.clone(),
            vhost_user: self.directory.path().join(&name),
            mac: bridge.mac,
            bridge,
            mtu: 1500,
            queue_pairs: 1,
            moderation: ModerationSetting::Off,
        };
        self.fabric.add_port(config).unwrap();
        let (_, port) = self.fabric.port_named(LAN, &name).unwrap();
        let arena = Arc::new(Arena::new(16 << 20).unwrap());
        let queue = || DriverQueue::new(Arc::clone(&arena), 0, RING_SIZE, true, false);
        let mut guest = Guest {
            name,
            number: port,
            mac: mac(number),
            receive: queue(),
            transmit: queue(),
            arena,
            kicks: vec![event(), event()],
            calls: vec![event(), event()],
            buffer_len,
        };
        for _ in 0..RING_SIZE {
            guest.post();
        }
        guest.receive.kick_needed();
        self.start(&guest, features);
        guest
    }

    /// Lets a guest's driver run.
    pub(super) fn start(&mut self, guest: &Guest, features: u64) {
        let memory = guest.memory();
        for (index, queue) in [&guest.receive, &guest.transmit].into_iter().enumerate() {
            let start = RingStart {
                setup: queue.setup(),
                memory: Arc::clone(&memory),
                kick: guest.kicks[index].try_clone().unwrap(),
                call: Some(guest.calls[index].try_clone().unwrap()),
                enabled: true,
                features,
            };
            let start = Box::new(start);
            self.ask(guest, Request::Start { index, start }).unwrap();
        }
    }

    /// Says something to the fabric as a guest's VMM.
    pub(super) fn ask(&mut self, guest: &Guest, request: Request) -> Answer {
        let (answer, wait) = sync_channel(1);
        let generation = self.fabric.ports[guest.number].generation;
        self.fabric.answer(Message {
            device: guest.number as u32,
            generation,
            request,
            answer,
        });
        wait.try_recv().unwrap()
    }

    /// Turns until nothing is left to do at once.
    pub(super) fn settle(&mut self) {
        loop {
            self.fabric.turn(Some(Duration::ZERO)).unwrap();
            if self.fabric.ready.is_empty() {
                break;
            }
        }
    }

    /// What a guest's port has counted.
    pub(super) fn counters(&self, guest: &Guest) -> crate::net::PortCounters {
        self.fabric.ports[guest.number].counters
    }
}

impl Guest {
    pub(super) fn memory(&self) -> Arc<GuestMemory> {
        Arc::new(GuestMemory::with_regions(vec![self.arena.region(0).unwrap()]).unwrap())
    }

    fn post(&mut self) {
        let offset = self.arena.allocate(self.buffer_len as usize, 64);
        let range = Range {
            address: offset as u64,
            len: self.buffer_len,
        };
        self.receive.add(&[], &[range], offset as u64).unwrap();
    }

    /// Sends a frame with nothing left to be done for it.
    pub(super) fn send(&mut self, frame: &[u8]) {
        self.send_with(NetHeader::default(), frame);
    }

    /// Sends a frame behind this header, and notifies if it is asked to.
    pub(super) fn send_with(&mut self, header: NetHeader, frame: &[u8]) {
        self.enqueue(header, frame);
        self.kick();
    }

    /// Puts a frame into the ring, without showing it.
    pub(super) fn enqueue(&mut self, header: NetHeader, frame: &[u8]) {
        while self.transmit.take_used().is_some() {}
        let len = NET_HEADER_LEN + frame.len();
        let offset = self.arena.allocate(len, 64);
        self.arena.write(offset, &header.encode());
        self.arena.write(offset + NET_HEADER_LEN, frame);
        let range = Range {
            address: offset as u64,
            len: len as u32,
        };
        self.transmit.add(&[range], &[], 0).unwrap();
    }

    /// Shows what is in the ring.
    pub(super) fn kick(&mut self) {
        if self.transmit.kick_needed() {
            rustix::io::write(&self.kicks[1], &1u64.to_ne_bytes()).unwrap();
        }
    }

    /// What has arrived since the last call: headers and frames. The buffers are posted again.
    pub(super) fn received(&mut self) -> Vec<(NetHeader, Vec<u8>)> {
        let mut frames = Vec::new();
        while let Some(first) = self.take_buffer() {
            let header: [u8; NET_HEADER_LEN] = *first.first_chunk().unwrap();
            let header = NetHeader::decode(&header);
            let mut frame = first[NET_HEADER_LEN..].to_vec();
            for _ in 1..header.buffers {
                frame.extend(
                    self.take_buffer()
                        .expect("as many buffers as the header says"),
                );
            }
            frames.push((header, frame));
        }
        self.receive.kick_needed();
        frames
    }

    fn take_buffer(&mut self) -> Option<Vec<u8>> {
        let (offset, written) = self.receive.take_used()?;
        let mut bytes = vec![0; written as usize];
        self.arena.read(offset as usize, &mut bytes);
        self.post();
        Some(bytes)
    }

    /// How often the guest was interrupted for frames it received, since it was asked last.
    pub(super) fn interrupts(&self) -> u64 {
        count(&self.calls[0])
    }
}
