//! An agent's session on a pair of sockets, with real programs at both ends.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;

use rustix::event::{PollFd, PollFlags, poll};
use wire::agent::{CONNECTION_CHANNEL, Hello, Stream};

use super::*;
use crate::session::{Options, serve};

/// A host's connection to an agent.
struct Host {
    stream: UnixStream,
    decoder: Decoder,
}

impl Host {
    /// Say hello to an agent with these options and ask it.
    fn ask(options: &Options, request: Message) -> Host {
        let (mut stream, agent) = UnixStream::pair().unwrap();
        let options = options.clone();
        thread::spawn(move || serve(&agent.into(), &options));
        stream
            .set_read_timeout(Some(Duration::from_secs(60)))
            .unwrap();
        let mut bytes = Frame::Hello(Hello::new("test"))
            .to_bytes(CONNECTION_CHANNEL)
            .unwrap();
        Frame::Forward(request)
            .encode(OPERATION_CHANNEL, &mut bytes)
            .unwrap();
        stream.write_all(&bytes).unwrap();
        let decoder = Decoder::new();
        let mut host = Host { stream, decoder };
        host.receive();
        assert!(matches!(
            host.decoder.next_frame(),
            Ok(Some((_, Frame::Hello(_))))
        ));
        host
    }

    fn receive(&mut self) {
        while !self.decoder.has_frame() {
            let count = self.stream.read(self.decoder.space()).unwrap();
            assert!(count > 0, "the agent closed");
            self.decoder.advance(count);
        }
    }

    fn answer(&mut self) -> Result<Message, ErrorKind> {
        self.receive();
        match self.decoder.next_frame() {
            Ok(Some((_, Frame::Forward(message)))) => Ok(message),
            Ok(Some((_, Frame::Error(report)))) => Err(report.kind),
            other => panic!("{other:?}"),
        }
    }

    fn say(&mut self, message: Message) {
        let bytes = Frame::Forward(message).to_bytes(OPERATION_CHANNEL).unwrap();
        self.stream.write_all(&bytes).unwrap();
    }

    /// The bytes up to their end.
    fn rest(mut self) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            self.receive();
            match self.decoder.next_frame() {
                Ok(Some((
                    _,
                    Frame::Data {
                        stream: Stream::Stdout,
                        bytes,
                    },
                ))) => all.extend(bytes),
                Ok(Some((_, Frame::EndOfStream(Stream::Stdout)))) => return all,
                other => panic!("{other:?}"),
            }
        }
    }
}

/// Bytes towards the guest, in frames.
fn data(bytes: &[u8]) -> Vec<u8> {
    let mut frames = Vec::new();
    for bytes in bytes.chunks(50_000) {
        let data = Frame::Data {
            stream: Stream::Stdin,
            bytes,
        };
        data.encode(OPERATION_CHANNEL, &mut frames).unwrap();
    }
    frames
}

/// The same, and their end.
fn all(bytes: &[u8]) -> Vec<u8> {
    let mut frames = data(bytes);
    let end = Frame::EndOfStream(Stream::Stdin);
    end.encode(OPERATION_CHANNEL, &mut frames).unwrap();
    frames
}

fn loopback(port: u16) -> Place {
    let host = "127.0.0.1".to_owned();
    Place::Tcp { host, port }
}

/// Answers each connection with what it sent, backwards, when that has ended.
fn backwards(mut stream: impl Read + Write) {
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    bytes.reverse();
    stream.write_all(&bytes).unwrap();
}

#[test]
fn a_program_of_the_guest_is_reached_and_each_direction_ends_for_itself() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("service");
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = tcp.local_addr().unwrap().port();
    let unix = UnixListener::bind(&path).unwrap();
    thread::spawn(move || tcp.incoming().for_each(|stream| backwards(stream.unwrap())));
    thread::spawn(move || {
        unix.incoming()
            .for_each(|stream| backwards(stream.unwrap()))
    });
    let path = path.into_os_string().into_encoded_bytes();
    for place in [loopback(port), Place::Unix { path }] {
        let mut host = Host::ask(&Options::new(), Message::Dial(place));
        // Not waiting for the answer: what follows the request belongs to the program.
        let question: Vec<u8> = (0..1_000_000_u32).map(|number| number as u8).collect();
        let mut writer = host.stream.try_clone().unwrap();
        let sent = all(&question);
        let writing = thread::spawn(move || writer.write_all(&sent).unwrap());
        assert_eq!(host.answer(), Ok(Message::Connected));
        let mut answer = host.rest();
        writing.join().unwrap();
        answer.reverse();
        assert!(answer == question);
    }
}

