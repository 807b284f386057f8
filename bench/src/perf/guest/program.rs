//! What programs in a lean guest do.

use std::time::Instant;

use wire::vsock::{MAX_PAYLOAD_LEN, Operation, SHUTDOWN_BOTH};

use super::stream::Stream;
use super::{Guest, Payload};
use crate::perf::control::MAX_METERS;

/// A program's task on its circuit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// Writes messages without end.
    Source,
    /// Reads without end, a message's length at most in one call.
    Sink,
    /// Sends back every message.
    Echo,
    /// Sends a message, waits for it to come back, and takes the time.
    Ping,
    /// Dials, hangs up when the answer has come, and dials again.
    Dialler,
    /// Hangs up when the peer does.
    Answerer,
    /// Keeps the circuit and does nothing.
    Idle,
}

/// What one call came to.
enum Progress {
    /// The program goes on when it is its turn again.
    More,
    /// It waits for credit, data, or an answer.
    Blocked,
    /// It waits for room in the transmit ring.
    RingFull,
}

impl Guest {
    /// Lets every program that can do something do one call's worth of it.
    pub(super) fn run_programs(&mut self) -> bool {
        let turns = self.runnable.len();
        for _ in 0..turns {
            let Some(index) = self.runnable.pop_front() else {
                break;
            };
            let Some(stream) = self.streams.get_mut(index) else {
                continue;
            };
            stream.queued = false;
            if !stream.connected {
                continue;
            }
            match self.turn(index) {
                Progress::More => self.wake(index),
                Progress::Blocked => {}
                Progress::RingFull => self.waiting_for_room.push(index),
            }
            // What has come meanwhile is an interrupt: it does not wait for the other programs.
            if self.receive.has_arrived() {
                break;
            }
        }
        turns > 0
    }

    fn turn(&mut self, index: usize) -> Progress {
        match self.streams[index].role {
            Role::Source => self.write(index),
            Role::Sink => self.read(index),
            Role::Echo | Role::Ping => self.converse(index),
            Role::Idle | Role::Dialler | Role::Answerer => self.discard(index),
        }
    }

    /// One call of `write`, or the rest of one.
    fn write(&mut self, index: usize) -> Progress {
        if self.streams[index].left_to_send == 0 {
            self.streams[index].left_to_send = self.options.message_len;
        }
        self.send_rest(index)
    }

    fn send_rest(&mut self, index: usize) -> Progress {
        while self.streams[index].left_to_send > 0 {
            let stream = &self.streams[index];
            let len = stream
                .left_to_send
                .min(MAX_PAYLOAD_LEN as usize)
                .min(stream.credit() as usize);
            if len == 0 {
                return Progress::Blocked;
            }
            if !self.transmit.has_room() {
                self.transmit.reclaim();
                if !self.transmit.has_room() {
                    return Progress::RingFull;
                }
            }
            self.send_data(index, len);
        }
        Progress::More
    }

    fn send_data(&mut self, index: usize, len: usize) {
        let stream = &mut self.streams[index];
        let position = stream.position_sent;
        let done = self.options.message_len.saturating_sub(stream.left_to_send);
        let header = stream.header(self.cid, Operation::Data, len as u32, 0);
        stream.left_to_send -= len;
        let buffer = stream.number % MAX_METERS;
        let payload = match self.options.payload {
            Payload::Untouched => &[],
            Payload::Checked => self.pattern.slice(stream.pattern_number(), position, len),
            Payload::Copied => {
                let buffer = user_buffer(&mut self.user_buffers, buffer, self.options.message_len);
                &buffer[done..done + len]
            }
        };
        self.transmit.push(&header, payload, len);
        self.transmit.publish();
        self.packets_out += 1;
    }

    /// One call of `read`.
    fn read(&mut self, index: usize) -> Progress {
        let len = self.receive_up_to(index, self.options.message_len);
        if len == 0 {
            return Progress::Blocked;
        }
        let stream = &self.streams[index];
        self.control.received[stream.meter()].add(len as u64);
        match stream.unread() {
            0 => Progress::Blocked,
            _ => Progress::More,
        }
    }

