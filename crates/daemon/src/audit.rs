//! The audit: caller, callee, the decision, and by which rule; one JSON object a line.
//!
//! What decides hands over an [`AuditRecord`](hostside::audit::AuditRecord) and goes on: [`Audit::record`] never waits. A thread of its own writes. A source
//! that calls more than [`RECORDS_PER_SECOND`] times a second has the rest held back, and a line each second says how many
//! those were, so that no caller can bury what others do and no call goes uncounted.

mod sink;
mod writer;

pub use writer::{Audit, AuditWriter, MAX_SOURCES, MAX_WAITING_RECORDS, RECORDS_PER_SECOND};

#[cfg(test)]
mod tests;
