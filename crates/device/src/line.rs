//! The device's part of a line: sockets, rings, and what is remembered while a VM is paused.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;

use guestmem::queue::{Positions, Queue};
use policy::Time;
use sys::links::Entry;
use sys::socket_file::SocketFile;
use vsock::CircuitId;
use wire::agent::Secret;

use crate::aside::Aside;
use crate::dialer::Carrier;
use crate::fault::LastFault;
use crate::frontend::{Frontend, Message};
use crate::handshakes::Handshakes;
use crate::ring::{Ring, RingCounts};
use crate::socket::{Listener, port_path};
use crate::tally::Tally;
use crate::vsock::{RINGS, RX, TX};

/// What the agent of a VM has given the daemon for calls to it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum AgentSecret {
    /// No agent has called.
    #[default]
    Absent,
    /// The agent is one of before.
    NotGiven,
    /// This.
    Given(Secret),
}

#[derive(Debug)]
pub(crate) struct LineIo {
    pub(crate) generation: u64,
    /// Something of it is to be written down before the next publication.
    pub(crate) is_noted: bool,
    /// The VM's name, with its domain if that is not the default.
    pub(crate) name: String,
    /// Where programs of the host connect. What they listen at for the guest's dials is at this path with `_PORT` behind it.
    pub(crate) host_path: PathBuf,
    /// Where a VMM connects by vhost-user, if this is such a line.
    pub(crate) vhost_user: Option<PathBuf>,
    /// The socket of a hybrid line's VMM. Where it calls, is at this path with `_PORT` behind it.
    pub(crate) vmm: Option<PathBuf>,
    /// The thread that does so, once there is something to look for.
    pub(crate) aside: Option<Aside>,
    pub(crate) agent_secret: AgentSecret,
    /// For programs that dial the guest: with stream sockets, and with sockets of messages if the path allows.
    pub(crate) listeners: Vec<Listener>,
    /// The thread that speaks with the VMM. A hybrid line has none.
    pub(crate) frontend: Option<Frontend>,
    /// Carries streams to a guest without vsock, and stands for the VMM of a hybrid line.
    pub(crate) carrier: Option<Carrier>,
    /// The sockets that a hybrid line's VMM calls at, by port.
    pub(crate) hybrid_listeners: BTreeMap<u32, Listener>,
    /// The ports at which it is about to listen for that.
    pub(crate) hybrid_asked: BTreeSet<u32>,
    /// Where it could not listen for that, and why. It is tried again until it does.
    pub(crate) hybrid_refused: BTreeMap<u32, io::Error>,
    /// When it is tried again is among the timers.
    pub(crate) hybrid_waits: bool,
    /// A VMM is connected.
    pub(crate) attached: bool,
    pub(crate) last_fault: LastFault,
    pub(crate) rings: [Option<Ring>; RINGS],
    /// Rings that have been stopped and from which the guest might go on: a paused VM does, a guest whose driver starts anew
    /// does not.
    pub(crate) stopped: [Option<StoppedRing>; RINGS],
    /// The driver has been set up afresh since packets last flowed: the guest knows of no circuit.
    pub(crate) starts_anew: bool,
    /// Its rings ran for a predecessor, and are about to run again: the guest knows the circuits that were inherited.
    pub(crate) goes_on: bool,
    /// Where a predecessor had rings that have yet to run again: what is written down of them until then.
    pub(crate) of_before: [Option<Positions>; RINGS],
    /// The guest lives on with circuits that are not known here, as after a restart of the daemon, and has yet to be notified.
    pub(crate) owes_reset: bool,
    /// The driver takes SEQPACKET sockets.
    pub(crate) seqpacket: bool,
    /// How often the driver and we notified each other, at rings that are stopped.
    pub(crate) notified_before: RingCounts,
    /// Descriptors of the guest's in parked chains.
    pub(crate) parked: usize,
    /// What those chains weigh: see [`Parcel::Parked`](crate::kept::Parcel::Parked).
    pub(crate) parked_weight: usize,
    /// What the guest has had of a turn.
    pub(crate) had: Had,
    /// The VMM is gone, and what its guest sent last is being read.
    pub(crate) leaving: Option<Leaving>,
    /// Places for programs that have yet to name a callee.
    pub(crate) handshakes: Handshakes,
    /// When the log last said that the guest sends too many packets without payload.
    pub(crate) throttle_reported_at: Option<Time>,
    /// Messages, or parts of them, that the guest has sent and that are stored for their receivers:
    /// [`Limits::kept_messages`](vsock::Limits::kept_messages) at most.
    pub(crate) messages: Tally,
    /// Bytes of messages that programs of the host have sent and that the guest has yet to take.
    pub(crate) host_message_bytes: Tally,
    /// Circuits whose next message stays in the host program's socket until there is room for it. Each is there once.
    pub(crate) short_of_room: Vec<CircuitId>,
    /// Whether the line waits for its turn to be pumped.
    pub(crate) woken: bool,
    /// Whether the line waits for its turn to be drained.
    pub(crate) draining: bool,
    /// Whether the guest has been left without the wish to be notified of what it sends.
    pub(crate) unarmed: bool,
    /// In how many turns there was nothing since.
    pub(crate) vain_looks: u8,
}

