//! Rules of the project that the compiler does not know.

mod links;
mod modules;
mod points;
mod rooms;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use e2e::images::project_root;

/// A file of more lines than this, tests not counted, is asking to become two.
const FILE_LINES: usize = 600;

/// A function of more lines than this, likewise.
const FUNCTION_LINES: usize = 70;

/// Checks everything.
pub fn run() -> Result<()> {
    let root = project_root();
    let metadata = metadata(&root)?;
    let files = tracked_files(&root)?;
    let mut findings = rooms::check(&metadata)?;
    findings.extend(modules::check(&root)?);
    findings.extend(links::check(&root, &files)?);
    findings.extend(check_lints(&metadata)?);
    findings.extend(check_lock_file(&fs::read_to_string(
        root.join("Cargo.lock"),
    )?));
    findings.extend(check_machine_paths(&root, &files));
    findings.extend(check_purity(&root, &files)?);
    findings.extend(points::check(&root, &files)?);
    findings.extend(check_mutants(&root, &files)?);
    findings.extend(long_code(&root, &files)?);
    for finding in &findings {
        eprintln!("[tidy] {finding}");
    }
    ensure!(findings.is_empty(), "{} findings", findings.len());
    eprintln!(
        "[tidy] {} files and {} packages keep the rules",
        files.len(),
        packages(&metadata).count()
    );
    Ok(())
}

/// Each fault of `fuzz/mutants` applies to the code as it is.
fn check_mutants(root: &Path, files: &[PathBuf]) -> Result<Vec<String>> {
    let mutants = files.iter().filter(|file| {
        file.starts_with("fuzz/mutants") && file.extension() == Some("patch".as_ref())
    });
    let mut findings = Vec::new();
    for file in mutants {
        let applied = Command::new("git")
            .current_dir(root)
            .args(["apply", "--check"])
            .arg(file)
            .output()
            .context("cannot run git")?;
        if !applied.status.success() {
            let words = String::from_utf8_lossy(&applied.stderr);
            findings.push(format!(
                "{} does not apply: {}",
                file.display(),
                words.trim()
            ));
        }
    }
    Ok(findings)
}

/// What cargo knows about the workspace.
pub fn metadata(root: &Path) -> Result<serde_json::Value> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .current_dir(root)
        .args(["metadata", "--format-version", "1", "--no-deps"])
        .output()
        .context("cannot run cargo metadata")?;
    ensure!(
        output.status.success(),
        "cargo metadata failed:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(serde_json::from_slice(&output.stdout)?)
}

/// The packages of the workspace.
fn packages(metadata: &serde_json::Value) -> impl Iterator<Item = &serde_json::Value> {
    metadata["packages"].as_array().into_iter().flatten()
}

/// Packages with unsafe code in them, which have lints of their own: shared memory, its other side in tests, system calls, and the C interface, whose
/// callers hand it pointers.
const WITH_UNSAFE_CODE: [&str; 6] = [
    "ringdown-guestmem",
    "ringdown-guestmem-driver",
    "ringdown-held-directory",
    "ringdown-shmring",
    "ringdown-sys",
    "ringdown-circuit-c",
];

/// Unsafe code is forbidden by the workspace's lints, which a package has to ask for.
fn check_lints(metadata: &serde_json::Value) -> Result<Vec<String>> {
    let mut findings = Vec::new();
    for package in packages(metadata) {
        let name = package["name"].as_str().unwrap_or_default();
        let manifest = package["manifest_path"].as_str().unwrap_or_default();
        let text =
            fs::read_to_string(manifest).with_context(|| format!("cannot read {manifest}"))?;
        if !WITH_UNSAFE_CODE.contains(&name) && !asks_for_workspace_lints(&text) {
            findings.push(format!(
                "{name}: its Cargo.toml needs `[lints]` with `workspace = true`: unsafe code is only for {WITH_UNSAFE_CODE:?}"
            ));
        }
    }
    Ok(findings)
}

fn asks_for_workspace_lints(manifest: &str) -> bool {
    manifest
        .lines()
        .map(str::trim)
        .skip_while(|line| *line != "[lints]")
        .skip(1)
        .take_while(|line| !line.starts_with('['))
        .any(|line| line.replace(' ', "") == "workspace=true")
}

/// Dependencies come from crates.io, so that the project builds anywhere.
fn check_lock_file(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.strip_prefix("source = "))
        .filter(|source| *source != "\"registry+https://github.com/rust-lang/crates.io-index\"")
        .map(|source| format!("Cargo.lock: a dependency comes from {source}, expected crates.io"))
        .collect()
}

