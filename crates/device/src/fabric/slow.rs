//! What follows when calls on a socket of the host are slow: see [`crate::slow`].

use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, OwnedFd};

use policy::LineId;
use rustix::net::{AddressFamily, SocketAddrAny, getpeername, getsockname, sockopt};
use vsock::{CircuitId, Event, Reason};
use wire::connect;

use super::{Fabric, PublishedCall, find_circuit, peek_circuit};
use crate::caller::{Caller, Who, answer};
use crate::circuit::CircuitIo;
use crate::closer::Order;
use crate::dialer::{Hold, mark};
use crate::line::LineIo;
use crate::slow::{Overrun, Party};

/// Circuits of peers that are too slow that are cut in one turn.
const CUTS_PER_TURN: usize = 64;

impl CircuitIo {
    fn is_with(&self, party: Party) -> bool {
        let host = self.host.as_ref().and_then(|host| host.party);
        let relay = self
            .relay
            .as_ref()
            .map_or([None; 2], |relay| relay.parties());
        [host, self.callee, relay[0], relay[1]].contains(&Some(party))
    }
}

impl Fabric {
    /// The daemon's own user. When calls on sockets of its programs, or of root's, are slow, the circuit is cut and no other refused: they could do worse.
    pub fn set_own_user(&mut self, user: Option<u32>) {
        self.slow.set_own_user(user);
    }

    /// Cuts the circuits of those found too slow, the first slice of them now.
    pub(super) fn act_on_overruns(&mut self) {
        if self.slow.has_overrun() {
            self.cut_overruns();
        }
    }

    /// Whether this party gets no circuit now.
    pub(super) fn is_refused(&mut self, party: Option<Party>) -> bool {
        self.slow.is_barred(party) || self.closer.is_full(party)
    }

    fn list_overruns(&mut self) {
        while let Some(overrun) = self.slow.take_overrun() {
            if overrun.all || overrun.circuit.is_some() {
                self.report_slow(&overrun);
            }
            if !overrun.all {
                self.to_be_cut.extend(overrun.circuit);
                continue;
            }
            // Once for each time that a party is barred.
            let circuits = self.circuits.iter().flatten();
            let with = circuits.filter(|circuit| circuit.is_with(overrun.party));
            self.to_be_cut.extend(with.map(|circuit| circuit.id));
        }
    }

    fn report_slow(&self, overrun: &Overrun) {
        let circuit = overrun.circuit.and_then(|id| self.peek_circuit(id));
        let report = circuit.and_then(|circuit| self.switch.circuit(circuit.id));
        let of_circuit = report.and_then(|report| report.callee.line.or(report.caller.line));
        let (party, line) = match overrun.party {
            Party::User(user) => (format!("programs of the user {user}"), of_circuit),
            Party::Vmm(line) => ("the VM's VMM".to_owned(), self.line_of_generation(line)),
            Party::Listener(line, port) => {
                let party = format!("the listener at port {port}");
                (party, self.line_of_generation(line))
            }
            Party::Service(id) => {
                let name = self.switch.service(id).map_or("", |service| &service.name);
                (format!("the service {name:?}"), of_circuit)
            }
            Party::Published(_) => {
                let name = match circuit.and_then(|circuit| circuit.who.as_ref()) {
                    Some(Who::Published { name, .. }) => name,
                    _ => "",
                };
                let party = format!("callers of the published port {name:?}");
                (party, of_circuit)
            }
        };
        let line = line.and_then(|line| self.lines.get(line.0 as usize)?.as_ref());
        let vm = line.map(|line| line.name.as_str());
        let refused = self.slow.is_barred(Some(overrun.party));
        let reason = Reason::SlowPeer;
        tracing::warn!(vm, party, refused, %reason, "cut short");
    }

    fn line_of_generation(&self, generation: u64) -> Option<LineId> {
        let mut lines = self.lines.iter();
        let is_it = |line: &LineIo| line.generation == generation;
        let (index, _) = lines.find(|(_, line)| line.as_deref().is_some_and(is_it))?;
        Some(LineId(index as u32))
    }

    /// Cuts what is to be cut, a slice at a time.
    pub(super) fn cut_overruns(&mut self) {
        self.list_overruns();
        for _ in 0..CUTS_PER_TURN {
            let Some(circuit) = self.to_be_cut.pop_front() else {
                return;
            };
            let reason = Reason::SlowPeer;
            self.tell(Event::Kill { circuit, reason });
        }
    }

