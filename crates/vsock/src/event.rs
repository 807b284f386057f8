//! Events of the switch, and its actions.

use policy::{LineId, RuleId, ServiceId};
use serde::{Deserialize, Serialize};
use wire::vsock::{Header, SocketType};

use crate::{CircuitId, ProgramId, Reason, Side};

/// Something that happened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The guest's driver has set its rings up afresh: it knows of no circuit.
    LineUp {
        /// Whose driver.
        line: LineId,
        /// Whether it takes SEQPACKET sockets.
        seqpacket: bool,
    },
    /// A guest whose rings ran for a process before this one is about to go on: it knows the circuits that were
    /// [inherited](crate::Switch::inherit).
    LineGoesOn {
        /// Whose driver.
        line: LineId,
        /// Whether it takes SEQPACKET sockets.
        seqpacket: bool,
    },
    /// The guest is gone, or has forgotten its circuits: the VMM went away or the device was reset.
    LineDown {
        /// Whose guest.
        line: LineId,
    },
    /// A guest sent a packet. Its payload, if any, is kept by the device until the actions say what becomes of it.
    Packet {
        /// Where it came in.
        line: LineId,
        /// The header, copied out of guest memory; `len` bytes of payload are known to follow.
        header: Header,
    },
    /// A program on the host wants to reach a port of a guest.
    HostDial {
        /// The guest's line.
        line: LineId,
        /// The guest's port.
        port: u32,
        /// The type of socket that the program uses.
        socket_type: SocketType,
        /// The party.
        caller: HostCaller,
        /// The caller's own name for this attempt, given back in the answer.
        token: u64,
    },
    /// The VMM of a hybrid line calls for its guest, at the socket that stands for this port of the host.
    HybridDial {
        /// The guest's line.
        line: LineId,
        /// The port of the host that the guest has dialled.
        port: u32,
        /// The caller's own name for this attempt, given back in the answer, as with [`Event::HostDial`].
        token: u64,
    },
    /// Both directions between two sockets that [`Action::Relay`] has joined are over. The circuit keeps its places until [`Event::Taken`].
    RelayEnded {
        /// The circuit.
        circuit: CircuitId,
    },
    /// The peers of a circuit's sockets have taken everything after [`Event::RelayEnded`], or after an [`Action::HostClose`] that was no reset.
    Taken {
        /// The circuit.
        circuit: CircuitId,
    },
    /// The dial that [`Action::DialHost`] or [`Action::DialHybrid`] asked for has succeeded, or failed for this reason.
    HostDialed {
        /// The circuit.
        circuit: CircuitId,
        /// Whether a program on the host has taken the call.
        result: Result<(), Reason>,
    },
    /// The host program's socket may have something to read: data or the end of data.
    HostReadable {
        /// The circuit.
        circuit: CircuitId,
    },
    /// The host program's socket has been read empty.
    HostDrained {
        /// The circuit.
        circuit: CircuitId,
    },
    /// Bytes that a host program sent are in the device's keeping (a message, which is read as a whole).
    HostStored {
        /// The circuit.
        circuit: CircuitId,
        /// How many bytes.
        len: u32,
    },
    /// The host program has sent its last byte, and it has been read.
    HostFinished {
        /// The circuit.
        circuit: CircuitId,
    },
    /// The host program takes no more data. What was kept for it has been thrown away by the device.
    HostRefused {
        /// The circuit.
        circuit: CircuitId,
    },
    /// The host program is gone before the guest answered its dial.
    HostGone {
        /// The circuit.
        circuit: CircuitId,
    },
    /// Bytes have reached the host program's socket.
    Delivered {
        /// The circuit.
        circuit: CircuitId,
        /// How many bytes.
        len: u32,
    },
    /// The device ends this circuit: it cannot go on.
    Kill {
        /// The circuit.
        circuit: CircuitId,
        /// Why.
        reason: Reason,
    },
    /// Time has passed: [`Switch::poll_at`](crate::Switch::poll_at) is reached.
    Tick,
}

/// A guest's call to the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HostCall {
    /// The circuit.
    pub circuit: CircuitId,
    /// The VM that calls.
    pub line: LineId,
    /// The port it calls.
    pub port: u32,
    /// The port it calls from. Below 1024 the guest's kernel vouches for a privileged program; 0 is that of a hybrid
    /// line, whose VMM is silent.
    pub source_port: u32,
    /// The type of socket to dial with.
    pub socket_type: SocketType,
    /// The service, if it is one.
    pub service: Option<ServiceId>,
    /// The rule that allows the call.
    pub rule: Option<RuleId>,
}

/// A caller on the host's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostCaller {
    /// A program of the host, by what [`Switch::program`](crate::Switch::program) said.
    Program(ProgramId),
    /// A caller at a published port.
    Published(Outsider),
    /// The daemon itself: the guest's agent is to connect a caller of a published port.
    ForPublished(Outsider),
}

/// The accounted owner of a published call, as a number that the host chooses: an address, a network or a user. 0 stands for the unknown.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Outsider(pub u128);

/// What has become of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Decided {
    /// The caller.
    pub caller: CallerId,
    /// The context identifier that was called: the host's or, as the caller knows it, a guest's.
    pub dialled_cid: u32,
    /// The port that was called.
    pub dialled_port: u32,
    /// The callee meant, if there is such.
    pub dialled: Option<CalleeId>,
    /// The real callee, if it came so far: by a redirection another one.
    pub reached: Option<CalleeId>,
    /// The rule that decided, of the policy in force; without one, what holds without a rule.
    pub rule: Option<RuleId>,
    /// Why there is no circuit, if there is none.
    pub result: Result<(), Reason>,
}

