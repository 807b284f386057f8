//! The state machine of the link.

/// The largest window of a channel, in bytes.
pub const MAX_WINDOW: u32 = 1024 * 1024;
