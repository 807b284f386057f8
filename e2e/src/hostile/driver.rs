//! A scripted driver, right or wrong.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use guestmem::guest::Range;
use guestmem_driver::{Arena, DriverQueue};
use wire::vsock::{HEADER_LEN, HOST_CID, Header, Operation};

use super::device::{ACKNOWLEDGE, DRIVER, DRIVER_OK, Device, FEATURES_OK, QueueAddresses};
use super::{ECHO_PORT, features};

/// Ring 0: packets to the guest.
pub(super) const RX: usize = 0;
/// Ring 1: packets from the guest.
pub(super) const TX: usize = 1;

/// How long anything that must happen may take.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// Buffers for packets to the guest, and the length of each in bytes.
const RECEIVE_BUFFERS: usize = 100;
const RECEIVE_LEN: u32 = 4096;

/// Places for packets from the guest, small ones and large ones, and the length of each in bytes.
const SMALL_PLACES: usize = 100;
const SMALL_LEN: usize = 128;
const LARGE_PLACES: usize = 10;
const LARGE_LEN: usize = 61_440;

/// The token of a chain without a place.
const NO_PLACE: u64 = u64::MAX;

/// The driver, with the device in its hands and one huge page as its memory.
#[derive(Debug)]
pub struct Driver {
    // The order of the fields is the order of their drop: the device is reset before its memory goes.
    device: Device,
    queues: [DriverQueue; 2],
    arena: Arc<Arena>,
    /// The arena's address in the guest's physical memory.
    base: u64,
    size: u16,
    notify_places: [usize; 2],
    cid: u64,
    buffers: Vec<usize>,
    small_places: Vec<usize>,
    large_places: Vec<usize>,
    next_port: u32,
}

/// A circuit as the attacker sees it: its own port, the host's port, and what it has sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct Circuit {
    pub(super) local: u32,
    pub(super) remote: u32,
}

impl Driver {
    /// Resets the device and starts it with these features.
    pub(super) fn start(taken: u64) -> Result<Driver> {
        let driver = Driver::prepare(taken)?;
        driver.device.enable_queue(RX as u16);
        driver.device.enable_queue(TX as u16);
        let status = ACKNOWLEDGE | DRIVER | FEATURES_OK | DRIVER_OK;
        driver.device.set_status(status);
        driver.notify(RX);
        Ok(driver)
    }

