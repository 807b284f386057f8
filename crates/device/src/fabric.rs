//! Everything that one thread runs: the switch, the rings of every guest, and the sockets of the host.

mod act;
mod agent;
mod capture;
mod change;
mod circuits;
mod control;
mod decide;
mod dial;
mod host;
mod host_data;
mod hybrid;
mod journal;
mod lines;
mod message;
mod park;
mod pass;
mod prospect;
mod redial;
mod relay;
mod remainder;
mod rx;
mod serial;
mod serve;
mod slow;
mod tx;
mod views;
mod wait;

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant, SystemTime};

use guestmem::queue::Chain;
use keeper::Keeper;
use policy::{Address, LineId, Policy, ServiceEntry, Time};
use slab::Slab;
use thiserror::Error;
use vsock::{Action, AddLineError, CircuitId, Event, Limits, LineReport, Side, Switch};

use crate::Waker;
use crate::aside::{REMOVAL_PATIENCE, UnderWay};
use crate::bound::Bound;
use crate::caller::Caller;
use crate::circuit::CircuitIo;
use crate::closer::Closer;
use crate::decision::{DecisionSink, Observer};
use crate::dialer::{Answer, Dialer};
use crate::frontend::{Mailbox, Message};
use crate::line::LineIo;
use crate::nap::Nap;
use crate::reactor::{EventFlags, Reactor, Token};
use crate::ring::{Ring, RingCounts};
use crate::slow::{Party, Slow};
use crate::spin::Spin;
use crate::turns::Turns;
use crate::vsock::{EVENT, TX};

pub use self::agent::{Arrival, Attachment};
use self::capture::Captures;
pub use self::capture::{CaptureError, CaptureFilter};
pub use self::change::{Change, Changed, NewLine, RefusedLine};
pub use self::circuits::{CircuitFilter, CircuitSlice, Survey};
use self::dial::Dialled;
pub use self::host::{ProgramCall, PublishedCall, PublishedTo};
pub use self::hybrid::HybridConfig;
use self::hybrid::Listened;
use self::journal::Handover;
pub use self::journal::{FORMATS, TakenOver};
pub use self::prospect::{CircuitProspect, LineProspect};
use self::redial::Redials;
pub use self::serial::SerialConfig;
use self::tx::{Batch, Outgoing, Packet};

/// Chains kept for use again, so that the steady state allocates nothing.
const SPARE_CHAINS: usize = 1024;

/// Descriptors of one ring that are read in one turn, before the other guests have theirs: some 0.1 ms. A packet may have as many as
/// [`guestmem::queue::MAX_CHAIN_LEN`], so that a number of packets bounds nothing. Four times what half of QEMU's ring
/// has in packets of 64 KiB.
const TURN_DESCRIPTORS: usize = 4096;

/// Payload of one line that is given or relayed in one turn, each, before the other lines have theirs: some 0.5 ms of copying, to which
/// another turn adds some microseconds. As much as 1,024 of Linux's receive buffers hold. What is over goes on in the next turn, at once.
const TURN_BYTES: usize = 4 << 20;

/// What a line needs to be opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LineConfig {
    /// The VM.
    pub address: Address,
    /// What it may use.
    pub limits: Limits,
    /// Where the VMM connects.
    pub vhost_user: PathBuf,
    /// Where programs of the host connect. Listeners for the guest's dials are at this path with `_PORT` behind it.
    pub host: PathBuf,
}

