//! Ringdown: memory.
