//! Accepting the host's connections.

use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use wire::agent::{ErrorKind, ErrorReport};

use crate::config::Config;
use crate::log::say;
use crate::session::{Options, serve_in_place, tell};
use crate::share::Share;
use crate::transport::{Endpoint, Listener};
use crate::uplink;

/// The most operations at a time. Each has a thread and, at worst, about half a MiB of buffers. The streams of benchmarks have
/// places of their own, [`wire::agent::bench::MAX_STREAMS`], once they have asked.
pub const MAX_OPERATIONS: usize = 64;

/// The stack of an operation's thread, in bytes.
const STACK_SIZE: usize = 256 * 1024;

/// The wait between attempts to listen while there is no vsock, at first and at most.
const LISTEN_BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));

/// The wait after an error of accept that says the system is short of something.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// The agent.
#[derive(Debug)]
pub struct Server {
    endpoint: Endpoint,
    options: Arc<Options>,
    active: Arc<AtomicUsize>,
}

impl Server {
    /// An agent that will listen there and do what its configuration allows.
    pub fn new(endpoint: Endpoint, config: Config) -> Server {
        let options = Options {
            has_vsock: endpoint == Endpoint::Vsock,
            ..Options::new().with_config(config)
        };
        Server {
            endpoint,
            options: Arc::new(options),
            active: Arc::new(AtomicUsize::new(0)),
        }
    }

    /// Listen and serve, for ever. On vsock, a device or module that is not there yet is waited for.
    ///
    /// # Errors
    /// It cannot listen and waiting would not help.
    pub fn run(&self) -> io::Result<Infallible> {
        let listener = self.listen()?;
        say!("listening on {}", self.describe());
        let options = Arc::clone(&self.options);
        std::thread::Builder::new()
            .name("generation".into())
            .stack_size(STACK_SIZE)
            .spawn(move || options.generation.watch())?;
        if self.endpoint == Endpoint::Vsock {
            let options = Arc::clone(&self.options);
            std::thread::Builder::new()
                .name("uplink".into())
                .spawn(move || uplink::run(&options))?;
        }
        loop {
            match listener.accept() {
                Ok(connection) => self.start(connection),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    say!("{error}")
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    // A peer that went away while it waited, or no descriptors: neither ends the agent.
                    say!("cannot accept a connection: {error}");
                    std::thread::sleep(ACCEPT_BACKOFF);
                }
            }
        }
    }

    fn listen(&self) -> io::Result<Listener> {
        let (mut backoff, max_backoff) = LISTEN_BACKOFF;
        let mut said = false;
        loop {
            let error = match Listener::open(&self.endpoint) {
                Ok(listener) => return Ok(listener),
                Err(error) => error,
            };
            let errno = rustix::io::Errno::from_io_error(&error);
            let may_come = matches!(
                errno,
                Some(rustix::io::Errno::AFNOSUPPORT | rustix::io::Errno::NODEV)
            );
            if self.endpoint != Endpoint::Vsock || !may_come {
                let message = format!("cannot listen on {}: {error}", self.describe());
                return Err(io::Error::new(error.kind(), message));
            }
            if !said {
                say!("there is no vsock in this guest yet ({error}); waiting for it");
                said = true;
            }
            std::thread::sleep(backoff);
            backoff = (backoff * 2).min(max_backoff);
        }
    }

    fn describe(&self) -> String {
        match &self.endpoint {
            Endpoint::Vsock => format!("vsock port {}", wire::agent::PORT),
            Endpoint::Unix(path) => path.display().to_string(),
        }
    }

    fn start(&self, connection: OwnedFd) {
        let Some(place) = Share::take(&self.active, 1, MAX_OPERATIONS) else {
            let message = format!(
                "{MAX_OPERATIONS} operations run in this guest already, which is the limit"
            );
            // The socket is new, so its buffer has room: the accepting thread does not wait here.
            let _ = crate::session::greet(&connection, &self.options.hello_now(), Instant::now());
            tell(
                &connection,
                &ErrorReport::new(ErrorKind::Busy, message),
                Instant::now(),
            );
            return;
        };
        let options = Arc::clone(&self.options);
        let serve = move || {
            if let Err(stop) = serve_in_place(&connection, &options, Some(place)) {
                say!("an operation ended early: {stop}");
            }
        };
        let thread = std::thread::Builder::new()
            .name("operation".into())
            .stack_size(STACK_SIZE)
            .spawn(serve);
        if let Err(error) = thread {
            say!("cannot start a thread: {error}");
        }
    }
}
