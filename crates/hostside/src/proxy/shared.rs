//! What the tasks of the proxy have in common.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use config::{Hosts, MAX_SERVICES, Publish, Service};
use device::{Called, ServiceCall};
use policy::{Address, Policy, ServiceId};
use tokio::sync::{Semaphore, watch};
use vsock::Reason;

use super::MAX_CALLS;
use super::counter::{Capacities, GuestCapacity, GuestRoom, NoRoom};
use super::directory::REQUESTS_PER_SECOND;
use super::egress::{Announced, AnnouncedCall, View};
use super::exchange::{Exchange, MAX_DIALS};
use super::own::OwnListeners;
use super::ports::Ports;
use super::resolver::Names;
use super::rules::Rules;
use super::turns::Turns;
use crate::audit::AuditRecord;
use crate::gates::Gates;
use crate::offers::Groups;
use runtime::rate::Buckets;
use wire::agent::FIRST_UNPRIVILEGED_PORT;

/// Takes records for the audit. It must not wait.
pub type AuditSink = Box<dyn Fn(AuditRecord) + Send + Sync>;

/// What the tasks of the proxy have in common.
pub(crate) struct Shared {
    pub(crate) names: Names,
    /// Of names that are looked up.
    pub(crate) lookups: Turns,
    /// Of programs that are started.
    pub(crate) starts: Turns,
    /// Of questions to the data plane.
    pub(crate) questions: Turns,
    /// Where the sockets of services are connected to: each service has a thread for that.
    pub(crate) gates: Gates,
    pub(crate) rules: Arc<Rules>,
    pub(crate) audit: AuditSink,
    pub(crate) exchange: OnceLock<Arc<dyn Exchange>>,
    pub(crate) policy: watch::Sender<InForce>,
    /// Becomes true when the daemon ends.
    pub(crate) stop: watch::Sender<bool>,
    pub(crate) program_grace: Duration,
    /// Programs that run.
    pub(crate) programs: watch::Sender<usize>,
    pub(crate) directory: GuestCapacity,
    pub(crate) directory_rates: Buckets<String>,
    /// Where the daemon listens for published ports.
    pub(crate) own: OwnListeners,
    /// What connections to TCP servers take.
    pub(crate) ports: Ports,
    /// Capacity for calls of published ports that wait for the data plane.
    pub(crate) dials: Arc<Semaphore>,
    pub(crate) counts: Counts,
    pub(crate) announced: Announced,
    /// Of the agents of VMs, for callers of published ports.
    pub(crate) agents: Capacities,
    services: Mutex<HashMap<ServiceId, Offer>>,
    calls: GuestCapacity,
}

/// While it is there, no guest gets to what is about to be published.
pub(crate) struct Expected {
    shared: Arc<Shared>,
    number: u64,
}

impl Expected {
    /// What was expected is in force, and nothing else.
    pub(crate) fn put_in_force(&self) {
        self.shared.own.set_expected(self.number);
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        self.shared.own.take_back(self.number);
    }
}

/// The policy that is in force.
#[derive(Debug, Clone, Default)]
pub(crate) struct InForce {
    pub(crate) policy: Arc<Policy>,
    /// The names of `[hosts]`.
    pub(crate) hosts: Arc<Hosts>,
    /// The groups that its rules are about. Those of a caller may be of before.
    pub(crate) groups: Arc<Groups>,
    /// How often circuits that exist have been made subject to a new policy.
    pub(crate) enforced: u64,
}

impl InForce {
    /// The policy as it looks to a VM, in the groups that it is in now.
    pub(crate) fn view(&self, vm: &Address) -> View<'_> {
        let groups = self.groups.get(&vm.full_name());
        View::new(
            &self.policy,
            &self.hosts,
            vm,
            groups.map_or(&[], Vec::as_slice),
        )
    }

    /// Whether it says the same as another, which it does as long as neither has been replaced.
    pub(crate) fn is(&self, other: &InForce) -> bool {
        Arc::ptr_eq(&self.policy, &other.policy)
            && Arc::ptr_eq(&self.hosts, &other.hosts)
            && Arc::ptr_eq(&self.groups, &other.groups)
    }
}

/// What the proxy has done since it was started. Every count only grows.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) calls: AtomicU64,
    pub(crate) turned_away: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) published: AtomicU64,
    pub(crate) egress_allowed: AtomicU64,
    pub(crate) egress_denied: AtomicU64,
    pub(crate) egress_failed: AtomicU64,
    pub(crate) lost_datagrams: AtomicU64,
}

/// Adds one to a count.
pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

struct Offer {
    service: Arc<Service>,
    connections: GuestCapacity,
}

/// A call with what belongs to the configuration that allowed it: what is offered may be something else by the time it is put through.
pub(crate) struct TakenCall {
    pub(crate) call: ServiceCall,
    /// The service, if it is one, and room for one more connection to it, or why there is none.
    pub(crate) service: Option<(Arc<Service>, Result<GuestRoom, Reason>)>,
    pub(crate) in_force: InForce,
    /// What was announced of it.
    pub(crate) expected: Option<AnnouncedCall>,
    /// Room for it among all calls.
    pub(crate) room: GuestRoom,
}