/// Nothing that is committed may lead into the machine that it was written on: this directory, those beside it, the
/// home directory, cargo's target directory.
fn check_machine_paths(root: &Path, files: &[PathBuf]) -> Vec<String> {
    let mut forbidden: Vec<String> = vec![root.display().to_string()];
    if let Some(parent) = root
        .parent()
        .filter(|parent| parent.components().count() > 1)
    {
        let siblings = fs::read_dir(parent).into_iter().flatten().flatten();
        forbidden.extend(
            siblings
                .filter(|entry| entry.path().is_dir())
                .map(|entry| entry.path().display().to_string()),
        );
    }
    for variable in ["HOME", "CARGO_TARGET_DIR", "CARGO_HOME"] {
        if let Ok(path) = std::env::var(variable) {
            forbidden.push(path);
        }
    }
    // `/root` and the like are in every guest too.
    forbidden.retain(|path| Path::new(path).components().count() > 2 && !path.starts_with("/usr/"));
    let mut findings = Vec::new();
    for file in files {
        let Ok(text) = fs::read_to_string(root.join(file)) else {
            continue;
        };
        for (index, line) in text.lines().enumerate() {
            if let Some(path) = forbidden.iter().find(|path| line.contains(path.as_str())) {
                findings.push(format!(
                    "{}:{}: names a path of this machine, {path}",
                    file.display(),
                    index + 1
                ));
            }
        }
    }
    findings
}

/// The crates that decide, and nothing else: they see no clock, thread, lock, file or socket.
const PURE: &[&str] = &["crates/l2/src", "crates/policy/src", "crates/vsock/src"];

fn check_purity(root: &Path, files: &[PathBuf]) -> Result<Vec<String>> {
    const FORBIDDEN: &[&str] = &[
        "Instant::now",
        "SystemTime::now",
        "std::fs",
        "std::io",
        "std::net",
        "std::os",
        "std::process",
        "std::thread",
        "Mutex",
        "RwLock",
        "Atomic",
        "rustix::",
        "libc::",
    ];
    let mut findings = Vec::new();
    for file in files {
        if !PURE.iter().any(|source| file.starts_with(source)) || is_test_file(file) {
            continue;
        }
        let text = fs::read_to_string(root.join(file))?;
        for (number, line) in code_lines(&text) {
            let code = line.split("//").next().unwrap_or_default();
            if let Some(word) = FORBIDDEN.iter().find(|word| code.contains(**word)) {
                findings.push(format!(
                    "{}:{number}: what decides must not see `{word}`",
                    file.display()
                ));
            }
        }
    }
    Ok(findings)
}

fn long_code(root: &Path, files: &[PathBuf]) -> Result<Vec<String>> {
    let mut long = Vec::new();
    for file in files {
        if file.extension().is_none_or(|extension| extension != "rs") || is_test_file(file) {
            continue;
        }
        let text = fs::read_to_string(root.join(file))?;
        let (file, line_count) = (file.display(), code_lines(&text).len());
        if line_count > FILE_LINES {
            long.push(format!(
                "{file}: {line_count} lines, more than {FILE_LINES}"
            ));
        }
        for (name, line_count) in long_functions(&text) {
            long.push(format!(
                "{file}: {name} has {line_count} lines, more than {FUNCTION_LINES}"
            ));
        }
    }
    Ok(long)
}

/// The lines that are no test's, with their numbers. What stands behind `#[cfg(test)]` is an item of one line, or one that ends with a brace below its first letter.
fn code_lines(text: &str) -> Vec<(usize, &str)> {
    let mut code = Vec::new();
    let mut lines = (1..).zip(text.lines());
    while let Some((number, line)) = lines.next() {
        if line.trim() != "#[cfg(test)]" {
            code.push((number, line));
            continue;
        }
        let indent = &line[..line.len() - line.trim_start().len()];
        let item = lines.find(|(_, line)| !line.trim().starts_with("#["));
        if item.is_some_and(|(_, item)| !item.ends_with([';', '}', ','])) {
            lines.find(|(_, line)| line.strip_prefix(indent).is_some_and(is_end));
        }
    }
    code
}

fn is_end(line: &str) -> bool {
    ["}", "};", "},", ")", ");"].contains(&line)
}

fn is_test_file(file: &Path) -> bool {
    file.file_stem().is_some_and(|stem| stem == "tests")
        || file.components().any(|part| {
            ["tests", "benches"]
                .iter()
                .any(|name| part.as_os_str() == *name)
        })
}

/// Functions that are too long. rustfmt puts a function's closing brace under its first letter.
fn long_functions(text: &str) -> Vec<(String, usize)> {
    let lines: Vec<&str> = code_lines(text).into_iter().map(|(_, line)| line).collect();
    let mut found = Vec::new();
    for (start, line) in lines.iter().enumerate() {
        let indent = line.len() - line.trim_start().len();
        let Some(name) = function_name(line.trim_start()) else {
            continue;
        };
        let mut heads = lines[start..].iter();
        // A trait's function need not have a body.
        if heads
            .find(|line| line.ends_with(['{', '}', ';']))
            .is_none_or(|line| line.ends_with(';'))
        {
            continue;
        }
        let closing = format!("{}}}", " ".repeat(indent));
        let length = lines[start..]
            .iter()
            .position(|line| *line == closing)
            .map_or(0, |end| end + 1);
        if length > FUNCTION_LINES {
            found.push((name.to_owned(), length));
        }
    }
    found
}

