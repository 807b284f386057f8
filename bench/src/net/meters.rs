//! What ports count.

use std::ops::{Add, Sub};

use serde::{Deserialize, Serialize};

/// Counters of one port, or of several.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Meters {
    /// Frames handed to the device.
    pub sent: u64,
    /// Frames that came from the partner.
    pub received: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Frames that came from elsewhere.
    pub foreign: u64,
    /// Notifications to the device, which had asked for them.
    pub kicks: u64,
    /// Notifications from the device.
    pub interrupts: u64,
}

macro_rules! by_field {
    ($trait:ident, $method:ident, $of:ident) => {
        impl $trait for Meters {
            type Output = Meters;

            fn $method(self, other: Meters) -> Meters {
                Meters {
                    sent: self.sent.$of(other.sent),
                    received: self.received.$of(other.received),
                    bytes: self.bytes.$of(other.bytes),
                    foreign: self.foreign.$of(other.foreign),
                    kicks: self.kicks.$of(other.kicks),
                    interrupts: self.interrupts.$of(other.interrupts),
                }
            }
        }
    };
}

by_field!(Add, add, wrapping_add);
by_field!(Sub, sub, wrapping_sub);
