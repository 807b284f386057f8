//! The peer of a TCP connection.

mod diag;

use std::collections::HashMap;
use std::fmt::Write;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use rustix::io::Errno;

use crate::supervise::account_of;

/// A caller, as far as it is known: what it holds is counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Caller {
    /// A user of this system. A subordinate one counts as the one whose range it is of.
    User(u32),
    /// An address of another system, or an IPv6 /64, of which one system may have every address.
    Address(IpAddr),
    /// Of this system, with a socket that its program has closed, whose user the kernel does not say. All such are one: any user has every address of the loopback.
    Closed,
}

impl Caller {
    /// The peer connected from there to this address of ours.
    pub fn of(own: SocketAddr, peer: SocketAddr) -> Caller {
        let [own, peer] =
            [own, peer].map(|end| SocketAddr::new(end.ip().to_canonical(), end.port()));
        // An address of the loopback only can be of this system alone, whose kernel says the user.
        if own.ip() == peer.ip() || peer.ip().is_loopback() {
            let user = user_of(own, peer);
            return user.map_or(Caller::Closed, |user| Caller::User(account_of(user)));
        }
        Caller::Address(match peer.ip() {
            IpAddr::V6(address) => {
                let network = address.to_bits() & !u128::from(u64::MAX);
                IpAddr::V6(network.into())
            }
            address => address,
        })
    }
}

/// The user whose socket is at `peer`, connected to `own`, where there is a socket with these ends.
fn user_of(own: SocketAddr, peer: SocketAddr) -> Option<u32> {
    match diag::user_of(peer, own) {
        Ok(user) => user,
        // There is no such socket, as the kernel finds ours.
        Err(Errno::NOENT) if diag::user_of(own, peer).is_ok() => None,
        Err(_) => user_by_lists(own, peer),
    }
}

/// The same on a kernel that does not answer about single sockets (no `tcp_diag`).
fn user_by_lists(own: SocketAddr, peer: SocketAddr) -> Option<u32> {
    // A socket of IPv6 may have a connection of IPv4.
    let mapped = |end: SocketAddr| match end.ip() {
        IpAddr::V4(address) => SocketAddr::new(address.to_ipv6_mapped().into(), end.port()),
        IpAddr::V6(_) => end,
    };
    let of_ipv4 = (own.is_ipv4()).then(|| user_in("/proc/self/net/tcp", peer, own));
    let of_ipv6 = || user_in("/proc/self/net/tcp6", mapped(peer), mapped(own));
    of_ipv4.flatten().or_else(of_ipv6)
}

/// The user of the socket with these ends in a list of the kernel's: proc(5).
fn user_in(file: &str, local: SocketAddr, remote: SocketAddr) -> Option<u32> {
    let (local, remote) = (as_listed(local), as_listed(remote));
    let lines = BufReader::new(File::open(file).ok()?).lines();
    lines.map_while(Result::ok).find_map(|line| {
        let mut words = line.split_ascii_whitespace().skip(1);
        let is_it = words.next()? == local && words.next()? == remote;
        if !is_it {
            return None;
        }
        // Behind its state, its queues, its timer and its retransmissions. Of a socket that its program has closed the user is said to be root.
        let (user, file) = (words.nth(4)?, words.nth(1)?);
        user.parse().ok().filter(|_| file != "0")
    })
}

/// As the kernel writes an end: words of 32 bits in the machine's order.
fn as_listed(end: SocketAddr) -> String {
    let bytes = match end.ip() {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    };
    let mut text = String::new();
    for word in bytes.chunks_exact(4) {
        let word = word.try_into().map_or(0, u32::from_ne_bytes);
        let _ = write!(text, "{word:08X}");
    }
    let _ = write!(text, ":{:04X}", end.port());
    text
}

/// Places for callers, each of which may have as many as it leaves to others.
#[derive(Debug)]
pub struct Places {
    count: usize,
    taken: Mutex<HashMap<Caller, usize>>,
    freed: Condvar,
}

impl Places {
    /// So many.
    pub fn new(count: usize) -> Arc<Places> {
        Arc::new(Places {
            count,
            taken: Mutex::default(),
            freed: Condvar::new(),
        })
    }

    /// A place, if the caller may have one more now.
    pub fn try_take(self: &Arc<Self>, caller: Caller) -> Option<Place> {
        let mut taken = crate::lock(&self.taken);
        may_take(&taken, caller, self.count).then(|| self.give(&mut taken, caller))
    }

