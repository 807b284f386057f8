//! What one call sends, what it receives, and whether that is right.

use std::time::{Duration, Instant};

use crate::perf::pattern::Pattern;

use super::path::Path;
use super::tally::{Outcome, Policy, Tally};

/// How long a call may take from its dial to its end. Generous: the machine may be busy, and the soak of the lowest priority.
pub const PATIENCE: Duration = Duration::from_secs(90);

/// How often a standing circuit says something, and how much, in bytes.
pub const BEAT: (Duration, u64) = (Duration::from_secs(1), 1000);

/// How long egress waits for a request: a guest that the machine has kept waiting for longer is hung up on, and rightly.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// The most that is offered to a socket at once, in bytes.
const PIECE_LEN: u64 = 64 * 1024;

/// Bytes that are sent and must come back.
#[derive(Debug)]
pub struct Exchange {
    stream: usize,
    target: u64,
    is_last: bool,
    sent: u64,
    received: u64,
}

impl Exchange {
    /// A call with this number, which says how much is sent: mostly little, seldom more than any buffer on the way.
    pub fn short(number: u64) -> Exchange {
        let random = number.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
        let most = match random % 20 {
            0 => 512 << 10,
            1..=5 => 64 << 10,
            _ => 4 << 10,
        };
        let target = 1 + (random >> 8) % most;
        Exchange {
            is_last: true,
            ..Exchange::standing(number).with_target(target)
        }
    }

    /// A circuit that has nothing to say yet.
    pub fn standing(number: u64) -> Exchange {
        Exchange {
            stream: (number % 65_521) as usize,
            target: 0,
            is_last: false,
            sent: 0,
            received: 0,
        }
    }

    fn with_target(self, target: u64) -> Exchange {
        Exchange { target, ..self }
    }

    /// More is to be said.
    pub fn say(&mut self, len: u64) {
        self.target += len;
    }

    /// Nothing more is to be said.
    pub fn finish(&mut self) {
        self.is_last = true;
    }

    /// Whether nothing more is to be said.
    pub fn is_last(&self) -> bool {
        self.is_last
    }

    /// What is to be sent next, empty when all is.
    pub fn next<'a>(&self, pattern: &'a Pattern) -> &'a [u8] {
        let len = (self.target - self.sent).min(PIECE_LEN) as usize;
        pattern.slice(self.stream, self.sent, len)
    }

    /// So many of them were.
    pub fn sent(&mut self, len: usize) {
        self.sent += len as u64;
    }

    /// Whether the direction is to be shut down.
    pub fn has_said_all(&self) -> bool {
        self.is_last && self.sent == self.target
    }

    /// Whether all that was said has come back.
    pub fn is_answered(&self) -> bool {
        self.received == self.target
    }

    /// Compares what has come back.
    pub fn hear(&mut self, pattern: &Pattern, bytes: &[u8]) -> Result<(), String> {
        for piece in bytes.chunks(PIECE_LEN as usize) {
            if self.received + piece.len() as u64 > self.sent {
                return Err("more came back than was sent".to_owned());
            }
            if pattern.slice(self.stream, self.received, piece.len()) != piece {
                return Err("other bytes came back than were sent".to_owned());
            }
            self.received += piece.len() as u64;
        }
        Ok(())
    }

    /// The other side has ended.
    pub fn end(&self) -> Outcome {
        match self.is_last && self.is_answered() {
            true => Outcome::Echoed { bytes: self.target },
            false => Outcome::Failed("the end of the data came too early".to_owned()),
        }
    }
}

/// The policy when a call began, to judge how it ended.
#[derive(Debug, Clone, Copy)]
pub struct Judge {
    path: Path,
    before: Policy,
    began: Instant,
}

impl Judge {
    /// A call begins.
    pub fn new(path: Path, tally: &Tally) -> Judge {
        Judge {
            path,
            before: tally.policy(),
            began: Instant::now(),
        }
    }

    /// Whether it has taken too long.
    pub fn is_late(&self) -> bool {
        self.began.elapsed() > PATIENCE
    }

    /// It was refused.
    pub fn refused(&self, tally: &Tally, words: &str) -> Outcome {
        match self.verdict(tally) {
            None | Some(false) => Outcome::Denied,
            Some(true) => Outcome::Failed(format!("refused although allowed{words}")),
        }
    }

    /// It was accepted.
    ///
    /// # Errors
    /// When it must not have been.
    pub fn accepted(&self, tally: &Tally) -> Result<(), Outcome> {
        match self.verdict(tally) {
            None | Some(true) => Ok(()),
            Some(false) => Err(Outcome::Failed("let through although denied".to_owned())),
        }
    }

    /// Egress hung up without an answer.
    pub fn hung_up(&self) -> Outcome {
        match self.began.elapsed() >= REQUEST_TIMEOUT {
            true => Outcome::Late,
            false => Outcome::Failed("SOCKS hung up".to_owned()),
        }
    }

    /// It was cut.
    pub fn cut(&self, tally: &Tally, words: &str) -> Outcome {
        match self.verdict(tally) {
            // Also of a call that began while the policy changed, and ended before the reload was answered.
            None => Outcome::Cut,
            Some(_) => Outcome::Failed(format!("cut{words}")),
        }
    }

    /// What the policy says of the call; nothing if it may say either.
    fn verdict(&self, tally: &Tally) -> Option<bool> {
        match self.path {
            Path::Toggled if self.before != tally.policy() => None,
            Path::Toggled => self.before.allows(),
            _ => Some(true),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exchange_knows_its_bytes() {
        let pattern = Pattern::default();
        let mut exchange = Exchange::short(7);
        let whole = exchange.target;
        while !exchange.has_said_all() {
            let len = exchange.next(&pattern).len();
            exchange.sent(len);
        }
        assert!(matches!(exchange.end(), Outcome::Failed(_)));
        let mut position = 0;
        while position < whole {
            let len = (whole - position).min(1000) as usize;
            let bytes = pattern.slice(7, position, len);
            exchange.hear(&pattern, bytes).expect("they are the same");
            position += len as u64;
        }
        assert_eq!(exchange.end(), Outcome::Echoed { bytes: whole });
        assert!(exchange.hear(&pattern, &[0]).is_err());
    }

    #[test]
    fn a_wrong_byte_is_heard() {
        let pattern = Pattern::default();
        let mut exchange = Exchange::standing(3);
        exchange.say(2);
        exchange.sent(2);
        let wrong = pattern.slice(3, 0, 1)[0] ^ 1;
        assert!(exchange.hear(&pattern, &[wrong]).is_err());
    }

    #[test]
    fn only_the_toggled_path_may_be_denied_and_only_when_it_is() {
        let tally = Tally::default();
        let open = Judge::new(Path::Toggled, &tally);
        assert!(matches!(open.refused(&tally, ""), Outcome::Failed(_)));
        tally.change_policy();
        assert_eq!(open.refused(&tally, ""), Outcome::Denied);
        assert_eq!(open.cut(&tally, ""), Outcome::Cut);
        assert_eq!(open.accepted(&tally), Ok(()));
        let between = Judge::new(Path::Toggled, &tally);
        assert_eq!(between.cut(&tally, ""), Outcome::Cut);
        tally.change_policy();
        let shut = Judge::new(Path::Toggled, &tally);
        assert_eq!(shut.refused(&tally, ""), Outcome::Denied);
        assert!(shut.accepted(&tally).is_err());
        let other = Judge::new(Path::Egress, &tally);
        assert!(matches!(other.refused(&tally, ""), Outcome::Failed(_)));
        assert!(matches!(other.cut(&tally, ""), Outcome::Failed(_)));
    }
}
