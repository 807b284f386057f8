//! Agents that said nothing to their last caller, not even their hello. Their guests' kernels take calls all the same.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, SystemTime};

use api::{EventDetails, EventKind, Unanswered};
use device::Endpoint;
use vsock::Side;
use windows::switchboard::{CircuitList, ListedCircuit};
use wire::agent::PORT;

use super::log::rfc_3339;

/// For so long a caller has waited at least to show that an agent does not answer: the daemon gives it as long for its hello.
const SILENCE: Duration = Duration::from_secs(5);

/// The most agents of which it is known.
const MAX_AGENTS: usize = 4096;

/// By the full names of VMs, when the last caller went, and how long it had waited.
#[derive(Debug, Default)]
pub(super) struct SilentAgents(BTreeMap<String, (SystemTime, Duration)>);

impl SilentAgents {
    /// Takes note of an event. A circuit ends some eight seconds after its caller has gone where the guest has read nothing of it.
    pub(super) fn note(&mut self, kind: EventKind, details: &EventDetails, now: SystemTime) {
        if let (EventKind::VmReady | EventKind::VmRemoved, Some(vm)) = (kind, &details.vm) {
            self.0.remove(vm);
        }
        let reached = details.reached.as_ref().or(details.to.as_ref());
        let reached = reached.and_then(|reached| reached.rsplit_once(':'));
        let Some((vm, port)) = reached.filter(|_| kind == EventKind::CircuitEnded) else {
            return;
        };
        if port.parse() != Ok(PORT) {
            return;
        }
        let age = Duration::from_millis(details.age_ms.unwrap_or_default());
        match details.bytes_to_caller {
            Some(0) if age >= SILENCE && self.0.len() < MAX_AGENTS => {
                self.0.insert(vm.to_owned(), (now, age));
            }
            // Giving up at once shows nothing.
            Some(0) | None => {}
            Some(_) => {
                self.0.remove(vm);
            }
        }
    }

    /// How the last caller of this VM's agent waited in vain, if it did.
    pub(super) fn of(&self, vm: &str) -> Option<Unanswered> {
        let (time, age) = self.0.get(vm)?;
        Some(Unanswered {
            time: rfc_3339(*time),
            seconds: age.as_secs(),
            waits: false,
        })
    }
}

/// How long callers of agents have waited in vain up to now, by the full names of VMs.
pub(crate) fn waiting_callers(listed: CircuitList) -> HashMap<String, Unanswered> {
    let now = rfc_3339(SystemTime::now());
    let mut waiting = HashMap::<String, Unanswered>::new();
    for ListedCircuit { circuit, .. } in listed.circuits {
        let Endpoint::Vm { domain, name, port } = &circuit.callee else {
            continue;
        };
        let is_silent = circuit.bytes[Side::Callee as usize] == 0 && circuit.age >= SILENCE;
        if *port != PORT || !is_silent {
            continue;
        }
        let seconds = circuit.age.as_secs();
        let known = waiting.entry(policy::full_name(domain, name));
        let known = known.or_insert_with(|| Unanswered {
            time: now.clone(),
            seconds,
            waits: true,
        });
        known.seconds = known.seconds.max(seconds);
    }
    waiting
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_that_left_its_last_caller_without_an_answer_is_known() {
        let event = |kind, to: &str, bytes, seconds: u64| {
            let details = EventDetails {
                vm: (kind != EventKind::CircuitEnded).then(|| "box".to_owned()),
                from: Some("host(uid 0, pid 7)".to_owned()),
                to: Some(to.to_owned()),
                bytes_to_caller: Some(bytes),
                age_ms: Some(seconds * 1000),
                ..EventDetails::default()
            };
            (kind, details)
        };
        use EventKind::{CircuitEnded, VmReady, VmRemoved};
        let agent = &format!("box:{PORT}");
        let silent = event(CircuitEnded, agent, 0, 30);
        let found = |events: &[&(EventKind, EventDetails)]| {
            let mut agents = SilentAgents::default();
            for (kind, details) in events {
                agents.note(*kind, details, SystemTime::UNIX_EPOCH);
            }
            agents.of("box").map(|unanswered| unanswered.to_string())
        };
        let told = found(&[&silent]).unwrap();
        let words = "its agent did not answer its last caller in 30 s (1970-01-01T00:00:00";
        assert!(told.starts_with(words), "{told}");
        for past in [
            event(CircuitEnded, agent, 40, 1),
            event(VmReady, "", 0, 0),
            event(VmRemoved, "", 0, 0),
        ] {
            assert!(found(&[&silent, &past]).is_none());
            assert!(found(&[&past, &silent]).is_some());
        }
        for nothing in [
            event(CircuitEnded, agent, 0, 1),
            event(CircuitEnded, "box:80", 0, 30),
            event(CircuitEnded, "box:80", 40, 30),
        ] {
            assert!(found(&[&nothing]).is_none());
            assert!(found(&[&silent, &nothing]).is_some());
        }
    }
}
