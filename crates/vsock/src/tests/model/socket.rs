//! A socket in a Linux guest: its buffers, its credit and its shutdown flags, as `virtio_transport_common.c` keeps them.

use std::collections::VecDeque;

use policy::Time;
use wire::vsock::{MAX_PAYLOAD_LEN, SEQPACKET_END_OF_MESSAGE, SHUTDOWN_SEND, SocketType};

use super::payload::Chunk;
use crate::{CircuitId, Side};

/// What `SKB_TRUESIZE(0)` is on x86-64, in bytes: the bookkeeping of one queued packet.
const PACKET_OVERHEAD: u64 = 576;
/// Packets up to this size are copied behind the one before, in bytes.
const GOOD_COPY_LEN: u32 = 128;

/// Which guest kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kernel {
    /// Linux 6.1: credit alone bounds the queue.
    Old,
    /// Linux 6.12.92 and later: the number of queued packets is bounded too.
    CountsPackets,
}

/// How far a socket has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    Connecting,
    Established,
    Closed,
}

/// What the program does once it has written all it meant to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum After {
    /// Keeps the socket open until the other end is done with it.
    Wait,
    /// `shutdown(SHUT_WR)`.
    HalfClose,
    /// `close()`.
    Close,
}

/// What the program means to do, as far as credit lets it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Plan {
    /// Bytes still to be written.
    pub(crate) left: u64,
    /// Length of its messages, for SEQPACKET, and of its writes, in bytes.
    pub(crate) write_len: u32,
    pub(crate) after: After,
    /// Reads whatever arrives.
    pub(crate) reads: bool,
    /// Closes once both directions are over.
    pub(crate) closes: bool,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            left: 0,
            write_len: MAX_PAYLOAD_LEN,
            after: After::Wait,
            reads: true,
            closes: false,
        }
    }
}

/// A packet in the receive queue.
#[derive(Debug, Clone, Copy)]
struct Queued {
    chunk: Chunk,
    /// Room in its buffer for small packets that follow, in bytes.
    tailroom: u32,
    /// Bytes that the program has read of it.
    read: u32,
}

#[derive(Debug, Clone)]
pub(crate) struct Socket {
    pub(crate) circuit: Option<CircuitId>,
    pub(crate) side: Side,
    pub(crate) socket_type: SocketType,
    pub(crate) state: State,
    pub(crate) port: u32,
    pub(crate) peer_cid: u32,
    pub(crate) peer_port: u32,
    pub(crate) buf_alloc: u32,
    queue: VecDeque<Queued>,
    /// Bytes that the program can read.
    pub(crate) unread: u32,
    buf_used: u32,
    pub(crate) fwd_cnt: u32,
    pub(crate) told_fwd_cnt: u32,
    /// The last announcement before that: a processor may queue its header late.
    pub(crate) stale_fwd_cnt: u32,
    pub(crate) tx_cnt: u32,
    pub(crate) peer_buf_alloc: u32,
    pub(crate) peer_fwd_cnt: u32,
    pub(crate) peer_shutdown: u32,
    pub(crate) own_shutdown: u32,
    /// `SOCK_DONE`: the circuit is over, as far as this kernel is concerned.
    pub(crate) done: bool,
    /// The program has called `close()`.
    pub(crate) released: bool,
    pub(crate) close_at: Option<Time>,
    pub(crate) connect_by: Option<Time>,
    pub(crate) plan: Plan,
    /// What is left of the message being written, in bytes.
    pub(crate) message_left: u32,
    /// Most packets ever queued.
    pub(crate) most_queued: usize,
}

impl Socket {
    pub(crate) fn new(side: Side, socket_type: SocketType, buf_alloc: u32) -> Socket {
        Socket {
            circuit: None,
            side,
            socket_type,
            state: State::Connecting,
            port: 0,
            peer_cid: 0,
            peer_port: 0,
            buf_alloc,
            queue: VecDeque::new(),
            unread: 0,
            buf_used: 0,
            fwd_cnt: 0,
            told_fwd_cnt: 0,
            stale_fwd_cnt: 0,
            tx_cnt: 0,
            peer_buf_alloc: 0,
            peer_fwd_cnt: 0,
            peer_shutdown: 0,
            own_shutdown: 0,
            done: false,
            released: false,
            close_at: None,
            connect_by: None,
            plan: Plan::default(),
            message_left: 0,
            most_queued: 0,
        }
    }

