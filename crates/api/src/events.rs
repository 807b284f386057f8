//! What goes over the control socket about what happens, and about why a call was refused.

use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::policy::PolicyAnswer;
use crate::restart::Restart;

/// The media type of a stream of events (HTML Living Standard, section 9.2).
pub const EVENTS_MEDIA_TYPE: &str = "text/event-stream";

macro_rules! kinds {
    ($($(#[doc = $doc:literal])+ $name:ident = $word:literal;)+) => {
        /// What kind of thing has happened.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
        #[serde(rename_all = "kebab-case")]
        pub enum EventKind {
            $($(#[doc = $doc])+ $name,)+
        }

        impl EventKind {
            /// Every kind.
            pub const ALL: &[EventKind] = &[$(EventKind::$name),+];

            /// The kind in one word, as in the JSON.
            pub fn word(self) -> &'static str {
                match self {
                    $(EventKind::$name => $word,)+
                }
            }
        }
    };
}

kinds! {
    /// This daemon has followed another one; the reason says what that cost.
    Restarted = "restarted";
    /// A VM, an uplink or a published port cannot be had at the moment, for the reason that is given; it is tried again.
    Unavailable = "unavailable";
    /// What was unavailable is there.
    Available = "available";
    /// A VM was added.
    VmAdded = "vm-added";
    /// A VM was removed.
    VmRemoved = "vm-removed";
    /// The agent of a VM's guest is there.
    VmReady = "vm-ready";
    /// The agent of a VM's guest has left, for the reason that is given.
    VmUnready = "vm-unready";
    /// A guest's driver runs its rings, or something answers at its serial port.
    LineUp = "line-up";
    /// A guest has gone, or has forgotten its circuits.
    LineDown = "line-down";
    /// A call was put through.
    CircuitOpened = "circuit-opened";
    /// A circuit is over on both ends.
    CircuitEnded = "circuit-ended";
    /// A call was refused, or came to nothing. Of one caller's at most 100 a second are sent.
    Refused = "refused";
    /// The rules, or what they are about, are others.
    PolicyChanged = "policy-changed";
    /// The configuration was read again; with a reason it was not taken, and what was in force stays.
    Reload = "reload";
    /// A circuit was given a window.
    WindowLent = "window-lent";
    /// A window is free again.
    WindowFree = "window-free";
    /// A capture has begun.
    CaptureStarted = "capture-started";
    /// A capture is over.
    CaptureEnded = "capture-ended";
    /// A reader of events did not keep up, and its stream was ended.
    ReaderDropped = "reader-dropped";
    /// Events that were asked for are not known any more. It goes to the reader that asked, unkept.
    Lost = "lost";
}

impl fmt::Display for EventKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(self.word())
    }
}

/// Something that has happened: the `data` of one event in a stream. Its `id` and `kind` are also those of the event.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Its number, larger than those of all before it, of earlier lives of the daemon too.
    pub id: u64,
    /// When, as RFC 3339 has it, in UTC and to the microsecond.
    pub time: String,
    /// What kind of thing it is.
    pub kind: EventKind,
    /// The subject.
    #[serde(flatten)]
    pub details: EventDetails,
}

/// What an event is about. Each kind has what it needs.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EventDetails {
    /// Full name of the VM, or of the one and the other with a comma in between.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vm: Option<String>,
    /// The circuit's number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub circuit: Option<String>,
    /// The caller, in words as in `web:40001`, `host(uid 1000, pid 7)` or `published(www)`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// The callee, in words as in `db:5432`, `service(registry):5000` or `host:7000`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// The callee, if a rule has redirected the call.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reached: Option<String>,
    /// The port that was called.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub port: Option<u32>,
    /// The rule that decided, by its name or its place.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<String>,
    /// Why, in words.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Bytes of the caller's that have arrived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_from_caller: Option<u64>,
    /// Bytes of the callee's that have arrived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes_to_caller: Option<u64>,
    /// How long it was there, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub age_ms: Option<u64>,
    /// How many: of events that are lost, of rules that are in force.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// How many events of the VM before this one were left out, as it caused more than are sent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub left_out: Option<u64>,
}

impl EventDetails {
    /// About one VM.
    pub fn of_vm(vm: impl Into<String>) -> EventDetails {
        EventDetails {
            vm: Some(vm.into()),
            ..EventDetails::default()
        }
    }

    /// Whether a VM of this full name has to do with it.
    pub fn is_about(&self, vm: &str) -> bool {
        let is_named = |end: &Option<String>| {
            let end = end.as_deref().and_then(|end| end.rsplit_once(':'));
            end.is_some_and(|(name, _)| name == vm)
        };
        let mut named = self.vm.iter().flat_map(|vms| vms.split(','));
        named.any(|name| name == vm)
            || [&self.from, &self.to, &self.reached]
                .into_iter()
                .any(is_named)
    }
}

/// The answer to `GET /v1/why`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Why {
    /// The caller, as it was asked.
    pub from: String,
    /// The callee, as it was asked.
    pub to: String,
    /// The port.
    pub port: u32,
    /// Whether the policy allows it now.
    pub allowed: bool,
    /// The rule that decides, by its name or its place; without one, what holds without a rule.
    pub rule: Option<String>,
    /// Why the policy says so, in a sentence without its end.
    pub reason: String,
    /// What stands in the way of the call although it is allowed, each in a sentence without its end.
    #[serde(default)]
    pub hindrances: Vec<String>,
    /// What has a call fail although it is allowed: the first of these, or the reason of the last call if that failed and none was put through since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fails: Option<String>,
    /// What the daemon has taken over from the one before it, if that reset circuits less than a minute ago.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub restart: Option<Restart>,
    /// All that the policy says.
    pub policy: PolicyAnswer,
    /// The last refusals of such calls, the latest first. None of callers that are a group of users: with which groups a program ran is not remembered.
    pub refusals: Vec<Refusal>,
}

/// A call that was refused or came to nothing.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Refusal {
    /// When, the last time, as RFC 3339 has it.
    pub time: String,
    /// The caller, in words.
    pub from: String,
    /// The callee, in words.
    pub to: String,
    /// The port that was called.
    pub port: u32,
    /// Why, in words.
    pub reason: String,
    /// The rule that decided, by its name or its place.
    pub rule: Option<String>,
    /// How often since it was first remembered.
    #[serde(default)]
    pub count: u64,
}
