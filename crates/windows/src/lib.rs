//! The host's side of the set-up of zero-copy circuits.
//!
//! - [`switchboard`] finds out which circuits get a window.
//! - [`memory`] has the windows.

pub mod memory;
pub mod switchboard;
