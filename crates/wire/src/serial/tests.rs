use proptest::prelude::*;

use super::*;

/// A frame of this kind with this payload.
fn frame(kind: Kind, sequence: u64, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        kind,
        channel: Channel {
            opened_by_sender: true,
            number: 7,
        },
        payload_len: payload.len(),
        session: 0x1234_5678,
        sequence,
        acknowledged: 5,
        payload_crc: checksum(payload),
    };
    let mut bytes = header.to_bytes().to_vec();
    bytes.extend_from_slice(payload);
    bytes
}

/// The frames that come out, by their numbers, when the stream arrives in pieces of these lengths.
fn decode(stream: &[u8], cuts: &[usize]) -> (Vec<(u64, Vec<u8>)>, Decoder) {
    let mut decoder = Decoder::new();
    let mut frames = Vec::new();
    let mut rest = stream;
    for cut in cuts.iter().cycle() {
        while let Some(header) = decoder.next_frame() {
            frames.push((header.sequence, decoder.payload().to_vec()));
        }
        if rest.is_empty() {
            return (frames, decoder);
        }
        let space = decoder.space();
        assert!(!space.is_empty() && space.len() <= MAX_BUFFER_LEN);
        let len = (*cut).min(space.len()).min(rest.len());
        space[..len].copy_from_slice(&rest[..len]);
        decoder.advance(len);
        rest = &rest[len..];
    }
    unreachable!("there is at least one cut")
}

#[test]
fn a_header_looks_as_the_document_says() {
    let bytes = frame(Kind::Data, 0x0102_0304_0506_0708, b"abc");
    assert_eq!(bytes[..4], [0xf5, b'R', b'D', b'L']);
    assert_eq!(bytes[4..8], [19, 1, 3, 0]);
    assert_eq!(bytes[8..12], [0x78, 0x56, 0x34, 0x12]);
    assert_eq!(bytes[12..16], [7, 0, 0, 0]);
    assert_eq!(bytes[16..24], [8, 7, 6, 5, 4, 3, 2, 1]);
    assert_eq!(bytes[24..32], [5, 0, 0, 0, 0, 0, 0, 0]);
    // CRC32C of "123456789" is E3069283, by the catalogues.
    assert_eq!(checksum(b"123456789"), 0xe306_9283);
    assert_eq!(bytes[32..36], checksum(b"abc").to_le_bytes());
    assert_eq!(bytes[36..40], checksum(&bytes[..36]).to_le_bytes());
    let header = Header::from_bytes(bytes.first_chunk().unwrap()).unwrap();
    assert_eq!((header.kind, header.payload_len), (Kind::Data, 3));
}

#[test]
fn a_header_with_one_bit_wrong_is_none() {
    let bytes = frame(Kind::Data, 9, b"");
    for bit in 0..HEADER_LEN * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(Header::from_bytes(damaged.first_chunk().unwrap()).is_none());
    }
}

#[test]
fn a_header_that_says_what_it_must_not_is_none_though_its_checksum_is_right() {
    let with = |at: usize, value: u8| {
        let mut bytes = frame(Kind::Data, 9, b"");
        bytes[at] = value;
        let crc = checksum(&bytes[..36]);
        bytes[36..].copy_from_slice(&crc.to_le_bytes());
        Header::from_bytes(bytes.first_chunk().unwrap())
    };
    for kind in 0..=255 {
        assert_eq!(with(4, kind).is_some(), Kind::from_wire(kind).is_some());
        assert!(Kind::from_wire(kind).is_none_or(|known| known as u8 == kind));
    }
    assert!(with(5, 0).is_some() && with(5, 2).is_none());
    // The payload's length, at the limit and above it.
    assert_eq!(MAX_PAYLOAD_LEN, 0x7fd8);
    let long = |len: u16| {
        let mut bytes = frame(Kind::Data, 9, b"");
        bytes[6..8].copy_from_slice(&len.to_le_bytes());
        let crc = checksum(&bytes[..36]);
        bytes[36..].copy_from_slice(&crc.to_le_bytes());
        Header::from_bytes(bytes.first_chunk().unwrap())
    };
    assert!(long(0x7fd7).is_some() && long(0x7fd8).is_some());
    assert!(long(0x7fd9).is_none() && long(0xffff).is_none());
}

