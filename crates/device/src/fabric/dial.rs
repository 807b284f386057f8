//! Programs and services of the host that guests call.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use policy::{Address, LineId};
use vsock::{CircuitId, Event, HostCall, Reason};
use wire::vsock::SocketType;

use super::Fabric;
use super::host::SOCKET_EVENTS;
use super::redial::{Place, Redial};
use crate::caller::reset_on_close;
use crate::connect::{Callee, Dial, dial_at};
use crate::dialer::{Called, Connected, Reply, ServiceCall, mark};
use crate::host_socket::HostSocket;
use crate::line::LineIo;
use crate::reactor::Token;
use crate::slow::Party;
use crate::socket::port_path;

/// How long a guest's dial may wait for room in a listener's backlog: a little less than the two seconds that Linux
/// gives a connect, so that the guest gets the reason and does not just time out.
const DIAL_PATIENCE: Duration = Duration::from_millis(1800);

/// Dials that are tried again in one turn, before everything else has its turn.
const REDIALS_PER_TURN: usize = 64;

/// Answers of dialers that are taken in one turn, before everything else has its turn.
const ANSWERS_PER_TURN: usize = 64;

/// What became of a dial.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Attempt {
    /// It is over, one way or the other.
    Settled,
    /// There was no room.
    Busy,
    /// Another thread looks for the listener.
    Asked,
}

/// What another thread says of a listener that it dials for several circuits, one after another.
pub(super) struct Dialled {
    place: Place,
    /// The circuit for whose sake it was asked.
    asked: CircuitId,
    /// What became of the dial of one. None once all are dialled, unless one found no room: then no more come.
    dialled: Option<(CircuitId, Dial)>,
}

impl Fabric {
    pub(super) fn dial_host(&mut self, call: HostCall) {
        let HostCall {
            circuit,
            line,
            port,
            source_port,
            socket_type,
            service,
            ..
        } = call;
        let called = match service {
            Some(service) => Some(Called::Service(service)),
            None if port == wire::directory::PORT => Some(Called::Directory),
            None if port == wire::switchboard::link::PORT => Some(Called::Switchboard),
            None => None,
        };
        if let Some(called) = called {
            return self.dial_service(call, called);
        }
        if port == self.agent_port && socket_type == SocketType::Stream {
            return self.deliver_arrival(circuit, line, source_port);
        }
        self.dial_listener(call, false);
    }

    /// Dials a listener, behind those that wait for it.
    fn dial_listener(&mut self, call: HostCall, vmm: bool) {
        let redial = Redial {
            call,
            vmm,
            give_up_at: self.now + DIAL_PATIENCE,
        };
        let circuit = call.circuit;
        if self.redials.is_waited_for(redial.place()) {
            return self.redials.push(self.now, redial);
        }
        match self.attempt(redial) {
            Attempt::Settled => {}
            Attempt::Busy => self.redials.push(self.now, redial),
            Attempt::Asked => {
                self.redials.push(self.now, redial);
                self.redials.ask(redial.place(), circuit);
            }
        }
    }

    /// Whether a program of the host listens at this port for calls of this line's guest.
    fn is_listening(&mut self, line: LineId, port: u32) -> bool {
        let Some(listeners) = self.listening.get(&port) else {
            return false;
        };
        let name = self.lines.get(line.0 as usize).and_then(Option::as_ref);
        let name = name.map(|line| line.name.as_str());
        listeners
            .iter()
            .any(|vm| vm.is_none() || vm.as_deref() == name)
    }

    /// Has calls of guests to this port of the host, of one VM by its full name or of all, put through by the dialer, or no longer. What is
    /// offered as a service there stays a service, and a program that listens at the port's path stays before it: the one that may make that path is
    /// nearer to the daemon than a member of its group.
    pub fn set_listening(&mut self, port: u32, vm: Option<String>, listens: bool) {
        let listeners = self.listening.entry(port).or_default();
        match listens {
            true => listeners.insert(vm),
            false => listeners.remove(&vm),
        };
        if listeners.is_empty() {
            self.listening.remove(&port);
        }
    }

