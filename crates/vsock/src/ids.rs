//! What names circuits and the other things here.

use serde::{Deserialize, Serialize};

/// The number of a circuit. Numbers are used again; the generation distinguishes one use from the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct CircuitId {
    /// Position in a table, small and dense.
    pub index: u32,
    /// Which use of that position.
    pub generation: u32,
}

/// A side of a circuit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Side {
    /// The side that dialled.
    Caller,
    /// The side that was dialled.
    Callee,
}

impl Side {
    /// The other side.
    pub fn other(self) -> Side {
        match self {
            Side::Caller => Side::Callee,
            Side::Callee => Side::Caller,
        }
    }

    /// 0 for the caller, 1 for the callee.
    pub fn index(self) -> usize {
        self as usize
    }
}

/// The number of a user of the host with certain groups.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProgramId(pub u32);