#[test]
fn frames_are_found_between_garbage_cut_frames_and_text() {
    let whole = |number| frame(Kind::Data, number, &[number as u8; 500]);
    let mut stream = b"login: \xf5\xf5RD\xf5RDL".to_vec();
    stream.extend(whole(1));
    stream.extend(&whole(2)[..300]);
    stream.extend(whole(3));
    stream.extend(&whole(4)[..20]);
    stream.extend(whole(5));
    stream.extend(&whole(6)[400..]);
    let mut damaged = whole(7);
    damaged[200] ^= 1;
    stream.extend(damaged);
    stream.extend(whole(8));
    for cuts in [&[usize::MAX][..], &[1], &[39, 41], &[4096]] {
        let (frames, decoder) = decode(&stream, cuts);
        let numbers: Vec<_> = frames.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, [1, 3, 5, 8]);
        let given: usize = frames
            .iter()
            .map(|(_, payload)| payload.len() + HEADER_LEN)
            .sum();
        let discarded = decoder.discarded();
        assert_eq!(discarded.bytes as usize, stream.len() - given);
        assert_eq!(discarded.frames, 2, "the cut one and the damaged one");
        assert!(!decoder.is_inside_frame());
    }
}

#[test]
fn a_cut_frame_is_waited_for_until_another_is_whole_behind_it() {
    let mut stream = frame(Kind::Data, 1, &[1; 20_000])[..5000].to_vec();
    let (frames, mut decoder) = decode(&stream, &[4096]);
    assert!(frames.is_empty() && decoder.is_inside_frame());
    assert!(!decoder.give_up_if_overtaken(), "it may only be slow");
    // Half of the next frame is no proof either.
    let probe = frame(Kind::Probe, 2, b"");
    stream.extend(&probe[..30]);
    let (_, mut decoder) = decode(&stream, &[4096]);
    assert!(!decoder.give_up_if_overtaken());
    stream.extend(&probe[30..]);
    let (_, mut decoder) = decode(&stream, &[4096]);
    assert!(decoder.give_up_if_overtaken());
    let header = decoder.next_frame().unwrap();
    assert_eq!((header.kind, header.sequence), (Kind::Probe, 2));
}

#[test]
fn a_stream_made_to_be_searched_again_and_again_is_skipped() {
    // Headers that all claim a long payload, which is the following headers.
    let mut header = frame(Kind::Data, 1, &[0; MAX_PAYLOAD_LEN]);
    header.truncate(HEADER_LEN);
    let stream = header.repeat(8 * MAX_FRAME_LEN / HEADER_LEN);
    let (frames, decoder) = decode(&stream, &[4096]);
    assert!(frames.is_empty());
    // Each payload that was searched in vain is one more of these; all of them would be thousands.
    assert!(decoder.discarded().frames < 64, "{:?}", decoder.discarded());
}

#[test]
fn a_stream_that_begins_anew_forgets_what_was_not_whole() {
    let bytes = frame(Kind::End, 1, b"");
    let (_, mut decoder) = decode(&bytes[..30], &[100]);
    decoder.restart();
    assert!(!decoder.is_inside_frame());
    decoder.space()[..bytes.len()].copy_from_slice(&bytes);
    decoder.advance(bytes.len());
    assert_eq!(decoder.next_frame().unwrap().sequence, 1);
}

fn parse(kind: Kind, payload: &[u8]) -> Result<Message, MessageError> {
    let bytes = frame(kind, 0, payload);
    let header = Header::from_bytes(bytes.first_chunk().unwrap()).unwrap();
    Message::parse(&header, payload)
}

