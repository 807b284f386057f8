//! Egress: a proxy for SOCKS5 and HTTP by which a guest without a network card reaches names, addresses and ports beyond the host:
//! those that the policy allows, and no other.
//!
//! A connection is a request, a decision, and a relay. The request may take [`HANDSHAKE_TIMEOUT`]; names are looked up on the host;
//! [`decide`] says where the guest may go. Each outcome has an answer of its own ([`EgressError`]), in both protocols, and stands in
//! the audit.

mod addresses;
mod announced;
mod decide;
mod error;
mod handshake;
mod routes;

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use config::listeners::Spoken;
use config::{Hosts, Service};
use device::{Connected, Cut, Reply};
use policy::{Address, Policy, RuleId, RuleLimit};
use tokio::io::AsyncWriteExt;
use tokio::time::Instant;
use vsock::Reason;
use wire::destination::{Destination, Host};

pub(crate) use self::announced::{Announced, AnnouncedCall};
pub use self::decide::{Said, View, is_network, means, means_name, must_be_named};
pub use self::error::EgressError;
use self::handshake::{Asked, Request};
pub(crate) use self::routes::{is_no_route, is_unicast};
use super::counter::GuestRoom;
use super::identity::About;
use super::own::OwnListeners;
use super::relay::{CircuitEnd, relay};
use super::resolver::LookupError;
use super::rules::{Place, Share};
use super::shared::{InForce, Shared, count};
use super::tcp;
use super::turns::Asker;
use crate::audit::{AuditDecision, AuditRecord, AuditRule};
use device::{DecisionCallee, DecisionCaller};

/// How long a guest may take to say where it wants to go.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Takes a guest's call to an egress service: it is answered at once, and asked where it wants to go.
pub(crate) fn answer(
    shared: &Arc<Shared>,
    service: Arc<Service>,
    caller: Caller,
    room: GuestRoom,
    reply: Reply,
) -> Result<(), (Reason, Reply)> {
    let Caller {
        vm,
        source_port,
        since,
        expected,
    } = caller;
    let guest = Guest {
        shared: shared.clone(),
        service,
        vm,
        source_port,
        is_privileged: room.is_privileged(),
    };
    if let Some(expected) = expected {
        tokio::spawn(async move {
            guest.put_through(since, expected, reply).await;
            drop(room);
        });
        return Ok(());
    }
    let (end, theirs, cut) = match guest.pair() {
        Ok(pair) => pair,
        Err(reason) => return Err((reason, reply)),
    };
    tokio::spawn(async move {
        guest.serve(since, end, room).await;
    });
    reply.put_through(Connected::with_cut(theirs, cut));
    Ok(())
}

/// A caller of egress.
pub(crate) struct Caller {
    pub(crate) vm: Address,
    pub(crate) source_port: u32,
    /// What was in force when the call was allowed.
    pub(crate) since: InForce,
    /// What it has announced of this call.
    pub(crate) expected: Option<AnnouncedCall>,
}

/// One connection of a guest through egress.
struct Guest {
    shared: Arc<Shared>,
    service: Arc<Service>,
    vm: Address,
    source_port: u32,
    is_privileged: bool,
}

/// What a guest was put through to.
struct Reached {
    server: tcp::Server,
    address: SocketAddr,
    rule: RuleId,
    share: Share,
    /// How often policies had been enforced when it was last decided about.
    enforced: u64,
}

/// Deciders, each as it looks to the guest. All have to allow it.
struct Views<'a>(Vec<(&'a Policy, View<'a>)>);

impl Views<'_> {
    /// The rule of the first that allows it.
    fn permitted(&self, ask: impl Fn(&View<'_>) -> Said) -> Result<RuleId, EgressError> {
        let mut rules = Vec::new();
        for (policy, view) in &self.0 {
            rules.push(permitted(policy, ask(view))?);
        }
        // There is always one.
        rules
            .first()
            .copied()
            .ok_or(EgressError::NoRule { address: None })
    }
}

impl Guest {
    fn pair(&self) -> Result<(CircuitEnd, OwnedFd, Cut), Reason> {
        CircuitEnd::pair().map_err(|error| {
            tracing::warn!(vm = self.vm.full_name(), %error, "cannot answer a call to egress");
            Reason::HostFailed
        })
    }

    async fn serve(&self, since: InForce, mut end: CircuitEnd, mut room: GuestRoom) {
        let asked = handshake::listen(&mut end.stream);
        let asked = tokio::time::timeout(HANDSHAKE_TIMEOUT, asked).await;
        let asked = match asked {
            Ok(Ok(Request::Asked(asked))) => asked,
            Ok(Ok(Request::Announced(announcement))) => {
                return self.expect(end, announcement, &mut room).await;
            }
            Ok(Err(error)) => {
                tracing::debug!(vm = self.vm.full_name(), %error, "a guest sent egress an invalid request");
                return handshake::hang_up(end.ended()).await;
            }
            Err(_) => {
                tracing::debug!(
                    vm = self.vm.full_name(),
                    "a guest sent egress no request in time"
                );
                return;
            }
        };
        let in_force = self.in_force();
        let reached = self.reach(since, &in_force, &asked.destination).await;
        self.record(&in_force.policy, &asked.destination, &reached);
        // What was in force must not live as long as the connection.
        drop(in_force);
        match reached {
            Ok(reached) => self.carry(end, asked, reached).await,
            Err(error) => {
                let answer = asked.dialect.refuse(&error);
                // A guest that has hung up does not want to know.
                let _ = end.stream.write_all(&answer).await;
                handshake::hang_up(end.ended()).await;
            }
        }
    }

