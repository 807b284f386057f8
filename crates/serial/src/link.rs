//! The state machine of the link: no descriptor, no thread, no clock.
//!
//! # Theory of operation
//!
//! **What a port does.** It carries bytes in order, and loses them: whenever one of its ends closes, opens or restarts, a stretch of the stream is
//! missing, without a word, and what arrives next may be the middle of a frame. Nothing arrives twice and nothing overtakes by itself.
//!
//! **Sessions.** Each life of a link has an *epoch*, a random number, and a session is a pair of epochs. Both say hello whenever their port finds its
//! other end. Hello names the sender's epoch and the receiver's, as far as it is known; only a hello that names our own epoch is believed, because
//! only our peer knows it. If it comes from the peer that we have, the session goes on; if from another, all channels are reset and both
//! count from zero. Each other frame carries a number derived from both epochs, and is skipped if that is another session's.
//!
//! **Nothing is lost.** Frames of channels are numbered, and kept until they are acknowledged. Each frame that is sent says which number its sender
//! expects next. There are three ways in which a loss is noticed, and each leads to everything from the missing number on being sent again:
//!
//! - *Hello* after the port found its other end: it says what arrived.
//! - *Resend*, by a receiver that sees a number further on than the one it expects; once for each gap.
//! - *Probe*, by a sender whose frames are not acknowledged for a while. As nothing overtakes, what was sent before the probe and is not acknowledged by
//!   its answer was lost: so a peer that is only slow, or paused, is never sent anything twice.
//!
//! **A slow channel does not stall the others.** What may be on its way on a channel is bounded by credit, and the receiver always has room for that.
//! So frames are acknowledged when they arrive, not when they are read, and what is kept to be sent again is bounded for all channels together. The
//! driver takes bytes from sockets only as the port takes frames ([`Link::wants_data`]), so that channels share the port evenly, and the link's
//! control frames never wait for more than [`MAX_UNSENT_LEN`].
//!
//! **A hostile peer.** Damage is the port's doing, and skipped. A whole frame of our session that breaks the protocol is the peer's: it ends the session
//! ([`Event::Ended`]), our epoch with it, and there is no other for a while.

mod channel;
mod outgoing;
mod receive;
mod timers;
mod transmit;

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use wire::serial::{
    Channel as WireChannel, Decoder, Hello, MAX_FRAME_LEN, Message, Refusal, RefusalKind,
    ResetReason, session,
};

use crate::port::{Counters, Options};
use channel::Channel;
use outgoing::{Frame, Outgoing};
pub use outgoing::{MAX_FRAMES, MAX_REPLAY_LEN, MAX_UNSENT_LEN};
use timers::Timers;

/// The largest window of a channel, in bytes.
pub const MAX_WINDOW: u32 = 1024 * 1024;

/// The smallest window of a channel, in bytes.
pub const MIN_WINDOW: u32 = 4096;

/// A channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChannelId {
    is_ours: bool,
    number: u32,
}

impl ChannelId {
    /// As we name it in a frame.
    fn to_wire(self) -> WireChannel {
        WireChannel {
            opened_by_sender: self.is_ours,
            number: self.number,
        }
    }

    /// As the peer names it in a frame.
    fn from_wire(channel: WireChannel) -> ChannelId {
        ChannelId {
            is_ours: !channel.opened_by_sender,
            number: channel.number,
        }
    }
}

/// What the peer did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    /// There is a session: channels can be opened.
    Came,
    /// The port found its other end again, and the session goes on.
    Resumed,
    /// Nothing has been acknowledged for some seconds. The session goes on.
    Silent,
    /// After [`Event::Silent`]: the peer speaks again.
    Speaks,
    /// The session is over; there are no channels any more.
    Ended(String),
    /// The other end has another version of the protocol, so that there is no session. Reported once.
    OtherVersion(u16),
    /// The peer opens a channel: to be answered with [`Link::accept`] or [`Link::refuse`].
    Incoming {
        /// The channel.
        channel: ChannelId,
        /// The port that it is for.
        port: u32,
    },
    /// A channel of ours is open.
    Opened(ChannelId),
    /// A channel of ours was refused, and is gone.
    Refused(ChannelId, Refusal),
    /// Bytes of a channel, no more than its window has left: [`Link::payload`]. [`Link::consumed`] says when there is room for more.
    Data(ChannelId),
    /// There will be no more bytes.
    End(ChannelId),
    /// The peer takes no more bytes.
    Stopped(ChannelId),
    /// The channel is gone.
    Reset(ChannelId, ResetReason),
}

