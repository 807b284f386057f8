//! The parts on a socket pair, against a host that is played here; between guests they are tested in real guests.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread::JoinHandle;

use wire::agent::bench::{Arrival, Messages, Outcome, Received};
use wire::agent::{CONNECTION_CHANNEL, Frame, Hello, OPERATION_CHANNEL};

use super::*;
use crate::session::Options;

const START: Start = Start {
    role: Role::Sink,
    peer: Peer::Host,
    message_len: 1000,
    seed: Some(9),
    limit_ms: 60_000,
};

struct Host {
    stream: UnixStream,
    decoder: Decoder,
    agent: Option<JoinHandle<Result<(), Stop>>>,
}

impl Host {
    /// A host that has asked for this.
    fn asking(start: Start, options: Options) -> Host {
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        ours.set_write_timeout(Some(Duration::from_secs(30)))
            .unwrap();
        let agent =
            std::thread::spawn(move || crate::session::serve(&OwnedFd::from(theirs), &options));
        let mut host = Host {
            stream: ours,
            decoder: Decoder::new(),
            agent: Some(agent),
        };
        let hello = Frame::Hello(Hello::new("test"))
            .to_bytes(CONNECTION_CHANNEL)
            .unwrap();
        host.stream.write_all(&hello).unwrap();
        host.say(Message::Start(start));
        assert!(matches!(host.frame(), Some(Frame::Hello(_))));
        host
    }

    fn ready(start: Start) -> Host {
        let mut host = Host::asking(start, Options::new());
        assert_eq!(host.frame(), Some(Frame::Bench(Message::Ready)));
        host
    }

    fn say(&mut self, message: Message) {
        let bytes = Frame::Bench(message).to_bytes(OPERATION_CHANNEL).unwrap();
        self.stream.write_all(&bytes).unwrap();
    }

    fn receive(&mut self) -> usize {
        let count = self.stream.read(self.decoder.space()).unwrap();
        self.decoder.advance(count);
        count
    }

    fn frame(&mut self) -> Option<Frame<'static>> {
        loop {
            match self.decoder.next_frame().unwrap() {
                Some((_, Frame::Bench(message))) => return Some(Frame::Bench(message)),
                Some((_, Frame::Hello(hello))) => return Some(Frame::Hello(hello)),
                Some((_, Frame::Error(report))) => return Some(Frame::Error(report)),
                Some(other) => panic!("unexpected {other:?}"),
                None => {}
            }
            if self.receive() == 0 {
                return None;
            }
        }
    }

    fn error(&mut self) -> ErrorReport {
        match self.frame() {
            Some(Frame::Error(report)) => report,
            other => panic!("expected an error, not {other:?}"),
        }
    }

    fn outcome(&mut self) -> Outcome {
        match self.frame() {
            Some(Frame::Bench(Message::Outcome(outcome))) => outcome,
            other => panic!("expected an outcome, not {other:?}"),
        }
    }

    /// Leave, and see how the agent took it.
    fn leave(mut self) -> Result<(), Stop> {
        let agent = self.agent.take().unwrap();
        drop(self);
        agent.join().unwrap()
    }
}

fn send_segments(host: &mut Host, messages: &mut Messages, count: usize) {
    for _ in 0..count {
        loop {
            let bytes = messages.next_message().to_vec();
            host.stream.write_all(&bytes).unwrap();
            if messages.is_between_segments() {
                break;
            }
        }
    }
}

#[test]
fn a_sink_counts_and_checks() {
    let mut host = Host::ready(START);
    let mut messages = Messages::new(1000, Some(9)).unwrap();
    send_segments(&mut host, &mut messages, 3);
    host.say(Message::End { bytes: 192_000 });
    let outcome = host.outcome();
    assert_eq!((outcome.bytes, outcome.wrong_bytes), (192_000, 0));
    host.leave().unwrap();

    // Another pattern than was agreed.
    let mut host = Host::ready(START);
    send_segments(&mut host, &mut Messages::new(1000, Some(8)).unwrap(), 1);
    host.say(Message::End { bytes: 64_000 });
    let outcome = host.outcome();
    assert!(outcome.wrong_bytes > 60_000 && outcome.first_wrong.is_some());
    host.leave().unwrap();
}

#[test]
fn a_sum_that_is_not_what_came_is_an_error_and_so_is_an_early_end() {
    let mut host = Host::ready(START);
    send_segments(&mut host, &mut Messages::new(1000, Some(9)).unwrap(), 1);
    host.say(Message::End { bytes: 64_001 });
    assert_eq!(host.error().kind, ErrorKind::Protocol);
    assert!(host.leave().is_err());

    let mut host = Host::ready(START);
    send_segments(&mut host, &mut Messages::new(1000, Some(9)).unwrap(), 1);
    host.stream.shutdown(std::net::Shutdown::Write).unwrap();
    assert_eq!(host.frame(), None, "no outcome without the host's word");
    assert!(matches!(host.leave(), Err(Stop::HostGone(_))));
}

