//! Programs on the host: those that call, and the sockets of circuits.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use policy::LineId;
use rustix::net::{SocketFlags, accept_with};
use sys::peer::Peer;
use vsock::{CircuitId, Event, HostCaller, Outsider, Reason};
use wire::connect;
use wire::vsock::SocketType;

use super::Fabric;
use super::slow::party_of_published;
use crate::caller::{CallAnswer, Caller, Progress, Represented, Who, reset_on_close};
use crate::dialer::{Cut, Hold, mark};
use crate::host_socket::HostSocket;
use crate::reactor::{EventFlags, Token};
use crate::slow::Party;
use crate::snapshot::Credentials;

/// The largest message that a host program may send over a SEQPACKET socket, in bytes.
pub(super) const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;

/// Callers accepted in one turn on one listener, or on all listeners for a hybrid VM's calls: each of them costs more than a packet, and other lines wait meanwhile.
pub(super) const ACCEPT_BATCH: usize = 16;
/// How long a listener rests when the system would not accept a call.
const ACCEPT_REST: Duration = Duration::from_millis(100);
/// How long a caller may take for its request.
pub(super) const CALLER_PATIENCE: Duration = Duration::from_secs(10);

/// A call by a published port.
#[derive(Debug)]
pub struct PublishedCall {
    /// The published port's name.
    pub name: Arc<str>,
    /// The address that the caller came from, if it has one, for the audit.
    pub peer: Option<String>,
    /// The accounted owner.
    pub outsider: Outsider,
    /// The callee, by the full name.
    pub vm: String,
    /// What is called there.
    pub to: PublishedTo,
    /// What hears what has become of the call.
    pub answer: CallAnswer,
    /// The connection: a stream, UNIX or TCP, or a UNIX socket of messages. It is connected and does not block.
    pub socket: OwnedFd,
    /// The type of socket to call the guest with.
    pub socket_type: SocketType,
    /// Shared with the other side of the connection: whether an end of it is one.
    pub cut: Option<Cut>,
    /// The other side is in this process, so that calls on the socket cannot be made slow.
    pub peer_is_ours: bool,
    /// Whether the port is published like this. It is set between two turns, with the configuration: see [`Change`](super::Change).
    pub is_published: Arc<AtomicBool>,
}

/// What a published port calls in its guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PublishedTo {
    /// A port, by the caller itself.
    Port(u32),
    /// The agent, by the daemon.
    Agent,
}

/// A program of the host that calls a guest, brought by a broker. It is judged as a program that comes by itself.
#[derive(Debug)]
pub struct ProgramCall {
    /// Whose program it is.
    pub program: Peer,
    /// By what its broker will know the call: see [`Endpoint`](super::Endpoint).
    pub ticket: u64,
    /// The callee, by the full name.
    pub vm: String,
    /// The guest's port.
    pub port: u32,
    /// The connection, a UNIX stream that does not block. It becomes the circuit's end. The program has said nothing in it yet but `said` bytes.
    pub socket: OwnedFd,
    /// How many bytes are in the socket that are not for the guest: they stay there as long as nothing else comes, so that the program can see
    /// a reset.
    pub said: usize,
    /// What hears what has become of the call.
    pub answer: CallAnswer,
}

/// What we want to know of a host program's socket. That it has room is asked for only while it has none: a UNIX socket
/// reports it for every piece that its reader takes, which would wake us for nothing.
pub(super) const SOCKET_EVENTS: EventFlags = EventFlags::IN
    .union(EventFlags::RDHUP)
    .union(EventFlags::ET);

impl Fabric {
    // ---- Programs that call ----

    pub(super) fn accept(&mut self, id: LineId, index: usize) {
        let token = Token::Listener {
            line: id,
            index: index as u8,
        };
        for _ in 0..ACCEPT_BATCH {
            let Some(line) = self.line(id) else { return };
            let Some(listener) = line.listeners.get(index) else {
                return;
            };
            let socket = match accept_with(
                &listener.socket,
                SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            ) {
                Ok(socket) => socket,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
                Err(error) => {
                    // Most likely there are no descriptors left: the caller stays in the backlog until there are.
                    tracing::warn!(vm = line.name, %error, "cannot accept a program's call");
                    return self.rest_listener(token, None);
                }
            };
            let socket_type = [SocketType::Stream, SocketType::SeqPacket][index];
            let deadline = self.now + CALLER_PATIENCE;
            let program = match sys::peer::peer(socket.as_fd()) {
                Ok(program) => program,
                Err(error) => {
                    self.close_socket(socket, None, Some(connect::refused(error)));
                    continue;
                }
            };
            let party = Some(Party::User(program.uid));
            if self.slow.is_barred(party) {
                self.refuse_user(id, socket, program.uid);
            } else {
                let caller = Caller {
                    line: id,
                    who: Who::Program(Credentials::from(&program)),
                    groups: program.groups,
                    socket,
                    party,
                    socket_type,
                    deadline,
                    request_len: 0,
                    cut: None,
                    place: None,
                };
                if let Some(slot) = self.add_caller(caller) {
                    self.caller_ready(slot);
                }
            }
            if self.closer.is_full(party) {
                return self.rest_listener(token, party);
            }
        }
    }

