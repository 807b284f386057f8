//! A link, and a peer that says what it likes.

use std::time::{Duration, Instant};

use wire::serial::{HEADER_LEN, Header, Kind, MAX_PAYLOAD_LEN, VERSION, checksum};

use crate::link::*;

const PEER_EPOCH: u64 = 0x5eed;

/// A peer without a link: each frame by hand.
struct Hand {
    link: Link,
    now: Instant,
    decoder: Decoder,
    session_out: u32,
    next: u64,
}

impl Hand {
    /// In a session.
    fn new(options: Options) -> Hand {
        let mut hand = Hand {
            link: Link::new(77, options),
            now: Instant::now(),
            decoder: Decoder::new(),
            session_out: 0,
            next: 0,
        };
        hand.link.connected(hand.now);
        hand.greet();
        assert_eq!(hand.events(), ["Came"]);
        hand
    }

    /// Says hello in the name that the link has now.
    fn greet(&mut self) {
        let link_epoch = self.link.epoch;
        self.session_out = session(PEER_EPOCH, link_epoch);
        self.next = 0;
        let hello = self.hello(PEER_EPOCH, link_epoch);
        self.say(&Message::Hello(hello), 0, 0, false, &[]);
    }

    fn hello(&self, epoch: u64, peer_epoch: u64) -> Hello {
        Hello {
            version: VERSION,
            wants_answer: true,
            connection: 1,
            epoch,
            peer_epoch,
            window: 65_536,
        }
    }

    /// A frame with these fields, and a payload instead of what the message has, if there is one.
    fn say(&mut self, message: &Message, number: u32, acknowledged: u64, ours: bool, data: &[u8]) {
        let mut payload = data.to_vec();
        if payload.is_empty() {
            message.write_payload(&mut payload);
        }
        let kind = message.kind();
        let header = Header {
            kind,
            channel: WireChannel {
                opened_by_sender: ours,
                number,
            },
            payload_len: payload.len(),
            session: if kind == Kind::Hello {
                0
            } else {
                self.session_out
            },
            sequence: if kind.is_numbered() { self.next } else { 0 },
            acknowledged,
            payload_crc: checksum(&payload),
        };
        self.next += u64::from(kind.is_numbered());
        let mut bytes = header.to_bytes().to_vec();
        bytes.extend(payload);
        self.receive(&bytes);
    }

    fn receive(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let space = self.link.space();
            let len = space.len().min(bytes.len()).min(4096);
            space[..len].copy_from_slice(&bytes[..len]);
            self.link.received(len);
            bytes = &bytes[len..];
            if !bytes.is_empty() {
                // Events are taken by the test.
                break;
            }
        }
        assert!(bytes.is_empty(), "longer than one read");
    }

    fn events(&mut self) -> Vec<String> {
        let mut events = Vec::new();
        while let Some(event) = self.link.next_event(self.now) {
            let text = format!("{event:?}");
            let end = text.find(['(', ' ']).unwrap_or(text.len());
            events.push(match &event {
                Event::Ended(words) => format!("Ended: {words}"),
                _ => text[..end].to_owned(),
            });
        }
        events
    }

    /// The kinds of the frames that the link has to say.
    fn heard(&mut self) -> Vec<Kind> {
        let mut kinds = Vec::new();
        loop {
            let output = self.link.output();
            if output.is_empty() {
                return kinds;
            }
            let space = self.decoder.space();
            let len = output.len().min(space.len());
            space[..len].copy_from_slice(&output[..len]);
            self.decoder.advance(len);
            self.link.advance_output(len, self.now);
            while let Some(header) = self.decoder.next_frame() {
                kinds.push(header.kind);
            }
        }
    }

    /// A channel that the peer has opened.
    fn open(&mut self) -> ChannelId {
        self.say(
            &Message::Open { port: 1 },
            self.link.opened[1],
            0,
            true,
            &[],
        );
        match self.link.next_event(self.now) {
            Some(Event::Incoming { channel, .. }) => {
                self.link.accept(channel);
                channel
            }
            other => panic!("not {other:?}"),
        }
    }
}

