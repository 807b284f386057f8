//! Ringdown: device.
