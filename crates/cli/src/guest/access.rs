//! Access to a socket of the daemon. Connecting is writing, to the socket, and passing through its directory (unix(7)).

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use config::group_words;

/// Users of a socket that did not take this one, and what to do.
pub(crate) fn remedy(socket: &Path) -> String {
    let join = |what: &str, gid| {
        let group = group_words(gid);
        format!(
            "only members of the group {group} may {what}: `adduser USER {group}`, and log in again"
        )
    };
    let directory = socket.parent().and_then(|path| path.metadata().ok());
    match (std::fs::metadata(socket), directory) {
        (Err(_), Some(directory)) if directory.mode() & 0o010 != 0 => {
            join("search its directory", directory.gid())
        }
        (Err(error), _) => format!(
            "this user may not search its directory ({error}): run this as the daemon's user or root, or set operate-group in [control] of the daemon's \
             configuration (docs/api.md)"
        ),
        (Ok(metadata), _) if metadata.mode() & 0o020 != 0 => join("connect to it", metadata.gid()),
        (Ok(metadata), _) => format!(
            "only the user {} may connect: run this as that user or root, or set operate-group in [control] of the daemon's configuration \
             (docs/api.md)",
            metadata.uid()
        ),
    }
}
