//! What goes over the control socket about reloading and about the policy.

use std::collections::BTreeMap;
use std::fmt;

use policy::Verdict;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The body of `POST /v1/reload`. It may be left out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ReloadRequest {
    /// Whether circuits that would not be allowed any more are ended.
    #[serde(default)]
    pub enforce_existing: bool,
    /// Whether it is only found out what the reload would do. Nothing comes into force then.
    #[serde(default)]
    pub check: bool,
    /// The name of a file beside the daemon's own, which is read in its place. Only for a check.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
}

/// The answer to `POST /v1/reload`: what has changed, and what is in force.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Reloaded {
    /// Full names of VMs that were added.
    pub added: Vec<String>,
    /// Full names of VMs that were removed.
    pub removed: Vec<String>,
    /// Those of them whose VMM was connected: it still runs, without a line.
    #[serde(default)]
    pub cut_off: Vec<String>,
    /// Published ports that were added, or are others than before: where the daemon listens, and its callee.
    #[serde(default)]
    pub published: Vec<String>,
    /// Those that were removed, or were others before.
    #[serde(default)]
    pub unpublished: Vec<String>,
    /// How many VMs there are.
    pub vms: usize,
    /// How many networks there are.
    #[serde(default)]
    pub networks: usize,
    /// How many rules there are.
    pub rules: usize,
    /// How many services the host offers.
    pub services: usize,
    /// How many ports are published.
    pub publishes: usize,
    /// What can hardly be meant, at most 1,000 findings. Rules that never match are not looked for: ask for a check.
    pub findings: Vec<Finding>,
}

/// What becomes of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum PolicyVerdict {
    /// It is put through.
    Allowed,
    /// It is refused.
    Denied,
    /// It is put through to another callee.
    Redirected,
}

impl PolicyVerdict {
    /// The verdict in one word, as in the JSON.
    pub fn word(self) -> &'static str {
        match self {
            PolicyVerdict::Allowed => "allowed",
            PolicyVerdict::Denied => "denied",
            PolicyVerdict::Redirected => "redirected",
        }
    }
}

impl From<&Verdict> for PolicyVerdict {
    fn from(verdict: &Verdict) -> PolicyVerdict {
        match verdict {
            Verdict::Allow => PolicyVerdict::Allowed,
            Verdict::Deny => PolicyVerdict::Denied,
            Verdict::Redirect(_) => PolicyVerdict::Redirected,
        }
    }
}

impl fmt::Display for PolicyVerdict {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.word())
    }
}

/// A rule, as answers name it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyRule {
    /// Its position among all rules, from 0.
    pub index: u32,
    /// Its name, or its place if it has none.
    pub label: String,
    /// Where it was written.
    pub place: String,
}

impl PolicyRule {
    /// The rule as a sentence names it: by its position from 1, and its name or place.
    pub fn words(&self) -> String {
        match self.label == self.place {
            true => format!("{} ({})", self.index + 1, self.place),
            false => format!("{} {:?} ({})", self.index + 1, self.label, self.place),
        }
    }
}

/// A rule that nearly matched, and says otherwise.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PassedOver {
    /// The rule.
    pub rule: PolicyRule,
    /// What would become of the call by it.
    pub verdict: PolicyVerdict,
    /// The one key in which it does not match: `from`, `to` or `port`.
    pub differs_in: String,
    /// What the rule has there, in the words of the configuration.
    pub has: Vec<String>,
}

/// The answer to `GET /v1/policy/test`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyAnswer {
    /// The caller, as it was asked.
    pub from: String,
    /// The callee, as it was asked.
    pub to: String,
    /// The port.
    pub port: u32,
    /// What becomes of the call.
    pub verdict: PolicyVerdict,
    /// Where it goes instead, if it is redirected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redirect: Option<String>,
    /// The rule that decides, if one does.
    pub rule: Option<PolicyRule>,
    /// Why, in a sentence without its end.
    pub why: String,
    /// What else a person should know, each in a sentence without its end.
    #[serde(default)]
    pub notes: Vec<String>,
    /// Rules before it that say otherwise and match in all but one regard: a few.
    #[serde(default)]
    pub passed_over: Vec<PassedOver>,
}

/// What kind of thing can hardly be meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum FindingKind {
    /// A rule never matches: those before it match whatever it would, or what it denies is not called at its ports.
    Unreachable,
    /// No VM has the name.
    UnknownVm,
    /// No VM is in the group, and nothing else says that there is one.
    UnknownGroup,
    /// No service has the name.
    UnknownService,
    /// A group has no members.
    EmptyGroup,
    /// No rule opens it to callers.
    Unused,
    /// It is to lead to a port of a VM that only programs of its host reach.
    OwnPort,
    /// A rule allows what it does not open: a name or an address that egress refuses, a service or a name of `[hosts]` at another port, a VM's
    /// calls to itself.
    NotOpened,
    /// A rule denies hybrid VMs ports of the host at which the daemon is not asked.
    NotHeld,
}

/// Something that can hardly be meant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Finding {
    /// What kind of thing it is.
    pub kind: FindingKind,
    /// Where it was written.
    pub place: String,
    /// What it is, in a sentence without its end.
    pub message: String,
    /// What to do about it.
    pub remedy: String,
}

impl fmt::Display for PassedOver {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (rule, verdict) = (self.rule.words(), self.verdict);
        let (key, has) = (&self.differs_in, self.has.join(", "));
        write!(
            formatter,
            "it would be {verdict} by rule {rule}, but {key} is {has} there"
        )
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "{}: {}; {}",
            self.place, self.message, self.remedy
        )
    }
}

/// The answer to `GET /v1/policy/check`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyReport {
    /// How many rules there are.
    pub rules: usize,
    /// What can hardly be meant, at most 1,000 findings.
    pub findings: Vec<Finding>,
}

/// The most rules that are listed. There may be ten times as many, too many to read.
pub const MAX_LISTED_RULES: usize = 1000;

/// The answer to `GET /v1/policy/rules`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PolicyRules {
    /// The rules, in the order in which they are asked: the first [`MAX_LISTED_RULES`].
    pub rules: Vec<RuleInfo>,
    /// How many more there are.
    #[serde(default)]
    pub more: usize,
}

/// One rule, in the words of the configuration.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RuleInfo {
    /// Its position among all rules, from 0.
    pub index: u32,
    /// Its name, or its place if it has none: what a circuit says of the rule that allows it.
    pub label: String,
    /// Where it was written.
    pub place: String,
    /// Callers: any of these. `red/any` is what `any` means in a rule of the domain `red`.
    pub from: Vec<String>,
    /// Callees: any of these.
    pub to: Vec<String>,
    /// Which ports are called: any of these; `*` for all.
    pub ports: Vec<String>,
    /// What becomes of such a call.
    pub verdict: PolicyVerdict,
    /// Where it goes instead, if it is redirected.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub redirect: Option<String>,
    /// What all its circuits may use together: `circuits`, `connects_per_second`, `bytes_per_second`. Those that it does not limit are left out.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub limits: BTreeMap<String, u64>,
}
