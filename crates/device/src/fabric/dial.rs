//! Programs and services of the host that guests call.

use std::time::Duration;

use policy::{Address, LineId};
use vsock::{CircuitId, Event, HostCall, Reason};
use wire::vsock::SocketType;

use super::Fabric;
use super::host::SOCKET_EVENTS;
use super::redial::Redial;
use crate::caller::reset_on_close;
use crate::connect::{Dial, dial};
use crate::dialer::{Called, Connected, Reply, ServiceCall, mark};
use crate::host_socket::HostSocket;
use crate::reactor::Token;
use crate::slow::Party;
use crate::socket::port_path;

/// How long a guest's dial may wait for room in a listener's backlog: a little less than the two seconds that Linux
/// gives a connect, so that the guest gets the reason and does not just time out.
const DIAL_PATIENCE: Duration = Duration::from_millis(1800);

/// Dials that are tried again in one turn, before everything else has its turn.
const REDIALS_PER_TURN: usize = 64;

/// Answers of those who put calls through that are taken in one turn, before everything else has its turn.
const ANSWERS_PER_TURN: usize = 64;

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
        if self.redials.is_waited_for(redial.place()) || !self.attempt(redial) {
            self.redials.push(self.now, redial);
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
    /// offered as a service there stays a service, and a program that listens at the port's path stays before it: the one who may make that path is
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

    /// Takes the answers of those who put calls through.
    pub(super) fn take_dialled(&mut self) {
        for _ in 0..ANSWERS_PER_TURN {
            let Ok((circuit, result)) = self.dialled.try_recv() else {
                return;
            };
            match result {
                Ok(mut connected) => {
                    reset_on_close(&connected.socket);
                    connected.resets = true;
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

    /// Dials a listener. Returns whether that is settled: it is not when there was no room.
    fn attempt(&mut self, redial: Redial) -> bool {
        let call = redial.call;
        let circuit = call.circuit;
        let party = self.party_of_listener(call.line, (!redial.vmm).then_some(call.port));
        if self.is_refused(party) {
            self.tell(Event::HostDialed {
                circuit,
                result: Err(Reason::SlowPeer),
            });
            return true;
        }
        let Some(line) = self.line(call.line) else {
            return true;
        };
        let path = match redial.vmm {
            true => line.vmm.clone().unwrap_or_default(),
            false => port_path(&line.host_path, call.port),
        };
        let vm = line.name.clone();
        if let Some(circuit) = self.circuit(circuit) {
            circuit.callee = party;
        }
        let dialled = match self.closer.is_full(party) {
            true => Dial::Busy,
            false => self
                .slow
                .timed(party, Some(circuit), || dial(&path, call.socket_type, &vm)),
        };
        let reason = match dialled {
            Dial::Reached(socket) if redial.vmm => {
                self.ask_vmm(circuit, socket, call.port);
                return true;
            }
            Dial::Reached(socket) => {
                self.host_reached(circuit, Connected::new(socket, None));
                return true;
            }
            Dial::Failed(Reason::NoListener) if redial.vmm => Reason::NotRunning,
            Dial::Failed(Reason::NoListener) if self.is_listening(call.line, call.port) => {
                self.dial_service(call, Called::Listener);
                return true;
            }
            Dial::Failed(reason) => reason,
            Dial::Busy if self.now < redial.give_up_at => return false,
            Dial::Busy => Reason::BacklogFull,
        };
        self.tell(Event::HostDialed {
            circuit,
            result: Err(reason),
        });
        true
    }

    pub(super) fn redial(&mut self) {
        let now = self.now;
        for _ in 0..REDIALS_PER_TURN {
            let Some(redial) = self.redials.due(now) else {
                return;
            };
            if !self.attempt(redial) {
                self.redials.postpone(now, redial.place());
                continue;
            }
            if now < redial.give_up_at {
                self.redials.found_room(redial.place());
            }
            self.redials.remove(redial.call.circuit);
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
        host.resets = connected.resets;
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
