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
//! | `DIALLED id=N cid=N port=N` | the call was taken. `cid` and `port` are whom the guest has called |
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

use std::fmt;

use super::{Fields, Hex16, Kind, LineError, Place, Side, number};

/// The port of CID 2 where the daemon talks with agents about circuits.
pub const PORT: u32 = 1005;

/// What is spoken here.
pub const VERSION: u32 = 1;

/// What an agent says.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // The fields are those of the lines above.
pub enum FromAgent {
    /// The first line.
    Hello { version: u32 },
    /// A device that is not mapped.
    Window { uuid: Hex16, len: u64 },
    /// A program takes circuits at this port.
    Listen { port: u32 },
    /// It does no more.
    Unlisten { port: u32 },
    /// A call is about to be made.
    Dial {
        id: u64,
        port: u32,
        kind: Kind,
        ring: u64,
    },
    /// The call was taken.
    Dialled { id: u64, cid: u32, port: u32 },
    /// The call came to nothing.
    GiveUp { id: u64 },
    /// A call was taken for a program.
    Accepted {
        id: u64,
        cid: u32,
        port: u32,
        local: u32,
        kind: Kind,
        ring: u64,
    },
    /// No process in the guest has the window mapped.
    Released { uuid: Hex16, generation: u64 },
}

impl FromAgent {
    /// Reads a line without its end.
    pub fn parse(line: &[u8]) -> Result<FromAgent, LineError> {
        let mut fields = Fields::parse(line)?;
        let said = match fields.verb {
            "HELLO" => FromAgent::Hello {
                version: fields.take("version", "a number", number)?,
            },
            "WINDOW" => FromAgent::Window {
                uuid: fields.hex("uuid")?,
                len: fields.take("len", "a number", number)?,
            },
            "LISTEN" => FromAgent::Listen {
                port: fields.port("port")?,
            },
            "UNLISTEN" => FromAgent::Unlisten {
                port: fields.port("port")?,
            },
            "DIAL" => FromAgent::Dial {
                id: fields.id()?,
                port: fields.port("port")?,
                kind: fields.kind()?,
                ring: fields.ring()?,
            },
            "DIALLED" => FromAgent::Dialled {
                id: fields.id()?,
                cid: fields.take("cid", "a CID", number)?,
                port: fields.port("port")?,
            },
            "GIVEUP" => FromAgent::GiveUp { id: fields.id()? },
            "ACCEPTED" => FromAgent::Accepted {
                id: fields.id()?,
                cid: fields.take("cid", "a CID", number)?,
                port: fields.port("port")?,
                local: fields.port("local")?,
                kind: fields.kind()?,
                ring: fields.ring()?,
            },
            "RELEASED" => FromAgent::Released {
                uuid: fields.hex("uuid")?,
                generation: fields.generation()?,
            },
            _ => {
                return Err(LineError::Verb {
                    expected: "HELLO, WINDOW, LISTEN, UNLISTEN, DIAL, DIALLED, GIVEUP, ACCEPTED or RELEASED",
                });
            }
        };
        fields.end()?;
        Ok(said)
    }
}

impl fmt::Display for FromAgent {
    /// The line, with its end.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FromAgent::Hello { version } => writeln!(formatter, "HELLO version={version}"),
            FromAgent::Window { uuid, len } => writeln!(formatter, "WINDOW uuid={uuid} len={len}"),
            FromAgent::Listen { port } => writeln!(formatter, "LISTEN port={port}"),
            FromAgent::Unlisten { port } => writeln!(formatter, "UNLISTEN port={port}"),
            FromAgent::Dial {
                id,
                port,
                kind,
                ring,
            } => {
                writeln!(
                    formatter,
                    "DIAL id={id} port={port} kind={kind} ring={ring}"
                )
            }
            FromAgent::Dialled { id, cid, port } => {
                writeln!(formatter, "DIALLED id={id} cid={cid} port={port}")
            }
            FromAgent::GiveUp { id } => writeln!(formatter, "GIVEUP id={id}"),
            FromAgent::Accepted {
                id,
                cid,
                port,
                local,
                kind,
                ring,
            } => writeln!(
                formatter,
                "ACCEPTED id={id} cid={cid} port={port} local={local} kind={kind} ring={ring}"
            ),
            FromAgent::Released { uuid, generation } => {
                writeln!(formatter, "RELEASED uuid={uuid} generation={generation}")
            }
        }
    }
}

/// What the daemon says.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)] // The fields are those of the lines above.
pub enum FromDaemon {
    /// The answer to `HELLO`.
    Welcome { version: u32 },
    /// The call gets this window.
    Circuit(Circuit),
    /// The call gets none.
    Stream { id: u64, peer: Place },
    /// The window is to be taken away.
    Revoke { uuid: Hex16, generation: u64 },
}

/// A window for a call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Circuit {
    /// Of the call.
    pub id: u64,
    /// The window's name.
    pub uuid: Hex16,
    /// Which life of the window this is.
    pub generation: u64,
    /// Random, other in each life.
    pub nonce: Hex16,
    /// The length of each ring in bytes.
    pub ring: u64,
    /// What is in the rings.
    pub kind: Kind,
    /// Which side the guest's program is.
    pub side: Side,
    /// Who is at the other side, by the name that this guest may know.
    pub peer: Place,
}

impl FromDaemon {
    /// Reads a line without its end.
    pub fn parse(line: &[u8]) -> Result<FromDaemon, LineError> {
        let mut fields = Fields::parse(line)?;
        let said = match fields.verb {
            "WELCOME" => FromDaemon::Welcome {
                version: fields.take("version", "a number", number)?,
            },
            "CIRCUIT" => FromDaemon::Circuit(Circuit {
                id: fields.id()?,
                uuid: fields.hex("uuid")?,
                generation: fields.generation()?,
                nonce: fields.hex("nonce")?,
                ring: fields.ring()?,
                kind: fields.kind()?,
                side: fields.side()?,
                peer: fields.place("peer")?,
            }),
            "STREAM" => FromDaemon::Stream {
                id: fields.id()?,
                peer: fields.place("peer")?,
            },
            "REVOKE" => FromDaemon::Revoke {
                uuid: fields.hex("uuid")?,
                generation: fields.generation()?,
            },
            _ => {
                return Err(LineError::Verb {
                    expected: "WELCOME, CIRCUIT, STREAM or REVOKE",
                });
            }
        };
        fields.end()?;
        Ok(said)
    }
}

impl fmt::Display for FromDaemon {
    /// The line, with its end.
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            FromDaemon::Welcome { version } => writeln!(formatter, "WELCOME version={version}"),
            FromDaemon::Circuit(circuit) => {
                let Circuit {
                    id,
                    uuid,
                    generation,
                    nonce,
                    ring,
                    kind,
                    side,
                    peer,
                } = circuit;
                write!(
                    formatter,
                    "CIRCUIT id={id} uuid={uuid} generation={generation} nonce={nonce} "
                )?;
                writeln!(formatter, "ring={ring} kind={kind} side={side} peer={peer}")
            }
            FromDaemon::Stream { id, peer } => writeln!(formatter, "STREAM id={id} peer={peer}"),
            FromDaemon::Revoke { uuid, generation } => {
                writeln!(formatter, "REVOKE uuid={uuid} generation={generation}")
            }
        }
    }
}
