//! Ringdown: switch.
