//! The driver's thread.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use wire::serial::{Refusal, RefusalKind, ResetReason, VERSION};

use super::line::{Change, Line, Moved};
use super::socket::Socket;
use super::{Dial, Shared};
use crate::link::{ChannelId, Event, Link};
use crate::port::{Options, PeerEvent, Port, Status};

/// How often the port is read, and how often it is written, before the other things have their turn.
const READS_A_TURN: usize = 16;
const ROUNDS_A_TURN: usize = 16;

/// How long a driver that is stopped waits for its last words to be taken.
const PARTING_TIME: Duration = Duration::from_millis(500);

pub(super) struct Runner {
    port: Box<dyn Port>,
    line: Line,
    link: Link,
    /// Sockets of channels that the link knows.
    sockets: BTreeMap<ChannelId, Socket>,
    /// Sockets of channels that are over, and whose last bytes their programs have not taken yet. Together with the former as many as options allow.
    parting: Vec<Socket>,
    /// Whose turn was last when bytes were fetched.
    last_served: Option<ChannelId>,
    options: Options,
    shared: Arc<Shared>,
}

/// What a polled descriptor belongs to.
#[derive(Clone, Copy)]
enum Polled {
    Wake,
    Line,
    Channel(ChannelId),
    Parting(usize),
}

impl Runner {
    pub(super) fn new(
        port: Box<dyn Port>,
        options: Options,
        shared: Arc<Shared>,
    ) -> io::Result<Runner> {
        let mut epoch = [0; 8];
        rustix::rand::getrandom(&mut epoch, rustix::rand::GetRandomFlags::empty())?;
        Ok(Runner {
            port,
            line: Line::new(),
            link: Link::new(u64::from_ne_bytes(epoch), options),
            sockets: BTreeMap::new(),
            parting: Vec::new(),
            last_served: None,
            options,
            shared,
        })
    }

