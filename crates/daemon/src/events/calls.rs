//! What became of calls, for the audit and for readers of the events.

use std::time::Duration;

use api::{CircuitEnd, EventDetails, EventKind};
use device::{CircuitSnapshot, Endpoint, Observation, Observer};
use policy::full_name;
use vsock::{CircuitId, Reason};

use super::{Call, Events};
use crate::audit::{Audit, RECORDS_PER_SECOND};
use device::{DecisionCallee, DecisionCaller};
use hostside::audit::{AuditDecision, AuditRecord};
use runtime::rate::{self, Buckets};
use windows::switchboard::CircuitName;
use windows::switchboard::pool::WindowState;

/// Takes note of decisions about calls.
#[derive(Debug, Clone)]
pub struct CallNotes {
    audit: Audit,
    events: Events,
}

impl CallNotes {
    /// Notes that go to both.
    pub fn new(audit: Audit, events: Events) -> CallNotes {
        CallNotes { audit, events }
    }

    /// A decision about what a circuit to an egress service asks for. It makes no circuit.
    pub fn note_egress(&self, record: AuditRecord) {
        match record.decision {
            AuditDecision::Allowed => {
                let (from, (to, port)) = (caller_asked(&record.from), callee_asked(&record.to));
                self.audit.record(record);
                self.events.put_through(Call {
                    from: Some(&from),
                    to: Some(&to),
                    port,
                });
            }
            AuditDecision::Denied | AuditDecision::Failed => self.note(record, None),
        }
    }

    /// A decision, and the circuit that the call has become, if that is known. Never waits.
    pub fn note(&self, record: AuditRecord, circuit: Option<CircuitId>) {
        let (to, port) = callee_asked(&record.to);
        let details = EventDetails {
            vm: matches!(record.to, DecisionCallee::Place { .. }).then(|| to.clone()),
            circuit: circuit.map(|id| CircuitName(id).to_string()),
            from: Some(caller_words(&record.from)),
            to: Some(callee_words(&record.to)),
            reached: record.redirected_to.as_ref().map(callee_words),
            port: Some(port),
            rule: record.rule.as_ref().map(|rule| rule.label.clone()),
            reason: match (&record.reason, record.decision) {
                (None, AuditDecision::Denied) => Some("denied by the rule".to_owned()),
                (reason, _) => reason.as_deref().map(str::to_owned),
            },
            ..EventDetails::default()
        };
        let from = caller_asked(&record.from);
        if record.decision == AuditDecision::Allowed && is_own_call(&record.from) {
            return;
        }
        let decision = record.decision;
        let is_usual = self.audit.record(record);
        let call = Call {
            from: Some(&from),
            to: Some(&to),
            port,
        };
        if decision != AuditDecision::Allowed {
            self.events.tell_refusal(call, decision, is_usual, details);
            return;
        }
        self.events.put_through(call);
        if is_usual {
            self.events.tell(EventKind::CircuitOpened, details);
        }
    }
}

impl Events {
    /// Reports windows that are lent and free again.
    pub fn of_windows(&self) -> windows::memory::Observer {
        let events = self.clone();
        Box::new(move |state, vms| {
            let kind = match state {
                WindowState::InUse => EventKind::WindowLent,
                WindowState::Free => EventKind::WindowFree,
                // These make no events.
                WindowState::Absent | WindowState::Quarantined => return,
            };
            events.tell_of_vm(kind, EventDetails::of_vm(vms));
        })
    }
}

/// Reports lines and circuits that the worker observes.
pub fn observer(events: Events) -> Observer {
    let ends = allowances();
    Box::new(move |observation: &Observation<'_>| match observation {
        Observation::LineUp { vm } => {
            events.tell_of_vm(EventKind::LineUp, EventDetails::of_vm(*vm));
        }
        Observation::LineDown { vm } => {
            events.tell_of_vm(EventKind::LineDown, EventDetails::of_vm(*vm));
        }
        Observation::CircuitEnded { circuit, reason } => {
            let by_us = matches!(&circuit.caller, Endpoint::Program { credentials, .. } if is_us(credentials.pid));
            if by_us {
                return;
            }
            let mut details = of_circuit(circuit);
            if !ends.take(Source::of(&circuit.caller), rate::now()) {
                return;
            }
            details.reason = Some(match reason {
                Some(Reason::Denied) if details.rule.is_some() => {
                    "the rule does not allow it any more".to_owned()
                }
                Some(reason) => reason.to_string(),
                None => "closed by both ends".to_owned(),
            });
            events.tell(EventKind::CircuitEnded, details);
        }
    })
}

/// Calls of the daemon itself, which asks guests for their figures whenever a client reads the metrics: no user makes them, and so many that all
/// else would be pushed out. Their refusals are reported.
fn is_own_call(caller: &DecisionCaller) -> bool {
    matches!(caller, DecisionCaller::Program { pid: Some(pid), .. } if i32::try_from(*pid).is_ok_and(is_us))
}

fn is_us(pid: i32) -> bool {
    u32::try_from(pid).is_ok_and(|pid| pid == std::process::id())
}