#[test]
fn what_cannot_be_reached_is_told() {
    let unused = TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port();
    let nowhere = Place::Unix {
        path: b"/nowhere/at/all".to_vec(),
    };
    let unknown = Place::Tcp {
        host: "no-such-name.invalid".to_owned(),
        port: 1,
    };
    for place in [loopback(unused), nowhere.clone(), unknown] {
        let mut host = Host::ask(&Options::new(), Message::Dial(place));
        assert_eq!(host.answer(), Err(ErrorKind::Unreachable));
    }
    let mut host = Host::ask(&Options::new(), Message::Listen(nowhere));
    assert_eq!(host.answer(), Err(ErrorKind::Unavailable));
    let stranger = Message::Take {
        key: [1; 16],
        number: 0,
    };
    let mut host = Host::ask(&Options::new(), stranger);
    assert_eq!(host.answer(), Err(ErrorKind::Unreachable));
    let mut host = Host::ask(&Options::new(), Message::Connected);
    assert_eq!(host.answer(), Err(ErrorKind::Protocol));
}

#[test]
fn a_caller_in_the_guest_is_taken_once_or_left() {
    let options = Options::new();
    let mut host = Host::ask(&options, Message::Listen(loopback(0)));
    let Ok(Message::Listening { place, key }) = host.answer() else {
        panic!("it does not listen");
    };
    let Place::Tcp { port, .. } = place else {
        panic!("{place:?}");
    };
    let mut caller = TcpStream::connect(("127.0.0.1", port)).unwrap();
    assert_eq!(host.answer(), Ok(Message::Caller { number: 0 }));
    let take = |number| Host::ask(&options, Message::Take { key, number });
    let mut taken = take(0);
    assert_eq!(taken.answer(), Ok(Message::Connected));
    caller.write_all(b"to the host").unwrap();
    caller.shutdown(Shutdown::Write).unwrap();
    taken.stream.write_all(&all(b"to the guest")).unwrap();
    assert_eq!(taken.rest(), b"to the host");
    let mut answer = Vec::new();
    caller.read_to_end(&mut answer).unwrap();
    assert_eq!(answer, b"to the guest");
    assert_eq!(take(0).answer(), Err(ErrorKind::Unreachable));

    let mut left = TcpStream::connect(("127.0.0.1", port)).unwrap();
    assert_eq!(host.answer(), Ok(Message::Caller { number: 1 }));
    host.say(Message::Leave { number: 1 });
    assert!(
        left.read(&mut [0]).is_err(),
        "a caller that is left is reset"
    );

    let mut waiting = TcpStream::connect(("127.0.0.1", port)).unwrap();
    assert_eq!(host.answer(), Ok(Message::Caller { number: 2 }));
    drop(host);
    assert!(
        waiting.read(&mut [0]).is_err(),
        "nobody can take it any more"
    );
    while TcpStream::connect(("127.0.0.1", port)).is_ok() {
        thread::yield_now();
    }
}

#[test]
fn a_user_of_the_guest_who_calls_leaves_places_to_others_and_half_to_the_host() {
    let options = Options::new();
    let mut host = Host::ask(&options, Message::Listen(loopback(0)));
    let Ok(Message::Listening { place, key }) = host.answer() else {
        panic!("it does not listen");
    };
    let Place::Tcp { port, .. } = place else {
        panic!("{place:?}");
    };
    let call = move || TcpStream::connect(("127.0.0.1", port)).unwrap();
    let mut held = Vec::new();
    for _ in 0..MAX_CALLERS / 2 {
        let caller = call();
        let Ok(Message::Caller { number }) = host.answer() else {
            panic!("it is not told of");
        };
        let mut taken = Host::ask(&options, Message::Take { key, number });
        assert_eq!(taken.answer(), Ok(Message::Connected));
        held.push((caller, taken));
    }
    let error = call().read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
    if rustix::process::geteuid().is_root() {
        let other = thread::spawn(move || {
            let user = rustix::process::Uid::from_raw(4242);
            rustix::thread::set_thread_res_uid(user, user, user).unwrap();
            call()
        });
        let _other = other.join().unwrap();
        assert!(matches!(host.answer(), Ok(Message::Caller { .. })));
    }
    held.pop();
    // A place comes back when the agent has seen the end.
    let own = sys::tcp_callers::Caller::User(rustix::process::geteuid().as_raw());
    while options.forwarding.callers.try_take(own).is_none() {
        thread::yield_now();
    }
}

