//! A soak: many short circuits on every path there is, some long ones beside them, and a policy that changes all the while.
//!
//! # Theory of operation
//!
//! Two guests in user space and programs of the host make calls at a steady rate ([`path::Path`] says which there are). Each call sends
//! bytes of a known pattern, has them echoed, and compares every one; it must end as it should. Beside them one *standing* circuit
//! on each path lives from the beginning to the end, and says something every second. Meanwhile the configuration is read anew again and again, and
//! each time allows or denies one path: calls on that path must have the answer of the policy in force, and nothing else may notice.
//!
//! Between two spans of load the scene is *idle*: no calls are made, and the daemon is measured. What it holds then (circuits, descriptors, memory)
//! must be what it held when it was first idle, after the warm-up: else something leaks.

mod call;
mod echo;
mod guests;
pub mod path;
mod programs;
mod run;
mod scene;
mod tally;
mod watch;

pub use run::{Options, Report, run};
pub use watch::Sample;