    /// `virtio_transport_has_space`.
    pub(crate) fn space(&self) -> u32 {
        let buffer = i64::from(self.peer_buf_alloc.min(self.buf_alloc));
        let in_flight = i64::from(self.tx_cnt.wrapping_sub(self.peer_fwd_cnt));
        (buffer - in_flight).max(0) as u32
    }

    pub(crate) fn may_write(&self) -> bool {
        self.state == State::Established
            && !self.done
            && !self.released
            && self.own_shutdown & SHUTDOWN_SEND == 0
            && self.peer_shutdown & wire::vsock::SHUTDOWN_RECEIVE == 0
    }

    /// `virtio_transport_recv_enqueue`: false where Linux would answer ENOBUFS and reset the connection.
    pub(crate) fn enqueue(&mut self, chunk: Chunk, buffer_payload: u32, kernel: Kernel) -> bool {
        if u64::from(self.buf_used) + u64::from(chunk.len) > u64::from(self.buf_alloc) {
            return false;
        }
        let overhead = (self.queue.len() as u64 + 1) * PACKET_OVERHEAD;
        if kernel == Kernel::CountsPackets && overhead > u64::from(self.buf_alloc) {
            return false;
        }
        self.unread += chunk.len;
        self.buf_used += chunk.len;
        let roomy = self.queue.back_mut().filter(|last| {
            chunk.len <= GOOD_COPY_LEN
                && chunk.len < last.tailroom
                && last.chunk.flags & SEQPACKET_END_OF_MESSAGE == 0
        });
        if let Some(last) = roomy {
            last.tailroom -= chunk.len;
            last.chunk.len += chunk.len;
            last.chunk.flags |= chunk.flags;
            return true;
        }
        self.queue.push_back(Queued {
            chunk,
            tailroom: buffer_payload.saturating_sub(chunk.len),
            read: 0,
        });
        self.most_queued = self.most_queued.max(self.queue.len());
        true
    }

    /// Reads up to `max` bytes of a stream, or one whole message. Returns the bytes read and whether the sender is to
    /// be notified of the new room.
    pub(crate) fn read(&mut self, max: u32) -> (u32, bool) {
        match self.socket_type {
            SocketType::Stream => self.read_stream(max),
            SocketType::SeqPacket => self.read_message(),
        }
    }

    fn read_stream(&mut self, max: u32) -> (u32, bool) {
        let mut total = 0;
        while let Some(first) = self.queue.front_mut().filter(|_| total < max) {
            let taken = (first.chunk.len - first.read).min(max - total);
            total += taken;
            first.read += taken;
            if first.read == first.chunk.len {
                self.fwd_cnt = self.fwd_cnt.wrapping_add(first.chunk.len);
                self.buf_used -= first.chunk.len;
                self.queue.pop_front();
            }
        }
        self.unread -= total;
        let news = self.fwd_cnt.wrapping_sub(self.told_fwd_cnt);
        let free = self.buf_alloc.wrapping_sub(news);
        (
            total,
            news > 0 && (free < MAX_PAYLOAD_LEN || self.unread == 0),
        )
    }

    fn read_message(&mut self) -> (u32, bool) {
        let whole = self
            .queue
            .iter()
            .any(|queued| queued.chunk.flags & SEQPACKET_END_OF_MESSAGE != 0);
        if !whole {
            return (0, false);
        }
        let mut total = 0;
        while let Some(queued) = self.queue.pop_front() {
            total += queued.chunk.len;
            if queued.chunk.flags & SEQPACKET_END_OF_MESSAGE != 0 {
                break;
            }
        }
        self.unread -= total;
        self.buf_used -= total;
        self.fwd_cnt = self.fwd_cnt.wrapping_add(total);
        (total, true)
    }

    /// The circuit is over: what is unread can still be read.
    pub(crate) fn do_close(&mut self) {
        self.done = true;
        self.peer_shutdown = wire::vsock::SHUTDOWN_BOTH;
        self.close_at = None;
    }
}
