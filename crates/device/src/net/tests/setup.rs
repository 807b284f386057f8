//! Guests of a network, played in this process: their drivers and their VMMs' words.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::{Duration, Instant};

use guestmem::guest::{GuestMemory, Range, RegionSpec};
use guestmem_driver::{Arena, DriverQueue};
use l2::bridge::{BridgeLimits, PortConfig};
use rustix::event::{EventfdFlags, eventfd};
use wire::ethernet::MacAddress;
use wire::net_header::{NET_HEADER_LEN, NetHeader};

use crate::frontend::{Answer, Message, Request, RingStart};
use crate::net::{ModerationSetting, NetFabric, NetLedger, NetPortConfig, PortCounters};

/// The ring on which a guest with one pair receives, and the one on which it sends.
pub(super) const RECEIVE: usize = 0;
pub(super) const TRANSMIT: usize = 1;

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

/// The feature of a frame across several buffers.
pub(super) const MERGEABLE: u64 = 1 << 15;

/// A network's name.
pub(super) const LAN: &str = "lan";

/// Of a guest's memory, in bytes. Only what is used takes up any.
pub(super) const ARENA_LEN: usize = 128 << 20;

/// Room for a frame that is sent, with gaps between its pieces, in bytes.
const SENT_LEN: usize = 96 << 10;

/// What lies between two pieces of a frame or of a buffer, in bytes.
const GAP_LEN: usize = 24;

/// What is where no write belongs.
const UNTOUCHED: u8 = 0xee;

/// How long anything may take. Nothing takes that long unless it is broken.
const PATIENCE: Duration = Duration::from_secs(20);

pub(super) struct Setup {
    pub(super) fabric: NetFabric,
    directory: tempfile::TempDir,
}

/// How a guest's driver sets up its rings and buffers.
#[derive(Debug, Clone)]
pub(super) struct Driver {
    pub(super) features: u64,
    pub(super) ring_size: u16,
    pub(super) packed: bool,
    pub(super) event_index: bool,
    pub(super) indirect: bool,
    /// The pieces of each buffer for frames that come, in bytes.
    pub(super) buffer: Vec<u32>,
    pub(super) queue_pairs: u16,
    pub(super) moderation: ModerationSetting,
}

impl Default for Driver {
    fn default() -> Driver {
        Driver {
            features: LINUX,
            ring_size: 64,
            packed: false,
            event_index: true,
            indirect: false,
            buffer: vec![2048],
            queue_pairs: 1,
            moderation: ModerationSetting::Off,
        }
    }
}

impl Driver {
    /// One that leaves nothing to be done and takes nothing unfinished.
    pub(super) fn plain() -> Driver {
        Driver {
            features: PLAIN,
            ..Driver::default()
        }
    }

    /// One for each kind of ring.
    pub(super) fn of_each_kind() -> Vec<Driver> {
        let choices = (0..8).map(|bits| [1, 2, 4].map(|bit| bits & bit != 0));
        let drivers = choices.map(|[packed, event_index, indirect]| Driver {
            packed,
            event_index,
            indirect,
            ..Driver::default()
        });
        drivers.collect()
    }
}

/// A guest, with its driver.
pub(super) struct Guest {
    pub(super) name: String,
    pub(super) number: usize,
    pub(super) mac: MacAddress,
    pub(super) arena: Arc<Arena>,
    /// As virtio numbers them.
    pub(super) rings: Vec<DriverQueue>,
    pub(super) driver: Driver,
    /// One for each ring.
    kicks: Vec<File>,
    calls: Vec<File>,
    /// Places for frames to send that the device does not have.
    free: Vec<usize>,
    /// Frames sent whose buffers have not come back.
    pub(super) outstanding: usize,
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

/// A frame from one guest to another, of a type that is not parsed.
pub(super) fn frame(to: MacAddress, from: MacAddress, len: usize) -> Vec<u8> {
    let mut frame = Vec::with_capacity(len);
    frame.extend_from_slice(&to.0);
    frame.extend_from_slice(&from.0);
    frame.extend_from_slice(&[0x88, 0xb5]);
    frame.extend((14..len).map(|index| (index * 7) as u8));
    frame
}

/// The header of a frame for which nothing is left to be done, as it arrives in so many buffers.
pub(super) fn done(buffers: u16) -> NetHeader {
    NetHeader {
        buffers,
        ..NetHeader::default()
    }
}

impl Setup {
    pub(super) fn new() -> Setup {
        Setup::with_mtu(1500)
    }

