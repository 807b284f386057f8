//! Targets for the rings of circuits.

mod support;

target!(circuit_peer, 2048, fuzz::circuit::peer);
