//! Landlock: which files this process can open.

use std::io::ErrorKind;
use std::os::fd::AsFd;
use std::path::PathBuf;

use landlock::{
    ABI, Access, AccessFs, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, RulesetError, RulesetStatus, Scope,
};

use sys::links::{Fuse, find};

use super::places::Places;

/// What this code knows. An older kernel enforces what it knows of it, as far as that goes.
const KNOWN: ABI = ABI::V6;

/// What confines a thread to some places, without those that cannot be found in time.
pub(super) fn ruleset(places: &mut Places) -> Result<RulesetCreated, RulesetError> {
    let everything = AccessFs::from_all(KNOWN);
    let ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(everything)?
        // No signal leaves this process: those that programs get are sent by the process that starts them.
        .scope(Scope::Signal)?
        .create()?;
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let device = AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev;
    let write = AccessFs::ReadFile
        | AccessFs::ReadDir
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::MakeSock
        | AccessFs::MakeDir
        | AccessFs::RemoveFile
        | AccessFs::RemoveDir
        | AccessFs::Refer;
    // What is not there needs no permission. A need of it fails where it is used, with its name.
    let open = |path: &PathBuf| PathFd::new(path).ok();
    let ruleset = allow(ruleset, places.read.iter().filter_map(open), read)?;
    let ruleset = allow(ruleset, places.devices.iter().filter_map(open), device)?;
    // Some are VMMs' directories, which may be in FUSE by now.
    let mut found = Vec::new();
    places.write.retain(|path| match find(path, Fuse::Refused) {
        Ok(place) => {
            found.push(place);
            true
        }
        // Its use is refused by name until a restart, as that of what is named later.
        Err(error) if error.kind() == ErrorKind::TimedOut => {
            let path = path.display();
            tracing::error!(
                "the sandbox leaves {path} out, until the daemon is started anew: {error}"
            );
            false
        }
        Err(_) => true,
    });
    allow(ruleset, found.into_iter(), write)
}

/// Confines this thread, and those that it starts. Returns whether the kernel can do that.
pub(super) fn confine(ruleset: RulesetCreated) -> Result<bool, RulesetError> {
    let status = ruleset.restrict_self()?;
    let confines = status.ruleset != RulesetStatus::NotEnforced;
    if !confines {
        tracing::warn!(
            "this kernel has no Landlock (or it is not among those that `lsm=` names): system calls are confined, files are not"
        );
    }
    Ok(confines)
}

/// Whether the kernel has Landlock at all.
pub(super) fn is_known() -> bool {
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement);
    let first = ruleset.handle_access(AccessFs::from_all(ABI::V1));
    first.and_then(Ruleset::create).is_ok()
}

fn allow(
    mut ruleset: RulesetCreated,
    places: impl Iterator<Item = impl AsFd>,
    access: landlock::BitFlags<AccessFs>,
) -> Result<RulesetCreated, RulesetError> {
    for place in places {
        ruleset = ruleset.add_rule(PathBeneath::new(place, access))?;
    }
    Ok(ruleset)
}