    /// Leaves callers in the backlog for a while, so that a machine without descriptors is not asked in a loop, and as long as very many sockets
    /// of this party wait to be closed.
    pub(super) fn rest_listener(&mut self, listener: Token, party: Option<Party>) {
        self.watch_listener(listener, EventFlags::empty());
        self.resting_listeners
            .push_back((self.now + ACCEPT_REST, listener, party));
    }

    pub(super) fn wake_listeners(&mut self) {
        while let Some((at, listener, party)) = self.resting_listeners.front().copied() {
            if at > self.now {
                break;
            }
            self.resting_listeners.pop_front();
            match self.closer.is_full(party) {
                true => self.rest_listener(listener, party),
                false => self.watch_listener(listener, EventFlags::IN),
            }
        }
    }

    fn watch_listener(&mut self, token: Token, flags: EventFlags) {
        let line_of = |id: LineId| self.lines.get(id.0 as usize).and_then(Option::as_ref);
        let listener = match token {
            Token::Listener { line, index } => {
                line_of(line).and_then(|line| line.listeners.get(usize::from(index)))
            }
            Token::HybridListener { line, port } => {
                line_of(line).and_then(|line| line.hybrid_listeners.get(&port))
            }
            _ => None,
        };
        let Some(listener) = listener else { return };
        if let Err(error) = self.reactor.retag(&listener.socket, token, flags) {
            tracing::error!(?token, %error, "cannot wait for calls");
        }
    }

    pub(super) fn add_caller(&mut self, caller: Caller) -> Option<u32> {
        let (id, deadline) = (caller.line, caller.deadline);
        // Others have their answer at once, so that there is nothing to wait for.
        let speaks = caller.who.speaks();
        let line = self.line(id)?;
        if let Who::Program(Credentials { uid, .. }) = caller.who {
            if let Err(words) = line.handshakes.enter(uid) {
                self.turn_away(caller, &connect::refused(words));
                return None;
            }
        }
        let slot = self.callers.insert(caller) as u32;
        let token = Token::Caller { slot };
        if let Err(error) =
            self.reactor
                .add(&self.callers[slot as usize].socket, token, SOCKET_EVENTS)
        {
            if let Some(caller) = self.remove_caller(slot) {
                let vm = self.line(id).map(|line| line.name.clone());
                let name = match &caller.who {
                    Who::Published { name, .. } => Some(&**name),
                    _ => None,
                };
                tracing::warn!(vm, name, %error, "cannot wait for a caller");
                self.turn_away(caller, &connect::refused(Reason::HostFailed));
            }
            return None;
        }
        if speaks {
            self.caller_deadlines.push_back((deadline, slot));
        }
        Some(slot)
    }

    pub(super) fn remove_caller(&mut self, slot: u32) -> Option<Caller> {
        let caller = self.callers.try_remove(slot as usize)?;
        if let (Who::Program(Credentials { uid, .. }), Some(line)) =
            (&caller.who, self.line(caller.line))
        {
            line.handshakes.leave(*uid);
        }
        Some(caller)
    }

    pub(super) fn caller_ready(&mut self, slot: u32) {
        let Some(caller) = self.callers.get_mut(slot as usize) else {
            return;
        };
        match caller.progress() {
            Progress::Waiting => {}
            Progress::Gone => {
                if let Some(caller) = self.remove_caller(slot) {
                    self.close_socket(caller.socket, caller.party, None);
                }
            }
            Progress::Refused(answer) => self.dismiss(slot, &answer),
            Progress::VhostUser(answer) => {
                let id = caller.line;
                if let Some(line) = self.line(id) {
                    tracing::warn!(vm = line.name, "{}", line.wrong_socket());
                }
                self.dismiss(slot, &answer);
            }
            Progress::Wants { port, request_len } => {
                caller.request_len = request_len;
                self.put_caller_through(slot, port);
            }
        }
    }

    pub(super) fn put_caller_through(&mut self, slot: u32, port: u32) {
        let caller = &mut self.callers[slot as usize];
        let (line, socket_type) = (caller.line, caller.socket_type);
        let groups = std::mem::take(&mut caller.groups);
        let program = match caller.who {
            Who::Published {
                to_agent, outsider, ..
            } => Some(match to_agent {
                false => HostCaller::Published(outsider),
                true => HostCaller::ForPublished(outsider),
            }),
            Who::Vmm | Who::Channel { .. } => {
                return self.tell(Event::HybridDial {
                    line,
                    port,
                    token: u64::from(slot),
                });
            }
            Who::Program(Credentials { uid, .. })
            | Who::Represented(Represented {
                credentials: Credentials { uid, .. },
                ..
            }) => self.switch.program(uid, &groups).map(HostCaller::Program),
        };
        let Some(caller) = program else {
            // So many users call that this one is not distinct from others: the rules cannot be asked.
            return self.caller_refused(u64::from(slot), Reason::Denied);
        };
        self.tell(Event::HostDial {
            line,
            port,
            socket_type,
            caller,
            token: u64::from(slot),
        });
    }

