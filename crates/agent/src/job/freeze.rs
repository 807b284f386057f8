//! Freezing and thawing for the host; how it is done, and undone in any case, is said in [`crate::freezer`].

use std::time::Duration;

use wire::agent::job::Answer;

use super::{Host, unavailable};
use crate::freezer::Freezer;
use crate::session::{Options, Stop};

pub(super) fn freeze(host: &mut Host<'_>, options: &Options, timeout_ms: u32) -> Result<(), Stop> {
    let timeout = Duration::from_millis(timeout_ms.into());
    let freezer = Freezer::new(options);
    let frozen = freezer.freeze(timeout).map_err(unavailable)?;
    host.answer(Answer::FileSystems(frozen)).inspect_err(|_| {
        // A host that does not know of it does not thaw it. If that fails, its owner goes on.
        let _ = freezer.thaw();
    })
}

pub(super) fn thaw(host: &mut Host<'_>, options: &Options) -> Result<(), Stop> {
    let thawed = Freezer::new(options).thaw().map_err(unavailable)?;
    host.answer(Answer::FileSystems(thawed))
}
