//! Which context identifier belongs to which name, also when the VM is away and after the daemon has been started anew.
//!
//! Guests and their programs may keep a CID, and a person learns it by heart: so a name that was given one gets it again,
//! and one that belonged to a name is not given to another unless somebody asks for it.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use wire::vsock::{CID_ANY, MIN_GUEST_CID};

use crate::input::{check_cid, check_name_of};

/// The most names that are remembered. Then, of those that are away, the one that was given its CID first is forgotten.
pub const MAX_REMEMBERED: usize = 16_384;

/// The longest state file, in bytes: a name of 63 bytes in a domain of 63 bytes takes less than 256.
const MAX_STATE_LEN: u64 = 256 * MAX_REMEMBERED as u64;

const VERSION: u32 = 1;

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

/// Why the memory cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum CidError {
    /// The file is not what was written.
    #[error(
        "the state file {} is broken: {what}; repair it, or remove it and VMs without a `cid` are given new CIDs",
        path.display()
    )]
    Broken {
        /// The file.
        path: PathBuf,
        /// What was found.
        what: String,
    },
    /// The system does not let us read it.
    #[error("cannot read the state file {}: {error}", path.display())]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
    /// The system does not let us write it.
    #[error(
        "cannot write the state file {}: {error}; make room, or name another directory with state-dir",
        path.display()
    )]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// What the system said.
        error: io::Error,
    },
}

impl Cids {
    /// The file of a state directory.
    pub fn file(state_dir: &Path) -> PathBuf {
        state_dir.join("cids.json")
    }

    /// Reads the memory of a state directory. Where there is no file nothing is remembered.
    ///
    /// # Errors
    /// [`CidError::Broken`] when the file is not what [`Cids::save`] writes, [`CidError::Unreadable`] when it cannot be read.
    pub fn load(state_dir: &Path) -> Result<Cids, CidError> {
        let path = Cids::file(state_dir);
        let unreadable = |error| CidError::Unreadable {
            path: path.clone(),
            error,
        };
        let broken = |what: String| CidError::Broken {
            path: path.clone(),
            what,
        };
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Cids::default()),
            Err(error) => return Err(unreadable(error)),
        };
        let mut text = Vec::new();
        file.take(MAX_STATE_LEN + 1)
            .read_to_end(&mut text)
            .map_err(unreadable)?;
        if text.len() as u64 > MAX_STATE_LEN {
            return Err(broken(format!("it is longer than {MAX_STATE_LEN} bytes")));
        }
        let document: Document =
            serde_json::from_slice(&text).map_err(|error| broken(error.to_string()))?;
        let cids = Cids {
            entries: document.cids,
        };
        if document.version != VERSION {
            let found = document.version;
            return Err(broken(format!(
                "it has version {found}, and this daemon knows {VERSION}"
            )));
        }
        cids.check().map_err(broken)?;
        Ok(cids)
    }

    /// Writes the memory into a state directory: all of it or, if that fails, nothing.
    ///
    /// # Errors
    /// [`CidError::Unwritable`].
    pub fn save(&self, state_dir: &Path) -> Result<(), CidError> {
        let path = Cids::file(state_dir);
        let write = || -> io::Result<()> {
            let document = Document {
                version: VERSION,
                cids: self.entries.clone(),
            };
            let mut text = serde_json::to_vec(&document)?;
            text.push(b'\n');
            let mut file = tempfile::Builder::new()
                .prefix(".cids.")
                .tempfile_in(state_dir)?;
            file.write_all(&text)?;
            // On the disk before it has the name: a machine that loses power finds the old file or the new one.
            file.as_file().sync_all()?;
            file.persist(&path)?;
            File::open(state_dir)?.sync_all()
        };
        write().map_err(|error| CidError::Unwritable { path, error })
    }

    /// What a name had last.
    pub fn of(&self, domain: &str, name: &str) -> Option<u32> {
        let entry = self
            .entries
            .iter()
            .find(|entry| entry.domain == domain && entry.name == name)?;
        Some(entry.cid)
    }

    /// The identifiers of a domain that belong to names.
    pub fn of_domain(&self, domain: &str) -> BTreeSet<u32> {
        let of_domain = self.entries.iter().filter(|entry| entry.domain == domain);
        of_domain.map(|entry| entry.cid).collect()
    }

    /// Remembers that a name has an identifier now. Whoever had it before is forgotten. When there are too many names, the
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
