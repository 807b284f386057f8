//! What is remembered of the sockets that stand in for a program's own, each by the number that the kernel gave it for its life (`SO_COOKIE`), which no other socket gets.
//!
//! A program does not say when it closes a stream, so the oldest are forgotten when there are too many, of the user with the most. A stream that is forgotten goes on; what it shows of its addresses is then
//! what the kernel shows.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::io::Errno;
use rustix::net::sockopt::socket_cookie;

use sys::supervise::{MAX_USERS, UserNumber};

use super::address::Family;
use crate::share::may_take;

/// So many are remembered.
const MAX_SOCKETS: usize = 16_384;

/// So many datagram sockets there may be, each of which costs a descriptor here. A user alone has 544 of them at most.
const MAX_DATAGRAM_SOCKETS: usize = 2048;

/// So many options of one socket are remembered. The programs' own kernels have fewer.
const MAX_OPTIONS: usize = 32;

/// A socket that stands in for one.
#[derive(Debug)]
pub(crate) struct Socket {
    /// Its caller.
    pub(crate) user: UserNumber,
    /// What the program asked for.
    pub(crate) family: Family,
    /// And of which kind.
    pub(crate) kind: Kind,
    /// The peer. A datagram socket: the last receiver.
    pub(crate) peer: Option<SocketAddr>,
    /// Its own address.
    pub(crate) own: Option<SocketAddr>,
    /// Why it was not connected, until the program asks (`SO_ERROR`).
    pub(crate) error: Option<Errno>,
    /// Options of TCP and IP that the program has set, each by its level and number.
    options: Vec<(u32, u32, Vec<u8>)>,
}

/// A kind of socket.
#[derive(Debug, Clone)]
pub(crate) enum Kind {
    /// TCP.
    Stream(Progress),
    /// UDP: the other end of the program's socket.
    Datagram(Arc<OwnedFd>),
}

/// How far a stream has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Progress {
    /// Nothing was asked of it yet.
    New,
    /// It is being connected.
    Connecting,
    /// It is a circuit.
    Connected,
    /// It was refused. Another socket has to take its place before it is connected again.
    Spent,
    /// It is a socket of the guest's own kernel, for its loopback.
    Local,
    /// It has an address of the guest's own, in a kernel without TCP, and perhaps listens.
    Bound,
}

impl Socket {
    pub(crate) fn new(user: UserNumber, family: Family, kind: Kind) -> Socket {
        Socket {
            user,
            family,
            kind,
            peer: None,
            own: None,
            error: None,
            options: Vec::new(),
        }
    }

    pub(crate) fn set_option(&mut self, level: u32, number: u32, value: Vec<u8>) {
        self.options.retain(|(l, n, _)| (*l, *n) != (level, number));
        if self.options.len() < MAX_OPTIONS {
            self.options.push((level, number, value));
        }
    }

    pub(crate) fn option(&self, level: u32, number: u32) -> Option<&[u8]> {
        let found = self
            .options
            .iter()
            .find(|(l, n, _)| (*l, *n) == (level, number));
        found.map(|(_, _, value)| &value[..])
    }

    pub(crate) fn options(&self) -> &[(u32, u32, Vec<u8>)] {
        &self.options
    }
}

/// All that are remembered.
#[derive(Debug, Default)]
pub(crate) struct Sockets {
    sockets: HashMap<u64, Socket>,
    /// Of each user the oldest first, with some that are forgotten.
    orders: [VecDeque<u64>; MAX_USERS],
    datagrams: [usize; MAX_USERS],
}