/// Why a line cannot be opened.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, Error)]
pub enum OpenLineError {
    #[error(transparent)]
    Directory(#[from] AddLineError),
    #[error("cannot listen at {path}: {error}")]
    Socket { path: PathBuf, error: io::Error },
}

/// Takes a call for the daemon itself. It must not block; `false` refuses the call.
pub type ArrivalSink = Box<dyn FnMut(Arrival) -> bool + Send>;

/// A line as it stands.
#[derive(Debug, Clone)]
pub struct LineSnapshot {
    /// What the switch knows.
    pub report: LineReport,
    /// Whether a VMM is connected.
    pub attached: bool,
    /// Why the last VMM's connection, or the guest's device, ended as it should not, until another VMM speaks or a driver runs
    /// again: up to [`MAX_FAULT_CHARS`](crate::MAX_FAULT_CHARS), without control characters.
    pub last_fault: Option<String>,
    /// When that was.
    pub last_fault_at: Option<SystemTime>,
    /// The last VMM was hung up on for that.
    pub cut_off: bool,
    /// A second VMM has connected, and waits until the first leaves.
    pub another_waits: bool,
    /// The VMM has stopped the rings of a guest that has circuits, which wait: it is paused, as far as is known.
    pub paused: bool,
    /// Messages that the guest has sent and that are stored for their receivers.
    pub kept_messages: u64,
    /// Descriptors of the guest's that it gets back when what they hold has been taken.
    pub parked_descriptors: usize,
    /// How often its driver and we notified each other.
    pub notified: RingCounts,
}

/// A switch with everything it decides about. One thread owns and runs it.
pub struct Fabric {
    switch: Switch,
    reactor: Reactor,
    start: Instant,
    /// The time of this turn.
    now: Time,
    /// The number of this turn.
    turn: u64,
    /// By the number of the line.
    lines: Slab<Option<Box<LineIo>>>,
    next_line_generation: u64,
    /// By the index of the circuit.
    circuits: Vec<Option<CircuitIo>>,
    callers: Slab<Caller>,
    /// When the next caller in line has waited too long, in the order of arrival: all have the same patience.
    caller_deadlines: VecDeque<(Time, u32)>,
    redials: Redials,
    /// Circuits whose peers have yet to take something, by when to look again.
    remainders: BTreeSet<(Time, CircuitId)>,
    /// Listeners that accept no call until then, in order of time, and until this party has few sockets left to be closed.
    resting_listeners: VecDeque<(Time, Token, Option<Party>)>,
    /// Lines that are not drained until then, as their guests have sent too many packets without payload.
    throttled_lines: BTreeSet<(Time, LineId)>,
    /// Hybrid lines with sockets that could not be made, and when they are tried again.
    hybrid_retries: VecDeque<(Time, LineId)>,
    /// When to look whether guests whose rings are stopped are paused or have gone on without them.
    look_at_stopped_at: Option<Time>,
    agent_port: u32,
    /// The group whose members may connect to host sockets.
    host_group: Option<u32>,
    /// Where VMMs' connections are kept for a successor.
    keeper: Option<Arc<Keeper>>,
    handover: Handover,
    arrivals: ArrivalSink,
    dialer: Option<Dialer>,
    /// Ports of the host whose calls go to the dialer, though they are no services, each with the VMs, or all, whose calls do.
    listening: HashMap<u32, BTreeSet<Option<String>>>,
    /// Where the dialer's answers come in, and the way in for answers.
    dialled: Receiver<(CircuitId, Answer)>,
    dialled_by: Sender<(CircuitId, Answer)>,
    /// Likewise of those who look for listeners on [other threads](crate::aside).
    aside: Sender<Dialled>,
    dialled_aside: Receiver<Dialled>,
    listened_by: Sender<Listened>,
    listened: Receiver<Listened>,
    under_way: UnderWay,
    /// Sockets that have been made for what is opened.
    bound: Bound,
    /// Circuits that may have something to pass without a guest's ring having its turn.
    passing: Turns<LineId, CircuitId>,
    decisions: Option<DecisionSink>,
    observer: Option<Observer>,
    captures: Captures,
    mailbox: Mailbox,
    messages: Receiver<Message>,
    happened: Vec<(Token, EventFlags)>,
    /// What the switch wants done, in order.
    actions: Vec<Action>,
    /// The packet that is being decided about.
    packet: Option<Packet>,
    batch: Batch,
    /// Packets on their way to host programs, by circuit.
    outgoing: Vec<Outgoing>,
    /// Lines that may be sent something.
    woken: VecDeque<LineId>,
    /// Likewise, in the next turn.
    woken_later: VecDeque<LineId>,
    /// Lines with more packets than one turn takes.
    draining: VecDeque<LineId>,
    /// Lines whose guest need not notify of what it sends, since we look anyhow before we sleep.
    unarmed: Vec<LineId>,
    spin: Spin,
    nap: Nap,
    slow: Slow,
    closer: Closer,
    /// Circuits of peers that are too slow, to be cut.
    to_be_cut: VecDeque<CircuitId>,
    /// Lines whose guests are to be notified by then that packets they sent have left, in order of time.
    owed_interrupts: VecDeque<(Time, LineId)>,
    /// Lines with circuits that are short of room for a message.
    short_lines: VecDeque<LineId>,
    /// Rings with something to publish.
    touched: Vec<(LineId, usize)>,
    spare_chains: Vec<Chain>,
    spare_packets: Vec<Vec<Packet>>,
    /// Room for a message of a host program, which has to be read as a whole.
    message_room: Vec<u8>,
    stopped: bool,
    /// No calls for services and published ports are put through any more.
    ends_host_calls: bool,
}

impl Fabric {
    /// A fabric without lines. `limits` are those of each line that is opened without its own. Guests that dial `agent_port` of the host are handed to `arrivals`.
    pub fn new(limits: Limits, agent_port: u32, arrivals: ArrivalSink) -> io::Result<Fabric> {
        guestmem::fault::install()?;
        let reactor = Reactor::new()?;
        let (dialled_by, dialled) = channel();
        let (aside, dialled_aside) = channel();
        let (listened_by, listened) = channel();
        let (mailbox, messages) = Mailbox::new(reactor.waker());
        Ok(Fabric {
            switch: Switch::new(limits),
            reactor,
            start: Instant::now(),
            now: Time::ZERO,
            turn: 0,
            lines: Slab::new(),
            next_line_generation: 0,
            circuits: Vec::new(),
            callers: Slab::new(),
            caller_deadlines: VecDeque::new(),
            redials: Redials::default(),
            remainders: BTreeSet::new(),
            resting_listeners: VecDeque::new(),
            throttled_lines: BTreeSet::new(),
            hybrid_retries: VecDeque::new(),
            owed_interrupts: VecDeque::new(),
            look_at_stopped_at: None,
            agent_port,
            host_group: None,
            keeper: None,
            handover: Handover::default(),
            arrivals,
            dialer: None,
            listening: HashMap::new(),
            dialled,
            dialled_by,
            aside,
            dialled_aside,
            listened_by,
            listened,
            under_way: UnderWay::new(),
            bound: Bound::default(),
            passing: Turns::default(),
            decisions: None,
            observer: None,
            captures: Captures::default(),
            mailbox,
            messages,
            happened: Vec::new(),
            actions: Vec::new(),
            packet: None,
            batch: Batch::default(),
            outgoing: Vec::new(),
            spare_packets: Vec::new(),
            woken: VecDeque::new(),
            woken_later: VecDeque::new(),
            draining: VecDeque::new(),
            unarmed: Vec::new(),
            spin: Spin::new(Duration::ZERO),
            nap: Nap::default(),
            slow: Slow::default(),
            closer: Closer::default(),
            to_be_cut: VecDeque::new(),
            short_lines: VecDeque::new(),
            touched: Vec::new(),
            spare_chains: Vec::new(),
            message_room: vec![0; host::MAX_MESSAGE_BYTES],
            stopped: false,
            ends_host_calls: false,
        })
    }

