use proptest::prelude::*;

use super::super::{DecodeError, Decoder, Frame, OPERATION_CHANNEL};
use super::*;

fn any_peer() -> impl Strategy<Value = Peer> {
    let guest = (3..u32::MAX, 1..u32::MAX, any::<[u8; 16]>());
    prop_oneof![
        Just(Peer::Host),
        guest
            .clone()
            .prop_map(|(cid, port, nonce)| Peer::Listen { cid, port, nonce }),
        guest.prop_map(|(cid, port, nonce)| Peer::Dial { cid, port, nonce }),
    ]
}

fn any_start() -> impl Strategy<Value = Start> {
    let roles = vec![Role::Source, Role::Sink, Role::Ping, Role::Echo];
    (
        prop::sample::select(roles),
        any_peer(),
        1..=MAX_MESSAGE_LEN,
        any::<Option<u64>>(),
        1..=MAX_DURATION_MS,
    )
        .prop_map(|(role, peer, message_len, seed, limit_ms)| Start {
            role,
            peer,
            message_len,
            seed,
            limit_ms,
        })
}

fn any_latency() -> impl Strategy<Value = Latency> {
    (1u64.., any::<[u64; 6]>()).prop_map(|(count, mut times)| {
        times.sort_unstable();
        let [min_ns, p1_ns, p50_ns, p99_ns, p999_ns, max_ns] = times;
        Latency {
            count,
            min_ns,
            p1_ns,
            mean_ns: p50_ns,
            p50_ns,
            p99_ns,
            p999_ns,
            max_ns,
        }
    })
}

fn any_outcome() -> impl Strategy<Value = Outcome> {
    (
        any::<u64>(),
        any::<u64>(),
        any::<Option<u64>>(),
        prop::option::of(any_latency()),
    )
        .prop_map(|(bytes, duration_us, first_wrong, latency)| Outcome {
            bytes,
            duration_us,
            wrong_bytes: first_wrong.map_or(0, |_| bytes.min(1)),
            first_wrong: first_wrong.filter(|_| bytes > 0),
            latency,
        })
}

/// Any message that may be sent.
pub(in super::super) fn any_message() -> impl Strategy<Value = Message> {
    prop_oneof![
        any_start().prop_map(Message::Start),
        (1..u32::MAX).prop_map(|port| Message::Listening { port }),
        Just(Message::Ready),
        Just(Message::Go),
        (1..=MAX_SEGMENT_LEN).prop_map(|len| Message::Segment { len }),
        any::<u64>().prop_map(|bytes| Message::End { bytes }),
        Just(Message::Stop),
        any::<(u64, u64)>()
            .prop_map(|(bytes, wrong_bytes)| Message::Progress { bytes, wrong_bytes }),
        any_outcome().prop_map(Message::Outcome),
        any::<[u8; 16]>().prop_map(|nonce| Message::Join { nonce }),
    ]
}

/// What a receiver makes of a stream that comes in pieces of this length: the payload, and the sum that ends it.
fn receive(
    stream: &[u8],
    piece_len: usize,
    received: &mut Received,
) -> Result<(Vec<u8>, Option<u64>), DecodeError> {
    let mut decoder = Decoder::new();
    let mut payload = Vec::new();
    for piece in stream.chunks(piece_len) {
        decoder.space()[..piece.len()].copy_from_slice(piece);
        decoder.advance(piece.len());
        loop {
            match received.next(&mut decoder)? {
                Arrival::Nothing => break,
                Arrival::Payload(bytes) => payload.extend_from_slice(bytes),
                Arrival::Segment => {}
                Arrival::Frame(Frame::Bench(Message::End { bytes })) => {
                    return Ok((payload, Some(bytes)));
                }
                other => panic!("unexpected {other:?}"),
            }
        }
    }
    Ok((payload, None))
}

/// Whole segments of a sender, at least so many bytes, and the end.
fn stream(messages: &mut Messages, bytes: u64) -> Vec<u8> {
    let mut stream = Vec::new();
    while messages.bytes() < bytes || !messages.is_between_segments() {
        stream.extend_from_slice(messages.next_message());
    }
    let end = Message::End {
        bytes: messages.bytes(),
    };
    Frame::Bench(end)
        .encode(OPERATION_CHANNEL, &mut stream)
        .unwrap();
    stream
}

