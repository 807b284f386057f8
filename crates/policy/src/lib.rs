//! Names, rules, and the one rate limiter: the calls allowed, and how often. Times are arguments; there is no clock and no I/O.
//!
//! - [`Directory`]: the domains, each with the names, context identifiers and services of its own ([`Address`], [`ServiceEntry`]).
//! - [`Policy`]: ordered rules, of which the first that matches decides.
//! - [`RuleUse`]: what the circuits that one rule has allowed use together.
//! - [`TokenBucket`]: every rate, of calls, packets, frames, bytes, events and lines of the log.
//!
//! A rule names callers, callees and ports. Everything is scoped: a VM, a group of VMs and a service belong to a *domain*, and a
//! rule that says "any VM" says of which domain. So nothing crosses from one domain to another unless a rule names both.
//!
//! # Theory of operation: decisions
//!
//! A decision has to cost less than the dial it is made for, however many rules there are, and whatever they say. So it
//! never goes from rule to rule. Each of caller, callee and port alone says which rules are about it, as one bit a rule,
//! and the first rule that all three have is the one that decides (the bit vectors of Lakshman and Stiliadis, "High-speed
//! policy-based packet forwarding using efficient multi-dimensional range matching", SIGCOMM 1998).
//!
//! - For callers and callees, an index adds up the bits of all patterns that are about the one in question ([`RuleSet`]).
//!   Guests keep their sets: [`Policy::callers`] and [`Policy::callees`] are asked when a guest comes or the policy changes. For
//!   programs of the host and for addresses they are asked at each dial.
//! - For ports, the bits of each interval of ports are ready in memory, as what differs from the interval before (`ports`).
//! - [`Policy::decide`] reads the three side by side, 512 rules at a time, up to the first bit in common.
//!
//! The same index answers what is about *all* that a pattern is about. So [`Policy::unreachable`] finds rules that can never
//! match; [`Policy::explain`] says why a call is decided as it is.

mod address;
mod analysis;
mod compiled;
mod directory;
mod explain;
mod identity;
mod ids;
mod index;
mod nested;
mod own_ports;
mod ports;
mod rule;
mod set;
mod token_bucket;
mod usage;

pub use address::{Address, full_name};
pub use analysis::Unreachable;
pub use compiled::{Decision, Policy};
pub use directory::{Directory, DomainId, Service, ServiceEntry, Taken};
pub use explain::{Explanation, MAX_NEAR, RuleMatch};
pub use ids::{LineId, ServiceId, Time};
pub use ipnet::{IpNet, Ipv4Net, Ipv6Net};
pub use own_ports::{OWN_PORTS, is_own_port};
pub use rule::{
    Callee, CalleePattern, Caller, CallerPattern, DEFAULT_DOMAIN, NamePattern, PortRange, Redirect,
    Rule, RuleId, RuleLimits, Verdict, VmPattern,
};
pub use set::RuleSet;
pub use token_bucket::TokenBucket;
pub use usage::{CALLS_AT_ONCE, RuleLimit, RuleUse};

#[cfg(test)]
mod tests;
