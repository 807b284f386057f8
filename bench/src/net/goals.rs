//! What is to be reached, and whether it is.

use crate::perf::goals::Bound::AtLeast;
use crate::perf::goals::Reference::{Figure, Times};
use crate::perf::goals::{Goal, goal};

const OVS: &str = "ovs-dpdk";
const WIRE: &str = "testpmd";
const BRIDGE: &str = "bridge";
const RATE: &str = "gbit_per_s";

const fn times(title: &'static str, case: &'static str, factor: f64, of: &'static str) -> Goal {
    goal(title, case, RATE, AtLeast(Times(factor, of)))
}

/// All goals.
pub const GOALS: &[Goal] = &[
    times("ahead of Open vSwitch, 64 B", "64/1/2/split", 1.0, OVS),
    times("ahead of Open vSwitch, 512 B", "512/1/2/split", 1.0, OVS),
    times("ahead of Open vSwitch, 1500 B", "1500/1/2/split", 1.0, OVS),
    times("ahead of Open vSwitch, 64 KiB", "tso/1/2/split", 1.0, OVS),
    times("beside a wire, 64 B", "64/1/2/split", 0.85, WIRE),
    times("beside a wire, 64 B, packed", "64/1/2/packed", 0.85, WIRE),
    times("beside a wire, 1500 B", "1500/1/2/split", 1.3, WIRE),
    times("beside a wire, 64 KiB", "tso/1/2/split", 1.3, WIRE),
    goal(
        "64 KiB frames, Gbit/s",
        "tso/1/2/split",
        RATE,
        AtLeast(Figure(70.0)),
    ),
    times("beside a bridge, 64 B", "64/1/2/split", 5.0, BRIDGE),
    times("beside a bridge, 512 B", "512/1/2/split", 5.0, BRIDGE),
    times("beside a bridge, 1500 B", "1500/1/2/split", 5.0, BRIDGE),
    times("beside a bridge, 64 KiB", "tso/1/2/split", 5.0, BRIDGE),
];
