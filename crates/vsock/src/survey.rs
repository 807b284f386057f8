//! What circuits have carried and how long calls took, added to the figures of rules and lines.

use std::ops::Range;

use policy::{LineId, RuleId, Time};

use crate::figures::RuleReport;
use crate::ids::Side;
use crate::switch::Switch;

impl Switch {
    /// The figures of every rule, in their order, before them those of what holds without one. What circuits have carried since the last
    /// [`survey`](Self::survey) is not in them.
    pub fn rule_reports(&self) -> Vec<RuleReport> {
        let of_rules: u32 = self.rules.iter().map(|used| used.circuits()).sum();
        let without_rule = RuleReport {
            label: None,
            circuits: (self.circuits.len() as u32).saturating_sub(of_rules),
            counters: self.figures.without_rule.clone(),
        };
        let figures = self.figures.rules.iter().zip(&self.rules);
        let rules = self.policy.rules().iter().zip(figures);
        let rules = rules.map(|(rule, (counters, used))| RuleReport {
            label: Some(rule.label.clone()),
            circuits: used.circuits(),
            counters: counters.clone(),
        });
        [without_rule].into_iter().chain(rules).collect()
    }

    /// Adds what the circuits at these places have carried to the figures of their rules. Returns the payload in our keeping of each: the line
    /// whose guest sent it, or to which programs of the host sent it, and the bytes.
    pub fn survey(&mut self, places: Range<usize>) -> Vec<(LineId, u64)> {
        let mut kept = Vec::new();
        for place in places {
            let Some(circuit) = self.circuits.get(place) else {
                continue;
            };
            for side in [Side::Caller, Side::Callee] {
                let bytes = circuit.flows[side.index()].kept();
                let (from, to) = (circuit.end(side), circuit.end(side.other()));
                let end = if from.is_host() { to } else { from };
                if let (Some(line), true) = (end.line(), bytes > 0) {
                    kept.push((line, u64::from(bytes)));
                }
            }
            self.account_for(place);
        }
        kept
    }

    /// What circuits have carried so far counts for the rules that have allowed them so far.
    pub(crate) fn hand_over_figures(&mut self, places: &[Option<RuleId>], rules: usize) {
        let circuits: Vec<usize> = self.circuits.iter().map(|(index, _)| index).collect();
        for index in circuits {
            self.account_for(index);
        }
        self.figures.hand_over(places, rules);
    }

    /// Adds what a circuit has carried since this was last done to its rule's figures.
    pub(crate) fn account_for(&mut self, index: usize) {
        let circuit = &mut self.circuits[index];
        let carried = circuit.unaccounted();
        circuit.accounted = circuit.passed;
        let rule = circuit.call.rule;
        for (bytes, more) in self.figures.of(rule).bytes.iter_mut().zip(carried) {
            *bytes += more;
        }
    }

    /// Counts how long a call took that has been answered.
    pub(crate) fn count_set_up(&mut self, now: Time, index: usize) {
        let circuit = &self.circuits[index];
        let time = now.saturating_sub(circuit.opened_at);
        let [caller, callee] = &circuit.ends;
        if let Some(line) = callee.owner().or(caller.owner()) {
            if let Some(line) = self.line_mut(line) {
                line.counters.set_up.count(time);
            }
        }
    }
}
