//! What the audit has of one call: the decision, as plain data, and how it looks in JSON.

use std::borrow::Cow;

use device::{DecisionCallee, DecisionCaller};
use serde::Serialize;

/// The longest text of a record that a guest may have chosen, in bytes: a DNS name. What is longer is cut.
pub const MAX_TEXT_LEN: usize = 255;

/// What was decided about one call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AuditRecord {
    /// What became of the call.
    pub decision: AuditDecision,
    /// The caller.
    pub from: DecisionCaller,
    /// The callee.
    pub to: DecisionCallee,
    /// The real callee, if a rule said so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub redirected_to: Option<DecisionCallee>,
    /// The rule that decided; none if no rule matched, or none was asked.
    pub rule: Option<AuditRule>,
    /// Why, in words. None where the rule says everything.
    pub reason: Option<Cow<'static, str>>,
}

/// What became of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AuditDecision {
    /// The policy allows it, and it was put through.
    Allowed,
    /// The policy, or a limit of a rule, does not allow it.
    Denied,
    /// The policy allows it, and it came to nothing: without a listener, or an answer.
    Failed,
}

/// A rule of the policy that was in force.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AuditRule {
    /// Its position, from 0.
    pub index: u32,
    /// Its name, or the place where it was written.
    pub label: String,
}

impl AuditRecord {
    /// Cuts what a caller may have made long, so that a record has a largest size.
    #[must_use]
    pub fn bounded(mut self) -> AuditRecord {
        for callee in [Some(&mut self.to), self.redirected_to.as_mut()]
            .into_iter()
            .flatten()
        {
            if let DecisionCallee::Address {
                name: Some(name), ..
            } = callee
            {
                cut(name);
            }
        }
        if let DecisionCaller::Published {
            peer: Some(peer), ..
        } = &mut self.from
        {
            cut(peer);
        }
        if let Some(Cow::Owned(reason)) = &mut self.reason {
            cut(reason);
        }
        self
    }
}

fn cut(text: &mut String) {
    let mut end = MAX_TEXT_LEN.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
}
