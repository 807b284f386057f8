//! Files of the state directory: each is one JSON document that is read when the daemon starts and replaced as a whole.

use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};

use serde::Serialize;
use serde::de::DeserializeOwned;

/// A file of the state directory.
pub struct StateFile {
    /// Its name, such as `cids.json`.
    pub name: &'static str,
    /// The most bytes that it has.
    pub max_len: u64,
    /// What happens if it is removed, in words.
    pub without_it: &'static str,
}

/// Why what is remembered cannot be read or written.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("the state file {} is broken: {what}; repair it, or remove it and {without_it}", path.display())]
    Broken {
        path: PathBuf,
        what: String,
        /// What happens if it is removed, in words.
        without_it: &'static str,
    },
    #[error("cannot read the state file {}: {error}", path.display())]
    Unreadable { path: PathBuf, error: io::Error },
    #[error("cannot write the state file {}: {error}; make room, or name another directory with state-dir", path.display())]
    Unwritable { path: PathBuf, error: io::Error },
}

impl StateFile {
    /// Where it is in a state directory.
    pub(super) fn path(&self, state_dir: &Path) -> PathBuf {
        state_dir.join(self.name)
    }

    /// Reads the document, if there is one. `check` makes of it what is remembered, or says what is wrong with it.
    ///
    /// # Errors
    /// [`StateError::Broken`], [`StateError::Unreadable`].
    pub fn load<D: DeserializeOwned, T>(
        &self,
        state_dir: &Path,
        check: impl FnOnce(D) -> Result<T, String>,
    ) -> Result<Option<T>, StateError> {
        let path = self.path(state_dir);
        let unreadable = |error| StateError::Unreadable {
            path: path.clone(),
            error,
        };
        let broken = |what: String| StateError::Broken {
            path: path.clone(),
            what,
            without_it: self.without_it,
        };
        let file = match File::open(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(unreadable(error)),
        };
        let mut text = Vec::new();
        file.take(self.max_len + 1)
            .read_to_end(&mut text)
            .map_err(unreadable)?;
        if text.len() as u64 > self.max_len {
            return Err(broken(format!("it is longer than {} bytes", self.max_len)));
        }
        let document = serde_json::from_slice(&text).map_err(|error| broken(error.to_string()))?;
        check(document).map(Some).map_err(broken)
    }

    /// Replaces the document: all of it or, if that fails, nothing.
    ///
    /// # Errors
    /// [`StateError::Unwritable`].
    pub fn save(&self, state_dir: &Path, document: &impl Serialize) -> Result<(), StateError> {
        let path = self.path(state_dir);
        let write = || -> io::Result<()> {
            let mut text = serde_json::to_vec(document)?;
            text.push(b'\n');
            let mut file = tempfile::Builder::new()
                .prefix(&format!(".{}.", self.name))
                .tempfile_in(state_dir)?;
            file.write_all(&text)?;
            // On the disk before it has the name: a machine that loses power finds the old file or the new one.
            file.as_file().sync_all()?;
            file.persist(&path)?;
            File::open(state_dir)?.sync_all()
        };
        write().map_err(|error| StateError::Unwritable { path, error })
    }
}

/// Refuses a document of another version.
///
/// # Errors
/// What is wrong, in words.
pub fn check_version(found: u32, known: u32) -> Result<(), String> {
    match found == known {
        true => Ok(()),
        false => Err(format!(
            "it has version {found}, and this daemon knows {known}"
        )),
    }
}
