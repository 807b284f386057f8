//! Byte formats.

use wire::agent::credit::{CreditError, MAX_CREDIT, ReceiveWindow, SendCredit};
use wire::agent::{
    DecodeError, Decoder, ErrorKind, ErrorReport, ExecStart, ExitStatus, Frame, HEADER_LEN, Hello,
    MAX_DATA_LEN, MAX_EXEC_START_LEN, SECRET_LEN, Secret, Stream, Terminal, bench, forward, job,
};
use wire::connect::{MAX_REQUEST_LEN, Request, RequestError, refused};
use wire::vsock::{self, Header, Operation, SocketType};

use crate::Dice;

/// Any 44 bytes are a header, and give the same 44 bytes; numbers of operations and types are what they say.
pub fn header(input: &[u8]) {
    let mut bytes = [0; vsock::HEADER_LEN];
    let len = input.len().min(bytes.len());
    bytes[..len].copy_from_slice(&input[..len]);
    let header = Header::from_bytes(&bytes);
    assert_eq!(header.to_bytes(), bytes);
    // The layout of virtio 1.2, section 5.10.6, written once more.
    let at = |offset: usize, len: usize| {
        let field = bytes[offset..offset + len].iter().rev();
        field.fold(0_u64, |value, byte| value << 8 | u64::from(*byte))
    };
    let fields = [
        header.src_cid,
        header.dst_cid,
        header.src_port.into(),
        header.dst_port.into(),
        header.len.into(),
        header.socket_type.into(),
        header.operation.into(),
        header.flags.into(),
        header.buf_alloc.into(),
        header.fwd_cnt.into(),
    ];
    let layout = [
        (0, 8),
        (8, 8),
        (16, 4),
        (20, 4),
        (24, 4),
        (28, 2),
        (30, 2),
        (32, 4),
        (36, 4),
        (40, 4),
    ];
    for (field, (offset, len)) in fields.into_iter().zip(layout) {
        assert_eq!(field, at(offset, len));
    }
    let operation = Operation::from_wire(header.operation);
    assert_eq!(operation.is_some(), (1..=7).contains(&header.operation));
    assert!(operation.is_none_or(|operation| operation as u16 == header.operation));
    let socket_type = SocketType::from_wire(header.socket_type);
    assert_eq!(socket_type.is_some(), (1..=2).contains(&header.socket_type));
    assert!(socket_type.is_none_or(|socket_type| socket_type as u16 == header.socket_type));
}

/// A request is read as a reader of one byte at a time would, however much of it there is.
pub fn connect(input: &[u8]) {
    let cuts = [input.len(), input.len() / 2, 7, 8, 9, 31, 32, 33];
    for cut in cuts.into_iter().filter(|cut| *cut <= input.len()) {
        let bytes = &input[..cut];
        assert_eq!(Request::parse(bytes), request_by_bytes(bytes), "{bytes:?}");
    }
    if let Request::Invalid(error) = Request::parse(input) {
        let line = refused(error);
        assert!(line.starts_with("ERR ") && line.ends_with('\n'));
        assert_eq!(
            line.matches('\n').count(),
            1,
            "a refusal is one line: {line:?}"
        );
    }
}

/// The grammar of a request, written once more.
fn request_by_bytes(bytes: &[u8]) -> Request {
    let mut digits = 0_usize;
    let mut value = 0_u64;
    // The port may have space before and behind, but not inside.
    let mut behind = false;
    let mut valid = true;
    for (index, byte) in bytes.iter().enumerate() {
        if let Some(expected) = b"CONNECT ".get(index) {
            if byte != expected {
                return Request::Invalid(RequestError::Verb);
            }
            continue;
        }
        if index >= MAX_REQUEST_LEN {
            return Request::Invalid(RequestError::TooLong);
        }
        match byte {
            b'\n' => {
                let port = u32::try_from(value).ok().filter(|port| *port != u32::MAX);
                return match port.filter(|_| valid && digits > 0) {
                    Some(port) => Request::Connect {
                        port,
                        len: index + 1,
                    },
                    None => Request::Invalid(RequestError::Port),
                };
            }
            b'0'..=b'9' => {
                valid &= !behind;
                digits += 1;
                value = value
                    .saturating_mul(10)
                    .saturating_add(u64::from(byte - b'0'));
            }
            b' ' | b'\t' | b'\r' | 0x0c => behind |= digits > 0,
            _ => valid = false,
        }
    }
    match bytes.len() < MAX_REQUEST_LEN {
        true => Request::Partial,
        false => Request::Invalid(RequestError::TooLong),
    }
}

