//! Why a dial was refused or a circuit cut short.

use policy::RuleLimit;
use thiserror::Error;

/// A reason, in words that a person can act upon.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Error)]
pub enum Reason {
    /// Nothing listens on the host side.
    #[error("no listener on the host for this port")]
    NoListener,
    /// The listener on the host has the other type of socket.
    #[error("the host's listener has another socket type (stream and seqpacket do not mix)")]
    WrongType,
    /// The listener on the host did not take the call in time.
    #[error("the host's listener did not accept in time: its backlog is full")]
    BacklogFull,
    /// The host side failed in another way.
    #[error("the host's side of the call failed")]
    HostFailed,
    /// No VM has this context identifier.
    #[error("no VM has this context identifier")]
    UnknownCid,
    /// A rule denies it, or none allows it.
    #[error("no rule allows it")]
    Denied,
    /// The port belongs to the VM's host, and this was no direct call of a program of the host or of the daemon.
    #[error(
        "this port of a VM is for its host alone: no rule or redirection leads there, and it cannot be published"
    )]
    OwnPort,
    /// No agent has called from the VM, so that it has given nothing by which a call to it proves that it comes from the host.
    #[error("{}", wire::agent::AGENT_AWAY)]
    AgentAway,
    /// The agent has given nothing by which a call to it proves that it comes from the host.
    #[error(
        "the guest's agent is of before this release and cannot tell its host from others on this line: install the agent of this release in the guest"
    )]
    AgentTooOld,
    /// The rule that allows it has as many circuits as it may.
    #[error("the rule that allows it has as many circuits as its limit allows")]
    RuleCircuits,
    /// Calls are made more often than the rule that allows them lets them be made.
    #[error("calls are made more often than the limit of the rule that allows them")]
    RuleRate,
    /// The service has as many connections as it may.
    #[error("the service has as many connections as its limit allows")]
    ServiceLimit,
    /// The caller has as many connections to the service, or calls that wait for services, as one VM may have.
    #[error(
        "this VM has as many connections to the service, or calls that wait for services, as one VM may have"
    )]
    ServiceShare,
    /// There is no way to the service's address.
    #[error("the service's address cannot be reached")]
    Unreachable,
    /// The service did not answer in time.
    #[error("the service did not answer in time")]
    ServiceTimedOut,
    /// The VM is known, but no guest driver is running there.
    #[error("the VM is not running, or its guest has not started the driver of its line")]
    NotRunning,
    /// The guest's driver does not offer this type of socket.
    #[error("the guest does not offer this socket type")]
    Unsupported,
    /// The guest refused: nothing listens on the port.
    #[error("the guest refused: nothing listens on that port")]
    GuestRefused,
    /// The guest's line is a serial port, which carries calls to its agent alone.
    #[error(
        "a serial port carries calls to the guest's agent alone: reach a program of the guest with `ringdown forward`"
    )]
    AgentOnly,
    /// The guest did not answer in time.
    #[error("the guest did not answer in time")]
    TimedOut,
    /// The VM has as many circuits as it may.
    #[error("the VM has as many circuits as its limit allows")]
    CircuitLimit,
    /// The VM has as many unanswered dials as it may.
    #[error("the VM has as many unanswered dials as its limit allows")]
    HalfOpenLimit,
    /// Other VMs have as many of the called VM's circuits as they may: see [`Limits`](crate::Limits).
    #[error(
        "this caller, or all other VMs together, have as many circuits to the called VM as its limit leaves them"
    )]
    CircuitShare,
    /// Other VMs have as many unanswered dials to the called VM as they may.
    #[error(
        "this caller, or all other VMs together, have as many unanswered dials to the called VM as its limit leaves them"
    )]
    HalfOpenShare,
    /// Calls are made more often than the VM may make them, or may be called by programs of the host.
    #[error("calls are made more often than the VM's limit allows")]
    ConnectRate,
    /// The called VM has yet to see the end of an earlier circuit with the same ports.
    #[error("an earlier circuit between the same ports is not over yet")]
    PortsInUse,
    /// One end sent a reset.
    #[error("reset by the peer")]
    PeerReset,
    /// The line of one end went down.
    #[error("the VM at the other end went away")]
    LineDown,
    /// A packet that makes no sense in the circuit's state.
    #[error("a packet broke the protocol")]
    ProtocolViolation,
    /// More data than the credit allowed, or an acknowledgement of data never sent.
    #[error("a packet broke the rules of credit")]
    CreditViolation,
    /// Guest memory could not be used.
    #[error("the guest's memory could not be read or written")]
    MemoryFault,
    /// A message is larger than the other side can ever take.
    #[error("the message is larger than the receiver's buffer")]
    MessageTooLong,
    /// A receiver does not take its messages, and so many wait that their number and not their bytes is the burden.
    #[error("too many small messages wait for a receiver that does not take them")]
    TooManyMessages,
    /// Calls on a host program's socket take too long: too many wait for what happens to it.
    #[error(
        "calls on a socket of this program, service or VMM take too long, again and again: wait on each with one poll or epoll, and call again later"
    )]
    SlowPeer,
    /// The operator ended it.
    #[error("ended by the operator")]
    Operator,
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
    pub const ALL: [Reason; 35] = [
        Reason::NoListener,
        Reason::WrongType,
        Reason::BacklogFull,
        Reason::HostFailed,
        Reason::UnknownCid,
        Reason::Denied,
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
