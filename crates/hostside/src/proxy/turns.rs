//! Whose turn it is to have a thread do what blocks, so that no VM takes the threads of others.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use config::MAX_VMS;
use tokio::sync::{AcquireError, OwnedSemaphorePermit, Semaphore};

/// Turns of one VM at once. Further ones wait.
pub const MAX_TURNS_PER_VM: usize = 8;

/// Of those, such of its ordinary programs. The others are for its privileged ones.
const MAX_ORDINARY_TURNS: usize = MAX_TURNS_PER_VM / 4 * 3;

/// Turns at once of VMs that have one already. A VM's first waits for no other VM.
pub(crate) const MAX_FURTHER: usize = 32;

/// Turns at once, each of which may occupy a thread.
pub(crate) const MAX_TURNS: usize = MAX_VMS + MAX_FURTHER;

/// The turns of one kind of work.
#[derive(Debug)]
pub(crate) struct Turns {
    by_vm: Mutex<HashMap<String, Arc<TurnsOfVm>>>,
    further: Arc<Semaphore>,
}

#[derive(Debug)]
struct TurnsOfVm {
    all: Arc<Semaphore>,
    ordinary: Arc<Semaphore>,
    first: Arc<Semaphore>,
}

/// A turn. It is over when this is dropped.
#[derive(Debug)]
pub(crate) struct Turn {
    _of_ordinary: Option<OwnedSemaphorePermit>,
    _of_vm: OwnedSemaphorePermit,
    _first_or_further: OwnedSemaphorePermit,
    // Behind the permits, so that the table keeps the VM for as long as it has one.
    _vm: Arc<TurnsOfVm>,
}

/// A program of a VM, by the VM's full name.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asker<'a> {
    pub(crate) vm: &'a str,
    pub(crate) is_privileged: bool,
}

impl Default for Turns {
    fn default() -> Turns {
        Turns {
            by_vm: Mutex::default(),
            further: Arc::new(Semaphore::new(MAX_FURTHER)),
        }
    }
}

impl Turns {
    /// A turn for a program of a VM, if it has one in that time.
    pub(crate) async fn turn(&self, asker: Asker<'_>, patience: Duration) -> Option<Turn> {
        let vm = self.of_vm(asker.vm);
        let waiting = async {
            let of_ordinary = match asker.is_privileged {
                true => None,
                false => Some(vm.ordinary.clone().acquire_owned().await?),
            };
            let of_vm = vm.all.clone().acquire_owned().await?;
            let first_or_further = tokio::select! {
                biased;
                first = vm.first.clone().acquire_owned() => first?,
                further = self.further.clone().acquire_owned() => further?,
            };
            Ok::<_, AcquireError>((of_ordinary, of_vm, first_or_further))
        };
        let turn = tokio::time::timeout(patience, waiting).await;
        let (of_ordinary, of_vm, first_or_further) = turn.ok()?.ok()?;
        Some(Turn {
            _of_ordinary: of_ordinary,
            _of_vm: of_vm,
            _first_or_further: first_or_further,
            _vm: vm,
        })
    }

    fn of_vm(&self, vm: &str) -> Arc<TurnsOfVm> {
        let mut all = sys::lock(&self.by_vm);
        // An unused entry is made anew when it is needed: the table never outgrows the VMs that exist.
        all.retain(|_, turns| Arc::strong_count(turns) > 1);
        let new = || TurnsOfVm {
            all: Arc::new(Semaphore::new(MAX_TURNS_PER_VM)),
            ordinary: Arc::new(Semaphore::new(MAX_ORDINARY_TURNS)),
            first: Arc::new(Semaphore::new(1)),
        };
        all.entry(vm.to_owned())
            .or_insert_with(|| Arc::new(new()))
            .clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn privileged(vm: &str) -> Asker<'_> {
        let is_privileged = true;
        Asker { vm, is_privileged }
    }

    fn ordinary(vm: &str) -> Asker<'_> {
        let is_privileged = false;
        Asker { vm, is_privileged }
    }

    /// All turns that such a program can have.
    async fn all_of(turns: &Turns, asker: Asker<'_>) -> Vec<Turn> {
        let mut held = Vec::new();
        while let Some(turn) = turns.turn(asker, PATIENCE).await {
            held.push(turn);
        }
        held
    }

    /// However many of them hold theirs, and wait for more.
    #[tokio::test(start_paused = true)]
    async fn ordinary_programs_leave_turns_to_privileged_ones() {
        let turns = Turns::default();
        let held = all_of(&turns, ordinary("web")).await;
        assert_eq!(held.len(), MAX_ORDINARY_TURNS);
        let waiting: Vec<_> = (0..100)
            .map(|_| Box::pin(turns.turn(ordinary("web"), PATIENCE)))
            .collect();
        let of_privileged = all_of(&turns, privileged("web")).await;
        assert_eq!(of_privileged.len(), MAX_TURNS_PER_VM - MAX_ORDINARY_TURNS);
        drop((waiting, held));
        assert!(turns.turn(ordinary("web"), PATIENCE).await.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_vm_has_so_many_turns_and_others_have_their_own() {
        let turns = Turns::default();
        let mut held = all_of(&turns, privileged("web")).await;
        assert_eq!(held.len(), MAX_TURNS_PER_VM);
        assert!(turns.turn(ordinary("db"), PATIENCE).await.is_some());
        let waiting = turns.turn(privileged("web"), PATIENCE);
        held.pop();
        assert!(waiting.await.is_some());
        drop(held);
        let _one = turns.turn(ordinary("db"), PATIENCE).await.expect("a turn");
        assert_eq!(turns.by_vm.lock().expect("not poisoned").len(), 1);
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_turn_of_a_vm_waits_for_no_other_vm() {
        let turns = Turns::default();
        let mut held = Vec::new();
        for vm in 0..MAX_FURTHER {
            held.extend(all_of(&turns, privileged(&format!("vm{vm}"))).await);
        }
        assert_eq!(held.len(), 2 * MAX_FURTHER);
        assert_eq!(all_of(&turns, privileged("web")).await.len(), 1);
    }
}