impl LineIo {
    /// How often the driver and we notified each other.
    pub(crate) fn notified(&self) -> RingCounts {
        let mut notified = self.notified_before;
        for ring in self.rings.iter().flatten() {
            notified.add(ring.counts);
        }
        notified
    }

    /// Whether the VMM has stopped the rings, and the guest may go on from there.
    pub(crate) fn is_stopped(&self) -> bool {
        let runs = |index: usize| self.rings[index].is_some();
        let waits = |stopped: &StoppedRing| stopped.queue.is_some();
        self.attached && !runs(TX) && !runs(RX) && self.stopped[TX].as_ref().is_some_and(waits)
    }

    pub(crate) fn new(generation: u64, name: String, host_path: PathBuf) -> LineIo {
        LineIo {
            generation,
            is_noted: false,
            aside: None,
            name,
            host_path,
            vhost_user: None,
            vmm: None,
            agent_secret: AgentSecret::default(),
            listeners: Vec::new(),
            frontend: None,
            carrier: None,
            hybrid_listeners: BTreeMap::new(),
            hybrid_asked: BTreeSet::new(),
            hybrid_refused: BTreeMap::new(),
            hybrid_waits: false,
            attached: false,
            last_fault: LastFault::default(),
            rings: Default::default(),
            stopped: Default::default(),
            starts_anew: true,
            goes_on: false,
            of_before: Default::default(),
            notified_before: RingCounts::default(),
            owes_reset: false,
            seqpacket: false,
            parked: 0,
            parked_weight: 0,
            had: Had::default(),
            leaving: None,
            handshakes: Handshakes::default(),
            throttle_reported_at: None,
            messages: Tally::default(),
            host_message_bytes: Tally::default(),
            short_of_room: Vec::new(),
            woken: false,
            draining: false,
            unarmed: false,
            vain_looks: 0,
        }
    }

    /// Whether others can make it slow to look for programs' listeners, which are in the directory of its own.
    pub(crate) fn is_host_path_aside(&self) -> bool {
        let is_private = |listener: &Listener| listener.file.is_private();
        !self.listeners.first().is_some_and(is_private)
    }

    /// Where a program listens for the guest's calls of a port, in the directory of the line's own socket.
    pub(crate) fn place_of_program(&self, port: u32) -> Option<Entry> {
        let path = port_path(&self.host_path, port);
        let own = self.listeners.first()?;
        Some(own.file.beside(path.file_name()?))
    }

    /// The files of its sockets, which are closed.
    pub(crate) fn into_files(mut self) -> Vec<SocketFile> {
        let vmm = self.frontend.as_mut().and_then(Frontend::take_file);
        let listeners = self.listeners.drain(..).map(|listener| listener.file);
        let hybrid = std::mem::take(&mut self.hybrid_listeners).into_values();
        let files = listeners.chain(hybrid.map(|listener| listener.file));
        files.chain(vmm).collect()
    }

