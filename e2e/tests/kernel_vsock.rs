//! Linux's own tests of vsock, those of each kernel between two guests with that kernel. See docs/kernel-tests.md.
//!
//! The suites are run by `cargo xtask kernel-tests`, as `make kernel-tests` does: it gets and builds the programs, and judges what
//! they say. Both kernels are in one test, because the suites judge time (a tenth of a second for a completion) and must not compete.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs::{self, File};
use std::process::Stdio;

use e2e::images::project_root;

#[test]
fn the_suites_of_both_kernels_pass() {
    let directory = e2e::spawn::scratch_directory().unwrap();
    let [results, progress] = ["results", "progress"].map(|name| directory.join(name));
    let output = [&results, &progress].map(|path| File::create(path).unwrap());
    let ringdown = e2e::ringdown_program().unwrap();
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".to_owned());

    let arguments = ["xtask", "kernel-tests"].map(str::to_owned);
    let mut child = e2e::spawn::spawn(cargo, arguments, move |command| {
        let [results, progress] = output;
        command
            .current_dir(project_root())
            .env("RINGDOWN_BIN", ringdown)
            .stdin(Stdio::null())
            .stdout(results)
            .stderr(progress);
    })
    .unwrap();
    // Every wait of it has a deadline of its own.
    let status = child.wait().unwrap();

    let results = fs::read_to_string(&results).unwrap();
    eprintln!("{results}");
    assert!(
        status.success(),
        "{status}\n{}",
        fs::read_to_string(&progress).unwrap()
    );
    for kernel in e2e::Kernel::TESTED {
        let heading = format!("Kernel {kernel}.");
        assert!(results.contains(&heading), "{kernel} was not tested");
    }
}
