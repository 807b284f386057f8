//! VMs whose VMM has a vsock device of its own, with UNIX sockets: it is called at its socket, and calls at ours.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::mpsc::{Receiver, Sender};
use std::time::Duration;

use policy::{Address, LineId, Policy, ServiceEntry, Time};
use rustix::net::{RecvFlags, SocketFlags, SocketType as UnixSocketType, accept_with, recv};
use vsock::{CircuitId, Event, Limits, OfferedPorts, Reason};
use wire::connect::{self, Answer, MAX_REQUEST_LEN};
use wire::vsock::SocketType;

use super::host::{ACCEPT_BATCH, CALLER_PATIENCE, SOCKET_EVENTS};
use super::{Fabric, OpenLineError};
use crate::aside::Ticket;
use crate::caller::{Caller, Who};
use crate::dialer::Connected;
use crate::line::LineIo;
use crate::reactor::{EventFlags, Token};
use crate::slow::Party;
use crate::socket::{Listener, listen_for, port_path};

/// What a hybrid line needs to be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HybridConfig {
    /// The VM.
    pub address: Address,
    /// What it may use.
    pub limits: Limits,
    /// The VMM's socket, which need not be there yet. Ours, for what its guest calls, are at this path with `_PORT` behind it.
    pub path: PathBuf,
    /// Where programs of the host connect.
    pub host: PathBuf,
}

/// Sockets that are taken in one turn, before everything else has its turn.
const LISTENED_PER_TURN: usize = 64;

/// How long a socket that could not be made waits until it is tried again.
const RETRY_INTERVAL: Duration = Duration::from_secs(3);

/// A socket that was made where a hybrid VM's guest calls a port, or why not.
pub(super) struct Listened {
    line: LineId,
    generation: u64,
    port: u32,
    result: io::Result<Listener>,
}

impl HybridConfig {
    /// The ports that its guest may call of the host with these services and rules.
    pub(super) fn offered_ports(
        &self,
        services: &[ServiceEntry],
        policy: &Policy,
    ) -> BTreeSet<u32> {
        let of_domain = services.iter();
        let of_domain = of_domain.filter(|service| service.domain == self.address.domain);
        let caller = self.address.as_caller();
        OfferedPorts::to(&caller, of_domain.map(|service| service.port), policy).ports
    }
}

impl Fabric {
    /// Opens a line for a VM whose VMM has a vsock device of its own. The sockets for its calls listen when [all is done](Self::all_done) that others can make
    /// slow, but for those whose path another program listens at, which are left alone.
    ///
    /// # Errors
    /// When its name, identifier or host socket cannot be had. Nothing is left behind then.
    pub fn open_hybrid_line(&mut self, config: &HybridConfig) -> Result<(), OpenLineError> {
        let id = self
            .switch
            .add_hybrid_line(config.address.clone(), config.limits)?;
        let generation = self.next_line_generation;
        self.next_line_generation += 1;
        let name = config.address.full_name();
        let mut line = LineIo::new(generation, name.clone(), config.host.clone());
        line.vmm = Some(config.path.clone());
        line.attached = true;
        let opened = self.listen_for_programs(id, line);
        match opened {
            Ok(()) => self.offer_line_ports(id),
            Err(_) => drop(self.close_line(&name)),
        }
        opened
    }

    /// Listens for every hybrid line where its guest may have something to call by now, and nowhere else.
    pub(super) fn offer_ports(&mut self) {
        let lines: Vec<LineId> = self.lines.iter().map(|(id, _)| LineId(id as u32)).collect();
        for id in lines {
            self.offer_line_ports(id);
        }
    }

    /// On the line's own thread, as the directory is its VMM's, but for sockets that were made before.
    fn offer_line_ports(&mut self, id: LineId) {
        let Some(line) = self.lines.get_mut(id.0 as usize).and_then(Option::as_mut) else {
            return;
        };
        // Lines with rings have no such sockets, nor have those whose guests we hear ourselves.
        if line.vmm.is_none() {
            return;
        }
        let offered = self.switch.offered_ports(id);
        let vm = line.name.as_str();
        if offered.incomplete {
            tracing::warn!(
                vm,
                "a rule redirects more ports of this hybrid VM than can be listened at: name them singly"
            );
        }
        line.hybrid_asked
            .retain(|port| offered.ports.contains(port));
        let listeners = &mut line.hybrid_listeners;
        let is_over = |port: &&u32| !offered.ports.contains(*port);
        let over: Vec<u32> = listeners.keys().filter(is_over).copied().collect();
        let over = over.iter().filter_map(|port| listeners.remove(port));
        self.under_way.remove(over.map(|listener| listener.file));
        let refused = &mut line.hybrid_refused;
        refused.retain(|port, _| offered.ports.contains(port));
        line.note_refused();
        for port in offered.ports {
            let ticket = self.under_way.begin();
            self.listen_for_calls(id, port, Some(ticket));
        }
    }

