//! DHCPv4 (RFC 2131): gives every guest on the operator's list its address, and others one of the pool, if there is one.
//!
//! # Theory of operation
//!
//! An address on the list belongs to its guest, whether it asks or not: there is nothing to remember, to lose in a restart, or to be exhausted. Only
//! the pool has leases ([`pool`]). A client that is neither on the list nor served by a pool gets no answer at all, not even a refusal, as RFC 2131, 4.3.2 has
//! it: another server may serve it.
//!
//! A guest is known by its MAC address, which has to be the frame's too; the client identifier is a guest's own affair and is only sent back (RFC 6842). No
//! relay agent stands between a guest and its network, so a message from one is ignored.
//!
//! Answers go to the MAC address that asked. Where RFC 2131, 4.1 says "broadcast" that is said to the IP layer: the client accepts it without having an
//! address, and no other guest is bothered.

mod message;
mod pool;

use core::net::Ipv4Addr;
use std::time::{Duration, Instant};

use smoltcp::wire::DhcpMessageType;
use wire::ethernet::MacAddress;

pub(crate) use message::Request;
pub use pool::Lease;

use crate::asker::Asker;
use crate::config::{Host, Ipv4Settings, StationConfig};
use crate::hosts::Hosts;
use message::Facts;
use pool::{Client, Pool};

pub(crate) const SERVER_PORT: u16 = smoltcp::wire::DHCP_SERVER_PORT;
pub(crate) const CLIENT_PORT: u16 = smoltcp::wire::DHCP_CLIENT_PORT;

/// What became of a message.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Outcome {
    Offered,
    Acknowledged,
    Refused,
    Declined,
    Released,
    Ignored,
}

pub(crate) struct Answer {
    pub outcome: Outcome,
    /// The message to send, and to which address.
    pub message: Option<(Ipv4Addr, Vec<u8>)>,
}

impl Answer {
    fn silent(outcome: Outcome) -> Self {
        Self {
            outcome,
            message: None,
        }
    }
}

pub(crate) struct Server {
    ipv4: Ipv4Settings,
    facts: Facts,
    lease: Duration,
    gateway: Option<Ipv4Addr>,
    pool: Option<Pool>,
}

impl Server {
    pub fn new(config: &StationConfig, ipv4: Ipv4Settings) -> Self {
        Self {
            ipv4,
            facts: Facts::new(config, ipv4),
            lease: config.lease,
            gateway: config.gateway,
            pool: config.pool.clone().map(Pool::new),
        }
    }

    pub fn leases(&self, now: Instant) -> Vec<Lease> {
        self.pool
            .as_ref()
            .map_or_else(Vec::new, |pool| pool.leases(now))
    }

    /// Leases of a server before this one go on, as far as this one gives out their addresses.
    pub fn inherit(&mut self, before: &Server) {
        if let (Some(pool), Some(before)) = (&mut self.pool, &before.pool) {
            pool.inherit(before);
        }
    }

    pub fn hosts_have_changed(&mut self) {
        if let Some(pool) = &mut self.pool {
            pool.hosts_have_changed();
        }
    }

    /// `source` is the MAC address that the frame came from, and `asker` the port.
    pub fn answer(
        &mut self,
        now: Instant,
        request: &Request,
        (source, asker): (MacAddress, &Asker),
        hosts: &Hosts,
    ) -> Answer {
        let client = Client {
            mac: source,
            port: asker.port_of_guest(),
        };
        let host = hosts.with_mac(source);
        let assigned = host.and_then(|host| host.ipv4);
        let is_served = assigned.is_some() || self.pool.is_some();
        if request.mac != source || request.is_relayed || !is_served {
            return Answer::silent(Outcome::Ignored);
        }
        match request.kind {
            DhcpMessageType::Discover => self.discovered(now, request, (client, host), hosts),
            DhcpMessageType::Request => self.requested(now, request, (client, host), hosts),
            DhcpMessageType::Inform => self.informed(request, host),
            DhcpMessageType::Decline if request.server == Some(self.ipv4.address) => {
                // An address on the list stays what it is: another host has taken it, and the operator sees that this was counted.
                if let (None, Some(pool), Some(address)) =
                    (assigned, &mut self.pool, request.wanted)
                {
                    pool.decline(now, source, address);
                }
                Answer::silent(Outcome::Declined)
            }
            DhcpMessageType::Release if request.server == Some(self.ipv4.address) => {
                if let Some(pool) = &mut self.pool {
                    pool.release(now, source, request.client);
                }
                Answer::silent(Outcome::Released)
            }
            _ => Answer::silent(Outcome::Ignored),
        }
    }

