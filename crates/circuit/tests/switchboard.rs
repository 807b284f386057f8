//! Circuits by name, with a switchboard that gives windows and with one that does not.

#![allow(clippy::unwrap_used)] // What goes wrong here is a failed test.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use circuit::{Circuit, Connector, Error, ErrorCode, Kind, Options};
use rustix::event::{PollFd, PollFlags, poll};
use tempfile::TempDir;
use test_switchboard::{Form, Switchboard, say};
use wire::switchboard::program::{self, Answer};
use wire::switchboard::{Hex16, Place, Side};

fn connector(switchboard: &Switchboard) -> Connector {
    Connector::new().socket(switchboard.path())
}

fn start(form: Form) -> (TempDir, Switchboard) {
    let directory = tempfile::tempdir().unwrap();
    let switchboard = Switchboard::start(directory.path(), form).unwrap();
    (directory, switchboard)
}

fn content(len: usize) -> Vec<u8> {
    let byte = |index: u64| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
    (0..len as u64).map(byte).collect()
}

fn refusal(error: Error) -> (ErrorCode, String) {
    match error {
        Error::NotGiven { code, text } => (code, text),
        other => panic!("{other}"),
    }
}

#[test]
fn a_program_calls_another_by_name() {
    for form in [Form::Window, Form::Stream] {
        let (_directory, switchboard) = start(form);
        let mut listener = connector(&switchboard).listen(5432).unwrap();
        assert_eq!(listener.port(), 5432);
        let answering = thread::spawn(move || {
            for _ in 0..3 {
                let circuit = listener.accept().unwrap();
                assert_eq!(circuit.peer().unwrap().name(), "caller");
                assert_eq!(circuit.is_zero_copy(), form == Form::Window);
                let (mut writer, mut reader) = circuit.into_split();
                let mut all = Vec::new();
                reader.read_to_end(&mut all).unwrap();
                all.reverse();
                writer.write_all(&all).unwrap();
            }
        });
        for len in [1, 70_000, 500_000] {
            let circuit = connector(&switchboard).connect("blue/db:5432").unwrap();
            assert_eq!(circuit.peer().unwrap().to_string(), "blue/db:5432");
            assert_eq!(circuit.is_zero_copy(), form == Form::Window);
            let (mut writer, mut reader) = circuit.into_split();
            let mut sent = content(len);
            writer.write_all(&sent).unwrap();
            writer.finish().unwrap();
            let mut received = Vec::new();
            reader.read_to_end(&mut received).unwrap();
            sent.reverse();
            assert!(received == sent);
        }
        answering.join().unwrap();
    }
}

/// The window is said to be free when nothing of it is mapped any more, and not sooner.
#[test]
fn the_lease_lives_as_long_as_either_end() {
    let (_directory, switchboard) = start(Form::Window);
    let mut listener = connector(&switchboard).listen(1).unwrap();
    let caller = connector(&switchboard).connect("db:1").unwrap();
    let callee = listener.accept().unwrap();
    let leases = switchboard.take_leases();
    assert_eq!(leases.len(), 2);
    // The callee's is the first that was given.
    for (circuit, lease) in [callee, caller].into_iter().zip(leases) {
        let (writer, reader) = circuit.into_split();
        for end in [Box::new(writer) as Box<dyn std::any::Any>, Box::new(reader)] {
            lease.set_nonblocking(true).unwrap();
            let mut lease = &lease;
            assert_eq!(
                lease.read(&mut [0]).unwrap_err().kind(),
                ErrorKind::WouldBlock
            );
            drop(end);
        }
        lease.set_nonblocking(false).unwrap();
        assert_eq!((&lease).read(&mut [0]).unwrap(), 0);
    }
}

#[test]
fn records_need_the_same_wish_on_both_sides() {
    let records = Options {
        kind: Kind::Records,
        ring_len: 65_536,
        ..Options::default()
    };
    let (_directory, switchboard) = start(Form::Window);
    let mut listener = connector(&switchboard)
        .options(records.clone())
        .listen(9)
        .unwrap();
    let same = connector(&switchboard).options(records);
    let mut caller = same.connect("db:9").unwrap();
    let mut callee = listener.accept().unwrap();
    assert!(caller.is_zero_copy() && callee.is_zero_copy());
    caller.writer().send(b"a record").unwrap();
    let mut record = Vec::new();
    assert!(callee.reader().receive(&mut record).unwrap());
    assert_eq!(record, b"a record");
    // The smaller wish is what both get.
    assert_eq!(caller.writer().capacity(), 65_536);

    let caller = connector(&switchboard).connect("db:9").unwrap();
    let callee = listener.accept().unwrap();
    assert!(!caller.is_zero_copy() && !callee.is_zero_copy());
}

