//! What the operator decided, with the names of everybody concerned: for whoever keeps the audit.

use switch::{Address, Reason, RuleId, ServiceEntry};

/// What became of one call.
#[derive(Debug, Clone, Copy)]
pub struct Decision<'a> {
    /// Who called.
    pub caller: DecisionCaller<'a>,
    /// The context identifier that was called.
    pub dialled_cid: u32,
    /// The port that was called.
    pub dialled_port: u32,
    /// Whom the caller meant, if there is such.
    pub dialled: Option<DecisionCallee<'a>>,
    /// Who had the call, if it came so far: by a redirection somebody else.
    pub reached: Option<DecisionCallee<'a>>,
    /// The rule that decided, and what a person finds it by.
    pub rule: Option<(RuleId, &'a str)>,
    /// Why it was refused or came to nothing, if it did.
    pub result: Result<(), Reason>,
}

/// Who called.
#[derive(Debug, Clone, Copy)]
pub enum DecisionCaller<'a> {
    /// A guest.
    Vm {
        /// Which.
        vm: &'a Address,
        /// From which port.
        port: u32,
    },
    /// A program of the host.
    Program(Credentials),
    /// Somebody who has come in by a published port.
    Published {
        /// Its name.
        name: &'a str,
    },
    /// A caller that is gone already.
    Unknown,
}

/// Who is called.
#[derive(Debug, Clone, Copy)]
pub enum DecisionCallee<'a> {
    /// A guest.
    Vm {
        /// Which.
        vm: &'a Address,
        /// At which port.
        port: u32,
    },
    /// A service of the host.
    Service(&'a ServiceEntry),
    /// A socket that a program of the host has made for the caller.
    Listener {
        /// The port that it stands for.
        port: u32,
    },
}

/// Whose program it is that calls, as the kernel says (unix(7), `SO_PEERCRED`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Credentials {
    /// The user.
    pub uid: u32,
    /// The user's primary group.
    pub gid: u32,
    /// The process.
    pub pid: i32,
}

/// Takes note of decisions. It must not block.
pub type DecisionSink = Box<dyn FnMut(&Decision<'_>) + Send>;
