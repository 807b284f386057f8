//! Accepting the host's connections.

use std::convert::Infallible;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use wire::agent::{CAPABILITY_CIRCUITS, ErrorKind, ErrorReport};

use crate::callers::Callers;
use crate::config::Config;
use crate::freezer::Freezer;
use crate::host_socket;
use crate::log::say;
use crate::serial::SerialHost;
use crate::session::{MAX_OPERATIONS, Options, serve_in_place, tell};
use crate::share::Share;
use crate::switchboard::Switchboard;
use crate::transport::{self, Endpoint, Listener};
use crate::uplink;

/// The stack of an operation's thread, in bytes.
const STACK_SIZE: usize = 256 * 1024;

/// The wait between attempts to listen while there is no vsock, at first and at most. Each makes the kernel look for its module, which costs a process.
const LISTEN_BACKOFF: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(30));

/// The wait after an error of accept that says the system is short of something.
const ACCEPT_BACKOFF: Duration = Duration::from_millis(100);

/// The shortest time between two lines about refused connections. Any program of the guest can make them without pause, where it can call itself.
const REFUSALS_SAID: Duration = Duration::from_secs(60);

/// The agent.
#[derive(Debug)]
pub struct Server {
    endpoints: Vec<Endpoint>,
    service: Arc<Service>,
}

impl Server {
    /// An agent that will listen there and do what its configuration allows.
    pub fn new(endpoints: Vec<Endpoint>, config: Config) -> Server {
        let has_switchboard = config.allow(CAPABILITY_CIRCUITS).is_ok() && has_line(&endpoints);
        let mut options = Options {
            has_vsock: endpoints.contains(&Endpoint::Vsock),
            switchboard: has_switchboard.then(Switchboard::new).and_then(said),
            ..Options::new().with_config(config)
        };
        if options.switchboard.is_none() {
            let capabilities = &mut options.hello.capabilities;
            capabilities.retain(|capability| capability != CAPABILITY_CIRCUITS);
        }
        let service = Arc::new(Service {
            options: Arc::new(options),
            active: Arc::new(AtomicUsize::new(0)),
            awaited: awaited(&endpoints),
        });
        Server { endpoints, service }
    }

    /// Where an agent listens by default: wherever the host may be.
    pub fn default_endpoints() -> Vec<Endpoint> {
        vec![Endpoint::Vsock, Endpoint::serial()]
    }

    /// Listen and serve, for ever. A vsock device or module, or a port, that is not there yet is waited for.
    ///
    /// # Errors
    /// It cannot listen and waiting would not help.
    pub fn run(&self) -> io::Result<Infallible> {
        let options = Arc::clone(&self.service.options);
        Freezer::new(&options.config.search_path, &options.launcher).recover();
        spawn("generation", move || options.generation.watch())?;
        if let Some(switchboard) = &self.service.options.switchboard {
            switchboard.start()?;
        }
        let (failed, failures) = std::sync::mpsc::channel();
        for endpoint in &self.endpoints {
            let service = Arc::clone(&self.service);
            let Endpoint::Serial(port) = endpoint.clone() else {
                let (endpoint, failed) = (endpoint.clone(), failed.clone());
                spawn("listen", move || {
                    let Err(error) = service.listen(&endpoint);
                    // The receiver lives as long as the process.
                    let _ = failed.send(error);
                })?;
                continue;
            };
            let taking = Arc::clone(&service);
            let callers = Arc::new(Callers::over_serial());
            let of_port = Arc::clone(&callers);
            let host = SerialHost::start(
                port,
                move |connection| {
                    taking.start(connection, &of_port);
                },
                host_socket::offer,
            )?;
            spawn("uplink", move || {
                uplink::run(&service.options, &service.awaited, &callers, || {
                    host.wait();
                    host.dial(wire::agent::PORT)
                })
            })?;
        }
        let closed = |_| io::ErrorKind::NotConnected.into();
        Err(failures.recv().unwrap_or_else(closed))
    }
}

/// Whether one of these leads to the host, and from there to others.
fn has_line(endpoints: &[Endpoint]) -> bool {
    let is_line = |endpoint: &Endpoint| !matches!(endpoint, Endpoint::Unix(_));
    endpoints.iter().any(is_line)
}

/// What the log of a guest without vsock says that its agent waits for.
fn awaited(endpoints: &[Endpoint]) -> String {
    let mut ports = endpoints.iter().filter_map(|endpoint| match endpoint {
        Endpoint::Serial(port) => Some(port),
        _ => None,
    });
    match ports.next() {
        Some(port) => format!("waiting for it, or for {port}"),
        None => "waiting for it".to_owned(),
    }
}