#[test]
fn a_source_waits_for_go_and_ends_when_told() {
    let start = Start {
        role: Role::Source,
        ..START
    };
    let mut host = Host::ready(start);
    host.say(Message::Go);
    let mut received = Received::new(Some(9));
    let mut stopped = false;
    loop {
        match received.next(&mut host.decoder).unwrap() {
            Arrival::Nothing => assert_ne!(host.receive(), 0),
            Arrival::Frame(Frame::Bench(Message::End { .. })) => break,
            Arrival::Frame(other) => panic!("unexpected {other:?}"),
            _ => {}
        }
        if received.bytes() > 500_000 && !stopped {
            stopped = true;
            host.say(Message::Stop);
        }
    }
    assert_eq!(received.wrong_bytes(), 0);
    assert_eq!(received.bytes() % 64_000, 0, "whole segments only");
    host.say(Message::Outcome(Outcome {
        bytes: received.bytes(),
        ..Outcome::default()
    }));
    host.leave().unwrap();
}

#[test]
fn a_source_ends_by_itself_at_its_limit() {
    let start = Start {
        role: Role::Source,
        limit_ms: 1,
        ..START
    };
    let mut host = Host::ready(start);
    host.say(Message::Go);
    let mut received = Received::new(Some(9));
    loop {
        match received.next(&mut host.decoder).unwrap() {
            Arrival::Nothing => assert_ne!(host.receive(), 0),
            Arrival::Frame(Frame::Bench(Message::End { .. })) => break,
            _ => {}
        }
    }
    assert!(received.bytes() >= 64_000);
    // A receiver that confirms less than was sent.
    host.say(Message::Outcome(Outcome::default()));
    assert_eq!(host.error().kind, ErrorKind::Protocol);
    assert!(host.leave().is_err());
}

#[test]
fn an_echo_returns_whole_messages() {
    for message_len in [1, 1000, 300_000] {
        let start = Start {
            role: Role::Echo,
            message_len,
            ..START
        };
        let mut host = Host::ready(start);
        let mut messages = Messages::new(message_len, Some(9)).unwrap();
        for _ in 0..3 {
            loop {
                let bytes = messages.next_message().to_vec();
                host.stream.write_all(&bytes).unwrap();
                let mut back = vec![0; message_len as usize];
                host.stream.read_exact(&mut back).unwrap();
                assert_eq!(back, messages.message());
                if messages.is_between_segments() {
                    break;
                }
            }
        }
        host.say(Message::End {
            bytes: messages.bytes(),
        });
        assert_eq!(host.outcome().bytes, messages.bytes());
        host.leave().unwrap();
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    let guest = Peer::Dial {
        cid: 3,
        port: 1,
        nonce: [0; 16],
    };
    for start in [
        Start {
            role: Role::Ping,
            ..START
        },
        // Without vsock nothing is dialled, on this machine least of all.
        Start {
            peer: guest,
            ..START
        },
    ] {
        let mut host = Host::asking(start, Options::new());
        assert_eq!(host.error().kind, ErrorKind::InvalidRequest);
        assert!(host.leave().is_err());
    }
    let mut host = Host::ready(Start {
        role: Role::Source,
        ..START
    });
    host.say(Message::Ready);
    assert_eq!(host.error().kind, ErrorKind::Protocol);
    let mut host = Host::ready(START);
    let signal = Frame::Signal(9).to_bytes(OPERATION_CHANNEL).unwrap();
    host.stream.write_all(&signal).unwrap();
    assert_eq!(host.error().kind, ErrorKind::Protocol);
}

#[test]
fn streams_and_their_memory_have_limits() {
    let options = Options::new();
    let mut hosts: Vec<Host> = (0..MAX_STREAMS)
        .map(|_| {
            let mut host = Host::asking(START, options.clone());
            assert_eq!(host.frame(), Some(Frame::Bench(Message::Ready)));
            host
        })
        .collect();
    let mut refused = Host::asking(START, options.clone());
    assert_eq!(refused.error().kind, ErrorKind::Busy);
    drop(refused);
    for host in hosts.drain(..) {
        let _ = host.leave();
    }

    let source = Start {
        role: Role::Source,
        message_len: 16 << 20,
        ..START
    };
    let mut hosts: Vec<Host> = (0..4)
        .map(|_| {
            let mut host = Host::asking(source, options.clone());
            assert_eq!(host.frame(), Some(Frame::Bench(Message::Ready)));
            host
        })
        .collect();
    let small = Start {
        message_len: 1,
        ..source
    };
    let mut refused = Host::asking(small, options.clone());
    assert_eq!(refused.error().kind, ErrorKind::Busy);
    let _ = hosts.pop().unwrap().leave();
    let mut again = Host::asking(small, options);
    assert_eq!(again.frame(), Some(Frame::Bench(Message::Ready)));
}
