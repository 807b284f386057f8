//! Users of the host whose programs call guests.

use std::collections::HashSet;

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
            self.forget_programs();
        }
        if self.programs.len() >= MAX_PROGRAMS {
            return None;
        }
        let callers = self.policy.callers(&Caller::Program { uid, gids: &gids });
        let index = self.programs.insert(Program { uid, gids, callers });
        Some(ProgramId(index as u32))
    }

    /// Forgets users of whom no circuit is left.
    fn forget_programs(&mut self) {
        let circuits = self.circuits.iter();
        let of_circuits: HashSet<usize> = circuits
            .filter_map(|(_, circuit)| match circuit.call.host {
                Some(HostCaller::Program(id)) => Some(id.0 as usize),
                Some(HostCaller::Published) | None => None,
            })
            .collect();
        self.programs
            .retain(|index, _| of_circuits.contains(&index));
    }
}
