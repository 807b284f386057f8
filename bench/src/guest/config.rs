use std::time::Duration;

use super::Layout;
use crate::frontend::{
    FEATURE_EVENT_INDEX, FEATURE_INDIRECT, FEATURE_PROTOCOL, FEATURE_SEQPACKET, FEATURE_STREAM,
    FEATURE_VERSION_1,
};

/// How receive buffers are cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiveLayout {
    /// Header and payload in one descriptor of 4 KiB, as Linux since 6.3 has it.
    One,
    /// A descriptor of 44 bytes and one of 4 KiB, as Linux until 6.2 has it.
    HeaderApart,
    /// As small as can be: one byte of payload in each.
    Tiny,
    /// The header over two descriptors and the payload over two more.
    Cut,
}

impl ReceiveLayout {
    /// Lengths of the descriptors, in bytes.
    pub(super) fn lens(self) -> &'static [u32] {
        match self {
            ReceiveLayout::One => &[4096],
            ReceiveLayout::HeaderApart => &[44, 4096],
            ReceiveLayout::Tiny => &[45],
            ReceiveLayout::Cut => &[20, 24 + 100, 1000, 2900],
        }
    }
}

/// How a guest is made. The default is Linux of today.
#[derive(Debug, Clone)]
pub struct GuestConfig {
    /// Features that the driver takes.
    pub features: u64,
    /// Entries of each ring.
    pub ring_size: u16,
    /// The index that every ring begins at: near 65536, it wraps soon.
    pub first_index: u16,
    /// How packets to the device lie in memory.
    pub layout: Layout,
    /// How buffers for packets from the device lie in memory.
    pub receive_layout: ReceiveLayout,
    /// Each socket's receive buffer, in bytes.
    pub buffer_bytes: u32,
    /// Memory of the guest, in bytes. What is not touched costs nothing.
    pub memory_bytes: usize,
    /// How many regions the memory is handed over in.
    pub regions: usize,
    /// The regions go one by one, by ADD_MEM_REG, and not as a table.
    pub region_by_region: bool,
    /// The VMM has mapped the memory for itself: what the guest writes is not in what is handed over.
    pub private_memory: bool,
    /// The event queue goes to the device too. QEMU keeps it to itself.
    pub event_ring: bool,
    /// Linux's VSOCK_CLOSE_TIMEOUT.
    pub close_timeout: Duration,
    /// How long the calls that wait do so.
    pub patience: Duration,
    /// What one packet counts for in the receive queue beside its bytes: Linux since 6.12.92 resets a circuit when the
    /// packets of a queue count for more than the buffer. In bytes; zero for no such limit.
    pub packet_cost: u32,
}

impl Default for GuestConfig {
    fn default() -> GuestConfig {
        GuestConfig {
            features: FEATURE_STREAM
                | FEATURE_SEQPACKET
                | FEATURE_INDIRECT
                | FEATURE_EVENT_INDEX
                | FEATURE_PROTOCOL
                | FEATURE_VERSION_1,
            ring_size: 128,
            first_index: 0,
            layout: Layout::Apart,
            receive_layout: ReceiveLayout::One,
            buffer_bytes: 256 * 1024,
            memory_bytes: 32 << 20,
            regions: 1,
            region_by_region: false,
            private_memory: false,
            event_ring: false,
            close_timeout: Duration::from_secs(8),
            patience: Duration::from_secs(10),
            packet_cost: 576,
        }
    }
}

impl GuestConfig {
    /// Linux of today, which sends packets in this layout.
    pub fn with_layout(layout: Layout) -> GuestConfig {
        GuestConfig {
            layout,
            ..GuestConfig::default()
        }
    }

    /// Without these features.
    #[must_use]
    pub fn without(mut self, features: u64) -> GuestConfig {
        self.features &= !features;
        self
    }

    pub(super) fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }
}
