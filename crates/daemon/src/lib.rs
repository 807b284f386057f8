//! The daemon: configuration, the control API, readiness of guests, and the worker that moves the bytes, put
//! together. It decides nothing about packets; it says which lines exist and tells what became of them.

mod added;
pub mod api;
pub mod audit;
pub mod capture;
pub mod control;
pub mod control_error;
pub mod data_plane;
pub mod events;
#[cfg(any(test, feature = "test-support"))]
pub mod fake;
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
pub mod sandbox;
pub mod serve;
pub mod service_manager;
mod shared_answer;
pub mod stalled_clients;
pub mod worker;
