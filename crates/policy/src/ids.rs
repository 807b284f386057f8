//! What names lines and services, and moments.

use std::time::Duration;

/// A moment, as the time since some start that the caller has chosen. It never goes backwards.
pub type Time = Duration;

/// The number of a line. Numbers are used again after a line is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct LineId(pub u32);

/// The number of a service, chosen by the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceId(pub u32);
