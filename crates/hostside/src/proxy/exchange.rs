//! What the proxy asks of the data plane.

use std::sync::Arc;

use device::PublishedCall;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Calls of one published port that wait for the data plane. Its next callers stay in the listener's backlog meanwhile.
pub const MAX_DIALS_OF_PORT: usize = 16;

/// Such calls of all published ports together.
pub const MAX_DIALS: usize = 64;

/// The place of one such call, until it is dropped.
#[derive(Debug)]
pub struct DialPlace {
    _of_port: Option<OwnedSemaphorePermit>,
    _of_all: Option<OwnedSemaphorePermit>,
}

impl DialPlace {
    /// Waits for a place. The port's own comes first: of each port only so many wait for those of all.
    pub(crate) async fn take(of_port: &Arc<Semaphore>, of_all: &Arc<Semaphore>) -> DialPlace {
        // They are never closed.
        DialPlace {
            _of_port: of_port.clone().acquire_owned().await.ok(),
            _of_all: of_all.clone().acquire_owned().await.ok(),
        }
    }
}

/// The data plane, as far as the proxy needs it. Its methods may be called from any thread and return soon.
pub trait Exchange: Send + Sync + 'static {
    /// Calls a guest for a caller of a published port. Does not wait for its answer. Keeps the place until the guest has been called, or the socket is closed.
    fn dial_guest(&self, call: PublishedCall, place: DialPlace);

    /// By which CID a VM (`vm`, a full name) reaches another: `db` of its own domain or `blue/db` of another. Nothing if no rule lets
    /// it call that one.
    fn resolve(&self, vm: &str, name: &str) -> Option<u32>;

    /// The port of a service of a VM's own domain. Nothing if no rule lets it call that one.
    fn resolve_service(&self, vm: &str, name: &str) -> Option<u32>;
}
