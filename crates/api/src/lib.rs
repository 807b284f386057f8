//! What goes over the control socket, as JSON. Both sides use these types; a client ignores members that it does not
//! know, and the daemon refuses them.

mod circuits;
mod events;
pub mod json;
mod networks;
mod policy;
mod problem;
mod restart;
mod unavailable;
mod vms;

pub use self::policy::*;
pub use circuits::*;
pub use events::*;
pub use networks::*;
pub use problem::*;
pub use restart::*;
pub use unavailable::*;
pub use vms::*;
