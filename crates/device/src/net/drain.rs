//! Frames that a guest has sent: taken out of its ring, judged, and sorted by destination.

use std::sync::Arc;

use guestmem::guest::{GuestMemory, total_len};
use guestmem::queue::{Chain, Queue, QueueError};
use l2::bridge::{PortId, Tagging, Verdict};
use policy::Time;
use wire::ethernet::{HEADER_LEN, TAG_LEN};
use wire::net_header::{NET_HEADER_LEN, NetHeader, Offloads};

use super::cost;
use super::deliver::Source;
use super::port::{PortCounters, pair_of};
use super::snapshot::Frame;
use super::station::MAX_ASKED_SEGMENTS;
use super::{Behind, NetFabric, Network};

/// The most frames that are taken from a ring at a time. Many enough that what is done once for a batch costs little for each frame, few
/// enough that their beginnings stay in the processor's first cache.
pub(super) const MAX_BATCH: usize = 64;

/// Longer than that no frame is: what the largest offload leaves to be cut, with two tags.
pub(super) const MAX_FRAME_LEN: usize = 65_535 + HEADER_LEN + 2 * TAG_LEN;

/// Frames on their way, with the lists of where they go.
#[derive(Debug)]
pub(super) struct Batch {
    limit: usize,
    pub(super) chains: Vec<Chain>,
    pub(super) frames: Vec<Frame>,
    /// How many of the chains and frames are of this batch.
    count: usize,
    /// What it costs to pass on those that were judged: see [`cost`].
    cost: usize,
    /// By the place of the destination in the table of ports: which frames go there, in their order.
    lists: Vec<Vec<Routed>>,
    /// Destinations whose list is not empty.
    touched: Vec<usize>,
    /// Which frames are for the network itself.
    asked: Vec<Routed>,
    /// Which frames leave the network.
    pub(super) leaving: Vec<Routed>,
    /// Which frames go nowhere, in their order, and why.
    pub(super) refused: Vec<(usize, &'static str)>,
    /// Deliveries that were given up, as the sender has changed the frame behind its headers.
    pub(super) spoiled: u64,
}

/// A frame that goes to a destination.
#[derive(Debug, Clone, Copy)]
pub(super) struct Routed {
    pub(super) frame: usize,
    pub(super) tagging: Tagging,
}

impl Default for Batch {
    fn default() -> Self {
        Batch {
            limit: MAX_BATCH,
            chains: vec![Chain::default(); MAX_BATCH],
            frames: vec![Frame::default(); MAX_BATCH],
            count: 0,
            cost: 0,
            lists: Vec::new(),
            touched: Vec::new(),
            asked: Vec::new(),
            leaving: Vec::new(),
            refused: Vec::new(),
            spoiled: 0,
        }
    }
}

impl Batch {
    pub(super) fn set_limit(&mut self, frames: usize) {
        self.limit = frames.clamp(1, MAX_BATCH);
    }

    /// Takes frames out of a ring. Returns whether there may be more.
    fn take(&mut self, queue: &mut Queue) -> Result<bool, QueueError> {
        self.begin();
        let (mut bytes, mut descriptors) = (0, 0);
        while self.count < self.limit
            && bytes < cost::MAX_BATCH_BYTES
            && descriptors < cost::MAX_BATCH_DESCRIPTORS
        {
            let chain = &mut self.chains[self.count];
            if !queue.pop(chain)? {
                return Ok(false);
            }
            let len = total_len(&chain.readable);
            let frame = &mut self.frames[self.count];
            (frame.len, frame.descriptors) = (len, chain.descriptors.into());
            bytes += len;
            descriptors += frame.descriptors;
            self.count += 1;
        }
        Ok(true)
    }

    /// Forgets the batch before.
    pub(super) fn begin(&mut self) {
        (self.count, self.cost) = (0, 0);
        self.refused.clear();
    }

    /// What it costs to pass on what was judged.
    pub(super) fn cost(&self) -> usize {
        self.cost
    }

    /// Whether there is enough to do.
    pub(super) fn is_full(&self) -> bool {
        self.cost >= cost::MAX_BATCH
    }

