//! What every guest and every program of the host may rely on, on a real daemon, with guests in user space.

// All of this is tests, where a failure is a panic.
#![allow(clippy::unwrap_used)]

mod between;
mod data;
mod endings;
mod hybrid;
mod lifecycle;
mod many;
mod messages;
mod quota;
mod setup;
mod support;
