//! How much credit a guest has towards a program on the host.
//!
//! A guest that has used its credit up waits until it gets more, and a wake-up later goes on. The more it may have
//! ahead of the program, the less often that happens; so the credit of a flow whose program keeps up is doubled, as TCP does
//! with its receive window. What a program does not take at once has to be stored, which costs a second copy: once that is
//! more than three quarters of the credit, its flow gets the usual credit again, and has to show for longer that things have changed. Less
//! must not count: what has gathered while the worker napped is more than a socket takes at once, however prompt the program.
//!
//! Only streams: a message whose beginning fitted into the credit must not find that its end no longer does.

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
    pub(crate) fn prompt(&mut self) -> bool {
        self.prompt = self.prompt.saturating_add(1);
        let enough = self.prompt >= self.needed;
        if enough {
            self.prompt = 0;
        }
        enough
    }

    /// The program has fallen behind.
    pub(crate) fn setback(&mut self) {
        self.prompt = 0;
        self.needed = (self.needed.saturating_mul(SETBACK)).min(*PROMPT_UPDATES.end());
    }
}
