//! What the switchboard asks of the windows.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use device::window::{DATA_OFFSET, Life, MAX_LEN_BETWEEN_STRANGERS, WindowFile, ring_len};
use wire::window::MIN_LEN;

use super::qmp::{Qmp, QmpError};
use super::standing::Standing;
use super::{Monitor, State, Window, Windows, new_uuid, random};
use crate::switchboard::pool::{
    Kind, Lent, NoWindow, Owners, Pair, Party, WindowId, WindowPool, WindowState, WindowStatus,
};

/// How long a circuit waits for the guests to find a window that was just added. It is a stream if that takes longer, and the next one has the window.
const SHOWN_WITHIN: Duration = Duration::from_secs(3);

impl WindowPool for Windows {
    fn arrived(&self, vm: &str) {
        let party = Party::Vm(vm.to_owned());
        let missing: Vec<(WindowId, Arc<WindowFile>)>;
        let monitor = {
            let mut state = sys::lock(&self.state);
            let Some(of) = state.vms.get_mut(vm) else {
                return;
            };
            of.is_here = true;
            let monitor = of.qmp.clone();
            if let Some(monitor) = &monitor {
                monitor.has_failed.store(false, Relaxed);
            }
            let mut of_vm = Vec::new();
            for (uuid, window) in &mut state.windows {
                if window.standing.has(&party) {
                    window.standing.hide(&party);
                    of_vm.push((*uuid, window.file.clone()));
                }
            }
            missing = of_vm;
            monitor
        };
        if let Some(monitor) = monitor {
            self.add(vm, &monitor, &missing);
        }
    }

    fn seen(&self, vm: &str, uuid: WindowId, len: u64) -> bool {
        let party = Party::Vm(vm.to_owned());
        let to_clean = {
            let mut state = sys::lock(&self.state);
            let window = state.windows.get_mut(&uuid);
            let is_its_own = |window: &&mut Window| {
                window.standing.has(&party) && window.file.device_len() == len
            };
            let Some(window) = window.filter(is_its_own) else {
                return false;
            };
            window.standing.show(&party);
            window.begin_cleaning()
        };
        self.clean(uuid, to_clean);
        true
    }

    fn gone(&self, vm: &str) {
        let party = Party::Vm(vm.to_owned());
        let mut state = sys::lock(&self.state);
        if let Some(of) = state.vms.get_mut(vm) {
            of.is_here = false;
        }
        for window in state.windows.values_mut() {
            window.standing.hide(&party);
        }
        self.changed.notify_all();
    }

    fn take(&self, pair: &Pair, kind: Kind, max_ring: u64) -> Result<Lent, NoWindow> {
        if ring_len(MIN_LEN, max_ring).is_none() {
            return Err(NoWindow::TooSmall);
        }
        let deadline = Instant::now() + SHOWN_WITHIN;
        let mut has_added = false;
        loop {
            let state = sys::lock(&self.state);
            let found = state.find(pair, self.uid)?;
            if let Some(uuid) = found {
                return self.lend(state, uuid, pair, kind, max_ring);
            }
            if !has_added {
                has_added = true;
                let Pair::Vms { a, b } = pair else {
                    return Err(NoWindow::Busy);
                };
                drop(state);
                self.add_between(a, b)?;
                continue;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(NoWindow::Busy);
            }
            let waited = self.changed.wait_timeout(state, left);
            drop(waited.unwrap_or_else(PoisonError::into_inner));
        }
    }

    fn released(&self, uuid: WindowId, generation: u64, by: &Party) -> bool {
        let (is_believed, to_clean) = {
            let mut state = sys::lock(&self.state);
            let Some(window) = state.windows.get_mut(&uuid) else {
                return false;
            };
            let is_believed = window.standing.release(generation, by);
            (is_believed, window.begin_cleaning())
        };
        self.clean(uuid, to_clean);
        is_believed
    }

    fn quarantine(&self, uuid: WindowId, generation: u64, by: &Party) {
        if let Some(window) = sys::lock(&self.state).windows.get_mut(&uuid) {
            window.standing.be_late(generation, by);
        }
    }

