//! Which circuits get a window: the halves of a circuit, put together.
//!
//! # Theory of operation
//!
//! A circuit gets a window when both its programs asked for one. Each asks another one, a guest's its agent and a host's this daemon, at a moment of its own;
//! so a circuit has two *halves*, the caller's and the callee's, which come in any order. A half is only believed as far as the data plane carries the very circuit that it is about,
//! and its claimer is that circuit's end there: the ports that an agent says are looked up in the tables of its own VM's line.
//!
//! The first half to come waits for the other only if there is reason to expect it:
//!
//! - The caller's expects the callee's if a program listens there for circuits.
//! - The callee's expects the caller's if the caller has said before that it would call from that port. An agent does say so before it calls, but its
//!   words come by another socket than the other agent's: so what it has said until now is read up first ([`Effect::Settle`]).
//!
//! What is not expected, does not come in time or does not fit gets a *stream*: the connection that is there anyhow. With both halves there, a window is taken from the pool. From then on each of the two holds it
//! until it says that it has let go, or does not in time after it was asked to.
//!
//! Nothing in here waits, locks or does I/O: it takes events, and answers with effects.

mod halves;
mod names;
mod window;

use std::collections::{BTreeMap, HashMap, HashSet};

use device::{CircuitSnapshot, Endpoint};
use policy::full_name;
use vsock::{CircuitId, CircuitState, Side};
use wire::switchboard::link::FromDaemon;
use wire::switchboard::{Kind, Place, Side as Half};

use self::halves::stream_for_guest;
pub(crate) use self::names::caller_name;
use self::names::{domain_of, fallback, place};
use super::pool::{Lent, Pair, Party, WindowId};

/// Calls of one VM that its agent has announced and that have not come to anything yet. More get streams.
pub(crate) const MAX_DIALS_PER_VM: usize = 1024;

/// Ports of one VM at which programs listen for circuits. Callers of more get streams.
pub(crate) const MAX_PORTS_PER_VM: usize = 1024;

/// Circuits of which one half waits for the other, or both for a window. More get streams.
pub(crate) const MAX_WAITING: usize = 4096;

/// Of those, such of which the half of one VM came first.
pub(crate) const MAX_WAITING_PER_VM: usize = 256;

/// Something to do. Effects are carried out in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Effect {
    /// Say this to the agent of this VM.
    Tell { vm: String, words: FromDaemon },
    /// A host's program gets its circuit.
    Answer { ticket: u64, answer: Outcome },
    /// Report [`Board::settled`] when everything that this VM's agent has said until now has been heard.
    Settle { vm: String, circuit: CircuitId },
    /// Report [`Board::overdue`] when the other half has had its time.
    Wait { circuit: CircuitId, serial: u64 },
    /// Take a window and report [`Board::taken`].
    Take {
        circuit: CircuitId,
        pair: Pair,
        kind: Kind,
        max_ring: u64,
    },
    /// Note in the pool that this party let go.
    Release {
        uuid: WindowId,
        generation: u64,
        by: Party,
    },
    /// Note in the pool that this party keeps it.
    Quarantine {
        uuid: WindowId,
        generation: u64,
        by: Party,
    },
    /// A host's program is to let go: end the lease that this side holds.
    EndLease { ticket: u64 },
    /// Report [`Board::release_overdue`] when the holder that was asked to let go has had its time.
    WaitForRelease { uuid: WindowId, generation: u64 },
}

/// What a host's program gets.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Outcome {
    Circuit { lent: Lent, side: Half, from: Place },
    Stream { from: Place },
}

/// The asker for one side of a circuit.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Asker {
    /// A program of a guest, by its agent's number for the call.
    Guest { vm: String, id: u64 },
    /// A program of the host.
    Host { ticket: u64, uid: u32 },
}

impl Asker {
    fn party(&self) -> Party {
        match self {
            Asker::Guest { vm, .. } => Party::Vm(vm.clone()),
            Asker::Host { .. } => Party::Host,
        }
    }

    fn vm(&self) -> Option<&str> {
        match self {
            Asker::Guest { vm, .. } => Some(vm),
            Asker::Host { .. } => None,
        }
    }