    /// Puts a peer of a published port through to a port of a guest. `socket` is connected and does not block; it
    /// becomes the circuit's end. When the call is refused, or the port was published like this only when the connection came, it is
    /// closed, with a reset if it is TCP. `place` is dropped once there is a circuit, or the socket is closed.
    pub fn dial_guest(&mut self, call: PublishedCall, place: Hold) {
        reset_on_close(&call.socket);
        let port = match call.to {
            PublishedTo::Port(port) => port,
            PublishedTo::Agent => self.agent_port,
        };
        let answer = call.answer.clone();
        let party = party_of_published(&call);
        let line = match self.line_named(&call.vm) {
            _ if self.is_refused(party) => Err(Some(Reason::SlowPeer)),
            _ if self.ends_host_calls || !call.is_published.load(Ordering::Acquire) => Err(None),
            line => line.ok_or(Some(Reason::UnknownCid)),
        };
        let line = match line {
            Ok(line) => line,
            Err(reason) => {
                if let Some(reason) = reason {
                    answer.give(Err(reason));
                }
                mark(call.cut.as_ref());
                return self.close_held(call.socket, party, Some(place));
            }
        };
        let caller = Caller {
            line,
            who: Who::Published {
                name: call.name,
                peer: call.peer,
                outsider: call.outsider,
                to_agent: call.to == PublishedTo::Agent,
                answer: answer.clone(),
            },
            groups: Vec::new(),
            socket: call.socket,
            party,
            socket_type: call.socket_type,
            deadline: self.now + CALLER_PATIENCE,
            request_len: 0,
            cut: call.cut,
            place: Some(place),
        };
        match self.add_caller(caller) {
            Some(slot) => self.put_caller_through(slot, port),
            None => answer.give(Err(Reason::HostFailed)),
        }
    }

    /// Puts a program of the host through to a port of a guest, for its broker.
    pub fn dial_program(&mut self, call: ProgramCall) {
        let answer = call.answer.clone();
        let Some(line) = self.line_named(&call.vm) else {
            return answer.give(Err(Reason::UnknownCid));
        };
        let party = Some(Party::User(call.program.uid));
        if self.is_refused(party) {
            // The program has not been given the other end: its close is not slow.
            return answer.give(Err(Reason::SlowPeer));
        }
        let represented = Represented {
            credentials: Credentials::from(&call.program),
            ticket: call.ticket,
            answer: call.answer,
        };
        let caller = Caller {
            line,
            who: Who::Represented(represented),
            groups: call.program.groups,
            socket: call.socket,
            party,
            socket_type: SocketType::Stream,
            deadline: self.now + CALLER_PATIENCE,
            request_len: call.said,
            cut: None,
            place: None,
        };
        match self.add_caller(caller) {
            Some(slot) => self.put_caller_through(slot, call.port),
            None => answer.give(Err(Reason::HostFailed)),
        }
    }

    pub(super) fn caller_dials(&mut self, token: u64, id: CircuitId) {
        let Some(caller) = self.remove_caller(token as u32) else {
            return self.tell(Event::HostGone { circuit: id });
        };
        let mut circuit = crate::circuit::CircuitIo::new(id, caller.socket_type);
        let watched = self
            .reactor
            .retag(&caller.socket, Token::Circuit(id), SOCKET_EVENTS);
        let mut host = HostSocket::new(caller.socket, caller.party, true);
        host.request_len = caller.request_len;
        host.cut = caller.cut;
        if !circuit.is_stream() {
            // Messages cannot be peeked beyond the first.
            host.take_request();
        }
        circuit.host = Some(host);
        circuit.who = Some(caller.who);
        self.install(circuit);
        if watched.is_err() {
            self.tell(Event::HostGone { circuit: id });
        }
    }

    pub(super) fn caller_refused(&mut self, token: u64, reason: Reason) {
        let slot = token as u32;
        if let Some(caller) = self.callers.get(slot as usize) {
            caller.who.refused(reason);
            self.dismiss(slot, &connect::refused(reason));
        }
    }

    pub(super) fn expire_callers(&mut self) {
        while let Some((deadline, slot)) = self.caller_deadlines.front().copied() {
            if deadline > self.now {
                break;
            }
            self.caller_deadlines.pop_front();
            // The slot may have another caller by now, with a deadline of its own.
            let caller = self.callers.get(slot as usize);
            if caller.is_none_or(|caller| caller.deadline > self.now) {
                continue;
            }
            self.dismiss(slot, &connect::refused("no request within 10 seconds"));
        }
    }
}

#[cfg(test)]
mod tests;
