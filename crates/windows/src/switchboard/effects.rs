//! What the board wants done.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::Interest;
use tokio::net::UnixStream;
use vsock::{CircuitId, CircuitState};
use wire::switchboard::program::{Answer, Circuit};

use super::board::{Board, Effect, Outcome};
use super::pool::{self, Lent, NoWindow, Pair, Party, WindowPool};
use super::{
    MAX_TAKEN_AT_ONCE_PER_PAIR, MAX_TAKEN_AT_ONCE_PER_VM, PAGE_LEN, PAIRING_TIMEOUT,
    RELEASE_TIMEOUT, Shared, State,
};

/// An input of the board.
pub(super) type BoardEvent = Box<dyn FnOnce(&mut Board) -> Vec<Effect>>;

impl Shared {
    /// Does what the board says. Returns what the board is to learn of it at once.
    pub(super) fn perform(self: &Arc<Self>, effect: Effect) -> Option<BoardEvent> {
        match effect {
            Effect::Tell { vm, words } => {
                let mut state = sys::lock(&self.state);
                let session = state.sessions.get_mut(&vm);
                if session.is_some_and(|session| !session.say(words)) {
                    tracing::warn!(
                        vm,
                        "the agent does not read messages about circuits: ending its session"
                    );
                }
            }
            Effect::Settle { vm, circuit } => {
                let asked = {
                    let state = sys::lock(&self.state);
                    let session = state.sessions.get(&vm);
                    session.is_some_and(|session| session.settle(circuit))
                };
                if !asked {
                    return Some(Box::new(move |board| board.settled(&vm, circuit)));
                }
            }
            Effect::Answer { ticket, answer } => return self.answer(ticket, answer),
            Effect::Wait { circuit, serial } => {
                self.later(PAIRING_TIMEOUT, move |board| board.overdue(circuit, serial))
            }
            Effect::WaitForRelease { uuid, generation } => {
                self.later(RELEASE_TIMEOUT, move |board| {
                    board.release_overdue(uuid, generation)
                });
            }
            Effect::Take {
                circuit,
                pair,
                kind,
                max_ring,
            } => {
                return self.begin_to_take(circuit, pair, kind, max_ring);
            }
            Effect::Release {
                uuid,
                generation,
                by,
            } => {
                self.with_pool(move |pool| {
                    pool.released(uuid, generation, &by);
                });
            }
            Effect::Quarantine {
                uuid,
                generation,
                by,
            } => {
                tracing::warn!(window = %uuid, generation, holder = ?by, "a window was not released in time: it is not used until it is");
                self.with_pool(move |pool| pool.quarantine(uuid, generation, &by));
            }
            Effect::EndLease { ticket } => {
                if let Some(lease) = sys::lock(&self.state).leases.get(&ticket) {
                    // The program sees it, and we still see when it closes its end.
                    let _ = rustix::net::shutdown(lease, rustix::net::Shutdown::Write);
                }
            }
        }
        None
    }

    fn later(
        self: &Arc<Self>,
        time: Duration,
        event: impl FnOnce(&mut Board) -> Vec<Effect> + Send + 'static,
    ) {
        let shared = self.clone();
        self.spawn(async move {
            tokio::time::sleep(time).await;
            shared.apply(event);
        });
    }

    fn begin_to_take(
        self: &Arc<Self>,
        circuit: CircuitId,
        pair: Pair,
        kind: pool::Kind,
        max_ring: u64,
    ) -> Option<BoardEvent> {
        let mut vms = match &pair {
            Pair::Host { vm, .. } => vec![vm.clone()],
            Pair::Vms { a, b } => vec![a.clone(), b.clone()],
        };
        vms.sort();
        if !sys::lock(&self.state).begin_to_take(&vms) {
            return Some(Box::new(move |board| {
                board.taken(circuit, Err(NoWindow::Busy), true)
            }));
        }
        let shared = self.clone();
        self.spawn(async move {
            // The semaphore is never closed, so a permit always comes.
            let _permit = shared.takers.acquire().await;
            let taker = shared.clone();
            let taken = shared.with_pool(move |pool| {
                let taken = taker.take(pool, &pair, kind, max_ring);
                let key = taken.as_ref().ok().map(|lent| (lent.uuid, lent.generation));
                // A policy that is enforced from here on finds it among those that wait.
                let plane = taker.plane();
                let known = plane.and_then(|plane| plane.show_circuit(circuit));
                let is_open = known.is_some_and(|known| known.state == CircuitState::Open);
                taker.apply(|board| board.taken(circuit, taken, is_open));
                // Unless a program of the host has it by now, none gets it.
                if let Some(key) = key {
                    sys::lock(&taker.state).files.remove(&key);
                }
            });
            if let Some(taken) = taken {
                // It fails only when the daemon ends.
                let _ = taken.await;
            }
            sys::lock(&shared.state).end_to_take(&vms);
        });
        None
    }

    /// Takes a window, with its file if a program of the host gets it.
    fn take(
        &self,
        pool: &dyn WindowPool,
        pair: &Pair,
        kind: pool::Kind,
        max_ring: u64,
    ) -> Result<Lent, NoWindow> {
        let lent = pool.take(pair, kind, max_ring)?;
        if let Pair::Host { vm, .. } = pair {
            match pool.file(lent.uuid) {
                Ok(file) => {
                    let key = (lent.uuid, lent.generation);
                    sys::lock(&self.state).files.insert(key, file);
                }
                Err(error) => {
                    tracing::warn!(window = %lent.uuid, %error, "a window's file cannot be had");
                    for by in [Party::Host, Party::Vm(vm.clone())] {
                        pool.released(lent.uuid, lent.generation, &by);
                    }
                    return Err(NoWindow::Failed);
                }
            }
        }
        Ok(lent)
    }

