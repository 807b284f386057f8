use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use super::*;

fn words(words: &[&str]) -> Vec<std::ffi::OsString> {
    words.iter().map(std::ffi::OsString::from).collect()
}

/// A forwarder whose host's ends come out of the channel. It runs to the end of the tests.
fn forwarder() -> (SocketAddr, Receiver<UnixStream>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, ends) = channel();
    thread::spawn(move || {
        let dial = move |_caller| {
            let (own, far) = UnixStream::pair()?;
            own.set_nonblocking(true)?;
            sender
                .send(far)
                .map_err(|_| io::Error::from(io::ErrorKind::ConnectionRefused))?;
            Ok(OwnedFd::from(own))
        };
        serve(&listener, dial).map(|never| match never {})
    });
    (address, ends)
}

#[test]
fn the_command_line_is_read_in_any_order() {
    let forward = Forward {
        listen: "127.0.0.1:1080".parse().unwrap(),
        host_port: 1080,
    };
    for line in [
        ["--listen", "127.0.0.1:1080", "--to-host", "1080"],
        ["--to-host", "1080", "--listen", "127.0.0.1:1080"],
    ] {
        assert_eq!(Forward::parse(words(&line)), Ok(forward));
    }
    for line in [
        &["--listen", "127.0.0.1:1080"][..],
        &["--to-host", "1080"],
        &["--listen", "1080", "--to-host", "1080"],
        &["--listen", "127.0.0.1:1080", "--to-host", "4294967295"],
        &["--listen", "127.0.0.1:1080", "--to-host"],
        &["--verbose", "x"],
    ] {
        assert!(Forward::parse(words(line)).is_err(), "{line:?}");
    }
}

#[test]
fn a_reply_after_a_half_close_arrives_whole() {
    let (address, ends) = forwarder();
    // Far more than all buffers on the way.
    let question: Vec<u8> = (0..3_000_000_u32)
        .map(|number| (number % 251) as u8)
        .collect();
    let mut client = TcpStream::connect(address).unwrap();
    let mut host = ends.recv().unwrap();
    let sent = question.clone();
    let server = thread::spawn(move || {
        let mut heard = Vec::new();
        host.read_to_end(&mut heard).unwrap();
        heard.reverse();
        host.write_all(&heard).unwrap();
    });
    client.write_all(&sent).unwrap();
    client.shutdown(Shutdown::Write).unwrap();
    let mut answer = Vec::new();
    client.read_to_end(&mut answer).unwrap();
    server.join().unwrap();
    answer.reverse();
    assert!(answer == question, "{} bytes came back", answer.len());
}

#[test]
fn the_host_may_end_first() {
    let (address, ends) = forwarder();
    let mut client = TcpStream::connect(address).unwrap();
    let mut host = ends.recv().unwrap();
    host.write_all(b"greeting").unwrap();
    host.shutdown(Shutdown::Write).unwrap();
    let mut greeting = String::new();
    client.read_to_string(&mut greeting).unwrap();
    assert_eq!(greeting, "greeting");
    client.write_all(b"thanks").unwrap();
    drop(client);
    let mut thanks = String::new();
    host.read_to_string(&mut thanks).unwrap();
    assert_eq!(thanks, "thanks");
}

#[test]
fn a_client_that_is_reset_lets_the_host_go() {
    let (address, ends) = forwarder();
    let client = TcpStream::connect(address).unwrap();
    let mut host = ends.recv().unwrap();
    rustix::net::sockopt::set_socket_linger(&client, Some(Duration::ZERO)).unwrap();
    drop(client);
    let mut rest = Vec::new();
    host.read_to_end(&mut rest).unwrap();
    assert!(rest.is_empty());
}

/// How a call ends that is refused: the reset can come before connect(2) has returned.
fn refusal(address: SocketAddr) -> io::Error {
    let read = TcpStream::connect(address).and_then(|mut client| client.read(&mut [0]));
    read.expect_err("a reset")
}

#[test]
fn who_is_refused_is_reset() {
    let (address, ends) = forwarder();
    drop(ends);
    assert_eq!(refusal(address).kind(), io::ErrorKind::ConnectionReset);
}

#[test]
fn a_caller_with_all_its_places_waits_for_one_and_no_other_does() {
    let (address, ends) = forwarder();
    let connect = || TcpStream::connect(address).unwrap();
    let mut open: Vec<(TcpStream, UnixStream)> = (0..MAX_CONNECTIONS / 2)
        .map(|_| (connect(), ends.recv().unwrap()))
        .collect();
    let mut late = connect();
    late.write_all(b"x").unwrap();
    if rustix::process::geteuid().is_root() {
        let other = thread::spawn(move || {
            let user = rustix::process::Uid::from_raw(4242);
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            TcpStream::connect(address).unwrap()
        });
        let mut other = other.join().unwrap();
        other.write_all(b"y").unwrap();
        let mut host = ends.recv().unwrap();
        let mut byte = [0];
        host.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"y");
        drop(other);
        assert_eq!(host.read(&mut byte).unwrap(), 0);
    }
    assert!(ends.try_recv().is_err());
    open.pop();
    let mut host = ends.recv().unwrap();
    let mut byte = [0];
    host.read_exact(&mut byte).unwrap();
    assert_eq!(&byte, b"x");
}

#[test]
fn who_waits_beyond_its_share_is_reset() {
    let (address, ends) = forwarder();
    let connect = || TcpStream::connect(address).unwrap();
    let _open: Vec<_> = (0..MAX_CONNECTIONS / 2)
        .map(|_| (connect(), ends.recv().unwrap()))
        .collect();
    let mut waiting: Vec<_> = (0..MAX_WAITING / 2).map(|_| connect()).collect();
    assert_eq!(refusal(address).kind(), io::ErrorKind::ConnectionReset);
    let mut first = waiting.remove(0);
    first.set_nonblocking(true).unwrap();
    let error = first.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::WouldBlock);
}
