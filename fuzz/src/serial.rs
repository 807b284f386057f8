//! The serial link: its frames, and a link whose peer says anything.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serial::link::{ChannelId, Event, Link};
use serial::{Options, Refusal, RefusalKind};
use wire::serial::{
    Channel, Decoder, HEADER_LEN, Header, Hello, Kind, MAX_BUFFER_LEN, MAX_PAYLOAD_LEN, Message,
    ResetReason, VERSION, checksum, session,
};

use crate::Dice;

/// Bytes give the same frames however they are cut; what is given is whole; what is not given was discarded and counted; and a frame that was
/// read can be written and is the same then.
pub fn decoder(input: &[u8]) {
    let mut dice = Dice::new(input);
    let cuts: Vec<usize> = (0..4).map(|_| 1 + dice.below(300)).collect();
    let stream = stream_of(&mut dice);
    let whole = decode(&stream, &[4096]);
    assert_eq!(decode(&stream, &cuts), whole);
    assert_eq!(decode(&stream, &[1]), whole);
}

/// Whole frames, cut frames, damaged frames, and bytes that are none.
fn stream_of(dice: &mut Dice<'_>) -> Vec<u8> {
    let mut stream = Vec::new();
    while !dice.is_empty() && stream.len() < MAX_BUFFER_LEN {
        let start = stream.len();
        match dice.below(8) {
            0 => {
                let len = dice.below(40);
                stream.extend(dice.take(len));
                continue;
            }
            1 => {
                stream.extend(wire::serial::MAGIC);
                continue;
            }
            _ => {}
        }
        let kind = any_kind(dice);
        let len = dice.pick(&[0, 1, 4, 32, 500, 3000]);
        let payload = vec![dice.byte(); len];
        let header = Header {
            kind,
            channel: Channel {
                opened_by_sender: dice.one_in(2),
                number: dice.edgy(),
            },
            payload_len: len,
            session: dice.edgy(),
            sequence: dice.quad(),
            acknowledged: dice.quad(),
            payload_crc: checksum(&payload),
        };
        stream.extend(header.to_bytes());
        stream.extend(payload);
        let len = stream.len() - start;
        match dice.below(6) {
            0 => stream.truncate(start + dice.below(len)),
            1 => {
                let at = start + dice.below(len);
                stream[at] ^= 1 << dice.below(8);
            }
            _ => {}
        }
    }
    stream
}

fn any_kind(dice: &mut Dice<'_>) -> Kind {
    let number = dice.pick(&[19, 16, 1, 2, 3, 4, 5, 17, 18, 20, 21, 22, 23]);
    Kind::from_wire(number).expect("all of these are kinds")
}

fn decode(stream: &[u8], cuts: &[usize]) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut decoder = Decoder::new();
    let (mut frames, mut given, mut rest) = (Vec::new(), 0, stream);
    let mut cuts = cuts.iter().cycle();
    loop {
        while let Some(header) = decoder.next_frame() {
            let payload = decoder.payload();
            assert_eq!(
                (payload.len(), checksum(payload)),
                (header.payload_len, header.payload_crc)
            );
            assert!(payload.len() <= MAX_PAYLOAD_LEN);
            let bytes = header.to_bytes();
            assert_eq!(Header::from_bytes(&bytes), Some(header));
            if let Ok(message) = Message::parse(&header, payload) {
                assert_eq!(message.kind(), header.kind);
            }
            given += HEADER_LEN + payload.len();
            frames.push((bytes.to_vec(), payload.to_vec()));
        }
        if rest.is_empty() {
            break;
        }
        let cut = *cuts.next().expect("a cycle of at least one cut");
        let space = decoder.space();
        assert!(!space.is_empty() && space.len() <= MAX_BUFFER_LEN);
        let len = cut.min(space.len()).min(rest.len());
        space[..len].copy_from_slice(&rest[..len]);
        decoder.advance(len);
        rest = &rest[len..];
    }
    decoder.restart();
    assert_eq!(
        given as u64 + decoder.discarded().bytes,
        stream.len() as u64
    );
    frames
}

/// What an honest program knows of one of its channels.
#[derive(Default)]
struct Program {
    /// The peer opened it, and it was accepted; or we did, and the peer has.
    is_open: bool,
    has_ended: bool,
    unconsumed: usize,
}

/// A hostile peer that knows the session, with whole frames.
struct Attack<'a> {
    dice: Dice<'a>,
    link: Link,
    now: Instant,
    window: usize,
    /// What the link last called itself.
    link_epoch: u64,
    heard: Decoder,
    next: u64,
    acknowledged: u64,
    programs: BTreeMap<ChannelId, Program>,
    has_peer: bool,
}