    pub(super) fn with_mtu(mtu: u16) -> Setup {
        let limits = BridgeLimits {
            mtu,
            ..BridgeLimits::default()
        };
        Setup::of(NetFabric::new().unwrap(), limits)
    }

    /// Networks of a daemon that goes on with what is written down here.
    pub(super) fn kept<'a>(ledger: &NetLedger, networks: impl Iterator<Item = &'a str>) -> Setup {
        let mut fabric = NetFabric::new().unwrap();
        fabric.set_ledger(ledger.clone());
        for network in networks {
            fabric
                .add_network(network, BridgeLimits::default())
                .unwrap();
        }
        Setup::around(fabric)
    }

    fn of(mut fabric: NetFabric, limits: BridgeLimits) -> Setup {
        fabric.add_network(LAN, limits).unwrap();
        Setup::around(fabric)
    }

    fn around(fabric: NetFabric) -> Setup {
        // Where sockets are removed at once, as in the runtime directory.
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
        let directory = tempfile::Builder::new().permissions(mode).tempdir();
        Setup {
            fabric,
            directory: directory.unwrap(),
        }
    }

    /// A guest as Linux makes them, with a static address.
    pub(super) fn guest(&mut self, number: u8) -> Guest {
        self.guest_with(number, Driver::default())
    }

    pub(super) fn guest_with(&mut self, number: u8, driver: Driver) -> Guest {
        self.guest_at(number, PortConfig::guest(mac(number)), driver)
    }

    /// A guest at a port of this kind. Its driver runs.
    pub(super) fn guest_at(&mut self, number: u8, bridge: PortConfig, driver: Driver) -> Guest {
        self.add_port(number, bridge, &driver);
        let arena = Arc::new(Arena::new(ARENA_LEN).unwrap());
        self.guest_in(number, driver, arena)
    }

    pub(super) fn socket_of(&self, number: u8) -> PathBuf {
        self.directory.path().join(format!("vm{number}"))
    }

    pub(super) fn add_port(&mut self, number: u8, bridge: PortConfig, driver: &Driver) {
        let config = self.port_config(number, bridge, driver);
        self.fabric.add_port(config).unwrap();
    }

    pub(super) fn port_config(
        &self,
        number: u8,
        bridge: PortConfig,
        driver: &Driver,
    ) -> NetPortConfig {
        NetPortConfig {
            network: LAN.to_owned(),
            vm: format!("vm{number}"),
            vhost_user: self.socket_of(number),
            bridge,
            queue_pairs: driver.queue_pairs,
            moderation: driver.moderation,
        }
    }

    /// A guest of this memory, at a port that is there. Its driver runs.
    pub(super) fn guest_in(&mut self, number: u8, driver: Driver, arena: Arc<Arena>) -> Guest {
        self.guest_of(LAN, number, driver, arena)
    }

    /// The same in another network.
    pub(super) fn guest_of(
        &mut self,
        network: &str,
        number: u8,
        driver: Driver,
        arena: Arc<Arena>,
    ) -> Guest {
        let name = format!("vm{number}");
        let (_, port) = self.fabric.port_named(network, &name).unwrap();
        let make = match driver.packed {
            true => DriverQueue::packed,
            false => DriverQueue::new,
        };
        let size = driver.ring_size;
        let ring = |_| {
            make(
                Arc::clone(&arena),
                0,
                size,
                driver.event_index,
                driver.indirect,
            )
        };
        let count = 2 * usize::from(driver.queue_pairs);
        let mut guest = Guest {
            name,
            number: port,
            mac: mac(number),
            rings: (0..count).map(ring).collect(),
            arena,
            driver,
            kicks: (0..count).map(|_| event()).collect(),
            calls: (0..count).map(|_| event()).collect(),
            free: Vec::new(),
            outstanding: 0,
        };
        for ring in (0..count).step_by(2) {
            guest.post_all(ring);
        }
        self.ask(&guest, Request::Attach).unwrap();
        self.start(&guest);
        guest
    }

    /// Lets a guest's driver run.
    pub(super) fn start(&mut self, guest: &Guest) {
        let memory = guest.memory();
        for ring in 0..guest.rings.len() {
            let base = guest.rings[ring].setup().ring_base;
            self.start_ring(guest, ring, base, &memory).unwrap();
        }
    }

