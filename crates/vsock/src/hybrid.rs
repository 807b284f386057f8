//! VMs whose VMM has a vsock device of its own and stands between them and us: what is known of them, and their calls.
//!
//! Such a VMM (Firecracker, Cloud Hypervisor, libkrun, vhost-device-vsock) speaks the *hybrid* convention. A program that wants to
//! reach a port of its guest connects to the VMM's UNIX socket and names the port. When the guest dials the host, the VMM
//! connects to the UNIX socket that stands for the port. So a hybrid line has no rings, its guest can dial none but the
//! host, and both directions are sockets of the host's to us. All the rest is as with other VMs: name, identifier, rules, limits.
//!
//! A circuit between a hybrid VM and a guest with rings is one between a program of the host and that guest. One between
//! a hybrid VM and anything else has two sockets of the host's and nothing to decide about once it is set up: they are joined,
//! and the switch learns only how much has passed, and when it is over.

use std::collections::BTreeSet;

use policy::{Address, Callee, Caller, LineId, OWN_PORTS, Policy, Rule, Time, Verdict};
use wire::vsock::{HOST_CID, SocketType};

use crate::end::{End, EndKey, Party};
use crate::event::Action;
use crate::operator::Route;
use crate::switch::Actions;
use crate::{AddLineError, CircuitId, Limits, Side, Switch};

/// The most ports that one hybrid line offers: each is a socket that is listened on.
pub const MAX_OFFERED_PORTS: usize = 1024;

/// The ports of the host that are worth listening at for a VM.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OfferedPorts {
    /// The ports, [`MAX_OFFERED_PORTS`] at most.
    pub ports: BTreeSet<u32>,
    /// Whether there are more: too many, or a rule that redirects whatever port is called.
    pub incomplete: bool,
}

/// A circuit as the guest of a hybrid line sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HybridView {
    /// The guest's line.
    pub line: LineId,
    /// Its own context identifier and port. The port of one that calls is made up, as the convention has none.
    pub own: (u32, u32),
    /// Those of its peer.
    pub peer: (u32, u32),
}

impl OfferedPorts {
    /// Those for a VM, if these are the ports of its domain's services.
    pub fn to(
        caller: &Caller<'_>,
        services: impl IntoIterator<Item = u32>,
        policy: &Policy,
    ) -> OfferedPorts {
        let mut offered = OfferedPorts::default();
        OWN_PORTS
            .into_iter()
            // A caller of one has to show a source port, which a VMM does not give.
            .filter(|port| *port != wire::switchboard::link::PORT)
            .chain(services)
            .for_each(|port| {
                offered.add(port);
            });
        let rules = policy.rules().iter();
        for rule in rules.filter(|rule| redirects_listeners(rule, caller)) {
            // Without ports a rule is about each of them.
            offered.incomplete |= rule.ports.is_empty();
            rule.ports
                .iter()
                .flat_map(|range| range.clone())
                .all(|port| offered.add(port));
        }
        offered
    }

    /// Returns whether there was room.
    fn add(&mut self, port: u32) -> bool {
        let room = self.ports.len() < MAX_OFFERED_PORTS;
        if room {
            self.ports.insert(port);
        } else if !self.ports.contains(&port) {
            self.incomplete = true;
        }
        room
    }
}

impl Switch {
    /// Adds a line for a VM whose VMM has a vsock device of its own. It is always up, takes streams only, and has
    /// [`Event::HybridDial`](crate::Event::HybridDial) instead of packets.
    pub fn add_hybrid_line(
        &mut self,
        address: Address,
        limits: Limits,
    ) -> Result<LineId, AddLineError> {
        self.enter_line(address, limits, true)
    }

    /// Adds a line for a VM whose guest is reached by streams of another kind than vsock's, such as those over a serial port. It is a hybrid
    /// line without a VMM that decides anything: its guest can be called between [`Event::LineUp`](crate::Event::LineUp) and
    /// [`Event::LineDown`](crate::Event::LineDown), and reaches listeners of the host by us alone.
    pub fn add_serial_line(
        &mut self,
        address: Address,
        limits: Limits,
    ) -> Result<LineId, AddLineError> {
        let id = self.enter_line(address, limits, true)?;
        if let Some(line) = self.lines.get_mut(id.0 as usize) {
            line.serial = true;
            line.up = false;
        }
        Ok(id)
    }

    /// The guest of a serial line has come or gone. Its circuits are the carrier's to end: it knows which of them have all that they
    /// will ever have. Of other hybrid lines nothing is known, and they are taken to be up.
    pub(crate) fn guest_seen(&mut self, line: LineId, up: bool) {
        if let Some(line) = self.line_mut(line).filter(|line| line.serial) {
            line.up = up;
        }
    }

    pub(crate) fn is_hybrid(&self, line: LineId) -> bool {
        self.lines
            .get(line.0 as usize)
            .is_some_and(|line| line.hybrid)
    }

