//! Two links, a line between them that loses bytes, and a book in which is noted what each said.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use wire::serial::{MAX_PAYLOAD_LEN, RefusalKind};

use crate::link::*;

/// Numbers from a seed.
#[derive(Debug)]
pub(super) struct Random(u64);

impl Random {
    pub(super) fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub(super) fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    pub(super) fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    pub(super) fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }
}

/// What an end knows of a channel.
#[derive(Debug, Default, Clone)]
pub(super) struct Half {
    pub(super) id: Option<ChannelId>,
    pub(super) is_open: bool,
    sent: u64,
    has_ended: bool,
    has_stopped: bool,
    has_reset: bool,
    received: u64,
    unconsumed: usize,
    saw_end: bool,
    is_gone: bool,
}

impl Half {
    fn take_unconsumed(&mut self) -> usize {
        std::mem::take(&mut self.unconsumed)
    }
}

/// A channel, as both ends know it. Its number is the port that it was opened for.
#[derive(Debug, Default)]
pub(super) struct Conversation {
    /// The lives of the two ends that it belongs to.
    lives: [u32; 2],
    refused: bool,
    pub(super) halves: [Half; 2],
}

/// One end of the line.
pub(super) struct End {
    pub(super) link: Link,
    life: u32,
    /// The life of the other end with which there is a session.
    met: Option<u32>,
    /// Channels by their ids.
    numbers: BTreeMap<ChannelId, u32>,
    pub(super) is_connected: bool,
}

pub(super) struct World {
    pub(super) random: Random,
    pub(super) now: Instant,
    pub(super) ends: [End; 2],
    /// What is on its way from each end to the other.
    pub(super) pipes: [VecDeque<u8>; 2],
    pub(super) book: BTreeMap<u32, Conversation>,
    next_port: u32,
    options: Options,
    /// Which life had which epoch.
    lives: BTreeMap<u64, u32>,
    pub(super) bytes: u64,
    pub(super) restarts: u64,
}

/// What byte stands there.
fn byte_at(port: u32, from: usize, offset: u64) -> u8 {
    let mixed = (u64::from(port) * 31 + from as u64 * 7 + 1)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15)
        .wrapping_add(offset / 5 * 0x0101);
    (mixed >> 32) as u8 ^ offset as u8
}

/// As much as the line holds before it takes no more.
const PIPE_LEN: usize = 200_000;

impl World {
    pub(super) fn new(seed: u64) -> World {
        let mut random = Random::new(seed);
        let options = Options {
            window: random.pick(&[4096, 65_536, 262_144]),
            channels: random.pick(&[1, 3, 256]),
            patience: Duration::from_secs(1_000_000),
        };
        let mut lives = BTreeMap::new();
        let mut end = |life| {
            let epoch = random.next();
            lives.insert(epoch, life);
            End {
                link: Link::new(epoch, options),
                life,
                met: None,
                numbers: BTreeMap::new(),
                is_connected: false,
            }
        };
        let ends = [end(1), end(1)];
        World {
            ends,
            lives,
            random,
            now: Instant::now(),
            pipes: [VecDeque::new(), VecDeque::new()],
            book: BTreeMap::new(),
            next_port: 0,
            options,
            bytes: 0,
            restarts: 0,
        }
    }

    pub(super) fn connect(&mut self, who: usize) {
        self.ends[who].is_connected = true;
        self.ends[who].link.connected(self.now);
    }

    pub(super) fn disconnect(&mut self, who: usize) {
        self.ends[who].is_connected = false;
        self.ends[who].link.disconnected(self.now);
        self.take_events(who);
    }

    /// A new process, which knows of nothing.
    pub(super) fn restart(&mut self, who: usize) {
        let epoch = self.random.next();
        let end = &mut self.ends[who];
        end.link = Link::new(epoch, self.options);
        end.life += 1;
        end.met = None;
        end.numbers.clear();
        self.restarts += 1;
        let life = end.life;
        self.lives.insert(epoch, life);
        for conversation in self.book.values_mut() {
            if conversation.lives[who] != life {
                conversation.halves[who].is_gone = true;
            }
        }
        if self.ends[who].is_connected {
            self.connect(who);
        }
    }

    /// Some of what the link wants to say goes onto the line.
    pub(super) fn write(&mut self, who: usize) {
        if !self.ends[who].is_connected || self.pipes[who].len() > PIPE_LEN {
            return;
        }
        let now = self.now;
        let len = self.random.pick(&[1, 50, 4096, 100_000]);
        let link = &mut self.ends[who].link;
        let output = link.output();
        let len = output.len().min(len);
        self.pipes[who].extend(&output[..len]);
        link.advance_output(len, now);
    }

    /// Some of what is on the line arrives.
    pub(super) fn deliver(&mut self, to: usize) {
        if !self.ends[to].is_connected {
            return;
        }
        let len = self.random.pick(&[1, 39, 4096, 4096, 65_536]);
        let pipe = &mut self.pipes[1 - to];
        let space = self.ends[to].link.space();
        let len = len.min(pipe.len()).min(space.len());
        for (place, byte) in space.iter_mut().zip(pipe.drain(..len)) {
            *place = byte;
        }
        self.ends[to].link.received(len);
        self.take_events(to);
    }