/// A connection of the host ends without a word, or inside a frame, or breaks the protocol: the program's is reset. So is the host's when the
/// program's is.
#[test]
fn what_is_cut_has_no_end() {
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = tcp.local_addr().unwrap().port();
    let reach = || {
        let mut host = Host::ask(&Options::new(), Message::Dial(loopback(port)));
        assert_eq!(host.answer(), Ok(Message::Connected));
        (host, tcp.accept().unwrap().0)
    };
    let unexpected = Frame::Started { pid: 1 }
        .to_bytes(OPERATION_CHANNEL)
        .unwrap();
    for last in [Vec::new(), all(b"cut")[..4].to_vec(), unexpected] {
        let (mut host, mut program) = reach();
        host.stream.write_all(&data(b"half of it")).unwrap();
        program.read_exact(&mut [0; 10]).unwrap();
        host.stream.write_all(&last).unwrap();
        host.stream.shutdown(Shutdown::Write).unwrap();
        let error = program.read(&mut [0]).unwrap_err();
        assert_eq!(
            error.kind(),
            std::io::ErrorKind::ConnectionReset,
            "{last:?}"
        );
    }
    // A host that has said all, and is gone before the program answers.
    let (mut host, mut program) = reach();
    host.stream.write_all(&all(b"question")).unwrap();
    program.read_to_end(&mut Vec::new()).unwrap();
    drop(host);
    let mut broken = [PollFd::new(&program, PollFlags::empty())];
    assert_eq!(poll(&mut broken, None), Ok(1));

    let (mut host, mut program) = reach();
    program.write_all(b"half of it").unwrap();
    host.receive();
    assert!(matches!(
        host.decoder.next_frame(),
        Ok(Some((_, Frame::Data { .. })))
    ));
    rustix::net::sockopt::set_socket_linger(&program, Some(Duration::ZERO)).unwrap();
    drop(program);
    assert_eq!(
        host.stream.read(&mut [0]).unwrap(),
        0,
        "without the end of the data"
    );
}

#[test]
fn there_are_as_many_connections_as_the_limit_says() {
    let options = Options::new();
    let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = tcp.local_addr().unwrap().port();
    let share = Share::take(
        &options.forwarding.connections,
        MAX_CONNECTIONS - 1,
        MAX_CONNECTIONS,
    );
    let mut last = Host::ask(&options, Message::Dial(loopback(port)));
    assert_eq!(last.answer(), Ok(Message::Connected));
    let mut one_too_many = Host::ask(&options, Message::Dial(loopback(port)));
    assert_eq!(one_too_many.answer(), Err(ErrorKind::Busy));
    drop(share);
    let mut another = Host::ask(&options, Message::Dial(loopback(port)));
    assert_eq!(another.answer(), Ok(Message::Connected));
}

/// A program that accepts nothing, whose backlog is full.
#[test]
fn a_host_that_goes_while_it_waits_gives_its_place_back() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("hung");
    let hung = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&hung, 0).unwrap();
    let _waiting = UnixStream::connect(&path).unwrap();
    let path = path.into_os_string().into_encoded_bytes();
    let options = Options::new();
    let others = Share::take(
        &options.forwarding.connections,
        MAX_CONNECTIONS - 1,
        MAX_CONNECTIONS,
    );
    let host = Host::ask(&options, Message::Dial(Place::Unix { path }));
    let taken = || {
        options
            .forwarding
            .connections
            .load(std::sync::atomic::Ordering::Acquire)
    };
    while taken() < MAX_CONNECTIONS {
        thread::yield_now();
    }
    drop(host);
    while taken() == MAX_CONNECTIONS {
        thread::yield_now();
    }
    drop(others);
}
