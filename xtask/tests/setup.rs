//! `scripts/setup`, with an apt-get that does what the test says.

#![allow(clippy::unwrap_used)]

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output};

/// Programs that the script uses besides those that it looks for.
const TOOLS: [&str; 11] = [
    "sh", "cat", "cut", "date", "env", "grep", "head", "mktemp", "rm", "sort", "tail",
];

fn program(directory: &Path, name: &str, script: &str) {
    let path = directory.join(name);
    std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
}

/// Runs it where nothing that it needs is there. `apt_get` finds its words in `$*` and how often it was run in `$count`.
fn set_up(apt_get: &str) -> Output {
    let directory = tempfile::tempdir().unwrap();
    let bin = directory.path().join("bin");
    std::fs::create_dir(&bin).unwrap();
    for tool in TOOLS {
        let found = ["/bin", "/usr/bin"].map(|of| Path::new(of).join(tool));
        let found = found.iter().find(|path| path.exists()).unwrap();
        symlink(found, bin.join(tool)).unwrap();
    }
    program(&bin, "id", "echo 0");
    program(&bin, "sleep", "");
    let counting = format!(
        "count=$(cat {0}/count 2>/dev/null || echo 0); count=$((count + 1)); echo $count >{0}/count\n{apt_get}",
        directory.path().display()
    );
    program(&bin, "apt-get", &counting);
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/setup");
    let mut command = Command::new("/bin/sh");
    command.arg(script).env_clear().env("PATH", &bin);
    command.env("HOME", directory.path()).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn it_waits_for_another_package_manager() {
    let lock = |path: &str| {
        format!(
            "echo 'E: Could not get lock {path}. It is held by process 7 (apt-get)' >&2; exit 100"
        )
    };
    let (lists, dpkg) = (
        lock("/var/lib/apt/lists/lock"),
        lock("/var/lib/dpkg/lock-frontend"),
    );
    // The lists twice, then the packages once; then the install goes wrong for another reason, which ends it.
    let output = set_up(&format!(
        "case $count in 1|2) {lists} ;; 3) exit 0 ;; 4) {dpkg} ;; *) echo the end; exit 100 ;; esac"
    ));
    let said = said(&output);
    for lock in ["lists/lock", "dpkg/lock-frontend"] {
        let waits = said.lines().filter(|line| {
            line.contains("waiting for another package manager") && line.contains(lock)
        });
        assert_eq!(waits.count(), 1, "{said}");
    }
    assert!(said.contains("\nthe end\n"), "{said}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn it_shows_what_the_package_manager_says_when_it_fails() {
    let output = set_up(
        "case \"$*\" in *update*) exit 0 ;; esac\n\
         echo 'dpkg: error processing package qemu-system-x86 (--configure): no space left'\n\
         echo 'E: Sub-process /usr/bin/dpkg returned an error code (1)' >&2; exit 100",
    );
    let said = said(&output);
    assert!(
        said.contains("dpkg: error processing package qemu-system-x86"),
        "{said}"
    );
    assert!(said.contains("returned an error code (1)"), "{said}");
    assert!(said.contains("[setup] error: cannot install"), "{said}");
    assert_eq!(output.status.code(), Some(1));
}

#[test]
fn package_lists_that_cannot_be_fetched_end_it_with_the_reason() {
    let output = set_up("echo 'E: The repository is not signed.' >&2; exit 100");
    let said = said(&output);
    assert!(said.contains("E: The repository is not signed."), "{said}");
    assert_eq!(output.status.code(), Some(1));
}