    pub(super) fn take_events(&mut self, who: usize) {
        let mut consumed = Vec::new();
        loop {
            let end = &mut self.ends[who];
            let Some(event) = end.link.next_event(self.now) else {
                break;
            };
            let number = |id: &ChannelId| end.numbers.get(id).copied();
            match event {
                Event::Came => {
                    assert_eq!(self.ends[who].met, None, "the last session was not ended");
                    // It may be with one that is no more, whose words were still on the line.
                    let epoch = self.ends[who].link.peer.expect("it came").epoch;
                    self.ends[who].met = Some(self.lives[&epoch]);
                }
                Event::Resumed | Event::Silent | Event::Speaks => {}
                Event::OtherVersion(_) => panic!("there is only one version"),
                Event::Ended(words) => {
                    let end = &mut self.ends[who];
                    let met = end.met.take().expect("there was a session");
                    end.numbers.clear();
                    assert_ne!(
                        met,
                        self.ends[1 - who].life,
                        "{words}: it is still the same"
                    );
                    for conversation in self.book.values_mut() {
                        conversation.halves[who].is_gone |= conversation.lives[1 - who] == met;
                    }
                }
                Event::Incoming { channel, port } => self.answer(who, channel, port),
                Event::Opened(id) => {
                    let port = number(&id).expect("it was opened");
                    let conversation = self.book.get_mut(&port).expect("it is in the book");
                    assert!(!conversation.refused);
                    assert!(conversation.halves[1 - who].id.is_some());
                    conversation.halves[who].is_open = true;
                }
                Event::Refused(id, refusal) => {
                    let port = number(&id).expect("it was opened");
                    let conversation = self.book.get_mut(&port).expect("it is in the book");
                    let is_full = refusal.kind == RefusalKind::Busy;
                    assert!(conversation.refused || is_full);
                    conversation.halves[who].is_gone = true;
                    conversation.halves[1 - who].is_gone = true;
                }
                Event::Data(id) => {
                    let port = number(&id).expect("it was opened");
                    if self.take_data(who, id, port) {
                        consumed.push((id, self.book_half(who, port).take_unconsumed()));
                    }
                }
                Event::End(id) => {
                    let port = number(&id).expect("it was opened");
                    let conversation = self.book.get_mut(&port).expect("it is in the book");
                    let other = conversation.halves[1 - who].clone();
                    let half = &mut conversation.halves[who];
                    assert!(other.has_ended, "an end that was not sent");
                    assert_eq!(half.received, other.sent, "an end too early");
                    half.saw_end = true;
                }
                Event::Stopped(id) => {
                    let port = number(&id).expect("it was opened");
                    assert!(self.book[&port].halves[1 - who].has_stopped);
                    self.note_end(who, port);
                }
                Event::Reset(id, _) => {
                    let port = number(&id).expect("it was opened");
                    let conversation = self.book.get_mut(&port).expect("it is in the book");
                    assert!(conversation.halves[1 - who].has_reset);
                    conversation.halves[who].is_gone = true;
                }
            }
        }
        for (channel, count) in consumed {
            self.ends[who].link.consumed(channel, count);
        }
    }

    /// Bytes that must be those that were sent: whether the program takes them out of the way at once.
    fn take_data(&mut self, who: usize, id: ChannelId, port: u32) -> bool {
        let conversation = self.book.get_mut(&port).expect("it is in the book");
        let sent = conversation.halves[1 - who].sent;
        let half = &mut conversation.halves[who];
        assert_eq!(half.id, Some(id));
        assert!(!half.saw_end && !half.has_stopped && !half.is_gone);
        let bytes = self.ends[who].link.payload();
        for byte in bytes {
            assert_eq!(*byte, byte_at(port, 1 - who, half.received));
            half.received += 1;
        }
        self.bytes += bytes.len() as u64;
        half.unconsumed += bytes.len();
        assert!(half.unconsumed <= self.options.window as usize);
        assert!(half.received <= sent);
        self.random.one_in(3)
    }

    fn book_half(&mut self, who: usize, port: u32) -> &mut Half {
        let conversation = self.book.get_mut(&port).expect("it is in the book");
        &mut conversation.halves[who]
    }

    /// No more will be sent, because the other side takes no more.
    fn note_end(&mut self, who: usize, port: u32) {
        let conversation = self.book.get_mut(&port).expect("it is in the book");
        conversation.halves[who].has_ended = true;
    }

