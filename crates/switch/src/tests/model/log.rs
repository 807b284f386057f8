//! What the switch was told and what it answered, so that the same can be asked again.

use std::sync::Arc;

use crate::{Action, Address, Event, Limits, LineId, Policy, Sent, Switch, Time, Transmit};

#[derive(Debug, Clone)]
pub(crate) enum Input {
    Add(String, u32, Limits),
    Policy(Arc<Policy>),
    Handle(Time, Event),
    Next(Time, LineId),
    Sent(Time, Sent),
    Remove(Time, LineId),
    Rest(Time, LineId),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Output {
    Done,
    Next(Option<Transmit>),
    Rest(Option<Time>),
}

/// Nothing is kept unless a test asks for it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Log {
    pub(crate) kept: Option<Vec<(Input, Output, Vec<Action>)>>,
    /// What is said about this generation of circuits is printed, or about all for 4294967295:
    /// `RINGDOWN_SIM_TRACE=<generation>`.
    pub(crate) traced: Option<u32>,
}

impl Log {
    pub(crate) fn record(&mut self, input: Input, output: Output, actions: &[Action]) {
        if self.traced.is_some() {
            self.trace(&format!("{input:?} -> {output:?} {actions:?}"));
        }
        if let Some(kept) = &mut self.kept {
            kept.push((input, output, actions.to_vec()));
        }
    }

    /// Prints a line if it is about the traced circuit.
    pub(crate) fn trace(&self, line: &str) {
        let traced = self.traced.is_some_and(|generation| {
            generation == u32::MAX || line.contains(&format!("generation: {generation} "))
        });
        if traced {
            eprintln!("{line}");
        }
    }

    /// Asks another switch the same, and compares every answer.
    pub(crate) fn replay(&self) -> usize {
        let mut switch = Switch::new(Limits::default());
        let kept = self.kept.as_ref().expect("the log was kept");
        for (input, output, expected) in kept {
            let mut actions = Vec::new();
            let mut answer = Output::Done;
            match input.clone() {
                Input::Add(name, cid, limits) => {
                    switch
                        .add_line_at(Address::new(&name, cid), limits)
                        .expect("it could be added before");
                }
                Input::Policy(policy) => switch.set_policy(policy),
                Input::Handle(now, event) => switch.handle(now, event, &mut actions),
                Input::Next(now, line) => {
                    answer = Output::Next(switch.next_for(now, line, &mut actions));
                }
                Input::Rest(now, line) => {
                    answer = Output::Rest(switch.rests_until(now, line));
                }
                Input::Sent(now, sent) => switch.transmitted(now, sent, &mut actions),
                Input::Remove(now, line) => switch.remove_line(now, line, &mut actions),
            }
            assert_eq!((&answer, &actions), (output, expected), "after {input:?}");
        }
        kept.len()
    }
}
