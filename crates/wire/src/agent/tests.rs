use proptest::prelude::*;

use super::credit::{CreditError, MAX_CREDIT, ReceiveWindow, SendCredit};
use super::*;

/// Feed `bytes` to a decoder in pieces of the given sizes (then whatever is left) and collect owned frames.
fn decode_in_pieces(
    bytes: &[u8],
    pieces: &[usize],
) -> Result<Vec<(u16, Frame<'static>)>, DecodeError> {
    let mut decoder = Decoder::new();
    let mut frames = Vec::new();
    let mut rest = bytes;
    let mut pieces = pieces.iter().copied();
    while !rest.is_empty() {
        let wanted = pieces.next().unwrap_or(usize::MAX).max(1);
        let space = decoder.space();
        assert!(
            !space.is_empty(),
            "a decoder that wants more must have room for it"
        );
        let count = wanted.min(rest.len()).min(space.len());
        space[..count].copy_from_slice(&rest[..count]);
        decoder.advance(count);
        rest = &rest[count..];
        while let Some((channel, frame)) = decoder.next_frame()? {
            frames.push((channel, into_owned(frame)));
        }
    }
    Ok(frames)
}

fn into_owned(frame: Frame<'_>) -> Frame<'static> {
    match frame {
        Frame::Data { stream, bytes } => Frame::Data {
            stream,
            bytes: Vec::from(bytes).leak(),
        },
        Frame::Hello(hello) => Frame::Hello(hello),
        Frame::Secret(secret) => Frame::Secret(secret),
        Frame::Error(report) => Frame::Error(report),
        Frame::ExecStart(start) => Frame::ExecStart(start),
        Frame::Started { pid } => Frame::Started { pid },
        Frame::EndOfStream(stream) => Frame::EndOfStream(stream),
        Frame::StreamClosed(stream) => Frame::StreamClosed(stream),
        Frame::Credit { stream, bytes } => Frame::Credit { stream, bytes },
        Frame::WindowSize { rows, columns } => Frame::WindowSize { rows, columns },
        Frame::Signal(number) => Frame::Signal(number),
        Frame::Exit(status) => Frame::Exit(status),
        Frame::Bench(message) => Frame::Bench(message),
        Frame::Ask(ask) => Frame::Ask(ask),
        Frame::Answer(answer) => Frame::Answer(answer),
        Frame::Forward(message) => Frame::Forward(message),
        Frame::Transfer(message) => Frame::Transfer(message),
    }
}

fn any_stream() -> impl Strategy<Value = Stream> {
    prop_oneof![
        Just(Stream::Stdin),
        Just(Stream::Stdout),
        Just(Stream::Stderr)
    ]
}

fn text(max: usize) -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(1u8.., 0..max)
}

fn any_hello() -> impl Strategy<Value = Hello> {
    (
        1u16..9,
        0u16..9,
        "[a-z-]{0,60}",
        "[0-9a-f-]{0,36}",
        "\\PC{0,60}",
        prop::collection::vec("[a-z]{1,20}", 0..5),
        "[0-9a-f]{0,32}",
        any::<u64>(),
    )
        .prop_map(
            |(
                protocol_min,
                more,
                software,
                boot_id,
                hostname,
                capabilities,
                generation,
                unix_ns,
            )| Hello {
                protocol_min,
                protocol_max: protocol_min + more,
                software,
                boot_id,
                hostname,
                capabilities,
                generation,
                unix_ns,
            },
        )
}

fn any_start() -> impl Strategy<Value = ExecStart> {
    let name = prop::collection::vec(1u8.., 1..40);
    let variable = ("[A-Za-z_]{1,12}".prop_map(String::into_bytes), text(60));
    let terminal =
        (any::<u16>(), any::<u16>(), "[a-z0-9-]{0,64}").prop_map(|(rows, columns, kind)| {
            Terminal {
                rows,
                columns,
                kind,
            }
        });
    (
        name,
        prop::collection::vec(text(200), 0..20),
        prop::collection::vec(variable, 0..20),
        prop::option::of(prop::collection::vec(1u8.., 1..100)),
        prop::option::of(terminal),
    )
        .prop_map(|(name, mut arguments, environment, directory, terminal)| {
            arguments.insert(0, name);
            ExecStart {
                arguments,
                environment,
                directory,
                terminal,
            }
        })
}

