//! Hostile bytes for every input of Ringdown.
//!
//! # Theory of operation
//!
//! Every module has one function or more that takes any bytes and panics if a promise is broken: a *target*. The bytes
//! are read by [`Dice`] as decisions, so that every input means something, and a fuzzer that changes one byte changes one
//! decision. A target compares what the code under test does with a model that is written from the specification and
//! shares nothing with it, or with what an honest party must see whatever the hostile one does.
//!
//! The files in `tests/` hand these functions to bolero. There they are, with the same corpus and the same harness,
//!
//! - ordinary tests: `cargo test -p ringdown-fuzz` runs the corpus and about a second of random cases each, and names the seed of
//!   a case that fails (`BOLERO_RANDOM_SEED=... cargo test -p ringdown-fuzz NAME` runs it again);
//! - fuzz targets: `make fuzz` runs each for a minute under libFuzzer, guided by coverage.
//!
//! | target | attacker | under attack |
//! | --- | --- | --- |
//! | [`wire::header`], [`wire::connect`] | guest, host program | the packet header, the CONNECT handshake |
//! | [`wire::frames`], [`wire::decoder`], [`wire::credit`] | a guest's agent, or its caller | the agent protocol |
//! | [`serial::decoder`], [`serial::link`] | a guest's agent, the line itself | the frames of the serial link, and the link |
//! | [`station::frames`] | guest | what a network itself answers: DHCP, DNS, ARP, neighbour discovery, TCP |
//! | [`transfer::receive_any`] | a guest's agent, or the host | the receiver of files |
//! | [`proxy::socks`], [`proxy::http`], [`proxy::directory`] | guest | what the proxy is asked for: destinations, names |
//! | [`switchboard::lines`] | programs, a guest's agent | what is said to set up zero-copy circuits |
//! | [`ring::walk`] | guest | the virtqueue, over memory that changes |
//! | [`segments::move_bytes`] | guest | copies between descriptors cut in any way, and sockets |
//! | [`switch::operate`] | guests and host programs at once | circuits, credit, limits |
//! | [`frame::frame`] | guest | frames and their headers: parser, offloads, filters |
//! | [`vhost::converse`] | VMM | the vhost-user control protocol, with descriptors |
//! | [`kept::go_on`] | a daemon of before, or its memory that was damaged | what is kept for the next daemon; other lines go on |
//! | [`fabric::carry`] | no attacker: honest parties with odd layouts | every byte arrives, once and in order; a capture shows them |
//! | [`fabric::attack`] | guest | everything above at once; a bystander and a capture go on |
//! | [`net::attack`] | guest | a network: frames, offloads, rings, the VMM's words; two bystanders go on |
//!
//! Nothing here is part of what faces a guest. Misuse panics, as it should in a test.

pub mod circuit;
mod dice;
pub mod fabric;
pub mod frame;
mod guest;
mod house;
pub mod kept;
pub mod net;
pub mod proxy;
pub mod ring;
pub mod segments;
pub mod serial;
pub mod station;
pub mod switch;
pub mod switchboard;
mod tape;
pub mod transfer;
pub mod vhost;
mod vmm;
pub mod wire;

pub use dice::Dice;