fn hand() -> Hand {
    Hand::new(Options::default())
}

/// What ends the session, and in what words.
#[test]
fn a_frame_that_breaks_the_protocol_ends_the_session_and_says_why() {
    type Wrong = fn(&mut Hand);
    let table: [(&str, Wrong); 15] = [
        ("never sent", |hand| {
            hand.say(&Message::Acknowledge, 0, 5, false, &[])
        }),
        ("never opened", |hand| {
            hand.say(&Message::End, 9, 0, true, &[])
        }),
        ("never opened", |hand| {
            hand.say(&Message::Opened, 0, 0, false, &[])
        }),
        ("not the next", |hand| {
            hand.say(&Message::Open { port: 1 }, 3, 0, true, &[])
        }),
        ("not the next", |hand| {
            hand.say(&Message::Open { port: 1 }, 0, 0, false, &[])
        }),
        ("makes no sense", |hand| {
            hand.say(&Message::Open { port: 1 }, 0, 0, true, b"abc")
        }),
        ("makes no sense", |hand| {
            hand.say(&Message::Probe, 0, 0, true, b"abc")
        }),
        ("answered twice", |hand| {
            hand.open();
            hand.say(&Message::Opened, 0, 0, true, &[]);
        }),
        ("before it is open", |hand| {
            hand.link.open(5).expect("room");
            hand.heard();
            hand.say(&Message::Data, 0, 1, false, b"early");
        }),
        ("behind the end", |hand| {
            hand.open();
            hand.say(&Message::End, 0, 0, true, &[]);
            hand.events();
            hand.say(&Message::Data, 0, 0, true, b"late");
        }),
        ("second end", |hand| {
            hand.open();
            hand.say(&Message::End, 0, 0, true, &[]);
            hand.events();
            hand.say(&Message::End, 0, 0, true, &[]);
        }),
        ("than there is credit", |hand| {
            hand.open();
            for _ in 0..256 * 1024 / 4000 {
                hand.say(&Message::Data, 0, 0, true, &[1; 4000]);
                assert_eq!(hand.events(), ["Data"]);
            }
            hand.say(&Message::Data, 0, 0, true, &[1; 2145]);
        }),
        ("more credit", |hand| {
            hand.open();
            let bytes = MAX_WINDOW - 65_536 + 1;
            hand.say(&Message::Credit { bytes }, 0, 0, true, &[]);
        }),
        ("more credit", |hand| {
            hand.open();
            hand.say(&Message::Credit { bytes: u32::MAX }, 0, 0, true, &[]);
        }),
        ("does not acknowledge", |hand| {
            for _ in 0..MAX_FRAMES {
                let id = hand.open();
                hand.link.reset(id, ResetReason::Aborted);
                if hand.link.is_full() {
                    break;
                }
            }
            hand.say(
                &Message::Open { port: 1 },
                hand.link.opened[1],
                0,
                true,
                &[],
            );
        }),
    ];
    for (words, wrong) in table {
        let mut hand = hand();
        hand.heard();
        let before = hand.link.epoch;
        wrong(&mut hand);
        let events = hand.events();
        assert!(
            events.len() == 1 && events[0].contains(words),
            "{words}: {events:?}"
        );
        assert!(!hand.link.has_peer() && hand.link.channels.is_empty());
        assert_ne!(hand.link.epoch, before);
        assert_eq!(hand.link.counters().violations, 1);
        // It is neither spoken nor listened to for a while; then there may be another session.
        hand.heard();
        hand.greet();
        assert!(hand.events().is_empty());
        hand.now = hand.link.poll_at().expect("the end of the silence");
        hand.link.handle_timeout(hand.now);
        assert!(hand.heard().contains(&Kind::Hello));
        hand.greet();
        assert_eq!(hand.events(), ["Came"], "{words}");
    }
}

