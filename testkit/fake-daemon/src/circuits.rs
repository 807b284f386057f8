//! No switchboard.

use std::io;
use std::os::unix::net::UnixListener;
use std::sync::{Mutex, MutexGuard, PoisonError};

use device::CircuitFilter;
use vsock::CircuitId;

use windows::switchboard::pool::WindowStatus;
use windows::switchboard::{CircuitList, Circuits, SwitchboardReport};

/// Circuits that are what the test says.
#[derive(Debug, Default)]
pub struct FakeCircuits {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    list: CircuitList,
    windows: Vec<WindowStatus>,
    filters: Vec<CircuitFilter>,
    listener: Option<UnixListener>,
    events: Vec<String>,
}

impl FakeCircuits {
    /// Has these circuits and windows.
    pub fn set(&self, list: CircuitList, windows: Vec<WindowStatus>) {
        let mut state = self.state();
        state.list = list;
        state.windows = windows;
    }

    /// What was asked for.
    pub fn filters(&self) -> Vec<CircuitFilter> {
        self.state().filters.clone()
    }

    /// What was sent, in words.
    pub fn events(&self) -> Vec<String> {
        self.state().events.clone()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Circuits for FakeCircuits {
    fn serve(&self, listener: UnixListener) -> io::Result<()> {
        // Kept, so that it goes on to listen.
        self.state().listener = Some(listener);
        Ok(())
    }

    fn list(&self, filter: &CircuitFilter) -> CircuitList {
        let mut state = self.state();
        state.filters.push(filter.clone());
        state.list.clone()
    }

    fn end(&self, id: CircuitId) -> bool {
        let mut state = self.state();
        let circuits = &mut state.list.circuits;
        let before = circuits.len();
        circuits.retain(|listed| listed.circuit.id != id);
        circuits.len() < before
    }

    fn windows(&self) -> Vec<WindowStatus> {
        self.state().windows.clone()
    }

    fn enforce(&self) {
        self.state().events.push("enforce".to_owned());
    }

    fn removed(&self, vm: &str) {
        self.state().events.push(format!("removed {vm}"));
    }

    fn report(&self) -> SwitchboardReport {
        SwitchboardReport::default()
    }

    fn stop(&self) {
        self.state().listener = None;
    }
}
