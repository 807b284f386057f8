//! The connection by which the host knows that this guest is ready.
//!
//! The agent dials the host as soon as it listens, both say hello, and the connection stays open. When it breaks (the
//! host's daemon was restarted, the guest was moved, or it was resumed and has a new generation), the agent dials again.

use std::io;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use wire::agent::{CAPABILITY_PROOF, CONNECTION_CHANNEL, Decoder, Frame, negotiate};

use crate::callers::Callers;
use crate::clock;
use crate::log::say;
use crate::session::{HANDSHAKE_TIMEOUT, Options, greet};
use crate::stream::{receive, send_all};

/// The wait after the first failure; each further one doubles it.
const FIRST_BACKOFF: Duration = Duration::from_millis(100);

/// The longest wait between two attempts: what a restarted daemon may have to wait for a guest.
const MAX_BACKOFF: Duration = Duration::from_secs(5);

/// A connection without a word for that long is still fine: only its end matters.
const IDLE: Duration = Duration::from_secs(24 * 3600);

/// What the system says where there is vsock and no device for it: the guest may have a serial port instead.
const NO_DEVICE: rustix::io::Errno = rustix::io::Errno::NODEV;

/// Keep the host informed over the connections that `dial` makes, for ever. Without a vsock device it says what is `awaited`.
pub(crate) fn run(
    options: &Options,
    awaited: &str,
    callers: &Callers,
    dial: impl Fn() -> io::Result<OwnedFd>,
) -> ! {
    let mut backoff = FIRST_BACKOFF;
    let mut last_problem = String::new();
    loop {
        let announced = dial().and_then(|socket| announce(&socket, options, callers));
        callers.host_left();
        let problem = match announced {
            Ok(ended) => {
                backoff = FIRST_BACKOFF;
                format!("the connection to the host ended: {ended}")
            }
            Err(error) if rustix::io::Errno::from_io_error(&error) == Some(NO_DEVICE) => {
                format!("there is no vsock device in this guest yet; {awaited}")
            }
            Err(error) => {
                format!("cannot tell the host that this guest is ready: {error}; trying again")
            }
        };
        // Said once, not every few seconds for as long as there is no host.
        if problem != last_problem {
            say!("{problem}");
            last_problem = problem;
        }
        std::thread::sleep(backoff);
        backoff = (backoff * 2).min(MAX_BACKOFF);
    }
}

/// Exchange hellos on a connection to the host, give it the secret of its callers if it wants one, set the clock by what the host says, then hold the
/// connection until it ends: why it did.
///
/// # Errors
/// The hellos did not get through.
pub fn announce(socket: &OwnedFd, options: &Options, callers: &Callers) -> io::Result<io::Error> {
    let begun = Instant::now();
    let deadline = begun + HANDSHAKE_TIMEOUT;
    let mut hello = options.hello_now();
    hello.capabilities.push(CAPABILITY_PROOF.to_owned());
    let hello = &hello;
    let _known = options.generation.known_on(socket)?;
    greet(socket, hello, deadline)?;
    let mut decoder = Decoder::new();
    let invalid = |message: String| io::Error::new(io::ErrorKind::InvalidData, message);
    loop {
        match decoder
            .next_frame()
            .map_err(|error| invalid(error.to_string()))?
        {
            Some((CONNECTION_CHANNEL, Frame::Hello(theirs))) => {
                if negotiate(hello, &theirs).is_none() {
                    return Err(invalid(format!(
                        "{} uses another protocol version",
                        theirs.software
                    )));
                }
                if let Some(secret) = callers.host_answered(&theirs)? {
                    let bytes = Frame::Secret(secret).to_bytes(CONNECTION_CHANNEL);
                    send_all(socket, &bytes.map_err(io::Error::other)?, deadline)?;
                }
                options.generation.host_is(&theirs.boot_id);
                clock::follow(&options.config, &options.generation, theirs.unix_ns, begun);
                break;
            }
            Some((_, Frame::Error(report))) => return Err(io::Error::other(report.message)),
            Some(_) => return Err(invalid("the host's first frame is not a hello".to_owned())),
            None => receive(socket, &mut decoder, deadline)?,
        }
    }
    say!("reported to the host that this guest is ready");
    if let Some(switchboard) = &options.switchboard {
        switchboard.host_is_there();
    }
    loop {
        match decoder.next_frame() {
            Ok(Some((_, Frame::Error(report)))) => return Ok(io::Error::other(report.message)),
            Ok(Some(_)) => return Ok(invalid("an unexpected frame from the host".to_owned())),
            Err(error) => return Ok(invalid(error.to_string())),
            Ok(None) => {}
        }
        match receive(socket, &mut decoder, Instant::now() + IDLE) {
            Err(error) if error.kind() != io::ErrorKind::TimedOut => return Ok(error),
            _ => {}
        }
    }
}