    fn is_of(&self, name: &str) -> bool {
        matches!(self, Asker::Guest { vm, .. } if vm == name)
    }
}

/// One side of a circuit, as its program wants it.
#[derive(Debug, Clone)]
struct Wish {
    asker: Asker,
    kind: Kind,
    ring: u64,
    /// The peer, as this one may name it.
    peer: Place,
}

/// A call that has been announced and has not been taken yet.
#[derive(Debug, Clone, Copy)]
struct Dial {
    port: u32,
    kind: Kind,
    ring: u64,
    /// The callee has a stream already.
    is_stream: bool,
}

#[derive(Debug, Default)]
struct Session {
    ports: HashSet<u32>,
    dials: HashMap<u64, Dial>,
}

impl Session {
    fn dial_from(&mut self, port: u32) -> Option<&mut Dial> {
        self.dials.values_mut().find(|dial| dial.port == port)
    }
}

#[derive(Debug)]
struct Waiting {
    /// Distinguishes one use of a circuit's number from the next.
    serial: u64,
    snapshot: CircuitSnapshot,
    /// The VM whose half came first, if a VM's did.
    first: Option<String>,
    /// By side.
    halves: [Option<Wish>; 2],
    is_taking: bool,
    /// It was ended while a window was taken for it.
    is_ended: bool,
}

#[derive(Debug)]
struct Holder {
    asker: Asker,
    has_let_go: bool,
}

/// A circuit that has a window.
#[derive(Debug)]
struct Windowed {
    snapshot: CircuitSnapshot,
    uuid: WindowId,
    generation: u64,
    holders: [Holder; 2],
    is_revoked: bool,
}

/// What has happened since the daemon was started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct BoardCounts {
    /// Circuits that got a window.
    pub zero_copy: u64,
    /// Circuits of which one program at least asked for a window, and that got none.
    pub streams: u64,
    /// Of those, such without a free window.
    pub no_window: u64,
    /// Circuits whose window was taken away.
    pub revoked: u64,
    /// Holders that did not let go in time.
    pub not_released: u64,
    /// Words of agents about circuits that are not theirs, or calls that they have not announced.
    pub disbelieved: u64,
}

/// See the module's documentation.
#[derive(Debug, Default)]
pub(crate) struct Board {
    sessions: HashMap<String, Session>,
    /// Programs of the host that call, by ticket, until their call is taken.
    host_dials: HashMap<u64, (u32, Dial)>,
    waiting: HashMap<CircuitId, Waiting>,
    /// How many of them are a VM's, by its full name.
    waits: HashMap<String, usize>,
    /// By circuit, so that lists have an order.
    windowed: BTreeMap<CircuitId, Windowed>,
    next_serial: u64,
    pub(crate) counts: BoardCounts,
}

/// What an agent says of a call that it has taken.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Accepted {
    pub(crate) id: u64,
    pub(crate) peer: (u32, u32),
    pub(crate) kind: Kind,
    pub(crate) ring: u64,
}

type Effects = Vec<Effect>;

/// The circuit that an agent means, if there is one, and the agent's VM's side of it.
pub(crate) type Found = Option<(CircuitSnapshot, Side)>;

impl Board {
    // ---- What agents say ----

    pub(crate) fn session_began(&mut self, vm: &str) {
        self.sessions.insert(vm.to_owned(), Session::default());
    }