#[test]
fn what_is_allowed_up_to_the_limit_is_taken() {
    let mut hand = hand();
    hand.open();
    let bytes = MAX_WINDOW - 65_536;
    hand.say(&Message::Credit { bytes }, 0, 0, true, &[]);
    for _ in 0..256 * 1024 / 4096 {
        hand.say(&Message::Data, 0, 0, true, &[1; 4000]);
        assert_eq!(hand.events(), ["Data"]);
        hand.say(&Message::Data, 0, 0, true, &[1; 96]);
        assert_eq!(hand.events(), ["Data"]);
    }
    assert_eq!(hand.link.counters().violations, 0);
}

#[test]
fn a_peer_that_offends_again_is_left_alone_longer() {
    let mut hand = hand();
    let mut waits = Vec::new();
    for _ in 0..9 {
        hand.say(&Message::Acknowledge, 0, 5, false, &[]);
        hand.events();
        let until = hand.link.poll_at().expect("the end of the silence");
        waits.push(until - hand.now);
        hand.now = until;
        hand.link.handle_timeout(hand.now);
        hand.heard();
        hand.greet();
        assert_eq!(hand.events(), ["Came"]);
    }
    assert!(waits.is_sorted() && waits[1] > waits[0]);
    assert_eq!(waits[8], Duration::from_secs(5));
}

#[test]
fn too_many_channels_are_refused_and_the_session_goes_on() {
    let mut hand = Hand::new(Options {
        channels: 2,
        ..Options::default()
    });
    hand.open();
    hand.open();
    hand.heard();
    hand.say(&Message::Open { port: 1 }, 2, 0, true, &[]);
    assert!(hand.events().is_empty());
    assert_eq!(hand.heard(), [Kind::Refused]);
    hand.say(&Message::Reset(ResetReason::Aborted), 0, 0, true, &[]);
    assert_eq!(hand.events(), ["Reset"]);
    hand.say(&Message::Open { port: 1 }, 3, 0, true, &[]);
    assert_eq!(hand.events(), ["Incoming"]);
}

#[test]
fn a_hello_that_does_not_know_us_changes_nothing() {
    let mut hand = hand();
    hand.open();
    hand.heard();
    for (epoch, peer_epoch) in [
        (1, 0),
        (PEER_EPOCH + 1, 5),
        (PEER_EPOCH, 0),
        (99, PEER_EPOCH),
    ] {
        let hello = hand.hello(epoch, peer_epoch);
        hand.say(&Message::Hello(hello), 0, 0, false, &[]);
        assert!(hand.events().is_empty());
        // The answer is our hello in any case.
        assert_eq!(hand.heard(), [Kind::Hello]);
    }
    assert!(hand.link.has_peer() && hand.link.channels.len() == 1);
    // Our own words, which something echoes.
    let hello = hand.hello(hand.link.epoch, PEER_EPOCH);
    hand.say(&Message::Hello(hello), 0, 0, false, &[]);
    assert!(hand.events().is_empty() && hand.heard().is_empty());
}

#[test]
fn another_version_is_told_once() {
    let mut hand = Hand::new(Options::default());
    hand.heard();
    for _ in 0..3 {
        let hello = Hello {
            version: VERSION + 1,
            ..hand.hello(5, 0)
        };
        hand.say(&Message::Hello(hello), 0, 0, false, &[]);
    }
    let events = hand.events();
    assert_eq!(events, ["OtherVersion"]);
    assert!(hand.heard().is_empty() && hand.link.has_peer());
}

#[test]
fn frames_of_another_session_are_skipped() {
    let mut hand = hand();
    hand.heard();
    hand.session_out ^= 1;
    hand.say(&Message::Open { port: 1 }, 0, 0, true, &[]);
    hand.say(&Message::Acknowledge, 0, 1000, false, &[]);
    assert!(hand.events().is_empty() && hand.link.has_peer());
    assert_eq!(hand.link.counters().stale_frames, 2);
    // The peer is asked its name, once.
    assert_eq!(hand.heard(), [Kind::Hello]);
}

#[test]
fn frames_for_channels_that_are_over_are_ignored() {
    let mut hand = hand();
    let id = hand.open();
    hand.link.reset(id, ResetReason::Aborted);
    hand.say(&Message::Data, 0, 0, true, b"late");
    hand.say(&Message::End, 0, 0, true, &[]);
    let id = hand.open();
    hand.link.stop(id);
    hand.say(&Message::Data, 1, 0, true, b"late");
    hand.say(&Message::End, 1, 0, true, &[]);
    assert!(hand.events().is_empty() && hand.link.has_peer());
}

