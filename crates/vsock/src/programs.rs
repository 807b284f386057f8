//! Users of the host whose programs call guests.

use policy::{Caller, Policy, RuleSet};
use slab::Slab;

use crate::ProgramId;
use crate::event::HostCaller;

/// Users of the host, each with certain groups, that the switch distinguishes at once.
const MAX_PROGRAMS: usize = 4096;

/// A user of the host with groups, and the rules that can match when such a program calls.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) uid: u32,
    pub(crate) gids: Vec<u32>,
    pub(crate) callers: RuleSet,
    /// Circuits of its calls.
    pub(crate) circuits: u32,
}

#[derive(Debug, Default)]
pub(crate) struct Programs {
    pub(crate) known: Slab<Program>,
}

impl Programs {
    /// What [`Switch::program`](crate::Switch::program) answers.
    pub(crate) fn number(&mut self, uid: u32, gids: &[u32], policy: &Policy) -> Option<ProgramId> {
        let mut gids = gids.to_vec();
        gids.sort_unstable();
        gids.dedup();
        let is_known = |program: &Program| program.uid == uid && program.gids == gids;
        let mut programs = self.known.iter();
        if let Some((index, _)) = programs.find(|(_, program)| is_known(program)) {
            return Some(ProgramId(index as u32));
        }
        if self.known.len() >= MAX_PROGRAMS {
            // Those without circuits.
            self.known.retain(|_, program| program.circuits > 0);
        }
        if self.known.len() >= MAX_PROGRAMS {
            return None;
        }
        let callers = policy.callers(&Caller::Program { uid, gids: &gids });
        let index = self.known.insert(Program {
            uid,
            gids,
            callers,
            circuits: 0,
        });
        Some(ProgramId(index as u32))
    }

    /// A circuit of such a call has been set up.
    pub(crate) fn opened(&mut self, host: Option<HostCaller>) {
        if let Some(program) = self.of(host) {
            program.circuits += 1;
        }
    }

    /// One is forgotten.
    pub(crate) fn closed(&mut self, host: Option<HostCaller>) {
        if let Some(program) = self.of(host) {
            program.circuits = program.circuits.saturating_sub(1);
        }
    }

    fn of(&mut self, host: Option<HostCaller>) -> Option<&mut Program> {
        match host? {
            HostCaller::Program(id) => self.known.get_mut(id.0 as usize),
            HostCaller::Published(_) | HostCaller::ForPublished(_) => None,
        }
    }
}
