//! The command line of Ringdown.
