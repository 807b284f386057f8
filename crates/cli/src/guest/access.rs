//! Who may connect to a host socket. Connecting is writing, to the socket, and passing through its directory (unix(7)).

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use daemon::config::group_words;

/// Whom a host socket takes that did not take this user, and what to do.
pub(crate) fn remedy(socket: &Path) -> String {
    match std::fs::metadata(socket) {
        Err(error) => format!(
            "its directory cannot be passed through ({error}): let this user pass (chmod o+x, or a group), or run this as the daemon's user or root"
        ),
        Ok(metadata) if metadata.mode() & 0o020 != 0 => {
            let group = group_words(metadata.gid());
            format!(
                "it takes members of the group {group}: `adduser USER {group}`, and log in again"
            )
        }
        Ok(metadata) => format!(
            "it takes the user {} alone: run this as that user or root, or set operate-group in [control] of the daemon's configuration \
             (docs/api.md); a socket that the VMM itself makes has the mode that the VMM gives it",
            metadata.uid()
        ),
    }
}
