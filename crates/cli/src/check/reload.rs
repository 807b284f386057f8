//! What a reload of the daemon that runs would make of a configuration file.

use std::path::Path;

use api::ReloadRequest;

use super::Finding;
use crate::client::{Client, ClientError};
use crate::quote::quote;

const ABOUT: &str = "reload";

/// Nothing if no daemon runs, or none that answers.
pub(super) fn look(client: &Client, path: &Path) -> Option<Finding> {
    let read = client.health().ok()?.config;
    let Some(read) = read else {
        return Some(Finding::warning(
            ABOUT,
            "the daemon was started without --config: it reads no file",
            format!("start it with `ringdown serve --config {}`", quote(path)),
        ));
    };
    if !is_same_file(&read, path) {
        let found = format!("the daemon reads another file, {}", read.display());
        return Some(Finding::fine(ABOUT, found));
    }
    let request = ReloadRequest {
        enforce_existing: false,
        check: true,
    };
    match client.reload(request) {
        Ok(_) => Some(Finding::fine(
            ABOUT,
            "the daemon would take the file, if it gets the sockets, files and devices of what is new in it: only the reload tries those",
        )),
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
            format!("the daemon would refuse the file: {}", problem.detail),
            "do as the message says",
        )),
        Err(_) => None,
    }
}

fn is_same_file(one: &Path, other: &Path) -> bool {
    let (one, other) = (one.canonicalize(), other.canonicalize());
    matches!((one, other), (Ok(one), Ok(other)) if one == other)
}
