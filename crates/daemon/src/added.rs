//! VMs that were added by hand, kept for the daemon that comes after this one: no file names them.

use api::{NewVm, PartKind};
use config::{LineSpec, Plan, parse_vm_members};
use keeper::Keeper;
use runtime::directory::remove_stale_socket;

use crate::in_force::{InForce, Manner, Parts};

/// What their keys begin with.
const KEY: &str = "added:";

fn key(full_name: &str) -> String {
    format!("{KEY}{full_name}")
}

/// Keeps the description of a VM that was added.
pub(crate) fn keep(keeper: Option<&Keeper>, spec: &LineSpec, described: &[u8]) {
    let Some(keeper) = keeper else { return };
    let vm = spec.full_name();
    if let Err(error) = keeper.put(&key(&vm), described, &[]) {
        tracing::warn!(vm, %error, "cannot keep the description of this VM: it is gone with this daemon");
    }
}

/// A VM is no more.
pub(crate) fn forget(keeper: Option<&Keeper>, full_name: &str) {
    if let Some(keeper) = keeper {
        keeper.drop_item(&key(full_name));
    }
}

/// Adds again what a predecessor has kept, but for VMs that the file names by now: they come and go with it.
pub(crate) fn add_again(parts: &Parts, mut in_force: InForce) -> InForce {
    let Some(keeper) = &parts.keeper else {
        return in_force;
    };
    for found in keeper.untaken() {
        let Some(vm) = found.strip_prefix(KEY) else {
            continue;
        };
        let Some(item) = keeper.take(&found) else {
            continue;
        };
        if in_force.configured.contains(vm) {
            keeper.drop_item(&found);
            continue;
        }
        match add_one(parts, &in_force, &item.value) {
            Ok(next) => {
                tracing::info!(vm, "added a VM again");
                in_force = next;
            }
            Err(error) => {
                tracing::warn!(vm, %error, "cannot add a VM again that the daemon before had");
                keeper.drop_item(&found);
            }
        }
    }
    in_force
}

/// Removes the sockets of VMs that a daemon which has died had and that are no more, but for those at which a program listens.
pub(crate) fn remove_left_sockets(plan: &Plan) {
    for socket in plan.sockets_of_absent() {
        if matches!(remove_stale_socket(&socket), Ok(true)) {
            let socket = socket.display();
            tracing::warn!(%socket, "removed the stale socket of a VM that a daemon which has died had");
        }
    }
}

fn add_one(
    parts: &Parts,
    in_force: &InForce,
    described: &[u8],
) -> Result<InForce, Box<dyn std::error::Error>> {
    let new: NewVm = serde_json::from_slice(described)?;
    let request = parse_vm_members(&new).map_err(|refused| refused.value)?;
    crate::sandbox::check_vm(&request)?;
    let mut next = in_force.clone();
    let part = (PartKind::Vm, next.book.add(&request)?.full_name());
    next.unavailable.insert(part.clone(), String::new());
    // Its name and its CID are taken from here on, whether its sockets can be made or not.
    parts.put_in_force(in_force, &next, Manner::Whole, false)?;
    Ok(parts.try_to_have(next, &[part]))
}
