//! Tests of whole circuits, with both protocol sides modelled.

mod model;
mod setup;
mod simulation;