    /// Has the VMM of a hybrid line put a call through to its guest; of a serial line, the carrier.
    pub(super) fn dial_hybrid(&mut self, circuit: CircuitId, line: LineId, port: u32) {
        if let Err(reason) = self.vouch(circuit, line, port) {
            return self.tell(Event::HostDialed {
                circuit,
                result: Err(reason),
            });
        }
        if self.line(line).is_some_and(|line| line.carrier.is_some()) {
            return self.dial_by_carrier(circuit, line, port);
        }
        let call = HostCall {
            circuit,
            line,
            port,
            source_port: 0,
            socket_type: SocketType::Stream,
            service: None,
            rule: None,
        };
        self.dial_listener(call, true);
    }

    /// Whose the listener for a port is, or else the VMM of a hybrid line.
    fn party_of_listener(&mut self, line: LineId, port: Option<u32>) -> Option<Party> {
        let generation = self.line(line)?.generation;
        Some(match port {
            Some(port) => Party::Listener(generation, port),
            None => Party::Vmm(generation),
        })
    }

    /// Has the dialer put a call through. Its answer comes later.
    fn dial_service(&mut self, call: HostCall, called: Called) {
        let party = match called {
            Called::Service(id) => Some(Party::Service(id)),
            Called::Listener => self.party_of_listener(call.line, Some(call.port)),
            Called::Directory | Called::Switchboard => None,
        };
        if self.is_refused(party) {
            return self.tell(Event::HostDialed {
                circuit: call.circuit,
                result: Err(Reason::SlowPeer),
            });
        }
        if let Some(circuit) = self.circuit(call.circuit) {
            circuit.callee = party;
        }
        let vm = self
            .switch
            .address(call.line)
            .cloned()
            .unwrap_or_else(|| Address::new("", 0));
        let policy = self.switch.policy();
        let rule = call.rule.and_then(|rule| policy.rule(rule));
        let rule = rule.map(|rule| rule.label.clone());
        let reply = self.reply_to(call.circuit);
        let call = ServiceCall {
            called,
            circuit: call.circuit,
            vm,
            source_port: call.source_port,
            port: call.port,
            rule,
            socket_type: call.socket_type,
            reply,
        };
        match &mut self.dialer {
            Some(dialer) => dialer(call),
            None => call.reply.failed(Reason::NoListener),
        }
    }

    /// The way back to a circuit for the one that puts its call through.
    pub(super) fn reply_to(&mut self, circuit: CircuitId) -> Reply {
        let answers = self.dialled_by.clone();
        let waker = self.reactor.waker();
        let answer = move |answer| {
            // The fabric may have ended, and with it the call.
            let _ = answers.send((circuit, answer));
            waker.wake();
        };
        match self.circuit(circuit) {
            Some(circuit) => Reply::of_circuit(circuit.life(), answer),
            None => Reply::new(answer),
        }
    }

    /// Takes the answers of dialers.
    pub(super) fn take_dialled(&mut self) {
        for _ in 0..ANSWERS_PER_TURN {
            let Ok((circuit, result)) = self.dialled.try_recv() else {
                return;
            };
            match result {
                Ok(connected) => {
                    reset_on_close(&connected.socket);
                    self.host_reached(circuit, connected);
                }
                Err(reason) => self.tell(Event::HostDialed {
                    circuit,
                    result: Err(reason),
                }),
            }
        }
        // There may be more, for the next turn.
        self.mailbox.waker.wake();
    }