    /// Lets a turn look for up to this long before it sleeps, while things come so fast that it is worth it. Zero, which
    /// holds until this is called, sleeps at once.
    pub fn set_spin(&mut self, limit: Duration) {
        self.spin = Spin::new(limit);
    }

    /// Lets the members of this group connect to the host sockets of lines that are opened from now on (mode 0660). Without one, which holds until
    /// this is called, the daemon's user alone may (0600).
    pub fn set_host_group(&mut self, group: Option<u32>) {
        self.host_group = group;
    }

    /// Wakes this fabric's [`turn`](Self::turn) from another thread.
    pub fn waker(&self) -> Waker {
        self.reactor.waker()
    }

    /// Closes every line, for good.
    pub fn stop(&mut self) {
        if self.keeper.as_ref().is_some_and(|keeper| !keeper.runs()) {
            self.leave_guests();
        }
        let names: Vec<String> = self
            .lines
            .iter()
            .filter_map(|(_, line)| Some(line.as_ref()?.name.clone()))
            .collect();
        self.strike_lines(&names);
        self.cut_all();
        self.captures.end();
        // Else they would be there when the process has ended.
        let _ = self.all_done().recv_timeout(REMOVAL_PATIENCE);
        self.stopped = true;
    }

    /// Cuts the circuits with programs of the host, and makes no more of them for services and published ports. Guests' circuits go on:
    /// programs that serve these calls may take their time to end. Returns how many it cuts.
    pub fn end_host_calls(&mut self) -> usize {
        self.ends_host_calls = true;
        self.dialer = None;
        let count = self.switch.cut_host_circuits(self.now, &mut self.actions);
        self.carry_out();
        self.cut_all();
        count
    }

