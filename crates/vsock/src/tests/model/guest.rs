//! A guest with a Linux kernel's vsock (`net/vmw_vsock/`), and the rings between it and the device.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use policy::{LineId, Time};
use wire::vsock::{
    Header, MAX_PAYLOAD_LEN, Operation, SEQPACKET_END_OF_MESSAGE, SHUTDOWN_BOTH, SHUTDOWN_RECEIVE,
    SHUTDOWN_SEND, SocketType,
};

use super::audit::Audit;
use super::payload::Chunk;
use super::socket::{After, Kernel, Plan, Socket, State};
use crate::{CircuitId, Side};

/// `VSOCK_CLOSE_TIMEOUT`.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(8);
/// `VSOCK_DEFAULT_CONNECT_TIMEOUT`.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// A packet in a ring.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packet {
    pub(crate) header: Header,
    pub(crate) chunk: Option<Chunk>,
    /// The circuit that it belongs to, for the audit: no real packet says so.
    pub(crate) circuit: Option<CircuitId>,
}

/// A listening socket.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Listener {
    pub(crate) socket_type: SocketType,
    pub(crate) buf_alloc: u32,
    pub(crate) plan: Plan,
    /// Connections that it will still accept.
    pub(crate) backlog: u32,
}

pub(crate) type Key = (u32, u32, u32);

#[derive(Debug, Clone)]
pub(crate) struct Guest {
    pub(crate) line: LineId,
    pub(crate) cid: u32,
    pub(crate) kernel: Kernel,
    pub(crate) up: bool,
    /// A paused VM neither sends nor takes anything.
    pub(crate) paused: bool,
    /// It lies: nothing about its own side is checked.
    pub(crate) hostile: bool,
    /// Buffers in its receive ring.
    pub(crate) ring: usize,
    /// Payload that one of them takes, in bytes.
    pub(crate) buffer_payload: u32,
    pub(crate) rx: VecDeque<Packet>,
    pub(crate) tx: VecDeque<Packet>,
    pub(crate) sockets: BTreeMap<u32, Socket>,
    pub(crate) table: BTreeMap<Key, u32>,
    pub(crate) listeners: BTreeMap<u32, Listener>,
    next_port: u32,
    next_socket: u32,
}

impl Guest {
    pub(crate) fn new(line: LineId, cid: u32) -> Guest {
        Guest {
            line,
            cid,
            kernel: Kernel::CountsPackets,
            up: false,
            paused: false,
            hostile: false,
            ring: 256,
            buffer_payload: 4096 - 44,
            rx: VecDeque::new(),
            tx: VecDeque::new(),
            sockets: BTreeMap::new(),
            table: BTreeMap::new(),
            listeners: BTreeMap::new(),
            next_port: 1024,
            next_socket: 0,
        }
    }

    pub(crate) fn room(&self) -> usize {
        self.ring.saturating_sub(self.rx.len())
    }

    pub(crate) fn socket(&self, id: u32) -> &Socket {
        &self.sockets[&id]
    }

    fn sock(&mut self, id: u32) -> &mut Socket {
        self.sockets.get_mut(&id).expect("the socket exists")
    }

    pub(crate) fn listen(&mut self, port: u32, socket_type: SocketType, plan: Plan) {
        let listener = Listener {
            socket_type,
            buf_alloc: 256 * 1024,
            plan,
            backlog: u32::MAX,
        };
        self.listeners.insert(port, listener);
    }

    /// The one socket that a listener's port has accepted last.
    pub(crate) fn accepted(&self, port: u32) -> Option<u32> {
        self.sockets
            .iter()
            .rev()
            .find(|(_, socket)| socket.port == port && socket.side == Side::Callee)
            .map(|(id, _)| *id)
    }

    // ---- The program's calls ----

    /// `connect()`, from a port of the kernel's choice or from this one.
    pub(crate) fn connect(
        &mut self,
        now: Time,
        mut socket: Socket,
        (peer_cid, peer_port): (u32, u32),
        port: Option<u32>,
    ) -> u32 {
        socket.port = port.unwrap_or_else(|| {
            self.next_port += 1;
            self.next_port
        });
        socket.peer_cid = peer_cid;
        socket.peer_port = peer_port;
        socket.connect_by = Some(now + CONNECT_TIMEOUT);
        let key = (socket.port, peer_cid, peer_port);
        let id = self.next_socket;
        self.next_socket += 1;
        self.sockets.insert(id, socket);
        self.table.insert(key, id);
        self.send(id, Operation::Request, 0, None);
        id
    }

