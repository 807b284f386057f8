//! What the switch counts, by name.

use l2::bridge::{PortCounters, Refusal};

use crate::line::Counters;

/// What the switch counts of a port, by name.
pub fn switch_counters(counters: &PortCounters) -> Counters {
    Counters::from([
        ("received_frames", counters.received_frames),
        ("received_bytes", counters.received_bytes),
        ("sent_frames", counters.sent_frames),
        ("sent_bytes", counters.sent_bytes),
        ("flooded_frames", counters.flooded_frames),
        ("refused_frames", counters.refused_total()),
    ])
}

/// Why the switch has refused frames of a port, by name. What never came up is left out.
pub fn refused_counters(counters: &PortCounters) -> Counters {
    let count = |refusal: Refusal| (refusal.name(), counters.refused(refusal));
    let counts = Refusal::ALL.into_iter().map(count);
    counts.filter(|(_, count)| *count > 0).collect()
}