#[test]
fn a_window_that_is_taken_away_is_an_error_for_both() {
    let (_directory, switchboard) = start(Form::Window);
    let mut listener = connector(&switchboard).listen(1).unwrap();
    let mut caller = connector(&switchboard).connect("db:1").unwrap();
    let mut callee = listener.accept().unwrap();
    caller.writer().write_all(&content(1000)).unwrap();
    let mut bytes = [0; 10];
    callee.reader().read_exact(&mut bytes).unwrap();
    switchboard.revoke_all().unwrap();
    for circuit in [&mut caller, &mut callee] {
        let error = circuit.reader().read(&mut [0; 100]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
        assert!(error.to_string().contains("revoked"), "{error}");
        let error = circuit.writer().write_all(&[0; 100]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
    }
    // The next circuit has another window.
    let mut again = connector(&switchboard).connect("db:1").unwrap();
    again.writer().write_all(b"again").unwrap();
    let mut text = [0; 5];
    let mut callee = listener.accept().unwrap();
    callee.reader().read_exact(&mut text).unwrap();
    assert_eq!(&text, b"again");
}

#[test]
fn an_event_loop_hears_of_calls() {
    let (_directory, switchboard) = start(Form::Window);
    let mut listener = connector(&switchboard).listen(77).unwrap();
    assert!(matches!(listener.try_accept(), Err(Error::WouldBlock)));
    listener.set_timeout(Some(Duration::from_millis(20)));
    assert!(matches!(listener.accept(), Err(Error::TimedOut { .. })));
    let callers: Vec<Circuit> = (0..5)
        .map(|_| connector(&switchboard).connect("db:77").unwrap())
        .collect();
    let mut waiting = [PollFd::new(&listener, PollFlags::IN)];
    poll(&mut waiting, None).unwrap();
    // In the order of the calls.
    for (number, mut caller) in callers.into_iter().enumerate() {
        caller.writer().write_all(&[number as u8]).unwrap();
        let mut callee = listener.try_accept().unwrap();
        let mut found = [9];
        callee.reader().read_exact(&mut found).unwrap();
        assert_eq!(usize::from(found[0]), number);
    }
    assert!(matches!(listener.try_accept(), Err(Error::WouldBlock)));
}

#[test]
fn what_is_refused_says_why() {
    let (directory, switchboard) = start(Form::Window);
    let (code, text) = refusal(connector(&switchboard).connect("db:5").unwrap_err());
    assert_eq!(code, ErrorCode::Refused);
    assert_eq!(text, "no program listens at db:5");
    let error = std::io::Error::from(connector(&switchboard).connect("db:5").unwrap_err());
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);

    let _listener = connector(&switchboard).listen(5).unwrap();
    let (code, _) = refusal(connector(&switchboard).listen(5).unwrap_err());
    assert_eq!(code, ErrorCode::Refused);

    for target in [
        "",
        "db",
        "db:",
        "db:x",
        "DB:5",
        ":5",
        "a/b/c:5",
        "db:4294967295",
    ] {
        let error = connector(&switchboard).connect(target).unwrap_err();
        assert!(
            matches!(&error, Error::Target { found } if found == target),
            "{error}"
        );
        assert!(error.to_string().contains("NAME:PORT"), "{error}");
    }
    assert!(matches!(
        connector(&switchboard).listen(u32::MAX),
        Err(Error::Target { .. })
    ));
    let impossible = Options {
        ring_len: 5000,
        ..Options::default()
    };
    let (code, _) = refusal(
        connector(&switchboard)
            .options(impossible)
            .connect("db:5")
            .unwrap_err(),
    );
    assert_eq!(code, ErrorCode::Invalid);

    let absent = directory.path().join("absent");
    let error = Connector::new()
        .socket(&absent)
        .connect("db:5")
        .unwrap_err();
    let words = error.to_string();
    assert!(
        words.contains(absent.to_str().unwrap()) && words.contains("RINGDOWN_CIRCUIT_SOCKET"),
        "{words}"
    );
    assert_eq!(std::io::Error::from(error).kind(), ErrorKind::NotFound);
}

/// A switchboard that takes the request and then does this.
fn odd(
    directory: &Path,
    name: &str,
    act: impl FnOnce(UnixStream) + Send + 'static,
) -> (PathBuf, thread::JoinHandle<()>) {
    let path = directory.join(name);
    let listener = UnixListener::bind(&path).unwrap();
    let thread = thread::spawn(move || {
        let (mut program, _) = listener.accept().unwrap();
        // The request, which is shorter.
        let _ = program.read(&mut [0; 512]).unwrap();
        act(program);
    });
    (path, thread)
}

#[test]
fn a_switchboard_that_makes_no_sense_is_an_error() {
    let directory = tempfile::tempdir().unwrap();
    for (index, (said, words)) in [
        ("", "nothing, and went away"),
        ("CIRC", "nothing, and went away"),
        ("HELLO\n", "expected a line that begins with"),
        ("STREAM from=db:1\n", "0 descriptors where 1 were expected"),
        ("LISTENING port=1\n", "LISTENING port=1"),
        (&"x".repeat(600), "at most 512 bytes"),
    ]
    .into_iter()
    .enumerate()
    {
        let said = said.to_owned();
        let (path, thread) = odd(directory.path(), &index.to_string(), move |mut program| {
            program.write_all(said.as_bytes()).unwrap();
        });
        let error = Connector::new().socket(path).connect("db:1").unwrap_err();
        assert!(error.to_string().contains(words), "{error}");
        assert_eq!(std::io::Error::from(error).kind(), ErrorKind::InvalidData);
        thread.join().unwrap();
    }
    let (path, thread) = odd(directory.path(), "silent", |mut program| {
        // Until the other side has given up.
        assert_eq!(program.read(&mut [0]).unwrap(), 0);
    });
    let hasty = Connector::new()
        .socket(path)
        .patience(Duration::from_millis(20));
    assert!(matches!(hasty.connect("db:1"), Err(Error::TimedOut { .. })));
    thread.join().unwrap();
}

/// What is promised and what is there have to agree, and the promise with what was asked for.
#[test]
fn a_window_that_is_not_the_promised_one_is_refused() {
    let promise = program::Circuit {
        side: Side::First,
        kind: wire::switchboard::Kind::Bytes,
        ring: 4096,
        page: circuit::system_page_len(),
        offset: 0,
        generation: 5,
        nonce: Hex16([7; 16]),
        from: Place::parse("db:1").unwrap(),
    };
    let spec = circuit::WindowSpec {
        identity: circuit::Identity {
            generation: 5,
            nonce: [7; 16],
        },
        kind: Kind::Bytes,
        ring_len: 4096,
        page_len: circuit::system_page_len(),
    };
    type Change = fn(&mut program::Circuit);
    let changes: [(&str, Change); 7] = [
        ("", |_| {}),
        ("generation", |promise| promise.generation = 6),
        ("nonce", |promise| promise.nonce.0[3] = 0),
        ("needs", |promise| promise.ring = 8192),
        ("begins at", |promise| promise.offset = 12),
        ("not what was asked for", |promise| {
            promise.kind = wire::switchboard::Kind::Records;
        }),
        ("not what was asked for", |promise| promise.ring = 4 << 20),
    ];
    let directory = tempfile::tempdir().unwrap();
    for (index, (words, change)) in changes.into_iter().enumerate() {
        let mut promise = promise.clone();
        change(&mut promise);
        let window = circuit::Window::create(&spec).unwrap();
        let (path, thread) = odd(directory.path(), &index.to_string(), move |mut program| {
            let (wake, _far) = UnixStream::pair().unwrap();
            let (lease, mut ours) = UnixStream::pair().unwrap();
            let given = [window.as_fd(), wake.as_fd(), lease.as_fd()];
            say(&program, &Answer::Circuit(promise), &given).unwrap();
            drop(lease);
            // Whatever it thinks of it, in the end it has done with the window.
            assert_eq!(ours.read(&mut [0]).unwrap(), 0);
            assert_eq!(program.read(&mut [0]).unwrap(), 0);
        });
        let made = Connector::new().socket(path).connect("db:1");
        match made {
            Ok(circuit) => assert!(words.is_empty() && circuit.is_zero_copy()),
            Err(error) => assert!(
                !words.is_empty() && error.to_string().contains(words),
                "{words}: {error}"
            ),
        }
        thread.join().unwrap();
    }
}

/// The listener gets the error, and its circuits go on.
#[test]
fn a_switchboard_may_end() {
    let directory = tempfile::tempdir().unwrap();
    let (path, thread) = odd(directory.path(), "short", |program| {
        say(&program, &Answer::Listening { port: 3 }, &[]).unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        let from = Place::parse("web:40001").unwrap();
        say(&program, &Answer::Stream { from }, &[far.as_fd()]).unwrap();
        drop(program);
        let mut near = near;
        near.write_all(b"still here").unwrap();
    });
    let mut listener = Connector::new().socket(path).listen(3).unwrap();
    let mut circuit = listener.accept().unwrap();
    assert_eq!(circuit.peer().unwrap().to_string(), "web:40001");
    for _ in 0..2 {
        let error = listener.accept().unwrap_err();
        assert!(error.to_string().contains("went away"), "{error}");
    }
    let mut text = String::new();
    circuit.reader().read_to_string(&mut text).unwrap();
    assert_eq!(text, "still here");
    thread.join().unwrap();
}
