//! The agent of a guest with windows, as far as calls that want one are concerned: it has no programs, and lets go of each window at once.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use bench::daemon::Daemon;
use bench::guest::{Connection, Received, State, VirtualGuest, drive};
use wire::switchboard::link::{FromAgent, FromDaemon, PORT};
use wire::switchboard::{Hex16, Kind};
use wire::vsock::{HOST_CID, SocketType};

use crate::parties::Port;
use crate::world::PATIENCE;

/// Where the device of a guest begins in a window's file, which is also what the guest's kernel keeps of it, in bytes.
const PAGE_LEN: u64 = 2 << 20;

/// Where the UUID of a window is in its file: in the info block.
const UUID_AT: u64 = 4096 + 16;

const RING_LEN: u64 = 2 << 20;

/// A session of the guest's agent with the daemon.
pub struct Agent {
    session: Connection,
    heard: Vec<u8>,
    accepted: u64,
}

impl Agent {
    /// An agent whose guest takes circuits at its ordinary port, with the windows of its VM.
    pub fn start(daemon: &Daemon, vm: &str, guest: &mut VirtualGuest) -> Agent {
        let session = guest.dial_from(1000, HOST_CID, PORT, SocketType::Stream);
        let mut agent = Agent {
            session,
            heard: Vec::new(),
            accepted: 0,
        };
        let is_there = drive(&mut [guest], PATIENCE, |guests| {
            (guests[0].state(session) == State::Connected).then_some(())
        });
        is_there.expect("a session");
        agent.say(guest, &FromAgent::Hello { version: 1 });
        let welcome = drive(&mut [guest], PATIENCE, |guests| agent.hear(guests[0]));
        assert_eq!(welcome, Ok(FromDaemon::Welcome { version: 1 }));
        let port = Port::Ordinary.number();
        agent.say(guest, &FromAgent::Listen { port });
        let status = daemon.vm_status(vm).unwrap();
        for path in status["windows"]["files"].as_array().unwrap() {
            let file = File::open(PathBuf::from(path.as_str().unwrap())).unwrap();
            let mut uuid = [0; 16];
            file.read_exact_at(&mut uuid, UUID_AT).unwrap();
            let len = file.metadata().unwrap().len() - PAGE_LEN;
            let uuid = Hex16(uuid);
            agent.say(guest, &FromAgent::Window { uuid, len });
        }
        agent
    }

    fn say(&self, guest: &mut VirtualGuest, words: &FromAgent) {
        let words = words.to_string();
        guest.send(self.session, words.as_bytes()).unwrap();
    }

    fn hear(&mut self, guest: &mut VirtualGuest) -> Option<FromDaemon> {
        let received = guest.try_receive(self.session, 4096, &mut self.heard);
        assert_ne!(received, Received::Reset, "the session is over");
        let end = self.heard.iter().position(|byte| *byte == b'\n')?;
        let line: Vec<u8> = self.heard.drain(..=end).collect();
        Some(FromDaemon::parse(&line[..end]).unwrap())
    }

    /// A program of the guest has taken a call and wants a window for it.
    pub fn accepted(&mut self, guest: &mut VirtualGuest, connection: Connection) {
        let (local, cid, port) = guest.addresses(connection).unwrap();
        self.accepted += 1;
        let words = FromAgent::Accepted {
            id: self.accepted,
            cid,
            port,
            local,
            kind: Kind::Bytes,
            ring: RING_LEN,
        };
        self.say(guest, &words);
    }

    /// Lets go of whatever window was given.
    pub fn serve(&mut self, guest: &mut VirtualGuest) {
        while let Some(words) = self.hear(guest) {
            if let FromDaemon::Circuit(circuit) = words {
                let words = FromAgent::Released {
                    uuid: circuit.uuid,
                    generation: circuit.generation,
                };
                self.say(guest, &words);
            }
        }
    }
}
