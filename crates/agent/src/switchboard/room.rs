//! The lines that the host has not taken yet, and the room that each user has among them.
//!
//! A request that leads to lines waits for room before it is taken. What follows from it (a call that was made or given up, a port at which a program listens no more) does not wait: each request that was
//! taken leads to a few lines, and there are so many at a time.

use std::collections::{HashMap, VecDeque};

use super::programs::is_privileged;

/// How much may wait in all, in bytes. What follows from the requests that were taken fits behind what they may fill.
const MAX_LEN: usize = 512 * 1024;

/// So much a user's lines may fill before its next request waits: what the host reads in a fraction of a second.
const MAX_LEN_OF_USER: usize = 16 * 1024;

/// So much there may be before the next request waits of any user, and so much more before one of root or the agent's own user does.
const MAX_LEN_BEFORE_REQUESTS: usize = 256 * 1024;
const RESERVE: usize = 2 * MAX_LEN_OF_USER;

/// The lines.
#[derive(Debug, Default)]
pub(super) struct Outgoing {
    bytes: Vec<u8>,
    /// Whose each is, and how much of it is left, in bytes.
    lines: VecDeque<(Option<u32>, usize)>,
    of_users: HashMap<u32, usize>,
}

impl Outgoing {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Whether a request of this user may be taken.
    pub(super) fn has_room(&self, user: u32) -> bool {
        let reserve = if is_privileged(user) { RESERVE } else { 0 };
        let own = self.of_users.get(&user).copied().unwrap_or(0);
        own < MAX_LEN_OF_USER && self.bytes.len() < MAX_LEN_BEFORE_REQUESTS + reserve
    }

    /// Adds a line, which a request of this user has led to, if one has. Not if there is no room at all.
    pub(super) fn push(&mut self, user: Option<u32>, line: &str) -> bool {
        if self.bytes.len() + line.len() > MAX_LEN {
            return false;
        }
        self.bytes.extend_from_slice(line.as_bytes());
        self.lines.push_back((user, line.len()));
        if let Some(user) = user {
            *self.of_users.entry(user).or_default() += line.len();
        }
        true
    }

    /// So many bytes are gone.
    pub(super) fn sent(&mut self, mut count: usize) {
        self.bytes.drain(..count);
        while count > 0 {
            let Some((user, len)) = self.lines.front_mut() else {
                return;
            };
            let gone = count.min(*len);
            (*len, count) = (*len - gone, count - gone);
            let (user, is_whole) = (*user, *len == 0);
            if is_whole {
                self.lines.pop_front();
            }
            let Some(user) = user else {
                continue;
            };
            match self.of_users.get_mut(&user) {
                Some(own) if *own > gone => *own -= gone,
                _ => drop(self.of_users.remove(&user)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// None of them is this test's own, nor root.
    const USER: u32 = 3_000_000;

    fn line(len: usize) -> String {
        "x".repeat(len)
    }

    #[test]
    fn a_user_has_its_room_and_others_have_theirs() {
        let mut outgoing = Outgoing::default();
        assert!(outgoing.push(Some(USER), &line(MAX_LEN_OF_USER - 1)));
        assert!(outgoing.has_room(USER));
        // What follows needs no room of its user's.
        assert!(outgoing.push(Some(USER), &line(100)));
        assert!(!outgoing.has_room(USER));
        assert!(outgoing.has_room(USER + 1) && outgoing.has_room(0));
        outgoing.sent(99);
        assert!(!outgoing.has_room(USER));
        outgoing.sent(1);
        assert!(outgoing.has_room(USER));
        outgoing.sent(MAX_LEN_OF_USER - 1);
        assert!(outgoing.is_empty() && outgoing.lines.is_empty() && outgoing.of_users.is_empty());
    }

    #[test]
    fn all_users_have_so_much_root_more_and_what_follows_the_rest() {
        let mut outgoing = Outgoing::default();
        assert!(outgoing.push(None, &line(MAX_LEN_BEFORE_REQUESTS - 1)));
        assert!(outgoing.has_room(USER));
        assert!(outgoing.push(None, "x"));
        assert!(!outgoing.has_room(USER) && outgoing.has_room(0));
        assert!(outgoing.push(None, &line(RESERVE)));
        assert!(!outgoing.has_room(0));
        assert!(outgoing.push(None, &line(MAX_LEN - outgoing.bytes.len())));
        assert!(!outgoing.push(None, "x"));
        outgoing.sent(MAX_LEN);
        assert!(outgoing.is_empty() && outgoing.has_room(USER));
    }
}
