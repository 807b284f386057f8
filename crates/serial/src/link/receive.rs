//! What arrives.

use std::time::Instant;

use wire::serial::{Header, Hello, Message, Refusal, RefusalKind, VERSION};

use super::timers::STALLED_AFTER;
use super::{
    ACKNOWLEDGE_AFTER, ACKNOWLEDGE_BYTES, ACKNOWLEDGE_FRAMES, Channel, ChannelId, Event, Link,
};

/// What a frame leads to.
enum Outcome {
    /// Events, or nothing.
    Done,
    /// Its payload is for this channel.
    Data(ChannelId),
}

impl Link {
    /// Where to read to from the port; never empty once [`Link::next_event`] has given nothing.
    pub fn space(&mut self) -> &mut [u8] {
        self.decoder.space()
    }

    /// So many bytes were read from the port.
    ///
    /// # Panics
    /// More than there was space for.
    pub fn received(&mut self, count: usize) {
        self.decoder.advance(count);
        self.has_received |= count > 0;
    }

    /// The next thing that the peer did.
    pub fn next_event(&mut self, now: Instant) -> Option<Event> {
        loop {
            if let Some(event) = self.events.pop_front() {
                return Some(event);
            }
            let Some(header) = self.decoder.next_frame() else {
                self.rest(now);
                return None;
            };
            if let Outcome::Data(channel) = self.take(&header, now) {
                self.counters.received_bytes += header.payload_len as u64;
                return Some(Event::Data(channel));
            }
        }
    }

    /// The bytes of the [`Event::Data`] that was given last, until the next event is asked for.
    pub fn payload(&self) -> &[u8] {
        self.decoder.payload()
    }

    /// Everything that arrived has been read.
    fn rest(&mut self, now: Instant) {
        if std::mem::take(&mut self.has_received) {
            let is_inside = self.decoder.is_inside_frame();
            self.timers.stalled = is_inside.then(|| now + STALLED_AFTER);
        }
        if self.owed_frames >= ACKNOWLEDGE_FRAMES || self.owed_bytes >= ACKNOWLEDGE_BYTES {
            self.due.acknowledgement = true;
        } else if self.owed_frames > 0
            && !self.due.acknowledgement
            && self.timers.acknowledge.is_none()
        {
            self.timers.acknowledge = Some(now + ACKNOWLEDGE_AFTER);
        }
    }

    fn take(&mut self, header: &Header, now: Instant) -> Outcome {
        let message = Message::parse(header, self.decoder.payload());
        if let Ok(Message::Hello(hello)) = &message {
            self.take_hello(hello, header.acknowledged, now);
            return Outcome::Done;
        }
        let is_ours = self
            .peer
            .is_some_and(|peer| peer.session_in == header.session);
        if !is_ours || self.is_muted(now) {
            self.counters.stale_frames += 1;
            self.meet_stranger(now);
            return Outcome::Done;
        }
        let message = match message {
            Ok(message) => message,
            Err(error) => {
                self.violation(error.to_string(), now);
                return Outcome::Done;
            }
        };
        if !self.acknowledged(header.acknowledged, now) {
            return Outcome::Done;
        }
        if std::mem::take(&mut self.is_silent) {
            self.events.push_back(Event::Speaks);
        }
        if header.kind.is_numbered() {
            return match self.is_next(header) {
                true => self.take_numbered(header, message, now),
                false => Outcome::Done,
            };
        }
        match message {
            Message::Probe => self.due.answer = Some(header.sequence),
            Message::Answer if self.outgoing.answered(header.sequence) => {
                self.counters.gaps += 1;
            }
            Message::Resend => self.outgoing.rewind(),
            // An acknowledgement has done its work.
            _ => {}
        }
        Outcome::Done
    }

    /// A frame from another epoch than the session's peer. It may be left over from an earlier session; or both sides have a session with a peer that
    /// is gone, because the hellos were lost. So a hello is sent now and then.
    fn meet_stranger(&mut self, now: Instant) {
        if self.peer.is_some() && !self.awaits_hello && self.timers.may_greet_stranger(now) {
            self.connection = self.connection.wrapping_add(1);
            self.awaits_hello = true;
            self.due.hello = true;
            self.timers.start_greeting(now);
        }
    }

    /// Takes note of what the peer has received. False if it cannot have.
    fn acknowledged(&mut self, expected: u64, now: Instant) -> bool {
        match self.outgoing.acknowledge(expected) {
            Some(is_news) => {
                if is_news {
                    match self.outgoing.has_sent() {
                        true => self.timers.restart_probe(now),
                        false => self.timers.probe = None,
                    }
                }
                true
            }
            None => {
                let words = "the other side acknowledges frames that were never sent";
                self.violation(words, now);
                false
            }
        }
    }

    /// Whether this is the numbered frame that is expected.
    fn is_next(&mut self, header: &Header) -> bool {
        if header.sequence < self.expected {
            self.counters.stale_frames += 1;
            // It was sent again because it was not known to have arrived.
            self.due.acknowledgement = true;
            return false;
        }
        if header.sequence > self.expected {
            self.counters.stale_frames += 1;
            if !self.has_asked {
                self.counters.gaps += 1;
                self.has_asked = true;
                self.due.resend = true;
            }
            return false;
        }
        self.expected += 1;
        self.has_asked = false;
        self.owed_frames += 1;
        self.owed_bytes += header.payload_len;
        true
    }