    /// Dials a listener.
    fn attempt(&mut self, redial: Redial) -> Attempt {
        let call = redial.call;
        let circuit = call.circuit;
        let party = self.party_of_listener(call.line, (!redial.vmm).then_some(call.port));
        if self.is_refused(party) {
            self.tell(Event::HostDialed {
                circuit,
                result: Err(Reason::SlowPeer),
            });
            return Attempt::Settled;
        }
        let Some(line) = self.line(call.line) else {
            return Attempt::Settled;
        };
        let path = match redial.vmm {
            true => line.vmm.clone().unwrap_or_default(),
            false => port_path(&line.host_path, call.port),
        };
        let vm = line.name.clone();
        let own = match redial.vmm || line.is_host_path_aside() {
            true => None,
            false => line.place_of_program(call.port),
        };
        if let Some(circuit) = self.circuit(circuit) {
            circuit.callee = party;
        }
        if self.closer.is_full(party) {
            return self.settle(redial, Dial::Busy);
        }
        if let Some(own) = own {
            let dialled = self.slow.timed(party, Some(circuit), || {
                dial_at(&own, call.socket_type, &vm)
            });
            if let Some(dialled) = dialled {
                return self.settle(redial, dialled);
            }
        }
        self.ask_aside(redial, path, vm)
    }

    /// Has the line's own thread dial for all waiting for a listener, the first of them being this one.
    fn ask_aside(&mut self, redial: Redial, path: PathBuf, vm: String) -> Attempt {
        let (place, asked) = (redial.place(), redial.call.circuit);
        let mut together = self.redials.waiting_for(place);
        if together.is_empty() {
            together.push(redial);
        }
        let party = self.party_of_listener(place.0, place.1);
        let mut awaited = Vec::with_capacity(together.len());
        for call in together.into_iter().map(|redial| redial.call) {
            if let Some(circuit) = self.circuit(call.circuit) {
                circuit.callee = party;
                let life = Arc::downgrade(circuit.life());
                awaited.push((call.circuit, call.socket_type, life));
            }
        }
        let (answers, waker) = (self.aside.clone(), self.reactor.waker());
        let answer = move |dialled| {
            // The fabric may have ended.
            let _ = answers.send(Dialled {
                place,
                asked,
                dialled,
            });
            waker.wake();
        };
        let job = move || {
            let mut callee = Callee::at(path, vm);
            // A caller that has given up needs no socket.
            for (circuit, socket_type, _) in awaited
                .into_iter()
                .filter(|(_, _, life)| life.strong_count() > 0)
            {
                let dialled = callee.dial(socket_type);
                let is_full = matches!(dialled, Dial::Busy);
                answer(Some((circuit, dialled)));
                if is_full {
                    return;
                }
            }
            answer(None);
        };
        match self.line(place.0).map(LineIo::aside_thread) {
            Some(Ok(aside)) => aside.push(job),
            _ => return self.settle(redial, Dial::Failed(Reason::HostFailed)),
        }
        Attempt::Asked
    }

    /// Takes the sockets that the lines' [own threads](crate::aside) have connected.
    pub(super) fn take_aside(&mut self) {
        for _ in 0..ANSWERS_PER_TURN {
            let Ok(found) = self.dialled_aside.try_recv() else {
                return;
            };
            if matches!(found.dialled, None | Some((_, Dial::Busy))) {
                self.redials.answered(self.now, found.place, found.asked);
            }
            let Some((circuit, dialled)) = found.dialled else {
                continue;
            };
            match (self.redials.waiting(circuit), dialled) {
                (Some(redial), dialled) => {
                    let attempt = self.settle(redial, dialled);
                    self.move_on(redial, attempt);
                }
                (None, Dial::Reached(socket)) => {
                    let party = self.party_of_listener(found.place.0, found.place.1);
                    self.close_socket(socket, party, None);
                }
                (None, Dial::Busy | Dial::Failed(_)) => {}
            }
        }
        // There may be more, for the next turn.
        self.mailbox.waker.wake();
    }

