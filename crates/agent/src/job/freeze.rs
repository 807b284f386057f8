//! Freezing and thawing for the host; how it is done, and undone in any case, is said in [`crate::freezer`].

use std::time::Duration;

use wire::agent::job::Answer;

use super::{Host, unavailable};
use crate::freezer::Freezer;
use crate::stop::Stop;

pub(super) fn freeze(host: &mut Host<'_>, freezer: &Freezer, timeout_ms: u32) -> Result<(), Stop> {
    let timeout = Duration::from_millis(timeout_ms.into());
    let frozen = freezer.freeze(timeout).map_err(unavailable)?;
    host.answer(Answer::FileSystems(frozen)).inspect_err(|_| {
        // A host that does not know of it does not thaw it. If that fails, its owner goes on.
        let _ = freezer.thaw();
    })
}

pub(super) fn thaw(host: &mut Host<'_>, freezer: &Freezer) -> Result<(), Stop> {
    let thawed = freezer.thaw().map_err(unavailable)?;
    host.answer(Answer::FileSystems(thawed))
}