    fn file(&self, uuid: WindowId) -> io::Result<OwnedFd> {
        match sys::lock(&self.state).windows.get(&uuid) {
            Some(window) => window.file.descriptor(),
            None => Err(io::ErrorKind::NotFound.into()),
        }
    }

    fn list(&self) -> Vec<WindowStatus> {
        let state = sys::lock(&self.state);
        let status = |(uuid, window): (&WindowId, &Window)| WindowStatus {
            uuid: *uuid,
            owners: window.owners.clone(),
            len: window.file.file_len(),
            state: window.state(),
            generation: window.standing.generation(),
        };
        state.windows.iter().map(status).collect()
    }
}

impl State {
    /// A free window of this pair. `uid` is the daemon's own.
    fn find(&self, pair: &Pair, uid: u32) -> Result<Option<WindowId>, NoWindow> {
        let rank = |window: &Window| rank(window, pair, uid);
        let mut of_pair = self
            .windows
            .iter()
            .filter_map(|(uuid, window)| Some((rank(window)?, uuid, window)))
            .peekable();
        // Two VMs may yet get one.
        if of_pair.peek().is_none() && matches!(pair, Pair::Host { .. }) {
            return Err(NoWindow::None);
        }
        let free = of_pair.filter(|(.., window)| window.state() == WindowState::Free);
        let found = free.min_by_key(|(rank, ..)| *rank);
        Ok(found.map(|(_, uuid, _)| *uuid))
    }

    /// Whether these two may have one more, each with the monitor of its VMM.
    fn room_between(&self, a: &str, b: &str) -> Result<[Arc<Monitor>; 2], NoWindow> {
        if a == b {
            return Err(NoWindow::None);
        }
        let room = |name: &str| {
            let vm = self.vms.get(name).filter(|vm| vm.is_here);
            let vm = vm.ok_or(NoWindow::None)?;
            let monitor = vm.qmp.clone().ok_or(NoWindow::None)?;
            if monitor.has_failed.load(Relaxed) {
                return Err(NoWindow::None);
            }
            let party = Party::Vm(name.to_owned());
            let of_vm = self.windows.values().filter(|window| {
                matches!(window.owners, Owners::Vms { .. }) && window.standing.has(&party)
            });
            match of_vm.count() < vm.spec.count as usize {
                true => Ok(monitor),
                false => Err(NoWindow::Busy),
            }
        };
        Ok([room(a)?, room(b)?])
    }
}

/// Whether a window is of this pair: the lower, the sooner it is taken. Those that have a user already come first.
fn rank(window: &Window, pair: &Pair, own_uid: u32) -> Option<u8> {
    match (pair, &window.owners) {
        (Pair::Host { vm, uid }, Owners::Host { vm: of, uid: owner }) if vm == of => {
            let is_for_strangers =
                window.file.is_sealed() && window.file.file_len() <= MAX_LEN_BETWEEN_STRANGERS;
            let is_for_them = is_for_strangers || [0, own_uid].contains(uid);
            match owner {
                _ if !is_for_them => None,
                None => Some(1),
                Some(owner) => (owner == uid).then_some(0),
            }
        }
        (
            Pair::Vms { a, b },
            Owners::Vms {
                a: first,
                b: second,
            },
        ) => {
            let is_theirs = (a == first && b == second) || (a == second && b == first);
            is_theirs.then_some(0)
        }
        _ => None,
    }
}

impl Window {
    fn state(&self) -> WindowState {
        match self.is_broken {
            true => WindowState::Quarantined,
            false => self.standing.state(),
        }
    }

    /// Its file, if it is time to clean it and that is not under way. It is not free until that is done.
    fn begin_cleaning(&mut self) -> Option<Arc<WindowFile>> {
        if self.is_being_cleaned || !self.standing.is_to_be_cleaned() {
            return None;
        }
        self.is_being_cleaned = true;
        Some(self.file.clone())
    }
}

