//! What the daemon says, as it is needed here: names made harmless, counters picked out.

use std::time::{Duration, Instant};

use api::{CircuitEnd, CircuitInfo, CircuitsInfo, VmState, VmStatus};

use super::rates::Counted;
use crate::client::Client;
use crate::failure::Failure;
use crate::guest::printable;

/// What the daemon said at one time.
#[derive(Debug, Clone, Default)]
pub(super) struct Sample {
    /// When it said which VMs there are, since some start.
    pub(super) vms_at: Duration,
    pub(super) vms: Vec<Vm>,
    /// When it said which circuits there are.
    pub(super) circuits_at: Duration,
    pub(super) circuits: Vec<Circuit>,
    /// How many more there are.
    pub(super) more: usize,
}

/// A VM.
#[derive(Debug, Clone)]
pub(super) struct Vm {
    pub(super) name: String,
    pub(super) state: VmState,
    pub(super) state_in_words: String,
    pub(super) line: String,
    pub(super) cid: u32,
    pub(super) circuits: u32,
    /// What its guest has sent, and what it was sent, in bytes.
    pub(super) bytes: [u64; 2],
    pub(super) packets: [u64; 2],
    /// What waits for receivers, in bytes.
    pub(super) queued: u64,
    pub(super) granted: u64,
    pub(super) limit_of_circuits: Option<u64>,
    pub(super) limit_of_queued: Option<u64>,
    /// Calls refused and circuits cut short, by the reason, the most frequent first.
    pub(super) ended: Vec<(String, u64)>,
    /// What its agent said of itself and its guest.
    pub(super) agent: Option<[String; 2]>,
    pub(super) aliases: Vec<String>,
    pub(super) groups: Vec<String>,
}

impl Vm {
    fn of(status: &VmStatus) -> Vm {
        let counter = |name: &str| status.counters.get(name).copied().unwrap_or_default();
        let usage = |name: &str| status.usage.get(name).copied().unwrap_or_default();
        let all_clean = |names: &[String]| names.iter().map(|name| printable(name)).collect();
        let reason = |(name, count): (&String, &u64)| {
            let reason = name.strip_prefix("ended_")?;
            (*count > 0).then(|| (printable(&reason.replace('_', " ")), *count))
        };
        let mut ended: Vec<_> = status.counters.iter().filter_map(reason).collect();
        ended.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
        Vm {
            name: printable(&status.full_name()),
            state: status.state,
            state_in_words: printable(&status.state_in_words()),
            line: status.kind.to_string(),
            cid: status.cid,
            circuits: status.circuits,
            bytes: [counter("bytes_from_guest"), counter("bytes_to_guest")],
            packets: [counter("packets_from_guest"), counter("packets_to_guest")],
            queued: usage("buffered_bytes"),
            granted: usage("granted_bytes"),
            limit_of_circuits: status.limits.get("circuits").copied(),
            limit_of_queued: status.limits.get("buffered_bytes").copied(),
            ended,
            agent: status
                .agent
                .as_ref()
                .map(|agent| [printable(&agent.software), printable(&agent.hostname)]),
            aliases: all_clean(&status.aliases),
            groups: all_clean(&status.groups),
        }
    }

    pub(super) fn counted(&self) -> Counted<String> {
        Counted {
            key: self.name.clone(),
            bytes: self.bytes,
            age: None,
        }
    }
}

/// A circuit.
#[derive(Debug, Clone)]
pub(super) struct Circuit {
    pub(super) id: String,
    pub(super) from: End,
    pub(super) to: End,
    /// The real callee, if not the one meant.
    pub(super) reached: Option<End>,
    pub(super) state: String,
    pub(super) kind: String,
    pub(super) seqpacket: bool,
    pub(super) rule: Option<String>,
    pub(super) age: Option<Duration>,
    /// What the caller has sent, and what it has received, in bytes.
    pub(super) bytes: [u64; 2],
    pub(super) queued: [u64; 2],
    pub(super) credit: [u64; 2],
}

/// An end of a circuit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct End {
    /// In few words, for a column.
    pub(super) short: String,
    /// In all.
    pub(super) long: String,
    /// The VM, if it is one.
    pub(super) vm: Option<String>,
}

impl End {
    fn of(end: &CircuitEnd) -> End {
        let long = printable(&end.to_string());
        let short = match end {
            CircuitEnd::Program { pid, .. } => format!("host pid {pid}"),
            CircuitEnd::Published { name } => printable(name),
            CircuitEnd::Service { service, .. } => printable(service),
            CircuitEnd::Vm { .. } | CircuitEnd::Host { .. } | CircuitEnd::Gone => long.clone(),
        };
        let vm = match end {
            CircuitEnd::Vm { vm, .. } => Some(printable(vm)),
            _ => None,
        };
        End { short, long, vm }
    }
}

impl Circuit {
    fn of(info: &CircuitInfo) -> Circuit {
        Circuit {
            id: printable(&info.id),
            from: End::of(&info.from),
            to: End::of(&info.to),
            reached: info.reached.as_ref().map(End::of),
            state: info.state.to_string(),
            kind: info.kind.to_string(),
            seqpacket: info.seqpacket,
            rule: info.rule.as_deref().map(printable),
            age: info.age_ms.map(Duration::from_millis),
            bytes: [info.bytes_from_caller, info.bytes_to_caller],
            queued: [info.queued_from_caller, info.queued_to_caller],
            credit: [info.credit_from_caller, info.credit_to_caller],
        }
    }

    /// Whether a VM is one of its ends, or was meant to be.
    pub(super) fn is_of(&self, vm: &str) -> bool {
        let ends = [Some(&self.from), Some(&self.to), self.reached.as_ref()];
        ends.into_iter()
            .flatten()
            .any(|end| end.vm.as_deref() == Some(vm))
    }

    pub(super) fn counted(&self) -> Counted<String> {
        Counted {
            key: self.id.clone(),
            bytes: self.bytes,
            age: self.age,
        }
    }
}

impl Sample {
    /// Asks the daemon. Times are since `start`.
    ///
    /// # Errors
    /// The daemon is not there, or does not answer.
    pub(super) fn take(client: &Client, start: Instant) -> Result<Sample, Failure> {
        let list = client.list()?;
        let vms_at = start.elapsed();
        let circuits = client.circuits(None, None)?;
        Ok(Sample::of(&list.vms, vms_at, &circuits, start.elapsed()))
    }

    /// What was said, at the times it was said.
    pub(super) fn of(
        vms: &[VmStatus],
        vms_at: Duration,
        circuits: &CircuitsInfo,
        circuits_at: Duration,
    ) -> Sample {
        Sample {
            vms_at,
            vms: vms.iter().map(Vm::of).collect(),
            circuits_at,
            circuits: circuits.circuits.iter().map(Circuit::of).collect(),
            more: circuits.more,
        }
    }
}
