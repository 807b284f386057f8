//! A port: what a VMM has handed over, and what is remembered about it.

use std::path::PathBuf;

use guestmem::queue::Queue;
use l2::bridge::PortId;
use wire::net_header::Offloads;

use super::cost::Debt;
use super::model;
use super::moderation::{Moderation, ModerationSetting};
use crate::fault::LastFault;
use crate::frontend::Frontend;
use crate::ring::Ring;

/// The rings of pair `pair`: to the guest and from it (virtio 1.2, section 5.1.2).
pub(super) fn receive_ring(pair: usize) -> usize {
    2 * pair
}

/// The pair that a ring is of.
pub(super) fn pair_of(ring: usize) -> u8 {
    // There are MAX_QUEUE_PAIRS at most.
    (ring / 2) as u8
}

/// See [`receive_ring`].
pub(super) fn is_transmit(ring: usize) -> bool {
    ring % 2 == 1
}

/// Where frames of a port go and come from.
#[derive(Debug)]
pub(super) struct Port {
    pub(super) generation: u64,
    /// The VM's full name.
    pub(super) vm: String,
    /// The network's place in the table of networks.
    pub(super) network: usize,
    /// The port's number in the network's bridge.
    pub(super) id: PortId,
    /// Where the VMM connects.
    pub(super) path: PathBuf,
    pub(super) queue_pairs: u16,
    pub(super) moderation: ModerationSetting,
    /// The thread that speaks with the VMM; none while the link is down.
    pub(super) frontend: Option<Frontend>,
    /// A VMM is connected.
    pub(super) attached: bool,
    pub(super) last_fault: LastFault,
    pub(super) rings: Vec<Option<PortRing>>,
    /// Where a ring stands that has never run, in the format that the driver uses.
    pub(super) first_base: u32,
    /// What the guest may send, and what it takes.
    pub(super) sends: Offloads,
    pub(super) takes: Offloads,
    /// Frames may lie across several of its buffers.
    pub(super) mergeable: bool,
    /// Which pair of rings carries which flow: the one on which the guest sent of that flow last (virtio 1.2, section 5.1.5.6.5).
    pub(super) steering: Steering,
    pub(super) counters: PortCounters,
    pub(super) debt: Debt,
}

/// A ring, with its part of the port's interrupts.
#[derive(Debug)]
pub(super) struct PortRing {
    pub(super) ring: Ring,
    pub(super) moderation: Moderation,
    /// Of frames that the guest has sent, since it was last interrupted for them.
    pub(super) sent_bytes: usize,
    /// Waits for its turn to be drained.
    pub(super) is_ready: bool,
    /// Was found empty, and its guest need not notify when it no longer is.
    pub(super) is_unarmed: bool,
    /// In how many turns there was nothing since.
    pub(super) vain_looks: u8,
}

/// What a port has done, beside what its bridge has counted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// Frames that the guest has handed over, whatever became of them.
    pub frames_from_guest: u64,
    /// Their bytes, without the virtio header.
    pub bytes_from_guest: u64,
    /// Frames that the guest was given.
    pub frames_to_guest: u64,
    /// Their bytes, likewise.
    pub bytes_to_guest: u64,
    /// Frames for the guest that were dropped as it had no buffers posted.
    pub dropped_without_buffers: u64,
    /// Frames for the guest that were dropped as its driver is not running, while its VMM is there.
    pub dropped_without_driver: u64,
    /// Frames that were dropped as their virtio header contradicts them.
    pub malformed_headers: u64,
    /// Frames that were cut into segments in software, for receivers that take no large ones.
    pub segmented: u64,
    /// Checksums that were completed in software, for receivers that want them whole.
    pub checksummed: u64,
    /// Notifications that the guest has sent.
    pub kicks: u64,
    /// Interrupts that the guest was sent.
    pub interrupts: u64,
    /// Times when frames were shown to the guest without an interrupt, as it wanted none.
    pub interrupts_unwanted: u64,
    /// Interrupts that moderation has held back into a later one.
    pub interrupts_moderated: u64,
}

impl PortCounters {
    pub(super) fn count_to_guest(&mut self, len: usize) {
        self.frames_to_guest += 1;
        self.bytes_to_guest += len as u64;
    }
}

impl Port {
    /// Holds interrupts back otherwise from now on.
    pub(super) fn set_moderation(&mut self, setting: ModerationSetting) {
        if self.moderation == setting {
            return;
        }
        self.moderation = setting;
        for ring in self.rings.iter_mut().flatten() {
            ring.moderation.set(setting);
        }
    }

    pub(super) fn set_features(&mut self, features: u64) {
        self.sends = model::sends(features);
        self.takes = model::takes(features);
        self.mergeable = features & model::MRG_RXBUF != 0;
    }

    /// The rings that run: a frame for this flow goes into the first that is there.
    pub(super) fn receiving_ring(&self, flow: u32) -> Option<usize> {
        let runs = |index: &usize| {
            let ring = self.rings.get(*index).and_then(Option::as_ref);
            ring.is_some_and(|ring| ring.ring.enabled)
        };
        if self.queue_pairs == 1 {
            return Some(0).filter(runs);
        }
        let steered = receive_ring(usize::from(self.steering.pair(flow)));
        Some(steered).filter(runs).or_else(|| {
            let pairs = 0..usize::from(self.queue_pairs);
            pairs.map(receive_ring).find(|index| runs(index))
        })
    }

    /// Whether the guest's driver runs, as far as can be seen.
    pub(super) fn driver_runs(&self) -> bool {
        let mut rings = self.rings.iter().flatten();
        self.receiving_ring(0).is_some() && !rings.any(|ring| ring.ring.is_out_of_sight())
    }

    /// If the guest's driver runs, what was wrong before is over.
    pub(super) fn forget_fault(&mut self) {
        if self.driver_runs() {
            self.last_fault.driver_runs();
        }
    }

    /// Has the processor fetch buffers that will be filled soon.
    #[inline]
    pub(super) fn prefetch(&self, index: usize, ahead: u16, buffers: u16) {
        if let Some(Some(ring)) = self.rings.get(index) {
            ring.ring.queue.prefetch(ahead, buffers);
        }
    }

    pub(super) fn ring(&mut self, index: usize) -> Option<&mut PortRing> {
        self.rings.get_mut(index)?.as_mut()
    }
}

impl PortRing {
    pub(super) fn new(ring: Ring, setting: ModerationSetting) -> PortRing {
        PortRing {
            moderation: Moderation::new(setting, ring.queue.size()),
            ring,
            sent_bytes: 0,
            is_ready: false,
            is_unarmed: false,
            vain_looks: 0,
        }
    }

    pub(super) fn queue(&mut self) -> &mut Queue {
        &mut self.ring.queue
    }
}

impl AsRef<Ring> for PortRing {
    fn as_ref(&self) -> &Ring {
        &self.ring
    }
}

impl AsMut<Ring> for PortRing {
    fn as_mut(&mut self) -> &mut Ring {
        &mut self.ring
    }
}

/// Flows remembered: a collision steers two flows alike, which costs speed and nothing else.
const FLOWS: usize = 256;

/// On which pair of rings a guest sent of each flow last.
#[derive(Debug)]
pub(super) struct Steering(Box<[u8; FLOWS]>);

impl Default for Steering {
    fn default() -> Self {
        Steering(Box::new([0; FLOWS]))
    }
}

impl Steering {
    pub(super) fn learn(&mut self, flow: u32, pair: u8) {
        self.0[flow as usize % FLOWS] = pair;
    }

    fn pair(&self, flow: u32) -> u8 {
        self.0[flow as usize % FLOWS]
    }
}
