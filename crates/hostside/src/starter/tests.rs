use std::io::Read;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;

use super::*;

/// A program of a starter that runs in this process.
struct Started {
    circuit: UnixStream,
    errors: UnixStream,
    leash: std::os::fd::OwnedFd,
}

fn start(script: &str, environment: Vec<(&'static str, String)>) -> io::Result<Started> {
    let words = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
    let starter = process_of(vec![words.clone()]);
    assert!(starter.has(&words));
    assert!(!starter.has(&words[..1]));
    let (circuit, theirs) = UnixStream::pair().unwrap();
    let (errors, their_errors) = UnixStream::pair().unwrap();
    use std::os::fd::AsFd;
    let leash = starter.start(&words, environment, theirs.as_fd(), their_errors.as_fd())?;
    // The starter goes on for as long as there is a daemon.
    std::mem::forget(starter);
    Ok(Started {
        circuit,
        errors,
        leash,
    })
}

fn end_of(leash: &std::os::fd::OwnedFd) -> ExitStatus {
    rustix::io::ioctl_fionbio(leash, false).unwrap();
    match Word::read(leash).unwrap() {
        Word::Ended(status) => ExitStatus::from_raw(status),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_program_has_its_circuit_its_errors_and_only_our_variables() {
    let environment = vec![
        ("RINGDOWN_VM", "web".to_owned()),
        ("LD_PRELOAD", "/evil.so".to_owned()),
    ];
    let script = "read line; echo \"$line $RINGDOWN_VM ${LD_PRELOAD-none}\"; echo oops >&2; exit 7";
    let mut started = start(script, environment).unwrap();
    started.circuit.write_all(b"hello\n").unwrap();
    assert_eq!(end_of(&started.leash).code(), Some(7));
    let mut said = String::new();
    started.circuit.read_to_string(&mut said).unwrap();
    assert_eq!(said, "hello web none\n");
    let mut errors = String::new();
    started.errors.read_to_string(&mut errors).unwrap();
    assert_eq!(errors, "oops\n");
}

#[test]
fn a_program_gets_signals_and_is_killed_when_its_leash_is_let_go() {
    let started = start("kill -STOP $$", Vec::new()).unwrap();
    // Whether it has stopped by now or not: stopped, it gets the first one when it goes on.
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::CONT] {
        let byte = [signal.as_raw() as u8];
        rustix::net::send(&started.leash, &byte, rustix::net::SendFlags::empty()).unwrap();
    }
    let status = end_of(&started.leash);
    assert_eq!(status.signal(), Some(15), "{status}");

    let mut started = start("sleep 1000 & sleep 1000", Vec::new()).unwrap();
    drop(started.leash);
    // Both have the circuit, and both are gone when it ends.
    assert_eq!(started.circuit.read(&mut [0; 16]).unwrap(), 0);
}

#[test]
fn what_cannot_be_started_is_told() {
    let missing = vec!["/nowhere/program".to_owned()];
    let starter = process_of(vec![missing.clone()]);
    let (circuit, errors) = UnixStream::pair().unwrap();
    use std::os::fd::AsFd;
    let start = |words: &[String]| {
        let started = starter.start(words, Vec::new(), circuit.as_fd(), errors.as_fd());
        started.map(drop).unwrap_err().kind()
    };
    assert_eq!(start(&missing), io::ErrorKind::NotFound);
    assert_eq!(start(&["/bin/sh".to_owned()]), io::ErrorKind::NotFound);
}
