//! The directory port.

use std::os::unix::net::UnixStream;

use device::Called;
use vsock::Reason;
use wire::vsock::SocketType;

use crate::support::*;

fn directory(stand: &Stand) -> UnixStream {
    let connected = stand
        .call(Called::Directory, SocketType::Stream)
        .expect("put through");
    blocking(connected.socket)
}

fn ask(stream: &UnixStream, line: &str) -> String {
    write(stream, line.as_bytes());
    let mut answer = Vec::new();
    while answer.last() != Some(&b'\n') {
        answer.extend(read_some(stream, 1));
    }
    String::from_utf8(answer).expect("text")
}

#[test]
fn a_guest_is_told_who_is_who() {
    let stand = Stand::new();
    {
        let mut names = stand.exchange.names.lock().expect("not poisoned");
        let key = |name: &str| ("web".to_owned(), name.to_owned());
        names.insert(key("db"), 4);
        names.insert(key("blue/db"), 1_073_741_900);
        names.insert(key("service:registry"), 5000);
    }
    let stream = directory(&stand);
    assert_eq!(ask(&stream, "WHOAMI\n"), "OK web default 3\n");
    assert_eq!(ask(&stream, "RESOLVE db\r\n"), "OK 4\n");
    assert_eq!(ask(&stream, "RESOLVE blue/db\n"), "OK 1073741900\n");
    assert_eq!(ask(&stream, "SERVICE registry\n"), "OK 2 5000\n");
    assert_eq!(
        ask(&stream, "RESOLVE nobody\n"),
        "ERR there is no VM named nobody that you may call\n"
    );
    assert!(ask(&stream, "SERVICE nothing\n").starts_with("ERR "));
    assert!(ask(&stream, "HELP\n").starts_with("ERR expected RESOLVE"));
    // Requests may come together, and in pieces.
    write(&stream, b"WHOAMI\nRESOLVE db\nWHO");
    write(&stream, b"AMI\n");
    assert_eq!(
        read_some(&stream, 39),
        b"OK web default 3\nOK 4\nOK web default 3\n"
    );
    // Half a request is none, though a whole one begins with the same words.
    write(&stream, b"RESOLVE d");
    stream
        .shutdown(std::net::Shutdown::Write)
        .expect("half-closed");
    assert_eq!(read_all(&stream), b"");
}

#[test]
fn a_line_without_end_ends_the_conversation() {
    let stand = Stand::new();
    let stream = directory(&stand);
    write(&stream, &[b'a'; 255]);
    assert!(
        ask(&stream, "\n").starts_with("ERR "),
        "the longest line is answered"
    );
    write(&stream, &[b'a'; 256]);
    let answer = String::from_utf8(read_all(&stream)).expect("text");
    assert_eq!(answer, "ERR a line has at most 256 bytes\n");
}

#[test]
fn a_vm_has_so_many_conversations_and_no_more() {
    let stand = Stand::new();
    // A quarter is for privileged programs.
    let limit = hostside::proxy::directory::MAX_CONNECTIONS_PER_VM * 3 / 4;
    let mut streams: Vec<UnixStream> = (0..limit).map(|_| directory(&stand)).collect();
    let call = || stand.call(Called::Directory, SocketType::Stream);
    assert_eq!(call().err(), Some(Reason::ServiceShare));
    let other = policy::Address::new("db", 4);
    assert!(
        stand
            .call_as(&other, Called::Directory, SocketType::Stream, None)
            .is_ok()
    );
    streams.pop();
    until("there is room again", || call().is_ok());
    let messages = stand.call(Called::Directory, SocketType::SeqPacket);
    assert_eq!(messages.err(), Some(Reason::WrongType));
}