    /// Copies the beginnings of frames, checks their headers, and has the bridge say where they go. Once there is enough to do, the others
    /// are left out of the batch: returns how many that are.
    fn classify(
        &mut self,
        now: Time,
        from: PortId,
        network: &mut Network,
        memory: &GuestMemory,
        sends: Offloads,
        counters: &mut PortCounters,
    ) -> usize {
        for index in 0..self.count {
            if self.is_full() {
                let left = self.count - index;
                self.count = index;
                return left;
            }
            let (chain, frame) = (&self.chains[index], &mut self.frames[index]);
            self.cost += cost::DESCRIPTOR * frame.descriptors;
            let Some(len) = frame_len(frame.len) else {
                // What was here before says nothing of this sender's flows.
                frame.receive(0);
                counters.malformed_headers += 1;
                network.bridge.charge_malformed(now, from, frame.len);
                continue;
            };
            // It fails only if the guest's memory is gone, which is met again when the chain is copied.
            if memory.read(&chain.readable, 0, frame.receive(len)).is_err() {
                frame.receive(0);
                counters.malformed_headers += 1;
                network.bridge.charge_malformed(now, from, len);
                continue;
            }
            counters.frames_from_guest += 1;
            counters.bytes_from_guest += len as u64;
            let header = NetHeader::decode(frame.header());
            match header.check(frame.head(), len, sends) {
                Ok(offload) => frame.set_offload(offload),
                Err(_) => {
                    counters.malformed_headers += 1;
                    network.bridge.charge_malformed(now, from, len);
                    self.refused.push((index, "malformed_header"));
                    continue;
                }
            }
            self.route(now, from, network, index);
        }
        0
    }

    /// Puts a frame that is in memory of our own into the batch. Returns whether it may be what its header says.
    pub(super) fn put(
        &mut self,
        index: usize,
        header: NetHeader,
        bytes: &[u8],
        sends: Offloads,
    ) -> bool {
        let frame = &mut self.frames[index];
        frame.receive_whole(bytes);
        match header.check(frame.head(), bytes.len(), sends) {
            Ok(offload) => {
                frame.set_offload(offload);
                true
            }
            Err(_) => false,
        }
    }

    /// Puts a frame on the lists of its destinations.
    pub(super) fn route(&mut self, now: Time, from: PortId, network: &mut Network, index: usize) {
        let frame = &self.frames[index];
        let segment_len = frame.offload().longest_segment_len(frame.len);
        // Whether a guest takes segments uncut is known only when it is given them.
        let pieces = match segment_len == frame.len {
            true => 1,
            false => frame.offload().segments(frame.len),
        };
        let cost = frame.len + cost::PIECE * pieces + cost::DESCRIPTOR * frame.descriptors;
        let verdict = network
            .bridge
            .classify(now, from, frame.head(), frame.len, segment_len);
        match verdict {
            Verdict::Drop(refusal) => self.refused.push((index, refusal.name())),
            Verdict::Port(to, tagging) => {
                self.cost += cost;
                self.append(network, to, index, tagging);
            }
            Verdict::Flood => {
                for (to, tagging) in network.bridge.flood_ports() {
                    self.cost += cost;
                    self.append(network, *to, index, *tagging);
                }
            }
        }
    }

    pub(super) fn taken_frames(&self) -> &[Frame] {
        &self.frames[..self.count]
    }

    fn append(&mut self, network: &Network, to: PortId, index: usize, tagging: Tagging) {
        let routed = Routed {
            frame: index,
            tagging,
        };
        let number = match network.behind(to) {
            Some(Behind::Guest(number)) => number,
            Some(Behind::Uplink) => {
                self.cost += cost::SYSTEM_CALL * network.calls_to_send(&self.frames[index]);
                return self.leaving.push(routed);
            }
            Some(Behind::Station) => {
                let frame = &self.frames[index];
                let questions = frame.offload().segments(frame.len);
                self.cost += cost::QUESTION * questions.clamp(1, MAX_ASKED_SEGMENTS);
                return self.asked.push(routed);
            }
            None => return,
        };
        if self.lists.len() <= number {
            self.lists.resize_with(number + 1, Vec::new);
        }
        let list = &mut self.lists[number];
        if list.is_empty() {
            self.touched.push(number);
        }
        list.push(routed);
    }