impl Shared {
    pub(crate) fn new(
        policy: Arc<Policy>,
        names: Names,
        audit: AuditSink,
        program_grace: Duration,
    ) -> Shared {
        let in_force = InForce {
            policy,
            ..InForce::default()
        };
        Shared {
            names,
            lookups: Turns::default(),
            starts: Turns::default(),
            questions: Turns::default(),
            gates: Gates::new(MAX_SERVICES),
            rules: Arc::new(Rules::new(in_force.clone())),
            audit,
            exchange: OnceLock::new(),
            policy: watch::Sender::new(in_force),
            stop: watch::Sender::new(false),
            program_grace,
            programs: watch::Sender::new(0),
            directory: GuestCapacity::default(),
            directory_rates: Buckets::new(REQUESTS_PER_SECOND, Duration::from_secs(1)),
            own: OwnListeners::default(),
            ports: Ports::default(),
            dials: Arc::new(Semaphore::new(MAX_DIALS)),
            counts: Counts::default(),
            announced: Announced::default(),
            agents: Capacities::default(),
            services: Mutex::default(),
            calls: GuestCapacity::default(),
        }
    }

    /// Keeps guests from where these are going to listen.
    pub(crate) fn expect(self: &Arc<Shared>, publishes: &[Publish]) -> Expected {
        let listens = publishes.iter().map(|publish| &publish.listen);
        let number = self.own.expect(listens);
        Expected {
            shared: self.clone(),
            number,
        }
    }

    /// Replaces the services. One that keeps its number keeps the count of its connections.
    pub(crate) fn set_services(&self, services: Vec<(ServiceId, Service)>) {
        let mut offered = sys::lock(&self.services);
        let mut old = std::mem::take(&mut *offered);
        *offered = services
            .into_iter()
            .map(|(id, service)| {
                let connections = old.remove(&id).map(|offer| offer.connections);
                let offer = Offer {
                    service: Arc::new(service),
                    connections: connections.unwrap_or_default(),
                };
                (id, offer)
            })
            .collect();
    }

    /// Replaces the policy, and the groups that it is about.
    pub(crate) fn set_policy(
        &self,
        policy: Arc<Policy>,
        hosts: Hosts,
        groups: Groups,
        enforce_existing: bool,
    ) {
        self.policy.send_modify(|in_force| {
            *in_force = InForce {
                policy,
                hosts: Arc::new(hosts),
                groups: Arc::new(groups),
                enforced: in_force.enforced + u64::from(enforce_existing),
            };
            self.rules.set(in_force.clone());
        });
    }

    /// Takes a call, with what it is put through to by what is in force now. One for which there is no room is refused.
    pub(crate) fn take(&self, call: ServiceCall) -> Option<TakenCall> {
        let vm = call.vm.full_name();
        let expected = self.announced.take(&vm, call.source_port);
        let is_announced_so = expected.as_ref().is_some_and(|call| call.is_privileged);
        let is_privileged = is_announced_so || is_privileged(call.source_port);
        let room = self
            .calls
            .take(&vm, MAX_CALLS, MAX_CALLS / 4, is_privileged);
        let room = match room {
            Ok(room) => room,
            Err(none) => {
                count(&self.counts.turned_away);
                call.reply.failed(match none {
                    NoRoom::Full => Reason::BacklogFull,
                    NoRoom::Share => Reason::ServiceShare,
                });
                return None;
            }
        };
        let service = match call.called {
            Called::Service(id) => self.service(id, &vm, is_privileged),
            _ => None,
        };
        let of_service = |expected: &AnnouncedCall| {
            let service = service.as_ref();
            service.is_some_and(|(service, _)| expected.is_of(&service.full_name()))
        };
        Some(TakenCall {
            expected: expected.filter(of_service),
            call,
            service,
            in_force: self.policy.borrow().clone(),
            room,
        })
    }

    fn service(
        &self,
        id: ServiceId,
        vm: &str,
        is_privileged: bool,
    ) -> Option<(Arc<Service>, Result<GuestRoom, Reason>)> {
        let offered = sys::lock(&self.services);
        let offer = offered.get(&id)?;
        let limit = offer.service.max_connections;
        let share = (limit / 4).max(1);
        let room = offer.connections.take(vm, limit, share, is_privileged);
        let room = room.map_err(|none| match none {
            NoRoom::Full => Reason::ServiceLimit,
            NoRoom::Share => Reason::ServiceShare,
        });
        Some((offer.service.clone(), room))
    }
}

/// Whether the guest's kernel lets privileged programs alone call from this port. On a line that does not keep ports, it is 0.
pub(crate) fn is_privileged(source_port: u32) -> bool {
    (1..FIRST_UNPRIVILEGED_PORT).contains(&source_port)
}