/// The owner of an allowance, as in the audit. Programs of one user are one.
#[derive(Debug, PartialEq, Eq, Hash)]
enum Source {
    Vm(String),
    User(u32),
    Published(String),
    Other,
}

impl Source {
    fn of(caller: &Endpoint) -> Source {
        match caller {
            Endpoint::Vm { domain, name, .. } => Source::Vm(full_name(domain, name)),
            Endpoint::Program { credentials, .. } => Source::User(credentials.uid),
            Endpoint::Published { name } => Source::Published(name.clone()),
            Endpoint::Service { .. } | Endpoint::Listener { .. } | Endpoint::Gone => Source::Other,
        }
    }
}

/// How many ends of circuits are reported of each caller: as many as the audit writes, [`RECORDS_PER_SECOND`]. One that opens and closes circuits
/// without pause would push all other events out of the ring.
fn allowances() -> Buckets<Source> {
    Buckets::new(RECORDS_PER_SECOND.into(), Duration::from_secs(1))
}

fn of_circuit(circuit: &CircuitSnapshot) -> EventDetails {
    let end = |endpoint: &Endpoint| circuit_end(endpoint.clone()).to_string();
    let [from_caller, to_caller] = circuit.bytes;
    EventDetails {
        circuit: Some(CircuitName(circuit.id).to_string()),
        from: Some(end(&circuit.caller)),
        to: Some(end(&circuit.dialled)),
        reached: (circuit.callee != circuit.dialled).then(|| end(&circuit.callee)),
        rule: circuit.rule.clone(),
        bytes_from_caller: Some(from_caller),
        bytes_to_caller: Some(to_caller),
        age_ms: Some(circuit.age.as_millis() as u64),
        ..EventDetails::default()
    }
}

fn caller_words(caller: &DecisionCaller) -> String {
    match caller {
        DecisionCaller::Vm {
            domain, vm, port, ..
        } => format!("{}:{port}", full_name(domain, vm)),
        DecisionCaller::Program {
            uid,
            pid: Some(pid),
        } => format!("host(uid {uid}, pid {pid})"),
        DecisionCaller::Program { uid, pid: None } => format!("host(uid {uid})"),
        DecisionCaller::Published { published, .. } => format!("published({published})"),
    }
}

fn callee_words(callee: &DecisionCallee) -> String {
    match callee {
        DecisionCallee::Vm {
            domain, vm, port, ..
        } => format!("{}:{port}", full_name(domain, vm)),
        DecisionCallee::Place { domain, vm, place } => format!("{}:{place}", full_name(domain, vm)),
        DecisionCallee::Service { service, port, .. } => format!("service({service}):{port}"),
        DecisionCallee::Listener { listener } => format!("host:{listener}"),
        DecisionCallee::Address {
            name: Some(name),
            port,
            ..
        } => format!("{name}:{port}"),
        DecisionCallee::Address {
            address: Some(address),
            port,
            ..
        } => format!("{address}:{port}"),
        DecisionCallee::Address { port, .. } => format!("(nowhere):{port}"),
        DecisionCallee::UnknownCid { cid, port } => format!("(CID {cid}):{port}"),
    }
}

/// By what a caller is asked about, as in rules. Programs of one user are one.
fn caller_asked(caller: &DecisionCaller) -> String {
    match caller {
        DecisionCaller::Vm { domain, vm, .. } => full_name(domain, vm),
        DecisionCaller::Program { uid, .. } => format!("user:{uid}"),
        DecisionCaller::Published { published, .. } => format!("published:{published}"),
    }
}

/// By what a callee is asked about, as in rules, and the port.
fn callee_asked(callee: &DecisionCallee) -> (String, u32) {
    match callee {
        DecisionCallee::Vm {
            domain, vm, port, ..
        } => (full_name(domain, vm), *port),
        DecisionCallee::Place { domain, vm, .. } => (full_name(domain, vm), wire::agent::PORT),
        DecisionCallee::Service {
            domain,
            service,
            port,
        } => (format!("service:{}", full_name(domain, service)), *port),
        DecisionCallee::Listener { listener } => ("host".to_owned(), *listener),
        DecisionCallee::Address {
            name: Some(name),
            port,
            ..
        } => (format!("name:{name}"), u32::from(*port)),
        DecisionCallee::Address { address, port, .. } => {
            let address = address.map(|address| address.to_string());
            (
                format!("address:{}", address.unwrap_or_default()),
                u32::from(*port),
            )
        }
        DecisionCallee::UnknownCid { cid, port } => (format!("cid:{cid}"), *port),
    }
}

/// An end of a circuit, as it is shown.
pub(crate) fn circuit_end(endpoint: Endpoint) -> CircuitEnd {
    match endpoint {
        Endpoint::Vm { domain, name, port } => CircuitEnd::Vm {
            vm: full_name(&domain, &name),
            port,
        },
        Endpoint::Program { credentials, .. } => CircuitEnd::Program {
            uid: credentials.uid,
            pid: credentials.pid,
        },
        Endpoint::Published { name } => CircuitEnd::Published { name },
        Endpoint::Service { name, port } => CircuitEnd::Service {
            service: name,
            port,
        },
        Endpoint::Listener { port } => CircuitEnd::Host { port },
        Endpoint::Gone => CircuitEnd::Gone,
    }
}

