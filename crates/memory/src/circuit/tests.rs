//! Tests of the ring.