    /// Copies what has come to the program's buffer, and announces room by Linux's rule.
    fn receive_up_to(&mut self, index: usize, max: usize) -> usize {
        let stream = &mut self.streams[index];
        if stream.is_overrun() {
            self.control.fail("data came beyond the credit");
        }
        let pattern_number = stream.pattern_number();
        let position = stream.position_received;
        let buffer = user_buffer(
            &mut self.user_buffers,
            stream.number % MAX_METERS,
            self.options.message_len,
        );
        let mut total = 0;
        while total < max {
            let Some(packet) = stream.arrived.front_mut() else {
                break;
            };
            let len = packet.len.min(max - total);
            if self.options.payload != Payload::Untouched {
                let into = &mut buffer[total..total + len];
                self.receive
                    .copy_payload(packet.buffer, packet.offset, into);
            }
            packet.offset += len;
            packet.len -= len;
            total += len;
            if packet.len == 0 {
                self.receive.release(packet.buffer);
                stream.arrived.pop_front();
            }
        }
        stream.consumed(total);
        if self.options.payload == Payload::Checked
            && buffer[..total] != *self.pattern.slice(pattern_number, position, total)
        {
            self.control.fail(format!(
                "the bytes from {position} on came out wrong on stream {pattern_number}"
            ));
        }
        if self.streams[index].wants_to_announce() {
            self.send_control(index, Operation::CreditUpdate, 0);
        }
        total
    }

    /// Both ends of a ping-pong: a whole message in, a whole message out.
    fn converse(&mut self, index: usize) -> Progress {
        let message_len = self.options.message_len;
        let stream = &mut self.streams[index];
        let begins = stream.role == Role::Ping && stream.position_sent == 0;
        if begins {
            stream.left_to_send = message_len;
            stream.since = Instant::now();
        }
        if stream.left_to_send > 0 {
            if let Progress::RingFull = self.send_rest(index) {
                return Progress::RingFull;
            }
        }
        let missing = message_len - self.streams[index].message_received;
        let len = self.receive_up_to(index, missing);
        let stream = &mut self.streams[index];
        stream.message_received += len;
        if stream.message_received < message_len {
            return Progress::Blocked;
        }
        stream.message_received = 0;
        stream.left_to_send = message_len;
        if stream.role == Role::Ping {
            let now = Instant::now();
            if self.control.counts() {
                let elapsed = now - stream.since;
                self.latencies
                    .saturating_record(elapsed.as_nanos().try_into().unwrap_or(u64::MAX));
            }
            stream.since = now;
            self.control.operations[stream.meter()].add(1);
        }
        match self.send_rest(index) {
            Progress::RingFull => Progress::RingFull,
            _ => Progress::Blocked,
        }
    }

    fn discard(&mut self, index: usize) -> Progress {
        while self.receive_up_to(index, self.options.message_len) > 0 {}
        Progress::Blocked
    }

    pub(super) fn connected(&mut self, index: usize) {
        let stream = &mut self.streams[index];
        stream.connected = true;
        if stream.role != Role::Dialler {
            let Stream { key, role, .. } = *stream;
            self.control.operations[stream.meter()].add(1);
            if self.dials_left > 0 {
                self.dials_left -= 1;
                self.dial(key.peer_cid, key.peer_port, role);
            }
            return self.wake(index);
        }
        self.dialler_done(index);
    }

    /// The answer has come: hang up, and dial again.
    fn dialler_done(&mut self, index: usize) {
        let stream = &self.streams[index];
        let Stream { key, role, .. } = *stream;
        if self.control.counts() {
            let elapsed = stream.since.elapsed();
            self.latencies
                .saturating_record(elapsed.as_nanos().try_into().unwrap_or(u64::MAX));
        }
        self.control.operations[0].add(1);
        self.hang_up(index);
        self.dial(key.peer_cid, key.peer_port, role);
    }

    /// Linux's `close`: the socket goes when the peer confirms.
    fn hang_up(&mut self, index: usize) {
        self.streams[index].closing = true;
        self.send_control(index, Operation::Shutdown, SHUTDOWN_BOTH);
    }

    pub(super) fn received_shutdown(&mut self, index: usize, flags: u32) {
        let stream = &mut self.streams[index];
        stream.peer_shutdown |= flags & SHUTDOWN_BOTH;
        if stream.closing {
            return;
        }
        if stream.peer_is_done() {
            self.send_control(index, Operation::Reset, 0);
            return self.remove(index);
        }
        match stream.role {
            Role::Answerer => self.hang_up(index),
            _ => self.wake(index),
        }
    }

    pub(super) fn received_reset(&mut self, index: usize) {
        let stream = &self.streams[index];
        if !stream.closing && !matches!(stream.role, Role::Answerer) && !self.control.stopped() {
            let what = match stream.connected {
                true => "a circuit was reset",
                false => "a dial was refused",
            };
            self.control
                .fail(format!("{what} on stream {}", stream.number));
        }
        self.remove(index);
    }
}

/// The buffer of the program with this number.
fn user_buffer(buffers: &mut Vec<Vec<u8>>, number: usize, len: usize) -> &mut [u8] {
    while buffers.len() <= number {
        buffers.push(vec![0x5a; len]);
    }
    &mut buffers[number]
}
