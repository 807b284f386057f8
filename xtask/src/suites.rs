//! Programs with tests, as Cargo builds them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

/// All packages, and that with guests alone. All are built by one call of Cargo: for a part of them it chooses other features of what they
/// share, and builds that again.
pub const ALL: &[&str] = &["--workspace"];
pub const SCENARIOS: &[&str] = &["--package", "ringdown-e2e"];

/// A program with tests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Suite {
    /// The package, without the project's name before it.
    pub package: String,
    pub name: String,
    /// Whether these are the unit tests of the package's library.
    pub is_library: bool,
    pub program: PathBuf,
    /// Where Cargo runs it: the package's directory.
    pub directory: PathBuf,
    /// Of its source, in bytes.
    pub len: u64,
}

impl Suite {
    /// Such as `wire`, for the unit tests of a library, and `e2e/boot`.
    pub fn full_name(&self) -> String {
        match self.is_library {
            true => self.package.clone(),
            false => format!("{}/{}", self.package, self.name),
        }
    }
}

/// The suites of the packages that these arguments of `cargo test` choose.
///
/// # Errors
/// When they do not build.
pub fn build(packages: &[&str]) -> Result<Vec<Suite>> {
    let cargo = std::env::var_os("CARGO").unwrap_or("cargo".into());
    let built = Command::new(cargo)
        .arg("test")
        .args(packages)
        .args(["--no-run", "--message-format", "json-render-diagnostics"])
        .stderr(Stdio::inherit())
        .output()
        .context("cannot start cargo")?;
    ensure!(built.status.success(), "the tests do not build");
    let messages = String::from_utf8(built.stdout).context("cargo does not write UTF-8")?;
    messages
        .lines()
        .filter_map(|line| suite(line).transpose())
        .collect()
}

/// The suite that a message of Cargo's is about, if it is about one.
fn suite(message: &str) -> Result<Option<Suite>> {
    let message: Value = serde_json::from_str(message).context("cargo does not write JSON")?;
    let (target, is_test) = (&message["target"], message["profile"]["test"] == true);
    let Some(program) = message["executable"].as_str().filter(|_| is_test) else {
        return Ok(None);
    };
    let source = target["src_path"]
        .as_str()
        .context("a target without a source")?;
    let name = target["name"].as_str().context("a target without a name")?;
    let package = message["package_id"]
        .as_str()
        .and_then(package_name)
        .context("a target without a package")?;
    let manifest = message["manifest_path"].as_str().map(Path::new);
    let directory = manifest
        .and_then(Path::parent)
        .context("a target without a manifest")?;
    let kinds = target["kind"].as_array().into_iter().flatten();
    Ok(Some(Suite {
        package: package.trim_start_matches("ringdown-").to_owned(),
        name: name.to_owned(),
        is_library: kinds
            .filter_map(Value::as_str)
            .any(|kind| kind.ends_with("lib")),
        program: program.into(),
        directory: directory.into(),
        len: fs::metadata(source).map_or(0, |file| file.len()),
    }))
}

/// The name in an identifier such as `path+file:///a/crates/wire#ringdown-wire@0.1.0`, or `path+file:///a/xtask#0.1.0`.
fn package_name(id: &str) -> Option<&str> {
    let (place, version) = id.rsplit_once('#')?;
    match version.split_once('@') {
        Some((name, _)) => Some(name),
        None => place.rsplit('/').next(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_programs_with_tests_are_suites() {
        let tests = r#"{"reason":"compiler-artifact","package_id":"path+file:///x/e2e#ringdown-e2e@0.1.0",
            "manifest_path":"/x/e2e/Cargo.toml","target":{"kind":["test"],"name":"boot","src_path":"/x/e2e/tests/boot.rs"},
            "profile":{"test":true},"executable":"/x/target/boot-1"}"#;
        let found = suite(tests).expect("it is a message").expect("a suite");
        assert_eq!(
            (&*found.package, &*found.name, found.is_library),
            ("e2e", "boot", false)
        );
        assert_eq!(found.full_name(), "e2e/boot");
        assert_eq!(found.directory, Path::new("/x/e2e"));
        let program = tests.replace("\"test\":true", "\"test\":false");
        assert_eq!(suite(&program).expect("it is a message"), None);
        assert_eq!(package_name("path+file:///x/xtask#0.1.0"), Some("xtask"));
        assert!(suite("warning: no JSON").is_err());
        let other = r#"{"reason":"build-finished","success":true}"#;
        assert_eq!(suite(other).expect("it is a message"), None);
    }
}