    /// Hands a program of the host its circuit.
    fn answer(self: &Arc<Self>, ticket: u64, outcome: Outcome) -> Option<BoardEvent> {
        let lease_ended = move || -> Option<BoardEvent> {
            Some(Box::new(move |board| board.lease_ended(ticket)))
        };
        let delivery = sys::lock(&self.state).deliveries.remove(&ticket);
        match (outcome, delivery) {
            (Outcome::Stream { from }, Some(delivery)) => {
                delivery.send(Answer::Stream { from }, |stream| vec![stream]);
            }
            (Outcome::Circuit { lent, side, from }, Some(delivery)) => {
                let file = sys::lock(&self.state)
                    .files
                    .remove(&(lent.uuid, lent.generation));
                let Some((file, lease)) = file.zip(self.lease(ticket)) else {
                    // The program sees the end of its connection, and the other side a reset.
                    return lease_ended();
                };
                let answer = Answer::Circuit(Circuit {
                    side,
                    kind: lent.kind,
                    ring: lent.ring_len,
                    page: PAGE_LEN,
                    offset: lent.offset,
                    generation: lent.generation,
                    nonce: wire::switchboard::Hex16(lent.nonce),
                    from,
                });
                delivery.send(answer, |stream| vec![file, stream, lease]);
            }
            (Outcome::Circuit { lent, .. }, None) => {
                sys::lock(&self.state)
                    .files
                    .remove(&(lent.uuid, lent.generation));
                return lease_ended();
            }
            (Outcome::Stream { .. }, None) => {}
        }
        None
    }

    /// Makes a lease, and watches for its end. Returns the program's end of it.
    fn lease(self: &Arc<Self>, ticket: u64) -> Option<OwnedFd> {
        let _runtime = self.runtime.get()?.enter();
        let pair = runtime::sockets::pair(wire::vsock::SocketType::Stream);
        let made = pair.and_then(|(ours, theirs)| Ok((UnixStream::from_std(ours.into())?, theirs)));
        let (ours, theirs) = match made {
            Ok(made) => made,
            Err(error) => {
                tracing::warn!(%error, "cannot make a lease");
                return None;
            }
        };
        let ours = Arc::new(ours);
        sys::lock(&self.state).leases.insert(ticket, ours.clone());
        let shared = self.clone();
        self.spawn(async move {
            end_of(&ours).await;
            sys::lock(&shared.state).leases.remove(&ticket);
            shared.apply(|board| board.lease_ended(ticket));
        });
        Some(theirs)
    }
}

impl State {
    /// Whether another window may be taken for circuits of these VMs. If so, it is counted.
    fn begin_to_take(&mut self, vms: &[String]) -> bool {
        let of = |vm| self.taking.iter().filter(|of| of.contains(vm)).count();
        let of_pair = self.taking.iter().filter(|of| *of == vms).count();
        let is_full = vms.iter().any(|vm| of(vm) >= MAX_TAKEN_AT_ONCE_PER_VM)
            || vms.len() > 1 && of_pair >= MAX_TAKEN_AT_ONCE_PER_PAIR;
        if !is_full {
            self.taking.push(vms.to_vec());
        }
        !is_full
    }

    fn end_to_take(&mut self, vms: &[String]) {
        if let Some(at) = self.taking.iter().position(|of| of == vms) {
            self.taking.swap_remove(at);
        }
    }
}

/// Waits until the other end of a socket is closed. Whatever is sent there is left unread: its sender fills its own buffer and no more.
async fn end_of(socket: &UnixStream) {
    loop {
        match socket.ready(Interest::READABLE).await {
            Ok(ready) if !ready.is_read_closed() => {
                // Until the next thing happens.
                let nothing = || Err::<(), _>(io::ErrorKind::WouldBlock.into());
                let _ = socket.try_io(Interest::READABLE, nothing);
            }
            _ => return,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One peer whose VMM is silent leaves a VM places for others.
    #[test]
    fn so_many_windows_are_taken_at_once_of_a_vm_and_of_a_pair() {
        let mut state = State::default();
        let vms = |names: &[&str]| {
            names
                .iter()
                .map(|name| (*name).to_owned())
                .collect::<Vec<_>>()
        };
        for _ in 0..MAX_TAKEN_AT_ONCE_PER_PAIR {
            assert!(state.begin_to_take(&vms(&["a", "b"])));
        }
        assert!(!state.begin_to_take(&vms(&["a", "b"])));
        for _ in MAX_TAKEN_AT_ONCE_PER_PAIR..MAX_TAKEN_AT_ONCE_PER_VM {
            assert!(state.begin_to_take(&vms(&["b"])));
        }
        assert!(!state.begin_to_take(&vms(&["b"])));
        assert!(!state.begin_to_take(&vms(&["b", "c"])));
        state.end_to_take(&vms(&["a", "b"]));
        assert!(state.begin_to_take(&vms(&["b", "c"])));
        for _ in 1..MAX_TAKEN_AT_ONCE_PER_PAIR {
            state.end_to_take(&vms(&["a", "b"]));
            state.end_to_take(&vms(&["b"]));
        }
        state.end_to_take(&vms(&["b"]));
        state.end_to_take(&vms(&["b", "c"]));
        assert!(state.taking.is_empty());
    }
}
