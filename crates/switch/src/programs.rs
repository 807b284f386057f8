//! Users of the host whose programs call guests.

use crate::event::{HostCaller, ProgramId};
use crate::{Caller, RuleSet, Switch};

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

impl Switch {
    /// The number of a user of the host with these groups, in any order. It is good for a call that is made before the next number is asked for,
    /// and for that call's circuit. There is none when the circuits that exist are of so many others that they can no longer be told apart;
    /// then the call has to be refused.
    pub fn program(&mut self, uid: u32, gids: &[u32]) -> Option<ProgramId> {
        let mut gids = gids.to_vec();
        gids.sort_unstable();
        gids.dedup();
        let is_known = |program: &Program| program.uid == uid && program.gids == gids;
        let mut programs = self.programs.iter();
        if let Some((index, _)) = programs.find(|(_, program)| is_known(program)) {
            return Some(ProgramId(index as u32));
        }
        if self.programs.len() >= MAX_PROGRAMS {
            // Those of whom no circuit is left.
            self.programs.retain(|_, program| program.circuits > 0);
        }
        if self.programs.len() >= MAX_PROGRAMS {
            return None;
        }
        let callers = self.policy.callers(&Caller::Program { uid, gids: &gids });
        let index = self.programs.insert(Program {
            uid,
            gids,
            callers,
            circuits: 0,
        });
        Some(ProgramId(index as u32))
    }

    /// A circuit of such a call has been set up.
    pub(crate) fn program_has_opened(&mut self, host: Option<HostCaller>) {
        if let Some(program) = self.program_of(host) {
            program.circuits += 1;
        }
    }

    /// One is forgotten.
    pub(crate) fn program_has_closed(&mut self, host: Option<HostCaller>) {
        if let Some(program) = self.program_of(host) {
            program.circuits = program.circuits.saturating_sub(1);
        }
    }

    fn program_of(&mut self, host: Option<HostCaller>) -> Option<&mut Program> {
        match host? {
            HostCaller::Program(id) => self.programs.get_mut(id.0 as usize),
            HostCaller::Published | HostCaller::ForPublished => None,
        }
    }
}