/// The peer of a session.
#[derive(Debug, Clone, Copy)]
struct Peer {
    epoch: u64,
    /// What our frames carry, and what its frames do.
    session_out: u32,
    session_in: u32,
    /// The connection for which its last hello asked, and was answered.
    connection: Option<u32>,
    /// What we may send on a new channel.
    window: u32,
}

/// What is to be said when there is room. Flags, not a queue: however often something is asked for it is said once.
#[derive(Debug, Default)]
struct Due {
    hello: bool,
    acknowledgement: bool,
    resend: bool,
    probe: bool,
    /// The token of the probe.
    answer: Option<u64>,
}

/// One end of a link.
#[derive(Debug)]
pub struct Link {
    options: Options,
    epoch: u64,
    peer: Option<Peer>,
    /// The next hello's receiver, as far as we know.
    greeted: u64,
    is_connected: bool,
    /// How often the port found its other end.
    connection: u32,
    /// The port found its other end, and the peer has not said yet what it has received.
    awaits_hello: bool,
    /// [`Event::Silent`] was the last word about that.
    is_silent: bool,
    /// The other side speaks another version, which was said.
    told_of_version: bool,
    decoder: Decoder,
    has_received: bool,
    outgoing: Outgoing,
    /// The number of the frame that we expect next.
    expected: u64,
    /// What arrived since we last acknowledged.
    owed_frames: usize,
    owed_bytes: usize,
    /// A resend was asked for, and the missing frame has not arrived yet.
    has_asked: bool,
    due: Due,
    timers: Timers,
    channels: BTreeMap<ChannelId, Channel>,
    /// How many channels were opened in this session, by us and by the peer.
    opened: [u32; 2],
    events: VecDeque<Event>,
    /// What is being written to the port.
    staged: Vec<u8>,
    written: usize,
    /// Whether numbered frames are in it.
    has_staged_frames: bool,
    counters: Counters,
}

impl Link {
    /// A link that is connected to nothing. `epoch` is an unpredictable random number.
    pub fn new(epoch: u64, options: Options) -> Link {
        let options = Options {
            window: options.window.clamp(MIN_WINDOW, MAX_WINDOW),
            ..options
        };
        Link {
            options,
            epoch: epoch.max(1),
            peer: None,
            greeted: 0,
            is_connected: false,
            connection: 0,
            awaits_hello: false,
            is_silent: false,
            told_of_version: false,
            decoder: Decoder::new(),
            has_received: false,
            outgoing: Outgoing::default(),
            expected: 0,
            owed_frames: 0,
            owed_bytes: 0,
            has_asked: false,
            due: Due::default(),
            timers: Timers::default(),
            channels: BTreeMap::new(),
            opened: [0; 2],
            events: VecDeque::new(),
            staged: Vec::with_capacity(MAX_FRAME_LEN),
            written: 0,
            has_staged_frames: false,
            counters: Counters::default(),
        }
    }

    /// The port has found its other end.
    pub fn connected(&mut self, now: Instant) {
        self.disconnected(now);
        self.is_connected = true;
        self.awaits_hello = true;
        self.connection = self.connection.wrapping_add(1);
        self.counters.connections += 1;
        self.timers.lost = None;
        if !self.is_muted(now) {
            self.due.hello = true;
            self.timers.start_greeting(now);
        }
    }

    /// The port has lost its other end.
    pub fn disconnected(&mut self, now: Instant) {
        if !self.is_connected {
            return;
        }
        self.is_connected = false;
        self.decoder.restart();
        self.staged.clear();
        self.written = 0;
        self.due = Due::default();
        self.timers.stop_all_but_mute();
        if self.peer.is_some() {
            self.timers.lost = Some(now + self.options.patience);
        }
    }

    /// Whether channels can be opened.
    pub fn has_peer(&self) -> bool {
        self.peer.is_some()
    }

    /// Whether the port has its other end.
    pub fn is_connected(&self) -> bool {
        self.is_connected
    }

