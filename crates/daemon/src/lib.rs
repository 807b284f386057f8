//! Ringdown: daemon.
