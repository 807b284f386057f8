//! Why a guest does not get where it wants, and how that is said in each protocol.

use std::net::IpAddr;

use policy::RuleId;
use rustix::io::Errno;
use vsock::Reason;
use wire::http_connect;
use wire::socks;

use crate::proxy::resolver::LookupError;

/// Why a guest does not get where it wants. The words stand in the audit and in the answers to HTTP.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EgressError {
    #[error("denied by rule \"{label}\"")]
    Denied {
        rule: RuleId,
        label: String,
        address: Option<IpAddr>,
    },
    #[error("denied: no rule allows it")]
    NoRule { address: Option<IpAddr> },
    #[error(
        "denied: this leads to {}, an address of the host, of its networks or of a special range, and no rule names that address or its network, as to = \"address:{}\" does",
        words(*address), example(*address)
    )]
    Special { address: Option<IpAddr> },
    #[error(
        "the kernel does not say whether {} is an address of the host or its networks ({error}): name it in a rule, or let the daemon use netlink",
        words(*address)
    )]
    NoRoutes {
        error: Errno,
        address: Option<IpAddr>,
    },
    #[error(
        "denied: a port of a VM is published at {}: only a rule that lets the guest call the VM leads there",
        words(*address)
    )]
    Published { address: Option<IpAddr> },
    #[error("{0}")]
    NotForPort(String),
    #[error("denied: rule \"{label}\" redirects, which egress does not do")]
    Redirected { rule: RuleId, label: String },
    #[error("denied: rule \"{label}\" has as many circuits as its limit allows")]
    RuleCircuits { rule: RuleId, label: String },
    #[error("denied: rule \"{label}\" allows no more calls in this second")]
    RuleRate { rule: RuleId, label: String },
    #[error("this name does not exist")]
    UnknownName,
    #[error("the name was not resolved in time")]
    LookupTimedOut,
    #[error(
        "this VM has as many connections to the server, with those that it ended in the last minute, as one VM may have"
    )]
    Share { rule: RuleId },
    #[error("the server refused the connection")]
    Refused { rule: RuleId },
    #[error("there is no route to the server")]
    Unreachable { rule: RuleId },
    #[error("the server did not answer in time")]
    TimedOut { rule: RuleId },
    #[error("the host could not make the connection")]
    Failed { rule: RuleId },
}

fn example(address: Option<IpAddr>) -> String {
    address.map_or_else(|| "192.0.2.7".to_owned(), |address| address.to_string())
}

fn words(address: Option<IpAddr>) -> String {
    address.map_or_else(|| "this".to_owned(), |address| address.to_string())
}

impl From<LookupError> for EgressError {
    fn from(error: LookupError) -> EgressError {
        match error {
            LookupError::Unknown => EgressError::UnknownName,
            LookupError::TimedOut => EgressError::LookupTimedOut,
            LookupError::NotForPort(words) => EgressError::NotForPort(words),
        }
    }
}

impl EgressError {
    /// What a failed connection means, which this rule allowed.
    pub(crate) fn from_reason(reason: Reason, rule: RuleId) -> EgressError {
        match reason {
            Reason::ServiceShare => EgressError::Share { rule },
            Reason::NoListener => EgressError::Refused { rule },
            Reason::Unreachable => EgressError::Unreachable { rule },
            Reason::ServiceTimedOut => EgressError::TimedOut { rule },
            _ => EgressError::Failed { rule },
        }
    }

    /// What the data plane hears of a call that is not put through.
    pub(crate) fn reason(&self) -> Reason {
        match self.is_denial() {
            true => Reason::EgressDenied,
            false => Reason::EgressFailed,
        }
    }

    /// The same, about this address.
    pub(crate) fn about(mut self, found: IpAddr) -> EgressError {
        match &mut self {
            EgressError::Denied { address, .. }
            | EgressError::NoRule { address }
            | EgressError::Special { address }
            | EgressError::Published { address }
            | EgressError::NoRoutes { address, .. } => *address = Some(found),
            _ => {}
        }
        self
    }