    fn in_force(&self) -> InForce {
        self.shared.policy.borrow().clone()
    }

    /// What decides about a place that the guest names now. The configuration that let it call egress may not be the one that is in force, and may have forbidden
    /// that place: so both are asked.
    fn views<'a>(&'a self, since: &'a InForce, in_force: &'a InForce) -> Views<'a> {
        let mut both = vec![in_force];
        both.extend((!since.is(in_force)).then_some(since));
        let views = both.into_iter();
        Views(views.map(|of| (&*of.policy, of.view(&self.vm))).collect())
    }

    /// Decides, looks up, decides about what was found, and connects to what was allowed.
    async fn reach(
        &self,
        since: InForce,
        in_force: &InForce,
        to: &Destination,
    ) -> Result<Reached, EgressError> {
        let policy = &*in_force.policy;
        let views = self.views(&since, in_force);
        let (name, addresses) = match &to.host {
            Host::Address(address) => (None, vec![*address]),
            Host::Name(name) => {
                views.permitted(|view| view.name(name, to.port))?;
                let addresses = self.look_up(name, to.port, &in_force.hosts).await?;
                (Some(name.as_str()), addresses)
            }
        };
        let judge = |address| views.permitted(|view| view.address(address, name, to.port));
        let (rule, addresses) = allowed(&addresses, judge)?;
        // There is at least one.
        let first = addresses[0];
        let addresses: Vec<SocketAddr> = addresses
            .into_iter()
            .map(|address| SocketAddr::from((address, to.port)))
            .collect();
        none_is_published(&self.shared.own, &addresses)?;
        let place = Place {
            address: first,
            name: name.map(str::to_owned),
            port: to.port,
        };
        let admitted = self.shared.rules.admit(&self.vm, place);
        let share = admitted.map_err(|limit| {
            let label = label(policy, rule);
            match limit {
                RuleLimit::Circuits => EgressError::RuleCircuits { rule, label },
                RuleLimit::ConnectsPerSecond => EgressError::RuleRate { rule, label },
            }
        })?;
        let about = About {
            name: self.service.full_name(),
            vm: self.vm.full_name(),
        };
        let (own, ports) = (&self.shared.own, &self.shared.ports);
        let patience = self.service.connect_timeout;
        let server = tcp::connect(&addresses, patience, &about, own, ports).await;
        let failed = |reason| EgressError::from_reason(reason, rule);
        let server = server.map_err(failed)?;
        // The very socket knows the server reached.
        let ends = (server.stream.local_addr(), server.stream.peer_addr());
        let (from, address) = tcp::ends(ends.0, ends.1).map_err(failed)?;
        // What is in force may have changed while it was looked up and connected to.
        let in_force = self.in_force();
        let views = self.views(&since, &in_force);
        views
            .permitted(|view| view.connection(address.ip(), from.ip(), name, to.port))
            .map_err(|error| error.about(address.ip()))?;
        Ok(Reached {
            server,
            address,
            rule,
            share,
            enforced: in_force.enforced,
        })
    }

    async fn look_up(
        &self,
        name: &str,
        port: u16,
        hosts: &Hosts,
    ) -> Result<Vec<IpAddr>, LookupError> {
        let asker = Asker {
            vm: &self.vm.full_name(),
            is_privileged: self.is_privileged,
        };
        // What was judged is the whole name: a search list of the host must not make another of it.
        let whole = format!("{name}.");
        let Shared { names, lookups, .. } = &*self.shared;
        names.lookup(&whole, port, hosts, lookups, asker).await
    }

    /// Answers the guest and carries bytes until both ends have ended, or a new policy ends it.
    async fn carry(&self, mut end: CircuitEnd, asked: Asked, reached: Reached) {
        let Reached {
            mut server,
            address,
            share,
            enforced,
            ..
        } = reached;
        let (answer, first) = asked.dialect.accept(&asked.early);
        let name = match &asked.destination.host {
            Host::Name(name) => Some(name.as_str()),
            Host::Address(_) => None,
        };
        let carried = async {
            end.stream.write_all(&answer).await?;
            server.stream.write_all(&first).await?;
            relay(&mut end, &mut server, &share).await;
            std::io::Result::Ok(())
        };
        tokio::select! {
            // Asked first, so that nothing passes that a policy has ended.
            biased;
            () = self.forbidden(address, name, enforced) => {
                tracing::info!(vm = self.vm.full_name(), to = %asked.destination, "ended a connection that the new policy does not allow");
            }
            // A side that has gone is no matter of ours.
            _ = carried => {}
        }
    }

    /// Waits for a policy that does not allow this any more, and is to be enforced upon what exists.
    async fn forbidden(&self, address: SocketAddr, name: Option<&str>, mut enforced: u64) {
        let mut policies = self.shared.policy.subscribe();
        loop {
            let in_force = policies.borrow_and_update().clone();
            if in_force.enforced != enforced {
                enforced = in_force.enforced;
                let view = in_force.view(&self.vm);
                if !view.still_allows(address.ip(), name, address.port()) {
                    return;
                }
            }
            if policies.changed().await.is_err() {
                // There will be no other policy.
                return std::future::pending().await;
            }
        }
    }

    fn record(&self, policy: &Policy, to: &Destination, reached: &Result<Reached, EgressError>) {
        let counts = &self.shared.counts;
        let (decision, counter) = match reached {
            Ok(_) => (AuditDecision::Allowed, &counts.egress_allowed),
            Err(error) if error.is_denial() => (AuditDecision::Denied, &counts.egress_denied),
            Err(_) => (AuditDecision::Failed, &counts.egress_failed),
        };
        count(counter);
        let (name, asked) = match &to.host {
            Host::Name(name) => (Some(name.clone()), None),
            Host::Address(address) => (None, Some(*address)),
        };
        let known = |rule| label(policy, rule);
        let (rule, address, reason) = match reached {
            Ok(Reached { rule, address, .. }) => {
                (Some((*rule, known(*rule))), Some(address.ip()), None)
            }
            Err(error) => {
                let named = |rule| {
                    let named = error.label().map(str::to_owned);
                    (rule, named.unwrap_or_else(|| known(rule)))
                };
                let reason = error.to_string();
                (error.rule().map(named), error.address(), Some(reason))
            }
        };
        (self.shared.audit)(AuditRecord {
            decision,
            from: DecisionCaller::Vm {
                domain: self.vm.domain.clone(),
                vm: self.vm.name.clone(),
                cid: self.vm.cid,
                port: self.source_port,
            },
            to: DecisionCallee::Address {
                name,
                address: address.or(asked),
                port: to.port,
            },
            redirected_to: None,
            rule: rule.map(|(rule, label)| AuditRule {
                index: rule.0,
                label,
            }),
            reason: reason.map(Cow::Owned),
        });
    }
}

