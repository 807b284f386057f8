//! What a reload of the daemon that runs would make of a configuration file.

use std::path::Path;

use api::{ReloadRequest, VMM_RUNS_ON};

use super::Finding;
use crate::client::{Client, ClientError};
use crate::quote::quote;

const ABOUT: &str = "reload";

/// Nothing if no daemon runs, or none that answers.
pub(super) fn look(client: &Client, path: &Path) -> Vec<Finding> {
    let mut cut_off = Vec::new();
    let reload = ask(client, path, &mut cut_off);
    let cut_off = cut_off.iter().map(|name| {
        let found = format!("it would remove {name}; {VMM_RUNS_ON}");
        let remedy = "leave the VM in the file, or end its VMM before the reload: QEMU does not connect again";
        Finding::warning(ABOUT, found, remedy)
    });
    reload.into_iter().chain(cut_off).collect()
}

/// The answer, and which VMs whose VMM is connected would be removed.
fn ask(client: &Client, path: &Path, cut_off: &mut Vec<String>) -> Option<Finding> {
    let read = client.health().ok()?.config;
    let Some(read) = read else {
        return Some(Finding::warning(
            ABOUT,
            "the daemon was started without --config: it reads no file",
            format!("start it with `ringdown serve --config {}`", quote(path)),
        ));
    };
    let Some((file, in_place)) = as_daemons(&read, path) else {
        let found = format!(
            "the daemon was not asked: it reads {}, and can be asked about files beside that",
            read.display()
        );
        return Some(Finding::fine(ABOUT, found));
    };
    let request = ReloadRequest {
        check: true,
        file,
        ..ReloadRequest::default()
    };
    match client.reload(&request) {
        Ok(reloaded) => {
            *cut_off = reloaded.cut_off;
            Some(Finding::fine(
                ABOUT,
                format!(
                    "the daemon would take the file{in_place}, if it gets the sockets, files and devices of what is new in it: only the reload tries those"
                ),
            ))
        }
        Err(ClientError::Problem(problem)) if problem.status == 403 => Some(Finding::warning(
            ABOUT,
            format!(
                "whether the daemon would take the file is not known: {}",
                problem.detail
            ),
            "ask as a user who may reload",
        )),
        Err(ClientError::Problem(problem)) => Some(Finding::error(
            ABOUT,
            format!(
                "the daemon would refuse the file{in_place}: {}",
                problem.detail
            ),
            "do as the message says",
        )),
        Err(_) => None,
    }
}

/// How the daemon is asked about this file, if it can be: as its own, or by the name of one that lies beside its own, as one does that is to be renamed;
/// and words for that.
fn as_daemons(read: &Path, path: &Path) -> Option<(Option<String>, String)> {
    if is_same_file(read, path) {
        return Some((None, String::new()));
    }
    let absolute = std::path::absolute(path).ok()?;
    let is_beside = is_same_file(read.parent()?, absolute.parent()?);
    let name = path.file_name()?.to_str()?.to_owned();
    is_beside.then(|| (Some(name), format!(" in place of {}", read.display())))
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    let (one, other) = (one.canonicalize(), other.canonicalize());
    matches!((one, other), (Ok(one), Ok(other)) if one == other)
}
