//! `ringdown reload`: the daemon reads its configuration again.

use api::{Finding, ReloadRequest, Reloaded, VMM_RUNS_ON};

use super::vm::note_unkept;
use super::{print, print_json};
use crate::arguments::Reload;
use crate::check;
use crate::client::Client;
use crate::failure::Failure;
use crate::lines::note;

/// Reloads, and says what has changed.
///
/// # Errors
/// [`Failure`] when everything is as it was.
pub fn run(client: &Client, options: &Reload) -> Result<(), Failure> {
    let request = ReloadRequest {
        enforce_existing: options.enforce_existing,
        ..ReloadRequest::default()
    };
    let reloaded = client.reload(&request)?;
    if options.json {
        return print_json(&reloaded);
    }
    let file = client.health().ok().and_then(|health| health.config);
    if let Some((found, remedy)) = file.as_deref().and_then(check::writers) {
        note(&format!("warning: {found}: `{remedy}`"));
    }
    warn_of(&reloaded.findings);
    for name in &reloaded.cut_off {
        note(&format!("warning: {name} was removed; {VMM_RUNS_ON}"));
    }
    if !reloaded.added.is_empty() {
        note_unkept(client);
    }
    if reloaded.networks > 0 {
        for words in check::lacking_cards(client) {
            note(&format!("warning: {words}"));
        }
    }
    print(&words(&reloaded))
}

/// Prints what can hardly be meant: on standard error, because what was asked for was done.
fn warn_of(findings: &[Finding]) {
    for finding in findings {
        note(&format!("warning: {finding}"));
    }
}

fn words(reloaded: &Reloaded) -> String {
    let mut text = String::new();
    for (what, names) in [
        ("added", &reloaded.added),
        ("removed", &reloaded.removed),
        ("published", &reloaded.published),
        ("no longer published", &reloaded.unpublished),
    ] {
        if !names.is_empty() {
            text.push_str(&format!("{what} {}\n", names.join(", ")));
        }
    }
    // A person who has no networks need not know that there could be some.
    let networks = match reloaded.networks {
        0 => String::new(),
        number => format!(", {}", count(number, "network")),
    };
    text.push_str(&format!(
        "in force: {}{networks}, {}, {}, {}\n",
        count(reloaded.vms, "VM"),
        count(reloaded.rules, "rule"),
        count(reloaded.services, "service"),
        count(reloaded.publishes, "published port")
    ));
    text
}

pub(super) fn count(number: usize, what: &str) -> String {
    match number {
        1 => format!("1 {what}"),
        number => format!("{number} {what}s"),
    }
}