/// Which of these addresses may be called, and by which rule. Those that another rule allows than the first would count for that rule: they
/// are left to the calls that begin with them.
///
/// # Errors
/// Why the first of those that may not be called may not, if none may.
pub fn allowed(
    addresses: &[IpAddr],
    judge: impl Fn(IpAddr) -> Result<RuleId, EgressError>,
) -> Result<(RuleId, Vec<IpAddr>), EgressError> {
    let mut allowed: Option<(RuleId, Vec<IpAddr>)> = None;
    let mut refused = None;
    for address in addresses {
        match (judge(*address), &mut allowed) {
            (Ok(rule), None) => allowed = Some((rule, vec![*address])),
            (Ok(rule), Some((first, addresses))) if rule == *first => addresses.push(*address),
            (Ok(_), Some(_)) => {}
            (Err(error), _) => refused = refused.or(Some(error.about(*address))),
        }
    }
    allowed.ok_or_else(|| refused.unwrap_or(EgressError::UnknownName))
}

/// What becomes of a call of which the policy says this.
///
/// # Errors
/// Why it is not permitted.
pub fn permitted(policy: &Policy, said: Said) -> Result<RuleId, EgressError> {
    match said {
        Said::Allowed(rule) => Ok(rule),
        Said::Denied(rule) => Err(EgressError::Denied {
            rule,
            label: label(policy, rule),
            address: None,
        }),
        Said::Redirected(rule) => Err(EgressError::Redirected {
            rule,
            label: label(policy, rule),
        }),
        Said::NoRule => Err(EgressError::NoRule { address: None }),
        Said::Special => Err(EgressError::Special { address: None }),
        Said::Unknown(error) => Err(EgressError::NoRoutes {
            error,
            address: None,
        }),
    }
}

/// Refuses a call that would get to a published port, as a caller from outside.
///
/// # Errors
/// It would, or the kernel does not say.
pub fn none_is_published(own: &OwnListeners, addresses: &[SocketAddr]) -> Result<(), EgressError> {
    for to in addresses {
        let address = Some(to.ip());
        match own.are_reached(Spoken::Tcp, None, *to) {
            Ok(false) => {}
            Ok(true) => return Err(EgressError::Published { address }),
            Err(error) => return Err(EgressError::NoRoutes { error, address }),
        }
    }
    Ok(())
}

fn label(policy: &Policy, rule: RuleId) -> String {
    policy
        .rule(rule)
        .map(|rule| rule.label.clone())
        .unwrap_or_default()
}

/// For how long a guest is waited for that has been refused.
pub(crate) const LINGER: Duration = Duration::from_secs(1);

/// The end of [`LINGER`] from now.
pub(crate) fn linger_until() -> Instant {
    Instant::now() + LINGER
}

#[cfg(test)]
mod tests;