    pub(super) fn run(mut self) {
        let mut last_words = None;
        loop {
            let now = Instant::now();
            if last_words.is_none() && self.shared.is_stopping.load(Ordering::Acquire) {
                last_words = Some(now + PARTING_TIME);
                self.part();
            }
            for dial in self.shared.take_dials() {
                self.dial(dial);
            }
            self.advance_line(now);
            let mut is_busy = self.read_port(now);
            is_busy |= self.feed_port(now);
            if self.link.poll_at().is_some_and(|at| at <= now) {
                self.link.handle_timeout(now);
                self.take_events(now);
                is_busy = true;
            }
            self.publish();
            if let Some(until) = last_words {
                if self.link.is_flushed() || !self.line.is_connected() || now >= until {
                    // Dials that came too late are refused.
                    self.part();
                    return;
                }
            }
            #[cfg(test)]
            self.shared.turns.fetch_add(1, Ordering::Relaxed);
            if self.sleep(is_busy, last_words).is_err() {
                // The system has no memory for a moment.
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }

    /// Resets all channels, and refuses those that wait.
    fn part(&mut self) {
        for (id, socket) in std::mem::take(&mut self.sockets) {
            self.link.reset(id, ResetReason::Stopped);
            refuse(socket, "the serial port is being closed");
        }
        for dial in self.shared.take_dials() {
            let words = "the serial port is being closed";
            (dial.answered)(Err(Refusal::new(RefusalKind::NotConnected, words)));
        }
    }

    fn dial(&mut self, dial: Dial) {
        let opened = self.check_room().and_then(|()| {
            rustix::io::ioctl_fionbio(&dial.stream.socket, true)
                .map_err(|error| Refusal::new(RefusalKind::Failed, error.to_string()))?;
            self.link.open(dial.port)
        });
        match opened {
            Ok(id) => {
                let socket = Socket::new(dial.stream, Some(dial.answered));
                self.sockets.insert(id, socket);
            }
            Err(refusal) => (dial.answered)(Err(refusal)),
        }
    }

    fn check_room(&self) -> Result<(), Refusal> {
        if self.sockets.len() + self.parting.len() < self.options.channels {
            return Ok(());
        }
        let words = format!(
            "{} connections are open on this serial port, which is the limit",
            self.options.channels
        );
        Err(Refusal::new(RefusalKind::Busy, words))
    }

    fn advance_line(&mut self, now: Instant) {
        match self.line.advance(&mut *self.port, now) {
            Change::None => {}
            Change::Connected => self.link.connected(now),
            Change::Problem(words) => self.port.on_peer(PeerEvent::NoPort(words)),
        }
    }

    fn lost(&mut self, now: Instant) {
        self.link.disconnected(now);
        self.port.on_peer(PeerEvent::Disconnected);
    }

    /// Takes what the port has: whether there may be more.
    fn read_port(&mut self, now: Instant) -> bool {
        for _ in 0..READS_A_TURN {
            if !self.line.has_input() {
                return false;
            }
            match self.line.read(self.link.space(), now) {
                Moved::Some(count) => {
                    self.link.received(count);
                    self.take_events(now);
                }
                Moved::Nothing => {}
                Moved::Lost => {
                    self.lost(now);
                    return true;
                }
            }
        }
        true
    }

    fn take_events(&mut self, now: Instant) {
        while let Some(event) = self.link.next_event(now) {
            match event {
                Event::Data(id) => {
                    if let Some(socket) = self.sockets.get_mut(&id) {
                        let taken = socket.deliver(self.link.payload());
                        self.delivered(id, taken);
                    }
                }
                Event::End(id) => {
                    if let Some(socket) = self.sockets.get_mut(&id) {
                        socket.has_ended = true;
                        let taken = socket.flush();
                        self.delivered(id, taken);
                    }
                }
                Event::Stopped(id) => {
                    if let Some(socket) = self.sockets.get_mut(&id) {
                        socket.stop_source();
                    }
                    self.settle(id);
                }
                Event::Opened(id) => {
                    if let Some(socket) = self.sockets.get_mut(&id) {
                        socket.is_readable = true;
                        if let Some(answered) = socket.answered.take() {
                            answered(Ok(()));
                        }
                    }
                }
                Event::Refused(id, refusal) => {
                    let socket = self.sockets.remove(&id);
                    if let Some(answered) = socket.and_then(|mut socket| socket.answered.take()) {
                        answered(Err(refusal));
                    }
                }
                Event::Reset(id, reason) => {
                    if let Some(socket) = self.sockets.remove(&id) {
                        refuse(socket, &reason.to_string());
                    }
                }
                Event::Incoming { channel, port } => self.accept(channel, port),
                Event::Came => self.port.on_peer(PeerEvent::Came),
                Event::Resumed => self.port.on_peer(PeerEvent::Resumed),
                Event::Silent => self.port.on_peer(PeerEvent::Silent),
                Event::Speaks => self.port.on_peer(PeerEvent::Speaks),
                Event::Ended(words) => self.end_session(words),
                Event::OtherVersion(version) => {
                    let words = format!(
                        "the other side speaks version {version} of the serial link, this one speaks {VERSION}: update the older one"
                    );
                    self.port.on_peer(PeerEvent::NoPort(words));
                }
            }
        }
    }

    /// A socket has taken bytes, or will take none.
    fn delivered(&mut self, id: ChannelId, taken: Result<usize, Errno>) {
        match taken {
            Ok(count) => self.link.consumed(id, count),
            Err(_) => {
                if let Some(socket) = self.sockets.get_mut(&id) {
                    socket.deafen();
                }
                self.link.stop(id);
            }
        }
        self.settle(id);
    }

    /// Lets go of a socket whose channel is over.
    fn settle(&mut self, id: ChannelId) {
        if self.link.has_channel(id) {
            return;
        }
        if let Some(socket) = self.sockets.remove(&id) {
            if socket.has_pending() {
                self.parting.push(socket);
            }
        }
    }

    fn accept(&mut self, id: ChannelId, port: u32) {
        let accepted = self.check_room().and_then(|()| {
            let stream = self.port.accept(port)?;
            rustix::io::ioctl_fionbio(&stream.socket, true)
                .map_err(|error| Refusal::new(RefusalKind::Failed, error.to_string()))?;
            Ok(stream)
        });
        match accepted {
            Ok(stream) => {
                let mut socket = Socket::new(stream, None);
                socket.is_readable = true;
                self.sockets.insert(id, socket);
                self.link.accept(id);
            }
            Err(refusal) => self.link.refuse(id, refusal),
        }
    }

    fn end_session(&mut self, words: String) {
        for (_, socket) in std::mem::take(&mut self.sockets) {
            // All that was sent to it has arrived, so it will be delivered.
            if socket.has_ended && socket.has_pending() {
                self.parting.push(socket);
            } else {
                refuse(socket, &words);
            }
        }
        self.port.on_peer(PeerEvent::Ended(words));
    }

    /// Fetches from sockets what the port takes, and writes it: whether there may be more.
    fn feed_port(&mut self, now: Instant) -> bool {
        for _ in 0..ROUNDS_A_TURN {
            let has_fetched = self.fetch();
            let mut has_written = false;
            while self.line.takes_output() {
                let output = self.link.output();
                if output.is_empty() {
                    break;
                }
                match self.line.write(output, now) {
                    Moved::Some(count) => {
                        self.link.advance_output(count, now);
                        has_written = true;
                    }
                    Moved::Nothing => {}
                    Moved::Lost => {
                        self.lost(now);
                        return true;
                    }
                }
            }
            if !has_fetched && !has_written {
                return false;
            }
        }
        true
    }

    /// One frame from each socket that has something, as far as the link wants it, beginning behind the one that was last.
    fn fetch(&mut self) -> bool {
        if !self.link.wants_data() {
            return false;
        }
        let last = self.last_served;
        let is_ready = |(id, socket): (&ChannelId, &Socket)| {
            let ready = socket.is_readable && !socket.is_source_over && socket.answered.is_none();
            ready.then_some(*id)
        };
        let (mut ready, before): (Vec<_>, Vec<_>) = self
            .sockets
            .iter()
            .filter_map(is_ready)
            .partition(|id| Some(*id) > last);
        ready.extend(before);
        let mut has_fetched = false;
        for id in ready {
            if !self.link.wants_data() {
                break;
            }
            has_fetched |= self.fetch_from(id);
        }
        has_fetched
    }

    fn fetch_from(&mut self, id: ChannelId) -> bool {
        let Some(socket) = self.sockets.get_mut(&id) else {
            return false;
        };
        match self.link.send_with(id, |space| socket.read(space)) {
            // No credit: what gives it wakes the thread.
            Ok(None) => return false,
            // An end that is none.
            Ok(Some(0)) if socket.was_cut() => {
                self.sockets.remove(&id);
                self.link.reset(id, ResetReason::Aborted);
            }
            Ok(Some(0)) => {
                socket.is_source_over = true;
                self.link.end(id);
            }
            Ok(Some(_)) => {}
            Err(Errno::AGAIN) => {
                socket.is_readable = false;
                return false;
            }
            Err(_) => {
                self.sockets.remove(&id);
                self.link.reset(id, ResetReason::Aborted);
            }
        }
        self.last_served = Some(id);
        self.settle(id);
        true
    }

    /// What poll has seen of a channel's socket.
    fn saw(&mut self, id: ChannelId, flags: PollFlags) {
        let Some(socket) = self.sockets.get_mut(&id) else {
            return;
        };
        let is_gone = flags.intersects(PollFlags::HUP | PollFlags::ERR | PollFlags::NVAL);
        if let Some(answered) = socket.answered.take_if(|_| is_gone) {
            let words = "the caller has gone before there was an answer";
            answered(Err(Refusal::new(RefusalKind::Failed, words)));
            self.sockets.remove(&id);
            self.link.reset(id, ResetReason::Aborted);
            return;
        }
        socket.is_readable |= is_gone || flags.contains(PollFlags::IN);
        if is_gone && socket.is_source_over {
            // It has said all, and listens no more.
            self.delivered(id, Err(Errno::PIPE));
        } else if socket.has_pending() {
            let taken = socket.flush();
            self.delivered(id, taken);
        }
    }

    fn publish(&self) {
        let status = Status {
            is_connected: self.line.is_connected(),
            has_peer: self.link.has_peer(),
            channels: self.sockets.len(),
            counters: self.link.counters(),
        };
        let mut shown = self
            .shared
            .status
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        *shown = status;
    }

    /// Waits until there is something to do.
    fn sleep(&mut self, is_busy: bool, last_words: Option<Instant>) -> io::Result<()> {
        let has_output = !self.link.output().is_empty();
        let wants_data = self.link.wants_data();
        let mut owners = vec![Polled::Wake];
        let mut polled = vec![PollFd::new(&self.shared.wake, PollFlags::IN)];
        if let Some(line) = self.line.polled(&*self.port, has_output) {
            owners.push(Polled::Line);
            polled.push(line);
        }
        for (id, socket) in &self.sockets {
            let may_send = wants_data && self.link.credit(*id) > 0;
            if let Some(flags) = socket.interest(may_send) {
                owners.push(Polled::Channel(*id));
                polled.push(PollFd::new(socket.descriptor(), flags));
            }
        }
        for (index, socket) in self.parting.iter().enumerate() {
            owners.push(Polled::Parting(index));
            polled.push(PollFd::new(socket.descriptor(), PollFlags::OUT));
        }
        let until = [self.link.poll_at(), self.line.poll_at(), last_words];
        let timeout = match is_busy {
            true => Some(Timespec::default()),
            false => until.into_iter().flatten().min().map(time_until),
        };
        match poll(&mut polled, timeout.as_ref()) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(()),
            Err(error) => return Err(error.into()),
        }
        let seen: Vec<_> = owners
            .into_iter()
            .zip(polled.iter().map(PollFd::revents))
            .filter(|(_, flags)| !flags.is_empty())
            .collect();
        // Later ones first, so that taking one out does not move those that are still to come.
        for (owner, flags) in seen.into_iter().rev() {
            match owner {
                Polled::Wake => {
                    let _ = rustix::io::read(&self.shared.wake, &mut [0; 8]);
                }
                Polled::Line => self.line.saw(flags),
                Polled::Channel(id) => self.saw(id, flags),
                Polled::Parting(index) => {
                    let socket = &mut self.parting[index];
                    if socket.flush().is_err() || !socket.has_pending() {
                        self.parting.swap_remove(index);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Closes a socket whose channel is over before its time.
fn refuse(mut socket: Socket, words: &str) {
    socket.cut();
    if let Some(answered) = socket.answered.take() {
        answered(Err(Refusal::new(RefusalKind::NotConnected, words)));
    }
}

/// How long until then, in the form that poll takes; rounded up, so that poll does not return a moment before and make the caller spin.
fn time_until(at: Instant) -> Timespec {
    let left = at.saturating_duration_since(Instant::now());
    let left = match left.is_zero() {
        true => left,
        false => left + Duration::from_millis(1),
    };
    Timespec {
        tv_sec: i64::try_from(left.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(left.subsec_nanos()),
    }
}
