//! The daemon: configuration, the control API, readiness of guests, and the worker that moves the bytes, put
//! together. It decides nothing about packets; it says which lines exist and tells what became of them.

pub mod input;
pub mod line;
