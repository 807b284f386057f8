//! Cut is not end: a source that is cut off in the middle, on every way that bytes take through the daemon, and what the receiver sees of it.
//!
//! What is expected comes from what the receiver's socket can show ([`expected`]): a guest and a TCP peer always see a reset. A UNIX
//! socket shows an error only where its peer closes with something unread (README, "What does not work yet").

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

#[path = "../conformance/support.rs"]
#[allow(dead_code, reason = "this suite uses a part of it")]
mod support;

mod daemon;
mod programs;
mod scene;
mod serial;
mod ways;