    fn discovered(
        &mut self,
        now: Instant,
        request: &Request,
        (client, host): (Client, Option<&Host>),
        hosts: &Hosts,
    ) -> Answer {
        let address = match (host.and_then(|host| host.ipv4), &mut self.pool) {
            (Some(address), _) => Some(address),
            (None, Some(pool)) => {
                let is_taken = |address| is_taken(address, self.ipv4, self.gateway, hosts);
                pool.offer(now, client, request.wanted, is_taken)
            }
            (None, None) => None,
        };
        match address {
            Some(address) => self.grant(DhcpMessageType::Offer, request, host, address),
            None => Answer::silent(Outcome::Ignored),
        }
    }

    fn requested(
        &mut self,
        now: Instant,
        request: &Request,
        (client, host): (Client, Option<&Host>),
        hosts: &Hosts,
    ) -> Answer {
        if request
            .server
            .is_some_and(|server| server != self.ipv4.address)
        {
            // It has taken another server's offer.
            if let Some(pool) = &mut self.pool {
                pool.take_back_offer(now, request.mac);
            }
            return Answer::silent(Outcome::Ignored);
        }
        // A client that has an address says so in the header (renewing, rebinding), one that wants it in an option (selecting, rebooting).
        let Some(wanted) = request.wanted.or(request.client) else {
            return Answer::silent(Outcome::Ignored);
        };
        let is_granted = match (host.and_then(|host| host.ipv4), &mut self.pool) {
            (Some(address), _) => address == wanted,
            // Also an address that this server knows nothing of: it may have been given out before a restart.
            (None, Some(pool)) => {
                let is_taken = is_taken(wanted, self.ipv4, self.gateway, hosts);
                !is_taken && pool.bind(now, client, wanted, self.lease)
            }
            (None, None) => false,
        };
        match is_granted {
            true => self.grant(DhcpMessageType::Ack, request, host, wanted),
            false => Answer {
                outcome: Outcome::Refused,
                message: Some((Ipv4Addr::BROADCAST, self.facts.refusal(request))),
            },
        }
    }

    /// A guest that has its address from elsewhere asks for the rest.
    fn informed(&self, request: &Request, host: Option<&Host>) -> Answer {
        let message = self
            .facts
            .message(DhcpMessageType::Ack, request, host, None);
        Answer {
            outcome: Outcome::Acknowledged,
            message: Some((request.client.unwrap_or(Ipv4Addr::BROADCAST), message)),
        }
    }

    fn grant(
        &self,
        kind: DhcpMessageType,
        request: &Request,
        host: Option<&Host>,
        address: Ipv4Addr,
    ) -> Answer {
        let destination = match request.client {
            Some(client) => client,
            None if request.wants_broadcast => Ipv4Addr::BROADCAST,
            None => address,
        };
        Answer {
            outcome: match kind {
                DhcpMessageType::Offer => Outcome::Offered,
                _ => Outcome::Acknowledged,
            },
            message: Some((
                destination,
                self.facts.message(kind, request, host, Some(address)),
            )),
        }
    }
}

/// The pool may not give this address out.
fn is_taken(
    address: Ipv4Addr,
    own: Ipv4Settings,
    gateway: Option<Ipv4Addr>,
    hosts: &Hosts,
) -> bool {
    address == own.address
        || Some(address) == gateway
        || !own.has_host(address)
        || hosts.have(address)
}

#[cfg(test)]
mod tests;
