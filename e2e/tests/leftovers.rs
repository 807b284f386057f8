//! Nothing outlives a test process, even one that is killed: no child, no scratch directory.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

/// Set in the process that is to be killed.
const VICTIM: &str = "RINGDOWN_E2E_VICTIM";

/// The process that is to be killed runs this test alone: it starts a child from a thread that ends, as a test's thread does, says where
/// everything is, and waits for its end. In a usual run it does the same and cleans up by itself.
#[test]
fn a_process_with_a_child_and_a_directory() {
    let (mut child, directory) = thread::spawn(|| {
        let directory = e2e::spawn::scratch_directory().unwrap();
        let child = e2e::spawn::spawn("sleep", ["1000".to_owned()], |_| {}).unwrap();
        (child, directory)
    })
    .join()
    .unwrap();
    if std::env::var_os(VICTIM).is_some() {
        println!("\nvictim {} {}", child.id(), directory.display());
        child.wait().unwrap();
        panic!("the child ended although the thread that asked for it is not its parent");
    }
    assert!(
        child.try_wait().unwrap().is_none(),
        "the child ended with the thread that asked for it"
    );
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_killed_test_process_leaves_nothing() {
    let mut victim = Command::new(std::env::current_exe().unwrap())
        .args([
            "--exact",
            "a_process_with_a_child_and_a_directory",
            "--nocapture",
        ])
        .env(VICTIM, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let line = BufReader::new(victim.stdout.take().unwrap())
        .lines()
        .map(Result::unwrap)
        .find(|line| line.starts_with("victim "))
        .unwrap();
    let mut words = line.split_whitespace().skip(1);
    let child: u32 = words.next().unwrap().parse().unwrap();
    let directory = Path::new(words.next().unwrap()).to_path_buf();
    assert!(directory.is_dir());
    assert!(is_alive(child));

    victim.kill().unwrap();
    victim.wait().unwrap();

    let until = Instant::now() + Duration::from_secs(30);
    let process_directory = directory.parent().unwrap();
    while is_alive(child) || process_directory.exists() {
        assert!(
            Instant::now() < until,
            "left behind: child {:?}, directory {}",
            fs::read_to_string(format!("/proc/{child}/stat")),
            process_directory.exists()
        );
        thread::yield_now();
    }
}

/// True while the process runs; one that only waits to be collected by its parent does not.
fn is_alive(process: u32) -> bool {
    fs::read_to_string(format!("/proc/{process}/stat")).is_ok_and(|stat| {
        !stat
            .rsplit_once(") ")
            .is_some_and(|(_, rest)| rest.starts_with('Z'))
    })
}