    /// Makes the cuts that have begun: a circuit that is not cut looks like one that has ended when its sockets are closed.
    fn cut_all(&mut self) {
        while self.switch.is_cutting() {
            self.tell(Event::Tick);
        }
    }

    /// Whether [`stop`](Self::stop) was called.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Puts another policy in force, with the groups that VMs are in from now on, by their full names. VMs that are not named keep
    /// theirs. With `enforce_existing`, circuits that it would not set up are cut short; returns how many.
    pub fn set_policy(
        &mut self,
        policy: Arc<Policy>,
        groups: Vec<(String, Vec<String>)>,
        enforce_existing: bool,
    ) -> usize {
        let mut is_same = Arc::ptr_eq(self.switch.policy(), &policy);
        for (vm, groups) in groups {
            if let Some(line) = self.line_named(&vm) {
                is_same &= !self.switch.set_groups(line, groups);
            }
        }
        // What each line has to do with each rule need not be found out anew when one VM comes or goes.
        if !is_same {
            self.switch.set_policy(policy);
        }
        self.offer_ports();
        if !enforce_existing {
            return 0;
        }
        let ended = self.switch.enforce_policy(self.now, &mut self.actions);
        self.carry_out();
        ended
    }

    /// Gives VMs, by their full names, these other names, and no others. VMs that are not named keep theirs.
    pub fn set_aliases(&mut self, of: Vec<(String, Vec<String>)>) {
        let known = of
            .into_iter()
            .filter_map(|(vm, names)| Some((self.line_named(&vm)?, names)));
        let known = known.collect();
        self.switch.set_aliases(known);
    }

    /// Replaces the services that guests can call: [`set_dialer`](Self::set_dialer) puts such calls through.
    pub fn set_services(&mut self, services: Vec<ServiceEntry>) {
        self.switch.set_services(services);
        self.offer_ports();
    }

    /// Sets what puts calls to services and to the directory through. Until then they are refused.
    pub fn set_dialer(&mut self, dialer: Dialer) {
        self.dialer = Some(dialer);
    }

    /// Sets what is called with the outcome of calls.
    pub fn set_decision_sink(&mut self, sink: DecisionSink) {
        self.decisions = Some(sink);
    }

    /// Sets what is called when lines come and go, and when circuits end.
    pub fn set_observer(&mut self, observer: Observer) {
        self.switch.keep_ended();
        self.observer = Some(observer);
    }

    /// One turn: waits until something happens, but not beyond `limit`, and does what follows from it.
    pub fn turn(&mut self, limit: Option<Duration>) -> io::Result<()> {
        if self.awaits_start() {
            return Ok(());
        }
        let mut happened = std::mem::take(&mut self.happened);
        self.wait(limit, &mut happened)?;
        self.now = self.start.elapsed();
        self.turn += 1;
        self.slow.begin_turn();
        for (token, flags) in happened.drain(..) {
            self.dispatch(token, flags);
        }
        self.happened = happened;
        self.expire();
        self.serve_lines();
        self.pass_scheduled();
        self.cut_overruns();
        self.end_shortage();
        self.publish();
        self.captures.offer();
        Ok(())
    }

