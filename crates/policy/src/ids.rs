//! What names lines and services, and moments.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A moment, as the time since some start that the caller has chosen. It never goes backwards.
pub type Time = Duration;

/// The number of a line. Numbers are used again after a line is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct LineId(pub u32);

/// The number of a service, chosen by the daemon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ServiceId(pub u32);
