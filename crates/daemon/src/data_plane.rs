//! The worker, the proxy, the switchboard and the audit, put together.
//!
//! The worker judges every call and moves the bytes; the proxy puts calls to services through and accepts connections for published
//! ports; both write down what became of calls.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use device::{Decision, DecisionCaller, DecisionSink};
use policy::{Policy, full_name};
use vsock::Reason;

use crate::events::{CallNotes, observer};
use crate::net::NetThreads;
use crate::serve::{Started, Surroundings};
use crate::worker::{Wiring, Worker};
use hostside::audit::{AuditDecision, AuditRecord, AuditRule};
use hostside::offers::{Commit, Offer, OfferError, Offers};
use hostside::proxy::memory::TcpMemory;
use hostside::proxy::ports::LocalPorts;
use hostside::proxy::{Options, Proxy};
use windows::switchboard::Switchboard;

/// Starts a worker, a proxy and a switchboard that know each other. While guests and programs answer quickly, the worker looks for up to
/// `spin` before it sleeps. Of frames it takes up to `net_batch` from a ring at a time, or as many as is best.
/// Networks are spread over up to `workers` threads.
///
/// # Errors
/// When the system has no threads or descriptors left.
pub fn start(
    surroundings: Surroundings,
    ports: LocalPorts,
    memory: TcpMemory,
    spin: Duration,
    net_batch: Option<usize>,
    workers: usize,
) -> io::Result<Started> {
    let Surroundings {
        arrivals,
        audit,
        events,
        state_dir,
        windows,
        operators,
        keeper,
    } = surroundings;
    let notes = CallNotes::new(audit, events.clone());
    let noted = notes.clone();
    let sink = Box::new(move |record| noted.note_egress(record));
    let options = Options {
        ports,
        memory,
        ..Options::new(Arc::new(Policy::default()), sink)
    };
    let proxy = Proxy::start(options)?;
    let switchboard = Arc::new(Switchboard::start(windows)?);
    let wiring = Wiring {
        arrivals,
        dialer: switchboard.dialer(proxy.dialer()),
        decisions: decisions(notes, proxy.refusals()),
        observer: observer(events),
        state_dir,
        host_group: operators,
        keeper: keeper.clone(),
    };
    let worker = Worker::start(wiring, spin)?;
    proxy.set_exchange(worker.clone());
    switchboard.set_plane(worker.clone());
    Ok(Started {
        worker,
        net: Arc::new(NetThreads::new(workers, spin, net_batch, keeper)),
        offers: Arc::new(ProxyOffers {
            proxy: Arc::new(proxy),
        }),
        circuits: switchboard,
    })
}

/// Writes down what became of calls, and says which were refused.
fn decisions(notes: CallNotes, refused: impl Fn(&str, u32) + Send + 'static) -> DecisionSink {
    Box::new(move |decision| {
        let circuit = decision.circuit;
        if let (
            DecisionCaller::Vm {
                domain, vm, port, ..
            },
            Err(_),
        ) = (&decision.caller, decision.result)
        {
            refused(&full_name(domain, vm), *port);
        }
        notes.note(record(decision), circuit);
    })
}

/// A decision as the audit has it.
fn record(decision: Decision<'_>) -> AuditRecord {
    let redirected_to = decision.reached;
    let of_egress = [Err(Reason::EgressDenied), Err(Reason::EgressFailed)];
    let by_egress = of_egress.contains(&decision.result);
    AuditRecord {
        decision: match decision.result {
            Ok(()) => AuditDecision::Allowed,
            Err(reason) if is_denial(reason) => AuditDecision::Denied,
            Err(_) => AuditDecision::Failed,
        },
        redirected_to: redirected_to.filter(|reached| *reached != decision.dialled),
        from: decision.caller,
        to: decision.dialled,
        // The rule that lets a VM call egress has not decided about what it asks for: that is a record of its own.
        rule: decision
            .rule
            .filter(|_| !by_egress)
            .map(|(id, label)| AuditRule {
                index: id.0,
                label: label.to_owned(),
            }),
        reason: match decision.result {
            // The rule that is named says it.
            Err(Reason::Denied) if decision.rule.is_some() => None,
            other => other.err().map(|reason| reason.to_string().into()),
        },
    }
}

/// Whether the policy, a limit of a rule or a limit of a VM stands in the way, rather than the callee.
fn is_denial(reason: Reason) -> bool {
    let of_policy = [Reason::Denied, Reason::EgressDenied, Reason::OwnPort];
    of_policy.contains(&reason) || reason.is_limit()
}

/// Offers what the proxy serves.
struct ProxyOffers {
    proxy: Arc<Proxy>,
}

impl Offers for ProxyOffers {
    fn stop(&self) {
        self.proxy.stop();
    }

    fn prepare(&self, offer: Offer) -> Result<Commit, OfferError> {
        let Offer {
            services,
            publishes,
            hosts,
            policy,
            groups,
            enforce_existing,
        } = offer;
        let publishes = self
            .proxy
            .prepare_publishes(publishes)
            .map_err(|error| OfferError {
                what: "publishing".to_owned(),
                reason: error.to_string(),
            })?;
        let proxy = self.proxy.clone();
        Ok(Box::new(move || {
            let numbered = |(id, service)| (policy::ServiceId(id), service);
            proxy.set_services(services.into_iter().map(numbered).collect());
            proxy.set_policy(policy, hosts, groups, enforce_existing);
            proxy.set_publishes(publishes);
        }))
    }
}

#[cfg(test)]
mod tests {
    use device::{DecisionCallee, DecisionCaller};
    use policy::RuleId;

    use super::*;

    #[test]
    fn a_refusal_of_egress_does_not_name_the_rule_that_allows_to_call_it() {
        let refused = |reason| {
            record(Decision {
                caller: DecisionCaller::Program {
                    uid: 1000,
                    pid: None,
                },
                circuit: None,
                dialled: DecisionCallee::Service {
                    domain: "default".to_owned(),
                    service: "egress".to_owned(),
                    port: 3128,
                },
                reached: None,
                rule: Some((RuleId(0), "use-services")),
                result: Err(reason),
            })
        };
        let by_egress = refused(Reason::EgressDenied);
        assert_eq!(by_egress.decision, AuditDecision::Denied);
        assert_eq!(by_egress.rule, None);
        assert!(by_egress.reason.unwrap().contains("egress refused"));
        let beyond = refused(Reason::EgressFailed);
        assert_eq!(
            (beyond.decision, beyond.rule),
            (AuditDecision::Failed, None)
        );
        let words = beyond.reason.unwrap();
        assert!(words.contains("`ringdown why VM name:"), "{words}");
        assert!(!words.contains("no listener"), "{words}");
        let by_rule = refused(Reason::Denied);
        assert_eq!(by_rule.rule.unwrap().label, "use-services");
        assert_eq!(by_rule.reason, None);
    }
}