    /// What the guest of a hybrid line cannot call is a fault of the line, as long as it cannot.
    pub(crate) fn note_refused(&mut self) {
        let first = self.hybrid_refused.first_key_value();
        let Some((vmm, (port, error))) = self.vmm.as_deref().zip(first) else {
            return self.last_fault.clear();
        };
        let path = port_path(vmm, *port);
        let fault = format!(
            "its guest cannot call port {port} of the host, and it is tried again: cannot make a socket at {}: {error}",
            path.display()
        );
        self.last_fault.set(&fault);
    }

    /// The thread for paths that others can make slow.
    ///
    /// # Errors
    /// When there is none to be had.
    pub(crate) fn aside_thread(&mut self) -> io::Result<&Aside> {
        let aside = match self.aside.take() {
            Some(aside) => aside,
            None => Aside::start(&self.name)?,
        };
        Ok(self.aside.insert(aside))
    }

    /// What the log says of a VMM that has connected to the socket of programs.
    pub(crate) fn wrong_socket(&self) -> String {
        let place = match &self.vhost_user {
            Some(path) => format!("it belongs at {}", path.display()),
            None => "this VM has no socket for vhost-user".to_owned(),
        };
        let (name, host) = (&self.name, self.host_path.display());
        format!("a VMM speaks vhost-user at {name}'s socket for programs ({host}): {place}")
    }

    /// Both rings run, so that packets flow.
    pub(crate) fn is_running(&self) -> bool {
        let runs = |index: usize| {
            let ring = self.rings[index].as_ref();
            ring.is_some_and(|ring| ring.enabled && !ring.is_out_of_sight())
        };
        runs(RX) && runs(TX)
    }

    /// Half of the descriptors of the ring in which the guest sends: how many it may park before the rest is stored, so that
    /// there is always room for its other circuits. Descriptors and not chains: without indirect tables, seven packets of
    /// 64 KiB in pages of 4 KiB fill a ring of 128.
    pub(crate) fn half_of_ring(&self) -> usize {
        self.rings[TX]
            .as_ref()
            .map_or(0, |ring| usize::from(ring.queue.size()) / 2)
    }
}

/// What a guest has had of the turn in which something was last done for it.
#[derive(Debug, Default)]
pub(crate) struct Had {
    turn: u64,
    /// Descriptors that were read for its buffers.
    pub(crate) descriptors: usize,
    /// Payload that it was given.
    pub(crate) bytes: usize,
    /// Calls of its VMM that were looked for.
    pub(crate) calls: usize,
}

impl Had {
    /// Of this turn.
    pub(crate) fn of(&mut self, turn: u64) -> &mut Had {
        if self.turn != turn {
            *self = Had {
                turn,
                ..Had::default()
            };
        }
        self
    }
}

/// A line whose VMM is gone.
#[derive(Debug)]
pub(crate) struct Leaving {
    /// What is answered when its guest's ring is empty.
    pub(crate) message: Message,
    /// Packets that may still be taken: no more than the ring could hold.
    pub(crate) left: usize,
}

/// A ring that its VMM has stopped.
#[derive(Debug)]
pub(crate) struct StoppedRing {
    /// Where it would go on.
    pub(crate) base: u32,
    /// The queue with its digest, as long as the guest's memory is where it was.
    pub(crate) queue: Option<(Queue, u64)>,
}

impl StoppedRing {
    pub(crate) fn new(queue: Queue) -> StoppedRing {
        let digest = queue.driver_digest();
        StoppedRing {
            base: queue.ring_base(),
            queue: Some((queue, digest)),
        }
    }

    /// One that another process ran: nothing is known of its memory.
    pub(crate) fn at(available: u16) -> StoppedRing {
        StoppedRing {
            base: available.into(),
            queue: None,
        }
    }

    /// Whether the guest has used the ring's memory for something else: then it is not paused, but runs on without the ring.
    pub(crate) fn is_abandoned(&self) -> bool {
        self.queue
            .as_ref()
            .is_some_and(|(queue, digest)| queue.driver_digest() != *digest)
    }
}