    /// The same, once it may.
    pub fn take(self: &Arc<Self>, caller: Caller) -> Place {
        let taken = crate::lock(&self.taken);
        let is_full = |taken: &mut HashMap<_, _>| !may_take(taken, caller, self.count);
        let waited = self.freed.wait_while(taken, is_full);
        let mut taken = waited.unwrap_or_else(PoisonError::into_inner);
        self.give(&mut taken, caller)
    }

    fn give(self: &Arc<Self>, taken: &mut HashMap<Caller, usize>, caller: Caller) -> Place {
        *taken.entry(caller).or_default() += 1;
        Place {
            places: Arc::clone(self),
            caller,
        }
    }
}

fn may_take(taken: &HashMap<Caller, usize>, caller: Caller, count: usize) -> bool {
    let left = count.saturating_sub(taken.values().sum());
    taken.get(&caller).copied().unwrap_or(0) < left
}

/// One of them; given back when dropped.
#[derive(Debug)]
pub struct Place {
    places: Arc<Places>,
    caller: Caller,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut taken = crate::lock(&self.places.taken);
        match taken.get_mut(&self.caller) {
            Some(own) if *own > 1 => *own -= 1,
            _ => drop(taken.remove(&self.caller)),
        }
        // Others may have one more, too, as there is one more left.
        self.places.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream};

    use rustix::net::{AddressFamily, SocketType};

    use super::*;

    #[test]
    fn a_caller_on_this_system_is_its_user() {
        let own = rustix::process::geteuid().as_raw();
        for (listens, calls) in [
            ("127.0.0.1:0", "127.0.0.1"),
            ("[::1]:0", "::1"),
            ("[::]:0", "127.0.0.1"),
            ("[::]:0", "::ffff:127.0.0.1"),
            ("0.0.0.0:0", "127.7.7.7"),
        ] {
            let Ok(listener) = TcpListener::bind(listens) else {
                println!("not tried: this system has no IPv6");
                continue;
            };
            let port = listener.local_addr().unwrap().port();
            let calls: IpAddr = calls.parse().unwrap();
            let _caller = TcpStream::connect((calls, port)).unwrap();
            let (accepted, peer) = listener.accept().unwrap();
            let own_end = accepted.local_addr().unwrap();
            let caller = Caller::of(own_end, peer);
            assert_eq!(caller, Caller::User(own), "{listens} {calls}");
            let ends = [own_end, peer];
            let [own_end, peer] =
                ends.map(|end| SocketAddr::new(end.ip().to_canonical(), end.port()));
            assert_eq!(user_by_lists(own_end, peer), Some(own));
            match diag::user_of(peer, own_end) {
                // A kernel without it, or a sandbox.
                Err(error) => println!("not tried: {error}"),
                user => assert_eq!(user, Ok(Some(own))),
            }
        }
    }

    #[test]
    fn all_who_have_closed_their_end_are_one_and_not_root() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        for from in ["127.0.0.1:0", "127.7.7.7:0"] {
            let from: SocketAddr = from.parse().unwrap();
            let (family, kind) = (AddressFamily::INET, SocketType::STREAM);
            let socket = rustix::net::socket(family, kind, None).unwrap();
            rustix::net::bind(&socket, &from).unwrap();
            rustix::net::connect(&socket, &address).unwrap();
            drop(socket);
            let (accepted, peer) = listener.accept().unwrap();
            assert_eq!(peer.ip(), from.ip());
            let caller = Caller::of(accepted.local_addr().unwrap(), peer);
            assert_eq!(caller, Caller::Closed);
        }
    }

    #[test]
    fn others_are_their_addresses_and_networks() {
        let of = |peer: &str| Caller::of("192.0.2.1:80".parse().unwrap(), peer.parse().unwrap());
        assert_eq!(of("192.0.2.7:1"), of("[::ffff:192.0.2.7]:2"));
        assert_ne!(of("192.0.2.7:1"), of("192.0.2.8:1"));
        assert_eq!(of("[2001:db8::1]:1"), of("[2001:db8::2]:1"));
    }

    #[test]
    fn each_caller_leaves_places_to_others() {
        let places = Places::new(16);
        let take_all =
            |user| std::iter::from_fn(|| places.try_take(Caller::User(user))).collect::<Vec<_>>();
        let held: Vec<_> = (1..=4).map(take_all).collect();
        let counts: Vec<usize> = held.iter().map(Vec::len).collect();
        assert_eq!(counts, [8, 4, 2, 1]);
        drop(held);
        assert_eq!(take_all(5).len(), 8);
    }
}
