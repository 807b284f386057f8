//! VMs whose VMM has a vsock device of its own: how far each has come without an agent is seen by what is at its VMM's socket.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use api::VmState;
use config::LineSpec;
use hostside::gates::Gates;
use sys::links::{Entry, Fuse};
use sys::socket_file::Occupant;
use tokio::runtime::Handle;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::Control;

/// How many sockets are checked at once for one answer.
const MAX_AT_ONCE: usize = 32;

/// How long an answer waits for one of them: its directory is the VMM's, which may hold up lookups.
const PATIENCE: Duration = Duration::from_secs(1);

/// How far a VM has come, and what is wrong.
pub(super) type Seen = (VmState, Option<String>);

impl Control {
    /// What is at the sockets of those of these VMs that have one, by full name. It is for threads that may wait ([`Control::ask`]).
    pub(super) fn look_at_vmms<'a>(
        &self,
        specs: impl Iterator<Item = &'a LineSpec>,
    ) -> HashMap<String, Seen> {
        let sockets = specs.filter_map(|spec| Some((spec.full_name(), spec.hybrid()?.to_owned())));
        let sockets: Vec<_> = sockets.collect();
        match sockets.is_empty() {
            true => HashMap::new(),
            false => Handle::current().block_on(look(self.readiness.gates(), sockets)),
        }
    }
}

async fn look(gates: &Arc<Gates>, sockets: Vec<(String, PathBuf)>) -> HashMap<String, Seen> {
    let turns = Arc::new(Semaphore::new(MAX_AT_ONCE));
    let mut looks = JoinSet::new();
    for (vm, path) in sockets {
        let (gates, turns) = (gates.clone(), turns.clone());
        looks.spawn(async move {
            let _turn = turns.acquire_owned().await;
            let at = path.clone();
            let seen = timeout(PATIENCE, gates.at(&path, move || seen_at(&at))).await;
            (vm, seen.ok().flatten().unwrap_or_else(|| unseen(&path)))
        });
    }
    let mut all = HashMap::new();
    while let Some(looked) = looks.join_next().await {
        all.extend(looked.ok());
    }
    all
}

fn seen_at(path: &Path) -> Seen {
    match Entry::behind_links(path, Fuse::Refused).and_then(|entry| Occupant::of(&entry)) {
        Ok(Occupant::Nothing | Occupant::Stale(_)) => (VmState::Waiting, None),
        Ok(Occupant::Other) => {
            let fault = format!("{} is no socket: its VMM needs that path", path.display());
            (VmState::Waiting, Some(fault))
        }
        Err(error) if error.kind() == ErrorKind::NotFound => (VmState::Waiting, None),
        Err(error) if error.kind() == ErrorKind::TimedOut => unseen(path),
        // What may not be checked may be there.
        Ok(Occupant::Socket) | Err(_) => (VmState::Joined, None),
    }
}

fn unseen(path: &Path) -> Seen {
    let fault = format!(
        "{} cannot be looked at in time: who owns its directory holds that up",
        path.display()
    );
    (VmState::Joined, Some(fault))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc;

    use super::*;

    /// More of them than are checked at once.
    #[tokio::test]
    async fn vmms_whose_directories_hang_cost_their_own_states_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = |vm: &str| directory.path().join(vm);
        let _vmm = UnixListener::bind(path("good")).unwrap();
        let bad: Vec<String> = (0..=MAX_AT_ONCE).map(|vm| format!("bad{vm}")).collect();
        let gates = Arc::new(Gates::new(bad.len() + 1));
        let mut held = Vec::new();
        for vm in &bad {
            let (let_go, until) = mpsc::channel::<()>();
            let (began, begun) = tokio::sync::oneshot::channel();
            let (holds, at) = (gates.clone(), path(vm));
            tokio::spawn(async move {
                let hang = move || {
                    let _ = began.send(());
                    let _ = until.recv();
                };
                holds.at(&at, hang).await
            });
            begun.await.unwrap();
            held.push(let_go);
        }
        let vms = bad.iter().map(String::as_str).chain(["good", "none"]);
        let sockets = vms.map(|vm| (vm.to_owned(), path(vm))).collect();
        let seen = look(&gates, sockets).await;
        assert_eq!(seen["good"], (VmState::Joined, None));
        assert_eq!(seen["none"], (VmState::Waiting, None));
        for vm in &bad {
            let (state, fault) = &seen[vm];
            assert_eq!(*state, VmState::Joined);
            let fault = fault.as_ref().unwrap();
            assert!(fault.contains("holds that up"), "{fault}");
        }
    }
}
