//! Guests' agents: their own calls, and the proof to them that a call comes from the host.
//!
//! An agent does for its caller what root does. Where its line does not show callers, it has given the daemon a secret
//! ([`wire::agent::Secret`]), which goes in front of what a program of the host says to it, and in front of nothing else. The program
//! itself neither sees nor needs it.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;

use policy::LineId;
use rustix::net::{SendFlags, send};
use vsock::{CircuitId, Event, Reason};
use wire::agent::{CONNECTION_CHANNEL, Frame};

use super::Fabric;
use crate::dialer::Connected;
use crate::line::AgentSecret;

/// A guest's agent has called in.
#[derive(Debug)]
pub struct Arrival {
    /// The VM it calls from.
    pub vm: String,
    /// The port it calls from: below 1024 the guest's kernel vouches for a privileged program. Of lines without rings it is 0.
    pub source_port: u32,
    /// How the VM is attached.
    pub attachment: Attachment,
    /// The call.
    pub stream: UnixStream,
}

/// What stands between the daemon and a guest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Attachment {
    /// Rings. The guest sees callers, and the host from which port.
    Rings,
    /// A serial port, of which the agent is the only user.
    Serial,
    /// A VMM with a vsock device of its own. Every program of the guest can call, and neither side sees callers.
    Hybrid {
        /// The VMM's socket.
        vmm: PathBuf,
    },
}

impl Fabric {
    /// What goes in front of calls of programs to this VM's agent from now on.
    pub fn set_agent_secret(&mut self, vm: &str, secret: AgentSecret) {
        if let Some(line) = self.line_named(vm).and_then(|id| self.line(id)) {
            line.agent_secret = secret;
        }
    }

    /// Notes what is to go in front of a call over a line without rings. Only a program of the host, or the daemon, that called this very VM is
    /// vouched for: a call that got to the agent's port in any other way has no proof.
    pub(super) fn vouch(
        &mut self,
        circuit: CircuitId,
        line: LineId,
        port: u32,
    ) -> Result<(), Reason> {
        if port != self.agent_port || !self.switch.is_hosts_direct_call(circuit) {
            return Ok(());
        }
        let secret = match self.line(line).map(|line| &line.agent_secret) {
            Some(AgentSecret::Given(secret)) => secret.clone(),
            Some(AgentSecret::NotGiven) => return Err(Reason::AgentTooOld),
            Some(AgentSecret::Absent) | None => return Err(Reason::AgentAway),
        };
        if let Some(circuit) = self.circuit(circuit) {
            circuit.proof = Some(secret);
        }
        Ok(())
    }

    /// Sends the proof, if there is one, to the guest that has answered. Nothing was sent to it before, so that its socket has room; if it
    /// has not, the call fails.
    pub(super) fn prove(&mut self, id: CircuitId, callee: &OwnedFd) -> Result<(), Reason> {
        let Some(secret) = self.circuit(id).and_then(|circuit| circuit.proof.take()) else {
            return Ok(());
        };
        let frame = Frame::Secret(secret).to_bytes(CONNECTION_CHANNEL);
        let party = self.circuit(id).and_then(|circuit| circuit.callee);
        let sent = self.slow.timed(party, Some(id), || {
            frame.is_ok_and(|bytes| {
                let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
                send(callee, &bytes, flags) == Ok(bytes.len())
            })
        });
        match sent {
            true => Ok(()),
            false => Err(Reason::HostFailed),
        }
    }

    /// An agent calls.
    pub(super) fn deliver_arrival(&mut self, circuit: CircuitId, id: LineId, source_port: u32) {
        let refused = |reason| Event::HostDialed {
            circuit,
            result: Err(reason),
        };
        let Some(line) = self.line(id) else {
            return self.tell(refused(Reason::HostFailed));
        };
        let attachment = match (&line.vmm, &line.carrier) {
            (Some(vmm), _) => Attachment::Hybrid { vmm: vmm.clone() },
            (None, Some(_)) => Attachment::Serial,
            (None, None) => Attachment::Rings,
        };
        let vm = line.name.clone();
        let Ok((ours, theirs)) = UnixStream::pair() else {
            return self.tell(refused(Reason::HostFailed));
        };
        let prepared = ours
            .set_nonblocking(true)
            .and_then(|()| theirs.set_nonblocking(true));
        let arrival = Arrival {
            vm,
            source_port,
            attachment,
            stream: theirs,
        };
        if prepared.is_ok() && (self.arrivals)(arrival) {
            self.host_reached(circuit, Connected::new(ours.into(), None));
        } else {
            self.tell(refused(Reason::NoListener));
        }
    }
}