fn any_kind_of_error() -> impl Strategy<Value = ErrorKind> {
    prop::sample::select(vec![
        ErrorKind::Protocol,
        ErrorKind::Version,
        ErrorKind::Busy,
        ErrorKind::InvalidRequest,
        ErrorKind::CommandNotFound,
        ErrorKind::CommandNotExecutable,
        ErrorKind::NoSuchDirectory,
        ErrorKind::Unavailable,
        ErrorKind::Internal,
        ErrorKind::Unreachable,
        ErrorKind::Forbidden,
        ErrorKind::WrongProof,
    ])
}

fn any_frame() -> impl Strategy<Value = Frame<'static>> {
    prop_oneof![
        any_hello().prop_map(Frame::Hello),
        (any_kind_of_error(), "\\PC{0,300}")
            .prop_map(|(kind, message)| Frame::Error(ErrorReport::new(kind, message))),
        any_start().prop_map(Frame::ExecStart),
        any::<[u8; SECRET_LEN]>().prop_map(|bytes| Frame::Secret(Secret::new(bytes))),
        any::<u32>().prop_map(|pid| Frame::Started { pid }),
        (any_stream(), prop::collection::vec(any::<u8>(), 1..3000)).prop_map(|(stream, bytes)| {
            Frame::Data {
                stream,
                bytes: bytes.leak(),
            }
        }),
        any_stream().prop_map(Frame::EndOfStream),
        any_stream().prop_map(Frame::StreamClosed),
        (any_stream(), 1u32..).prop_map(|(stream, bytes)| Frame::Credit { stream, bytes }),
        (any::<u16>(), any::<u16>())
            .prop_map(|(rows, columns)| Frame::WindowSize { rows, columns }),
        (1u8..=MAX_SIGNAL).prop_map(Frame::Signal),
        any::<u8>().prop_map(|code| Frame::Exit(ExitStatus::Code(code))),
        (1u8..=64).prop_map(|number| Frame::Exit(ExitStatus::Signal(number))),
        super::bench::any_message().prop_map(Frame::Bench),
        super::job::tests::any_ask().prop_map(Frame::Ask),
        super::job::tests::any_answer().prop_map(Frame::Answer),
        super::transfer::any_message().prop_map(Frame::Transfer),
    ]
}

proptest! {
    #[test]
    fn frames_survive_any_cutting_of_the_stream(
        frames in prop::collection::vec((any::<u16>(), any_frame()), 1..8),
        pieces in prop::collection::vec(1usize..5000, 0..40),
    ) {
        let mut bytes = Vec::new();
        for (channel, frame) in &frames {
            frame.encode(*channel, &mut bytes).unwrap();
        }
        prop_assert_eq!(decode_in_pieces(&bytes, &pieces), Ok(frames));
    }

    #[test]
    fn a_frame_cut_short_anywhere_is_no_frame(frame in any_frame(), cut in any::<prop::sample::Index>()) {
        let bytes = frame.to_bytes(7).unwrap();
        let cut = cut.index(bytes.len());
        prop_assert_eq!(decode_in_pieces(&bytes[..cut], &[]), Ok(vec![]));
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..600), piece in 1usize..40) {
        let _ = decode_in_pieces(&bytes, &[piece, piece, piece]);
    }

    /// Headers that are right, so that the bodies are reached.
    #[test]
    fn arbitrary_bodies_are_refused_or_read_back_as_they_are_written(
        kind in prop::sample::select(Kind::ALL.to_vec()),
        body in prop::collection::vec(any::<u8>(), 0..300),
    ) {
        let mut bytes = header(kind, 1, body.len()).to_vec();
        bytes.extend_from_slice(&body);
        if let Ok(frames) = decode_in_pieces(&bytes, &[]) {
            prop_assert_eq!(frames.len(), 1);
            // Whatever was accepted obeys the limits, so it can be written, and means the same again.
            let again = frames[0].1.to_bytes(1).unwrap();
            prop_assert_eq!(decode_in_pieces(&again, &[]), Ok(frames));
        }
    }

    #[test]
    fn one_changed_byte_never_panics(frame in any_frame(), place in any::<prop::sample::Index>(), value in any::<u8>()) {
        let mut bytes = frame.to_bytes(1).unwrap();
        let place = place.index(bytes.len());
        bytes[place] = value;
        let _ = decode_in_pieces(&bytes, &[]);
    }

    #[test]
    fn credit_is_conserved(steps in prop::collection::vec((1usize..5000, any::<bool>()), 1..200)) {
        let mut window = ReceiveWindow::new(64 * 1024);
        let mut credit = SendCredit::default();
        credit.grant(window.size()).unwrap();
        let mut buffered = 0;
        for (bytes, consume) in steps {
            if consume {
                let bytes = bytes.min(buffered);
                buffered -= bytes;
                window.consumed(bytes);
                if let Some(grant) = window.grant_due() {
                    credit.grant(grant).unwrap();
                }
            } else {
                let bytes = bytes.min(credit.available());
                credit.spend(bytes);
                window.received(bytes).unwrap();
                buffered += bytes;
            }
            prop_assert!(buffered + credit.available() <= window.size() as usize);
        }
        // An empty buffer never leaves the sender without credit: no stall.
        window.consumed(buffered);
        if let Some(grant) = window.grant_due() {
            credit.grant(grant).unwrap();
        }
        prop_assert!(credit.available() > window.size() as usize / 2);
    }
}