    /// Lets one ring of a guest run, from there on.
    pub(super) fn start_ring(
        &mut self,
        guest: &Guest,
        index: usize,
        ring_base: u32,
        memory: &Arc<GuestMemory>,
    ) -> Answer {
        let mut setup = guest.rings[index].setup();
        setup.ring_base = ring_base;
        let start = RingStart {
            ledger: None,
            setup,
            memory: Arc::clone(memory),
            kick: guest.kicks[index].try_clone().unwrap(),
            call: Some(guest.calls[index].try_clone().unwrap()),
            enabled: true,
            features: guest.driver.features,
        };
        let start = Box::new(start);
        self.ask(guest, Request::Start { index, start })
    }

    /// Says something to the fabric as a guest's VMM.
    pub(super) fn ask(&mut self, guest: &Guest, request: Request) -> Answer {
        let generation = self.fabric.ports[guest.number].generation;
        self.ask_as(guest, generation, request)
    }

    /// Says something as the VMM of that use of the port.
    pub(super) fn ask_as(&mut self, guest: &Guest, generation: u64, request: Request) -> Answer {
        let (answer, wait) = sync_channel(1);
        self.fabric.answer(Message {
            device: guest.number as u32,
            generation,
            request,
            answer,
        });
        wait.try_recv().unwrap()
    }

    /// Turns until nothing is left to do at once, and the fabric waits to be notified.
    pub(super) fn settle(&mut self) {
        loop {
            let is_idle = self.fabric.ready.is_empty() && self.fabric.answering.is_empty();
            self.fabric.turn(Some(Duration::ZERO)).unwrap();
            if is_idle && self.fabric.ready.is_empty() {
                break;
            }
        }
    }

    /// Turns until nothing is left to do later, either: all that was held back has been sent.
    pub(super) fn rest(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        self.settle();
        while !(self.fabric.owed.is_empty() && self.fabric.throttled.is_empty()) {
            assert!(
                Instant::now() < deadline,
                "the fabric does not come to rest"
            );
            self.fabric.turn(Some(Duration::from_millis(5))).unwrap();
            self.settle();
        }
    }

    /// What a guest's port has counted.
    pub(super) fn counters(&self, guest: &Guest) -> PortCounters {
        self.fabric.ports[guest.number].counters
    }

    /// Whether a guest's rings run.
    pub(super) fn runs(&self, guest: &Guest) -> bool {
        self.fabric.ports[guest.number]
            .rings
            .iter()
            .all(Option::is_some)
    }
}

impl Guest {
    pub(super) fn memory(&self) -> Arc<GuestMemory> {
        self.memory_of(vec![self.arena.region(0).unwrap()])
    }

    pub(super) fn memory_of(&self, regions: Vec<RegionSpec>) -> Arc<GuestMemory> {
        Arc::new(GuestMemory::with_regions(regions).unwrap())
    }

    /// Posts as many buffers as the ring has room for.
    fn post_all(&mut self, ring: usize) {
        loop {
            let place = self.arena.allocate(self.buffer_span(), 64);
            if !self.post(ring, place) {
                break;
            }
        }
        self.rings[ring].kick_needed();
    }

    fn buffer_span(&self) -> usize {
        let lens = self.driver.buffer.iter().map(|len| *len as usize + GAP_LEN);
        lens.sum()
    }

    fn post(&mut self, ring: usize, place: usize) -> bool {
        // What was there before must not look as if it had arrived.
        self.arena
            .write(place, &vec![UNTOUCHED; self.buffer_span()]);
        let mut address = place as u64;
        let range = |len: &u32| {
            let range = Range { address, len: *len };
            address += u64::from(*len) + GAP_LEN as u64;
            range
        };
        let ranges: Vec<Range> = self.driver.buffer.iter().map(range).collect();
        self.rings[ring].add(&[], &ranges, place as u64).is_ok()
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
        let has_room = self.try_enqueue(TRANSMIT, header, frame, &[]);
        assert!(has_room, "the transmit ring of {} is full", self.name);
    }

    /// Puts a frame into a ring if that has room, header and frame cut after each of these lengths in bytes.
    pub(super) fn try_enqueue(
        &mut self,
        ring: usize,
        header: NetHeader,
        frame: &[u8],
        cuts: &[usize],
    ) -> bool {
        self.take_sent(ring);
        let place = self.free.pop();
        let place = place.unwrap_or_else(|| self.arena.allocate(SENT_LEN, 64));
        let bytes = [&header.encode()[..], frame].concat();
        let (mut rest, mut at, mut ranges) = (&bytes[..], place, Vec::new());
        for len in cuts.iter().copied().chain([usize::MAX]) {
            let (piece, behind) = rest.split_at(len.min(rest.len()));
            if piece.is_empty() {
                break;
            }
            self.arena.write(at, piece);
            ranges.push(Range {
                address: at as u64,
                len: piece.len() as u32,
            });
            at += piece.len() + GAP_LEN;
            rest = behind;
        }
        let added = self.rings[ring].add(&ranges, &[], place as u64).is_ok();
        match added {
            true => self.outstanding += 1,
            false => self.free.push(place),
        }
        added
    }

