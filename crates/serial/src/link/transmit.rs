//! What is said.

use std::time::Instant;

use wire::serial::{Channel, Header, Hello, Kind, MAX_FRAME_LEN, Message, VERSION, checksum};

use super::{Link, Peer};

impl Link {
    /// What is to be written to the port next, in one piece; empty if there is nothing.
    pub fn output(&mut self) -> &[u8] {
        if self.written == self.staged.len() {
            self.staged.clear();
            self.written = 0;
            self.stage();
        }
        &self.staged[self.written..]
    }

    /// So many bytes of the output were written.
    ///
    /// # Panics
    /// More than there were.
    pub fn advance_output(&mut self, count: usize, now: Instant) {
        assert!(
            count <= self.staged.len() - self.written,
            "the caller wrote more than there was"
        );
        self.written += count;
        if self.outgoing.has_sent() {
            // A probe that leaves must not put off the next one.
            match self.has_staged_frames {
                true => self.timers.restart_probe(now),
                false => self.timers.arm_probe(now),
            }
        }
    }

    /// Whether all that was said has arrived.
    pub fn is_flushed(&self) -> bool {
        self.outgoing.is_empty() && self.written == self.staged.len()
    }

    /// Fills the piece that is written next: first what the link itself has to say.
    fn stage(&mut self) {
        self.has_staged_frames = false;
        if !self.is_connected {
            return;
        }
        if std::mem::take(&mut self.due.hello) {
            self.stage_hello();
        }
        let Some(peer) = self.peer.filter(|_| !self.awaits_hello) else {
            return;
        };
        let before = self.staged.len();
        if let Some(token) = self.due.answer.take() {
            self.stage_own(Kind::Answer, peer, token);
        }
        if std::mem::take(&mut self.due.resend) {
            self.stage_own(Kind::Resend, peer, 0);
        }
        if std::mem::take(&mut self.due.probe) {
            let token = self.outgoing.probe();
            self.stage_own(Kind::Probe, peer, token);
        }
        let acknowledged = self.expected;
        let room = MAX_FRAME_LEN - self.staged.len();
        self.has_staged_frames =
            self.outgoing
                .stage(room, peer.session_out, acknowledged, &mut self.staged);
        if self.due.acknowledgement && self.staged.len() == before {
            self.stage_own(Kind::Acknowledge, peer, 0);
        }
        if self.staged.len() != before {
            self.due.acknowledgement = false;
            (self.owed_frames, self.owed_bytes) = (0, 0);
            self.timers.acknowledge = None;
        }
    }

    fn stage_hello(&mut self) {
        let known = self.peer.map_or(0, |peer| peer.epoch);
        let peer_epoch = if self.greeted == 0 {
            known
        } else {
            self.greeted
        };
        let is_for_peer = known != 0 && peer_epoch == known;
        let hello = Message::Hello(Hello {
            version: VERSION,
            wants_answer: self.awaits_hello || !is_for_peer,
            connection: self.connection,
            epoch: self.epoch,
            peer_epoch,
            window: self.options.window,
        });
        if known != 0 {
            self.greeted = 0;
        }
        let mut payload = Vec::new();
        hello.write_payload(&mut payload);
        let header = Header {
            kind: Kind::Hello,
            channel: Channel::default(),
            payload_len: payload.len(),
            session: 0,
            sequence: 0,
            acknowledged: if is_for_peer { self.expected } else { 0 },
            payload_crc: checksum(&payload),
        };
        self.staged.extend_from_slice(&header.to_bytes());
        self.staged.extend_from_slice(&payload);
    }

    fn stage_own(&mut self, kind: Kind, peer: Peer, token: u64) {
        let header = Header {
            kind,
            channel: Channel::default(),
            payload_len: 0,
            session: peer.session_out,
            sequence: token,
            acknowledged: self.expected,
            payload_crc: checksum(&[]),
        };
        self.staged.extend_from_slice(&header.to_bytes());
    }
}