fn function_name(line: &str) -> Option<&str> {
    let mut rest = line;
    for word in [
        "pub ",
        "pub(crate) ",
        "pub(super) ",
        "const ",
        "async ",
        "unsafe ",
        "extern \"C\" ",
    ] {
        rest = rest.strip_prefix(word).unwrap_or(rest);
    }
    let rest = rest.strip_prefix("fn ")?;
    rest.split(['(', '<']).next()
}

/// The files that are, or are about to be, committed.
fn tracked_files(root: &Path) -> Result<Vec<PathBuf>> {
    let output = Command::new("git")
        .current_dir(root)
        .args([
            "ls-files",
            "-z",
            "--cached",
            "--others",
            "--exclude-standard",
        ])
        .output()
        .context("cannot run git")?;
    if !output.status.success() {
        bail!(
            "git cannot list the files: {}",
            String::from_utf8_lossy(&output.stderr)
        );
    }
    let names = String::from_utf8(output.stdout)?;
    Ok(names
        .split('\0')
        .filter(|name| !name.is_empty())
        .map(PathBuf::from)
        .filter(|path| root.join(path).is_file())
        .collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rooms_of_this_workspace_keep_their_edges() {
        let metadata = metadata(&project_root()).unwrap();
        assert_eq!(rooms::check(&metadata).unwrap(), Vec::<String>::new());
        assert_eq!(
            modules::check(&project_root()).unwrap(),
            Vec::<String>::new()
        );
        assert_eq!(check_lints(&metadata).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn what_stands_behind_tests_is_code_again() {
        let text = "a\n#[cfg(test)]\nmod tests;\n#[cfg(test)]\n#[path = \"x\"]\nmod x {\n    }\n}\nb\n    #[cfg(test)]\n    fn c() {\n    }\nd";
        assert_eq!(code_lines(text), [(1, "a"), (9, "b"), (13, "d")]);
        assert_eq!(code_lines("#[cfg(test)]\nmod tests {"), []);
    }

    #[test]
    fn lints_must_be_asked_for_in_their_own_table() {
        assert!(asks_for_workspace_lints(
            "[package]\nname = \"a\"\n[lints]\nworkspace = true\n"
        ));
        assert!(!asks_for_workspace_lints(
            "[lints]\n[dependencies]\nworkspace = true\n"
        ));
        assert!(!asks_for_workspace_lints("[package]\nname = \"a\"\n"));
    }

    #[test]
    fn a_foreign_source_is_found() {
        let good = "source = \"registry+https://github.com/rust-lang/crates.io-index\"\n";
        assert!(check_lock_file(good).is_empty());
        assert_eq!(
            check_lock_file("source = \"git+https://example.org/x\"\n").len(),
            1
        );
    }

    #[test]
    fn a_machine_path_is_found() {
        let directory = e2e::spawn::scratch_directory().unwrap();
        fs::write(directory.join("good"), "nothing here\n").unwrap();
        fs::write(
            directory.join("bad"),
            format!("see\n{}/x\n", directory.display()),
        )
        .unwrap();
        let findings = check_machine_paths(&directory, &["good".into(), "bad".into()]);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].starts_with("bad:2:"), "{findings:?}");
    }

    #[test]
    fn a_clock_in_the_switch_is_found_but_not_in_its_comments_or_tests() {
        let directory = e2e::spawn::scratch_directory().unwrap();
        let source = directory.join("crates/vsock/src");
        fs::create_dir_all(&source).unwrap();
        let text = "// Instant::now is not for us\nlet now = Instant::now();\n#[cfg(test)]\nuse std::thread;\n";
        fs::write(source.join("lib.rs"), text).unwrap();
        let findings = check_purity(&directory, &["crates/vsock/src/lib.rs".into()]).unwrap();
        assert_eq!(findings.len(), 1);
        assert!(findings[0].contains("lib.rs:2"), "{findings:?}");
    }

    #[test]
    fn long_functions_are_found_by_their_closing_brace() {
        let body = "        work();\n".repeat(FUNCTION_LINES);
        let text = format!(
            "impl A {{\n    pub fn long() {{\n{body}    }}\n    fn short() {{\n    }}\n}}\n"
        );
        assert_eq!(
            long_functions(&text),
            [("long".to_owned(), FUNCTION_LINES + 2)]
        );
    }

    #[test]
    fn long_files_and_functions_are_findings() {
        let directory = e2e::spawn::scratch_directory().unwrap();
        let body = "    work();\n".repeat(FUNCTION_LINES - 1);
        let text = format!("fn long() {{\n{body}}}\n") + &"\n".repeat(FILE_LINES);
        fs::write(directory.join("a.rs"), text).unwrap();
        let expected = [
            "a.rs: 671 lines, more than 600",
            "a.rs: long has 71 lines, more than 70",
        ];
        assert_eq!(long_code(&directory, &["a.rs".into()]).unwrap(), expected);
    }
}
