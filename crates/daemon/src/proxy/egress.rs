//! Egress: a proxy for SOCKS5 and HTTP by which a guest without a network card reaches names, addresses and ports beyond the host:
//! those that the policy allows, and no other.
//!
//! A connection is a request, a decision, and a relay. The request may take [`HANDSHAKE_TIMEOUT`]; names are looked up on the host;
//! [`decide`] says where the guest may go. Each outcome has an answer of its own ([`EgressError`]), in both protocols, and stands in
//! the audit.

mod addresses;
mod decide;
mod error;
mod handshake;
mod routes;

use std::borrow::Cow;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use device::{Connected, Hold, Reply};
use switch::{Address, Policy, Reason, RuleId};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::time::Instant;
use wire::destination::{Destination, Host};

use self::decide::Said;
pub(crate) use self::decide::View;
use self::error::EgressError;
use self::handshake::Asked;
use super::counter::Permit;
use super::relay::{CircuitEnd, Socket, relay};
use super::resolver::LookupError;
use super::rules::{RuleLimit, Share};
use super::shared::{InForce, Shared, count};
use super::tcp;
use crate::audit::{AuditCallee, AuditCaller, AuditDecision, AuditRecord, AuditRule};
use crate::config::Service;

/// How long a guest may take to say where it wants to go.
pub const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);

/// Connections of one VM through egress at once, in any state.
pub const MAX_CONNECTIONS_PER_VM: u32 = 256;

/// Takes a guest's call to an egress service: it is answered at once, and asked where it wants to go.
pub(crate) fn answer(
    shared: &Arc<Shared>,
    service: Arc<Service>,
    vm: Address,
    source_port: u32,
    permit: Permit,
    reply: Reply,
) -> Result<(), (Reason, Reply)> {
    let own = shared
        .egress_by_vm
        .take(&vm.full_name(), MAX_CONNECTIONS_PER_VM);
    let Some(own) = own else {
        tracing::warn!(
            vm = vm.full_name(),
            limit = MAX_CONNECTIONS_PER_VM,
            "refused a call: the VM has as many connections through egress as it may"
        );
        return Err((Reason::BacklogFull, reply));
    };
    let (end, theirs, cut) = match CircuitEnd::pair() {
        Ok(pair) => pair,
        Err(error) => {
            tracing::warn!(%error, "cannot answer a call to egress");
            return Err((Reason::HostFailed, reply));
        }
    };
    let guest = Guest {
        shared: shared.clone(),
        service,
        vm,
        source_port,
    };
    tokio::spawn(async move {
        guest.serve(end).await;
        drop((own, permit));
    });
    reply.put_through(Connected::with_cut(theirs, cut));
    Ok(())
}

/// One connection of a guest through egress.
struct Guest {
    shared: Arc<Shared>,
    service: Arc<Service>,
    vm: Address,
    source_port: u32,
}

/// What a guest was put through to.
struct Reached {
    server: TcpStream,
    address: SocketAddr,
    rule: RuleId,
    share: Share,
}

impl Guest {
    async fn serve(&self, mut end: CircuitEnd) {
        let asked = handshake::listen(&mut end.stream);
        let asked = tokio::time::timeout(HANDSHAKE_TIMEOUT, asked).await;
        let asked = match asked {
            Ok(Ok(asked)) => asked,
            Ok(Err(error)) => {
                tracing::debug!(vm = self.vm.full_name(), %error, "a guest asked egress for nothing sensible");
                return handshake::hang_up(end.ended()).await;
            }
            Err(_) => {
                tracing::debug!(
                    vm = self.vm.full_name(),
                    "a guest did not say where it wants to go"
                );
                return;
            }
        };
        // A snapshot: what is decided below is decided by one policy.
        let in_force = self.shared.policy.borrow().clone();
        let reached = self.reach(&in_force.policy, &asked.destination).await;
        self.record(&in_force.policy, &asked.destination, &reached);
        match reached {
            Ok(reached) => self.carry(end, asked, reached, in_force).await,
            Err(error) => {
                let answer = asked.dialect.refuse(&error);
                // A guest that has hung up does not want to know.
                let _ = end.stream.write_all(&answer).await;
                handshake::hang_up(end.ended()).await;
            }
        }
    }

