//! Bounds of what a file has, and how long the worker polls before it sleeps.

use std::time::Duration;

/// How long the worker polls before it sleeps, when nothing else is said and while guests and programs answer quickly: somewhat
/// longer than they take to be woken and to answer.
pub const DEFAULT_SPIN: Duration = Duration::from_micros(100);

/// The longest that it can be set to poll, in microseconds.
pub const MAX_SPIN_MICROSECONDS: u64 = 1000;

/// The most rules that one daemon holds, `[[rule]]` and `[[allow]]` together.
pub const MAX_RULES: usize = 16_384;

/// The most `[[group]]` tables of one file.
pub const MAX_GROUPS: usize = 1024;
