use proptest::prelude::*;

use super::credit::{CreditError, MAX_CREDIT, ReceiveWindow, SendCredit};
use super::*;

mod limits;

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

#[test]
fn messages_of_errors_are_cut_at_a_character() {
    let exact = ErrorReport::new(ErrorKind::Internal, "x".repeat(MAX_ERROR_MESSAGE_LEN));
    assert_eq!(exact.message.len(), MAX_ERROR_MESSAGE_LEN);
    let cut = ErrorReport::new(
        ErrorKind::Internal,
        format!("x{}", "é".repeat(MAX_ERROR_MESSAGE_LEN)),
    );
    assert_eq!(cut.message.len(), MAX_ERROR_MESSAGE_LEN - 1);
    limits::check_accepted(Frame::Error(cut));
    let hostile = ErrorReport {
        kind: ErrorKind::Busy,
        message: "x".repeat(MAX_ERROR_MESSAGE_LEN + 1),
    };
    limits::check_refused(
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