    /// How the guest at this side of a circuit sees it, if its line is a hybrid one.
    pub fn hybrid_view(&self, id: CircuitId, side: Side) -> Option<HybridView> {
        let circuit = &self.circuits[self.find(id)?];
        let end = circuit.end(side);
        match end.party {
            Party::Hybrid { line, cid } => Some(HybridView {
                line,
                own: (cid, end.port),
                peer: circuit.end(side.other()).seen,
            }),
            Party::Guest { .. } | Party::Host | Party::Departed { .. } => None,
        }
    }

    /// The ports of the host that calls of this VM can lead anywhere at: those of the daemon itself, of the services of its
    /// domain, and of rules that redirect what it calls of the host. Whether a call is put through is decided when it is made.
    pub fn offered_ports(&self, line: LineId) -> OfferedPorts {
        let Some(line) = self.lines.get(line.0 as usize) else {
            return OfferedPorts::default();
        };
        let services = self.directory.service_ports(line.domain);
        OfferedPorts::to(&line.address.as_caller(), services, &self.policy)
    }

    /// A VMM calls for its guest.
    pub(crate) fn hybrid_dial(
        &mut self,
        now: Time,
        line: LineId,
        port: u32,
        token: u64,
        actions: &mut Actions,
    ) {
        if !self.is_hybrid(line) {
            let reason = crate::Reason::UnknownCid;
            return actions.push(Action::HostDialRefused { token, reason });
        }
        // Its own port is unknown: the convention has none.
        let key = EndKey {
            line,
            port: 0,
            peer_cid: HOST_CID,
            peer_port: port,
        };
        let route = match self.route_from_guest(now, line, &key, SocketType::Stream, actions) {
            Ok(route) => route,
            Err(refusal) => {
                let reason = refusal.reason;
                self.refused(line, &key, refusal, actions);
                self.count_refusal(line, (0, HOST_CID, port), reason, actions);
                return actions.push(Action::HostDialRefused { token, reason });
            }
        };
        let Route {
            callee,
            caller_cid,
            caller_port,
            call,
        } = route;
        let cid = self.lines[line.0 as usize].address.cid;
        let mut caller = End::new(Party::Hybrid { line, cid }, caller_port);
        caller.seen.0 = caller_cid;
        let index = self.open(now, SocketType::Stream, caller, callee, call);
        actions.push(Action::HostDialing {
            token,
            circuit: self.circuits[index].id,
        });
        self.ring_callee(index, line, 0, actions);
    }

    /// A port for a hybrid VM that calls, such that the callee does not know a circuit with it. `theirs` is how the callee
    /// would know the circuit, but for that port.
    pub(crate) fn free_port(&mut self, from: LineId, theirs: &EndKey) -> u32 {
        let circuits = self.lines[theirs.line.0 as usize].circuits;
        let mut theirs = *theirs;
        // Each circuit has one port, so one of so many is free.
        for _ in 0..=circuits {
            theirs.peer_port = self.lines[from.0 as usize].take_port();
            if !self.by_end.contains_key(&theirs) {
                break;
            }
        }
        theirs.peer_port
    }

    /// Bytes have passed between two joined sockets. Returns whether more may; if not, [`Action::RelayOn`] says when.
    pub fn relayed(&mut self, now: Time, id: CircuitId, from: Side, len: u32) -> bool {
        let Some(index) = self.find(id) else {
            return false;
        };
        let circuit = &self.circuits[index];
        let owner = |side: Side| circuit.end(side).owner();
        let (source, destination) = (owner(from), owner(from.other()));
        let rule = circuit.call.rule;
        if let Some(line) = source.and_then(|line| self.line_mut(line)) {
            line.counters.bytes_from_guest += u64::from(len);
        }
        if let Some(line) = destination.and_then(|line| self.line_mut(line)) {
            line.counters.bytes_to_guest += u64::from(len);
        }
        self.circuits[index].passed[from.index()] += u64::from(len);
        if let Some(used) = self.used(rule) {
            used.charge(now, len);
        }
        !self.is_throttled(now, index)
    }

    /// Two joined sockets have no more to say to each other.
    pub(crate) fn relay_ended(&mut self, id: CircuitId) {
        let Some(index) = self.find(id) else { return };
        let circuit = &mut self.circuits[index];
        if !circuit.is_relayed() || !circuit.answered {
            return;
        }
        for end in &mut circuit.ends {
            end.gone = true;
        }
        circuit.untaken = true;
    }
}

/// Whether a rule sends elsewhere what this VM calls of the host and no one offers there.
fn redirects_listeners(rule: &Rule, caller: &Caller<'_>) -> bool {
    matches!(rule.verdict, Verdict::Redirect(_))
        && rule.from.iter().any(|pattern| pattern.covers(caller))
        && rule
            .to
            .iter()
            .any(|pattern| pattern.covers(&Callee::Listener))
}
