//! A daemon for tests: all of it but the worker, whose lines have real sockets and no VMM.
//!
//! The daemon's own tests have this as a part of theirs, and hold each answer against the API's description.

// As a module of the daemon's tests it has its own modules beside it, too.
#[path = "fake.rs"]
mod fake;

pub use fake::*;

/// What stands for the check of the daemon's own tests.
mod conformance {
    pub(crate) fn check(_: &str, _: &str, _: u16, _: &str, _: &str) {}
}
