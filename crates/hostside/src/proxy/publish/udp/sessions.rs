//! The sessions of one published UDP port, and whose they are: one sender with many ports keeps no other sender out.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use tokio::sync::mpsc;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::super::caller::network_of;
use super::{Datagram, MAX_SESSIONS};

/// A session that may still run.
struct Held {
    datagrams: mpsc::Sender<Datagram>,
    task: AbortHandle,
    /// When its peer sent last.
    last: Instant,
}

/// Sessions by their peers.
#[derive(Default)]
pub(super) struct Sessions {
    by_peer: HashMap<SocketAddr, Held>,
    /// How many there are of each network.
    of_network: HashMap<IpAddr, usize>,
}

impl Sessions {
    /// Where datagrams of this peer go, if it has a session.
    pub(super) fn of(&mut self, peer: SocketAddr) -> Option<&mpsc::Sender<Datagram>> {
        let held = self.by_peer.get_mut(&peer)?;
        held.last = Instant::now();
        (!held.datagrams.is_closed()).then_some(&held.datagrams)
    }

    /// Whether there is room for a session of this peer. Where there was none, the network with the most sessions loses the one that was silent for longest, if it
    /// still has as many as the peer's own then.
    pub(super) fn make_room(&mut self, peer: SocketAddr) -> bool {
        self.remove(peer);
        if self.by_peer.len() < MAX_SESSIONS {
            return true;
        }
        let own = self.of_network.get(&network_of(peer)).copied();
        let most = self.of_network.iter().max_by_key(|(_, count)| **count);
        let Some((network, _)) = most.filter(|(_, count)| **count > own.unwrap_or(0) + 1) else {
            return false;
        };
        let theirs = self
            .by_peer
            .iter()
            .filter(|(peer, _)| network_of(**peer) == *network);
        let silent = theirs.min_by_key(|(_, held)| held.last);
        match silent.map(|(peer, _)| *peer) {
            Some(silent) => self.remove(silent),
            None => return false,
        }
        true
    }

    /// A new session, for which there is room.
    pub(super) fn insert(
        &mut self,
        peer: SocketAddr,
        datagrams: mpsc::Sender<Datagram>,
        task: AbortHandle,
    ) {
        let last = Instant::now();
        let held = Held {
            datagrams,
            task,
            last,
        };
        self.by_peer.insert(peer, held);
        *self.of_network.entry(network_of(peer)).or_default() += 1;
    }

    /// Forgets those that have ended.
    pub(super) fn forget_ended(&mut self) {
        let Sessions {
            by_peer,
            of_network,
        } = self;
        by_peer.retain(|peer, held| {
            let is_open = !held.datagrams.is_closed();
            if !is_open {
                leave(of_network, *peer);
            }
            is_open
        });
    }

    fn remove(&mut self, peer: SocketAddr) {
        if let Some(held) = self.by_peer.remove(&peer) {
            held.task.abort();
            leave(&mut self.of_network, peer);
        }
    }
}

fn leave(of_network: &mut HashMap<IpAddr, usize>, peer: SocketAddr) {
    let network = network_of(peer);
    let left = of_network.get_mut(&network).map(|count| {
        *count = count.saturating_sub(1);
        *count
    });
    if left == Some(0) {
        of_network.remove(&network);
    }
}
