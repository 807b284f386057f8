//! The bench of the switch: frames from guest to guest.

pub mod frame;
pub mod generator;
pub mod meters;
pub mod port;
