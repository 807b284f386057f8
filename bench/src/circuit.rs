//! The bench of circuits: two processes, each on a processor of its own, and a ring between them.
//!
//! # Theory of operation
//!
//! What is measured beside each other does the same ([`end`]): one process makes a message, every word of it, and the other one sums it. *In place* the words
//! are made in the ring and summed there; with *one copy* they are made in private memory, and copied into the ring. What has no ring, a socket, is written and read.
//! A round trip is 64 bytes there and back, copied in and out. The sums are compared with what they must be.
//!
//! The *bare* ring is the least that can be: the same memory and the same work without any check, without sleeping, and without an end. *memcpy* is one process that copies
//! the message within its own memory.
//!
//! A run goes through the cases and measures in turn, round by round, subject by subject, each in a new process.

pub mod case;
pub mod command;
pub mod end;
pub mod goals;
pub mod measure;
pub mod other;
pub mod report;