#[test]
fn what_is_sent_arrives_however_it_is_cut() {
    for message_len in [1, 7, 64, 4096, 65_537, 3 << 20] {
        for piece_len in [11, 4096, 100_000] {
            let mut messages = Messages::new(message_len, Some(5)).unwrap();
            let stream = stream(&mut messages, 10_000);
            let mut received = Received::new(Some(5));
            let (payload, end) = receive(&stream, piece_len, &mut received).unwrap();
            assert_eq!(end, Some(messages.bytes()));
            assert_eq!(payload.len() as u64, messages.bytes());
            assert_eq!((received.wrong_bytes(), received.first_wrong()), (0, None));
            let mut expected = vec![0; payload.len()];
            Pattern::new(5).fill(&mut expected);
            assert_eq!(payload, expected);
        }
    }
}

#[test]
fn every_kind_of_damage_is_seen() {
    let mut messages = Messages::new(1000, Some(5)).unwrap();
    let sent = stream(&mut messages, 64_000);
    let (payload, _) = receive(&sent, 4096, &mut Received::new(None)).unwrap();
    let wrong = |payload: &[u8]| {
        let mut received = Received::new(Some(5));
        received.count(payload);
        (received.wrong_bytes(), received.first_wrong())
    };
    assert_eq!(wrong(&payload), (0, None));
    let mut changed = payload.clone();
    changed[30_001] ^= 1;
    changed[63_999] ^= 1;
    assert_eq!(wrong(&changed), (2, Some(30_001)));
    // A byte that is lost, one that comes twice, a message that is lost, two that change places.
    for (damaged, first) in [
        ([&payload[..5000], &payload[5001..]].concat(), 5000),
        ([&payload[..5001], &payload[5000..]].concat(), 5001),
        ([&payload[..2000], &payload[3000..]].concat(), 2000),
        (
            [
                &payload[..8000],
                &payload[16_000..24_000],
                &payload[8000..16_000],
            ]
            .concat(),
            8000,
        ),
    ] {
        let (count, found) = wrong(&damaged);
        let found = found.expect("damage is seen");
        // Every 256th byte is equal by chance.
        assert!(count > 1000 && (first..first + 4).contains(&found));
    }
}

#[test]
fn a_sum_that_does_not_agree_is_told_apart() {
    let mut messages = Messages::new(100, None).unwrap();
    let mut bytes = messages.next_message().to_vec();
    while !messages.is_between_segments() {
        bytes.extend_from_slice(messages.next_message());
    }
    let end = Frame::Bench(Message::End { bytes: 6399 });
    end.encode(OPERATION_CHANNEL, &mut bytes).unwrap();
    let mut decoder = Decoder::new();
    decoder.space()[..bytes.len()].copy_from_slice(&bytes);
    decoder.advance(bytes.len());
    let mut received = Received::new(None);
    assert_eq!(received.next(&mut decoder), Ok(Arrival::Segment));
    assert!(matches!(
        received.next(&mut decoder),
        Ok(Arrival::Payload(_))
    ));
    assert_eq!(
        received.next(&mut decoder),
        Ok(Arrival::WrongSum { said: 6399 })
    );
    assert_eq!(received.bytes(), 6400);
}

#[test]
fn payload_is_not_taken_for_frames_nor_frames_for_payload() {
    // Payload that looks like an error, in a segment of exactly its length, then the end.
    let error = super::super::ErrorReport::new(super::super::ErrorKind::Busy, "not a frame");
    let payload = Frame::Error(error).to_bytes(OPERATION_CHANNEL).unwrap();
    let mut bytes = Vec::new();
    let len = payload.len() as u32;
    for frame in [Message::Segment { len }, Message::Segment { len }] {
        Frame::Bench(frame)
            .encode(OPERATION_CHANNEL, &mut bytes)
            .unwrap();
        bytes.extend_from_slice(&payload);
    }
    let end = Message::End {
        bytes: 2 * u64::from(len),
    };
    Frame::Bench(end)
        .encode(OPERATION_CHANNEL, &mut bytes)
        .unwrap();
    for piece_len in 1..40 {
        let (found, end) = receive(&bytes, piece_len, &mut Received::new(None)).unwrap();
        assert_eq!(found, [payload.clone(), payload.clone()].concat());
        assert_eq!(end, Some(2 * u64::from(len)));
    }
}

