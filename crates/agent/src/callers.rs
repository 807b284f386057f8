//! Whether the agent's caller on a line is its host.
//!
//! The agent does for its host what root does, so no other caller may be served. What shows that a connection comes from the host is another thing
//! on each kind of line:
//!
//! - At a UNIX socket, the caller's user, which the kernel knows.
//! - Over vsock, that the context identifier is the host's. With a VMM that has a vsock device of its own this means nothing, since whatever
//!   reaches that VMM's socket has it. The guest cannot tell such a VMM from others: the host says it in its answer to the agent's own call.
//! - Over a serial port nothing shows it.
//!
//! Where nothing shows it, a connection begins with a secret that the agent has given the host in its own call ([`wire::agent::Secret`]). There is a
//! new one for each such call: a guest that was resumed from a snapshot, of which there may be several, calls anew and shares none with the others. As
//! long as no host has answered, no caller is served.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::rand::{GetRandomFlags, getrandom};
use wire::agent::{
    CALLERS_KNOWN, CALLERS_PROVE, CONNECTION_CHANNEL, Decoder, ErrorKind, ErrorReport, Frame,
    Hello, SECRET_LEN, Secret,
};

use crate::stop::Stop;
use crate::stream::receive;

/// How long a connection waits for the host's answer to the agent's own call, which may be on its way.
const ANSWER_PATIENCE: Duration = Duration::from_secs(5);

/// What is known of the callers of one line.
#[derive(Debug)]
pub struct Callers {
    line: Line,
    state: Mutex<State>,
    changed: Condvar,
}

/// A kind of line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Line {
    Unix,
    Vsock,
    Serial,
}

#[derive(Debug)]
enum State {
    /// No host has answered.
    Unknown,
    /// Every caller is the host.
    Known,
    /// Callers bring this.
    Prove(Secret),
}

impl Callers {
    /// Of a UNIX socket that checks each caller's user.
    pub fn at_unix_socket() -> Callers {
        Callers::new(Line::Unix, State::Known)
    }

    /// Of vsock connections whose context identifier is the host's.
    pub fn over_vsock() -> Callers {
        Callers::new(Line::Vsock, State::Unknown)
    }

    /// Of the channels of a serial port.
    pub fn over_serial() -> Callers {
        Callers::new(Line::Serial, State::Unknown)
    }

    fn new(line: Line, state: State) -> Callers {
        Callers {
            line,
            state: Mutex::new(state),
            changed: Condvar::new(),
        }
    }

    /// The host has answered the agent's own call. Returns the secret that it is to be given, if callers are to prove themselves.
    ///
    /// # Errors
    /// The system has no random numbers.
    pub(crate) fn host_answered(&self, hello: &Hello) -> io::Result<Option<Secret>> {
        let (state, secret) = if hello.can(CALLERS_PROVE) {
            let mut bytes = [0; SECRET_LEN];
            // So few bytes come at once or not at all (getrandom(2)).
            if getrandom(&mut bytes[..], GetRandomFlags::empty())? != SECRET_LEN {
                return Err(io::Error::other("the system has no random numbers"));
            }
            let secret = Secret::new(bytes);
            (State::Prove(secret.clone()), Some(secret))
        } else if hello.can(CALLERS_KNOWN) && self.line != Line::Serial {
            (State::Known, None)
        } else {
            (State::Unknown, None)
        };
        *sys::lock(&self.state) = state;
        self.changed.notify_all();
        Ok(secret)
    }

    /// The agent's own call is over. The next host may be another, and the line of another kind.
    pub(crate) fn host_left(&self) {
        if self.line != Line::Unix {
            *sys::lock(&self.state) = State::Unknown;
        }
    }

    /// Whether every caller is the host, without a proof.
    pub(crate) fn are_known(&self) -> bool {
        matches!(*sys::lock(&self.state), State::Known)
    }

    /// Makes sure that a connection comes from the host, before anything is said on it.
    pub(crate) fn admit(
        &self,
        socket: &OwnedFd,
        decoder: &mut Decoder,
        deadline: Instant,
    ) -> Result<(), Stop> {
        if matches!(*self.known(deadline)?, State::Known) {
            return Ok(());
        }
        let given = loop {
            match decoder.next_frame() {
                Ok(Some((CONNECTION_CHANNEL, Frame::Secret(secret)))) => break secret,
                Ok(None) => receive(socket, decoder, deadline).map_err(Stop::HostGone)?,
                Ok(Some(_)) | Err(_) => {
                    return Err(refusal(
                        "this connection does not prove that it comes from the host: call the VM through its host socket at the daemon, as ringdown exec does, which needs the daemon of this release",
                    ));
                }
            }
        };
        // Not what was expected before it came: the host may have been given a new secret meanwhile.
        match &*self.known(deadline)? {
            State::Prove(secret) if *secret == given => Ok(()),
            _ => Err(Stop::Report(ErrorReport::new(
                ErrorKind::WrongProof,
                "this connection's proof that it comes from the host is not the one that the agent gave its host last: if the agent has just called its host anew, try again",
            ))),
        }
    }

    /// What is known, once a host has answered.
    fn known(&self, deadline: Instant) -> Result<MutexGuard<'_, State>, Stop> {
        let patience = deadline
            .saturating_duration_since(Instant::now())
            .min(ANSWER_PATIENCE);
        let (state, _) = self
            .changed
            .wait_timeout_while(sys::lock(&self.state), patience, |state| {
                matches!(state, State::Unknown)
            })
            .unwrap_or_else(PoisonError::into_inner);
        match *state {
            State::Unknown => Err(Stop::Report(ErrorReport::new(
                ErrorKind::Unavailable,
                "the agent cannot check who calls, as no daemon of this release has answered its own call: try again when the guest is ready, or update the daemon",
            ))),
            State::Known | State::Prove(_) => Ok(state),
        }
    }
}

fn refusal(words: &str) -> Stop {
    Stop::Report(ErrorReport::new(ErrorKind::Forbidden, words))
}