#[cfg(test)]
mod tests {
    use device::Credentials;

    use super::*;

    #[test]
    fn refusals_of_one_user_are_not_those_of_another() {
        let events = Events::default();
        let notes = CallNotes::new(Audit::start(None).unwrap().0, events.clone());
        let program = |uid, pid| DecisionCaller::Program { uid, pid };
        let published = DecisionCaller::Published {
            published: "web".to_owned(),
            peer: Some("192.0.2.1:4000".to_owned()),
        };
        let callers = [
            program(1000, Some(7)),
            program(1001, Some(8)),
            program(1000, Some(9)),
            program(1000, None),
            published,
        ];
        for from in callers {
            let record = AuditRecord {
                decision: AuditDecision::Denied,
                from,
                to: DecisionCallee::Listener { listener: 80 },
                redirected_to: None,
                rule: None,
                reason: None,
            };
            notes.note(record, None);
        }
        let known = |from| {
            let call = Call {
                from,
                to: Some("host"),
                port: 80,
            };
            let mut known: Vec<_> = events
                .refusals(call)
                .into_iter()
                .map(|one| (one.from, one.count))
                .collect();
            known.sort();
            known
        };
        let of_1000 = ("host(uid 1000)".to_owned(), 3);
        let of_1001 = ("host(uid 1001, pid 8)".to_owned(), 1);
        let published = ("published(web)".to_owned(), 1);
        assert_eq!(known(Some("user:1000")), std::slice::from_ref(&of_1000));
        assert_eq!(known(Some("user:1001")), std::slice::from_ref(&of_1001));
        assert!(known(Some("user:100")).is_empty());
        let all = [of_1000, of_1001, published];
        assert_eq!(known(Some("host")), all);
        assert_eq!(known(None), all);
    }

    #[test]
    fn a_destination_that_was_reached_again_is_no_failure_any_more() {
        let events = Events::default();
        let notes = CallNotes::new(Audit::start(None).unwrap().0, events.clone());
        let record = |decision| AuditRecord {
            decision,
            from: DecisionCaller::Vm {
                domain: "default".to_owned(),
                vm: "ci".to_owned(),
                cid: 3,
                port: 1,
            },
            to: DecisionCallee::Address {
                name: Some("deb.debian.org".to_owned()),
                address: None,
                port: 443,
            },
            redirected_to: None,
            rule: None,
            reason: Some("no answer in time".into()),
        };
        let call = Call {
            from: Some("ci"),
            to: Some("name:deb.debian.org"),
            port: 443,
        };
        notes.note_egress(record(AuditDecision::Failed));
        assert!(events.last_failure(call).is_some());
        notes.note_egress(record(AuditDecision::Allowed));
        assert_eq!(events.last_failure(call), None);
    }

    #[test]
    fn own_calls_are_told_of_only_if_they_are_refused() {
        let events = Events::default();
        let notes = CallNotes::new(Audit::start(None).unwrap().0, events.clone());
        let own = std::process::id();
        let call = |pid, decision| AuditRecord {
            decision,
            from: DecisionCaller::Program {
                uid: 0,
                pid: Some(pid),
            },
            to: DecisionCallee::Listener { listener: 1007 },
            redirected_to: None,
            rule: None,
            reason: None,
        };
        let told = |pid, decision| {
            let before = events.counts().0;
            notes.note(call(pid, decision), None);
            events.counts().0 - before
        };
        assert_eq!(told(own, AuditDecision::Allowed), 0);
        assert_eq!(told(own, AuditDecision::Denied), 1);
        assert_eq!(told(own + 1, AuditDecision::Allowed), 1);
    }

    #[test]
    fn of_one_caller_so_much_is_told_each_second_and_others_are_told_of_all_the_same() {
        let vm = |name: &str| Endpoint::Vm {
            domain: "default".to_owned(),
            name: name.to_owned(),
            port: 1024,
        };
        let program = |uid, pid| Endpoint::Program {
            credentials: Credentials { uid, pid },
            ticket: None,
        };
        let published = |name: &str| Endpoint::Published {
            name: name.to_owned(),
        };
        let allowances = allowances();
        let now = Duration::from_secs(1);
        let most = RECORDS_PER_SECOND as usize;
        let admits = |caller: &Endpoint, now| allowances.take(Source::of(caller), now);
        let told = |caller: &Endpoint, now| (0..3 * most).filter(|_| admits(caller, now)).count();
        for (one, same, other) in [
            (vm("web"), vm("web"), vm("db")),
            (program(1000, 7), program(1000, 8), program(1001, 9)),
            (published("web"), published("web"), published("db")),
        ] {
            assert_eq!(told(&one, now), most);
            assert!(!admits(&same, now));
            assert!(admits(&other, now));
        }
        let later = now + Duration::from_secs(1);
        assert_eq!(told(&vm("web"), later), most);
    }
}