/// Bytes give the same frames however they are cut; each frame can be sent on and is the same then; an error stays; and the
/// buffer never grows beyond its limit.
pub fn decoder(input: &[u8]) {
    let mut dice = Dice::new(input);
    let cuts: Vec<usize> = (0..8).map(|_| 1 + dice.below(300)).collect();
    let stream = dice.rest();
    let whole = decode(stream, &[usize::MAX]);
    assert_eq!(decode(stream, &cuts), whole);
    assert_eq!(decode(stream, &[1]), whole);
}

/// What came out: each frame's bytes when it is sent on, and how it ended.
type Decoded = (Vec<(u16, Vec<u8>)>, Option<DecodeError>, bool);

fn decode(stream: &[u8], cuts: &[usize]) -> Decoded {
    // The first buffer has room for two frames of data; only a longer frame makes it grow.
    let limit = (2 * (HEADER_LEN + MAX_DATA_LEN)).max(HEADER_LEN + MAX_EXEC_START_LEN);
    let mut decoder = Decoder::new();
    let mut frames = Vec::new();
    let mut rest = stream;
    let mut cuts = cuts.iter().cycle();
    loop {
        match decoder.next_frame() {
            Ok(Some((channel, frame))) => frames.push((channel, sent_on(channel, &frame))),
            Ok(None) => {
                let cut = *cuts.next().expect("a cycle of at least one cut");
                let space = decoder.space();
                assert!(!space.is_empty() && space.len() <= limit);
                let len = cut.min(space.len()).min(rest.len());
                if len == 0 {
                    return (frames, None, decoder.is_inside_frame());
                }
                space[..len].copy_from_slice(&rest[..len]);
                decoder.advance(len);
                rest = &rest[len..];
            }
            Err(error) => {
                assert_eq!(decoder.next_frame(), Err(error.clone()), "an error stays");
                assert!(!error.to_string().is_empty());
                // How much of the rest was received by then depends on the cuts.
                return (frames, Some(error), false);
            }
        }
    }
}

/// A frame that was understood can be sent on, and is understood as the same frame.
fn sent_on(channel: u16, frame: &Frame<'_>) -> Vec<u8> {
    let bytes = frame
        .to_bytes(channel)
        .expect("what was accepted may be sent");
    let mut decoder = Decoder::new();
    let mut rest = &bytes[..];
    loop {
        let space = decoder.space();
        let len = space.len().min(rest.len());
        space[..len].copy_from_slice(&rest[..len]);
        decoder.advance(len);
        rest = &rest[len..];
        if let Some(again) = decoder.next_frame().expect("what was sent is understood") {
            assert_eq!(again, (channel, frame.clone()));
            break;
        }
        assert!(!rest.is_empty(), "a whole frame was received");
    }
    assert!(!decoder.is_inside_frame());
    bytes
}

/// A frame of any content is either refused, with nothing written, or arrives as it was.
pub fn frames(input: &[u8]) {
    let mut dice = Dice::new(input);
    let payload = [b'x'; MAX_DATA_LEN + 1];
    let mut out = b"before".to_vec();
    for _ in 0..4 {
        let channel = dice.word();
        let frame = any_frame(&mut dice, &payload);
        let before = out.len();
        match frame.encode(channel, &mut out) {
            Ok(()) => {
                let written = out.split_off(before);
                assert_eq!(sent_on(channel, &frame), written);
            }
            Err(error) => {
                assert_eq!(out.len(), before, "a refused frame leaves nothing behind");
                assert!(!error.to_string().is_empty());
            }
        }
    }
    assert_eq!(out, b"before");
}