#[test]
fn the_pattern_is_the_same_however_it_is_cut() {
    let mut whole = [0; 200];
    Pattern::new(3).fill(&mut whole);
    for first in 0..20 {
        for second in 0..20 {
            let mut pieces = [0; 200];
            let mut pattern = Pattern::new(3);
            let (head, rest) = pieces.split_at_mut(first);
            let (middle, tail) = rest.split_at_mut(second);
            for piece in [head, middle, tail] {
                pattern.fill(piece);
            }
            assert_eq!(pieces, whole, "{first} {second}");
        }
    }
}

fn accepted(message: Message) -> bool {
    Frame::Bench(message).to_bytes(1).is_ok()
}

#[test]
fn the_limits_of_a_benchmark() {
    let start = Start {
        role: Role::Source,
        peer: Peer::Host,
        message_len: 1,
        seed: None,
        limit_ms: 1,
    };
    for (message_len, fits) in [
        (0, false),
        (1, true),
        (MAX_MESSAGE_LEN, true),
        (MAX_MESSAGE_LEN + 1, false),
    ] {
        let asked = Start {
            message_len,
            ..start
        };
        assert_eq!(accepted(Message::Start(asked)), fits, "{message_len}");
        assert_eq!(Messages::new(message_len, None).is_ok(), fits);
        assert_eq!(accepted(Message::Segment { len: message_len }), fits);
    }
    for (limit_ms, fits) in [
        (0, false),
        (1, true),
        (MAX_DURATION_MS, true),
        (MAX_DURATION_MS + 1, false),
    ] {
        assert_eq!(accepted(Message::Start(Start { limit_ms, ..start })), fits);
    }
    let nonce = [0; 16];
    for (cid, port, listens, dials) in [
        (2, 1, false, false),
        (3, 1, true, true),
        (3, 0, true, false),
        (u32::MAX - 1, u32::MAX - 1, true, true),
        (u32::MAX, 1, false, false),
        (3, u32::MAX, false, false),
    ] {
        for (peer, fits) in [
            (Peer::Listen { cid, port, nonce }, listens),
            (Peer::Dial { cid, port, nonce }, dials),
        ] {
            assert_eq!(
                accepted(Message::Start(Start { peer, ..start })),
                fits,
                "{peer:?}"
            );
        }
    }
    assert!(!accepted(Message::Listening { port: 0 }));
}

#[test]
fn outcomes_that_contradict_themselves_are_refused() {
    let latency = Latency {
        count: 1,
        min_ns: 1,
        p1_ns: 1,
        mean_ns: 2,
        p50_ns: 2,
        p99_ns: 3,
        p999_ns: 3,
        max_ns: 3,
    };
    let outcome = Outcome {
        bytes: 10,
        latency: Some(latency),
        ..Outcome::default()
    };
    assert!(accepted(Message::Outcome(outcome)));
    for wrong in [
        Latency {
            count: 0,
            ..latency
        },
        Latency {
            min_ns: 2,
            ..latency
        },
        Latency {
            p999_ns: 4,
            ..latency
        },
        Latency {
            mean_ns: 4,
            ..latency
        },
    ] {
        let wrong = Outcome {
            latency: Some(wrong),
            ..outcome
        };
        assert!(!accepted(Message::Outcome(wrong)));
    }
    for (wrong_bytes, first_wrong) in [(1, None), (0, Some(3)), (11, Some(3))] {
        let wrong = Outcome {
            wrong_bytes,
            first_wrong,
            ..outcome
        };
        assert!(!accepted(Message::Outcome(wrong)));
    }
}

#[test]
fn the_longest_message_fits_its_frame() {
    let latency = Latency {
        count: u64::MAX,
        min_ns: u64::MAX,
        p1_ns: u64::MAX,
        mean_ns: u64::MAX,
        p50_ns: u64::MAX,
        p99_ns: u64::MAX,
        p999_ns: u64::MAX,
        max_ns: u64::MAX,
    };
    assert!(accepted(Message::Outcome(Outcome {
        bytes: u64::MAX,
        duration_us: u64::MAX,
        wrong_bytes: u64::MAX,
        first_wrong: Some(u64::MAX),
        latency: Some(latency),
    })));
}

#[test]
fn segments_are_neither_long_nor_many_messages() {
    assert_eq!(segment_messages(1), 64);
    assert_eq!(segment_messages(16 * 1024), 64);
    assert_eq!(segment_messages(64 * 1024), 16);
    assert_eq!(segment_messages(1024 * 1024), 1);
    assert_eq!(segment_messages(MAX_MESSAGE_LEN), 1);
}