    /// Everything but enabling the queues and the last step, which is the attack's.
    pub(super) fn prepare(taken: u64) -> Result<Driver> {
        let device = Device::open()?;
        device.configuration().set_bus_master(true)?;
        device.reset()?;
        device.set_status(ACKNOWLEDGE | DRIVER);
        device.set_features(taken & device.features());
        device.set_status(ACKNOWLEDGE | DRIVER | FEATURES_OK);
        let arena = Arc::new(Arena::huge_page().context("there is no huge page")?);
        let base = arena.physical_address()?;
        let size = device.queue_size(TX as u16);
        let event_index = taken & features::EVENT_INDEX != 0;
        let indirect = taken & features::INDIRECT != 0;
        let queues = [(); 2]
            .map(|()| DriverQueue::new(Arc::clone(&arena), base, size, event_index, indirect));
        let places = |count, len| (0..count).map(|_| arena.allocate(len, 64)).collect();
        let buffers: Vec<usize> = places(RECEIVE_BUFFERS, RECEIVE_LEN as usize);
        let mut driver = Driver {
            notify_places: [RX, TX].map(|queue| device.notify_place(queue as u16)),
            cid: device.cid(),
            small_places: places(SMALL_PLACES, SMALL_LEN),
            large_places: places(LARGE_PLACES, LARGE_LEN),
            device,
            queues,
            arena: Arc::clone(&arena),
            base,
            size,
            buffers,
            next_port: 40_000,
        };
        for token in 0..driver.buffers.len() {
            driver.post(token);
        }
        // The device reads the index when it starts; whether it wants a notification is not known before.
        let _ = driver.queues[RX].kick_needed();
        for queue in [RX, TX] {
            let addresses = driver.addresses(queue);
            driver.device.set_queue(queue as u16, size, addresses);
        }
        Ok(driver)
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Entries of each ring.
    pub(super) fn size(&self) -> u16 {
        self.size
    }

    /// The guest physical address of the driver's memory.
    pub(super) fn base(&self) -> u64 {
        self.base
    }

    /// Where a queue is.
    pub(super) fn addresses(&self, queue: usize) -> QueueAddresses {
        let setup = self.queues[queue].setup();
        [setup.descriptors, setup.available, setup.used]
            .map(|place| place - self.arena.base() + self.base)
    }

    /// A queue, to write anything into it.
    pub(super) fn tamper(&mut self, queue: usize) -> &mut DriverQueue {
        &mut self.queues[queue]
    }

    pub(super) fn notify(&self, queue: usize) {
        self.device.notify(self.notify_places[queue], queue as u16);
    }

    fn kick(&mut self, queue: usize) {
        if self.queues[queue].kick_needed() {
            self.notify(queue);
        }
    }

    /// Writes into fresh memory, and returns its guest physical address.
    pub(super) fn place(&self, bytes: &[u8]) -> u64 {
        let offset = self.arena.allocate(bytes.len().max(1), 64);
        self.arena.write(offset, bytes);
        self.base + offset as u64
    }

    /// A header with this guest as its source and no circuit behind it.
    pub(super) fn header(&self, operation: Operation, cid: u64, local: u32, remote: u32) -> Header {
        Header {
            src_cid: self.cid,
            dst_cid: cid,
            src_port: local,
            dst_port: remote,
            socket_type: 1,
            operation: operation as u16,
            buf_alloc: 256 * 1024,
            ..Header::default()
        }
    }

    /// The header of a packet of a circuit with the host.
    pub(super) fn header_of(&self, circuit: Circuit, operation: Operation, len: u32) -> Header {
        let cid = u64::from(HOST_CID);
        Header {
            len,
            ..self.header(operation, cid, circuit.local, circuit.remote)
        }
    }

    /// Sends a packet, as soon as the device has given back a place for it.
    pub(super) fn send(&mut self, header: &Header, payload: &[u8]) -> Result<()> {
        let sent = self.send_within(header, payload, PATIENCE)?;
        ensure!(sent, "the device takes no more packets");
        Ok(())
    }

    /// The same, but gives up after `patience`. Returns whether the packet was sent.
    pub(super) fn send_within(
        &mut self,
        header: &Header,
        payload: &[u8],
        patience: Duration,
    ) -> Result<bool> {
        let len = HEADER_LEN + payload.len();
        let until = Instant::now() + patience;
        loop {
            self.reclaim();
            let places = match len <= SMALL_LEN {
                true => &mut self.small_places,
                false => &mut self.large_places,
            };
            if let Some(offset) = places.pop() {
                self.arena.write(offset, &header.to_bytes());
                self.arena.write(offset + HEADER_LEN, payload);
                let range = self.range(offset, len as u32);
                if self.queues[TX].add(&[range], &[], offset as u64).is_ok() {
                    self.kick(TX);
                    return Ok(true);
                }
                // An attack's own chains may fill the ring.
                self.give_back(offset);
            }
            if Instant::now() > until {
                return Ok(false);
            }
            std::thread::yield_now();
        }
    }

    /// Puts a chain of any ranges into the transmit ring, as soon as there is room.
    pub(super) fn chain(&mut self, readable: &[Range], writable: &[Range]) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        loop {
            self.reclaim();
            if self.queues[TX].add(readable, writable, NO_PLACE).is_ok() {
                self.kick(TX);
                return Ok(());
            }
            ensure!(Instant::now() < until, "the device takes no more chains");
            std::thread::yield_now();
        }
    }

    /// The next packet from the device, if there is one.
    pub(super) fn try_receive(&mut self) -> Option<(Header, Vec<u8>)> {
        let (token, written) = self.queues[RX].take_used()?;
        let token = token as usize;
        let offset = self.buffers[token];
        let mut bytes = vec![0; written as usize];
        self.arena.read(offset, &mut bytes);
        self.post(token);
        self.kick(RX);
        let (header, payload) = bytes.split_first_chunk::<HEADER_LEN>()?;
        Some((Header::from_bytes(header), payload.to_vec()))
    }

