//! Tests of whole circuits, with both protocol sides modelled.

mod closing;
mod credit;
mod cuts;
mod hostile;
mod hybrid;
mod inherit;
mod limits;
mod lines;
pub(crate) mod model;
mod operator;
mod random;
mod refusals;
mod results;
mod seqpacket;
mod setup;
mod shares;
mod simulation;
mod tuning;
