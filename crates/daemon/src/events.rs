//! The last events, the readers that follow them, and the last refusals.
//!
//! [`Events::tell`] never waits for a reader. What a VM can cause without end passes [`Events::tell_of_vm`]. Events are kept in a ring of
//! [`MAX_EVENTS`], and a following reader is a place in it: there is no queue for each, and a user has only so many. A reader that has not been given an event when the ring
//! lets go of it is dropped with a count, so the slowest costs the others nothing. What is kept are words of at most [`MAX_TEXT_LEN`]
//! bytes; they become JSON when they are read.
//!
//! Numbers of events begin with the daemon's start in milliseconds times 1,024, so that they go on growing when the daemon is started
//! anew, and a number of an earlier life is known for what it is. They fit into the integers of JavaScript.

mod allowance;
mod calls;
mod log;
mod places;
mod reader;
mod refusals;
mod silence;

pub(crate) use calls::circuit_end;
pub use calls::{CallNotes, observer};
pub(crate) use log::rfc_3339;
pub use log::{Asked, Events, MAX_EVENTS, MAX_TEXT_LEN};
pub use places::READERS;
pub use reader::EventReader;
pub use refusals::{Call, MAX_REFUSALS, MAX_REFUSALS_OF_ONE};
pub(crate) use silence::waiting_callers;

#[cfg(test)]
mod tests;