    /// Whether it is the policy that stands against it, and not the network.
    pub(crate) fn is_denial(&self) -> bool {
        matches!(
            self,
            EgressError::Denied { .. }
                | EgressError::NoRule { .. }
                | EgressError::Special { .. }
                | EgressError::Published { .. }
                | EgressError::NotForPort(_)
                | EgressError::Redirected { .. }
                | EgressError::RuleCircuits { .. }
                | EgressError::RuleRate { .. }
        )
    }

    /// The rule that decided, if one did.
    pub fn rule(&self) -> Option<RuleId> {
        match self {
            EgressError::Denied { rule, .. }
            | EgressError::Redirected { rule, .. }
            | EgressError::RuleCircuits { rule, .. }
            | EgressError::RuleRate { rule, .. }
            | EgressError::Share { rule }
            | EgressError::Refused { rule }
            | EgressError::Unreachable { rule }
            | EgressError::TimedOut { rule }
            | EgressError::Failed { rule } => Some(*rule),
            _ => None,
        }
    }

    /// What a person finds that rule by, where it is known.
    pub(crate) fn label(&self) -> Option<&str> {
        match self {
            EgressError::Denied { label, .. }
            | EgressError::Redirected { label, .. }
            | EgressError::RuleCircuits { label, .. }
            | EgressError::RuleRate { label, .. } => Some(label),
            _ => None,
        }
    }

    /// The address that it is about, if it came so far.
    pub(crate) fn address(&self) -> Option<IpAddr> {
        match self {
            EgressError::Denied { address, .. }
            | EgressError::NoRule { address }
            | EgressError::Special { address }
            | EgressError::Published { address }
            | EgressError::NoRoutes { address, .. } => *address,
            _ => None,
        }
    }

    /// The answer in SOCKS.
    pub(crate) fn socks(&self) -> socks::Reply {
        match self {
            EgressError::Denied { .. }
            | EgressError::NoRule { .. }
            | EgressError::Special { .. }
            | EgressError::Published { .. }
            | EgressError::NotForPort(_)
            | EgressError::Redirected { .. } => socks::Reply::NotAllowed,
            EgressError::RuleCircuits { .. }
            | EgressError::RuleRate { .. }
            | EgressError::NoRoutes { .. }
            | EgressError::Share { .. }
            | EgressError::Failed { .. } => socks::Reply::GeneralFailure,
            EgressError::Unreachable { .. } => socks::Reply::NetworkUnreachable,
            EgressError::UnknownName => socks::Reply::HostUnreachable,
            EgressError::Refused { .. } => socks::Reply::ConnectionRefused,
            EgressError::TimedOut { .. } | EgressError::LookupTimedOut => socks::Reply::TimedOut,
        }
    }

    /// The answer in HTTP, with the words of RFC 9209 for it.
    pub(crate) fn http(&self) -> Vec<u8> {
        let (status, error) = match self {
            EgressError::Denied { .. }
            | EgressError::NoRule { .. }
            | EgressError::NotForPort(_)
            | EgressError::Redirected { .. } => (403, "http_request_denied"),
            EgressError::Special { .. } | EgressError::Published { .. } => {
                (403, "destination_ip_prohibited")
            }
            EgressError::RuleCircuits { .. } | EgressError::Share { .. } => {
                (503, "connection_limit_reached")
            }
            EgressError::RuleRate { .. } => (429, "connection_limit_reached"),
            EgressError::UnknownName => (502, "dns_error"),
            EgressError::LookupTimedOut => (504, "dns_timeout"),
            EgressError::Refused { .. } => (502, "connection_refused"),
            EgressError::Unreachable { .. } => (502, "destination_ip_unroutable"),
            EgressError::TimedOut { .. } => (504, "connection_timeout"),
            EgressError::NoRoutes { .. } | EgressError::Failed { .. } => {
                (502, "proxy_internal_error")
            }
        };
        http_connect::refusal(status, error, &self.to_string())
    }
}
