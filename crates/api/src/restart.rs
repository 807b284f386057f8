//! What goes over the control socket about daemons that follow each other.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How a daemon ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DaemonEnd {
    /// It was asked to.
    Stopped,
    /// It was killed, or failed.
    Died,
}

impl fmt::Display for DaemonEnd {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.pad(match self {
            DaemonEnd::Stopped => "was stopped",
            DaemonEnd::Died => "died",
        })
    }
}

/// What a daemon has taken over from the one before it, by way of the keeper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Restart {
    /// How often a daemon has followed another since the keeper was started.
    pub restarts: u64,
    /// Version of the daemon before.
    pub version_before: String,
    /// How the daemon before ended.
    pub ended: DaemonEnd,
    /// When this daemon took over, as RFC 3339 has it.
    pub time: String,
    /// For how long there was no daemon, in milliseconds, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pause_ms: Option<u64>,
    /// Lines of VMs that went on.
    pub lines: u64,
    /// Circuits that went on.
    pub circuits: u64,
    /// Circuits that were reset.
    pub reset: u64,
}

impl fmt::Display for Restart {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Restart {
            restarts,
            version_before,
            ended,
            lines,
            circuits,
            reset,
            ..
        } = self;
        write!(
            formatter,
            "restart {restarts}: the daemon before ({version_before}) {ended}"
        )?;
        if let Some(ms) = self.pause_ms {
            write!(formatter, ", pause {}.{:03} s", ms / 1000, ms % 1000)?;
        }
        write!(
            formatter,
            "; went on: lines {lines}, circuits {circuits}; circuits reset: {reset}"
        )
    }
}

/// The answer to `GET /v1/hand-over`: what would go on if the daemon ended now, and another one followed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HandOver {
    /// Version of the daemon.
    pub version: String,
    /// Whether there is a keeper. Without one the daemon hands over nothing.
    pub keeper: bool,
    /// Why the daemon would not hand over: without a keeper, or with one that does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hindrance: Option<String>,
    /// What it keeps for the next daemon: by name, the versions that it reads. The last is the one that it writes.
    pub formats: Formats,
    /// The lines of VMs that go on, by full name.
    pub lines: Vec<String>,
    /// Lines that do not: by the full name of the VM, what becomes of them.
    pub other_lines: BTreeMap<String, String>,
    /// Circuits that go on.
    pub circuits: u64,
    /// Circuits that are reset: why, and how many.
    pub reset: BTreeMap<String, u64>,
}

/// What `ringdown version --json` prints, under the name `program`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Program {
    /// Its version.
    pub version: String,
    /// What its daemon keeps for the next one.
    pub formats: Formats,
}

/// What is kept for the next daemon: by name, the versions that are read. The last is the one that is written.
pub type Formats = BTreeMap<String, Vec<u32>>;

/// Whether a program that reads `next` goes on with what one has kept that writes the last versions of `before`; otherwise what it cannot read, in words.
///
/// # Errors
/// The first format that it does not read.
pub fn reads(next: &Formats, before: &Formats) -> Result<(), String> {
    for (name, versions) in before {
        let Some(written) = versions.last() else {
            continue;
        };
        let known = next.get(name).map(Vec::as_slice).unwrap_or_default();
        if !known.contains(written) {
            let known: Vec<String> = known.iter().map(u32::to_string).collect();
            let known = match known.is_empty() {
                true => "none".to_owned(),
                false => known.join(", "),
            };
            return Err(format!(
                "what is kept as {name} has version {written}, and it reads {known}"
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_restart_is_one_line() {
        let restart = Restart {
            restarts: 3,
            version_before: "0.1.0".to_owned(),
            ended: DaemonEnd::Died,
            time: String::new(),
            pause_ms: Some(1042),
            lines: 2,
            circuits: 12,
            reset: 1,
        };
        assert_eq!(
            restart.to_string(),
            "restart 3: the daemon before (0.1.0) died, pause 1.042 s; went on: lines 2, circuits 12; circuits reset: 1"
        );
    }
    #[test]
    fn what_is_written_has_to_be_read() {
        let formats = |journal: &[u32]| Formats::from([("journal".to_owned(), journal.to_vec())]);
        assert_eq!(reads(&formats(&[1, 2]), &formats(&[1])), Ok(()));
        assert_eq!(reads(&formats(&[1]), &formats(&[])), Ok(()));
        assert_eq!(
            reads(&formats(&[1]), &formats(&[1, 2])),
            Err("what is kept as journal has version 2, and it reads 1".to_owned())
        );
        assert!(reads(&Formats::new(), &formats(&[1])).is_err());
    }
}
