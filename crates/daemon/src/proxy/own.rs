//! Where the daemon itself listens for published ports: nothing that a guest calls may lead there, since the guest would be taken for a caller from outside.

use std::net::SocketAddr;
use std::sync::{PoisonError, RwLock};

use config::PublishListen;
use config::listeners::{Spoken, is_reached, listener};

/// The addresses of published ports that are in force.
#[derive(Debug, Default)]
pub(crate) struct OwnListeners(RwLock<Vec<(Spoken, SocketAddr)>>);

impl OwnListeners {
    /// Replaces them.
    pub(crate) fn set<'a>(&self, listens: impl Iterator<Item = &'a PublishListen>) {
        let own = listens.filter_map(listener).collect();
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = own;
    }

    /// Whether a socket that is connected from one address to another has reached one of them.
    pub(crate) fn are_reached(&self, spoken: Spoken, from: SocketAddr, to: SocketAddr) -> bool {
        let own = self.0.read().unwrap_or_else(PoisonError::into_inner);
        own.iter()
            .any(|(of, listener)| *of == spoken && is_reached(*listener, from, to))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_to_an_own_address_reaches_a_listener_at_all_of_them() {
        let own = OwnListeners::default();
        own.set([PublishListen::Tcp("0.0.0.0:80".to_owned())].iter());
        let reached = |spoken, from: &str, to: &str| {
            own.are_reached(spoken, from.parse().unwrap(), to.parse().unwrap())
        };
        assert!(reached(Spoken::Tcp, "192.0.2.1:4000", "192.0.2.1:80"));
        assert!(reached(Spoken::Tcp, "127.0.0.1:4000", "127.0.0.9:80"));
        assert!(!reached(Spoken::Tcp, "192.0.2.1:4000", "192.0.2.2:80"));
        assert!(!reached(Spoken::Udp, "192.0.2.1:4000", "192.0.2.1:80"));
    }
}
