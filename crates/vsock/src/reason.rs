//! Why a dial was refused or a circuit cut short.

use policy::RuleLimit;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// Each reason with its words and the name of its counter.
macro_rules! reasons {
    ($(#[error($($words:tt)+)] $reason:ident $counter:literal;)+) => {
        /// A reason, in words that a person can act upon.
        #[expect(missing_docs, reason = "the words of each say what it is")]
        #[derive(
            Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Error, Serialize, Deserialize,
        )]
        pub enum Reason {
            $(#[error($($words)+)] $reason,)+
        }

        impl Reason {
            /// Every reason, in the order of [`Reason::index`].
            pub const ALL: [Reason; [$($counter),+].len()] = [$(Reason::$reason),+];

            /// The name of this reason's counter.
            pub fn name(self) -> &'static str {
                match self {
                    $(Reason::$reason => $counter,)+
                }
            }
        }
    };
}

reasons! {
    #[error("no listener on the host for this port")]
    NoListener "ended_no_listener";
    #[error("the host's listener has another socket type (stream and seqpacket do not mix)")]
    WrongType "ended_wrong_type";
    #[error("the host's listener did not accept in time: its backlog is full")]
    BacklogFull "ended_backlog_full";
    #[error("the host's side of the call failed")]
    HostFailed "ended_host_failed";
    #[error("no VM has this context identifier")]
    UnknownCid "ended_unknown_cid";
    #[error("no rule allows it")]
    Denied "ended_denied";
    #[error("egress refused the destination that it was asked for: `ringdown why VM name:NAME PORT` says why")]
    EgressDenied "ended_egress_denied";
    #[error("this port of a VM is for its host alone: no rule or redirection leads there, and it cannot be published")]
    OwnPort "ended_own_port";
    #[error("{}", wire::agent::AGENT_AWAY)]
    AgentAway "ended_agent_away";
    #[error("the guest's agent is of before this release and cannot tell its host from others on this line: install the agent of this release in the guest")]
    AgentTooOld "ended_agent_too_old";
    #[error("the rule that allows it has as many circuits as its limit allows")]
    RuleCircuits "ended_rule_circuits";
    #[error("calls are made more often than the limit of the rule that allows them")]
    RuleRate "ended_rule_rate";
    #[error("the service has as many connections as its limit allows")]
    ServiceLimit "ended_service_limit";
    #[error("this VM has as many connections to the service or its server, or calls that wait for services, as one VM may have")]
    ServiceShare "ended_service_share";
    #[error("the service's address cannot be reached")]
    Unreachable "ended_unreachable";
    #[error("the service did not answer in time")]
    ServiceTimedOut "ended_service_timed_out";
    #[error("the VM is not running, or its guest has not started the driver of its line")]
    NotRunning "ended_not_running";
    #[error("the guest does not offer this socket type")]
    Unsupported "ended_unsupported";
    #[error("the guest refused: nothing listens on that port")]
    GuestRefused "ended_guest_refused";
    #[error("a serial port carries calls to the guest's agent alone: reach a program of the guest with `ringdown forward`")]
    AgentOnly "ended_agent_only";
    #[error("the guest did not answer in time")]
    TimedOut "ended_timed_out";
    #[error("the VM has as many circuits as its limit allows")]
    CircuitLimit "ended_circuit_limit";
    #[error("the VM has as many unanswered dials as its limit allows")]
    HalfOpenLimit "ended_half_open_limit";
    #[error("this caller, or all other VMs together, have as many circuits to the called VM as its limit leaves them")]
    CircuitShare "ended_circuit_share";
    #[error("this caller, or all other VMs together, have as many unanswered dials to the called VM as its limit leaves them")]
    HalfOpenShare "ended_half_open_share";
    #[error("calls are made more often than the VM's limit allows")]
    ConnectRate "ended_connect_rate";
    #[error("an earlier circuit between the same ports is not over yet")]
    PortsInUse "ended_ports_in_use";
    #[error("reset by the peer")]
    PeerReset "ended_peer_reset";
    #[error("the VM at the other end went away")]
    LineDown "ended_line_down";
    #[error("a packet broke the protocol")]
    ProtocolViolation "ended_protocol_violation";
    #[error("a packet broke the rules of credit")]
    CreditViolation "ended_credit_violation";
    #[error("the guest's memory could not be read or written")]
    MemoryFault "ended_memory_fault";
    #[error("the message is larger than the receiver's buffer")]
    MessageTooLong "ended_message_too_long";
    #[error("too many small messages wait for a receiver that does not take them")]
    TooManyMessages "ended_too_many_messages";
    #[error("calls on a socket of this program, service or VMM take too long, again and again: wait on each with one poll or epoll, and call again later")]
    SlowPeer "ended_slow_peer";
    #[error("ended by the operator")]
    Operator "ended_operator";
    #[error("the daemon ended in between, and the circuit could not go on with the next one")]
    DaemonEnded "ended_daemon_ended";
    #[error("egress could not reach the destination that it was asked for: `ringdown why VM name:NAME PORT` says why")]
    EgressFailed "ended_egress_failed";
    #[error("it had ended, and its peer had no room for 60 seconds for what was left")]
    NotTaken "ended_not_taken";
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