    /// Writes up to `len` bytes, as credit allows; a SEQPACKET message is written in parts. Returns the bytes written.
    pub(crate) fn write(&mut self, id: u32, len: u32, audit: &mut Audit) -> u32 {
        let socket = self.sock(id);
        let Some(circuit) = socket.circuit.filter(|_| socket.may_write()) else {
            return 0;
        };
        let side = socket.side;
        let mut left = len.min(socket.space());
        let message = socket.socket_type == SocketType::SeqPacket;
        if message {
            if socket.message_left == 0 {
                if len > socket.peer_buf_alloc.min(socket.buf_alloc) {
                    return 0; // EMSGSIZE.
                }
                socket.message_left = len;
            }
            left = socket.message_left.min(socket.space());
        }
        let total = left;
        while left > 0 {
            let part = left.min(MAX_PAYLOAD_LEN);
            left -= part;
            let socket = self.sock(id);
            socket.tx_cnt = socket.tx_cnt.wrapping_add(part);
            let mut flags = 0;
            if message {
                socket.message_left -= part;
                if socket.message_left == 0 {
                    flags = SEQPACKET_END_OF_MESSAGE;
                }
            }
            let chunk = audit.write(circuit, side, part, flags);
            self.send(id, Operation::Data, flags, Some(chunk));
        }
        total
    }

    /// Reads up to `max` bytes, or one message.
    pub(crate) fn read(&mut self, id: u32, max: u32) -> u32 {
        let (read, tell) = self.sock(id).read(max);
        if tell {
            self.send(id, Operation::CreditUpdate, 0, None);
        }
        read
    }

    /// `shutdown()`.
    pub(crate) fn shutdown(&mut self, id: u32, flags: u32, audit: &mut Audit) {
        let socket = self.sock(id);
        if socket.state != State::Established || socket.released {
            return;
        }
        socket.own_shutdown |= flags;
        let cut_message = flags & SHUTDOWN_SEND != 0 && socket.message_left > 0;
        if let Some(circuit) = socket.circuit.filter(|_| cut_message) {
            audit.end(circuit, socket.side).cut_message = true;
        }
        let socket = self.sock(id);
        let (circuit, side, done) = (socket.circuit, socket.side, socket.done);
        if let Some(circuit) = circuit.filter(|_| flags & SHUTDOWN_RECEIVE != 0) {
            audit.end(circuit, side).refuses = true;
        }
        if !done {
            self.send(id, Operation::Shutdown, flags, None);
        }
    }

    /// `close()`.
    pub(crate) fn close(&mut self, now: Time, id: u32, audit: &mut Audit) {
        let socket = self.sock(id);
        if std::mem::replace(&mut socket.released, true) {
            return;
        }
        if let Some(circuit) = socket.circuit {
            let end = audit.end(circuit, socket.side);
            end.refuses = true;
            end.cut_message |= socket.message_left > 0;
        }
        if socket.state != State::Established {
            return self.remove(id);
        }
        if socket.done {
            return self.remove(id);
        }
        if socket.peer_shutdown == SHUTDOWN_BOTH {
            self.send(id, Operation::Reset, 0, None);
            return self.remove(id);
        }
        let ended = socket.own_shutdown;
        socket.own_shutdown = SHUTDOWN_BOTH;
        socket.close_at = Some(now + CLOSE_TIMEOUT);
        if ended != SHUTDOWN_BOTH {
            self.send(id, Operation::Shutdown, SHUTDOWN_BOTH, None);
        }
    }

    fn unlist(&mut self, id: u32) {
        let socket = &self.sockets[&id];
        let key = (socket.port, socket.peer_cid, socket.peer_port);
        if self.table.get(&key) == Some(&id) {
            self.table.remove(&key);
        }
    }

    fn remove(&mut self, id: u32) {
        self.unlist(id);
        self.sockets.remove(&id);
    }

    /// Lets every program go on as far as it can.
    pub(crate) fn run_programs(&mut self, now: Time, audit: &mut Audit) -> bool {
        let mut busy = false;
        for id in self.sockets.keys().copied().collect::<Vec<_>>() {
            busy |= self.run_program(now, id, audit);
        }
        busy
    }

