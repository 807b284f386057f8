//! The examples are compiled and run, against the library as it was just built.

#![allow(clippy::unwrap_used)] // What goes wrong here is a failed test.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../examples/circuit")
}

/// Where cargo put the library that this test belongs to.
fn library_directory() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let directory = test.parent().unwrap().to_owned();
    assert!(
        directory.join("libringdown_circuit.so").is_file(),
        "{}",
        directory.display()
    );
    directory
}

fn is_there(program: &str) -> bool {
    let there = Command::new(program).arg("--version").output().is_ok();
    if !there {
        eprintln!("{program} is not installed: its example is not tried");
    }
    there
}

fn check(output: &Output, expected: &str) {
    let said = String::from_utf8_lossy(&output.stdout);
    let complained = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}{complained}");
    assert!(said.contains(expected), "{said}{complained}");
}

#[test]
fn the_example_in_c_compiles_without_warnings_and_runs() {
    if !is_there("cc") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("echo");
    let libraries = library_directory();
    let include = Path::new(env!("CARGO_MANIFEST_DIR")).join("include");
    let compiled = Command::new("cc")
        .args([
            "-std=c11",
            "-D_GNU_SOURCE",
            "-Wall",
            "-Wextra",
            "-Wpedantic",
            "-Werror",
            "-O1",
        ])
        .arg(examples().join("echo.c"))
        .arg("-I")
        .arg(include)
        .arg("-L")
        .arg(&libraries)
        .arg("-lringdown_circuit")
        .arg(format!("-Wl,-rpath,{}", libraries.display()))
        .arg("-o")
        .arg(&program)
        .output()
        .unwrap();
    check(&compiled, "");
    check(
        &Command::new(&program).output().unwrap(),
        "1000 messages, sum 33554427904000, expected 33554427904000",
    );
}

#[test]
fn the_example_in_python_runs() {
    if !is_there("python3") {
        return;
    }
    let output = Command::new("python3")
        .arg(examples().join("echo.py"))
        .env(
            "RINGDOWN_CIRCUIT_LIBRARY",
            library_directory().join("libringdown_circuit.so"),
        )
        .output()
        .unwrap();
    check(&output, "1000 of 1000 answered");
}