#[test]
fn truncation_at_every_point_waits_for_more() {
    let frames = [
        Frame::Hello(Hello::new("ringdown-agent 1.2.3")),
        Frame::Error(ErrorReport::new(
            ErrorKind::Busy,
            "64 operations run already",
        )),
        Frame::ExecStart(command(vec![
            b"sh".to_vec(),
            b"-c".to_vec(),
            b"true".to_vec(),
        ])),
        Frame::Data {
            stream: Stream::Stdin,
            bytes: b"hello",
        },
        Frame::Exit(ExitStatus::Signal(9)),
    ];
    for frame in frames {
        let bytes = frame.to_bytes(1).unwrap();
        for cut in 0..bytes.len() {
            assert_eq!(
                decode_in_pieces(&bytes[..cut], &[]),
                Ok(vec![]),
                "cut at {cut}"
            );
        }
        assert_eq!(decode_in_pieces(&bytes, &[]), Ok(vec![(1, frame)]));
    }
}

fn command(arguments: Vec<Vec<u8>>) -> ExecStart {
    ExecStart {
        arguments,
        environment: vec![],
        directory: None,
        terminal: None,
    }
}

fn refusal(bytes: &[u8]) -> DecodeError {
    decode_in_pieces(bytes, &[]).unwrap_err()
}

