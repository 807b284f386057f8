//! Each limit, at it and beyond it.

use super::*;

/// Encoding refuses what exceeds a limit, and a hostile encoder's frame is refused by the decoder for the same reason.
pub(super) fn check_refused(frame: Frame<'_>, expected: Invalid) {
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

pub(super) fn check_accepted(frame: Frame<'_>) {
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