    fn take_hello(&mut self, hello: &Hello, acknowledged: u64, now: Instant) {
        if self.is_muted(now) || hello.epoch == self.epoch {
            // The latter is our own hello: something echoes.
            self.counters.stale_frames += 1;
            return;
        }
        if hello.version != VERSION {
            if !self.told_of_version {
                self.told_of_version = true;
                self.events.push_back(Event::OtherVersion(hello.version));
            }
            return;
        }
        let is_known = self.peer.is_some_and(|peer| peer.epoch == hello.epoch);
        if hello.peer_epoch != self.epoch {
            // The peer does not know our epoch, or the frame is forged: send our hello, and believe nothing before the peer has it.
            self.greeted = hello.epoch;
            self.due.hello |= hello.wants_answer || !is_known;
            return;
        }
        if is_known {
            return self.resume(hello, acknowledged, now);
        }
        if acknowledged != 0 {
            self.violation(
                "the other side begins with frames that were never sent",
                now,
            );
            return;
        }
        if self.peer.is_some() {
            self.end_session("the other side was restarted".to_owned());
        }
        self.awaits_hello = false;
        self.timers.greet = None;
        self.due.hello |= hello.wants_answer;
        self.start_session(hello);
    }

    /// A hello of the peer that we have.
    fn resume(&mut self, hello: &Hello, acknowledged: u64, now: Instant) {
        let has_reconnected = hello.wants_answer
            && self
                .peer
                .is_some_and(|peer| peer.connection != Some(hello.connection));
        if !self.acknowledged(acknowledged, now) {
            return;
        }
        if self.awaits_hello || has_reconnected {
            self.outgoing.rewind();
        }
        if let Some(peer) = self.peer.as_mut().filter(|_| hello.wants_answer) {
            peer.connection = Some(hello.connection);
            self.greeted = 0;
            self.due.hello = true;
        }
        if std::mem::take(&mut self.awaits_hello) {
            self.timers.greet = None;
            // Our own hello has asked for it.
            self.due.resend = false;
            self.events.push_back(Event::Resumed);
        }
    }

    fn take_numbered(&mut self, header: &Header, message: Message, now: Instant) -> Outcome {
        let id = ChannelId::from_wire(header.channel);
        if self.is_full() {
            self.violation("the other side does not acknowledge what it asks for", now);
            return Outcome::Done;
        }
        if let Message::Open { port } = message {
            self.take_open(id, port, now);
            return Outcome::Done;
        }
        let Some(channel) = self.channels.get_mut(&id) else {
            if id.number >= self.opened[usize::from(!id.is_ours)] {
                self.violation("a frame for a channel that was never opened", now);
            }
            // Otherwise it was on its way when the channel ended.
            return Outcome::Done;
        };
        match take_on_channel(channel, id, message, header.payload_len) {
            Ok(Taken::Data) => return Outcome::Data(id),
            Ok(Taken::Nothing) => {}
            Ok(Taken::Event(event)) => {
                match &event {
                    Event::Opened(_) => self.counters.channels += 1,
                    Event::Refused(..) => {
                        self.counters.refused_channels += 1;
                        self.channels.remove(&id);
                    }
                    Event::Reset(..) => {
                        self.counters.reset_channels += 1;
                        self.channels.remove(&id);
                    }
                    _ => self.forget_if_over(id),
                }
                self.events.push_back(event);
            }
            Err(words) => self.violation(words, now),
        }
        Outcome::Done
    }

    fn take_open(&mut self, id: ChannelId, port: u32, now: Instant) {
        if id.is_ours || id.number != self.opened[1] || id.number == u32::MAX {
            self.violation(
                "a channel is opened under a number that is not the next",
                now,
            );
            return;
        }
        self.opened[1] += 1;
        let window = self.peer.map_or(0, |peer| peer.window);
        let is_full = self.channels.len() >= self.options.channels;
        self.channels
            .insert(id, Channel::new(window, self.options.window));
        if is_full {
            let words = format!(
                "{} channels are open on this serial port, which is the limit",
                self.options.channels
            );
            self.refuse(id, Refusal::new(RefusalKind::Busy, words));
        } else {
            self.events.push_back(Event::Incoming { channel: id, port });
        }
    }
}

/// What a frame means for its channel.
enum Taken {
    Nothing,
    Data,
    Event(Event),
}

fn take_on_channel(
    channel: &mut Channel,
    id: ChannelId,
    message: Message,
    len: usize,
) -> Result<Taken, &'static str> {
    let is_answer = matches!(message, Message::Opened | Message::Refused(_));
    let is_awaited = match channel.is_open {
        true => !is_answer,
        false => id.is_ours && is_answer || matches!(message, Message::Reset(_)),
    };
    if !is_awaited {
        return Err("a channel is answered twice, or used before it is open");
    }
    let event = match message {
        Message::Data if channel.is_stopped => return Ok(Taken::Nothing),
        Message::Data if channel.is_receiving_over => return Err("data behind the end"),
        Message::Data => {
            return match channel.receive(len) {
                true => Ok(Taken::Data),
                false => Err("more data than there is credit for"),
            };
        }
        Message::Opened => {
            channel.is_open = true;
            Event::Opened(id)
        }
        Message::Refused(refusal) => Event::Refused(id, refusal),
        Message::End if channel.is_stopped => {
            return Ok(Taken::Nothing);
        }
        Message::End if channel.is_receiving_over => return Err("a second end"),
        Message::End => {
            channel.is_receiving_over = true;
            Event::End(id)
        }
        Message::Stop => {
            if channel.is_sending_over {
                return Ok(Taken::Nothing);
            }
            channel.is_sending_over = true;
            Event::Stopped(id)
        }
        Message::Reset(reason) => Event::Reset(id, reason),
        Message::Credit { bytes } => {
            return match channel.is_sending_over || channel.grant(bytes) {
                true => Ok(Taken::Nothing),
                false => Err("more credit than any window"),
            };
        }
        _ => return Ok(Taken::Nothing),
    };
    Ok(Taken::Event(event))
}
