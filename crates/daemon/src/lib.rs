//! The daemon: configuration, the control API, readiness of guests, and the worker that moves the bytes, put
//! together. It decides nothing about packets; it says which lines exist and tells what became of them.

pub mod api;
pub mod config;
pub mod control;
mod hello;
pub mod input;
pub mod line;
pub mod readiness;
pub mod runtime;