    /// Decides, looks up, decides about what was found, and connects to what was allowed.
    async fn reach(&self, policy: &Policy, to: &Destination) -> Result<Reached, EgressError> {
        let view = View::new(policy, &self.vm);
        let (name, addresses) = match &to.host {
            Host::Address(address) => (None, vec![*address]),
            Host::Name(name) => {
                permitted(policy, view.name(name, to.port))?;
                let addresses = self.look_up(name).await.map_err(|error| match error {
                    LookupError::Unknown => EgressError::UnknownName,
                    LookupError::TimedOut => EgressError::LookupTimedOut,
                })?;
                (Some(name.as_str()), addresses)
            }
        };
        let mut allowed: Vec<(IpAddr, RuleId)> = Vec::new();
        let mut refused = None;
        for address in addresses {
            match permitted(policy, view.address(address, name, to.port)) {
                Ok(rule) => allowed.push((address, rule)),
                Err(error) => refused = refused.or(Some(error.about(address))),
            }
        }
        let Some((_, rule)) = allowed.first().copied() else {
            return Err(refused.unwrap_or(EgressError::UnknownName));
        };
        // Addresses that another rule allows would count for that rule: they are left to the calls that begin with them.
        let addresses: Vec<SocketAddr> = allowed
            .iter()
            .filter(|(_, of)| *of == rule)
            .map(|(address, _)| SocketAddr::from((*address, to.port)))
            .collect();
        let share = self.shared.rules.admit(policy, rule).map_err(|limit| {
            let label = label(policy, rule);
            match limit {
                RuleLimit::Circuits => EgressError::RuleCircuits { rule, label },
                RuleLimit::ConnectsPerSecond => EgressError::RuleRate { rule, label },
            }
        })?;
        let server = tcp::connect(&addresses, self.service.connect_timeout).await;
        let failed = |reason| EgressError::from_reason(reason, rule);
        let server = server.map_err(failed)?;
        server.begin();
        // The very socket knows whom it has reached.
        let address = server.peer_addr().map_err(|_| failed(Reason::HostFailed))?;
        let from = server
            .local_addr()
            .map_err(|_| failed(Reason::HostFailed))?;
        if let Err(error) = permitted(
            policy,
            view.connection(address.ip(), from.ip(), name, to.port),
        ) {
            return Err(error.about(address.ip()));
        }
        Ok(Reached {
            server,
            address,
            rule,
            share,
        })
    }

    async fn look_up(&self, name: &str) -> Result<Vec<IpAddr>, LookupError> {
        let turn = self.shared.turns.turn(&self.vm.full_name()).await?;
        let turn: Hold = Box::new(turn);
        self.shared.names.lookup(name, Some(turn)).await
    }

    /// Answers the guest and carries bytes until both ends have ended, or a new policy ends it.
    async fn carry(&self, mut end: CircuitEnd, asked: Asked, reached: Reached, since: InForce) {
        let Reached {
            mut server,
            address,
            share,
            ..
        } = reached;
        // A peer that has gone without a word must not keep its place for ever.
        let _ = rustix::net::sockopt::set_socket_keepalive(&server, true);
        let (answer, first) = asked.dialect.accept(&asked.early);
        let started = async {
            end.stream.write_all(&answer).await?;
            server.write_all(&first).await
        };
        if started.await.is_err() {
            return;
        }
        let name = match &asked.destination.host {
            Host::Name(name) => Some(name.as_str()),
            Host::Address(_) => None,
        };
        tokio::select! {
            () = relay(&mut end, &mut server, &share) => {}
            () = self.forbidden(address, name, since.enforced) => {
                tracing::info!(vm = self.vm.full_name(), to = %asked.destination, "ended a connection that the new policy does not allow");
            }
        }
    }

    /// Waits for a policy that does not allow this any more, and is to be enforced upon what exists.
    async fn forbidden(&self, address: SocketAddr, name: Option<&str>, mut enforced: u64) {
        let mut policies = self.shared.policy.subscribe();
        loop {
            let in_force = policies.borrow_and_update().clone();
            if in_force.enforced != enforced {
                enforced = in_force.enforced;
                let view = View::new(&in_force.policy, &self.vm);
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
        let (rule, address, reason) = match reached {
            Ok(reached) => (Some(reached.rule), Some(reached.address.ip()), None),
            Err(error) => (error.rule(), error.address(), Some(error.to_string())),
        };
        (self.shared.audit)(AuditRecord {
            decision,
            from: AuditCaller::Vm {
                domain: self.vm.domain.clone(),
                vm: self.vm.name.clone(),
                cid: self.vm.cid,
                port: self.source_port,
            },
            to: AuditCallee::Address {
                name,
                address: address.or(asked),
                port: to.port,
            },
            redirected_to: None,
            rule: rule.map(|rule| AuditRule {
                index: rule.0,
                label: label(policy, rule),
            }),
            reason: reason.map(Cow::Owned),
        });
    }
}

/// What becomes of a call of which the policy says this.
pub(crate) fn permitted(policy: &Policy, said: Said) -> Result<RuleId, EgressError> {
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
