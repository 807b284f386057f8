//! Programs from unpacked Debian packages, each with the shared libraries that it needs, found by what its ELF header asks for. Nothing
//! is taken from the machine this runs on.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow};
use goblin::elf::Elf;

use super::cpio::Archive;
use super::files;

const LIBRARY_DIRECTORIES: &[&str] = &[
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/x86_64-linux-gnu/systemd",
    "lib/x86_64-linux-gnu",
    "usr/lib",
    "lib",
    "usr/lib64",
    "lib64",
];

/// Adds `paths` (relative to `root`, files or directories) to the archive under `usr`, and the libraries they need.
pub fn add_programs(archive: &mut Archive, root: &Path, paths: &[&str]) -> Result<()> {
    let mut queue = Vec::new();
    for path in paths {
        collect(root, Path::new(path), &mut queue)?;
    }
    let mut done = BTreeSet::new();
    while let Some(path) = queue.pop() {
        let inside = under_usr(&path);
        if !done.insert(inside.clone()) {
            continue;
        }
        let full = resolve(root, &path)?;
        let content = fs::read(&full).with_context(|| format!("cannot read {}", full.display()))?;
        archive.file(&inside, files::mode_of(&full)?, &content)?;
        if !content.starts_with(b"\x7fELF") {
            continue;
        }
        let elf = Elf::parse(&content).with_context(|| format!("in {}", full.display()))?;
        for library in &elf.libraries {
            queue.push(
                find_library(root, library)
                    .with_context(|| format!("needed by {}", path.display()))?,
            );
        }
        if let Some(loader) = elf.interpreter {
            queue.push(PathBuf::from(loader.trim_start_matches('/')));
        }
    }
    Ok(())
}

/// True when the program needs neither a loader nor a library.
pub fn is_static(content: &[u8]) -> Result<bool> {
    let elf = Elf::parse(content).context("not a program")?;
    Ok(elf.interpreter.is_none() && elf.libraries.is_empty())
}

/// All files at or below `path`.
fn collect(root: &Path, path: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    if !resolve(root, path)?.is_dir() {
        found.push(path.to_path_buf());
        return Ok(());
    }
    for entry in fs::read_dir(root.join(path))? {
        collect(root, &path.join(entry?.file_name()), found)?;
    }
    Ok(())
}

/// Follows symbolic links inside `root`, where an absolute link would lead out of it.
fn resolve(root: &Path, path: &Path) -> Result<PathBuf> {
    /// As many links in a row as Linux follows.
    const LINK_LIMIT: usize = 40;
    let mut current = path.to_path_buf();
    for _ in 0..LINK_LIMIT {
        let full = root.join(&current);
        let metadata = fs::symlink_metadata(&full)
            .with_context(|| format!("no package has {}", path.display()))?;
        if !metadata.is_symlink() {
            return Ok(full);
        }
        let target = fs::read_link(&full)?;
        current = match target.strip_prefix("/") {
            Ok(inside) => inside.to_path_buf(),
            Err(_) => current.parent().unwrap_or(Path::new("")).join(target),
        };
    }
    Err(anyhow!("too many symbolic links at {}", path.display()))
}

fn find_library(root: &Path, name: &str) -> Result<PathBuf> {
    LIBRARY_DIRECTORIES
        .iter()
        .map(|directory| Path::new(directory).join(name))
        .find(|path| fs::symlink_metadata(root.join(path)).is_ok())
        .ok_or_else(|| anyhow!("no package has the library {name}"))
}

/// The guest has one `/usr`, and `/bin`, `/lib` and the like lead there.
fn under_usr(path: &Path) -> String {
    let text = path.to_string_lossy();
    let is_split = ["bin/", "sbin/", "lib/", "lib64/"]
        .iter()
        .any(|prefix| text.starts_with(prefix));
    if is_split {
        format!("usr/{text}")
    } else {
        text.into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn split_directories_are_merged() {
        assert_eq!(
            under_usr(Path::new("lib/x86_64-linux-gnu/libc.so.6")),
            "usr/lib/x86_64-linux-gnu/libc.so.6"
        );
        assert_eq!(under_usr(Path::new("usr/bin/socat")), "usr/bin/socat");
        assert_eq!(under_usr(Path::new("etc/ssh/moduli")), "etc/ssh/moduli");
    }

    #[test]
    fn this_test_is_not_a_static_program() {
        let own = fs::read(std::env::current_exe().unwrap()).unwrap();
        assert!(!is_static(&own).unwrap());
        assert!(is_static(b"#!/bin/sh\n").is_err());
    }
}
