//! What the proxy asks of the data plane.

use device::PublishedCall;

/// The data plane, as far as the proxy needs it. Its methods may be called from any thread and return soon.
pub trait Exchange: Send + Sync + 'static {
    /// Calls a guest for somebody who has come in by a published port. Does not wait for its answer.
    fn dial_guest(&self, call: PublishedCall);

    /// By which CID a VM (`vm`, a full name) reaches another: `db` of its own domain or `blue/db` of another. Nothing if no rule lets
    /// it call that one.
    fn resolve(&self, vm: &str, name: &str) -> Option<u32>;

    /// The port of a service of a VM's own domain. Nothing if no rule lets it call that one.
    fn resolve_service(&self, vm: &str, name: &str) -> Option<u32>;
}
