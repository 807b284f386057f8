//! Why a dial was refused or a circuit cut short.

use policy::RuleLimit;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// A reason, in words that a person can act upon.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Error, Serialize, Deserialize,
)]
pub enum Reason {
    #[error("no listener on the host for this port")]
    NoListener,
    #[error("the host's listener has another socket type (stream and seqpacket do not mix)")]
    WrongType,
    #[error("the host's listener did not accept in time: its backlog is full")]
    BacklogFull,
    #[error("the host's side of the call failed")]
    HostFailed,
    #[error("no VM has this context identifier")]
    UnknownCid,
    #[error("no rule allows it")]
    Denied,
    #[error(
        "egress refused the destination that it was asked for: `ringdown why VM name:NAME PORT` says why"
    )]
    EgressDenied,
    #[error(
        "this port of a VM is for its host alone: no rule or redirection leads there, and it cannot be published"
    )]
    OwnPort,
    #[error("{}", wire::agent::AGENT_AWAY)]
    AgentAway,
    #[error(
        "the guest's agent is of before this release and cannot tell its host from others on this line: install the agent of this release in the guest"
    )]
    AgentTooOld,
    #[error("the rule that allows it has as many circuits as its limit allows")]
    RuleCircuits,
    #[error("calls are made more often than the limit of the rule that allows them")]
    RuleRate,
    #[error("the service has as many connections as its limit allows")]
    ServiceLimit,
    #[error(
        "this VM has as many connections to the service, or calls that wait for services, as one VM may have"
    )]
    ServiceShare,
    #[error("the service's address cannot be reached")]
    Unreachable,
    #[error("the service did not answer in time")]
    ServiceTimedOut,
    #[error("the VM is not running, or its guest has not started the driver of its line")]
    NotRunning,
    #[error("the guest does not offer this socket type")]
    Unsupported,
    #[error("the guest refused: nothing listens on that port")]
    GuestRefused,
    #[error(
        "a serial port carries calls to the guest's agent alone: reach a program of the guest with `ringdown forward`"
    )]
    AgentOnly,
    #[error("the guest did not answer in time")]
    TimedOut,
    #[error("the VM has as many circuits as its limit allows")]
    CircuitLimit,
    #[error("the VM has as many unanswered dials as its limit allows")]
    HalfOpenLimit,
    #[error(
        "this caller, or all other VMs together, have as many circuits to the called VM as its limit leaves them"
    )]
    CircuitShare,
    #[error(
        "this caller, or all other VMs together, have as many unanswered dials to the called VM as its limit leaves them"
    )]
    HalfOpenShare,
    #[error("calls are made more often than the VM's limit allows")]
    ConnectRate,
    #[error("an earlier circuit between the same ports is not over yet")]
    PortsInUse,
    #[error("reset by the peer")]
    PeerReset,
    #[error("the VM at the other end went away")]
    LineDown,
    #[error("a packet broke the protocol")]
    ProtocolViolation,
    #[error("a packet broke the rules of credit")]
    CreditViolation,
    #[error("the guest's memory could not be read or written")]
    MemoryFault,
    #[error("the message is larger than the receiver's buffer")]
    MessageTooLong,
    #[error("too many small messages wait for a receiver that does not take them")]
    TooManyMessages,
    #[error(
        "calls on a socket of this program, service or VMM take too long, again and again: wait on each with one poll or epoll, and call again later"
    )]
    SlowPeer,
    #[error("ended by the operator")]
    Operator,
    #[error("the daemon ended in between, and the circuit could not go on with the next one")]
    DaemonEnded,
}

impl From<RuleLimit> for Reason {
    fn from(limit: RuleLimit) -> Reason {
        match limit {
            RuleLimit::Circuits => Reason::RuleCircuits,
            RuleLimit::ConnectsPerSecond => Reason::RuleRate,
        }
    }
}