    pub(crate) fn run_program(&mut self, now: Time, id: u32, audit: &mut Audit) -> bool {
        let mut busy = false;
        let socket = self.socket(id);
        if socket.released || socket.state == State::Connecting {
            return false;
        }
        if socket.plan.reads && socket.own_shutdown & SHUTDOWN_RECEIVE == 0 {
            while self.read(id, u32::MAX) > 0 {
                busy = true;
            }
        }
        while self.socket(id).plan.left > 0 {
            let plan = self.socket(id).plan;
            let message_left = self.socket(id).message_left;
            let socket = self.socket(id);
            // A longer message would be EMSGSIZE.
            let longest = match socket.socket_type {
                SocketType::Stream => u32::MAX,
                SocketType::SeqPacket => socket.peer_buf_alloc.min(socket.buf_alloc),
            };
            let len = match message_left {
                0 => u64::from(plan.write_len.min(longest)).min(plan.left) as u32,
                left => left,
            };
            let written = self.write(id, len, audit);
            let left = &mut self.sock(id).plan.left;
            *left = left.saturating_sub(u64::from(written));
            busy |= written > 0;
            if written == 0 {
                break;
            }
        }
        let socket = self.sock(id);
        if socket.done || socket.peer_shutdown & SHUTDOWN_RECEIVE != 0 {
            socket.plan.left = 0;
            socket.message_left = 0;
        }
        let plan = socket.plan;
        if plan.left > 0 || socket.message_left > 0 {
            return busy;
        }
        let over = socket.done || socket.peer_shutdown & SHUTDOWN_SEND != 0;
        let finished = socket.own_shutdown & SHUTDOWN_SEND != 0
            || socket.peer_shutdown & SHUTDOWN_RECEIVE != 0;
        if plan.after == After::HalfClose && !finished {
            self.shutdown(id, SHUTDOWN_SEND, audit);
            return true;
        }
        if plan.after == After::Close || (plan.closes && over && self.socket(id).unread == 0) {
            self.close(now, id, audit);
            return true;
        }
        busy
    }

    // ---- The kernel ----

    pub(crate) fn next_timer(&self) -> Option<Time> {
        self.sockets
            .values()
            .flat_map(|socket| [socket.close_at, socket.connect_by])
            .flatten()
            .min()
    }

    pub(crate) fn fire_timers(&mut self, now: Time) {
        for id in self.sockets.keys().copied().collect::<Vec<_>>() {
            let socket = self.sock(id);
            if socket.close_at.is_some_and(|at| at <= now) {
                self.send(id, Operation::Reset, 0, None);
                self.remove(id);
            } else if socket.connect_by.is_some_and(|at| at <= now) {
                socket.state = State::Closed;
                self.remove(id);
            }
        }
    }

    /// Takes one packet out of the receive ring.
    pub(crate) fn take_packet(&mut self, audit: &mut Audit) -> bool {
        let Some(packet) = self.rx.pop_front() else {
            return false;
        };
        if !self.hostile {
            self.receive(packet, audit);
        }
        true
    }

    fn receive(&mut self, packet: Packet, audit: &mut Audit) {
        let header = packet.header;
        assert_eq!(
            header.dst_cid,
            u64::from(self.cid),
            "another guest's packet"
        );
        let key = (header.dst_port, header.src_cid as u32, header.src_port);
        let operation = Operation::from_wire(header.operation).expect("the switch knows them all");
        let known = self.table.get(&key).copied();
        let Some(id) = known.filter(|id| {
            let socket = &self.sockets[id];
            socket.socket_type as u16 == header.socket_type && !socket.done
        }) else {
            if operation == Operation::Request && known.is_none() && self.accept(&packet) {
                return;
            }
            let answer = operation == Operation::Response;
            if let Some(circuit) = packet.circuit.filter(|_| answer) {
                // The program has given up in the meantime.
                audit.end(circuit, Side::Caller).refuses = true;
            }
            return self.reset_without_socket(&header);
        };
        let socket = self.sock(id);
        socket.peer_buf_alloc = header.buf_alloc;
        socket.peer_fwd_cnt = header.fwd_cnt;
        match socket.state {
            State::Connecting => self.receive_connecting(id, operation, &packet, audit),
            State::Established => {
                if packet.circuit.is_some_and(|id| !audit.is_tainted(id)) {
                    assert_eq!(
                        packet.circuit, socket.circuit,
                        "a packet of another circuit"
                    );
                }
                self.receive_connected(id, operation, &packet, audit);
            }
            State::Closed => self.reset_without_socket(&header),
        }
    }

    fn receive_connecting(
        &mut self,
        id: u32,
        operation: Operation,
        packet: &Packet,
        audit: &Audit,
    ) {
        match operation {
            Operation::Response => {
                let socket = self.sock(id);
                socket.state = State::Established;
                socket.circuit = packet.circuit;
                socket.connect_by = None;
            }
            Operation::Reset => {
                self.sock(id).state = State::Closed;
                self.remove(id);
            }
            other => {
                // EPROTO. Only a hostile peer may bring that about.
                let by_enemy = packet.circuit.is_some_and(|id| audit.is_tainted(id));
                assert!(by_enemy, "{other:?} before the answer");
                self.send(id, Operation::Reset, 0, None);
                self.remove(id);
            }
        }
    }

