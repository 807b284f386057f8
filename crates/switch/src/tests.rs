//! Tests of whole circuits.
