//! What a network itself answers: addresses, names and pings, so that guests find each other without any configuration.
//!
//! A network has one [`Station`]. To guests it looks like one more machine on the wire, with addresses of its own, that speaks
//!
//! | protocol | what the station does |
//! | --- | --- |
//! | ARP, neighbour discovery | answers for its own addresses, also when somebody probes whether they are free |
//! | DHCPv4 | gives every guest the address that its operator wrote down, or one of a pool |
//! | router advertisement | tells the prefix, the MTU, the resolver and the search domain to whoever asks |
//! | DNS, over UDP and TCP | knows the names of the network's guests, and nothing else |
//! | ping | answers |
//!
//! # Theory of operation
//!
//! The station is a state machine without I/O: frames and times go in ([`Station::receive`], [`Station::handle_timeout`]), frames and the
//! time of the next timer come out ([`Station::transmit`], [`Station::poll_at`]). It has no thread, no socket and no clock, so that the
//! switch's worker can call it between two batches, and a test can have a year go by.
//!
//! Three ideas keep it small and calm:
//!
//! - *It answers to where the question came from.* The Ethernet source of a question is the destination of its answer; no neighbour is ever
//!   looked up, so no guest can make the station wait for another's silence, and there is no neighbour cache to fill. Only TCP, whose answers
//!   may be repeated later, remembers where a peer is, in a small table.
//! - *It keeps no state for what can be computed.* An address from the operator's list is a look-up; only addresses from the pool are leases.
//! - *It never speaks first.* No periodic router advertisement, no gratuitous ARP: what it tells does not expire, and who joins later asks. With quiet
//!   guests [`Station::poll_at`] is `None`. (The one exception is [`Station::link_up`], which the owner calls when what the station tells has changed.)
//!
//! The formats, and the IP stack behind DNS and ping, are `smoltcp`'s; the DNS messages are `domain`'s.
//!
//! # What is expected of the caller
//!
//! Frames are untagged and whole: one that a guest left to be segmented or its checksum to be filled in has to be finished first. Who may
//! say what (source addresses, rates) is the switch's to decide, before a frame gets here; the station does not rely on it for its own
//! safety. Every table in it is bounded, and whatever a frame says, it costs one answer at most, to its sender.

mod advertise;
mod asker;
mod config;
mod dhcp;
mod dns;
mod frame;
mod hosts;
mod neighbour;
mod stack;
mod station;

pub use asker::Asker;
pub use config::{
    ConfigError, Host, HostError, Ipv4Settings, MAX_HOSTS, MAX_POOL_ADDRESSES, StationConfig,
    slaac_address,
};
pub use dhcp::Lease;
pub use station::{Counters, MAX_QUEUED_FRAMES, Station};
