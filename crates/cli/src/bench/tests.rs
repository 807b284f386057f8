//! The client against the agent's own code, through a host socket that does the handshake and nothing else; and against
//! hostile agents. Between guests it is tested in real guests.

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::thread;

use tempfile::TempDir;
use wire::agent::bench::{Arrival, Message, Outcome, Received};
use wire::agent::{CONNECTION_CHANNEL, Decoder, ErrorReport, Frame, Hello, OPERATION_CHANNEL};

use super::report::Measurement;
use super::*;
use crate::guest::Deadline;
use crate::size::show_bytes;

struct HostSocket {
    directory: TempDir,
}

impl HostSocket {
    fn serve(service: impl Fn(UnixStream) + Send + Clone + 'static) -> HostSocket {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("web.sock")).unwrap();
        thread::spawn(move || {
            for connection in listener.incoming() {
                let mut connection = connection.unwrap();
                let service = service.clone();
                thread::spawn(move || {
                    let mut line = [0; b"CONNECT 1007\n".len()];
                    connection.read_exact(&mut line).unwrap();
                    assert_eq!(&line, b"CONNECT 1007\n");
                    connection.write_all(b"OK 1073741824\n").unwrap();
                    service(connection);
                });
            }
        });
        HostSocket { directory }
    }

    fn with_agent() -> HostSocket {
        let options = agent::session::Options::new();
        HostSocket::serve(move |connection| {
            // What went wrong is the client's to notice; this shows it when a test fails.
            if let Err(stop) = agent::session::serve(&connection.into(), &options) {
                println!("the agent stops: {stop}");
            }
        })
    }

    /// An agent that greets, says that it is ready, and then does this.
    fn with_fake(service: impl Fn(Fake) + Send + Clone + 'static) -> HostSocket {
        HostSocket::serve(move |stream| {
            let mut fake = Fake {
                stream,
                decoder: Decoder::new(),
            };
            fake.greet(vec!["bench".to_owned()]);
            fake.say(Message::Ready);
            service(fake);
        })
    }

    fn parties(&self) -> Parties {
        Parties {
            vm: Party {
                name: "web".to_owned(),
                cid: 3,
                host_socket: self.directory.path().join("web.sock"),
            },
            other: None,
            port: 0,
        }
    }

    fn measure(&self, plan: &Plan) -> Result<Measurement, BenchError> {
        measure(&self.parties(), plan, false, &Interrupt::never(), || None)
    }
}

fn reason(error: &BenchError) -> &GuestError {
    match error {
        BenchError::Guest { source, .. } => source,
        other => panic!("not of a guest: {other}"),
    }
}

/// An agent that a test plays.
struct Fake {
    stream: UnixStream,
    decoder: Decoder,
}

impl Fake {
    fn greet(&mut self, capabilities: Vec<String>) {
        let hello = Frame::Hello(Hello {
            capabilities,
            ..Hello::new("fake 1")
        });
        let bytes = hello.to_bytes(CONNECTION_CHANNEL).unwrap();
        self.stream.write_all(&bytes).unwrap();
        let mut greeted = false;
        loop {
            match self.decoder.next_frame().unwrap() {
                Some((_, Frame::Hello(_))) => greeted = true,
                Some((_, Frame::Bench(Message::Start(_)))) if greeted => return,
                Some(other) => panic!("unexpected {other:?}"),
                None => {
                    if !self.receive() {
                        return;
                    }
                }
            }
        }
    }

    fn receive(&mut self) -> bool {
        let count = self.stream.read(self.decoder.space()).unwrap_or(0);
        self.decoder.advance(count);
        count > 0
    }

    fn say(&mut self, message: Message) {
        let bytes = Frame::Bench(message).to_bytes(OPERATION_CHANNEL).unwrap();
        // The client may have left already.
        let _ = self.stream.write_all(&bytes);
    }

    /// Takes all payload: how many bytes.
    fn take_all(&mut self) -> u64 {
        let mut received = Received::new(None);
        loop {
            let is_empty = match received.next(&mut self.decoder).unwrap() {
                Arrival::Frame(Frame::Bench(Message::End { bytes })) => return bytes,
                arrival => arrival == Arrival::Nothing,
            };
            if is_empty && !self.receive() {
                return received.bytes();
            }
        }
    }
}

fn plan(kind: Kind) -> Plan {
    Plan {
        kind,
        message_len: 10_000,
        streams: 1,
        time: Duration::from_millis(100),
        verify: true,
    }
}

#[test]
fn throughput_each_way_with_several_streams() {
    let socket = HostSocket::with_agent();
    for kind in [Kind::There, Kind::Back] {
        for message_len in [1, 10_000, 1 << 20] {
            let plan = Plan {
                message_len,
                streams: 3,
                ..plan(kind)
            };
            let measured = socket.measure(&plan).unwrap();
            assert_eq!(measured.streams.len(), 3);
            assert!(measured.streams.iter().all(|stream| stream.bytes > 0));
            let sum: u64 = measured.streams.iter().map(|stream| stream.bytes).sum();
            assert_eq!((measured.bytes, measured.wrong_bytes), (sum, 0));
            assert!(measured.summary().contains("every byte is what was sent"));
        }
    }
}

#[test]
fn round_trips_of_every_size() {
    let socket = HostSocket::with_agent();
    for message_len in [1, 64, 300_000] {
        let plan = Plan {
            message_len,
            ..plan(Kind::Ping)
        };
        println!("messages of {message_len} bytes");
        let measured = socket.measure(&plan).unwrap();
        let times = measured.round_trips.as_ref().unwrap();
        assert_eq!(measured.bytes, times.count * u64::from(message_len));
        assert!(times.count > 0 && times.min_us <= times.p1_us && times.p1_us <= times.p50_us);
        assert!(times.p50_us <= times.p99_us && times.p99_us <= times.p99_9_us);
        assert_eq!(measured.wrong_bytes, 0);
    }
}

