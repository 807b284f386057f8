//! Windows of circuits: given, taken back, and let go of.

use policy::full_name;
use vsock::CircuitId;
use wire::switchboard::Side as Half;
use wire::switchboard::link::{self, FromDaemon};

use super::halves::stream_for;
use super::{Asker, Board, Effect, Effects, Holder, Outcome, Waiting, Windowed, Wish};
use crate::switchboard::pool::{Lent, NoWindow, Party, WindowId};
use device::{CircuitSnapshot, Endpoint};

impl Board {
    /// An agent says that no program of its guest has this window. Whether it is so, and of which window it may say so, is the pool's to know.
    pub(crate) fn released(&mut self, vm: &str, uuid: WindowId, generation: u64) -> Effects {
        let of_it =
            |windowed: &&mut Windowed| windowed.uuid == uuid && windowed.generation == generation;
        for windowed in self.windowed.values_mut().filter(of_it) {
            for holder in &mut windowed.holders {
                holder.has_let_go |= holder.asker.is_of(vm);
            }
        }
        self.forget_released();
        vec![Effect::Release {
            uuid,
            generation,
            by: Party::Vm(vm.to_owned()),
        }]
    }

    /// The other half has had its time.
    pub(crate) fn overdue(&mut self, circuit: CircuitId, serial: u64) -> Effects {
        let mut effects = Effects::new();
        let waiting = self.waiting.get(&circuit);
        if waiting.is_some_and(|waiting| waiting.serial == serial && !waiting.is_taking) {
            self.stream_both(circuit, &mut effects);
        }
        effects
    }

    /// What the pool had for a circuit, and whether that is still open: a policy that was enforced after its halves were looked up, and before they met, did
    /// not find it here.
    pub(crate) fn taken(
        &mut self,
        circuit: CircuitId,
        taken: Result<Lent, NoWindow>,
        is_open: bool,
    ) -> Effects {
        let mut effects = Effects::new();
        let lent = match taken {
            Ok(lent) => lent,
            Err(_) => {
                self.counts.no_window += 1;
                self.stream_both(circuit, &mut effects);
                return effects;
            }
        };
        let waiting = self.take_waiting(circuit);
        let Some(Waiting {
            snapshot,
            halves,
            is_ended,
            ..
        }) = waiting
        else {
            // Only the taker of a window for it removes it then.
            return effects;
        };
        let (first, second) = match halves {
            [Some(first), Some(second)] if is_open && !is_ended => (first, second),
            halves => {
                // Neither has seen it, so both have let go of it. The parties are those of the circuit, also of one whose program has gone.
                for by in parties(&snapshot) {
                    let (uuid, generation) = (lent.uuid, lent.generation);
                    effects.push(Effect::Release {
                        uuid,
                        generation,
                        by,
                    });
                }
                for wish in halves.into_iter().flatten() {
                    effects.push(stream_for(wish));
                }
                self.counts.streams += 1;
                return effects;
            }
        };
        self.counts.zero_copy += 1;
        let windowed = Windowed {
            snapshot,
            uuid: lent.uuid,
            generation: lent.generation,
            holders: [&first, &second].map(|wish| Holder {
                asker: wish.asker.clone(),
                has_let_go: false,
            }),
            is_revoked: false,
        };
        self.windowed.insert(circuit, windowed);
        effects.push(hand_over(&lent, first, Half::First));
        effects.push(hand_over(&lent, second, Half::Second));
        effects
    }

    /// The circuit is over by order: its window, if it has one, is taken away.
    pub(crate) fn revoke(&mut self, circuit: CircuitId) -> Effects {
        let mut effects = Effects::new();
        if let Some(waiting) = self.waiting.get_mut(&circuit) {
            waiting.is_ended = true;
        }
        let Some(windowed) = self.windowed.get_mut(&circuit) else {
            return effects;
        };
        if std::mem::replace(&mut windowed.is_revoked, true) {
            return effects;
        }
        self.counts.revoked += 1;
        let (uuid, generation) = (windowed.uuid, windowed.generation);
        for holder in windowed.holders.iter().filter(|holder| !holder.has_let_go) {
            effects.push(match &holder.asker {
                Asker::Guest { vm, .. } => Effect::Tell {
                    vm: vm.clone(),
                    words: FromDaemon::Revoke { uuid, generation },
                },
                Asker::Host { ticket, .. } => Effect::EndLease { ticket: *ticket },
            });
        }
        effects.push(Effect::WaitForRelease { uuid, generation });
        effects
    }

    /// The holder that was asked to let go has had its time.
    pub(crate) fn release_overdue(&mut self, uuid: WindowId, generation: u64) -> Effects {
        let of_it =
            |windowed: &&Windowed| windowed.uuid == uuid && windowed.generation == generation;
        let Some(windowed) = self.windowed.values().find(of_it) else {
            return Effects::new();
        };
        let late = windowed.holders.iter().filter(|holder| !holder.has_let_go);
        let effects: Effects = late
            .map(|holder| Effect::Quarantine {
                uuid,
                generation,
                by: holder.asker.party(),
            })
            .collect();
        self.counts.not_released += effects.len() as u64;
        effects
    }

    /// A VM has been removed: no window that was its is used on.
    pub(crate) fn removed(&mut self, vm: &str) -> Effects {
        let of_vm = |windowed: &Windowed| {
            let mut holders = windowed.holders.iter();
            holders.any(|holder| holder.asker.is_of(vm))
        };
        let concerned: Vec<CircuitId> = self
            .windowed
            .iter()
            .filter(|(_, windowed)| of_vm(windowed))
            .map(|(id, _)| *id)
            .collect();
        concerned
            .into_iter()
            .flat_map(|circuit| self.revoke(circuit))
            .collect()
    }

    /// Circuits for which a window is wanted, and that have none yet.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = CircuitId> {
        self.waiting.keys().copied()
    }

    /// Circuits that have a window, with what is remembered of them, and whether it is being taken away.
    pub(crate) fn windowed(&self) -> impl Iterator<Item = (&CircuitSnapshot, bool)> {
        let windowed = self.windowed.values();
        windowed.map(|windowed| (&windowed.snapshot, windowed.is_revoked))
    }

    pub(super) fn forget_released(&mut self) {
        self.windowed
            .retain(|_, windowed| windowed.holders.iter().any(|holder| !holder.has_let_go));
    }
}

/// Whose windows a circuit's can be.
fn parties(snapshot: &CircuitSnapshot) -> [Party; 2] {
    [&snapshot.caller, &snapshot.callee].map(|end| match end {
        Endpoint::Vm { domain, name, .. } => Party::Vm(full_name(domain, name)),
        _ => Party::Host,
    })
}

fn hand_over(lent: &Lent, wish: Wish, side: Half) -> Effect {
    match wish.asker {
        Asker::Guest { vm, id } => Effect::Tell {
            vm,
            words: FromDaemon::Circuit(link::Circuit {
                id,
                uuid: lent.uuid,
                generation: lent.generation,
                nonce: wire::switchboard::Hex16(lent.nonce),
                ring: lent.ring_len,
                kind: lent.kind,
                side,
                peer: wish.peer,
            }),
        },
        Asker::Host { ticket, .. } => Effect::Answer {
            ticket,
            answer: Outcome::Circuit {
                lent: lent.clone(),
                side,
                from: wish.peer,
            },
        },
    }
}
