//! Where the daemon itself listens for published ports: nothing that a guest calls may lead there, since the guest would be taken for a caller from outside.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{PoisonError, RwLock};

use config::PublishListen;
use config::listeners::{Spoken, as_connected, is_at, listener};
use rustix::io::Errno;

use super::egress::{is_no_route, is_unicast};

/// The addresses of published ports.
#[derive(Debug, Default)]
pub struct OwnListeners(RwLock<Listeners>);

#[derive(Debug, Default)]
struct Listeners {
    in_force: Vec<(Spoken, SocketAddr)>,
    /// Those that are about to listen, or listen and are not in force yet: a connection that waits there is accepted later. By their owner.
    expected: BTreeMap<u64, Vec<(Spoken, SocketAddr)>>,
    next: u64,
}

impl OwnListeners {
    /// Adds those that are going to listen. They are added before they listen, and stay until they are taken back by the number that is returned.
    pub fn expect<'a>(&self, listens: impl Iterator<Item = &'a PublishListen>) -> u64 {
        let mut own = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let number = own.next;
        own.next += 1;
        own.expected
            .insert(number, listens.filter_map(listener).collect());
        number
    }

    /// Takes back what is expected by this number.
    pub(crate) fn take_back(&self, number: u64) {
        let mut own = self.0.write().unwrap_or_else(PoisonError::into_inner);
        own.expected.remove(&number);
    }

    /// Those that are expected by this number are in force, and no others.
    pub(crate) fn set_expected(&self, number: u64) {
        let mut own = self.0.write().unwrap_or_else(PoisonError::into_inner);
        own.in_force = own.expected.get(&number).cloned().unwrap_or_default();
    }

    /// Whether a socket that is connected to an address reaches one of them. `from` is its own address, once that is known.
    ///
    /// # Errors
    /// Why the kernel does not say whether the address is the host's.
    pub(crate) fn are_reached(
        &self,
        spoken: Spoken,
        from: Option<SocketAddr>,
        to: SocketAddr,
    ) -> Result<bool, Errno> {
        let own = self.0.read().unwrap_or_else(PoisonError::into_inner);
        own.are_reached(spoken, from, to)
    }

    /// Does what must not reach one of them and does not wait. Meanwhile none begins to listen.
    pub(crate) fn unless_reached<T>(
        &self,
        spoken: Spoken,
        from: SocketAddr,
        to: SocketAddr,
        act: impl FnOnce() -> T,
    ) -> Option<T> {
        let own = self.0.read().unwrap_or_else(PoisonError::into_inner);
        (own.are_reached(spoken, Some(from), to) == Ok(false)).then(act)
    }
}

impl Listeners {
    fn are_reached(
        &self,
        spoken: Spoken,
        from: Option<SocketAddr>,
        to: SocketAddr,
    ) -> Result<bool, Errno> {
        let to = as_connected(to);
        let expected = self.expected.values().flatten();
        let own = self.in_force.iter().chain(expected);
        let mut own = own.filter(|(of, _)| *of == spoken);
        if !own.clone().any(|(_, listener)| is_at(*listener, to, true)) {
            return Ok(false);
        }
        let is_own_host = is_own_host(to.ip(), from.map(|from| from.ip()))?;
        Ok(own.any(|(_, listener)| is_at(*listener, to, is_own_host)))
    }
}

/// Whether the host itself has an address. A source says it only where it is the same: the kernel gives a further address of a network the first one.
fn is_own_host(to: IpAddr, from: Option<IpAddr>) -> Result<bool, Errno> {
    let (to, from) = (to.to_canonical(), from.map(|from| from.to_canonical()));
    // What is sent to many comes back to the host as well.
    if to.is_loopback() || to.is_multicast() || from == Some(to) {
        return Ok(true);
    }
    match is_unicast(to, from) {
        // Connecting fails, and says why.
        Err(error) if from.is_none() && is_no_route(error) => Ok(false),
        answer => answer.map(|is_unicast| !is_unicast),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_to_an_own_address_reaches_a_listener_at_all_of_them() {
        let own = OwnListeners::default();
        own.expect([PublishListen::Tcp("0.0.0.0:80".to_owned())].iter());
        let reached = |spoken, from: &str, to: &str| {
            own.are_reached(spoken, from.parse().ok(), to.parse().unwrap())
        };
        assert_eq!(
            reached(Spoken::Tcp, "192.0.2.1:4000", "192.0.2.1:80"),
            Ok(true)
        );
        for from in ["", "127.0.0.1:4000"] {
            assert_eq!(reached(Spoken::Tcp, from, "127.0.0.9:80"), Ok(true));
            assert_eq!(reached(Spoken::Udp, from, "127.0.0.9:80"), Ok(false));
            assert_eq!(reached(Spoken::Tcp, from, "127.0.0.9:81"), Ok(false));
        }
    }

    #[test]
    fn what_one_takes_back_another_still_expects() {
        let own = OwnListeners::default();
        let expect = |address: &str| own.expect([PublishListen::Tcp(address.to_owned())].iter());
        let reached = |to: &str| own.are_reached(Spoken::Tcp, None, to.parse().unwrap());
        let (check, change) = (expect("127.0.0.1:80"), expect("127.0.0.1:81"));
        own.take_back(check);
        own.set_expected(change);
        own.take_back(change);
        assert_eq!(reached("127.0.0.1:80"), Ok(false));
        assert_eq!(reached("127.0.0.1:81"), Ok(true));
    }
}
