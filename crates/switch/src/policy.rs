//! Who may call whom: ordered rules, of which the first that matches decides.
//!
//! A rule names callers, callees and ports. Everything is scoped: a VM, a group of VMs and a service belong to a *domain*, and a
//! rule that says "any VM" says of which domain. So nothing crosses from one domain to another unless a rule names both.
//!
//! A decision has to cost less than the dial it is made for, however many rules there are. So what does not depend on the
//! dial is looked up beforehand: [`Policy::callers`] and [`Policy::callees`] say which rules can match a caller at all, or
//! a callee, as a [`RuleSet`] of one bit a rule. A decision is then the first rule in three sets at once (the bit vectors
//! of Lakshman and Stiliadis, "High-speed policy-based packet forwarding using efficient multi-dimensional range
//! matching", SIGCOMM 1998).

mod compiled;
mod rule;

pub use compiled::{Decision, Policy, RuleSet};
pub use rule::{
    Callee, CalleePattern, Caller, CallerPattern, DEFAULT_DOMAIN, NamePattern, Network, PortRange,
    Redirect, Rule, RuleId, RuleLimits, Verdict,
};
