//! What follows when calls on a socket of the host are slow: see [`crate::slow`].

use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use policy::LineId;
use rustix::net::{AddressFamily, SocketAddrAny, getpeername, getsockname, sockopt};
use vsock::{CircuitId, Event, Reason};
use wire::connect;

use super::{Fabric, PublishedCall};
use crate::caller::{Caller, Who, answer};
use crate::circuit::CircuitIo;
use crate::closer::Order;
use crate::dialer::{Hold, mark};
use crate::slow::{Overrun, Party};

/// Circuits of peers that are too slow that are cut in one turn.
const CUTS_PER_TURN: usize = 64;

/// How long cuts rest while the closer is full.
const CUTS_REST: Duration = Duration::from_millis(10);

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

    /// Cuts the circuits of those who have been found too slow, the first slice of them now.
    pub(super) fn act_on_overruns(&mut self) {
        if self.slow.has_overrun() {
            self.cut_overruns();
        }
    }

    /// When there is something to cut.
    pub(super) fn next_cut_at(&self) -> Option<Duration> {
        match (self.to_be_cut.is_empty(), self.closer.is_full()) {
            (true, _) => None,
            (false, true) => Some(self.now + CUTS_REST),
            (false, false) => Some(self.now),
        }
    }

    fn list_overruns(&mut self) {
        while let Some(overrun) = self.slow.take_overrun() {
            self.report_slow(&overrun);
            let circuits = self.circuits.iter_mut().flatten();
            let with = circuits.filter(|circuit| match overrun.barred {
                true => circuit.is_with(overrun.party),
                false => Some(circuit.id) == overrun.circuit,
            });
            let new = with.filter_map(|circuit| {
                let known = std::mem::replace(&mut circuit.is_to_be_cut, true);
                (!known).then_some(circuit.id)
            });
            self.to_be_cut.extend(new);
        }
    }

    fn report_slow(&self, overrun: &Overrun) {
        let mut circuits = self.circuits.iter().flatten();
        let circuit = circuits.find(|circuit| match overrun.circuit {
            Some(id) => circuit.id == id,
            None => circuit.is_with(overrun.party),
        });
        let report = circuit.and_then(|circuit| self.switch.circuit(circuit.id));
        let of_circuit = report.and_then(|report| report.callee.line.or(report.caller.line));
        let (party, line) = match overrun.party {
            Party::User(user) => (format!("programs of the user {user}"), of_circuit),
            Party::Vmm(line) => ("the VM's VMM".to_owned(), Some(line)),
            Party::Listener(line, port) => (format!("the listener at port {port}"), Some(line)),
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
        let reason = Reason::SlowPeer;
        tracing::warn!(vm, party, refused = overrun.barred, %reason, "cut short");
    }

    /// Cuts what is to be cut, a slice at a time, as far as the closer takes it.
    pub(super) fn cut_overruns(&mut self) {
        self.list_overruns();
        for _ in 0..CUTS_PER_TURN {
            if self.closer.is_full() {
                return;
            }
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
        self.slow.before(party);
        let said = answer(socket, line);
        self.slow.after(party, 0, circuit);
        said
    }

    /// The same to the program of a circuit.
    pub(super) fn say_to_host(&mut self, id: CircuitId, line: &str) -> bool {
        let circuit = self.circuits.get(id.index as usize);
        let host = circuit.and_then(|circuit| circuit.as_ref()?.host.as_ref());
        let Some(host) = host else { return false };
        self.slow.before(host.party);
        let said = answer(&host.socket, line);
        self.slow.after(host.party, 0, Some(id));
        said
    }

    /// Refuses a program of a user who is barred.
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
        let words = speaks.then(|| line.to_owned());
        self.close_socket(caller.socket, caller.party, words);
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
    fn close(&mut self, mut order: Order, party: Option<Party>) {
        if self.slow.is_in_debt(party) {
            match self.closer.close(order) {
                Ok(()) => return,
                Err(back) => order = back,
            }
        }
        self.slow.before(party);
        order.carry_out();
        self.slow.after(party, 0, None);
    }

    /// Takes what is left of a request out of the socket of a circuit's program.
    pub(super) fn take_host_request(&mut self, id: CircuitId) {
        let circuit = self.circuits.get_mut(id.index as usize);
        let circuit = circuit.and_then(|circuit| circuit.as_mut().filter(|it| it.id == id));
        if let Some(host) = circuit.and_then(|circuit| circuit.host.as_mut()) {
            self.slow.before(host.party);
            host.take_request();
            self.slow.after(host.party, 0, Some(id));
        }
    }
}

/// Who calls by a published port, as far as calls on the socket can be made slow: a peer on another host cannot.
pub(super) fn party_of_published(call: &PublishedCall) -> Option<Party> {
    if call.peer_is_ours {
        return None;
    }
    match sockopt::socket_domain(&call.socket) {
        Ok(AddressFamily::UNIX) => {
            let user = sys::peer::user(call.socket.as_fd());
            user.ok().map(Party::User)
        }
        _ => is_of_this_host(&call.socket).then(|| Party::published(&call.name)),
    }
}

fn is_of_this_host(socket: &OwnedFd) -> bool {
    let address = |name: Option<SocketAddrAny>| {
        let address = SocketAddr::try_from(name?).ok()?;
        Some(address.ip().to_canonical())
    };
    let peer = address(getpeername(socket).ok().flatten());
    peer.is_some_and(|peer| peer.is_loopback()) || peer == address(getsockname(socket).ok())
}
