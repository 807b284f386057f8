//! The proxy stack: circuits that end in a service of the host or beyond it, or begin at an address of the host.
//!
//! # Theory of operation
//!
//! The data plane decides whether a guest may call a service, and hands the call over ([`ServiceCall`]); it never waits. Here it
//! is put through: by connecting a socket to a TCP or UNIX server, which is then given to the data plane, so that its bytes go
//! from guest memory to the server without passing here; or, where there is more to do than to carry bytes, by one end of
//! a pair of sockets whose other end is served here: datagrams, programs, [egress], and the [directory].
//!
//! The other way round, [published ports](publish) accept connections and hand them to the data plane, which calls the guest.
//!
//! One thread does all this, with a runtime of its own, so that neither the data plane nor the control API waits for a
//! slow server. Everything has a limit that is stated where it is kept: calls that wait, connections of a service and of a VM, names
//! that are looked up, sessions, bytes that wait, lines that are logged.

pub mod directory;
pub mod egress;
pub mod exchange;
pub mod identity;
pub mod memory;
pub mod own;
pub mod ports;
pub mod publish;
pub mod resolver;

mod counter;
pub(crate) mod datagram;
pub(crate) mod program;
mod relay;
mod rules;
mod shared;
mod target;
mod tcp;
mod turns;
mod udp;
mod unix;

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use config::{Hosts, MAX_SERVICES, Publish, Service};
use device::Dialer;
use policy::{Policy, ServiceId};
use tokio::sync::{mpsc, oneshot};

pub use self::exchange::{DialPlace, Exchange, MAX_DIALS, MAX_DIALS_OF_PORT};
use self::memory::TcpMemory;
use self::ports::{LocalPorts, Ports};
pub use self::program::PROGRAM_GRACE;
use self::publish::Published;
pub use self::publish::{PreparedPublishes, PublishError, check_address};
use self::resolver::Names;
pub use self::resolver::{Lookup, LookupError, Resolver, SystemResolver};
pub use self::shared::AuditSink;
use self::shared::{Shared, TakenCall, count};
use crate::offers::Groups;
use runtime::thread::RuntimeThread;

/// Calls that are being put through at once, or wait for that: each may have a descriptor, and wait for a server. One VM has a quarter, its ordinary programs three quarters of that. Further ones are
/// refused at once.
pub const MAX_CALLS: u32 = 4096;

/// Threads for what cannot be done without waiting: names, programs, questions to the data plane, and sockets of services. None has to wait for a thread when it has its
/// turn.
const MAX_BLOCKING_THREADS: usize = 3 * turns::MAX_TURNS + MAX_SERVICES;

/// What a proxy is started with.
pub struct Options {
    /// The policy, which egress asks. See [`Proxy::set_policy`].
    pub policy: Arc<Policy>,
    /// Takes note of what egress decides. What becomes of calls to services is the data plane's to note.
    pub audit: AuditSink,
    /// Knows the addresses of names.
    pub resolver: Arc<dyn Resolver>,
    /// How long a program may go on when its circuit has ended: [`PROGRAM_GRACE`].
    pub program_grace: Duration,
    /// The ports that the host has for connections to one destination, of which one VM has a quarter.
    pub ports: LocalPorts,
    /// What the host has for TCP, of which no VM may have most.
    pub memory: TcpMemory,
}

impl Options {
    /// With this policy and audit, the host's own resolver, and as many ports as Linux has by itself.
    pub fn new(policy: Arc<Policy>, audit: AuditSink) -> Options {
        Options {
            policy,
            audit,
            resolver: Arc::new(SystemResolver::default()),
            program_grace: PROGRAM_GRACE,
            ports: LocalPorts::default(),
            memory: TcpMemory::default(),
        }
    }
}

/// What a proxy has done since it was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProxyReport {
    /// Calls of guests that came here.
    pub calls: u64,
    /// Calls of those that were refused because too many waited.
    pub turned_away: u64,
    /// Calls of those that could not be put through.
    pub failed: u64,
    /// Calls to guests for published ports.
    pub published: u64,
    /// Destinations of egress that were reached.
    pub egress_allowed: u64,
    /// Destinations of egress that the policy forbade.
    pub egress_denied: u64,
    /// Destinations of egress that could not be reached.
    pub egress_failed: u64,
    /// Datagrams that found no room.
    pub lost_datagrams: u64,
}

/// A running proxy. Dropping it ends its connections, programs and listeners.
pub struct Proxy {
    shared: Arc<Shared>,
    published: Published,
    calls: mpsc::UnboundedSender<TakenCall>,
    thread: RuntimeThread,
}