    /// The agent is gone, and with it whatever it has asked for. What it has not released is the pool's to know.
    pub(crate) fn session_ended(&mut self, vm: &str) -> Effects {
        self.sessions.remove(vm);
        let mut effects = Effects::new();
        let of_vm = |wish: &Option<Wish>| wish.as_ref().is_some_and(|wish| wish.asker.is_of(vm));
        let concerned: Vec<CircuitId> = self
            .waiting
            .iter()
            .filter(|(_, waiting)| waiting.halves.iter().any(of_vm))
            .map(|(id, _)| *id)
            .collect();
        for id in concerned {
            self.half_lost(id, |asker| asker.is_of(vm), &mut effects);
        }
        // Nothing is said any more about calls of this VM that others have taken.
        let is_of_caller = |waiting: &Waiting| {
            let caller = &waiting.halves[Side::Caller.index()];
            let is_its_own = matches!(&waiting.snapshot.caller, Endpoint::Vm { domain, name, .. } if full_name(domain, name) == vm);
            caller.is_none() && is_its_own
        };
        let unheard = self
            .waiting
            .iter()
            .filter(|(_, waiting)| is_of_caller(waiting));
        let unheard: Vec<CircuitId> = unheard.map(|(id, _)| *id).collect();
        for id in unheard {
            self.half_lost(id, |_| false, &mut effects);
        }
        for windowed in self.windowed.values_mut() {
            for holder in &mut windowed.holders {
                holder.has_let_go |= holder.asker.is_of(vm);
            }
        }
        self.forget_released();
        effects
    }

    pub(crate) fn listen(&mut self, vm: &str, port: u32, listens: bool) {
        let Some(session) = self.sessions.get_mut(vm) else {
            return;
        };
        if !listens {
            session.ports.remove(&port);
        } else if session.ports.len() < MAX_PORTS_PER_VM {
            session.ports.insert(port);
        }
    }

    pub(crate) fn dial(&mut self, vm: &str, id: u64, port: u32, kind: Kind, ring: u64) {
        let Some(session) = self.sessions.get_mut(vm) else {
            return;
        };
        let is_known = session.dials.contains_key(&id) || session.dial_from(port).is_some();
        if is_known || session.dials.len() >= MAX_DIALS_PER_VM {
            self.counts.disbelieved += 1;
            return;
        }
        let dial = Dial {
            port,
            kind,
            ring,
            is_stream: false,
        };
        session.dials.insert(id, dial);
    }

    /// From which port the guest makes this call.
    pub(crate) fn port_of_dial(&self, vm: &str, id: u64) -> Option<u32> {
        Some(self.sessions.get(vm)?.dials.get(&id)?.port)
    }

    pub(crate) fn gave_up(&mut self, vm: &str, id: u64) -> Effects {
        let mut effects = Effects::new();
        if let Some(session) = self.sessions.get_mut(vm) {
            session.dials.remove(&id);
        }
        let is_it = |asker: &Asker| matches!(asker, Asker::Guest { vm: of, id: known } if of == vm && *known == id);
        let concerned = self.waiting.iter().find(|(_, waiting)| {
            let mut halves = waiting.halves.iter().flatten();
            halves.any(|wish| is_it(&wish.asker))
        });
        if let Some(circuit) = concerned.map(|(circuit, _)| *circuit) {
            self.half_lost(circuit, is_it, &mut effects);
        }
        effects
    }

    /// A guest's call was taken by `peer`, as the guest knows it.
    pub(crate) fn dialled(&mut self, vm: &str, id: u64, peer: (u32, u32), found: Found) -> Effects {
        let mut effects = Effects::new();
        let dial = self
            .sessions
            .get_mut(vm)
            .and_then(|session| session.dials.remove(&id));
        let Some((dial, snapshot)) = dial.zip(believed(found, Side::Caller)) else {
            self.counts.disbelieved += 1;
            effects.push(stream_for_guest(vm, id, fallback(peer)));
            return effects;
        };
        let wish = Wish {
            asker: Asker::Guest {
                vm: vm.to_owned(),
                id,
            },
            kind: dial.kind,
            ring: dial.ring,
            peer: place(&snapshot.dialled, Some(domain_of(vm)), peer.1),
        };
        self.caller_came(snapshot, wish, dial.is_stream, &mut effects);
        effects
    }

    /// A guest's program has taken a call.
    pub(crate) fn accepted(&mut self, vm: &str, accepted: Accepted, found: Found) -> Effects {
        let mut effects = Effects::new();
        let Accepted {
            id,
            peer,
            kind,
            ring,
        } = accepted;
        let Some(snapshot) = believed(found, Side::Callee) else {
            self.counts.disbelieved += 1;
            effects.push(stream_for_guest(vm, id, fallback(peer)));
            return effects;
        };
        let wish = Wish {
            asker: Asker::Guest {
                vm: vm.to_owned(),
                id,
            },
            kind,
            ring,
            peer: place(&snapshot.caller, Some(domain_of(vm)), peer.1),
        };
        self.callee_came(snapshot, wish, &mut effects);
        effects
    }