    /// Listens where the guest calls this port, if it does not.
    fn listen_for_calls(&mut self, id: LineId, port: u32, ticket: Option<Sender<Ticket>>) {
        let Some(line) = self.lines.get_mut(id.0 as usize).and_then(Option::as_mut) else {
            return;
        };
        if line.hybrid_listeners.contains_key(&port) || !line.hybrid_asked.insert(port) {
            return;
        }
        let Some(path) = line.vmm.as_deref().map(|vmm| port_path(vmm, port)) else {
            return;
        };
        let generation = line.generation;
        let listened = move |result| Listened {
            line: id,
            generation,
            port,
            result,
        };
        if let Some(listener) = self.bound.for_calls(&path) {
            return self.hear(listened(Ok(listener)));
        }
        let (answers, waker) = (self.listened_by.clone(), self.reactor.waker());
        let job = move || {
            let result = listen_for(None, &path, UnixSocketType::STREAM);
            // The fabric may have ended.
            let _ = answers.send(listened(result));
            waker.wake();
            drop(ticket);
        };
        match line.aside_thread() {
            Ok(aside) => aside.push(job),
            Err(error) => {
                tracing::error!(vm = line.name, %error, "a hybrid VM cannot call all that it may");
            }
        }
    }

    /// Tries sockets again that could not be made.
    pub(super) fn retry_listening(&mut self) {
        let now = self.now;
        let is_due = |(at, _): &(Time, LineId)| *at <= now;
        while let Some((_, id)) = self.hybrid_retries.front().copied().filter(is_due) {
            self.hybrid_retries.pop_front();
            let Some(line) = self.lines.get_mut(id.0 as usize).and_then(Option::as_mut) else {
                continue;
            };
            line.hybrid_waits = false;
            let refused: Vec<u32> = line.hybrid_refused.keys().copied().collect();
            for port in refused {
                self.listen_for_calls(id, port, None);
            }
        }
    }

    /// Takes the sockets at which hybrid VMs' calls are heard from now on.
    pub(super) fn take_listened(&mut self) {
        for _ in 0..LISTENED_PER_TURN {
            let Ok(listened) = self.listened.try_recv() else {
                return;
            };
            self.hear(listened);
        }
        // There may be more, for the next turn.
        self.mailbox.waker.wake();
    }

    fn hear(&mut self, listened: Listened) {
        let Listened {
            line: id,
            generation,
            port,
            result,
        } = listened;
        let line = self.lines.get_mut(id.0 as usize).and_then(Option::as_mut);
        let line = line.filter(|line| line.generation == generation);
        let asked = line.and_then(|line| line.hybrid_asked.remove(&port).then_some(line));
        let (line, listener) = match (asked, result) {
            (Some(line), Ok(listener)) => (line, listener),
            // It is not offered any more.
            (None, Ok(listener)) => return self.under_way.remove([listener.file]),
            (None, Err(_)) => return,
            (Some(line), Err(error)) => {
                let vm = &line.name;
                if error.kind() == io::ErrorKind::AddrInUse {
                    tracing::warn!(vm, port, "left to the program that listens there");
                    line.hybrid_refused.remove(&port);
                    return line.note_refused();
                }
                if !line.hybrid_refused.contains_key(&port) {
                    tracing::error!(vm, port, %error, "a hybrid VM cannot call all that it may, and it is tried again every {} s", RETRY_INTERVAL.as_secs());
                }
                line.hybrid_refused.insert(port, error);
                line.note_refused();
                if !std::mem::replace(&mut line.hybrid_waits, true) {
                    self.hybrid_retries
                        .push_back((self.now + RETRY_INTERVAL, id));
                }
                return;
            }
        };
        let token = Token::HybridListener { line: id, port };
        match self.reactor.add(&listener.socket, token, EventFlags::IN) {
            Ok(()) => {
                line.hybrid_listeners.insert(port, listener);
                if line.hybrid_refused.remove(&port).is_some() {
                    tracing::info!(vm = line.name, port, "a hybrid VM can call this now");
                }
                line.note_refused();
            }
            Err(error) => {
                tracing::error!(vm = line.name, port, %error, "a hybrid VM cannot call all that it may");
                self.under_way.remove([listener.file]);
            }
        }
    }