    /// The next destination with its list, which is to be given back.
    pub(super) fn next_destination(&mut self) -> Option<(usize, Vec<Routed>)> {
        let number = self.touched.pop()?;
        Some((number, std::mem::take(&mut self.lists[number])))
    }

    /// The frames that are for the network itself; the list is to be given back.
    pub(super) fn take_asked(&mut self) -> Vec<Routed> {
        std::mem::take(&mut self.asked)
    }

    /// Keeps that list's memory for use again.
    pub(super) fn give_back_asked(&mut self, mut list: Vec<Routed>) {
        list.clear();
        self.asked = list;
    }

    /// Keeps a list's memory for use again.
    pub(super) fn give_back(&mut self, number: usize, mut list: Vec<Routed>) {
        list.clear();
        self.lists[number] = list;
    }
}

/// The length of the frame in a chain of so many bytes, behind its virtio header, unless it is none.
fn frame_len(chain_len: usize) -> Option<usize> {
    let len = chain_len.checked_sub(NET_HEADER_LEN)?;
    (HEADER_LEN..=MAX_FRAME_LEN).contains(&len).then_some(len)
}

impl NetFabric {
    /// Copies the frames of the batch to where they go, one destination after the other: each ring is touched once.
    pub(super) fn pass_on(&mut self, network: usize, from: PortId, source: &Source<'_>) {
        self.note_used(network);
        while let Some((destination, list)) = self.batch.next_destination() {
            self.deliver(destination, &list, source);
            self.batch.give_back(destination, list);
        }
        self.send_out(network, from, source);
        self.ask_station(network, from, source);
    }

    /// Passes on a batch of what a guest has sent on this ring. If there may be more, the ring has another turn.
    pub(super) fn drain(&mut self, number: usize, index: usize) {
        let Some(port) = self.ports.get_mut(number) else {
            return;
        };
        let Some(ring) = port.rings.get_mut(index).and_then(Option::as_mut) else {
            return;
        };
        ring.is_ready = false;
        if !ring.ring.enabled {
            return;
        }
        let network = &mut self.networks[port.network];
        if let Some(until) = network.bridge.throttled_until(self.now, port.id) {
            self.throttled.insert((until, number, index));
            return;
        }
        // It has said that there is something. Until we ask again before we sleep, it need not say so for each frame.
        ring.queue().disable_notifications();
        let memory = Arc::clone(ring.queue().memory());
        let taken = self.batch.take(ring.queue());
        let (from, pairs) = (port.id, port.queue_pairs);
        let left = self.batch.classify(
            self.now,
            port.id,
            network,
            &memory,
            port.sends,
            &mut port.counters,
        );
        if left > 0 {
            // Less than a batch.
            ring.queue().rewind(left as u16);
        }
        if pairs > 1 {
            for frame in self.batch.taken_frames() {
                port.steering.learn(frame.flow(), pair_of(index));
            }
        }
        let network = port.network;
        let source = Source::Guest(&memory);
        if let Some(mut watch) = self.captures.watch(network, number, &port.vm) {
            watch.taken(&self.batch, &source);
        }
        self.pass_on(network, from, &source);
        self.blind_cost += self.batch.cost;
        self.ports[number].counters.malformed_headers += std::mem::take(&mut self.batch.spoiled);
        let Some(ring) = self.ports[number].ring(index) else {
            return;
        };
        for chain in &self.batch.chains[..self.batch.count] {
            ring.ring.complete(chain, 0);
        }
        let frames = self.batch.taken_frames().iter();
        let bytes = frames.map(|frame| frame.len).sum();
        self.show_sent(number, index, bytes);
        // Nothing of this batch is needed any more.
        self.answer_batch(network);
        if memory.is_poisoned() {
            return self.fail_port(number, &guestmem::guest::MemoryError::Poisoned);
        }
        match taken {
            _ if left > 0 => self.make_ready(number, index),
            Ok(true) => self.make_ready(number, index),
            Ok(false) => self.leave_unarmed(number, index),
            Err(error) => self.fail_port(number, &error),
        }
    }
}
