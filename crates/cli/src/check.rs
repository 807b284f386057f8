//! What stands in the way of guests: of this machine, of a configuration, and of the daemon that runs. Each finding says what to do.

mod calls;
mod configuration;
mod daemon_state;
mod machine;
mod reload;

pub(crate) use configuration::writers;
pub(crate) use daemon_state::lacking_cards;

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::client::{Client, found_runtime_dir, is_runtime_dir_set};
use crate::vmm::Accelerator;

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// As it should be.
    Fine,
    /// It works, with less than there could be.
    Warning,
    /// Something does not work until the remedy is applied.
    Error,
}

/// What was checked, and what was found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// What it is about, in a word or two.
    pub about: &'static str,
    /// How bad it is.
    pub severity: Severity,
    /// What was found.
    pub found: String,
    /// What to do; none where all is fine, or what was found says it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Finding {
    fn fine(about: &'static str, found: impl Into<String>) -> Finding {
        Finding {
            about,
            severity: Severity::Fine,
            found: found.into(),
            remedy: None,
        }
    }

    fn warning(
        about: &'static str,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        Finding {
            severity: Severity::Warning,
            remedy: Some(remedy.into()),
            ..Finding::fine(about, found)
        }
    }

    fn error(about: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Finding {
        Finding {
            severity: Severity::Error,
            ..Finding::warning(about, found, remedy)
        }
    }

    /// An error whose words say what to do.
    fn refused(about: &'static str, found: impl Into<String>) -> Finding {
        Finding {
            severity: Severity::Error,
            ..Finding::fine(about, found)
        }
    }
}

/// Checks everything: the machine, the configuration if there is a file, and the daemon of the runtime directory.
pub fn everything(config: Option<&Path>, runtime_dir: Option<&Path>) -> Vec<Finding> {
    let mut findings = machine::look();
    // A file may be checked before the first start.
    let is_expected = config.is_none() && (runtime_dir.is_some() || is_runtime_dir_set());
    let mut named = runtime_dir.map(Path::to_owned);
    if let Some(path) = config {
        let (found, directory) = configuration::look(path, runtime_dir);
        findings.extend(found);
        named = named.or(directory);
    }
    let runtime_dir: PathBuf = named.unwrap_or_else(found_runtime_dir);
    let client = Client::new(Some(&runtime_dir));
    let state = daemon_state::look(&client, &runtime_dir, config, is_expected);
    // One that does not answer is not asked twice.
    let answers = state.first().map(|found| found.severity) == Some(Severity::Fine);
    findings.extend(state);
    let reload = config.filter(|_| answers);
    let reload = reload.into_iter();
    let reload = reload.flat_map(|path| reload::look(&client, path));
    let reload: Vec<Finding> = reload.collect();
    // What is wrong with the file by itself has been said.
    let is_known = |found: &Finding| {
        findings
            .iter()
            .any(|known| found.found.ends_with(&known.found))
    };
    let new: Vec<Finding> = reload
        .into_iter()
        .filter(|found| !is_known(found))
        .collect();
    findings.extend(new);
    findings
}

/// What guests of this machine can be expected to run with: KVM if nothing is in its way.
pub fn accelerator() -> Accelerator {
    match machine::kvm().severity {
        Severity::Fine => Accelerator::Kvm,
        _ => Accelerator::Tcg,
    }
}

fn vms(count: usize) -> String {
    match count {
        1 => "1 VM".to_owned(),
        count => format!("{count} VMs"),
    }
}

#[cfg(test)]
mod tests;