impl Reason {
    /// Every reason, in the order of [`Reason::index`].
    pub const ALL: [Reason; 37] = [
        Reason::NoListener,
        Reason::WrongType,
        Reason::BacklogFull,
        Reason::HostFailed,
        Reason::UnknownCid,
        Reason::Denied,
        Reason::EgressDenied,
        Reason::OwnPort,
        Reason::AgentAway,
        Reason::AgentTooOld,
        Reason::RuleCircuits,
        Reason::RuleRate,
        Reason::ServiceLimit,
        Reason::ServiceShare,
        Reason::Unreachable,
        Reason::ServiceTimedOut,
        Reason::NotRunning,
        Reason::Unsupported,
        Reason::GuestRefused,
        Reason::AgentOnly,
        Reason::TimedOut,
        Reason::CircuitLimit,
        Reason::HalfOpenLimit,
        Reason::CircuitShare,
        Reason::HalfOpenShare,
        Reason::ConnectRate,
        Reason::PortsInUse,
        Reason::PeerReset,
        Reason::LineDown,
        Reason::ProtocolViolation,
        Reason::CreditViolation,
        Reason::MemoryFault,
        Reason::MessageTooLong,
        Reason::TooManyMessages,
        Reason::SlowPeer,
        Reason::Operator,
        Reason::DaemonEnded,
    ];

    /// The name of this reason's counter.
    pub fn name(self) -> &'static str {
        match self {
            Reason::NoListener => "ended_no_listener",
            Reason::WrongType => "ended_wrong_type",
            Reason::BacklogFull => "ended_backlog_full",
            Reason::HostFailed => "ended_host_failed",
            Reason::UnknownCid => "ended_unknown_cid",
            Reason::Denied => "ended_denied",
            Reason::EgressDenied => "ended_egress_denied",
            Reason::OwnPort => "ended_own_port",
            Reason::AgentAway => "ended_agent_away",
            Reason::AgentTooOld => "ended_agent_too_old",
            Reason::RuleCircuits => "ended_rule_circuits",
            Reason::RuleRate => "ended_rule_rate",
            Reason::ServiceLimit => "ended_service_limit",
            Reason::ServiceShare => "ended_service_share",
            Reason::Unreachable => "ended_unreachable",
            Reason::ServiceTimedOut => "ended_service_timed_out",
            Reason::NotRunning => "ended_not_running",
            Reason::Unsupported => "ended_unsupported",
            Reason::GuestRefused => "ended_guest_refused",
            Reason::AgentOnly => "ended_agent_only",
            Reason::TimedOut => "ended_timed_out",
            Reason::CircuitLimit => "ended_circuit_limit",
            Reason::HalfOpenLimit => "ended_half_open_limit",
            Reason::CircuitShare => "ended_circuit_share",
            Reason::HalfOpenShare => "ended_half_open_share",
            Reason::ConnectRate => "ended_connect_rate",
            Reason::PortsInUse => "ended_ports_in_use",
            Reason::PeerReset => "ended_peer_reset",
            Reason::LineDown => "ended_line_down",
            Reason::ProtocolViolation => "ended_protocol_violation",
            Reason::CreditViolation => "ended_credit_violation",
            Reason::MemoryFault => "ended_memory_fault",
            Reason::MessageTooLong => "ended_message_too_long",
            Reason::TooManyMessages => "ended_too_many_messages",
            Reason::SlowPeer => "ended_slow_peer",
            Reason::Operator => "ended_operator",
            Reason::DaemonEnded => "ended_daemon_ended",
        }
    }

    /// Whether a limit of the policy, of a VM or of a service stands in the way.
    pub fn is_limit(self) -> bool {
        matches!(
            self,
            Reason::RuleCircuits
                | Reason::RuleRate
                | Reason::CircuitLimit
                | Reason::HalfOpenLimit
                | Reason::CircuitShare
                | Reason::HalfOpenShare
                | Reason::ConnectRate
                | Reason::ServiceLimit
                | Reason::ServiceShare
        )
    }

    /// A small number, for tables of counters.
    pub fn index(self) -> usize {
        self as usize
    }
}