fn any_frame<'a>(dice: &mut Dice<'_>, payload: &'a [u8]) -> Frame<'a> {
    let stream = dice.pick(&[Stream::Stdin, Stream::Stdout, Stream::Stderr]);
    match dice.below(17) {
        0 => Frame::Hello(Hello {
            protocol_min: dice.pick(&[0, 1, 1, 1, 2, u16::MAX]),
            protocol_max: dice.pick(&[0, 1, 1, 1, 2, u16::MAX]),
            software: any_text(dice),
            boot_id: any_text(dice),
            hostname: any_text(dice),
            capabilities: (0..dice.pick(&[0, 1, 31, 32, 33]))
                .map(|_| any_text(dice))
                .collect(),
            generation: any_text(dice),
            unix_ns: dice.quad(),
        }),
        1 => Frame::Error(ErrorReport::new(ErrorKind::Busy, any_text(dice))),
        2 => Frame::ExecStart(ExecStart {
            arguments: any_list(dice),
            environment: any_list(dice)
                .into_iter()
                .map(|name| (name, any_bytes(dice)))
                .collect(),
            directory: dice.one_in(2).then(|| any_bytes(dice)),
            terminal: dice.one_in(2).then(|| Terminal {
                rows: dice.word(),
                columns: dice.word(),
                kind: any_text(dice),
            }),
        }),
        3 => Frame::Started { pid: dice.double() },
        4 => Frame::Data {
            stream,
            bytes: &payload
                [..dice.pick(&[0, 1, 4096, MAX_DATA_LEN - 1, MAX_DATA_LEN, MAX_DATA_LEN + 1])],
        },
        5 => Frame::EndOfStream(stream),
        6 => Frame::StreamClosed(stream),
        7 => Frame::Credit {
            stream,
            bytes: dice.edgy(),
        },
        8 => Frame::WindowSize {
            rows: dice.word(),
            columns: dice.word(),
        },
        9 => Frame::Signal(dice.byte()),
        10 => Frame::Bench(any_message(dice)),
        11 => Frame::Ask(any_ask(dice)),
        12 => Frame::Answer(any_answer(dice)),
        13 => Frame::Forward(any_forwarding(dice)),
        14 => crate::transfer::frame(dice),
        15 => Frame::Secret(Secret::new([dice.byte(); SECRET_LEN])),
        _ => Frame::Exit(match dice.one_in(2) {
            true => ExitStatus::Code(dice.byte()),
            false => ExitStatus::Signal(dice.byte()),
        }),
    }
}

fn any_ask(dice: &mut Dice<'_>) -> job::Ask {
    match dice.below(7) {
        0 => job::Ask::Stats {
            interval_ms: dice.edgy(),
            count: dice.edgy(),
        },
        1 => job::Ask::Logs(job::Logs {
            source: match dice.one_in(2) {
                true => job::LogSource::Journal(job::JournalLog {
                    units: (0..dice.pick(&[0, 1, 16, 17]))
                        .map(|_| any_text(dice))
                        .collect(),
                    since: any_text(dice),
                    cursor: any_text(dice),
                }),
                false => job::LogSource::Files(
                    (0..dice.pick(&[0, 1, 16, 17]))
                        .map(|_| job::FileLog {
                            path: any_bytes(dice),
                            cursor: dice.one_in(2).then(|| any_place(dice)),
                        })
                        .collect(),
                ),
            },
            lines: dice.one_in(2).then(|| dice.edgy()),
            follow: dice.one_in(2),
        }),
        2 => job::Ask::Freeze {
            timeout_ms: dice.edgy(),
        },
        3 => job::Ask::Time {
            step_ns: dice.one_in(2).then(|| dice.quad() as i64),
        },
        4 => job::Ask::ClipboardSet { len: dice.edgy() },
        5 => job::Ask::Power {
            action: dice.pick(&[job::Power::Shutdown, job::Power::Reboot]),
            force_after_ms: dice.one_in(2).then(|| dice.edgy()),
        },
        _ => job::Ask::Lock,
    }
}

fn any_answer(dice: &mut Dice<'_>) -> job::Answer {
    match dice.below(6) {
        0 => job::Answer::Log(
            (0..dice.pick(&[0, 1, 2, 64]))
                .map(|_| job::LogEntry {
                    file: dice.word(),
                    place: any_place(dice),
                    cursor: any_text(dice),
                    priority: dice.byte(),
                    identifier: any_text(dice),
                    text: any_bytes(dice),
                    ..job::LogEntry::default()
                })
                .collect(),
        ),
        1 => job::Answer::Note(any_text(dice)),
        2 => job::Answer::FileSystems(any_list(dice)),
        3 => job::Answer::Clipboard { len: dice.edgy() },
        4 => job::Answer::Stats(Box::new(job::Stats {
            disks: (0..dice.pick(&[0, 1, 64, 65]))
                .map(|_| job::Disk {
                    name: any_text(dice),
                    ..job::Disk::default()
                })
                .collect(),
            ..job::Stats::default()
        })),
        _ => job::Answer::Time(job::Clock {
            unix_ns: dice.quad() as i64,
            kept_by: any_text(dice),
        }),
    }
}

fn any_place(dice: &mut Dice<'_>) -> job::FileCursor {
    job::FileCursor {
        device: dice.quad(),
        inode: dice.quad(),
        offset: dice.quad(),
        before: dice.quad(),
    }
}