    /// Says a line of the handshake to a program. Returns whether it went out.
    pub(super) fn say(
        &mut self,
        socket: &OwnedFd,
        party: Option<Party>,
        line: &str,
        circuit: Option<CircuitId>,
    ) -> bool {
        self.slow.timed(party, circuit, || answer(socket, line))
    }

    /// The same to the program of a circuit.
    pub(super) fn say_to_host(&mut self, id: CircuitId, line: &str) -> bool {
        let circuit = peek_circuit(&self.circuits, id);
        let Some(host) = circuit.and_then(|circuit| circuit.host.as_ref()) else {
            return false;
        };
        let say = || answer(&host.socket, line);
        self.slow.timed(host.party, Some(id), say)
    }

    /// Refuses a program of a barred user.
    pub(super) fn refuse_user(&mut self, line: LineId, socket: OwnedFd, user: u32) {
        let reason = Reason::SlowPeer;
        let vm = self.line(line).map(|line| line.name.clone());
        tracing::info!(vm, user, %reason, "refused or cut short");
        let words = connect::refused(reason);
        self.close_socket(socket, Some(Party::User(user)), Some(words));
    }

    /// Gives a caller that waits these words and no circuit.
    pub(super) fn dismiss(&mut self, slot: u32, line: &str) {
        if let Some(caller) = self.remove_caller(slot) {
            self.turn_away(caller, line);
        }
    }

    pub(super) fn turn_away(&mut self, caller: Caller, line: &str) {
        let speaks = caller.who.speaks();
        mark(caller.cut.as_ref().filter(|_| !speaks));
        let order = Order {
            socket: caller.socket,
            words: speaks.then(|| line.to_owned()),
            hold: caller.place,
        };
        self.close(order, caller.party);
    }

    /// Closes a socket, behind these words if there are any.
    pub(super) fn close_socket(
        &mut self,
        socket: OwnedFd,
        party: Option<Party>,
        words: Option<String>,
    ) {
        let hold = None;
        let order = Order {
            socket,
            words,
            hold,
        };
        self.close(order, party);
    }

    /// Closes a socket, and drops then what lasts as long.
    pub(super) fn close_held(&mut self, socket: OwnedFd, party: Option<Party>, hold: Option<Hold>) {
        let words = None;
        let order = Order {
            socket,
            words,
            hold,
        };
        self.close(order, party);
    }

    /// Has it done on another thread if it is likely to take long.
    fn close(&mut self, order: Order, party: Option<Party>) {
        match party {
            Some(party) if self.slow.closes_elsewhere(party) => self.closer.close(party, order),
            _ => self.slow.timed(party, None, || order.carry_out()),
        }
    }

    /// Takes what is left of a request out of the socket of a circuit's program.
    pub(super) fn take_host_request(&mut self, id: CircuitId) {
        let circuit = find_circuit(&mut self.circuits, id);
        if let Some(host) = circuit.and_then(|circuit| circuit.host.as_mut()) {
            let party = host.party;
            self.slow.timed(party, Some(id), || host.take_request());
        }
    }
}

/// A caller by a published port. A TCP peer on another host cannot make calls slow, and one in another network namespace of this host can: they
/// look alike, so both are measured.
pub(super) fn party_of_published(call: &PublishedCall) -> Option<Party> {
    if call.peer_is_ours {
        return None;
    }
    match sockopt::socket_domain(&call.socket) {
        Ok(AddressFamily::UNIX) => {
            let user = sys::peer::user(call.socket.as_fd());
            user.ok().map(Party::User)
        }
        _ => Some(Party::published(&call.name, foreign_address(&call.socket))),
    }
}

/// The peer's address, if it is not one of this host, whose programs may have any.
fn foreign_address(socket: &OwnedFd) -> Option<IpAddr> {
    let address = |name: Option<SocketAddrAny>| {
        let address = SocketAddr::try_from(name?).ok()?;
        Some(address.ip().to_canonical())
    };
    let peer = address(getpeername(socket).ok().flatten())?;
    let is_ours = peer.is_loopback() || Some(peer) == address(getsockname(socket).ok());
    (!is_ours).then_some(peer)
}
