//! The halves of a circuit, put together.

use device::{CircuitSnapshot, Endpoint};
use policy::full_name;
use vsock::{CircuitId, Side};
use wire::switchboard::Place;
use wire::switchboard::link::FromDaemon;

use super::{
    Asker, Board, Effect, Effects, MAX_WAITING, MAX_WAITING_PER_VM, Outcome, Waiting, Wish,
};
use crate::switchboard::pool::Pair;

impl Board {
    pub(super) fn caller_came(
        &mut self,
        snapshot: CircuitSnapshot,
        wish: Wish,
        is_stream: bool,
        effects: &mut Effects,
    ) {
        if is_stream {
            return effects.push(stream_for(wish));
        }
        let circuit = snapshot.id;
        let is_expected = match &snapshot.callee {
            Endpoint::Vm { domain, name, port } => {
                let session = self.sessions.get(&full_name(domain, name));
                session.is_some_and(|session| session.ports.contains(port))
            }
            // The half of a host's program that listens is there before the caller knows that its call was taken.
            _ => false,
        };
        if self.waiting.contains_key(&circuit) {
            self.join(circuit, Side::Caller, wish, effects);
        } else if is_expected && self.may_wait(&wish) {
            let serial = self.wait(snapshot, Side::Caller, wish);
            effects.push(Effect::Wait { circuit, serial });
        } else {
            self.counts.streams += 1;
            effects.push(stream_for(wish));
        }
    }

    pub(super) fn callee_came(
        &mut self,
        snapshot: CircuitSnapshot,
        wish: Wish,
        effects: &mut Effects,
    ) {
        let circuit = snapshot.id;
        if self.waiting.contains_key(&circuit) {
            return self.join(circuit, Side::Callee, wish, effects);
        }
        let may_wait = self.may_wait(&wish);
        let expects = match &snapshot.caller {
            _ if !may_wait => None,
            Endpoint::Vm { domain, name, .. } => {
                let vm = full_name(domain, name);
                let has_agent = self.sessions.contains_key(&vm);
                has_agent.then_some(Effect::Settle { vm, circuit })
            }
            Endpoint::Program {
                ticket: Some(ticket),
                ..
            } if self.host_dials.contains_key(ticket) => Some(Effect::Wait {
                circuit,
                serial: self.next_serial,
            }),
            _ => None,
        };
        match expects {
            Some(effect) => {
                self.wait(snapshot, Side::Callee, wish);
                effects.push(effect);
            }
            None => {
                self.counts.streams += 1;
                effects.push(stream_for(wish));
            }
        }
    }

    fn may_wait(&self, wish: &Wish) -> bool {
        let waits = wish.asker.vm().and_then(|vm| self.waits.get(vm));
        self.waiting.len() < MAX_WAITING && waits.is_none_or(|waits| *waits < MAX_WAITING_PER_VM)
    }

    /// A circuit waits no longer.
    pub(super) fn take_waiting(&mut self, circuit: CircuitId) -> Option<Waiting> {
        let waiting = self.waiting.remove(&circuit)?;
        if let Some(vm) = &waiting.first {
            let waits = self.waits.get_mut(vm).map(|waits| {
                *waits -= 1;
                *waits
            });
            if waits == Some(0) {
                self.waits.remove(vm);
            }
        }
        Some(waiting)
    }

    /// Remembers the first half, and returns the number of this wait.
    pub(super) fn wait(&mut self, snapshot: CircuitSnapshot, side: Side, wish: Wish) -> u64 {
        let serial = self.next_serial;
        self.next_serial += 1;
        let first = wish.asker.vm().map(str::to_owned);
        if let Some(vm) = &first {
            *self.waits.entry(vm.clone()).or_default() += 1;
        }
        let mut halves = [None, None];
        halves[side.index()] = Some(wish);
        let waiting = Waiting {
            serial,
            first,
            halves,
            is_taking: false,
            is_ended: false,
            snapshot,
        };
        self.waiting.insert(waiting.snapshot.id, waiting);
        serial
    }