fn any_message(dice: &mut Dice<'_>) -> bench::Message {
    let nonce = [dice.byte(); 16];
    let (cid, port) = (dice.edgy(), dice.edgy());
    match dice.below(5) {
        0 => bench::Message::Start(bench::Start {
            role: dice.pick(&[
                bench::Role::Source,
                bench::Role::Sink,
                bench::Role::Ping,
                bench::Role::Echo,
            ]),
            peer: dice.pick(&[
                bench::Peer::Host,
                bench::Peer::Listen { cid, port, nonce },
                bench::Peer::Dial { cid, port, nonce },
            ]),
            message_len: dice.edgy(),
            seed: dice.one_in(2).then(|| dice.quad()),
            limit_ms: dice.edgy(),
        }),
        1 => bench::Message::Listening { port },
        2 => bench::Message::Ready,
        3 => bench::Message::Go,
        _ => bench::Message::End { bytes: dice.quad() },
    }
}

fn any_forwarding(dice: &mut Dice<'_>) -> forward::Message {
    let place = match dice.one_in(2) {
        true => forward::Place::Tcp {
            host: any_text(dice),
            port: dice.word(),
        },
        false => forward::Place::Unix {
            path: any_bytes(dice),
        },
    };
    let (key, number) = ([dice.byte(); 16], dice.edgy());
    match dice.below(7) {
        0 => forward::Message::Dial(place),
        1 => forward::Message::Listen(place),
        2 => forward::Message::Listening { place, key },
        3 => forward::Message::Caller { number },
        4 => forward::Message::Leave { number },
        5 => forward::Message::Take { key, number },
        _ => forward::Message::Connected,
    }
}

fn any_text(dice: &mut Dice<'_>) -> String {
    let len = dice.pick(&[0, 1, 5, 63, 64, 65, 255, 256, 1023, 1024, 1025]);
    let letter = dice.pick(&['a', 'é', '\0', '\u{10ffff}']);
    letter.to_string().repeat(len / letter.len_utf8())
}

fn any_bytes(dice: &mut Dice<'_>) -> Vec<u8> {
    let len = dice.pick(&[1, 2, 0, 100, 4094, 4095, 4096, 70_000]);
    vec![dice.pick(b"aB=\0"); len]
}

fn any_list(dice: &mut Dice<'_>) -> Vec<Vec<u8>> {
    let count = dice.pick(&[1, 0, 2, 1023, 1024, 1025, 4095, 4096, 4097]);
    let first = any_bytes(dice);
    let other = vec![dice.pick(b"aB=\0"); dice.below(3)];
    let others = (1..count).map(|_| other.clone());
    std::iter::once(first).chain(others).take(count).collect()
}

/// Credit against a ledger of 64 bits: an honest sender is never reported for exceeding it, and a dishonest one always is.
pub fn credit(input: &[u8]) {
    let mut dice = Dice::new(input);
    let size = dice.pick(&[1, 4, 1000, 65_536, MAX_CREDIT, MAX_CREDIT + 1, u32::MAX]);
    let mut window = ReceiveWindow::new(size);
    assert_eq!(window.size(), size.min(MAX_CREDIT));
    let mut sender = SendCredit::default();
    sender
        .grant(window.size())
        .expect("a window is within bounds");
    let size = u64::from(window.size());
    // Bytes on the receiver's side: in its buffer, and consumed but not granted again.
    let (mut buffered, mut owed) = (0_u64, 0_u64);
    while !dice.is_empty() {
        match dice.below(4) {
            0 => {
                let len = dice.below(sender.available().min(65_536) + 1);
                sender.spend(len);
                assert_eq!(window.received(len), Ok(()), "an honest sender");
                buffered += len as u64;
            }
            1 => {
                let len = dice.below(buffered as usize + 1);
                window.consumed(len);
                buffered -= len as u64;
                owed += len as u64;
            }
            2 => {
                if let Some(grant) = window.grant_due() {
                    assert!(u64::from(grant) <= owed && u64::from(grant) >= size / 4);
                    owed -= u64::from(grant);
                    sender.grant(grant).expect("never more than the window");
                } else {
                    assert!(
                        owed == 0 || owed < size / 4,
                        "{owed} of {size} are not announced"
                    );
                }
            }
            _ => {
                let too_much = sender.available() + 1 + dice.below(1000);
                let refusal = window.clone().received(too_much);
                assert!(matches!(refusal, Err(CreditError::Exceeded { excess }) if excess > 0));
                let most = MAX_CREDIT - sender.available() as u32;
                assert_eq!(sender.clone().grant(most), Ok(()));
                assert_eq!(sender.clone().grant(most + 1), Err(CreditError::Excessive));
            }
        }
        assert_eq!(sender.available() as u64 + buffered + owed, size);
    }
}
