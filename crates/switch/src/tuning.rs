//! How much credit a guest has towards a program on the host.
//!
//! A guest that has used its credit up waits until it is told of more, and a wake-up later goes on. The more it may have
//! ahead of the program, the less often that happens; so the credit of a flow whose program keeps up is doubled, as TCP does
//! with its receive window. What a program does not take at once has to be stored, which costs a second copy: once that is
//! more than three quarters of the credit, its flow gets the usual credit again, and has to show for longer that things have changed. Less
//! must not count: what has gathered while the worker napped is more than a socket takes at once, however prompt the program.
//!
//! Only streams: a message whose beginning fitted into the credit must not find that its end no longer does.

use wire::vsock::SocketType;

use crate::{Side, Switch};

/// Updates of credit with a program that keeps up that it takes to double the credit, at first and at most.
const PROMPT_UPDATES: std::ops::RangeInclusive<u16> = 1..=1024;

/// How much longer the next doubling takes after each return to the usual credit.
const SETBACK: u16 = 4;

/// What a flow to a host program has shown so far.
#[derive(Debug, Clone)]
pub(crate) struct Tuning {
    /// Such updates in a row.
    prompt: u16,
    /// How many of them it takes.
    needed: u16,
}

impl Default for Tuning {
    fn default() -> Tuning {
        Tuning {
            prompt: 0,
            needed: *PROMPT_UPDATES.start(),
        }
    }
}

impl Tuning {
    /// An update of credit is due, and the program keeps up. Returns whether to double the credit.
    fn prompt(&mut self) -> bool {
        self.prompt = self.prompt.saturating_add(1);
        let enough = self.prompt >= self.needed;
        if enough {
            self.prompt = 0;
        }
        enough
    }

    /// The program has fallen behind.
    fn setback(&mut self) {
        self.prompt = 0;
        self.needed = (self.needed.saturating_mul(SETBACK)).min(*PROMPT_UPDATES.end());
    }
}

impl Switch {
    /// Some bytes of the guest at `from` have reached its program. `update_is_due`: the guest is about to be told.
    pub(crate) fn tune(&mut self, index: usize, from: Side, update_is_due: bool) {
        let circuit = &self.circuits[index];
        let Some(line) = circuit.end(from).line() else {
            return;
        };
        if circuit.socket_type != SocketType::Stream {
            return;
        }
        let limits = *self.limits(line);
        let flow = self.circuits[index].flow_from(from);
        let tolerated = limits.grant_bytes.max(flow.window() / 4 * 3);
        let keeps_up = flow.kept() <= tolerated;
        if !keeps_up && flow.window() > limits.grant_bytes {
            flow.tuning.setback();
            flow.narrow(limits.grant_bytes);
        }
        let surplus = flow.surplus();
        if surplus > 0 {
            flow.set_grant(flow.grant() - surplus);
            if let Some(line) = self.line_mut(line) {
                line.release(surplus);
            }
            return;
        }
        let room = limits.max_host_grant_bytes.saturating_sub(flow.grant());
        let wanted = flow.grant().min(room);
        // After a setback the usual credit holds once the source has used up what it had been promised beyond that.
        let settled = flow.window() == flow.grant();
        if !update_is_due || !keeps_up || !settled || wanted == 0 || !flow.tuning.prompt() {
            return;
        }
        let Some(line) = self.line_mut(line) else {
            return;
        };
        let extra = line.reserve_more(wanted);
        self.circuits[index].flow_from(from).widen(extra);
    }
}
