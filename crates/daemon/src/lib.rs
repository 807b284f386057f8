//! The daemon: configuration, the control API, readiness of guests, and the worker that moves the bytes, put
//! together. It decides nothing about packets; it says which lines exist and reports their fate.

mod added;
pub mod api;
pub mod audit;
pub mod capture;
pub mod control;
pub mod control_error;
pub mod data_plane;
pub mod events;
pub mod in_force;
pub mod line;
pub mod log_budget;
pub mod log_writer;
pub mod metrics;
pub mod net;
pub mod policy;
mod questions;
pub mod readiness;
pub mod reload;
mod restart;
pub mod sandbox;
pub mod serve;
pub mod service_manager;
mod shared_answer;
pub mod stalled_clients;
mod unavailable;
pub mod worker;

pub use restart::release_keeper;

// A crate that imports this one has types of a second copy of it in the tests here: so the fake daemon is a part of them, and names this crate as others do.
#[cfg(test)]
extern crate self as daemon;
#[cfg(test)]
#[path = "../../../testkit/fake-daemon/src/fake.rs"]
pub mod fake_daemon;
#[cfg(test)]
use api::tests::conformance;