    fn dispatch(&mut self, token: Token, flags: EventFlags) {
        if let Token::Ring { line, index } = token {
            let ring = |line: &mut LineIo| {
                line.rings
                    .get_mut(usize::from(index))?
                    .as_mut()
                    .map(Ring::kicked)
            };
            self.line(line).and_then(ring);
            self.look_at_ring(line, usize::from(index));
        }
        match token {
            Token::Wake => {
                self.take_messages();
                self.take_dialled();
                self.take_aside();
                self.take_listened();
            }
            Token::Ring { line, index } if usize::from(index) == TX => self.schedule_drain(line),
            Token::Ring { line, index } if usize::from(index) == EVENT => self.send_events(line),
            Token::Ring { line, .. } => self.wake(line),
            Token::Listener { line, index } => self.accept(line, usize::from(index)),
            Token::Caller { slot } => self.caller_ready(slot),
            Token::Circuit(id) => self.host_ready(id, flags),
            Token::HybridListener { line, port } => self.accept_hybrid(line, port),
            Token::Ringing(id) => self.vmm_ready(id, flags),
            Token::Relayed { circuit, side } => self.relay_ready(circuit, side, flags),
            // A network's, and none of these here.
            Token::Uplink { .. } => {}
        }
    }

    fn expire(&mut self) {
        if self.switch.poll_at().is_some_and(|at| at <= self.now) {
            self.tell(Event::Tick);
        }
        self.expire_callers();
        self.redial();
        self.look_at_remainders();
        self.wake_listeners();
        self.end_throttles();
        self.pay_interrupts();
        self.look_at_stopped();
        self.retry_listening();
    }

    /// Gives the switch an event, and carries out its actions.
    fn tell(&mut self, event: Event) {
        if self.captures.are_wanted() {
            self.show_event(&event);
        }
        self.switch.handle(self.now, event, &mut self.actions);
        self.carry_out();
    }

    fn line(&mut self, id: LineId) -> Option<&mut LineIo> {
        self.lines.get_mut(id.0 as usize)?.as_deref_mut()
    }

    fn circuit(&mut self, id: CircuitId) -> Option<&mut CircuitIo> {
        find_circuit(&mut self.circuits, id)
    }

    fn peek_circuit(&self, id: CircuitId) -> Option<&CircuitIo> {
        peek_circuit(&self.circuits, id)
    }

    fn wake(&mut self, id: LineId) {
        let waits = self
            .line(id)
            .map(|line| std::mem::replace(&mut line.woken, true));
        if waits == Some(false) {
            self.woken.push_back(id);
        }
    }

    fn schedule_drain(&mut self, id: LineId) {
        let waits = self
            .line(id)
            .map(|line| std::mem::replace(&mut line.draining, true));
        if waits == Some(false) {
            self.draining.push_back(id);
        }
    }

    /// Gives a chain back to the guest it came from.
    fn complete(&mut self, id: LineId, index: usize, chain: Chain, written: u32) {
        if let Some(ring) = self.line(id).and_then(|line| line.rings[index].as_mut()) {
            let first = !ring.touched;
            ring.complete(&chain, written);
            if first {
                self.touched.push((id, index));
            }
        }
        if self.spare_chains.len() < SPARE_CHAINS {
            self.spare_chains.push(chain);
        }
    }

    /// Drops what is kept from one side of a circuit, giving parked chains back.
    fn discard(&mut self, id: CircuitId, from: Side) {
        let Some(kept) = self.circuit(id).and_then(|circuit| circuit.take_kept(from)) else {
            return;
        };
        let mut kept = *kept;
        while let Some(parcel) = kept.pop() {
            self.give_back(parcel);
        }
    }
}

/// A circuit, as long as it is there, where the rest of the fabric is needed as well.
fn peek_circuit(circuits: &[Option<CircuitIo>], id: CircuitId) -> Option<&CircuitIo> {
    let circuit = circuits.get(id.index as usize)?.as_ref()?;
    (circuit.id == id).then_some(circuit)
}

fn find_circuit(circuits: &mut [Option<CircuitIo>], id: CircuitId) -> Option<&mut CircuitIo> {
    let circuit = circuits.get_mut(id.index as usize)?.as_mut()?;
    (circuit.id == id).then_some(circuit)
}