impl Proxy {
    /// Starts a proxy without services.
    ///
    /// # Errors
    /// When the system has no threads or descriptors left.
    pub fn start(options: Options) -> io::Result<Proxy> {
        let mut shared = Shared::new(
            options.policy,
            Names::new(options.resolver),
            options.audit,
            options.program_grace,
        );
        shared.ports = Ports::new(options.ports);
        let shared = Arc::new(shared);
        let (calls, waiting) = mpsc::unbounded_channel();
        let (served, memory) = (shared.clone(), options.memory);
        let thread = RuntimeThread::start("proxy", MAX_BLOCKING_THREADS, move |stopped| {
            serve(served, waiting, memory, stopped)
        })?;
        Ok(Proxy {
            published: Published::new(shared.clone(), thread.runtime().clone()),
            shared,
            calls,
            thread,
        })
    }

    /// Takes calls from the data plane, and never waits: when there is no room, the call is refused. What a call is put through to is settled here, on the
    /// thread that has judged it and that changes what is offered between two calls.
    pub fn dialer(&self) -> Dialer {
        let (calls, shared) = (self.calls.clone(), self.shared.clone());
        Box::new(move |call| {
            count(&shared.counts.calls);
            if let Some(call) = shared.take(call) {
                // A proxy that has stopped drops it, which refuses it.
                let _ = calls.send(call);
            }
        })
    }

    /// Takes note of calls that the data plane has refused itself, by the full names of their VMs and the ports that they came from: what was announced of one is
    /// expected no more.
    pub fn refusals(&self) -> impl Fn(&str, u32) + Send + use<> {
        let shared = self.shared.clone();
        move |vm, port| drop(shared.announced.take(vm, port))
    }

    /// Sets the data plane, once. Until then published ports hang up, and the directory is empty.
    pub fn set_exchange(&self, exchange: Arc<dyn Exchange>) {
        // A second one is the first one's own mistake, and changes nothing.
        let _ = self.shared.exchange.set(exchange);
    }

    /// Replaces the services, by the numbers by which the data plane calls them. Connections that exist go on.
    pub fn set_services(&self, services: Vec<(ServiceId, Service)>) {
        self.shared.set_services(services);
    }

    /// Replaces the policy that egress asks, the groups that it is about, and the names whose addresses are written down, which no resolver is asked for: all at
    /// once, since rules may open what is written down. With `enforce_existing` connections end that are not allowed any more.
    pub fn set_policy(
        &self,
        policy: Arc<Policy>,
        hosts: Hosts,
        groups: Groups,
        enforce_existing: bool,
    ) {
        self.shared
            .set_policy(policy, hosts, groups, enforce_existing);
    }

    /// Listens for published ports that are not published yet, so that [`set_publishes`](Self::set_publishes) cannot fail. One reload at
    /// a time may be between the two.
    ///
    /// # Errors
    /// The first address that cannot be had. Nothing has changed then.
    pub fn prepare_publishes(
        &self,
        publishes: Vec<Publish>,
    ) -> Result<PreparedPublishes, PublishError> {
        self.published.prepare(publishes)
    }

    /// Publishes these ports and no others. One that was published at the same address goes on listening.
    pub fn set_publishes(&self, prepared: PreparedPublishes) {
        self.published.set(prepared);
    }

    /// What has been done.
    pub fn report(&self) -> ProxyReport {
        let counts = &self.shared.counts;
        let read = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        ProxyReport {
            calls: read(&counts.calls),
            turned_away: read(&counts.turned_away),
            failed: read(&counts.failed),
            published: read(&counts.published),
            egress_allowed: read(&counts.egress_allowed),
            egress_denied: read(&counts.egress_denied),
            egress_failed: read(&counts.egress_failed),
            lost_datagrams: read(&counts.lost_datagrams),
        }
    }

    /// Ends everything: programs are asked to end and waited for, for as long as their grace is.
    pub fn stop(&self) {
        self.published.close();
        self.shared.stop.send_replace(true);
        self.thread.stop();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Takes calls until the proxy is to stop, and then waits for programs.
async fn serve(
    shared: Arc<Shared>,
    mut calls: mpsc::UnboundedReceiver<TakenCall>,
    memory: TcpMemory,
    stopped: oneshot::Receiver<()>,
) {
    let take = async {
        while let Some(call) = calls.recv().await {
            tokio::spawn(target::answer(shared.clone(), call));
        }
    };
    tokio::select! {
        () = take => {}
        () = shared.ports.connections().watch(&memory) => {}
        _ = stopped => {}
    }
    let mut programs = shared.programs.subscribe();
    // A program that has been killed is gone: more than twice the grace is not needed.
    let patience = 2 * shared.program_grace + Duration::from_secs(1);
    let _ = tokio::time::timeout(patience, programs.wait_for(|running| *running == 0)).await;
}