impl Windows {
    /// Takes what was in a window out of it.
    fn clean(&self, uuid: WindowId, file: Option<Arc<WindowFile>>) {
        if let Some(file) = file {
            let renewed = file.renew();
            if let Some(window) = sys::lock(&self.state).windows.get_mut(&uuid) {
                window.is_being_cleaned = false;
                window.is_broken = renewed.is_err();
                if renewed.is_ok() {
                    window.standing.be_clean();
                }
            }
            if renewed.is_ok() {
                self.tell(WindowState::Free, uuid);
            }
            if let Err(error) = renewed {
                tracing::error!(window = %uuid, %error, "cannot clean a window: it stays out of use");
            }
        }
        self.changed.notify_all();
    }

    fn tell(&self, state: WindowState, uuid: WindowId) {
        let Some(observer) = self.observer.get() else {
            return;
        };
        let vms = sys::lock(&self.state)
            .windows
            .get(&uuid)
            .map(|window| match &window.owners {
                Owners::Host { vm, .. } => vm.clone(),
                Owners::Vms { a, b } => format!("{a},{b}"),
            });
        if let Some(vms) = vms {
            observer(state, vms);
        }
    }

    /// Begins a new life of a window that is free.
    fn lend(
        &self,
        mut state: MutexGuard<'_, State>,
        uuid: WindowId,
        pair: &Pair,
        kind: Kind,
        max_ring: u64,
    ) -> Result<Lent, NoWindow> {
        state.generation += 1;
        let generation = state.generation;
        // It was found a moment ago.
        let window = state.windows.get_mut(&uuid).ok_or(NoWindow::Busy)?;
        let ring_len = ring_len(window.file.file_len(), max_ring).ok_or(NoWindow::TooSmall)?;
        let file = window.file.clone();
        if let Pair::Host { uid, .. } = pair {
            self.give_to(&mut state, uuid, *uid)?;
        }
        let window = state.windows.get_mut(&uuid).ok_or(NoWindow::Busy)?;
        window.standing.begin(generation);
        let parties = match &window.owners {
            Owners::Host { vm, .. } => [Party::Host, Party::Vm(vm.clone())],
            Owners::Vms { a, b } => [a, b].map(|vm| Party::Vm(vm.clone())),
        };
        drop(state);
        let mut nonce = [0; 16];
        random(&mut nonce);
        let life = Life {
            generation,
            nonce,
            ring_len,
            has_records: kind == Kind::Records,
        };
        if let Err(error) = file.format(&life) {
            tracing::error!(window = %uuid, %error, "cannot prepare a window");
            for party in &parties {
                self.released(uuid, generation, party);
            }
            return Err(NoWindow::Failed);
        }
        self.tell(WindowState::InUse, uuid);
        Ok(Lent {
            uuid,
            generation,
            nonce,
            ring_len,
            offset: DATA_OFFSET,
            kind,
        })
    }

    /// Has a window belong to this user from now on.
    fn give_to(&self, state: &mut State, uuid: WindowId, uid: u32) -> Result<(), NoWindow> {
        let window = state.windows.get_mut(&uuid).ok_or(NoWindow::Busy)?;
        let Owners::Host { vm, uid: owner } = &mut window.owners else {
            return Ok(());
        };
        let key = window.index.map(|index| (vm.clone(), index));
        let is_new = owner.replace(uid).is_none();
        let Some(key) = key.filter(|_| is_new) else {
            return Ok(());
        };
        let mut record = state.record.clone();
        if let Some(remembered) = record.get_mut(&key) {
            remembered.uid = Some(uid);
        }
        // Before it is given away: the next daemon must know whose it is.
        self.remember(state, record).map_err(|error| {
            tracing::error!(window = %uuid, %error, "cannot remember whose a window is");
            if let Some(window) = state.windows.get_mut(&uuid) {
                window.owners = Owners::Host {
                    vm: key.0.clone(),
                    uid: None,
                };
            }
            NoWindow::Failed
        })
    }

