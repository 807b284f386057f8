//! What a daemon leaves with the keeper about itself, and what its successor makes of it: how it ended, and what that cost.
//!
//! The item is written when a daemon takes over and when it is asked to end. One that says nothing of an end was left by a daemon that died: then the
//! keeper knows since when. A start may fail behind that, and the next one is to count from the first end: so this is written down at once.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use api::{DaemonEnd, EventDetails, EventKind, Restart};
use keeper::{Keeper, KeeperError};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::events::rfc_3339;
use crate::in_force::Parts;

/// Under which the keeper has it.
const KEY: &str = "daemon";

/// How often it is looked whether the keeper lives.
const KEEPER_LOOK: Duration = Duration::from_secs(1);

/// What is kept of a daemon.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Life {
    version: String,
    /// How many daemons were before it.
    restarts: u64,
    /// How it ended, and when: the time since the machine's boot, in milliseconds.
    ended: Option<(DaemonEnd, Option<u64>)>,
    /// Circuits with programs of the host that it cut as it was stopped: the journal has them no more.
    #[serde(default)]
    cut: usize,
}

/// Has the keeper at this path let everything go and end, and removes the sockets at which VMMs connect to it.
///
/// # Errors
/// [`KeeperError`].
pub fn release_keeper(path: &Path) -> Result<(), KeeperError> {
    if let Err(error) = sys::descriptors::raise_limit() {
        tracing::warn!(%error, "cannot raise the limit of open files");
    }
    match Keeper::attach(path) {
        Ok(keeper) => device::remove_kept_sockets(&keeper),
        Err(KeeperError::Busy { path }) => return Err(KeeperError::InUse { path }),
        Err(error @ KeeperError::Silent { .. }) => return Err(error),
        // What it has cannot be had here, and goes nevertheless.
        Err(_) => {}
    }
    keeper::release(path)
}

/// Notes how the daemon before ended, before anything else is done about it.
pub(crate) fn note_end_before(keeper: &Keeper) -> Option<Before> {
    let item = keeper.take(KEY)?;
    let mut life: Life = serde_json::from_slice(&item.value).ok()?;
    if life.ended.is_none() {
        let at = keeper
            .unattended()
            .map(|gone| now_ms().saturating_sub(millis(gone)));
        life.ended = Some((DaemonEnd::Died, at));
        keep(keeper, &life);
    }
    Some(Before(life))
}

/// The daemon before this one.
pub(crate) struct Before(Life);

/// Lets go of what was kept of VMs and ports that are no more; the rest is this daemon's from now on.
pub(crate) fn take_over(parts: &mut Parts, before: Option<Before>) {
    let Some(keeper) = &parts.keeper else { return };
    for key in keeper.untaken() {
        tracing::info!(key, "nothing goes on with what was kept here");
        // Before the keeper's, which may be the last: to close that may take long.
        drop(keeper.take(&key));
        keeper.drop_item(&key);
    }
    keeper.run();
    let pause_end = now_ms();
    let restarts = before.as_ref().map_or(0, |before| before.0.restarts + 1);
    keep(keeper, &Life::of_now(restarts, None, 0));
    let taken_over = parts.worker.taken_over();
    let Some(Before(life)) = before else { return };
    let Some((ended, at)) = life.ended else {
        return;
    };
    let restart = Restart {
        restarts,
        version_before: life.version,
        ended,
        time: rfc_3339(SystemTime::now()),
        pause_ms: at.map(|at| pause_end.saturating_sub(at)),
        lines: taken_over.lines as u64,
        circuits: taken_over.circuits as u64,
        reset: (taken_over.reset + life.cut) as u64,
    };
    tracing::info!("{restart}");
    let details = EventDetails {
        reason: Some(restart.to_string()),
        ..EventDetails::default()
    };
    parts.events.tell(EventKind::Restarted, details);
    parts.restart = Some(restart);
}

/// Has the log say when the keeper ends.
pub(crate) async fn watch(keeper: Arc<Keeper>) {
    while keeper.lives() {
        tokio::time::sleep(KEEPER_LOOK).await;
    }
    tracing::error!("{}", keeper.ended());
}

/// Leaves everything to the next daemon, as this one was asked to end.
pub(crate) fn leave(keeper: &Keeper, restarts: u64, cut: usize) {
    let ended = Some((DaemonEnd::Stopped, Some(now_ms())));
    keep(keeper, &Life::of_now(restarts, ended, cut));
}

impl Life {
    fn of_now(restarts: u64, ended: Option<(DaemonEnd, Option<u64>)>, cut: usize) -> Life {
        Life {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            restarts,
            ended,
            cut,
        }
    }
}

fn keep(keeper: &Keeper, life: &Life) {
    let written = serde_json::to_vec(life).unwrap_or_default();
    if let Err(error) = keeper.put(KEY, &written, &[]) {
        tracing::warn!(%error, "cannot keep how this daemon fares");
    }
}

fn now_ms() -> u64 {
    let now = clock_gettime(ClockId::Boottime);
    millis(Duration::try_from(now).unwrap_or_default())
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}