    /// Everything that a VM's agent had said before this circuit was taken has been heard.
    pub(crate) fn settled(&mut self, vm: &str, circuit: CircuitId) -> Effects {
        let mut effects = Effects::new();
        let Some(waiting) = self.waiting.get(&circuit) else {
            return effects;
        };
        if waiting.halves[Side::Caller.index()].is_some() {
            return effects;
        }
        let port = match &waiting.snapshot.caller {
            Endpoint::Vm { port, .. } => *port,
            _ => return effects,
        };
        let serial = waiting.serial;
        let session = self.sessions.get_mut(vm);
        match session.and_then(|session| session.dial_from(port)) {
            Some(_) => effects.push(Effect::Wait { circuit, serial }),
            None => self.stream_both(circuit, &mut effects),
        }
        effects
    }

    // ---- What programs of the host do ----

    pub(crate) fn host_dials(&mut self, ticket: u64, uid: u32, kind: Kind, ring: u64) {
        let dial = Dial {
            port: 0,
            kind,
            ring,
            is_stream: false,
        };
        self.host_dials.insert(ticket, (uid, dial));
    }

    pub(crate) fn host_gave_up(&mut self, ticket: u64) {
        self.host_dials.remove(&ticket);
    }

    /// The call of a host's program was taken. It wanted `to`.
    pub(crate) fn host_dialled(
        &mut self,
        ticket: u64,
        to: Place,
        snapshot: Option<CircuitSnapshot>,
    ) -> Effects {
        let mut effects = Effects::new();
        let Some((uid, dial)) = self.host_dials.remove(&ticket) else {
            return effects;
        };
        let Some(snapshot) = snapshot.filter(|known| known.state == CircuitState::Open) else {
            effects.push(Effect::Answer {
                ticket,
                answer: Outcome::Stream { from: to },
            });
            return effects;
        };
        let wish = Wish {
            asker: Asker::Host { ticket, uid },
            kind: dial.kind,
            ring: dial.ring,
            peer: to,
        };
        self.caller_came(snapshot, wish, dial.is_stream, &mut effects);
        effects
    }

    /// A guest has called a program of the host that listens. Nothing is known of the circuit if it is gone already.
    pub(crate) fn host_called(
        &mut self,
        ticket: u64,
        uid: u32,
        (kind, ring): (Kind, u64),
        from: Place,
        snapshot: Option<CircuitSnapshot>,
    ) -> Effects {
        let mut effects = Effects::new();
        let Some(snapshot) = snapshot else {
            effects.push(Effect::Answer {
                ticket,
                answer: Outcome::Stream { from },
            });
            return effects;
        };
        let wish = Wish {
            asker: Asker::Host { ticket, uid },
            kind,
            ring,
            peer: from,
        };
        self.callee_came(snapshot, wish, &mut effects);
        effects
    }

    /// A host's program has ended its lease.
    pub(crate) fn lease_ended(&mut self, ticket: u64) -> Effects {
        let mut effects = Effects::new();
        for windowed in self.windowed.values_mut() {
            for holder in &mut windowed.holders {
                let is_it = matches!(holder.asker, Asker::Host { ticket: of, .. } if of == ticket);
                if is_it && !holder.has_let_go {
                    holder.has_let_go = true;
                    effects.push(Effect::Release {
                        uuid: windowed.uuid,
                        generation: windowed.generation,
                        by: Party::Host,
                    });
                }
            }
        }
        self.forget_released();
        effects
    }
}

/// The circuit, if it is there and open and its guest is on this side.
fn believed(found: Found, side: Side) -> Option<CircuitSnapshot> {
    let (snapshot, on) = found?;
    (on == side && snapshot.state == CircuitState::Open).then_some(snapshot)
}

#[cfg(test)]
mod tests;