    /// Makes a window for two VMs, and adds it to both.
    fn add_between(&self, a: &str, b: &str) -> Result<(), NoWindow> {
        let uuid = new_uuid();
        let (file, monitors) = {
            let mut state = sys::lock(&self.state);
            let monitors = state.room_between(a, b)?;
            // It found both a moment ago.
            let wanted = state.vms[a].spec.len.min(state.vms[b].spec.len);
            let len = wanted.min(MAX_LEN_BETWEEN_STRANGERS);
            let file = WindowFile::sealed(uuid.0, len).map_err(|error| {
                tracing::error!(%error, "cannot make a window");
                NoWindow::Failed
            })?;
            let file = Arc::new(file);
            let [a, b] = [a, b].map(str::to_owned);
            let window = Window {
                file: file.clone(),
                standing: Standing::between([Party::Vm(a.clone()), Party::Vm(b.clone())]),
                owners: Owners::Vms { a, b },
                index: None,
                is_being_cleaned: false,
                is_broken: false,
            };
            // Entered before it is added, so that it counts, and that an agent may show it at once.
            state.windows.insert(uuid, window);
            (file, monitors)
        };
        let [of_a, of_b] = monitors;
        // A device cannot be taken away again, and memory can. So the first VMM gets the device when the second has it.
        let prepared = noted(a, of_a.errand(|qmp| add_memory(qmp, uuid, &file)));
        let is_added = prepared && self.add(b, &of_b, &[(uuid, file)]);
        if !is_added {
            let remove = |qmp: &mut Qmp| qmp.remove_memory(&uuid.to_string());
            if let Some(Err(error)) = prepared.then(|| of_a.errand(remove)) {
                tracing::warn!(vm = a, %error, "QEMU keeps memory that has no device");
            }
            sys::lock(&self.state).windows.remove(&uuid);
            return Err(NoWindow::Failed);
        }
        let plugged = of_a.errand(|qmp| qmp.add_device(&uuid.to_string(), of_a.ports));
        // If it fails, the second VMM keeps its device, and the first is asked again when its agent comes again.
        match noted(a, plugged) {
            true => Ok(()),
            false => Err(NoWindow::Failed),
        }
    }

    /// Adds windows to a VMM, as far as it does not have them. Returns whether it has them all now.
    fn add(&self, vm: &str, monitor: &Monitor, windows: &[(WindowId, Arc<WindowFile>)]) -> bool {
        noted(vm, monitor.add(windows))
    }
}

/// Whether a VMM has done what it was asked.
fn noted(vm: &str, done: Result<(), QmpError>) -> bool {
    match &done {
        Ok(()) | Err(QmpError::HasFailed) => {}
        Err(error) => {
            tracing::warn!(vm, %error, "cannot add windows: circuits are streams until the VM's agent connects again");
        }
    }
    done.is_ok()
}

impl Monitor {
    fn add(&self, windows: &[(WindowId, Arc<WindowFile>)]) -> Result<(), QmpError> {
        self.errand(|qmp| {
            let there: BTreeSet<String> = qmp.windows()?;
            for (uuid, file) in windows {
                let name = uuid.to_string();
                if !there.contains(&name) {
                    let descriptor = file.descriptor()?;
                    qmp.add_window(&name, descriptor.as_fd(), file.file_len(), self.ports)?;
                    tracing::info!(window = name, qmp = %self.path.display(), "added a window");
                }
            }
            Ok(())
        })
    }

    /// One connection, unless an earlier one has failed, also while this one waited for it.
    fn errand(
        &self,
        errand: impl FnOnce(&mut Qmp) -> Result<(), QmpError>,
    ) -> Result<(), QmpError> {
        // Nothing of ours depends on it.
        let _one_client = sys::lock(&self.lock);
        if self.has_failed.load(Relaxed) {
            return Err(QmpError::HasFailed);
        }
        let done = Qmp::connect(&self.path).and_then(|mut qmp| errand(&mut qmp));
        self.has_failed.fetch_or(done.is_err(), Relaxed);
        done
    }
}

fn add_memory(qmp: &mut Qmp, uuid: WindowId, file: &WindowFile) -> Result<(), QmpError> {
    let descriptor = file.descriptor()?;
    qmp.add_memory(&uuid.to_string(), descriptor.as_fd(), file.file_len())
}
