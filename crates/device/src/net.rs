//! Networks: Ethernet between guests, with one copy from guest to guest.
//!
//! # Theory of operation
//!
//! A [`NetFabric`] owns the bridges of all networks and the rings of all their ports. One thread runs it. It works as VALE does (Rizzo and
//! Lettieri, "VALE, a switched Ethernet for virtual machines", 2012), with the rings of virtio in place of netmap's:
//!
//! 1. **Snapshot** (`drain.rs`): up to a batch of frames is taken from one guest's ring. Of each, the virtio header and the first bytes
//!    are copied out. From now on only this copy is read, and it is what will be written: what the guest does to
//!    its own memory meanwhile can change a payload, never a header that was judged. A batch ends early if its frames cost much (`cost.rs`).
//! 2. **Classify**: the bridge says of each frame where it goes, and the frame is put on the list of each destination.
//! 3. **Copy** (`deliver.rs`): destination by destination, so that a ring is touched once for a batch, each frame moves from the sender's
//!    buffers into the receiver's. A ring that is full drops; a sender never waits for a receiver.
//! 4. **Notify once** (`notify.rs`): the receiver's ring is published after its part of the batch, and its guest interrupted if it wants to be and was
//!    not a moment ago (`moderation.rs`).
//!
//! A guest's offloads pass from guest to guest: a frame of 64 KiB that its sender would have a network card cut is copied as
//! it is to a receiver that takes such frames. For one that does not, checksums and segments are made here.
//!
//! When nothing is left to do, the thread looks for a moment longer if that has been worth it lately (as the vsock's worker does),
//! asks all guests to notify, and sleeps. There is no timer that ticks: with quiet guests it does not wake up.

mod capture;
mod control;
mod cost;
mod deliver;
mod drain;
mod handover;
mod model;
mod moderation;
mod notify;
mod port;
mod snapshot;
mod station;
mod uplink;
mod views;