/// The caller.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallerId {
    /// A guest.
    Guest {
        /// Its line.
        line: LineId,
        /// Its port. Of a hybrid line, the one that stands for it; 0 if it was refused before it had one.
        port: u32,
    },
    /// A caller on the host's side was refused at once.
    HostAttempt {
        /// The caller's own name for the attempt.
        token: u64,
    },
    /// The call of a caller on the host's side has become this circuit.
    HostCircuit {
        /// The circuit.
        circuit: CircuitId,
    },
}

/// The callee.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CalleeId {
    /// A guest.
    Guest {
        /// Its line.
        line: LineId,
        /// Its port.
        port: u32,
    },
    /// A service of the host.
    Service(ServiceId),
    /// A socket that a program of the host has made for the caller.
    Listener {
        /// The port that it stands for.
        port: u32,
    },
}

/// A direction of a host program's socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// What the host program sends: `SHUT_RD` on our side.
    Read,
    /// What the host program receives: `SHUT_WR` on our side.
    Write,
}

/// Something to do. Actions are carried out in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Action {
    /// The payload of the packet just handled goes to the other end of the circuit, behind what is kept for it.
    Forward {
        /// The circuit.
        circuit: CircuitId,
        /// The side that sent it.
        from: Side,
    },
    /// Dial the service, or the host program that listens for this port of this line, and report [`Event::HostDialed`].
    DialHost(HostCall),
    /// Have the VMM of this hybrid line dial a port of its guest, and report [`Event::HostDialed`].
    DialHybrid {
        /// The circuit.
        circuit: CircuitId,
        /// The line of the VM that is called.
        line: LineId,
        /// The guest's port.
        port: u32,
    },
    /// Both ends of this circuit are sockets of the host's, and the callee has answered: say so to a caller that waits for
    /// it, join the two, and report [`Event::RelayEnded`].
    Relay {
        /// The circuit.
        circuit: CircuitId,
        /// The caller's port, as the callee sees it.
        port: u32,
    },
    /// Go on with a relay that [`Switch::relayed`](crate::Switch::relayed) has throttled.
    RelayOn {
        /// The circuit.
        circuit: CircuitId,
    },
    /// A call has been answered or refused. Each call is reported so once, for the audit.
    Decided(Decided),
    /// The dial with this token has become a circuit; the guest has yet to answer.
    HostDialing {
        /// The caller's name for the attempt.
        token: u64,
        /// The circuit from now on.
        circuit: CircuitId,
    },
    /// The dial with this token is refused at once.
    HostDialRefused {
        /// The caller's name for the attempt.
        token: u64,
        /// Why.
        reason: Reason,
    },
    /// The guest has accepted the host program's dial: say so, and begin to read from it.
    HostAccepted {
        /// The circuit.
        circuit: CircuitId,
        /// The host program's port, as the guest sees it.
        port: u32,
    },
    /// The guest will not accept the host program's dial: say why and close.
    HostRejected {
        /// The circuit.
        circuit: CircuitId,
        /// Why.
        reason: Reason,
    },
    /// Shut one direction of the host program's socket. Everything kept for it has been delivered.
    HostShutdown {
        /// The circuit.
        circuit: CircuitId,
        /// Which direction.
        direction: Direction,
    },
    /// Close the host program's socket and forget what is kept for it. Without a reset, the circuit keeps its places until [`Event::Taken`]: what the program has
    /// yet to take is in the host's memory.
    HostClose {
        /// The circuit.
        circuit: CircuitId,
        /// Whether the circuit was cut short: then the host program should see an error where its kind of socket
        /// can show one.
        reset: bool,
    },
    /// Forget what is kept from this side: it cannot be delivered any more.
    Discard {
        /// The circuit.
        circuit: CircuitId,
        /// The side it came from.
        from: Side,
    },
    /// There is something to send to this line: ask [`Switch::next_for`](crate::Switch::next_for).
    Wake {
        /// The line.
        line: LineId,
    },
    /// The circuit is over on both ends; its number will be used again.
    Released {
        /// The circuit.
        circuit: CircuitId,
    },
    /// For the log: a guest's dial was refused, or a circuit was cut short.
    Report {
        /// The line that asked for it.
        line: LineId,
        /// Its port.
        source_port: u32,
        /// The context identifier it addressed.
        destination_cid: u32,
        /// The port it addressed.
        destination_port: u32,
        /// Why.
        reason: Reason,
    },
}

/// What to send to a guest next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transmit {
    /// This header, without payload. It counts as sent.
    Control(Header),
    /// Data of this circuit. Afterwards [`Switch::transmitted`](crate::Switch::transmitted) must be called with how much.
    Data {
        /// The circuit.
        circuit: CircuitId,
        /// The side that sent the data; the line asked about is on the other.
        from: Side,
        /// Send no more than this many bytes now.
        budget: u32,
        /// Use no more than this many packets now.
        packets: u32,
        /// The header of every packet of this turn, but for `len` and `flags`.
        header: Header,
    },
}

/// What was done about a [`Transmit::Data`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sent {
    /// The circuit.
    pub circuit: CircuitId,
    /// The side that the data came from.
    pub from: Side,
    /// Payload put into the guest's ring, in bytes.
    pub len: u32,
    /// How much of it was never in the device's keeping, but came straight from a host program's socket, in bytes.
    pub straight: u32,
    /// In how many packets.
    pub packets: u32,
}
