//! How a connection proves to an agent that it comes from its host.
//!
//! Over a serial port, and behind a VMM with a vsock device of its own, a guest cannot see who calls. So the agent gives its host a random
//! secret, and the host puts it in front of what its own programs say to the agent, and in front of nothing else:
//!
//! ```text
//! agent, in its own call                          host
//!   Hello, with CAPABILITY_PROOF ──────────────►
//!                        ◄────────────────────── Hello, with CALLERS_PROVE or CALLERS_KNOWN
//!   Secret, if the host said CALLERS_PROVE ────►
//!
//! host, for a program that calls the agent        agent
//!   Secret ────────────────────────────────────►
//!   Hello, and whatever else the program says ─►
//!                        ◄────────────────────── Hello   (or Error: Forbidden without a secret, WrongProof with another)
//! ```
//!
//! An agent that calls its host anew gives it another secret, and calls with the one before may be under way then. They are refused before
//! anything is done, and the program of the host calls again.
//!
//! The layout of [`Hello`](super::Hello) stays as it is: sides of before ignore capabilities that they do not know, and then no secret is given.

use std::fmt;

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

/// The length of a secret in bytes: none can be guessed.
pub const SECRET_LEN: usize = 32;

/// Why the daemon refuses a call to an agent that has given no secret yet, or whose own call has ended.
pub const AGENT_AWAY: &str = "the guest's agent has not called the host yet, so no call can prove to it that it comes from the host: wait until the VM is ready";

/// The capability of an agent, in its own call to the host, of giving a secret and asking callers for it.
pub const CAPABILITY_PROOF: &str = "proof";

/// What a host says, as a capability, to an agent whose line does not show who calls: callers bring the secret.
pub const CALLERS_PROVE: &str = "callers-prove";

/// What a host says, as a capability, to an agent whose line shows who calls: source addresses are its own word.
pub const CALLERS_KNOWN: &str = "callers-known";

/// What a connection proves by that it comes from the host. It is compared in constant time, and not shown.
#[derive(Clone, Serialize, Deserialize)]
pub struct Secret([u8; SECRET_LEN]);

impl Secret {
    /// A secret of these bytes, which are to be random.
    pub fn new(bytes: [u8; SECRET_LEN]) -> Secret {
        Secret(bytes)
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Secret) -> bool {
        self.0.ct_eq(&other.0).into()
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Secret")
    }
}
