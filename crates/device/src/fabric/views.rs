//! Lines and rules as they stand, and the VM that a name means, for queries.

use policy::LineId;
use vsock::RuleReport;

use super::{Fabric, LineSnapshot};
use crate::frontend::Frontend;
use crate::ring::RingCounts;

impl Fabric {
    /// The identifier by which a guest can call the VM of this name; see [`Switch::resolve`].
    pub fn resolve(&mut self, vm: &str, name: &str) -> Option<u32> {
        let line = self.line_named(vm)?;
        self.switch.resolve(line, name)
    }

    /// The port of a service that a guest can call; see [`Switch::resolve_service`].
    pub fn resolve_service(&self, vm: &str, name: &str) -> Option<u32> {
        self.switch.resolve_service(self.line_named(vm)?, name)
    }

    /// The full name of the VM that a word on the host means: by its name, which may begin with a domain, by an alias, or by its CID in the default
    /// domain.
    pub fn vm_named(&self, name: &str) -> Option<String> {
        let by_cid = || self.switch.line_by_cid(name.parse().ok()?);
        let line = self.switch.line_by_name(name).or_else(by_cid)?;
        Some(self.switch.address(line)?.full_name())
    }

    /// The line of a VM, by its full name.
    pub(super) fn line_named(&self, name: &str) -> Option<LineId> {
        self.lines.iter().find_map(|(index, line)| {
            let line = line.as_ref()?;
            (line.name == name).then_some(LineId(index as u32))
        })
    }

    /// Every line, as it stands. What circuits keep, [`survey_circuits`](Self::survey_circuits) counts.
    pub fn lines(&self) -> Vec<LineSnapshot> {
        let line_of = |id: LineId| self.lines.get(id.0 as usize).and_then(Option::as_ref);
        self.switch
            .lines()
            .map(|report| LineSnapshot {
                attached: line_of(report.id).is_some_and(|line| line.attached),
                last_fault: line_of(report.id).and_then(|line| line.last_fault.text()),
                last_fault_at: line_of(report.id).and_then(|line| line.last_fault.at()),
                cut_off: line_of(report.id).is_some_and(|line| line.last_fault.is_cut_off()),
                another_waits: line_of(report.id)
                    .and_then(|line| line.frontend.as_ref())
                    .is_some_and(Frontend::another_waits),
                paused: report.circuits > 0
                    && line_of(report.id).is_some_and(|line| line.is_stopped()),
                kept_messages: line_of(report.id).map_or(0, |line| line.messages.total()),
                parked_descriptors: line_of(report.id).map_or(0, |line| line.parked),
                notified: line_of(report.id).map_or(RingCounts::default(), |line| line.notified()),
                report,
            })
            .collect()
    }

    /// The figures of every rule in force, before them those of what holds without one. What circuits have carried is in them as of the
    /// last [`survey_circuits`](Self::survey_circuits).
    pub fn rule_reports(&self) -> Vec<RuleReport> {
        self.switch.rule_reports()
    }
}
