//! The examples are compiled and run, against the library as it was just built.

#![allow(clippy::unwrap_used)] // What goes wrong here is a failed test.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use test_switchboard::{Form, Switchboard};

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

/// One that listens, and one that connects to it, with windows and without.
fn check_by_name(program: impl Fn() -> Command, expected: &str) {
    for (form, kind) in [(Form::Window, "(zero copy)"), (Form::Stream, "(stream)")] {
        let directory = tempfile::tempdir().unwrap();
        let switchboard = Switchboard::start(directory.path(), form).unwrap();
        let program = || {
            let mut program = program();
            program.env("RINGDOWN_CIRCUIT_SOCKET", switchboard.path());
            program
        };
        let mut listening = program()
            .args(["listen", "5432"])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = BufReader::new(listening.stdout.take().unwrap());
        let mut line = String::new();
        said.read_line(&mut line).unwrap();
        assert_eq!(line, "listening at port 5432\n");
        let asking = program().args(["connect", "db:5432"]).output().unwrap();
        check(&asking, expected);
        check(&asking, kind);
        line.clear();
        said.read_line(&mut line).unwrap();
        assert_eq!(line, format!("called by caller:40000 {kind}\n"));
        check(&listening.wait_with_output().unwrap(), "");

        let refused = program().args(["connect", "db:5"]).output().unwrap();
        assert!(!refused.status.success());
        let words = String::from_utf8_lossy(&refused.stderr);
        assert!(
            words.contains("no circuit: no program listens at db:5 (refused)"),
            "{words}"
        );
    }
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
        "1000 messages, sum 33554427904000, expected 33554427904000 (zero copy)",
    );
    check_by_name(
        || Command::new(&program),
        "1000 messages, sum 33554427904000, expected 33554427904000",
    );
}

#[test]
fn the_example_in_python_runs() {
    if !is_there("python3") {
        return;
    }
    let program = || {
        let mut program = Command::new("python3");
        program.arg(examples().join("echo.py")).env(
            "RINGDOWN_CIRCUIT_LIBRARY",
            library_directory().join("libringdown_circuit.so"),
        );
        program
    };
    check(
        &program().output().unwrap(),
        "1000 of 1000 answered by a process of this host (zero copy)",
    );
    check_by_name(program, "1000 of 1000 answered by db:5432");
}