impl Sockets {
    /// Remembers a socket; it is given back if there is no room for its kind.
    pub(crate) fn add(&mut self, number: u64, socket: Socket) -> Result<(), Socket> {
        let user = socket.user;
        let is_datagram = matches!(socket.kind, Kind::Datagram(_));
        if is_datagram && !may_take(&self.datagrams, user, MAX_DATAGRAM_SOCKETS) {
            return Err(socket);
        }
        while self.sockets.len() >= MAX_SOCKETS || self.numbers() >= 2 * MAX_SOCKETS {
            let streams = |index: &usize| self.orders[*index].len() - self.datagrams[*index];
            let most = (0..MAX_USERS).max_by_key(streams).unwrap_or_default();
            match self.orders[most].pop_front() {
                // Its resolver answers as long as it is open, and there are few.
                Some(oldest) if self.is_datagram(oldest) => self.orders[most].push_back(oldest),
                Some(oldest) => drop(self.remove(oldest)),
                None => break,
            }
        }
        self.datagrams[user.index()] += usize::from(is_datagram);
        self.sockets.insert(number, socket);
        self.orders[user.index()].push_back(number);
        Ok(())
    }

    fn numbers(&self) -> usize {
        self.orders.iter().map(VecDeque::len).sum()
    }

    fn is_datagram(&self, number: u64) -> bool {
        let socket = self.sockets.get(&number);
        socket.is_some_and(|socket| matches!(socket.kind, Kind::Datagram(_)))
    }

    /// Forgets one.
    pub(crate) fn remove(&mut self, number: u64) -> Option<Socket> {
        let removed = self.sockets.remove(&number)?;
        let is_datagram = matches!(removed.kind, Kind::Datagram(_));
        self.datagrams[removed.user.index()] -= usize::from(is_datagram);
        Some(removed)
    }

    pub(crate) fn get_mut(&mut self, number: u64) -> Option<&mut Socket> {
        self.sockets.get_mut(&number)
    }
}

/// The number of a socket; nothing if it is none.
pub(crate) fn number_of(socket: BorrowedFd<'_>) -> Option<u64> {
    socket_cookie(socket).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_are_forgotten_and_datagrams_have_a_limit() {
        let mut sockets = Sockets::default();
        let of = UserNumber::of;
        let stream_of = |user| Socket::new(of(user), Family::V4, Kind::Stream(Progress::New));
        let stream = || stream_of(1);
        for number in 0..MAX_SOCKETS as u64 + 10 {
            sockets.add(number, stream()).unwrap();
        }
        assert_eq!(sockets.sockets.len(), MAX_SOCKETS);
        assert!(sockets.get_mut(9).is_none() && sockets.get_mut(10).is_some());
        let (end, _) = std::os::unix::net::UnixStream::pair().unwrap();
        let end = Arc::new(OwnedFd::from(end));
        let datagram = || Socket::new(of(1), Family::V6, Kind::Datagram(end.clone()));
        for number in 0..544 {
            sockets.add(1 << 32 | number, datagram()).unwrap();
        }
        sockets.add(1 << 33, datagram()).unwrap_err();
        assert!(sockets.remove(1 << 32).is_some());
        sockets.add(1 << 33, datagram()).unwrap();
        // Numbers of those that are forgotten do not gather.
        for number in 0..4 * MAX_SOCKETS as u64 {
            sockets.add(1 << 40 | number, stream()).unwrap();
            sockets.remove(1 << 40 | number);
        }
        assert!(sockets.numbers() <= 2 * MAX_SOCKETS);
        // Datagram sockets that are open are not forgotten for streams.
        assert!(sockets.get_mut(1 << 33).is_some());
        assert_eq!(sockets.datagrams[1], 544);
        // Nor are those of others.
        sockets.add(7, stream_of(2)).unwrap();
        for number in 0..4 * MAX_SOCKETS as u64 {
            sockets.add(1 << 41 | number, stream()).unwrap();
        }
        assert!(sockets.get_mut(7).is_some());
    }

    #[test]
    fn an_option_has_the_value_that_it_got_last() {
        let mut socket = Socket::new(UserNumber::ROOT, Family::V4, Kind::Stream(Progress::New));
        socket.set_option(6, 1, vec![1]);
        socket.set_option(6, 1, vec![2]);
        assert_eq!(socket.option(6, 1), Some(&[2][..]));
        assert_eq!(socket.option(6, 2), None);
        for number in 0..100 {
            socket.set_option(41, number, vec![]);
        }
        assert_eq!(socket.options().len(), MAX_OPTIONS);
    }
}
