use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};

use super::*;

/// What a program makes of an agent that says this and hangs up; and what the agent was asked.
fn dialled(answer: &'static [u8]) -> (io::Result<OwnedFd>, String) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("host.sock");
    let listener = UnixListener::bind(&path).unwrap();
    let agent = std::thread::spawn(move || {
        let (mut caller, _) = listener.accept().unwrap();
        let mut request = [0; 13];
        caller.read_exact(&mut request).unwrap();
        // The caller may have heard enough before the end.
        let _ = caller.write_all(answer);
        String::from_utf8_lossy(&request).into_owned()
    });
    let result = dial_at(&path, 3128, Instant::now() + ANSWER_TIMEOUT);
    (result, agent.join().unwrap())
}

#[test]
fn what_follows_the_answer_belongs_to_the_connection() {
    let (socket, request) = dialled(b"OK 3128\nhello");
    assert_eq!(request, "CONNECT 3128\n");
    let mut stream = UnixStream::from(socket.unwrap());
    stream.set_nonblocking(false).unwrap();
    let mut text = String::new();
    stream.read_to_string(&mut text).unwrap();
    assert_eq!(text, "hello");
}

#[test]
fn a_refusal_has_the_hosts_words() {
    let error = dialled(b"ERR no rule allows it\n").0.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::ConnectionRefused);
    assert_eq!(error.to_string(), "no rule allows it");
}

#[test]
fn an_agent_that_says_nothing_sensible_is_told_apart() {
    let kind = |answer| dialled(answer).0.unwrap_err().kind();
    assert_eq!(kind(b""), io::ErrorKind::UnexpectedEof);
    assert_eq!(kind(b"OK 31"), io::ErrorKind::UnexpectedEof);
    assert_eq!(kind(&[b'x'; 2000]), io::ErrorKind::InvalidData);
    let refused = dial_at(
        Path::new("/nonexistent/host.sock"),
        5,
        Instant::now() + ANSWER_TIMEOUT,
    )
    .unwrap_err();
    assert_eq!(refused.kind(), io::ErrorKind::NotFound);
}

#[test]
fn an_agent_that_takes_no_callers_is_given_up_at_the_deadline() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("host.sock");
    let hung = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&hung, 0).unwrap();
    let _waiting = UnixStream::connect(&path).unwrap();
    let soon = Instant::now() + Duration::from_millis(20);
    let error = dial_at(&path, 5, soon).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{error}");
}

#[test]
fn only_a_missing_driver_or_device_means_that_there_is_no_vsock() {
    for errno in [Errno::NODEV, Errno::AFNOSUPPORT] {
        assert!(is_without_vsock(&errno.into()), "{errno}");
    }
    for errno in [Errno::CONNRESET, Errno::TIMEDOUT, Errno::NETUNREACH] {
        assert!(!is_without_vsock(&errno.into()), "{errno}");
    }
    assert!(!is_without_vsock(&io::ErrorKind::Other.into()));
}
