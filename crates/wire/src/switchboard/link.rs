//! What the agents and the daemon say to each other about zero-copy circuits.
//!
//! The agent of a guest that has windows calls [`PORT`] of the host, from a source port below 1024, so that no ordinary program of the guest can speak for it. One such
//! connection is a *session*. The agent says [`FromAgent`], the daemon [`FromDaemon`]; neither waits for an answer before it says the next thing.
//!
//! | agent | meaning |
//! | --- | --- |
//! | `HELLO version=1` | the first line |
//! | `WINDOW uuid=HEX len=BYTES` | this window's device is there and not mapped. For each, and again for each that comes later |
//! | `LISTEN port=N`, `UNLISTEN port=N` | a program of this guest takes circuits there, or does no more |
//! | `DIAL id=N port=N kind=bytes ring=N` | a call from this port of the guest is about to be made, and a window is wanted |
//! | `DIALLED id=N cid=N port=N` | the call was taken. `cid` and `port` are the real callee's |
//! | `GIVEUP id=N` | the call came to nothing, or the program has gone |
//! | `ACCEPTED id=N cid=N port=N local=N kind=bytes ring=N` | a call from there was taken at the port `local` for a program that listens |
//! | `RELEASED uuid=HEX generation=N` | this guest has that window mapped no more: its device was unbound and bound again |
//!
//! | daemon | meaning |
//! | --- | --- |
//! | `WELCOME version=1` | the answer to `HELLO` |
//! | `CIRCUIT id=N uuid=HEX generation=N nonce=HEX ring=N kind=bytes side=first peer=NAME:PORT` | the call with this number gets this window |
//! | `STREAM id=N peer=NAME:PORT` | the call with this number gets none: its stream carries the bytes |
//! | `REVOKE uuid=HEX generation=N` | take the window away at once, and say `RELEASED` |
//!
//! Numbers (`id`) are the agent's own, one for each call, and never used twice in a session. Whatever the daemon decides it decides from the circuit that it carries itself: an agent that
//! says other ports than those of a live circuit gets no window for it.

use super::{Hex16, Kind, Place, Side};

/// The port of CID 2 where the daemon talks with agents about circuits.
pub const PORT: u32 = 1005;

/// What is spoken here.
pub const VERSION: u32 = 1;

messages! {
    /// What an agent says.
    pub enum FromAgent, one of "HELLO, WINDOW, LISTEN, UNLISTEN, DIAL, DIALLED, GIVEUP, ACCEPTED or RELEASED" {
        /// The first line.
        "HELLO" = Hello { version: u32 = number },
        /// A device that is not mapped.
        "WINDOW" = Window { uuid: Hex16 = hex, len: u64 = number },
        /// A program takes circuits at this port.
        "LISTEN" = Listen { port: u32 = port },
        /// It does no more.
        "UNLISTEN" = Unlisten { port: u32 = port },
        /// A call is about to be made.
        "DIAL" = Dial { id: u64 = number, port: u32 = port, kind: Kind = kind, ring: u64 = ring },
        /// The call was taken.
        "DIALLED" = Dialled { id: u64 = number, cid: u32 = cid, port: u32 = port },
        /// The call came to nothing.
        "GIVEUP" = GiveUp { id: u64 = number },
        /// A call was taken for a program.
        "ACCEPTED" = Accepted {
            id: u64 = number, cid: u32 = cid, port: u32 = port, local: u32 = port, kind: Kind = kind, ring: u64 = ring
        },
        /// No process in the guest has the window mapped.
        "RELEASED" = Released { uuid: Hex16 = hex, generation: u64 = generation },
    }
}

messages! {
    /// What the daemon says.
    pub enum FromDaemon, one of "WELCOME, CIRCUIT, STREAM or REVOKE" {
        /// The answer to `HELLO`.
        "WELCOME" = Welcome { version: u32 = number },
        /// The call gets this window.
        "CIRCUIT" = Circuit(circuit: Circuit),
        /// The call gets none.
        "STREAM" = Stream { id: u64 = number, peer: Place = place },
        /// The window is to be taken away.
        "REVOKE" = Revoke { uuid: Hex16 = hex, generation: u64 = generation },
    }
}

fields! {
    /// A window for a call.
    pub struct Circuit {
        /// Of the call.
        id: u64 = number,
        /// The window's name.
        uuid: Hex16 = hex,
        /// Which life of the window this is.
        generation: u64 = generation,
        /// Random, other in each life.
        nonce: Hex16 = hex,
        /// The length of each ring in bytes.
        ring: u64 = ring,
        /// What is in the rings.
        kind: Kind = kind,
        /// Which side the guest's program is.
        side: Side = side,
        /// The peer, by the name that this guest may know.
        peer: Place = place,
    }
}
