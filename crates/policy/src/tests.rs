//! Decisions, by hand and against rules that are tried one after the other.

mod edges;
mod properties;
