//! Links without ports: what they say is carried by the tests.

mod hostile;
mod simulation;
mod world;
