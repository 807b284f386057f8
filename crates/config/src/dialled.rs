//! Sockets of VMMs that the daemon calls, each of which belongs to one VM, by whatever path its directory is named.

use std::collections::HashMap;
use std::path::Path;

use crate::input::InputError;
use crate::line::LineSpec;
use crate::places::{Place, place, stem_and_port};
use crate::{Chardev, Config, ConfigError, Plan, Publish, PublishListen, Written};

/// Refuses VMMs whose sockets are also another VM's, the daemon's, or where calls of a guest to the host go, and a socket of the daemon's where those of another guest go: the
/// daemon would take one VMM or program for another. What stands at the path is not checked, since the VMM can change it.
///
/// # Errors
/// [`ConfigError::Input`] with the place of the VM.
pub fn check_dialled(config: &Config, plan: &Plan) -> Result<(), ConfigError> {
    let last_first = config.vms.iter().rev().map(|vm| vm.value.full_name());
    find_shared(&config.publishes, plan, last_first).map_err(|Shared { vm, error }| {
        let mut written = config.vms.iter();
        let written = written.find(|written| written.value.full_name() == vm);
        let place = written.map_or_else(|| format!("VM {vm:?}"), |written| written.place.clone());
        ConfigError::Input { place, error }
    })
}

/// Refuses the same when a VM is added.
///
/// # Errors
/// [`InputError::DuplicatePath`] with the owner of the socket.
pub fn check_dialled_with(
    publishes: &[Written<Publish>],
    plan: &Plan,
    added: &LineSpec,
) -> Result<(), InputError> {
    let added = std::iter::once(added.full_name());
    find_shared(publishes, plan, added).map_err(|shared| shared.error)
}

/// A socket that is not the VM's alone.
struct Shared {
    vm: String,
    error: InputError,
}

/// Of two VMs with one socket, the error is about that which comes first in `first`.
fn find_shared(
    publishes: &[Written<Publish>],
    plan: &Plan,
    first: impl Iterator<Item = String>,
) -> Result<(), Shared> {
    let taken = Taken::of(publishes, plan);
    let first: Vec<&LineSpec> = first.filter_map(|name| plan.get(&name)).collect();
    for line in first.into_iter().chain(plan.lines()) {
        let vm = line.full_name();
        let also_called =
            dialled(line).filter_map(|path| Some((path, taken.other_owner(path, &vm)?)));
        let beside = wire::connect::seqpacket_path(&line.host);
        let own = line.sockets().chain([beside.as_path()]);
        let called_there = own.filter_map(|path| {
            let (caller, words) = taken.caller(path)?;
            (caller != vm).then_some((path, words))
        });
        if let Some((path, owner)) = also_called.chain(called_there).next() {
            let path = path.to_owned();
            let error = InputError::DuplicatePath { path, owner };
            return Err(Shared { vm, error });
        }
    }
    for publish in publishes {
        let PublishListen::Unix { path, .. } = &publish.value.listen else {
            continue;
        };
        if let Some((caller, words)) = taken.caller(path) {
            let owner = format!("the published port {:?}, and {words}", publish.value.name);
            let path = path.clone();
            let error = InputError::DuplicatePath { path, owner };
            let vm = caller.to_owned();
            return Err(Shared { vm, error });
        }
    }
    Ok(())
}

/// The sockets of a VM that the daemon calls.
fn dialled(line: &LineSpec) -> impl Iterator<Item = &Path> {
    let channels = line.channels.iter().map(|channel| &channel.chardev);
    let chardevs = line.serial().into_iter().chain(channels);
    let called = chardevs.filter_map(|chardev| match chardev {
        Chardev::Connect(path) => Some(path.as_path()),
        Chardev::Listen(_) => None,
    });
    called.chain(line.hybrid()).chain(line.qmp.as_deref())
}

/// Whose a place is.
#[derive(Clone, PartialEq, Eq)]
enum Owner {
    Vm(String),
    Other(String),
}

/// The places of all sockets.
#[derive(Default)]
struct Taken {
    sockets: HashMap<Place, Vec<Owner>>,
    /// Before `_PORT`, the sockets of a VM's calls to the host.
    stems: HashMap<Place, String>,
}

impl Taken {
    fn of(publishes: &[Written<Publish>], plan: &Plan) -> Taken {
        let mut taken = Taken::default();
        let run = plan.runtime_dir();
        for (path, owner) in [
            (crate::directories::control_socket(run), "the control API"),
            (crate::directories::circuit_socket(run), "the switchboard"),
        ] {
            taken.add(place(&path), Owner::Other(owner.to_owned()));
        }
        for publish in publishes {
            if let PublishListen::Unix { path, .. } = &publish.value.listen {
                let owner = format!("the published port {:?}", publish.value.name);
                taken.add(place(path), Owner::Other(owner));
            }
        }
        for line in plan.lines() {
            let vm = line.full_name();
            let beside = wire::connect::seqpacket_path(&line.host);
            for path in line.sockets().chain([beside.as_path()]) {
                taken.add(place(path), Owner::Vm(vm.clone()));
            }
            let stem = line.hybrid().unwrap_or(&line.host);
            taken.stems.insert(place(stem), vm);
        }
        taken
    }

    fn add(&mut self, place: Place, owner: Owner) {
        self.sockets.entry(place).or_default().push(owner);
    }

    /// In words, what a socket of this VM is also.
    fn other_owner(&self, path: &Path, vm: &str) -> Option<String> {
        let owners = self.sockets.get(&place(path)).into_iter().flatten();
        let mut others = owners.filter(|owner| **owner != Owner::Vm(vm.to_owned()));
        let in_words = |owner: &Owner| match owner {
            Owner::Vm(name) => format!("VM {name:?}"),
            Owner::Other(words) => words.clone(),
        };
        let caller = || Some(self.caller(path)?.1);
        others.next().map(in_words).or_else(caller)
    }

    /// The VM whose guest's calls to a port of the host go there, and that in words.
    fn caller(&self, path: &Path) -> Option<(&str, String)> {
        let (stem, port) = stem_and_port(path)?;
        let vm = self.stems.get(&place(&stem))?;
        let words = format!("VM {vm:?} (its guest's calls to port {port} of the host)");
        Some((vm, words))
    }
}
