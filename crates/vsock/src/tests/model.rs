//! Both protocol sides of a switch, without a byte of I/O: guests as Linux makes them, programs on the host, and a
//! device that keeps and moves payload as the switch says.
//!
//! Payload is not bytes but [`payload::Chunk`]s, which know whose they are and where in the stream they belong. The
//! [`audit::Audit`] checks each when it arrives. [`world::World`] joins everything; [`World::check_tables`] compares
//! every table of the switch with what is really there.
//!
//! [`World::check_tables`]: world::World::check_tables

pub(crate) mod audit;
pub(crate) mod drive;
pub(crate) mod guest;
mod guest_side;
mod host_side;
pub(crate) mod judge;
pub(crate) mod log;
pub(crate) mod pace;
pub(crate) mod payload;
pub(crate) mod program;
pub(crate) mod socket;
pub(crate) mod tables;
pub(crate) mod world;

pub(crate) use drive::{reads, sends, sleeps};
pub(crate) use program::{Answer, Call};
pub(crate) use socket::{After, Plan, Socket};
pub(crate) use world::World;