    fn receive_connected(
        &mut self,
        id: u32,
        operation: Operation,
        packet: &Packet,
        audit: &mut Audit,
    ) {
        let (kernel, payload) = (self.kernel, self.buffer_payload);
        let socket = self.sock(id);
        let (circuit, side) = (socket.circuit.expect("established"), socket.side);
        match operation {
            Operation::Data => {
                let chunk = packet.chunk.expect("data");
                audit.receive(side, &chunk);
                assert!(
                    socket.enqueue(chunk, payload, kernel),
                    "{circuit:?} {side:?}: the guest is overrun by {chunk:?}: {socket:?}"
                );
            }
            Operation::CreditRequest => self.send(id, Operation::CreditUpdate, 0, None),
            Operation::Shutdown => {
                socket.peer_shutdown |= packet.header.flags & SHUTDOWN_BOTH;
                if packet.header.flags & SHUTDOWN_SEND != 0 {
                    audit.end_of_data(circuit, side);
                }
                if packet.header.flags & SHUTDOWN_RECEIVE != 0 {
                    audit.no_more_taken(circuit, side);
                }
                if socket.peer_shutdown == SHUTDOWN_BOTH {
                    if socket.unread == 0 {
                        socket.do_close();
                        let released = socket.released;
                        self.send(id, Operation::Reset, 0, None);
                        if released {
                            return self.remove(id);
                        }
                    }
                    self.unlist(id);
                }
            }
            Operation::Reset => {
                audit.reset(circuit, side);
                socket.do_close();
                if socket.released {
                    self.remove(id);
                }
            }
            Operation::CreditUpdate | Operation::Request | Operation::Response => {}
        }
    }

    fn accept(&mut self, packet: &Packet) -> bool {
        let header = packet.header;
        let Some(listener) = self.listeners.get_mut(&header.dst_port) else {
            return false;
        };
        if listener.backlog == 0 || listener.socket_type as u16 != header.socket_type {
            return false;
        }
        listener.backlog = listener
            .backlog
            .saturating_sub(u32::from(listener.backlog != u32::MAX));
        let mut socket = Socket::new(Side::Callee, listener.socket_type, listener.buf_alloc);
        socket.plan = listener.plan;
        socket.state = State::Established;
        socket.circuit = packet.circuit;
        socket.port = header.dst_port;
        socket.peer_cid = header.src_cid as u32;
        socket.peer_port = header.src_port;
        socket.peer_buf_alloc = header.buf_alloc;
        socket.peer_fwd_cnt = header.fwd_cnt;
        let key = (socket.port, socket.peer_cid, socket.peer_port);
        let id = self.next_socket;
        self.next_socket += 1;
        self.sockets.insert(id, socket);
        self.table.insert(key, id);
        self.send(id, Operation::Response, 0, None);
        true
    }

    /// `virtio_transport_reset_no_sock`.
    fn reset_without_socket(&mut self, header: &Header) {
        if header.operation == Operation::Reset as u16 {
            return;
        }
        let header = Header {
            src_cid: header.dst_cid,
            dst_cid: header.src_cid,
            src_port: header.dst_port,
            dst_port: header.src_port,
            socket_type: header.socket_type,
            operation: Operation::Reset as u16,
            ..Header::default()
        };
        self.tx.push_back(Packet {
            header,
            chunk: None,
            circuit: None,
        });
    }

    /// Queues a packet of this socket, with the numbers of this moment.
    pub(crate) fn send(&mut self, id: u32, operation: Operation, flags: u32, chunk: Option<Chunk>) {
        let cid = self.cid;
        let socket = self.sock(id);
        // Numbers are taken on one processor and queued on another: an older one may come behind a newer one.
        let late = socket.tx_cnt % 7 == 3 && socket.fwd_cnt == socket.told_fwd_cnt;
        let fwd_cnt = if late {
            socket.stale_fwd_cnt
        } else {
            socket.fwd_cnt
        };
        if late {
            socket.stale_fwd_cnt = socket.fwd_cnt;
        } else if socket.fwd_cnt != socket.told_fwd_cnt {
            socket.stale_fwd_cnt = socket.told_fwd_cnt;
            socket.told_fwd_cnt = socket.fwd_cnt;
        }
        let header = Header {
            src_cid: u64::from(cid),
            dst_cid: u64::from(socket.peer_cid),
            src_port: socket.port,
            dst_port: socket.peer_port,
            len: chunk.map_or(0, |chunk| chunk.len),
            socket_type: socket.socket_type as u16,
            operation: operation as u16,
            flags,
            buf_alloc: socket.buf_alloc,
            fwd_cnt,
        };
        let circuit = socket.circuit;
        self.tx.push_back(Packet {
            header,
            chunk,
            circuit,
        });
    }

    /// The guest has forgotten everything: it reboots, or it is gone.
    pub(crate) fn forget(&mut self) {
        self.sockets.clear();
        self.table.clear();
        self.rx.clear();
        self.tx.clear();
    }
}
