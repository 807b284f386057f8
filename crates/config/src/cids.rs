//! Which context identifier belongs to which name, also when the VM is away and after the daemon has been started anew.
//!
//! Guests and their programs may keep a CID, and a person learns it by heart: so a name that was given one gets it again,
//! and one that belonged to a name is not given to another unless that asks for it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use policy::full_name;
use serde::{Deserialize, Serialize};
use wire::vsock::{CID_ANY, MIN_GUEST_CID};

use crate::input::{check_cid, check_name_of};
use crate::state::{StateError, StateFile, check_version};

/// The most names that are remembered. Then, of those that are away, the one that was given its CID first is forgotten.
pub const MAX_REMEMBERED: usize = 16_384;

/// The longest state file, in bytes: a name of 63 bytes in a domain of 63 bytes takes less than 256.
const MAX_STATE_LEN: u64 = 256 * MAX_REMEMBERED as u64;

const VERSION: u32 = 1;

const FILE: StateFile = StateFile {
    name: "cids.json",
    max_len: MAX_STATE_LEN,
    without_it: "VMs without a `cid` are given new CIDs",
};

/// The memory of names and their context identifiers, in the order in which they were given.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Cids {
    entries: Vec<Entry>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    domain: String,
    name: String,
    cid: u32,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    version: u32,
    cids: Vec<Entry>,
}

impl Cids {
    /// The file of a state directory.
    pub fn file(state_dir: &Path) -> PathBuf {
        FILE.path(state_dir)
    }

    /// Reads the memory of a state directory. Where there is no file nothing is remembered.
    ///
    /// # Errors
    /// [`StateError::Broken`] when the file is not what [`Cids::save`] writes, [`StateError::Unreadable`] when it cannot be read.
    pub fn load(state_dir: &Path) -> Result<Cids, StateError> {
        let read = |document: Document| {
            let entries = document.cids;
            let cids = Cids { entries };
            check_version(document.version, VERSION)?;
            cids.check()?;
            Ok(cids)
        };
        Ok(FILE.load(state_dir, read)?.unwrap_or_default())
    }

    /// Writes the memory into a state directory: all of it or, if that fails, nothing.
    ///
    /// # Errors
    /// [`StateError::Unwritable`].
    pub fn save(&self, state_dir: &Path) -> Result<(), StateError> {
        let document = Document {
            version: VERSION,
            cids: self.entries.clone(),
        };
        FILE.save(state_dir, &document)
    }

    /// What a name had last.
    pub fn of(&self, domain: &str, name: &str) -> Option<u32> {
        let entry = self
            .entries
            .iter()
            .find(|entry| entry.domain == domain && entry.name == name)?;
        Some(entry.cid)
    }

    /// The VMs that were given one.
    pub(crate) fn full_names(&self) -> impl Iterator<Item = String> {
        let entries = self.entries.iter();
        entries.map(|entry| full_name(&entry.domain, &entry.name))
    }

    /// The identifiers of a domain that belong to names.
    pub fn of_domain(&self, domain: &str) -> BTreeSet<u32> {
        let of_domain = self.entries.iter().filter(|entry| entry.domain == domain);
        of_domain.map(|entry| entry.cid).collect()
    }

    /// Remembers that a name has an identifier now. Its owner before is forgotten. When there are too many names, the
    /// oldest that is away is forgotten; `in_use` says which are not.
    pub fn remember(
        &mut self,
        domain: &str,
        name: &str,
        cid: u32,
        in_use: impl Fn(&str, &str) -> bool,
    ) {
        if self.of(domain, name) == Some(cid) {
            return;
        }
        let same_name = |entry: &Entry| entry.name == name || entry.cid == cid;
        self.entries
            .retain(|entry| entry.domain != domain || !same_name(entry));
        if self.entries.len() >= MAX_REMEMBERED {
            let away = |entry: &Entry| !in_use(&entry.domain, &entry.name);
            // A daemon has fewer VMs than it remembers names, so there is one.
            if let Some(index) = self.entries.iter().position(away) {
                self.entries.remove(index);
            }
        }
        self.entries.push(Entry {
            domain: domain.to_owned(),
            name: name.to_owned(),
            cid,
        });
    }

    fn check(&self) -> Result<(), String> {
        if self.entries.len() > MAX_REMEMBERED {
            return Err(format!("it has more than {MAX_REMEMBERED} names"));
        }
        let (mut names, mut cids) = (BTreeSet::new(), BTreeSet::new());
        for entry in &self.entries {
            check_name_of("a VM", &entry.name)
                .and_then(|()| check_name_of("a domain", &entry.domain))
                .and_then(|()| check_cid(entry.cid.into()))
                .map_err(|error| error.to_string())?;
            if !names.insert((&entry.domain, &entry.name)) {
                return Err(format!("{:?} is there twice", entry.name));
            }
            if !cids.insert((&entry.domain, entry.cid)) {
                return Err(format!("CID {} is there twice", entry.cid));
            }
        }
        Ok(())
    }

    /// The lowest identifier that is in none of these sets.
    pub(super) fn lowest_free(taken: &[&BTreeSet<u32>]) -> Option<u32> {
        (MIN_GUEST_CID..CID_ANY).find(|cid| taken.iter().all(|set| !set.contains(cid)))
    }
}
