//! What the audit has of one call: the decision, as plain data, and how it looks in JSON.

use std::borrow::Cow;
use std::net::IpAddr;

use serde::Serialize;

/// The longest text of a record that a guest may have chosen, in bytes: a DNS name. What is longer is cut.
pub const MAX_TEXT_LEN: usize = 255;

/// What was decided about one call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct AuditRecord {
    /// What became of the call.
    pub decision: AuditDecision,
    /// Who called.
    pub from: AuditCaller,
    /// Who was called.
    pub to: AuditCallee,
    /// Who was called instead, if a rule said so.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub redirected_to: Option<AuditCallee>,
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

/// Who called.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum AuditCaller {
    /// A guest.
    Vm {
        /// Its domain.
        domain: String,
        /// Its name in the domain.
        vm: String,
        /// Its context identifier.
        cid: u32,
        /// The port it called from.
        port: u32,
    },
    /// A program of the host.
    Program {
        /// The user it runs as.
        uid: u32,
        /// Its process, if the system said so.
        pid: Option<u32>,
    },
    /// A caller at a published port.
    Published {
        /// The name of the published port.
        published: String,
        /// The address it came from, if it has one.
        #[serde(skip_serializing_if = "Option::is_none")]
        peer: Option<String>,
    },
}

/// Who was called.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum AuditCallee {
    /// A guest.
    Vm {
        /// Its domain.
        domain: String,
        /// Its name in the domain.
        vm: String,
        /// Its context identifier.
        cid: u32,
        /// The port that was called.
        port: u32,
    },
    /// A program of a guest, to which the guest's agent was to connect.
    Place {
        /// The guest's domain.
        domain: String,
        /// The guest's name in the domain.
        vm: String,
        /// Where it listens: `tcp:127.0.0.1:80`.
        place: String,
    },
    /// A service of the host.
    Service {
        /// Its domain.
        domain: String,
        /// Its name.
        service: String,
        /// The port that was called.
        port: u32,
    },
    /// A socket that a program of the host made for the calling guest: `<host path>_<port>`.
    Listener {
        /// The port that was called.
        listener: u32,
    },
    /// An address beyond the host.
    Address {
        /// The name that was asked for.
        #[serde(skip_serializing_if = "Option::is_none")]
        name: Option<String>,
        /// The address, if it came so far.
        #[serde(skip_serializing_if = "Option::is_none")]
        address: Option<IpAddr>,
        /// The port there.
        port: u16,
    },
    /// A context identifier of no VM.
    UnknownCid {
        /// The identifier.
        cid: u32,
        /// The port that was called.
        port: u32,
    },
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
            if let AuditCallee::Address {
                name: Some(name), ..
            } = callee
            {
                cut(name);
            }
        }
        if let AuditCaller::Published {
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