    fn answer(&mut self, who: usize, id: ChannelId, port: u32) {
        let is_refused = self.random.one_in(8);
        let life = self.ends[who].life;
        let conversation = self.book.get_mut(&port).expect("it was opened");
        assert_eq!(conversation.lives[who], life, "for another epoch");
        assert!(conversation.halves[who].id.is_none(), "opened twice");
        if is_refused {
            conversation.refused = true;
            let refusal = Refusal::new(RefusalKind::Forbidden, "no");
            self.ends[who].link.refuse(id, refusal);
        } else {
            conversation.halves[who].id = Some(id);
            conversation.halves[who].is_open = true;
            self.ends[who].numbers.insert(id, port);
            self.ends[who].link.accept(id);
        }
    }

    pub(super) fn open(&mut self, who: usize) {
        let port = self.next_port;
        let Ok(id) = self.ends[who].link.open(port) else {
            return;
        };
        self.next_port += 1;
        let mut conversation = Conversation::default();
        let met = self.ends[who].met.expect("there is a session");
        conversation.lives[who] = self.ends[who].life;
        conversation.lives[1 - who] = met;
        conversation.halves[who].id = Some(id);
        self.ends[who].numbers.insert(id, port);
        self.book.insert(port, conversation);
    }

    /// A program does something with one of its channels.
    pub(super) fn act(&mut self, who: usize) {
        let open: Vec<_> = self.ends[who].numbers.clone().into_iter().collect();
        if open.is_empty() {
            return;
        }
        let (id, port) = self.random.pick(&open);
        let half = &mut self.book.get_mut(&port).expect("in the book").halves[who];
        let link = &mut self.ends[who].link;
        if half.is_gone || !link.has_channel(id) {
            return;
        }
        let random = &mut self.random;
        match random.below(100) {
            0..70 if !half.has_ended => {
                let len = 1 + random.pick(&[1, 100, 5000, MAX_PAYLOAD_LEN]);
                let len = random.below(len) + 1;
                let start = half.sent;
                let sent = link.send_with(id, |space| {
                    let len = len.min(space.len());
                    for (index, place) in space[..len].iter_mut().enumerate() {
                        *place = byte_at(port, who, start + index as u64);
                    }
                    Ok::<_, ()>(len)
                });
                half.sent += sent.expect("no error").unwrap_or(0) as u64;
            }
            70..90 => {
                let count = std::mem::take(&mut half.unconsumed);
                link.consumed(id, count);
            }
            90..94 if half.is_open => {
                half.has_ended = true;
                link.end(id);
            }
            94 if half.is_open => {
                half.has_stopped = true;
                link.stop(id);
            }
            95 => {
                half.has_reset = true;
                half.is_gone = true;
                link.reset(id, ResetReason::Aborted);
            }
            _ => {}
        }
    }

    /// The next timer of either link, but no further than that.
    pub(super) fn pass_time(&mut self, at_most: Duration) {
        let limit = self.now + at_most;
        let next = self.ends.iter().filter_map(|end| end.link.poll_at()).min();
        self.now = next.unwrap_or(limit).clamp(self.now, limit);
        for who in 0..2 {
            let is_due = self.ends[who]
                .link
                .poll_at()
                .is_some_and(|at| at <= self.now);
            if is_due {
                self.ends[who].link.handle_timeout(self.now);
                self.take_events(who);
            }
        }
    }

    /// Something happens to the line.
    pub(super) fn damage(&mut self) {
        let who = self.random.below(2);
        let pipe = &mut self.pipes[who];
        let at = self.random.below(pipe.len());
        match self.random.below(5) {
            0 => pipe.truncate(at),
            1 => drop(pipe.drain(..at)),
            2 => {
                let end = (at + 1 + self.random.below(5000)).min(pipe.len());
                pipe.drain(at.min(end)..end);
            }
            3 => {
                if let Some(byte) = pipe.get_mut(at) {
                    *byte ^= 1 << self.random.below(8);
                }
            }
            _ => {
                let len = self.random.below(300);
                for _ in 0..len {
                    let byte = self.random.pick(&[0xf5, b'R', b'D', b'L', 0, 1, 0x7f]);
                    self.pipes[who].push_back(byte);
                }
            }
        }
    }

    /// Everything that was sent to a live peer has arrived, and nothing is pending.
    pub(super) fn check_rest(&mut self) {
        for who in 0..2 {
            let end = &self.ends[who];
            assert!(end.link.has_peer(), "there is a session in the end");
            assert_eq!(end.met, Some(self.ends[1 - who].life));
            assert!(end.link.is_flushed());
            assert_eq!(end.link.poll_at(), None, "an idle link has no timers");
            assert_eq!(end.link.counters().violations, 0);
        }
        let lives = [self.ends[0].life, self.ends[1].life];
        for (port, conversation) in &self.book {
            let [left, right] = &conversation.halves;
            let is_reset = [left, right]
                .iter()
                .any(|half| half.has_reset || half.is_gone);
            if conversation.lives != lives || conversation.refused || is_reset {
                continue;
            }
            for (from, to) in [(left, right), (right, left)] {
                if !to.has_stopped {
                    assert_eq!(to.received, from.sent, "port {port}");
                    assert_eq!(to.saw_end, from.has_ended, "port {port}");
                }
            }
        }
    }
}