fn said(switchboard: io::Result<Arc<Switchboard>>) -> Option<Arc<Switchboard>> {
    switchboard
        .inspect_err(|error| say!("programs of this guest cannot get circuits: {error}"))
        .ok()
}

/// A thread that is not an operation.
fn spawn<T: Send + 'static>(
    name: &str,
    run: impl FnOnce() -> T + Send + 'static,
) -> io::Result<()> {
    let builder = std::thread::Builder::new().name(name.into());
    builder.stack_size(STACK_SIZE).spawn(run).map(drop)
}

/// What all endpoints of an agent have together.
#[derive(Debug)]
struct Service {
    options: Arc<Options>,
    active: Arc<AtomicUsize>,
    awaited: String,
}

impl Service {
    /// Accept connections, for ever.
    fn listen(self: &Arc<Self>, endpoint: &Endpoint) -> io::Result<Infallible> {
        let listener = open(endpoint, &self.awaited)?;
        say!("listening on {}", describe(endpoint));
        let callers = Arc::new(match endpoint {
            Endpoint::Vsock => Callers::over_vsock(),
            Endpoint::Unix(_) => Callers::at_unix_socket(),
            Endpoint::Serial(_) => Callers::over_serial(),
        });
        if *endpoint == Endpoint::Vsock {
            let (service, callers) = (Arc::clone(self), Arc::clone(&callers));
            spawn("uplink", move || {
                uplink::run(
                    &service.options,
                    &service.awaited,
                    &callers,
                    transport::dial_host,
                )
            })?;
        }
        let mut refusals = Refusals::default();
        loop {
            match listener.accept() {
                Ok(connection) => self.start(connection, &callers),
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                    refusals.add(&error);
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

    fn start(&self, connection: OwnedFd, callers: &Arc<Callers>) {
        let Some(place) = Share::take(&self.active, 1, MAX_OPERATIONS) else {
            let message = format!(
                "{MAX_OPERATIONS} operations run in this guest already, which is the limit"
            );
            // The socket is new, so its buffer has room: the accepting thread does not wait here.
            if callers.are_known() {
                let hello = self.options.hello_now();
                let _ = crate::session::greet(&connection, &hello, Instant::now());
            }
            tell(
                &connection,
                &ErrorReport::new(ErrorKind::Busy, message),
                Instant::now(),
            );
            return;
        };
        let (options, callers) = (Arc::clone(&self.options), Arc::clone(callers));
        let serve = move || {
            if let Err(stop) = serve_in_place(&connection, &options, &callers, Some(place)) {
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

/// Connections that were refused, of which now and then one is said.
#[derive(Debug, Default)]
struct Refusals {
    said: Option<Instant>,
    /// Since then.
    count: usize,
}

impl Refusals {
    fn add(&mut self, error: &io::Error) {
        self.count += 1;
        if self.said.is_none_or(|said| said.elapsed() >= REFUSALS_SAID) {
            say!(
                "{error} (with this one {} since the last such line)",
                self.count
            );
            *self = Refusals {
                said: Some(Instant::now()),
                count: 0,
            };
        }
    }
}

fn open(endpoint: &Endpoint, awaited: &str) -> io::Result<Listener> {
    let (mut backoff, max_backoff) = LISTEN_BACKOFF;
    let mut said = false;
    loop {
        let opened = match endpoint {
            Endpoint::Unix(path) => Listener::unix(path),
            // A serial port has a driver instead of a listener.
            Endpoint::Vsock | Endpoint::Serial(_) => Listener::vsock(),
        };
        let error = match opened {
            Ok(listener) => return Ok(listener),
            Err(error) => error,
        };
        let errno = rustix::io::Errno::from_io_error(&error);
        let may_come = matches!(
            errno,
            Some(rustix::io::Errno::AFNOSUPPORT | rustix::io::Errno::NODEV)
        );
        if *endpoint != Endpoint::Vsock || !may_come {
            let message = format!("cannot listen on {}: {error}", describe(endpoint));
            return Err(io::Error::new(error.kind(), message));
        }
        if !said {
            say!("there is no vsock in this guest yet ({error}); {awaited}");
            said = true;
        }
        std::thread::sleep(backoff);
        backoff = (backoff * 2).min(max_backoff);
    }
}

fn describe(endpoint: &Endpoint) -> String {
    match endpoint {
        Endpoint::Vsock => format!("vsock port {}", wire::agent::PORT),
        Endpoint::Unix(path) => path.display().to_string(),
        Endpoint::Serial(port) => port.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_waited_for_too_is_named() {
        assert_eq!(awaited(&[Endpoint::Vsock]), "waiting for it");
        assert_eq!(
            awaited(&Server::default_endpoints()),
            "waiting for it, or for the virtio-serial port org.ringdown.agent.0"
        );
    }
}