    /// Puts a chain of any memory into the ring to send, without showing it.
    pub(super) fn enqueue_ranges(&mut self, readable: &[Range], writable: &[Range]) {
        let place = self.arena.allocate(SENT_LEN, 64);
        self.rings[TRANSMIT]
            .add(readable, writable, place as u64)
            .unwrap();
        self.outstanding += 1;
    }

    /// Takes back the frames that have left.
    pub(super) fn take_sent(&mut self, ring: usize) {
        while let Some((place, _)) = self.rings[ring].take_used() {
            self.free.push(place as usize);
            self.outstanding -= 1;
        }
    }

    /// Shows what is in the ring.
    pub(super) fn kick(&mut self) {
        self.kick_on(TRANSMIT);
    }

    /// The same with this ring. Returns whether a notification was asked for.
    pub(super) fn kick_on(&mut self, ring: usize) -> bool {
        let is_needed = self.rings[ring].kick_needed();
        if is_needed {
            rustix::io::write(&self.kicks[ring], &1u64.to_ne_bytes()).unwrap();
        }
        is_needed
    }

    /// Notifies though it is not asked to.
    pub(super) fn kick_anyway(&mut self, ring: usize) {
        self.rings[ring].kick_needed();
        rustix::io::write(&self.kicks[ring], &1u64.to_ne_bytes()).unwrap();
    }

    /// Where the guest is interrupted for this ring.
    pub(super) fn call(&self, ring: usize) -> File {
        self.calls[ring].try_clone().unwrap()
    }

    /// What has arrived since the last call: headers and frames. The buffers are posted again.
    pub(super) fn received(&mut self) -> Vec<(NetHeader, Vec<u8>)> {
        self.received_on(RECEIVE)
    }

    pub(super) fn received_on(&mut self, ring: usize) -> Vec<(NetHeader, Vec<u8>)> {
        let mut frames = Vec::new();
        while let Some(first) = self.take_buffer(ring) {
            let header: [u8; NET_HEADER_LEN] = *first.first_chunk().unwrap();
            let header = NetHeader::decode(&header);
            let capacity = self.driver.buffer.iter().sum::<u32>() as usize;
            let mut last_len = first.len();
            let mut frame = first[NET_HEADER_LEN..].to_vec();
            for _ in 1..header.buffers {
                assert_eq!(last_len, capacity, "only the last buffer is not full");
                let next = self.take_buffer(ring);
                let next = next.expect("as many buffers as the header says");
                last_len = next.len();
                frame.extend(next);
            }
            frames.push((header, frame));
        }
        self.rings[ring].kick_needed();
        frames
    }

    /// The frames alone.
    pub(super) fn frames(&mut self) -> Vec<Vec<u8>> {
        let received = self.received().into_iter();
        received.map(|(_, frame)| frame).collect()
    }

    /// What was written into the next buffer. Behind that, and between its pieces, nothing was.
    fn take_buffer(&mut self, ring: usize) -> Option<Vec<u8>> {
        let (place, written) = self.rings[ring].take_used()?;
        let (place, mut left) = (place as usize, written as usize);
        let mut all = vec![0; self.buffer_span()];
        self.arena.read(place, &mut all);
        let (mut bytes, mut rest) = (Vec::new(), &all[..]);
        for len in &self.driver.buffer {
            let (piece, behind) = rest.split_at(*len as usize + GAP_LEN);
            let (used, untouched) = piece.split_at(left.min(*len as usize));
            bytes.extend_from_slice(used);
            assert!(
                untouched.iter().all(|byte| *byte == UNTOUCHED),
                "more was written than the {written} bytes that were said"
            );
            left -= used.len();
            rest = behind;
        }
        assert_eq!(
            left, 0,
            "more is said to be written than there was room for"
        );
        assert!(self.post(ring, place), "what has come back has room again");
        Some(bytes)
    }

    /// How often the guest was interrupted for frames it received, since it was asked last.
    pub(super) fn interrupts(&self) -> u64 {
        self.interrupts_on(RECEIVE)
    }

    pub(super) fn interrupts_on(&self, ring: usize) -> u64 {
        count(&self.calls[ring])
    }
}
