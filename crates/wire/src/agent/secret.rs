//! How a connection proves to an agent that it comes from its host.
//!
//! Over a serial port, and behind a VMM with a vsock device of its own, a guest cannot see callers. So the agent gives its host a random
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
use std::time::Duration;

use serde::{Deserialize, Serialize};
use subtle::ConstantTimeEq;

/// The length of a secret in bytes: none can be guessed.
pub const SECRET_LEN: usize = 32;

/// The wait before the second call to an agent that gives a new secret. Each further one doubles it, up to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// How long the agent's own call may take to get through.
const WAITED_FOR: Duration = Duration::from_secs(10);

/// Why the daemon refuses a call to an agent that has given no secret yet, or whose own call has ended.
pub const AGENT_AWAY: &str = "the guest's agent has not called the host yet, so no call can prove to it that it comes from the host: wait until the VM is ready";

/// The capability of an agent, in its own call to the host, of giving a secret and asking callers for it.
pub const CAPABILITY_PROOF: &str = "proof";

/// What a host says, as a capability, to an agent whose line does not show callers: callers bring the secret.
pub const CALLERS_PROVE: &str = "callers-prove";

/// What a host says, as a capability, to an agent whose line shows callers: source addresses are its own word.
pub const CALLERS_KNOWN: &str = "callers-known";

/// What a connection proves by that it comes from the host. It is compared in constant time, and not shown.
#[derive(Clone, Serialize, Deserialize)]
pub struct Secret([u8; SECRET_LEN]);

impl Secret {
    /// A secret of these bytes, which are to be random.
    pub fn new(bytes: [u8; SECRET_LEN]) -> Secret {
        Secret(bytes)
    }

    /// How long a caller waits before it calls an agent once more that has given its host a new secret: until the daemon has it, calls carry the old
    /// one, and nothing has been done in the guest. Ten seconds altogether at most.
    pub fn pauses() -> impl Iterator<Item = Duration> {
        let doubled = |pause: &Duration| Some((*pause * 2).min(LONGEST_PAUSE));
        let mut waited = Duration::ZERO;
        std::iter::successors(Some(FIRST_PAUSE), doubled).take_while(move |pause| {
            waited += *pause;
            waited <= WAITED_FOR
        })
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_is_called_again_at_once_and_then_ever_more_rarely() {
        let pauses: Vec<Duration> = Secret::pauses().collect();
        assert_eq!(pauses[0], FIRST_PAUSE);
        assert!(pauses.is_sorted());
        assert_eq!(pauses.last(), Some(&LONGEST_PAUSE));
        let waited: Duration = pauses.iter().sum();
        assert!(waited <= WAITED_FOR && waited + LONGEST_PAUSE > WAITED_FOR);
    }
}