    /// What was counted.
    pub fn counters(&self) -> Counters {
        let discarded = self.decoder.discarded();
        Counters {
            replayed_frames: self.outgoing.replayed,
            discarded_bytes: discarded.bytes,
            damaged_frames: discarded.frames,
            ..self.counters
        }
    }

    /// Whether the channel is not over yet.
    pub fn has_channel(&self, id: ChannelId) -> bool {
        self.channels.contains_key(&id)
    }

    /// Opens a channel.
    ///
    /// # Errors
    /// There is no peer, or there are too many channels.
    pub fn open(&mut self, port: u32) -> Result<ChannelId, Refusal> {
        let Some(peer) = self.peer else {
            let words = "the other side of the serial port does not answer";
            return Err(Refusal::new(RefusalKind::NotConnected, words));
        };
        let number = self.opened[0];
        if self.channels.len() >= self.options.channels || number == u32::MAX || self.is_full() {
            let words = format!(
                "{} channels are open on this serial port, which is the limit",
                self.options.channels
            );
            return Err(Refusal::new(RefusalKind::Busy, words));
        }
        self.opened[0] += 1;
        let id = ChannelId {
            is_ours: true,
            number,
        };
        self.channels
            .insert(id, Channel::new(peer.window, self.options.window));
        self.send(id, &Message::Open { port });
        Ok(id)
    }

    /// Takes a channel that the peer opens.
    pub fn accept(&mut self, id: ChannelId) {
        if let Some(channel) = self.channels.get_mut(&id) {
            channel.is_open = true;
            self.counters.channels += 1;
            self.send(id, &Message::Opened);
        }
    }

    /// Refuses a channel that the peer opens.
    pub fn refuse(&mut self, id: ChannelId, refusal: Refusal) {
        if self.channels.remove(&id).is_some() {
            self.counters.refused_channels += 1;
            self.send(id, &Message::Refused(refusal));
        }
    }

    /// Whether the port takes more than there is to send, so that bytes should be fetched from a channel's source.
    pub fn wants_data(&self) -> bool {
        self.is_connected && !self.awaits_hello && self.peer.is_some() && self.outgoing.wants_data()
    }

    /// How many bytes may be sent on this channel in one frame now, as far as its credit goes.
    pub fn credit(&self, id: ChannelId) -> usize {
        self.channels.get(&id).map_or(0, Channel::sendable)
    }

    /// Sends bytes on a channel: as many as `fill` writes into the space that it is given, which is what may be sent, and at least one byte. How many
    /// there were; 0 also if nothing may be sent.
    ///
    /// # Errors
    /// Those of `fill`.
    pub fn send_with<E>(
        &mut self,
        id: ChannelId,
        fill: impl FnOnce(&mut [u8]) -> Result<usize, E>,
    ) -> Result<Option<usize>, E> {
        let Some(channel) = self.channels.get_mut(&id) else {
            return Ok(None);
        };
        let limit = channel.sendable();
        if limit == 0 || !self.outgoing.wants_data() {
            return Ok(None);
        }
        let count = self.outgoing.push_data(id.to_wire(), limit, fill)?;
        channel.spend(count);
        self.counters.sent_bytes += count as u64;
        Ok(Some(count))
    }

    /// Says that no more bytes will be sent on this channel.
    pub fn end(&mut self, id: ChannelId) {
        if let Some(channel) = self.channels.get_mut(&id) {
            if !channel.is_sending_over {
                channel.is_sending_over = true;
                self.send(id, &Message::End);
                self.forget_if_over(id);
            }
        }
    }

    /// Says that no more bytes are taken from this channel.
    pub fn stop(&mut self, id: ChannelId) {
        if let Some(channel) = self.channels.get_mut(&id) {
            if !channel.is_receiving_over {
                channel.is_receiving_over = true;
                channel.is_stopped = true;
                self.send(id, &Message::Stop);
                self.forget_if_over(id);
            }
        }
    }

    /// Ends a channel in both directions.
    pub fn reset(&mut self, id: ChannelId, reason: ResetReason) {
        if self.channels.remove(&id).is_some() {
            self.counters.reset_channels += 1;
            self.send(id, &Message::Reset(reason));
        }
    }