    /// Disconnects when all is done that has begun at paths that others can make slow: until then sockets of hybrid VMs do not listen, or files of those that
    /// were closed are there.
    pub fn all_done(&mut self) -> Receiver<Ticket> {
        self.under_way.all_done()
    }

    // ---- VMMs that call ----

    pub(super) fn accept_hybrid(&mut self, id: LineId, port: u32) {
        let turn = self.turn;
        loop {
            // Looked for each time: what follows from a call may change the line.
            let Some(line) = self.line(id) else { return };
            let had = line.had.of(turn);
            if had.calls == ACCEPT_BATCH {
                return;
            }
            had.calls += 1;
            let party = Some(Party::Vmm(line.generation));
            if self.closer.is_full(party) {
                return self.rest_listener(Token::HybridListener { line: id, port }, party);
            }
            let Some(line) = self.line(id) else { return };
            let Some(listener) = line.hybrid_listeners.get(&port) else {
                return;
            };
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = match accept_with(&listener.socket, flags) {
                Ok(socket) => socket,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
                Err(error) => {
                    tracing::warn!(vm = line.name, port, %error, "cannot accept a VMM's call");
                    return self.rest_listener(Token::HybridListener { line: id, port }, None);
                }
            };
            if self.slow.is_barred(party) {
                self.close_socket(socket, party, None);
                continue;
            }
            let caller = Caller {
                line: id,
                who: Who::Vmm,
                groups: Vec::new(),
                socket,
                party,
                socket_type: SocketType::Stream,
                deadline: self.now + CALLER_PATIENCE,
                request_len: 0,
                cut: None,
                place: None,
            };
            if let Some(slot) = self.add_caller(caller) {
                self.put_caller_through(slot, port);
            }
        }
    }

    // ---- VMMs that are called ----

    /// Asks a VMM that has been reached for a port of its guest. Its silence is bounded by the circuit's time for the handshake.
    pub(super) fn ask_vmm(&mut self, id: CircuitId, socket: OwnedFd, port: u32) {
        let Some(party) = self.circuit(id).map(|circuit| circuit.callee) else {
            return;
        };
        let asked = self.say(&socket, party, &connect::request(port), Some(id))
            && self
                .reactor
                .add(&socket, Token::Ringing(id), SOCKET_EVENTS)
                .is_ok();
        if !asked {
            self.close_socket(socket, party, None);
            return self.ring_failed(id, Reason::HostFailed);
        }
        if let Some(circuit) = self.circuit(id) {
            circuit.ringing = Some(socket);
        }
    }

    fn ring_failed(&mut self, circuit: CircuitId, reason: Reason) {
        self.tell(Event::HostDialed {
            circuit,
            result: Err(reason),
        });
    }

    /// A VMM that has been asked has said something, or hung up. Its answer is peeked, not taken, so that what follows
    /// it stays in the socket, where the circuit finds it.
    pub(super) fn vmm_ready(&mut self, id: CircuitId, flags: EventFlags) {
        let Some(socket) = self
            .circuit(id)
            .and_then(|circuit| circuit.ringing.as_ref())
        else {
            return;
        };
        let mut bytes = [0; MAX_REQUEST_LEN];
        let seen = match recv(socket, &mut bytes, RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((seen, _)) => seen,
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
            Err(_) => return self.ring_failed(id, Reason::GuestRefused),
        };
        let over =
            seen == 0 || flags.intersects(EventFlags::RDHUP | EventFlags::HUP | EventFlags::ERR);
        match Answer::parse(&bytes[..seen]) {
            Answer::Accepted { len } => self.vmm_accepted(id, len),
            Answer::Partial if !over => {}
            Answer::Partial | Answer::Refused => self.ring_failed(id, Reason::GuestRefused),
        }
    }

    fn vmm_accepted(&mut self, id: CircuitId, answer_len: usize) {
        let Some(circuit) = self.circuit(id) else {
            return;
        };
        let Some(socket) = circuit.ringing.take() else {
            return;
        };
        self.reactor.remove(&socket);
        let connected = Connected {
            unread: answer_len,
            ..Connected::new(socket, None)
        };
        self.host_reached(id, connected);
    }
}
