//! The daemon: configuration, the control API, readiness of guests, and the worker that moves the bytes, put
//! together. It decides nothing about packets; it says which lines exist and tells what became of them.

pub mod api;
pub mod arrivals;
pub mod audit;
pub mod capture;
mod channels;
mod chardev;
pub mod control;
pub mod control_error;
pub mod data_plane;
pub mod events;
#[cfg(any(test, feature = "test-support"))]
pub mod fake;
pub mod forwarded;
mod hello;
pub mod in_force;
pub mod line;
pub mod log_budget;
pub mod metrics;
pub mod net;
pub mod offers;
mod orders;
pub mod places;
pub mod policy;
pub mod proxy;
mod questions;
mod rate;
pub mod readiness;
pub mod reload;
pub mod runtime;
mod runtime_thread;
pub mod sandbox;
mod serial_line;
pub mod serve;
pub mod service_manager;
mod shared_answer;
pub mod stalled_clients;
pub mod switchboard;
pub mod windows;
pub mod worker;
