//! What the device does for the switch.

use vsock::{Action, CircuitId, Event, Side};
use wire::vsock::SocketType;

use super::World;

/// What the device knows of a circuit with a program of the host.
#[derive(Debug, Clone, Copy)]
pub(super) struct HostCircuit {
    pub(super) socket_type: SocketType,
    pub(super) side: Side,
    /// The device has been asked to dial and has not said what came of it.
    pub(super) dialling: bool,
    /// Its socket is there.
    pub(super) open: bool,
    /// The program has sent its last byte, or takes no more.
    pub(super) finished: bool,
    pub(super) refused: bool,
    /// The program's socket was shut for writing on our side.
    pub(super) told_end: bool,
}

impl World {
    pub(super) fn carry_out(&mut self, actions: &[Action], cause: Event) {
        for action in actions {
            if let Some(circuit) = circuit_of(action) {
                assert!(
                    !self.released.contains(&circuit),
                    "{action:?} names a circuit that is over"
                );
            }
            self.act(*action, cause);
        }
        self.released.clear();
    }

    fn act(&mut self, action: Action, cause: Event) {
        match action {
            Action::Forward { circuit, from } => {
                let Event::Packet { header, .. } = cause else {
                    panic!("there is no packet to forward");
                };
                assert!(header.len > 0);
                *self.kept.entry((circuit, from)).or_default() += u64::from(header.len);
            }
            Action::DialHost(call) => {
                self.new_host(call.circuit, call.socket_type, Side::Callee);
            }
            Action::HostDialing { circuit, .. } => {
                let Event::HostDial { socket_type, .. } = cause else {
                    panic!("no call was made");
                };
                self.new_host(circuit, socket_type, Side::Caller);
            }
            Action::HostAccepted { circuit, .. } => {
                let host = self.hosts.get_mut(&circuit).expect("it is being dialled");
                assert!(!host.open, "accepted twice");
                host.open = true;
            }
            Action::HostShutdown {
                circuit,
                direction: vsock::Direction::Write,
            } => {
                let host = self.hosts.get_mut(&circuit).expect("its socket is there");
                assert!(!host.told_end, "the end is reported once");
                host.told_end = true;
                let kept = self.kept.get(&(circuit, host.side.other()));
                assert_eq!(
                    kept.copied().unwrap_or(0),
                    0,
                    "an end of data before the last byte"
                );
            }
            Action::HostRejected { circuit, .. } | Action::HostClose { circuit, .. } => {
                let host = self.hosts.remove(&circuit);
                assert!(host.is_some(), "{action:?}: there is no socket");
                if matches!(action, Action::HostClose { reset: false, .. }) {
                    self.untaken.insert(circuit);
                }
            }
            Action::Discard { circuit, from } => {
                self.kept.remove(&(circuit, from));
            }
            Action::Released { circuit } => {
                self.hosts.remove(&circuit);
                self.untaken.remove(&circuit);
                self.kept.retain(|(id, _), _| *id != circuit);
                self.released.insert(circuit);
                self.forget_call(circuit);
            }
            Action::HostShutdown { .. }
            | Action::HostDialRefused { .. }
            | Action::Wake { .. }
            | Action::Report { .. } => {}
            Action::DialHybrid { .. } | Action::Relay { .. } | Action::RelayOn { .. } => {
                unreachable!("no VM here has a VMM with a vsock device of its own")
            }
            Action::Decided(_) => self.note_decision(),
        }
    }

    fn new_host(&mut self, circuit: CircuitId, socket_type: SocketType, side: Side) {
        let host = HostCircuit {
            socket_type,
            side,
            dialling: side == Side::Callee,
            open: false,
            finished: false,
            refused: false,
            told_end: false,
        };
        let before = self.hosts.insert(circuit, host);
        assert!(before.is_none(), "{circuit:?} is dialled twice");
    }
}

fn circuit_of(action: &Action) -> Option<CircuitId> {
    match action {
        Action::Forward { circuit, .. }
        | Action::DialHost(vsock::HostCall { circuit, .. })
        | Action::HostDialing { circuit, .. }
        | Action::HostAccepted { circuit, .. }
        | Action::HostRejected { circuit, .. }
        | Action::HostShutdown { circuit, .. }
        | Action::HostClose { circuit, .. }
        | Action::Discard { circuit, .. }
        | Action::DialHybrid { circuit, .. }
        | Action::Relay { circuit, .. }
        | Action::RelayOn { circuit }
        | Action::Released { circuit } => Some(*circuit),
        Action::HostDialRefused { .. }
        | Action::Wake { .. }
        | Action::Decided(_)
        | Action::Report { .. } => None,
    }
}