    /// Does what follows from an attempt. It is not settled when there was no room.
    fn settle(&mut self, redial: Redial, dialled: Dial) -> Attempt {
        let call = redial.call;
        let circuit = call.circuit;
        let reason = match dialled {
            Dial::Reached(socket) if redial.vmm => {
                self.ask_vmm(circuit, socket, call.port);
                return Attempt::Settled;
            }
            Dial::Reached(socket) => {
                self.host_reached(circuit, Connected::new(socket, None));
                return Attempt::Settled;
            }
            Dial::Failed(Reason::NoListener) if redial.vmm => Reason::NotRunning,
            Dial::Failed(Reason::NoListener) if self.is_listening(call.line, call.port) => {
                self.dial_service(call, Called::Listener);
                return Attempt::Settled;
            }
            Dial::Failed(reason) => reason,
            Dial::Busy if self.now < redial.give_up_at => return Attempt::Busy,
            Dial::Busy => Reason::BacklogFull,
        };
        self.tell(Event::HostDialed {
            circuit,
            result: Err(reason),
        });
        Attempt::Settled
    }

    pub(super) fn redial(&mut self) {
        let now = self.now;
        for _ in 0..REDIALS_PER_TURN {
            let Some(redial) = self.redials.due(now) else {
                return;
            };
            let attempt = match self.redials.is_asked(redial.place()) {
                true => self.settle(redial, self.not_found_in_time(redial)),
                false => self.attempt(redial),
            };
            self.move_on(redial, attempt);
        }
    }

    fn not_found_in_time(&self, redial: Redial) -> Dial {
        if self.redials.was_full(redial.place()) {
            return Dial::Busy;
        }
        let line = self.lines.get(redial.call.line.0 as usize);
        let vm = line.and_then(Option::as_ref).map(|line| &line.name);
        let patience = DIAL_PATIENCE.as_millis();
        tracing::warn!(
            vm,
            port = redial.call.port,
            "no listener was found within {patience} ms: its directory is busy"
        );
        Dial::Failed(Reason::HostFailed)
    }

    fn move_on(&mut self, redial: Redial, attempt: Attempt) {
        let (place, circuit) = (redial.place(), redial.call.circuit);
        match attempt {
            Attempt::Busy => self.redials.postpone(self.now, place),
            Attempt::Asked => self.redials.ask(place, circuit),
            Attempt::Settled => {
                if self.now < redial.give_up_at {
                    self.redials.found_room(place);
                }
                self.redials.remove(circuit);
            }
        }
    }

    fn close_connected(&mut self, connected: Connected) {
        mark(connected.cut.as_ref());
        self.close_held(connected.socket, connected.party, connected.hold);
    }

    pub(super) fn host_reached(&mut self, id: CircuitId, connected: Connected) {
        let mut connected = connected;
        if let Some(circuit) = self.circuit(id) {
            if connected.peer_is_ours {
                circuit.callee = None;
            }
            connected.party = circuit.callee;
        }
        if let Err(reason) = self.prove(id, &connected.socket) {
            self.close_connected(connected);
            return self.tell(Event::HostDialed {
                circuit: id,
                result: Err(reason),
            });
        }
        let Some(circuit) = self.circuit(id) else {
            return self.close_connected(connected);
        };
        if circuit.who.is_some() {
            // The caller is a socket too: the two wait to be joined.
            circuit.answered_by = Some(connected);
            return self.tell(Event::HostDialed {
                circuit: id,
                result: Ok(()),
            });
        }
        let mut host = HostSocket::new(connected.socket, connected.party, false);
        host.hold = connected.hold;
        host.cut = connected.cut;
        host.ended_first = connected.ended_first;
        host.request_len = connected.unread;
        circuit.host = Some(host);
        let socket = self.circuits[id.index as usize]
            .as_ref()
            .and_then(|circuit| circuit.host.as_ref());
        let watched = socket.map(|host| {
            self.reactor
                .add(&host.socket, Token::Circuit(id), SOCKET_EVENTS)
        });
        let result = match watched {
            Some(Ok(())) => Ok(()),
            _ => Err(Reason::HostFailed),
        };
        self.tell(Event::HostDialed {
            circuit: id,
            result,
        });
    }
}

#[cfg(test)]
mod tests;