    /// Waits for a packet that is wanted, and drops others.
    pub(super) fn receive(
        &mut self,
        mut wanted: impl FnMut(&Header) -> bool,
    ) -> Result<(Header, Vec<u8>)> {
        let until = Instant::now() + PATIENCE;
        loop {
            match self.try_receive() {
                Some((header, payload)) if wanted(&header) => return Ok((header, payload)),
                Some(_) => {}
                None => std::thread::yield_now(),
            }
            ensure!(
                Instant::now() < until,
                "the packet that is waited for does not come"
            );
        }
    }

    /// Dials a port of the host and waits for the answer.
    pub(super) fn connect(&mut self, port: u32) -> Result<Circuit> {
        self.connect_with(port, 256 * 1024)
    }

    /// The same with a receive buffer of so many bytes.
    pub(super) fn connect_with(&mut self, port: u32, buffer_bytes: u32) -> Result<Circuit> {
        let circuit = Circuit {
            local: self.fresh_port(),
            remote: port,
        };
        let mut header = self.header_of(circuit, Operation::Request, 0);
        header.buf_alloc = buffer_bytes;
        self.send(&header, b"")?;
        let (answer, _) = self.receive(|header| header.dst_port == circuit.local)?;
        ensure!(
            answer.operation == Operation::Response as u16,
            "port {port} is answered by {answer:?}"
        );
        Ok(circuit)
    }

    /// A port that was not used before.
    pub(super) fn fresh_port(&mut self) -> u32 {
        self.next_port += 1;
        self.next_port
    }

    /// Waits for the reset of a circuit.
    pub(super) fn is_reset(&mut self, circuit: Circuit) -> Result<()> {
        self.receive(|header| {
            header.dst_port == circuit.local && header.operation == Operation::Reset as u16
        })
        .context("the circuit is not reset")?;
        Ok(())
    }

    /// Waits for these bytes of a stream, in however many packets.
    pub(super) fn comes_back(&mut self, circuit: Circuit, expected: &[u8]) -> Result<()> {
        let mut arrived = Vec::new();
        while arrived.len() < expected.len() {
            let (_, payload) = self
                .receive(|header| {
                    header.dst_port == circuit.local && header.operation == Operation::Data as u16
                })
                .with_context(|| format!("{arrived:?} came back, and no more"))?;
            ensure!(!payload.is_empty(), "a packet of data without data");
            arrived.extend(payload);
        }
        ensure!(arrived == expected, "{arrived:?} came back");
        Ok(())
    }

    /// Shows that the line works: a few bytes to a program of the host and back.
    pub(super) fn works(&mut self) -> Result<()> {
        let circuit = self.connect(ECHO_PORT).context("the echo is not reached")?;
        let header = self.header_of(circuit, Operation::Data, 5);
        self.send(&header, b"hello")?;
        self.comes_back(circuit, b"hello")?;
        let header = self.header_of(circuit, Operation::Reset, 0);
        self.send(&header, b"")
    }

    /// Waits until the device has taken every packet.
    pub(super) fn is_done(&mut self) -> Result<()> {
        let until = Instant::now() + PATIENCE;
        while self.small_places.len() < SMALL_PLACES {
            self.reclaim();
            ensure!(Instant::now() < until, "the device does not take packets");
            std::thread::yield_now();
        }
        Ok(())
    }

    /// A range of the driver's memory.
    pub(super) fn range(&self, offset: usize, len: u32) -> Range {
        Range {
            address: self.base + offset as u64,
            len,
        }
    }

    fn post(&mut self, token: usize) {
        let range = self.range(self.buffers[token], RECEIVE_LEN);
        // There are fewer buffers than descriptors.
        self.queues[RX]
            .add(&[], &[range], token as u64)
            .unwrap_or_else(|full| unreachable!("{full}"));
    }

    fn reclaim(&mut self) {
        while let Some((token, _)) = self.queues[TX].take_used() {
            if token != NO_PLACE {
                self.give_back(token as usize);
            }
        }
    }

    fn give_back(&mut self, offset: usize) {
        match offset >= self.large_start() {
            true => self.large_places.push(offset),
            false => self.small_places.push(offset),
        }
    }

    /// Large places were allocated after all small ones.
    fn large_start(&self) -> usize {
        self.buffers[0] + RECEIVE_BUFFERS * RECEIVE_LEN as usize + SMALL_PLACES * SMALL_LEN
    }
}
