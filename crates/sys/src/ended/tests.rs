//! Texts as proc_pid_stat(5), proc_pid_status(5) and proc_locks(5) describe them.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::process::{Command, Stdio};

use rustix::fs::{FlockOperation, flock};

use super::*;

/// The first fields of `stat`: pid, name, state, parent, group, session, terminal, its group, flags, faults.
fn stat(name: &str, state: char, flags: u64) -> String {
    format!("42 ({name}) {state} 1 42 42 0 -1 {flags} 0 0 0 0 1 2 0 0 20 0 3 0 100 0 0\n")
}

fn status(pending: &str) -> String {
    format!(
        "Name:\tx\nState:\tD (disk sleep)\nThreads:\t2\nSigQ:\t0/100\nSigPnd:\t{pending}\nShdPnd:\t0000000000000100\n"
    )
}

const NONE: &str = "0000000000000000";
/// SIGKILL is the ninth signal, the lowest bit is that of the first.
const KILLED: &str = "0000000000000100";
const TERMINATED: &str = "0000000000004000";

#[test]
fn a_thread_runs_unless_it_can_run_nothing_any_more() {
    for (state, flags, pending, expected) in [
        ('Z', 0x4, NONE, Seen::Ended),
        ('X', 0, NONE, Seen::Ended),
        ('D', 0x40_0040, KILLED, Seen::Waits),
        ('D', 0x40_0044, NONE, Seen::Waits),
        ('S', 0x4, NONE, Seen::Waits),
        // It waits for a disk, say.
        ('D', 0x40_0040, NONE, Seen::Runs),
        // SIGKILL for the process is SIGKILL for each thread; alone it says nothing of this one. And other signals can be caught.
        ('S', 0x40_0040, NONE, Seen::Runs),
        ('D', 0x40_0040, TERMINATED, Seen::Runs),
        // It gives its memory back.
        ('R', 0x4, NONE, Seen::Ends),
        // It has yet to take the signal.
        ('R', 0x40_0040, KILLED, Seen::Ends),
        ('R', 0x40_0040, TERMINATED, Seen::Runs),
        // A debugger has it, or it is stopped.
        ('t', 0x4, KILLED, Seen::Runs),
        ('T', 0, NONE, Seen::Runs),
    ] {
        let found = thread_of(&stat("x", state, flags), &status(pending));
        assert_eq!(found, expected, "{state} {flags:x} {pending}");
    }
}

#[test]
fn a_name_of_parentheses_and_spaces_is_no_state() {
    for name in ["a) Z 1 42", "(D)", ") X", "", "a\nb"] {
        let found = thread_of(&stat(name, 'R', 0), &status(NONE));
        assert_eq!(found, Seen::Runs, "{name:?}");
        let found = thread_of(&stat(name, 'Z', 4), &status(NONE));
        assert_eq!(found, Seen::Ended, "{name:?}");
    }
    for text in ["", "42 (x)", "42 (x) D", "42 (x) D 1 42 42 0 -1 x"] {
        assert_eq!(thread_of(text, ""), Seen::Runs, "{text:?}");
    }
    assert_eq!(thread_of(&stat("x", 'D', 0), "SigPnd:\tx"), Seen::Runs);
}

#[test]
fn of_a_process_the_thread_counts_that_is_farthest_from_its_end() {
    let directory = tempfile::tempdir().unwrap();
    let at = |id: &str| directory.path().join(id);
    let write = |id: &str, state, flags, pending| {
        std::fs::create_dir_all(at(id)).unwrap();
        std::fs::write(at(id).join("stat"), stat("x", state, flags)).unwrap();
        std::fs::write(at(id).join("status"), status(pending)).unwrap();
    };
    let look = || look_at(directory.path()).unwrap();
    write("42", 'Z', 4, NONE);
    assert_eq!(look(), Seen::Ended);
    write("43", 'D', 0, KILLED);
    assert_eq!(look(), Seen::Waits);
    write("43", 'R', 0, KILLED);
    assert_eq!(look(), Seen::Ends);
    write("44", 'S', 0, NONE);
    assert_eq!(look(), Seen::Runs);
    std::fs::remove_dir_all(at("44")).unwrap();
    // What cannot be read says nothing.
    std::fs::create_dir(at("45")).unwrap();
    assert_eq!(look(), Seen::Runs);
    look_at(&at("none")).unwrap_err();
}

#[test]
fn processes_of_this_host_are_told_apart() {
    let own = i32::try_from(std::process::id()).unwrap();
    assert!(!has_ended(own));
    assert!(!has_ended(0) && !has_ended(-1) && !has_ended(i32::MAX));
    let mut child = Command::new("cat")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = i32::try_from(child.id()).unwrap();
    assert!(!has_ended(pid));
    child.kill().unwrap();
    // Its end closes its output. It is a zombie until it is waited for.
    let mut output = child.stdout.take().unwrap();
    std::io::copy(&mut output, &mut std::io::sink()).unwrap();
    while !has_ended(pid) {
        std::thread::yield_now();
    }
    child.wait().unwrap();
    assert!(!has_ended(pid));
}

#[test]
fn who_has_a_lock_is_in_the_kernels_list() {
    let line = "12: FLOCK  ADVISORY  WRITE 42 00:1a:77 0 EOF";
    assert!(is_lock_of(line, 42, 77));
    for (line, pid, inode) in [
        (line, 43, 77),
        (line, 42, 78),
        ("1: FLOCK  ADVISORY  READ 42 00:1a:77 0 EOF", 42, 77),
        ("1: POSIX  ADVISORY  WRITE 42 00:1a:77 0 EOF", 42, 77),
        // It waits for it.
        ("1: -> FLOCK  ADVISORY  WRITE 42 00:1a:77 0 EOF", 42, 77),
        ("", 42, 77),
    ] {
        assert!(!is_lock_of(line, pid, inode), "{line}");
    }
    let file = tempfile::NamedTempFile::new().unwrap();
    let inode = file.as_file().metadata().unwrap().ino();
    let own = i32::try_from(std::process::id()).unwrap();
    assert!(!has_lock(own, inode));
    let locked = File::open(file.path()).unwrap();
    flock(&locked, FlockOperation::NonBlockingLockExclusive).unwrap();
    assert!(has_lock(own, inode) && !has_lock(own + 1, inode));
    drop(locked);
    assert!(!has_lock(own, inode));
}