#[test]
fn headers_are_checked_before_their_bodies_arrive() {
    for kind in Kind::ALL {
        let max = kind.max_body_len();
        let mut bytes = header(kind, 1, max + 1).to_vec();
        assert_eq!(
            refusal(&bytes),
            DecodeError::TooLong {
                kind: kind as u8,
                len: max as u32 + 1,
                max
            }
        );
        bytes = header(kind, 1, max).to_vec();
        assert_eq!(
            decode_in_pieces(&bytes, &[]),
            Ok(vec![]),
            "{kind:?} at its limit waits for the body"
        );
        bytes[1] = 1;
        assert_eq!(refusal(&bytes), DecodeError::Reserved(1));
    }
    let unknown = [0, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(refusal(&unknown), DecodeError::UnknownKind(0));
    let huge = [Kind::Stdin as u8, 0, 0, 0, 0xff, 0xff, 0xff, 0xff];
    assert_eq!(
        refusal(&huge),
        DecodeError::TooLong {
            kind: Kind::Stdin as u8,
            len: u32::MAX,
            max: MAX_DATA_LEN
        }
    );
}

#[test]
fn an_error_stays() {
    let mut decoder = Decoder::new();
    decoder.space()[..8].copy_from_slice(&[200, 0, 0, 0, 0, 0, 0, 0]);
    decoder.advance(8);
    assert_eq!(decoder.next_frame(), Err(DecodeError::UnknownKind(200)));
    assert_eq!(decoder.next_frame(), Err(DecodeError::UnknownKind(200)));
}

#[test]
fn data_at_the_limits() {
    let largest = vec![7; MAX_DATA_LEN];
    let frame = Frame::Data {
        stream: Stream::Stdout,
        bytes: &largest,
    };
    let bytes = frame.to_bytes(1).unwrap();
    assert_eq!(
        &bytes[..HEADER_LEN],
        data_header(Stream::Stdout, 1, MAX_DATA_LEN).unwrap()
    );
    let frames = decode_in_pieces(&bytes, &[]).unwrap();
    assert_eq!(frames, vec![(1, into_owned(frame))]);

    let too_large = vec![7; MAX_DATA_LEN + 1];
    let limit = Invalid::BodyTooLong {
        len: MAX_DATA_LEN + 1,
        max: MAX_DATA_LEN,
    };
    assert_eq!(
        Frame::Data {
            stream: Stream::Stdout,
            bytes: &too_large
        }
        .to_bytes(1),
        Err(limit.clone())
    );
    assert_eq!(data_header(Stream::Stdout, 1, MAX_DATA_LEN + 1), Err(limit));

    assert_eq!(
        data_header(Stream::Stderr, 1, 0),
        Err(Invalid::Empty("the data"))
    );
    assert_eq!(
        refusal(&header(Kind::Stderr, 1, 0)),
        DecodeError::Invalid(Invalid::Empty("the data"))
    );
}

#[test]
fn bytes_behind_a_body_are_refused() {
    let mut bytes = Frame::Signal(2).to_bytes(1).unwrap();
    bytes.push(0);
    bytes[4] += 1;
    assert_eq!(refusal(&bytes), DecodeError::Malformed(Kind::Signal as u8));
}

/// Encoding refuses what exceeds a limit, and a hostile encoder's frame is refused by the decoder for the same reason.
fn check_refused(frame: Frame<'_>, expected: Invalid) {
    assert_eq!(frame.to_bytes(1), Err(expected.clone()));
    let (kind, body) = match &frame {
        Frame::Hello(hello) => (Kind::Hello, postcard::to_allocvec(hello)),
        Frame::Error(report) => (Kind::Error, postcard::to_allocvec(report)),
        Frame::ExecStart(start) => (Kind::ExecStart, postcard::to_allocvec(start)),
        Frame::Signal(number) => (Kind::Signal, postcard::to_allocvec(number)),
        Frame::Exit(status) => (Kind::Exit, postcard::to_allocvec(status)),
        Frame::Credit { stream, bytes } => (Kind::Credit, postcard::to_allocvec(&(stream, bytes))),
        other => panic!("no check for {other:?}"),
    };
    let body = body.unwrap();
    let mut bytes = header(kind, 1, body.len()).to_vec();
    bytes.extend_from_slice(&body);
    assert_eq!(refusal(&bytes), DecodeError::Invalid(expected));
}

fn check_accepted(frame: Frame<'_>) {
    let bytes = frame.to_bytes(1).unwrap();
    assert_eq!(
        decode_in_pieces(&bytes, &[]),
        Ok(vec![(1, into_owned(frame))])
    );
}

#[test]
fn the_limits_of_a_command() {
    let start = |count| command(vec![b"x".to_vec(); count]);
    check_accepted(Frame::ExecStart(start(MAX_ARGUMENTS)));
    check_refused(
        Frame::ExecStart(start(MAX_ARGUMENTS + 1)),
        Invalid::TooMany {
            what: "arguments",
            count: MAX_ARGUMENTS + 1,
            max: MAX_ARGUMENTS,
        },
    );
    check_refused(Frame::ExecStart(start(0)), Invalid::Empty("the command"));
    check_refused(
        Frame::ExecStart(command(vec![vec![]])),
        Invalid::Empty("the command"),
    );
    check_refused(
        Frame::ExecStart(command(vec![b"a\0b".to_vec()])),
        Invalid::ZeroByte("an argument"),
    );

    let with_environment = |environment: Vec<(Vec<u8>, Vec<u8>)>| {
        Frame::ExecStart(ExecStart {
            environment,
            ..command(vec![b"x".to_vec()])
        })
    };
    let variable = || (b"A".to_vec(), b"=1".to_vec());
    check_accepted(with_environment(vec![variable(); MAX_ENVIRONMENT]));
    check_refused(
        with_environment(vec![variable(); MAX_ENVIRONMENT + 1]),
        Invalid::TooMany {
            what: "environment variables",
            count: MAX_ENVIRONMENT + 1,
            max: MAX_ENVIRONMENT,
        },
    );
    check_refused(
        with_environment(vec![(b"A=B".to_vec(), vec![])]),
        Invalid::EqualsSign,
    );
    check_refused(
        with_environment(vec![(vec![], vec![])]),
        Invalid::Empty("the name of an environment variable"),
    );
    check_refused(
        with_environment(vec![(b"A".to_vec(), b"\0".to_vec())]),
        Invalid::ZeroByte("the value of an environment variable"),
    );

    let with_directory = |directory: &[u8]| {
        Frame::ExecStart(ExecStart {
            directory: Some(directory.to_vec()),
            ..command(vec![b"x".to_vec()])
        })
    };
    check_accepted(with_directory(&[b'/'; MAX_DIRECTORY_LEN]));
    check_refused(
        with_directory(&[b'/'; MAX_DIRECTORY_LEN + 1]),
        Invalid::TextTooLong {
            what: "the working directory",
            len: MAX_DIRECTORY_LEN + 1,
            max: MAX_DIRECTORY_LEN,
        },
    );
    check_refused(with_directory(b""), Invalid::Empty("the working directory"));

    let with_terminal = |kind: String| {
        let terminal = Some(Terminal {
            rows: 24,
            columns: 80,
            kind,
        });
        Frame::ExecStart(ExecStart {
            terminal,
            ..command(vec![b"x".to_vec()])
        })
    };
    check_accepted(with_terminal("x".repeat(MAX_TERMINAL_TYPE_LEN)));
    check_refused(
        with_terminal("x".repeat(MAX_TERMINAL_TYPE_LEN + 1)),
        Invalid::TextTooLong {
            what: "the terminal type",
            len: MAX_TERMINAL_TYPE_LEN + 1,
            max: MAX_TERMINAL_TYPE_LEN,
        },
    );
}

#[test]
fn the_longest_command_goes_through_whole() {
    let overhead = Frame::ExecStart(command(vec![b"echo".to_vec(), vec![b'x'; 200_000]]))
        .to_bytes(1)
        .unwrap()
        .len()
        - HEADER_LEN
        - 200_000;
    let argument = vec![b'x'; MAX_EXEC_START_LEN - overhead];
    let longest = Frame::ExecStart(command(vec![b"echo".to_vec(), argument.clone()]));
    let bytes = longest.to_bytes(1).unwrap();
    assert_eq!(bytes.len(), HEADER_LEN + MAX_EXEC_START_LEN);
    // In small pieces, behind another frame, so that the buffer has to move and to grow.
    let mut stream = Frame::Signal(1).to_bytes(1).unwrap();
    stream.extend_from_slice(&bytes);
    assert_eq!(
        decode_in_pieces(&stream, &[9, 5, 70_000]),
        Ok(vec![(1, Frame::Signal(1)), (1, longest)])
    );

    let mut longer = argument;
    longer.push(b'x');
    let refused = Frame::ExecStart(command(vec![b"echo".to_vec(), longer]));
    let mut out = b"before".to_vec();
    assert_eq!(
        refused.encode(1, &mut out),
        Err(Invalid::BodyTooLong {
            len: MAX_EXEC_START_LEN + 1,
            max: MAX_EXEC_START_LEN
        })
    );
    assert_eq!(out, b"before");
}

#[test]
fn the_limits_of_a_hello() {
    let hello = |change: fn(&mut Hello)| {
        let mut hello = Hello::new("ringdown 0.1.0");
        change(&mut hello);
        Frame::Hello(hello)
    };
    let too_long = |what, len: usize| Invalid::TextTooLong {
        what,
        len,
        max: len - 1,
    };
    check_accepted(hello(|hello| hello.software = "x".repeat(MAX_NAME_LEN)));
    check_refused(
        hello(|hello| hello.software = "x".repeat(MAX_NAME_LEN + 1)),
        too_long("the name of the software", MAX_NAME_LEN + 1),
    );
    check_accepted(hello(|hello| hello.boot_id = "x".repeat(MAX_NAME_LEN)));
    check_refused(
        hello(|hello| hello.boot_id = "x".repeat(MAX_NAME_LEN + 1)),
        too_long("the boot identifier", MAX_NAME_LEN + 1),
    );
    check_accepted(hello(|hello| hello.hostname = "x".repeat(MAX_HOSTNAME_LEN)));
    check_refused(
        hello(|hello| hello.hostname = "x".repeat(MAX_HOSTNAME_LEN + 1)),
        too_long("the host name", MAX_HOSTNAME_LEN + 1),
    );
    check_accepted(hello(|hello| {
        hello.capabilities = vec!["x".repeat(MAX_NAME_LEN); MAX_CAPABILITIES]
    }));
    check_refused(
        hello(|hello| hello.capabilities = vec!["x".into(); MAX_CAPABILITIES + 1]),
        Invalid::TooMany {
            what: "capabilities",
            count: MAX_CAPABILITIES + 1,
            max: MAX_CAPABILITIES,
        },
    );
    check_refused(
        hello(|hello| hello.capabilities = vec!["x".repeat(MAX_NAME_LEN + 1)]),
        too_long("a capability", MAX_NAME_LEN + 1),
    );
    let versions = |value| Invalid::OutOfRange {
        what: "the lowest protocol version",
        value,
        expected: "1 up to the highest protocol version",
    };
    check_refused(hello(|hello| hello.protocol_min = 0), versions(0));
    check_refused(
        hello(|hello| hello.protocol_min = hello.protocol_max + 1),
        versions(2),
    );
}

#[test]
fn the_largest_hello_fits_its_frame() {
    let hello = Hello {
        protocol_min: u16::MAX,
        protocol_max: u16::MAX,
        software: "x".repeat(MAX_NAME_LEN),
        boot_id: "x".repeat(MAX_NAME_LEN),
        hostname: "x".repeat(MAX_HOSTNAME_LEN),
        capabilities: vec!["x".repeat(MAX_NAME_LEN); MAX_CAPABILITIES],
        generation: "g".repeat(MAX_NAME_LEN),
        unix_ns: u64::MAX,
    };
    check_accepted(Frame::Hello(hello));
}

#[test]
fn the_limits_of_the_small_frames() {
    for number in [1, MAX_SIGNAL] {
        check_accepted(Frame::Signal(number));
    }
    for number in [0, MAX_SIGNAL + 1, 255] {
        check_refused(
            Frame::Signal(number),
            Invalid::OutOfRange {
                what: "the signal",
                value: number.into(),
                expected: "1 to 31",
            },
        );
    }
    for number in [1, 64] {
        check_accepted(Frame::Exit(ExitStatus::Signal(number)));
    }
    for number in [0, 65] {
        check_refused(
            Frame::Exit(ExitStatus::Signal(number)),
            Invalid::OutOfRange {
                what: "the signal",
                value: number.into(),
                expected: "1 to 64",
            },
        );
    }
    check_accepted(Frame::Credit {
        stream: Stream::Stdin,
        bytes: u32::MAX,
    });
    check_refused(
        Frame::Credit {
            stream: Stream::Stdin,
            bytes: 0,
        },
        Invalid::Empty("the credit"),
    );
}

#[test]
fn messages_of_errors_are_cut_at_a_character() {
    let exact = ErrorReport::new(ErrorKind::Internal, "x".repeat(MAX_ERROR_MESSAGE_LEN));
    assert_eq!(exact.message.len(), MAX_ERROR_MESSAGE_LEN);
    let cut = ErrorReport::new(
        ErrorKind::Internal,
        format!("x{}", "é".repeat(MAX_ERROR_MESSAGE_LEN)),
    );
    assert_eq!(cut.message.len(), MAX_ERROR_MESSAGE_LEN - 1);
    check_accepted(Frame::Error(cut));
    let hostile = ErrorReport {
        kind: ErrorKind::Busy,
        message: "x".repeat(MAX_ERROR_MESSAGE_LEN + 1),
    };
    check_refused(
        Frame::Error(hostile),
        Invalid::TextTooLong {
            what: "the message of an error",
            len: MAX_ERROR_MESSAGE_LEN + 1,
            max: MAX_ERROR_MESSAGE_LEN,
        },
    );
}

#[test]
fn versions_are_negotiated() {
    let range = |protocol_min, protocol_max| Hello {
        protocol_min,
        protocol_max,
        ..Hello::new("")
    };
    assert_eq!(negotiate(&range(1, 3), &range(2, 5)), Some(3));
    assert_eq!(negotiate(&range(2, 5), &range(1, 3)), Some(3));
    assert_eq!(negotiate(&range(1, 1), &range(1, 1)), Some(1));
    assert_eq!(negotiate(&range(1, 2), &range(3, 4)), None);
    assert_eq!(negotiate(&range(3, 4), &range(1, 2)), None);
}

#[test]
fn credit_has_a_ceiling() {
    let mut credit = SendCredit::default();
    credit.grant(MAX_CREDIT).unwrap();
    assert_eq!(credit.grant(1), Err(CreditError::Excessive));
    credit.spend(1);
    credit.grant(1).unwrap();
    assert_eq!(credit.grant(u32::MAX), Err(CreditError::Excessive));
}

#[test]
fn more_than_the_credit_is_an_error() {
    let mut window = ReceiveWindow::new(100);
    window.received(100).unwrap();
    assert_eq!(window.received(1), Err(CreditError::Exceeded { excess: 1 }));
    window.consumed(24);
    assert_eq!(
        window.grant_due(),
        None,
        "less than a quarter is not worth a frame"
    );
    window.consumed(1);
    assert_eq!(window.grant_due(), Some(25));
    assert_eq!(window.grant_due(), None);
    window.received(25).unwrap();
    assert_eq!(window.received(3), Err(CreditError::Exceeded { excess: 3 }));
}
