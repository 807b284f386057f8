//! Events and actions of the switch, so that the same can be run again.

use std::sync::Arc;

use policy::{Address, LineId, Policy, ServiceEntry, Time};

use crate::{Action, Event, Limits, Sent, Switch, Transmit};

#[derive(Debug, Clone)]
pub(crate) enum Input {
    Add(Address, Limits),
    Policy(Arc<Policy>),
    Services(Vec<ServiceEntry>),
    Enforce(Time),
    Resolve(LineId, String),
    Program(u32, Vec<u32>),
    Handle(Time, Event),
    Next(Time, LineId),
    Sent(Time, Sent),
    Remove(Time, LineId),
    Throttle(Time, LineId),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Output {
    Done,
    Next(Option<Transmit>),
    Throttle(Option<Time>),
    Ended(usize),
    Resolved(Option<u32>),
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
    pub(crate) fn replay(&self, cuts_at_once: usize) -> usize {
        let mut switch = Switch::new(Limits::default());
        switch.cuts_at_once = cuts_at_once;
        let kept = self.kept.as_ref().expect("the log was kept");
        for (input, output, expected) in kept {
            let mut actions = Vec::new();
            let mut answer = Output::Done;
            match input.clone() {
                Input::Add(address, limits) => {
                    switch
                        .add_line_at(address, limits)
                        .expect("it could be added before");
                }
                Input::Services(services) => switch.set_services(services),
                Input::Enforce(now) => {
                    answer = Output::Ended(switch.enforce_policy(now, &mut actions));
                }
                Input::Resolve(line, name) => {
                    answer = Output::Resolved(switch.resolve(line, &name));
                }
                Input::Program(uid, gids) => {
                    let program = switch.program(uid, &gids);
                    answer = Output::Resolved(program.map(|program| program.0));
                }
                Input::Policy(policy) => switch.set_policy(policy),
                Input::Handle(now, event) => switch.handle(now, event, &mut actions),
                Input::Next(now, line) => {
                    answer = Output::Next(switch.next_for(now, line, &mut actions));
                }
                Input::Throttle(now, line) => {
                    answer = Output::Throttle(switch.throttled_until(now, line));
                }
                Input::Sent(now, sent) => switch.transmitted(now, sent, &mut actions),
                Input::Remove(now, line) => switch.remove_line(now, line, &mut actions),
            }
            assert_eq!((&answer, &actions), (output, expected), "after {input:?}");
        }
        kept.len()
    }
}