#[test]
fn the_document_has_what_it_promises() {
    let measured = HostSocket::with_agent().measure(&plan(Kind::Ping)).unwrap();
    let report = Report {
        measurements: vec![measured],
        interrupted: false,
    };
    let value: serde_json::Value =
        serde_json::from_str(&serde_json::to_string(&report).unwrap()).unwrap();
    let first = &value["measurements"][0];
    assert_eq!(first["kind"], "round_trips");
    assert_eq!(
        (&first["from"], &first["to"]),
        (&"host".into(), &"web".into())
    );
    assert!(first["round_trips"]["p99_9_us"].as_f64().unwrap() > 0.0);
    assert!(first["streams"][0]["bits_per_second"].as_f64().unwrap() > 0.0);
}

#[test]
fn an_agent_that_confirms_another_sum_is_not_believed() {
    let socket = HostSocket::with_fake(|mut fake| {
        let bytes = fake.take_all() + 1;
        fake.say(Message::Outcome(Outcome {
            bytes,
            ..Outcome::default()
        }));
    });
    let error = socket.measure(&plan(Kind::There)).unwrap_err();
    assert!(matches!(reason(&error), GuestError::Protocol(_)), "{error}");
}

#[test]
fn an_end_without_a_word_is_no_result() {
    let silent = HostSocket::with_fake(|mut fake| {
        fake.take_all();
    });
    let error = silent.measure(&plan(Kind::There)).unwrap_err();
    assert!(matches!(reason(&error), GuestError::Broken(_)), "{error}");
    // In the middle of a segment.
    let short = HostSocket::with_fake(|mut fake| {
        fake.say(Message::Segment { len: 100 });
        let _ = fake.stream.write_all(&[0; 50]);
    });
    let error = short.measure(&plan(Kind::Back)).unwrap_err();
    assert!(matches!(reason(&error), GuestError::Broken(_)), "{error}");
}

#[test]
fn an_agent_that_takes_nothing_and_never_stops_sending_is_left() {
    let socket = HostSocket::with_fake(|mut fake| {
        let segment = Frame::Bench(Message::Segment { len: 1 });
        let mut bytes = segment.to_bytes(OPERATION_CHANNEL).unwrap();
        bytes.push(7);
        let _ = fake.stream.write_all(&bytes);
        fake.stream.shutdown(std::net::Shutdown::Read).unwrap();
        // Until the client has left.
        while fake.stream.write_all(&bytes.repeat(1000)).is_ok() {}
    });
    let error = socket.measure(&plan(Kind::There)).unwrap_err();
    assert!(matches!(reason(&error), GuestError::Broken(_)), "{error}");
}

#[test]
fn wrong_bytes_are_counted_and_shown() {
    let socket = HostSocket::with_fake(|mut fake| {
        fake.say(Message::Segment { len: 1000 });
        let _ = fake.stream.write_all(&[7; 1000]);
        fake.say(Message::End { bytes: 1000 });
        // Until the client has taken it.
        while fake.receive() {}
    });
    let measured = socket.measure(&plan(Kind::Back)).unwrap();
    assert!(measured.wrong_bytes > 900);
    assert!(
        measured.summary().contains("WRONG"),
        "{}",
        measured.summary()
    );
}

#[test]
fn what_an_agent_says_instead_is_the_reason() {
    let socket = HostSocket::with_fake(|mut fake| {
        let report = ErrorReport::new(ErrorKind::Busy, "no \x1b[31mplace");
        let bytes = Frame::Error(report).to_bytes(OPERATION_CHANNEL).unwrap();
        let _ = fake.stream.write_all(&bytes);
        fake.take_all();
    });
    let error = socket.measure(&plan(Kind::Back)).unwrap_err();
    assert!(matches!(reason(&error), GuestError::Agent(_)), "{error}");
    assert!(!error.to_string().contains('\x1b'), "{error}");

    let garbage = HostSocket::with_fake(|mut fake| {
        let _ = fake.stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n");
        fake.take_all();
    });
    let error = garbage.measure(&plan(Kind::Back)).unwrap_err();
    assert!(matches!(reason(&error), GuestError::Protocol(_)), "{error}");
}

#[test]
fn streams_are_connected_by_the_deadline_of_them_all() {
    let socket = HostSocket::with_agent();
    let connect = |patience| {
        let deadline = Deadline::after(patience);
        run::connect(&socket.parties(), &plan(Kind::There), deadline, || None)
    };
    assert_eq!(connect(Duration::from_secs(60)).unwrap().len(), 1);
    // The agent is there, and the time is over.
    let error = connect(Duration::ZERO).unwrap_err();
    assert!(matches!(error, BenchError::Guest { .. }), "{error}");
}

#[test]
fn an_agent_without_benchmarks_is_told_apart() {
    let socket = HostSocket::serve(|stream| {
        let decoder = Decoder::new();
        Fake { stream, decoder }.greet(vec!["exec".to_owned()]);
    });
    let error = socket.measure(&plan(Kind::There)).unwrap_err();
    assert!(
        matches!(reason(&error), GuestError::Unsupported(_)),
        "{error}"
    );
}

#[test]
fn amounts_are_shown_in_the_unit_that_fits() {
    for (bytes, text) in [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (64 << 10, "64 KiB"),
        (3 << 40, "3 TiB"),
        (u64::MAX, "16777216 TiB"),
    ] {
        assert_eq!(show_bytes(bytes), text);
    }
}