#[test]
fn messages_arrive_as_they_were() {
    let messages = [
        Message::Hello(Hello {
            version: 1,
            wants_answer: true,
            connection: 3,
            epoch: u64::MAX,
            peer_epoch: 0,
            window: 65_536,
        }),
        Message::Acknowledge,
        Message::Probe,
        Message::Answer,
        Message::Resend,
        Message::Open { port: u32::MAX },
        Message::Opened,
        Message::Refused(Refusal::new(RefusalKind::Forbidden, "no")),
        Message::Refused(Refusal::new(RefusalKind::Busy, "x".repeat(MAX_REASON_LEN))),
        Message::End,
        Message::Stop,
        Message::Reset(ResetReason::Aborted),
        Message::Reset(ResetReason::Stopped),
        Message::Credit { bytes: 1 },
    ];
    for message in messages {
        let mut payload = Vec::new();
        message.write_payload(&mut payload);
        assert_eq!(parse(message.kind(), &payload).as_ref(), Ok(&message));
        assert_eq!(message.kind().is_numbered(), message.kind() as u8 >= 16);
    }
    assert_eq!(parse(Kind::Data, b"x"), Ok(Message::Data));
}

#[test]
fn payloads_that_make_no_sense_are_errors() {
    for (kind, payload) in [
        (Kind::Hello, &[0; 31][..]),
        // An epoch of 0 is no peer.
        (Kind::Hello, &[0; 32]),
        (Kind::Probe, b"x"),
        (Kind::Open, b"abc"),
        (Kind::Open, b"abcde"),
        (Kind::Credit, &[0; 4]),
        (Kind::Data, b""),
        (Kind::End, b"x"),
        (Kind::Reset, b""),
        (Kind::Reset, &[3]),
        (Kind::Refused, b""),
        (Kind::Refused, &[9, b'x']),
        (Kind::Refused, &[1, 0xff]),
        (Kind::Refused, &[1; MAX_REASON_LEN + 2]),
    ] {
        let error = parse(kind, payload).unwrap_err();
        assert_eq!((error.kind, error.len), (kind, payload.len()));
    }
}

#[test]
fn a_later_version_may_say_more_in_its_hello() {
    let mut payload = Vec::new();
    let hello = Hello {
        version: 2,
        wants_answer: false,
        connection: 1,
        epoch: 1,
        peer_epoch: 2,
        window: 3,
    };
    Message::Hello(hello).write_payload(&mut payload);
    payload.extend(b"and more");
    assert_eq!(parse(Kind::Hello, &payload), Ok(Message::Hello(hello)));
}

#[test]
fn a_refusal_is_one_line_of_bounded_length() {
    let refusal = Refusal::new(RefusalKind::Failed, "a\nb\x1b[2J");
    assert_eq!(refusal.message, "a b [2J");
    let refusal = Refusal::new(RefusalKind::Failed, "é".repeat(200));
    assert_eq!(refusal.message.len(), MAX_REASON_LEN);
    let refusal = Refusal::new(RefusalKind::Failed, format!("x{}", "é".repeat(200)));
    assert_eq!(refusal.message.len(), MAX_REASON_LEN - 1);
}

#[test]
fn sessions_differ_by_both_epochs_and_by_direction() {
    assert_ne!(session(1, 2), session(2, 1));
    assert_ne!(session(1, 2), session(1, 3));
    assert_ne!(session(1, 2), session(3, 2));
}

proptest! {
    #[test]
    fn any_bytes_between_frames_are_skipped_and_pieces_make_no_difference(
        garbage in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 1..5),
        lens in proptest::collection::vec(0_usize..3000, 5),
        cut in 1_usize..5000,
    ) {
        let mut stream = Vec::new();
        let mut expected = Vec::new();
        for (number, garbage) in garbage.iter().enumerate() {
            stream.extend(garbage);
            let payload = vec![number as u8; lens[number]];
            stream.extend(frame(Kind::Data, number as u64, &payload));
            expected.push((number as u64, payload));
        }
        prop_assert_eq!(decode(&stream, &[cut]).0, expected);
    }
}