    /// The second half is there.
    pub(super) fn join(
        &mut self,
        circuit: CircuitId,
        side: Side,
        wish: Wish,
        effects: &mut Effects,
    ) {
        let Some(waiting) = self.waiting.get_mut(&circuit) else {
            return;
        };
        if waiting.is_taking || waiting.halves[side.index()].is_some() {
            // It has been asked for already: an agent that says so twice has made a number up.
            self.counts.disbelieved += 1;
            return effects.push(stream_for(wish));
        }
        waiting.halves[side.index()] = Some(wish);
        let [Some(first), Some(second)] = &waiting.halves else {
            return;
        };
        let pair = match (&first.asker, &second.asker) {
            (Asker::Guest { vm: a, .. }, Asker::Guest { vm: b, .. }) => Pair::Vms {
                a: a.clone(),
                b: b.clone(),
            },
            (Asker::Guest { vm, .. }, Asker::Host { uid, .. })
            | (Asker::Host { uid, .. }, Asker::Guest { vm, .. }) => Pair::Host {
                vm: vm.clone(),
                uid: *uid,
            },
            // No circuit has two ends on the host.
            (Asker::Host { .. }, Asker::Host { .. }) => return self.stream_both(circuit, effects),
        };
        if first.kind != second.kind {
            return self.stream_both(circuit, effects);
        }
        effects.push(Effect::Take {
            circuit,
            pair,
            kind: first.kind,
            max_ring: first.ring.min(second.ring),
        });
        waiting.is_taking = true;
    }

    /// Those there get streams, and newcomers get them at once.
    pub(super) fn stream_both(&mut self, circuit: CircuitId, effects: &mut Effects) {
        let Some(waiting) = self.take_waiting(circuit) else {
            return;
        };
        self.counts.streams += 1;
        if waiting.halves[Side::Caller.index()].is_none() {
            self.caller_gets_stream(&waiting.snapshot.caller);
        }
        effects.extend(waiting.halves.into_iter().flatten().map(stream_for));
    }

    /// The announcer of this call is notified when it is taken.
    pub(super) fn caller_gets_stream(&mut self, caller: &Endpoint) {
        match caller {
            Endpoint::Vm { domain, name, port } => {
                let session = self.sessions.get_mut(&full_name(domain, name));
                if let Some(dial) = session.and_then(|session| session.dial_from(*port)) {
                    dial.is_stream = true;
                }
            }
            Endpoint::Program {
                ticket: Some(ticket),
                ..
            } => {
                if let Some((_, dial)) = self.host_dials.get_mut(ticket) {
                    dial.is_stream = true;
                }
            }
            _ => {}
        }
    }

    /// The asker of one half is gone. The other gets a stream, once no window is being taken any more.
    pub(super) fn half_lost(
        &mut self,
        circuit: CircuitId,
        is_lost: impl Fn(&Asker) -> bool,
        effects: &mut Effects,
    ) {
        let Some(waiting) = self.waiting.get_mut(&circuit) else {
            return;
        };
        for half in &mut waiting.halves {
            if half.as_ref().is_some_and(|wish| is_lost(&wish.asker)) {
                *half = None;
            }
        }
        if !waiting.is_taking {
            self.stream_both(circuit, effects);
        }
    }
}

pub(super) fn stream_for_guest(vm: &str, id: u64, peer: Place) -> Effect {
    Effect::Tell {
        vm: vm.to_owned(),
        words: FromDaemon::Stream { id, peer },
    }
}

pub(super) fn stream_for(wish: Wish) -> Effect {
    match wish.asker {
        Asker::Guest { vm, id } => stream_for_guest(&vm, id, wish.peer),
        Asker::Host { ticket, .. } => Effect::Answer {
            ticket,
            answer: Outcome::Stream { from: wish.peer },
        },
    }
}
