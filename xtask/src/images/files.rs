//! Files that appear whole or not at all.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

/// Writes `content` beside `path` and then puts it in its place in one step.
pub fn write_atomically(path: &Path, content: &[u8]) -> Result<()> {
    let partial = partial_path(path);
    fs::write(&partial, content).with_context(|| format!("cannot write {}", partial.display()))?;
    fs::rename(&partial, path).with_context(|| format!("cannot create {}", path.display()))
}

/// Writes the file unless it has that content.
pub fn write_if_changed(path: &Path, content: &[u8]) -> Result<()> {
    match fs::read(path) {
        Ok(present) if present == content => Ok(()),
        _ => write_atomically(path, content),
    }
}

/// Fills a new directory with `build` and gives it its name when that succeeded.
pub fn build_directory(path: &Path, build: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let partial = partial_path(path);
    if partial.exists() {
        fs::remove_dir_all(&partial)?;
    }
    fs::create_dir_all(&partial).with_context(|| format!("cannot create {}", partial.display()))?;
    build(&partial)?;
    fs::rename(&partial, path).with_context(|| format!("cannot create {}", path.display()))
}

/// True when a program of that name is in `$PATH`, or where only root's `$PATH` leads.
pub fn in_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain([PathBuf::from("/usr/sbin"), PathBuf::from("/sbin")])
        .any(|directory| directory.join(program).is_file())
}

/// The mode bits of a file, for an archive: its execute bits hold in the guest.
pub fn mode_of(path: &Path) -> Result<u32> {
    let mode = fs::metadata(path)
        .with_context(|| format!("{} is not there", path.display()))?
        .permissions()
        .mode();
    Ok(if mode & 0o100 == 0 { 0o644 } else { 0o755 })
}

/// A SHA-256 over several inputs; each is set apart from the next by its length.
#[derive(Debug, Default)]
pub struct Fingerprint(Sha256);

impl Fingerprint {
    /// Adds one input.
    #[must_use]
    pub fn with(mut self, input: impl AsRef<[u8]>) -> Fingerprint {
        let input = input.as_ref();
        self.0.update((input.len() as u64).to_le_bytes());
        self.0.update(input);
        self
    }

    /// The result, in hexadecimal.
    pub fn finish(self) -> String {
        self.0
            .finalize()
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect()
    }
}

fn partial_path(path: &Path) -> PathBuf {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(".partial");
    path.with_file_name(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fingerprint_tells_inputs_apart() {
        let joined = Fingerprint::default().with("ab").with("c").finish();
        assert_ne!(joined, Fingerprint::default().with("a").with("bc").finish());
        assert_eq!(joined, Fingerprint::default().with("ab").with("c").finish());
        assert_eq!(joined.len(), 64);
    }
}