#[test]
fn a_gap_is_asked_for_once() {
    let mut hand = hand();
    hand.heard();
    hand.next = 3;
    for _ in 0..5 {
        hand.say(&Message::End, 0, 0, true, &[]);
    }
    assert!(hand.events().is_empty());
    assert_eq!(hand.heard(), [Kind::Resend]);
    hand.next = 0;
    hand.open();
    hand.next = 5;
    hand.say(&Message::End, 0, 0, true, &[]);
    assert!(hand.events().is_empty());
    assert!(hand.heard().contains(&Kind::Resend));
}

#[test]
fn a_peer_that_answers_no_probe_is_silent_until_it_speaks() {
    let mut hand = hand();
    hand.heard();
    let id = hand.link.open(1).unwrap();
    let begun = hand.now;
    let mut events = Vec::new();
    while events.is_empty() {
        hand.heard();
        hand.now = hand.link.poll_at().unwrap();
        hand.link.handle_timeout(hand.now);
        events = hand.events();
    }
    assert_eq!(events, ["Silent"]);
    assert!(hand.now - begun < Duration::from_secs(5));
    // Reported once.
    for _ in 0..10 {
        hand.heard();
        hand.now = hand.link.poll_at().unwrap();
        hand.link.handle_timeout(hand.now);
        assert!(hand.events().is_empty());
    }
    hand.say(&Message::Acknowledge, 0, 1, false, &[]);
    assert_eq!(hand.events(), ["Speaks"]);
    assert!(hand.link.has_channel(id));
}

#[test]
fn what_is_kept_for_a_peer_that_acknowledges_nothing_is_bounded() {
    let mut hand = hand();
    let mut ids: Vec<_> = (0..200).map(|_| hand.open()).collect();
    let mut sent = 0;
    while let Some(id) = ids.pop() {
        hand.say(&Message::Credit { bytes: 100_000 }, id.number, 0, true, &[]);
        hand.events();
        while let Ok(Some(count)) = hand.link.send_with(id, |space| Ok::<_, ()>(space.len())) {
            sent += count;
            hand.heard();
        }
    }
    assert!((MAX_REPLAY_LEN..=MAX_REPLAY_LEN + MAX_PAYLOAD_LEN).contains(&sent));
    // Small frames count as well.
    let mut hand = self::hand();
    let mut frames = 0;
    for _ in 0..200 {
        let id = hand.open();
        while let Ok(Some(1)) = hand.link.send_with(id, |_| Ok::<_, ()>(1)) {
            frames += 1;
            hand.heard();
        }
    }
    assert!(frames <= MAX_FRAMES && frames > 1000);
    assert!(!hand.link.wants_data());
}

#[test]
fn bytes_that_a_channel_carries_are_not_taken_for_frames_of_the_link() {
    let mut hand = hand();
    hand.open();
    hand.heard();
    // A program sends what looks like a hello and a reset, and the line loses the frame around it.
    let mut payload = Vec::new();
    Message::Hello(hand.hello(1, 2)).write_payload(&mut payload);
    let mut forged = Header {
        kind: Kind::Hello,
        channel: WireChannel::default(),
        payload_len: payload.len(),
        session: 0,
        sequence: 0,
        acknowledged: 0,
        payload_crc: checksum(&payload),
    }
    .to_bytes()
    .to_vec();
    forged.extend(&payload);
    let reset = Header {
        kind: Kind::Reset,
        channel: WireChannel {
            opened_by_sender: true,
            number: 0,
        },
        payload_len: 1,
        session: session(1, 2),
        sequence: hand.next,
        acknowledged: 0,
        payload_crc: checksum(&[1]),
    };
    forged.extend(reset.to_bytes());
    forged.push(1);
    assert!(forged.len() > 2 * HEADER_LEN);
    hand.receive(&forged);
    assert!(hand.events().is_empty());
    assert!(hand.link.has_peer() && hand.link.channels.len() == 1);
}
