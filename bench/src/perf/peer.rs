//! The program that others use today, for comparison.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The crate's name and version.
pub const CRATE: &str = "vhost-device-vsock";
/// Fixed, so that runs can be compared.
pub const VERSION: &str = "0.3.0";

/// Where an installed peer is, if it is there.
pub fn find(root: &Path) -> Option<PathBuf> {
    let program = root.join("bin").join(CRATE);
    program.is_file().then_some(program)
}

/// Installs it from the registry, unless it is there.
///
/// # Errors
/// In words, when it cannot be built.
pub fn install(root: &Path) -> Result<PathBuf, String> {
    if let Some(program) = find(root) {
        return Ok(program);
    }
    let status = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()))
        .args(["install", "--locked", "--version", VERSION, "--root"])
        .arg(root)
        .arg("--target-dir")
        .arg(root.join("build"))
        .arg(CRATE)
        .status()
        .map_err(|error| format!("cargo: {error}"))?;
    find(root).ok_or_else(|| format!("cargo install {CRATE} {VERSION} ended with {status}"))
}