use std::collections::{BTreeSet, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use guestmem::queue::FIRST_SPLIT_BASE;
use keeper::Keeper;
use l2::bridge::{AddPortError, Bridge, BridgeLimits, PortConfig, PortId};
use policy::Time;
use slab::Slab;
use thiserror::Error;

pub use self::handover::NetLedger;
pub use self::model::MAX_QUEUE_PAIRS;
pub use self::moderation::ModerationSetting;
pub use self::port::PortCounters;
pub use self::uplink::{UplinkCounters, UplinkDevice};
pub use self::views::{NetPortSnapshot, NetworkSnapshot, StationSnapshot, UplinkSnapshot};

use self::capture::Captures;
use self::deliver::Scratch;
use self::drain::Batch;
use self::handover::Handover;
use self::port::{Port, is_transmit};
use self::station::NetStation;
use self::uplink::Uplink;
use crate::Waker;
use crate::aside::{REMOVAL_PATIENCE, Ticket, UnderWay};
use crate::bound::Bound;
use crate::capture::MAX_CAPTURES;
use crate::fault::LastFault;
use crate::frontend::{Frontend, Identity, Mailbox, Message};
use crate::reactor::{EventFlags, Reactor, Token};
use crate::spin::Spin;

/// What a port needs to be opened.
#[derive(Debug, Clone)]
pub struct NetPortConfig {
    /// The network's full name.
    pub network: String,
    /// The VM's full name, once in a network.
    pub vm: String,
    /// Where the VMM connects.
    pub vhost_user: PathBuf,
    /// What the bridge holds the port to.
    pub bridge: PortConfig,
    /// Pairs of rings, between 1 and [`MAX_QUEUE_PAIRS`].
    pub queue_pairs: u16,
    /// How the guest's interrupts are held back.
    pub moderation: ModerationSetting,
}

/// Why a network or a port cannot be had.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, Error)]
pub enum NetError {
    #[error("there is a network {0:?} already")]
    NetworkTaken(String),
    #[error("there is no network {0:?}")]
    NoNetwork(String),
    #[error("VM {vm:?} has a port in network {network:?} already")]
    PortTaken { vm: String, network: String },
    #[error("VM {vm:?} has no port in network {network:?}")]
    NoPort { vm: String, network: String },
    #[error(transparent)]
    Bridge(#[from] AddPortError),
    #[error("cannot use {device:?}: {error}")]
    Uplink {
        /// What it is to be.
        device: UplinkDevice,
        error: io::Error,
    },
    #[error("network {0:?} has no station")]
    NoStation(String),
    #[error(transparent)]
    Station(#[from] l2::StationConfigError),
    #[error(transparent)]
    Hosts(#[from] l2::HostError),
    #[error("there are {MAX_CAPTURES} captures already, which is the most: end one of them first")]
    TooManyCaptures,
    #[error("cannot listen at {path}: {error}")]
    Socket { path: PathBuf, error: io::Error },
}

/// One network.
struct Network {
    name: String,
    bridge: Bridge,
    /// What is behind each of the bridge's ports, by its number.
    behind: Vec<Option<Behind>>,
    /// The network's own station.
    station: Option<NetStation>,
    /// Its way out.
    uplink: Option<Uplink>,
}

/// What is behind a port of a bridge.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Behind {
    /// A guest: the port's place in the table of ports.
    Guest(usize),
    /// The network itself.
    Station,
    /// The way out.
    Uplink,
}

/// The networks with everything they decide about. One thread owns and runs it.
pub struct NetFabric {
    reactor: Reactor,
    start: Instant,
    /// The time of this turn.
    now: Time,
    networks: Slab<Network>,
    ports: Slab<Port>,
    next_generation: u64,
    mailbox: Mailbox,
    /// Where VMMs' connections are kept for a successor.
    keeper: Option<Arc<Keeper>>,
    /// What is written down for that one.
    handover: Handover,
    /// Sockets that have been made for ports to come.
    bound: Bound,
    under_way: UnderWay,
    messages: Receiver<Message>,
    happened: Vec<(Token, EventFlags)>,
    /// Rings whose guests have sent something, in turn: the place of the port, and the ring.
    ready: VecDeque<(usize, usize)>,
    /// Rings whose guests need not notify of what they send, since we look anyhow before we sleep.
    unarmed: Vec<(usize, usize)>,
    /// Interrupts that are held back, with their times.
    owed: BTreeSet<(Time, usize, usize)>,
    /// Rings whose frames are left where they are until then, as their port has sent more than its rate allows.
    throttled: BTreeSet<(Time, usize, usize)>,
    /// Networks whose stations may have something to say.
    answering: BTreeSet<usize>,
    /// When a station is to be looked after.
    station_timer: Option<Time>,
    batch: Batch,
    scratch: Scratch,
    captures: Captures,
    spin: Spin,
    /// What was done since the descriptors were polled: see [`cost`].
    blind_cost: usize,
    stopped: bool,
}

impl NetFabric {
    /// A fabric without networks.
    pub fn new() -> io::Result<NetFabric> {
        guestmem::fault::install()?;
        let reactor = Reactor::new()?;
        let (mailbox, messages) = Mailbox::new(reactor.waker());
        Ok(NetFabric {
            reactor,
            start: Instant::now(),
            now: Time::ZERO,
            networks: Slab::new(),
            ports: Slab::new(),
            next_generation: 0,
            mailbox,
            keeper: None,
            handover: Handover::default(),
            bound: Bound::default(),
            under_way: UnderWay::new(),
            messages,
            happened: Vec::new(),
            ready: VecDeque::new(),
            unarmed: Vec::new(),
            owed: BTreeSet::new(),
            throttled: BTreeSet::new(),
            answering: BTreeSet::new(),
            station_timer: None,
            batch: Batch::default(),
            scratch: Scratch::default(),
            captures: Captures::default(),
            spin: Spin::new(Duration::ZERO),
            blind_cost: 0,
            stopped: false,
        })
    }

    /// Lets a turn look for up to this long before it sleeps, while frames come so fast that it is worth it. Zero, which
    /// holds until this is called, sleeps at once.
    pub fn set_spin(&mut self, limit: Duration) {
        self.spin = Spin::new(limit);
    }

    /// Keeps VMMs' connections for a successor, and goes on with what a predecessor kept, in networks that are made from now on.
    pub fn set_ledger(&mut self, ledger: NetLedger) {
        self.keeper = Some(ledger.keeper.clone());
        self.handover = Handover::of(ledger);
    }

    /// Ports that are added from now on have these sockets, as far as they are among them; what is left of those that were set before is gone.
    pub fn set_bound(&mut self, bound: Bound) {
        let rest = std::mem::replace(&mut self.bound, bound);
        self.under_way.remove(rest.into_files());
    }

    /// Disconnects when the files of all sockets that have been closed are gone.
    pub fn all_done(&mut self) -> Receiver<Ticket> {
        self.under_way.all_done()
    }

    /// Takes this many frames from a ring at a time, at most [`MAX_BATCH`](Self::MAX_BATCH).
    pub fn set_batch(&mut self, frames: usize) {
        self.batch.set_limit(frames);
    }

    /// The most frames that are taken from a ring at a time.
    pub const MAX_BATCH: usize = drain::MAX_BATCH;

    /// Wakes this fabric's [`turn`](Self::turn) from another thread.
    pub fn waker(&self) -> Waker {
        self.reactor.waker()
    }

    /// Makes a network without ports.
    pub fn add_network(&mut self, name: &str, limits: BridgeLimits) -> Result<(), NetError> {
        if self.network_named(name).is_ok() {
            return Err(NetError::NetworkTaken(name.to_owned()));
        }
        // Guests choose which addresses are learned, so that they may not know where those come to lie in a table.
        let seed = RandomState::new().hash_one(name);
        let mut bridge = Bridge::new(limits, seed);
        if self.handover.is_in_use() {
            bridge.record_changes();
        }
        self.networks.insert(Network {
            name: name.to_owned(),
            bridge,
            behind: Vec::new(),
            station: None,
            uplink: None,
        });
        Ok(())
    }

    /// Removes a network with all its ports.
    pub fn remove_network(&mut self, name: &str) -> Result<(), NetError> {
        let network = self.network_named(name)?;
        let ports: Vec<usize> = self.ports_of(network).collect();
        for port in ports {
            self.close_port(port);
        }
        self.captures.forget_network(network);
        self.networks.remove(network);
        self.forget_written(network);
        Ok(())
    }

    /// Opens a port: its socket listens when this returns.
    ///
    /// # Errors
    /// When its network is not there, or its place or its socket cannot be had. Nothing is left behind then.
    pub fn add_port(&mut self, config: NetPortConfig) -> Result<(), NetError> {
        let network = self.network_named(&config.network)?;
        if self.port_of(network, &config.vm).is_some() {
            return Err(NetError::PortTaken {
                vm: config.vm,
                network: config.network,
            });
        }
        let id = self.networks[network].bridge.add_port(config.bridge)?;
        let number = self.ports.insert(Port {
            generation: 0,
            vm: config.vm.clone(),
            network,
            id,
            path: config.vhost_user,
            queue_pairs: config.queue_pairs.clamp(1, MAX_QUEUE_PAIRS),
            moderation: config.moderation,
            frontend: None,
            attached: false,
            last_fault: LastFault::default(),
            rings: Vec::new(),
            first_base: FIRST_SPLIT_BASE,
            sends: Default::default(),
            takes: Default::default(),
            mergeable: false,
            steering: Default::default(),
            counters: PortCounters::default(),
            debt: Default::default(),
        });
        self.networks[network].put_behind(id, Some(Behind::Guest(number)));
        if !self.inherit(network, id, Some(&config.vm)) {
            self.networks[network].bridge.set_link(id, false);
            self.note_link(number, false);
            return Ok(());
        }
        self.listen(number).inspect_err(|_| self.close_port(number))
    }

    /// Holds a port to something else from now on. Its guest notices nothing.
    pub fn configure_port(
        &mut self,
        network: &str,
        vm: &str,
        config: PortConfig,
        moderation: ModerationSetting,
    ) -> Result<(), NetError> {
        let (network, number) = self.port_named(network, vm)?;
        let port = &mut self.ports[number];
        self.networks[network]
            .bridge
            .configure_port(self.now, port.id, config)?;
        port.set_moderation(moderation);
        Ok(())
    }

    /// Closes a port.
    pub fn remove_port(&mut self, network: &str, vm: &str) -> Result<(), NetError> {
        let (_, number) = self.port_named(network, vm)?;
        self.close_port(number);
        Ok(())
    }

    /// Takes a port's link down, or up again. While it is down no frame passes, and the port's socket is closed, so that its VMM
    /// shows the guest that the cable is out.
    pub fn set_link(&mut self, network: &str, vm: &str, up: bool) -> Result<(), NetError> {
        let (network, number) = self.port_named(network, vm)?;
        self.note_link(number, up);
        // Before anyone can see that it is so.
        self.note_rest();
        let port = &self.ports[number];
        self.networks[network].bridge.set_link(port.id, up);
        match (up, port.frontend.is_some()) {
            (true, false) => self.listen(number)?,
            (false, true) => self.hang_up(number),
            _ => {}
        }
        Ok(())
    }

    /// Closes every port and removes every network, for good.
    pub fn stop(&mut self) {
        // What is written down stays as it is, for a successor.
        self.handover = Handover::default();
        let ports: Vec<usize> = self.ports.iter().map(|(number, _)| number).collect();
        for number in ports {
            self.close_port(number);
        }
        self.captures.end();
        self.networks.clear();
        let _ = self.all_done().recv_timeout(REMOVAL_PATIENCE);
        self.stopped = true;
    }

    /// Whether [`stop`](Self::stop) was called.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// One turn: waits until something happens, but not beyond `limit`, and does what follows from it.
    pub fn turn(&mut self, limit: Option<Duration>) -> io::Result<()> {
        let mut happened = std::mem::take(&mut self.happened);
        self.wait(limit, &mut happened)?;
        self.now = self.start.elapsed();
        for (token, _) in happened.drain(..) {
            self.dispatch(token);
        }
        self.happened = happened;
        self.pay_interrupts();
        self.end_throttles();
        for _ in 0..self.ready.len() {
            // The others have their turn when the descriptors have been polled.
            if self.blind_cost >= cost::MAX_BLIND {
                break;
            }
            if let Some((number, ring)) = self.ready.pop_front() {
                self.blind_cost += cost::BATCH;
                self.drain(number, ring);
            }
        }
        self.answer_guests();
        self.note_rest();
        Ok(())
    }

    fn dispatch(&mut self, token: Token) {
        match token {
            Token::Wake => self.take_messages(),
            Token::Ring { line, index } => self.kicked(line.0 as usize, usize::from(index)),
            Token::Uplink { network } => self.drain_uplink(network as usize),
            _ => {}
        }
    }

    fn kicked(&mut self, number: usize, index: usize) {
        self.look_at_ring(number, index);
        let Some(port) = self.ports.get_mut(number) else {
            return;
        };
        // Buffers that a guest posts need no turn.
        if is_transmit(index) {
            port.counters.kicks += 1;
            self.make_ready(number, index);
        }
    }

    fn network_named(&self, name: &str) -> Result<usize, NetError> {
        let found = self
            .networks
            .iter()
            .find(|(_, network)| network.name == name);
        found
            .map(|(index, _)| index)
            .ok_or_else(|| NetError::NoNetwork(name.to_owned()))
    }

    fn ports_of(&self, network: usize) -> impl Iterator<Item = usize> + '_ {
        let ports = self
            .ports
            .iter()
            .filter(move |(_, port)| port.network == network);
        ports.map(|(number, _)| number)
    }

    fn port_of(&self, network: usize, vm: &str) -> Option<usize> {
        self.ports_of(network)
            .find(|number| self.ports[*number].vm == vm)
    }

    fn port_named(&self, network: &str, vm: &str) -> Result<(usize, usize), NetError> {
        let index = self.network_named(network)?;
        let number = self.port_of(index, vm).ok_or_else(|| NetError::NoPort {
            vm: vm.to_owned(),
            network: network.to_owned(),
        })?;
        Ok((index, number))
    }

    /// Lets VMMs connect to a port.
    fn listen(&mut self, number: usize) -> Result<(), NetError> {
        let generation = self.take_generation();
        let port = &mut self.ports[number];
        let refused = |error| NetError::Socket {
            path: port.path.clone(),
            error,
        };
        let identity = Identity {
            device: number as u32,
            generation,
            vm: port.vm.clone(),
            network: Some(self.networks[port.network].name.clone()),
        };
        let model = model::model(port.queue_pairs);
        let rings = model.rings;
        let (mailbox, keeper) = (self.mailbox.clone(), self.keeper.clone());
        let of = (identity.vm.as_str(), identity.network.as_deref());
        let socket = self.bound.for_vmm(&port.path, of, keeper);
        let frontend =
            socket.and_then(|socket| Frontend::start(socket, identity, model, mailbox, None));
        port.frontend = Some(frontend.map_err(refused)?);
        port.generation = generation;
        port.rings = (0..rings).map(|_| None).collect();
        Ok(())
    }

    /// Lets go of a port's VMM, and listens for none.
    fn hang_up(&mut self, number: usize) {
        let frontend = self.ports[number].frontend.take();
        let file = frontend.and_then(|mut frontend| frontend.take_file());
        self.under_way.remove(file);
        // What its thread still asks, also what waits for an answer now, comes too late.
        self.ports[number].generation = self.take_generation();
        self.ports[number].attached = false;
        self.forget_rings(number);
    }

    fn take_generation(&mut self) -> u64 {
        self.next_generation += 1;
        self.next_generation
    }

    fn close_port(&mut self, number: usize) {
        self.hang_up(number);
        self.captures.forget_port(number);
        self.note_link(number, true);
        let port = self.ports.remove(number);
        let network = &mut self.networks[port.network];
        network.bridge.remove_port(port.id);
        network.put_behind(port.id, None);
    }
}

#[cfg(test)]
mod tests;

impl Network {
    fn bridge_counters(&self, id: PortId) -> l2::bridge::PortCounters {
        self.bridge.counters(id).unwrap_or_default()
    }

    fn behind(&self, id: PortId) -> Option<Behind> {
        self.behind.get(usize::from(id.0)).copied().flatten()
    }

    fn put_behind(&mut self, id: PortId, behind: Option<Behind>) {
        let index = usize::from(id.0);
        if self.behind.len() <= index {
            self.behind.resize(index + 1, None);
        }
        self.behind[index] = behind;
    }
}
