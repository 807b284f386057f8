//! What the switchboard asks of the data plane.

use device::{CircuitFilter, CircuitSnapshot, ProgramCall};
use vsock::{CircuitId, Side};

/// The data plane, as far as the switchboard needs it. Its methods may be called from any thread, and wait for the end of the turn it is at.
pub trait DataPlane: Send + Sync + 'static {
    /// The circuit that a VM's guest knows by its own port and its peer's CID and port, and the VM's side of it.
    fn find_circuit(
        &self,
        vm: &str,
        port: u32,
        peer: (u32, u32),
    ) -> Option<(CircuitSnapshot, Side)>;

    /// A circuit, as long as it is there.
    fn show_circuit(&self, id: CircuitId) -> Option<CircuitSnapshot>;

    /// Up to `limit` circuits that pass the filter, and how many more there are.
    fn list_circuits(&self, filter: CircuitFilter, limit: usize) -> (Vec<CircuitSnapshot>, usize);

    /// Cuts a circuit short. Returns whether it was there.
    fn end_circuit(&self, id: CircuitId) -> bool;

    /// Calls a guest for a program of the host. Does not wait for its answer.
    fn dial_program(&self, call: ProgramCall);

    /// Whether calls of guests to a port of the host, of one VM or of all, are for the switchboard.
    fn set_listening(&self, port: u32, vm: Option<String>, listens: bool);

    /// The full name of the VM that a host's program means: by its name, an alias, or its CID in the default domain.
    fn vm_named(&self, name: &str) -> Option<String>;
}
