//! What is asked of circuits and windows.

use std::sync::Arc;

use api::{CircuitInfo, CircuitKind, CircuitPhase, CircuitsInfo, WindowInfo, WindowsInfo};
use device::CircuitFilter;
use vsock::CircuitState;
use wire::vsock::SocketType;

use super::{Control, known_vm};
use crate::control_error::ControlError;
use crate::events::circuit_end;
use windows::switchboard::pool::{Owners, WindowStatus};
use windows::switchboard::{CircuitName, ListedCircuit, SwitchboardReport};

impl Control {
    /// Circuits, of one VM by its full name or an alias, or of all; called at one port, or at any. Waits for the worker.
    ///
    /// # Errors
    /// [`ControlError::Unknown`] when there is no VM of this name.
    pub fn circuits(
        &self,
        vm: Option<&str>,
        port: Option<u32>,
    ) -> Result<CircuitsInfo, ControlError> {
        let vm = match vm {
            Some(name) => Some(known_vm(&self.in_force().book.plan, name)?.full_name()),
            None => None,
        };
        let filter = CircuitFilter { vm, port };
        let listed = self.parts.circuits.list(&filter);
        Ok(CircuitsInfo {
            circuits: listed.circuits.into_iter().map(info).collect(),
            more: listed.more,
        })
    }

    /// Ends a circuit: both ends see a reset, and its window is taken away.
    ///
    /// # Errors
    /// [`ControlError::UnknownCircuit`].
    pub async fn end_circuit(self: &Arc<Self>, name: &str) -> Result<(), ControlError> {
        let unknown = || ControlError::UnknownCircuit {
            id: name.to_owned(),
        };
        let CircuitName(id) = CircuitName::parse(name).ok_or_else(unknown)?;
        match self
            .ask(move |control| control.parts.circuits.end(id))
            .await?
        {
            true => {
                tracing::info!(circuit = name, "ended a circuit");
                Ok(())
            }
            false => Err(unknown()),
        }
    }

    /// All windows. Waits for the switchboard.
    pub fn windows(&self) -> WindowsInfo {
        let windows = self.parts.circuits.windows();
        WindowsInfo {
            windows: windows.into_iter().map(window).collect(),
        }
    }

    /// Figures of the switchboard.
    pub fn switchboard_report(&self) -> SwitchboardReport {
        self.parts.circuits.report()
    }
}

fn info(listed: ListedCircuit) -> CircuitInfo {
    let ListedCircuit {
        circuit,
        is_zero_copy,
        is_draining,
    } = listed;
    let (dialled, callee) = (circuit_end(circuit.dialled), circuit_end(circuit.callee));
    CircuitInfo {
        id: CircuitName(circuit.id).to_string(),
        kind: match is_zero_copy {
            true => CircuitKind::ZeroCopy,
            false => CircuitKind::Stream,
        },
        seqpacket: circuit.socket_type == SocketType::SeqPacket,
        state: match circuit.state {
            _ if is_draining => CircuitPhase::Draining,
            CircuitState::Dialling => CircuitPhase::Dialling,
            CircuitState::Open => CircuitPhase::Open,
            CircuitState::Closing => CircuitPhase::Closing,
        },
        from: circuit_end(circuit.caller),
        reached: (callee != dialled).then_some(callee),
        to: dialled,
        rule: circuit.rule,
        age_ms: (!is_draining).then_some(circuit.age.as_millis() as u64),
        bytes_from_caller: circuit.bytes[0],
        bytes_to_caller: circuit.bytes[1],
        queued_from_caller: u64::from(circuit.queued[0]),
        queued_to_caller: u64::from(circuit.queued[1]),
        credit_from_caller: u64::from(circuit.credit[0]),
        credit_to_caller: u64::from(circuit.credit[1]),
    }
}

fn window(status: WindowStatus) -> WindowInfo {
    let (between, uid) = match status.owners {
        Owners::Host { vm, uid } => (["host".to_owned(), vm], uid),
        Owners::Vms { a, b } => ([a, b], None),
    };
    WindowInfo {
        uuid: status.uuid.to_string(),
        between,
        uid,
        size: status.len,
        state: status.state.as_str().to_owned(),
        generation: status.generation,
    }
}