    /// So many bytes of [`Event::Data`] are out of the way.
    pub fn consumed(&mut self, id: ChannelId, count: usize) {
        let credit = match self.channels.get_mut(&id) {
            Some(channel) => channel.consume(count, self.options.window),
            None => None,
        };
        if let Some(bytes) = credit {
            self.send(id, &Message::Credit { bytes });
        }
    }

    /// Whether the peer has acknowledged so little that nothing more can be kept for it.
    fn is_full(&self) -> bool {
        self.outgoing.len() >= MAX_FRAMES
    }

    fn send(&mut self, id: ChannelId, message: &Message) {
        let mut payload = Vec::new();
        message.write_payload(&mut payload);
        self.outgoing
            .push(Frame::new(message.kind(), id.to_wire(), payload));
    }

    fn forget_if_over(&mut self, id: ChannelId) {
        if self.channels.get(&id).is_some_and(Channel::is_over) {
            self.channels.remove(&id);
        }
    }

    /// Ends the session, and our epoch, because of something that the peer did.
    fn violation(&mut self, words: impl Into<String>, now: Instant) {
        self.counters.violations += 1;
        self.end_session(words.into());
        self.renew_epoch();
        self.timers.mute(now);
    }

    fn renew_epoch(&mut self) {
        self.epoch = self.epoch.wrapping_add(1).max(1);
    }

    fn end_session(&mut self, words: String) {
        let Some(peer) = self.peer.take() else {
            return;
        };
        self.greeted = peer.epoch;
        self.is_silent = false;
        self.counters.reset_channels += self.channels.len() as u64;
        self.channels.clear();
        self.opened = [0; 2];
        self.outgoing.clear();
        self.expected = 0;
        (self.owed_frames, self.owed_bytes) = (0, 0);
        self.has_asked = false;
        self.due = Due {
            hello: self.due.hello,
            ..Due::default()
        };
        self.timers.end_session();
        // What is partly written goes on, so that what follows begins where a frame begins.
        self.events.push_back(Event::Ended(words));
    }

    fn start_session(&mut self, hello: &Hello) {
        self.peer = Some(Peer {
            epoch: hello.epoch,
            session_out: session(self.epoch, hello.epoch),
            session_in: session(hello.epoch, self.epoch),
            connection: hello.wants_answer.then_some(hello.connection),
            window: hello.window.min(MAX_WINDOW),
        });
        self.greeted = 0;
        self.counters.sessions += 1;
        self.events.push_back(Event::Came);
    }

    fn is_muted(&self, now: Instant) -> bool {
        self.timers.muted.is_some_and(|until| now < until)
    }

    /// When [`Link::handle_timeout`] should be called, if nothing else happens.
    pub fn poll_at(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// A time has come that [`Link::poll_at`] gave. There may be events and output afterwards.
    pub fn handle_timeout(&mut self, now: Instant) {
        let over = |timer: &mut Option<Instant>| timer.take_if(|at| *at <= now).is_some();
        if over(&mut self.timers.muted) || over(&mut self.timers.greet) {
            let is_needed = self.is_connected && (self.awaits_hello || self.peer.is_none());
            if is_needed && !self.is_muted(now) {
                self.due.hello = true;
                self.timers.greet_again(now);
            }
        }
        if over(&mut self.timers.acknowledge) {
            self.due.acknowledgement = true;
        }
        if over(&mut self.timers.probe) && self.outgoing.has_sent() {
            // While the port takes nothing, neither would it take a probe.
            self.due.probe = self.written == self.staged.len();
            self.timers.probe_again(now);
            if self.timers.is_probing_in_vain() && !std::mem::replace(&mut self.is_silent, true) {
                self.events.push_back(Event::Silent);
            }
        }
        if over(&mut self.timers.stalled) {
            self.decoder.give_up_if_overtaken();
        }
        if over(&mut self.timers.lost) {
            let words = format!(
                "the port had no other end for {} seconds",
                self.options.patience.as_secs()
            );
            self.end_session(words);
            self.renew_epoch();
        }
    }
}

/// The largest wait after which an acknowledgement is sent that nothing else carries.
const ACKNOWLEDGE_AFTER: Duration = Duration::from_millis(50);

/// How many bytes, and how many frames, may be received before they are acknowledged at once.
const ACKNOWLEDGE_BYTES: usize = 128 * 1024;
const ACKNOWLEDGE_FRAMES: usize = 32;

#[cfg(test)]
mod tests;