const PEER_EPOCH: u64 = 3;

/// Whatever whole frames a peer sends: events make sense, no program gets more than it has room for, a broken rule ends the session and nothing
/// else, and the link comes to rest.
pub fn link(input: &[u8]) {
    let mut dice = Dice::new(input);
    let window = dice.pick(&[4096, 65_536]);
    let options = Options {
        window,
        channels: dice.pick(&[2, 1, 20]),
        ..Options::default()
    };
    let mut attack = Attack {
        dice,
        link: Link::new(1000, options),
        now: Instant::now(),
        window: window as usize,
        link_epoch: 1000,
        heard: Decoder::new(),
        next: 0,
        acknowledged: 0,
        programs: BTreeMap::new(),
        has_peer: false,
    };
    attack.link.connected(attack.now);
    attack.hello(PEER_EPOCH, 1000);
    while !attack.dice.is_empty() {
        attack.step();
    }
    attack.rest();
}

impl Attack<'_> {
    fn step(&mut self) {
        match self.dice.below(12) {
            0..=5 => self.frame(),
            6 => self.listen(),
            7 => self.act(),
            8 => {
                let wait = self.dice.pick(&[1, 60, 300, 6000]);
                self.pass(Duration::from_millis(wait));
            }
            9 => {
                let peer_epoch = self.dice.pick(&[self.link_epoch, 0, 999]);
                let epoch = PEER_EPOCH + u64::from(self.dice.one_in(4));
                self.hello(epoch, peer_epoch);
            }
            10 => {
                let len = self.dice.below(60);
                let bytes = self.dice.take(len).to_vec();
                self.give(&bytes);
            }
            _ if self.dice.one_in(4) => {
                self.link.disconnected(self.now);
                self.link.connected(self.now);
            }
            _ => {}
        }
    }

    fn hello(&mut self, epoch: u64, peer_epoch: u64) {
        let hello = Message::Hello(Hello {
            version: if self.dice.one_in(20) {
                VERSION + 1
            } else {
                VERSION
            },
            wants_answer: !self.dice.one_in(2),
            connection: u32::from(self.dice.byte()),
            epoch,
            peer_epoch,
            window: self.dice.edgy(),
        });
        let mut payload = Vec::new();
        hello.write_payload(&mut payload);
        self.next = 0;
        self.say(Kind::Hello, Channel::default(), 0, &payload);
    }

    fn frame(&mut self) {
        let kind = any_kind(&mut self.dice);
        let channel = Channel {
            opened_by_sender: !self.dice.one_in(3),
            number: u32::from(self.dice.below(6) as u8),
        };
        let payload = match kind {
            Kind::Open => u32::from(self.dice.byte()).to_le_bytes().to_vec(),
            Kind::Credit => self
                .dice
                .pick(&[1_u32, 4096, 65_536, u32::MAX])
                .to_le_bytes()
                .to_vec(),
            Kind::Data => vec![1; self.dice.pick(&[1, 100, 4096, MAX_PAYLOAD_LEN])],
            Kind::Refused => b"\x01no".to_vec(),
            Kind::Reset => vec![self.dice.pick(&[1, 2])],
            _ => Vec::new(),
        };
        let sequence = match kind.is_numbered() {
            true => {
                let off = self.dice.pick(&[0, 0, 0, 0, 1, 5]);
                self.next += 1;
                self.next - 1 + off
            }
            false => u64::from(self.dice.byte()),
        };
        self.say(kind, channel, sequence, &payload);
    }

    fn say(&mut self, kind: Kind, channel: Channel, sequence: u64, payload: &[u8]) {
        let header = Header {
            kind,
            channel,
            payload_len: payload.len(),
            session: match kind {
                Kind::Hello => 0,
                _ => session(PEER_EPOCH, self.link_epoch),
            },
            sequence,
            acknowledged: match self.dice.below(10) {
                0 => self.acknowledged + 1,
                1 => 0,
                _ => self.acknowledged,
            },
            payload_crc: checksum(payload),
        };
        let mut bytes = header.to_bytes().to_vec();
        bytes.extend(payload);
        self.give(&bytes);
    }

    fn give(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let space = self.link.space();
            let len = space.len().min(bytes.len());
            space[..len].copy_from_slice(&bytes[..len]);
            self.link.received(len);
            bytes = &bytes[len..];
            self.take_events();
        }
    }

    fn take_events(&mut self) {
        while let Some(event) = self.link.next_event(self.now) {
            match event {
                Event::Came => {
                    assert!(!self.has_peer && self.programs.is_empty());
                    self.has_peer = true;
                }
                Event::Resumed | Event::Silent | Event::Speaks => assert!(self.has_peer),
                Event::OtherVersion(version) => assert_ne!(version, VERSION),
                Event::Ended(words) => {
                    assert!(!words.is_empty());
                    self.programs.clear();
                    self.has_peer = false;
                }
                Event::Incoming { channel, .. } => self.answer(channel),
                Event::Opened(id) => {
                    let program = self.programs.get_mut(&id).expect("it was opened");
                    assert!(!std::mem::replace(&mut program.is_open, true));
                }
                Event::Refused(id, refusal) => {
                    assert!(!self.programs.remove(&id).expect("it was opened").is_open);
                    assert!(!refusal.message.contains(char::is_control));
                }
                Event::Data(id) => {
                    let len = self.link.payload().len();
                    let program = self.programs.get_mut(&id).expect("it was opened");
                    assert!(program.is_open && !program.has_ended && len > 0);
                    program.unconsumed += len;
                    assert!(
                        program.unconsumed <= self.window,
                        "more than there is room for"
                    );
                }
                Event::End(id) => {
                    let program = self.programs.get_mut(&id).expect("it was opened");
                    assert!(!std::mem::replace(&mut program.has_ended, true));
                }
                Event::Stopped(id) => assert!(self.programs[&id].is_open),
                Event::Reset(id, _) => drop(self.programs.remove(&id).expect("it was opened")),
            }
        }
        assert_eq!(self.link.has_peer(), self.has_peer);
    }

    fn answer(&mut self, id: ChannelId) {
        if self.dice.one_in(5) {
            self.link
                .refuse(id, Refusal::new(RefusalKind::Forbidden, "no"));
            return;
        }
        self.link.accept(id);
        let program = Program {
            is_open: true,
            ..Program::default()
        };
        assert!(self.programs.insert(id, program).is_none());
    }

    /// A program of ours does something.
    fn act(&mut self) {
        if self.programs.is_empty() || self.dice.one_in(4) {
            if let Ok(id) = self.link.open(5) {
                self.programs.insert(id, Program::default());
            }
            return;
        }
        let index = self.dice.below(self.programs.len());
        let id = *self.programs.keys().nth(index).expect("there are so many");
        let program = self.programs.get_mut(&id).expect("it is one of them");
        match self.dice.below(6) {
            0 | 1 => {
                let credit = self.link.credit(id);
                let sent = self.link.send_with(id, |space| {
                    assert!(space.len() <= credit);
                    Ok::<_, ()>(space.len())
                });
                assert!(sent.is_ok_and(|count| count.is_none_or(|count| count == credit)));
            }
            2 => {
                let count = std::mem::take(&mut program.unconsumed);
                self.link.consumed(id, count);
            }
            3 if program.is_open => self.link.end(id),
            4 if program.is_open => {
                self.link.stop(id);
                // Nothing more comes, not even the end.
                program.has_ended = true;
            }
            5 => {
                self.link.reset(id, ResetReason::Aborted);
                self.programs.remove(&id);
            }
            _ => {}
        }
    }

    /// What the link says is whole, and in order.
    fn listen(&mut self) {
        loop {
            let output = self.link.output();
            if output.is_empty() {
                break;
            }
            let space = self.heard.space();
            let len = output.len().min(space.len());
            space[..len].copy_from_slice(&output[..len]);
            self.heard.advance(len);
            self.link.advance_output(len, self.now);
            while let Some(header) = self.heard.next_frame() {
                let message = Message::parse(&header, self.heard.payload());
                let message = message.expect("what a link says makes sense");
                if let Message::Hello(hello) = message {
                    if self.link_epoch != hello.epoch {
                        self.link_epoch = hello.epoch;
                        self.acknowledged = 0;
                    }
                } else if header.kind.is_numbered() && header.sequence == self.acknowledged {
                    self.acknowledged += 1;
                }
            }
        }
        assert_eq!(self.heard.discarded().bytes, 0, "what a link says is whole");
    }

    fn pass(&mut self, time: Duration) {
        self.now += time;
        if self.link.poll_at().is_some_and(|at| at <= self.now) {
            self.link.handle_timeout(self.now);
            self.take_events();
        }
        assert!(
            self.link.poll_at().is_none_or(|at| at > self.now),
            "a timer that stays is a thread that spins"
        );
    }

    /// Left alone, it wakes up ever less often.
    fn rest(&mut self) {
        let mut turns = 0;
        let end = self.now + Duration::from_secs(3600);
        while let Some(at) = self.link.poll_at().filter(|at| *at < end) {
            self.now = at;
            self.link.handle_timeout(at);
            self.take_events();
            self.listen();
            turns += 1;
            assert!(turns < 1000, "it does not come to rest");
        }
    }
}
