//! One socket of the guest, with Linux's bookkeeping.

use std::collections::VecDeque;
use std::time::Instant;

use wire::vsock::{Header, Operation, SEQPACKET_END_OF_MESSAGE, SHUTDOWN_BOTH, SocketType};

/// Linux announces room when less than this is known to the peer, in bytes.
const ANNOUNCE_BELOW: u32 = 64 * 1024;

/// A socket of the guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Connection(pub(super) u32);

/// How a socket stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Dialled and not answered.
    Connecting,
    /// Both ends know each other.
    Connected,
    /// Over: the peer, or the device for it, reset it.
    Reset,
    /// Over: both directions were shut down, and that was confirmed.
    Closed,
}

/// What came of an attempt to receive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Received {
    /// So many bytes.
    Bytes(usize),
    /// Nothing at the moment.
    Nothing,
    /// The peer has sent its last byte, and it has been received.
    End,
    /// The circuit was reset.
    Reset,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) local_port: u32,
    pub(super) peer_cid: u32,
    pub(super) peer_port: u32,
}

#[derive(Debug)]
pub(super) struct Socket {
    pub(super) key: Key,
    pub(super) socket_type: SocketType,
    pub(super) state: State,
    /// Bytes of a stream, or of a message that is not whole.
    bytes: VecDeque<u8>,
    /// Of the packets in `bytes`, how much is left of each.
    packets: VecDeque<u32>,
    /// Whole messages, with the flags of their last packets.
    messages: VecDeque<(Vec<u8>, u32)>,
    /// Bytes received and not read.
    unread: u32,
    pub(super) buffer_bytes: u32,
    forwarded: u32,
    announced: u32,
    sent: u32,
    peer_buffer_bytes: u32,
    peer_forwarded: u32,
    /// Flags that the peer has sent.
    pub(super) peer_shutdown: u32,
    pub(super) own_shutdown: u32,
    /// The program has closed it.
    pub(super) released: bool,
    pub(super) close_at: Option<Instant>,
}

impl Socket {
    pub(super) fn new(
        key: Key,
        socket_type: SocketType,
        state: State,
        buffer_bytes: u32,
    ) -> Socket {
        Socket {
            key,
            socket_type,
            state,
            bytes: VecDeque::new(),
            packets: VecDeque::new(),
            messages: VecDeque::new(),
            unread: 0,
            buffer_bytes,
            forwarded: 0,
            announced: 0,
            sent: 0,
            peer_buffer_bytes: 0,
            peer_forwarded: 0,
            peer_shutdown: 0,
            own_shutdown: 0,
            released: false,
            close_at: None,
        }
    }

    /// A packet of this socket, with the numbers of this moment, which thereby are announced.
    pub(super) fn header(
        &mut self,
        cid: u64,
        operation: Operation,
        len: u32,
        flags: u32,
    ) -> Header {
        self.announced = self.forwarded;
        if operation == Operation::Data {
            self.sent = self.sent.wrapping_add(len);
        }
        Header {
            src_cid: cid,
            dst_cid: u64::from(self.key.peer_cid),
            src_port: self.key.local_port,
            dst_port: self.key.peer_port,
            len,
            socket_type: self.socket_type as u16,
            operation: operation as u16,
            flags,
            buf_alloc: self.buffer_bytes,
            fwd_cnt: self.forwarded,
        }
    }

    /// Takes the credit fields of a packet in. Returns what is wrong with them.
    pub(super) fn learn(&mut self, header: &Header) -> Option<String> {
        self.peer_buffer_bytes = header.buf_alloc;
        self.peer_forwarded = header.fwd_cnt;
        let unacknowledged = self.sent.wrapping_sub(self.peer_forwarded);
        (unacknowledged > u32::MAX / 2).then(|| {
            format!(
                "{:?}: {} bytes acknowledged of {} sent",
                self.key, self.peer_forwarded, self.sent
            )
        })
    }

    /// How many bytes the peer has room for.
    pub(super) fn credit(&self) -> u32 {
        let unacknowledged = self.sent.wrapping_sub(self.peer_forwarded);
        self.peer_buffer_bytes.saturating_sub(unacknowledged)
    }

    /// The peer's whole buffer.
    pub(super) fn peer_buffer_bytes(&self) -> u32 {
        self.peer_buffer_bytes
    }

    /// Puts data into the receive queue. Returns what is wrong with it.
    pub(super) fn store(&mut self, payload: &[u8], flags: u32, packet_cost: u32) -> Option<String> {
        let len = payload.len() as u32;
        let mut wrong = None;
        if self.unread + len > self.buffer_bytes {
            wrong = Some(format!(
                "{:?}: {len} bytes beyond the credit: {} of {} are unread",
                self.key, self.unread, self.buffer_bytes
            ));
        }
        let cost = u64::from(packet_cost) * (self.packets.len() as u64 + 1);
        // One packet is always taken.
        if cost > u64::from(self.buffer_bytes.max(packet_cost)) {
            wrong = Some(format!(
                "{:?}: {} packets in a buffer of {} bytes",
                self.key,
                self.packets.len() + 1,
                self.buffer_bytes
            ));
        }
        if self.peer_shutdown & wire::vsock::SHUTDOWN_SEND != 0 {
            wrong = Some(format!("{:?}: data behind the end of data", self.key));
        }
        self.unread += len;
        self.bytes.extend(payload);
        if len > 0 {
            self.packets.push_back(len);
        }
        if self.socket_type == SocketType::SeqPacket && flags & SEQPACKET_END_OF_MESSAGE != 0 {
            // What is in `bytes` is the message, and nothing else.
            let message = self.bytes.drain(..).collect();
            self.messages.push_back((message, flags));
        }
        wrong
    }

    /// Bytes received and not read.
    pub(super) fn unread(&self) -> u32 {
        self.unread
    }

    /// Reads up to `most` bytes of a stream.
    pub(super) fn read(&mut self, most: usize, into: &mut Vec<u8>) -> usize {
        let len = self.bytes.len().min(most);
        into.extend(self.bytes.drain(..len));
        self.forward(len as u32);
        len
    }

    /// Reads a whole message, with its flags.
    pub(super) fn read_message(&mut self) -> Option<(Vec<u8>, u32)> {
        let (message, flags) = self.messages.pop_front()?;
        self.forward(message.len() as u32);
        Some((message, flags))
    }

    fn forward(&mut self, len: u32) {
        self.unread -= len;
        self.forwarded = self.forwarded.wrapping_add(len);
        let mut left = len;
        while let Some(front) = self.packets.front_mut() {
            if *front > left {
                *front -= left;
                break;
            }
            left -= *front;
            self.packets.pop_front();
        }
    }

    /// Linux's rule (6.12, `virtio_transport_stream_do_dequeue`): say what was consumed when the peer knows of less room
    /// than one packet needs, or when nothing is left to read.
    pub(super) fn update_is_due(&self) -> bool {
        let delta = self.forwarded.wrapping_sub(self.announced);
        let known_room = self.buffer_bytes.saturating_sub(delta);
        delta > 0 && (known_room < ANNOUNCE_BELOW || self.unread == 0)
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, State::Reset | State::Closed)
    }

    /// What a program that reads learns when there is nothing to read.
    pub(super) fn at_the_end(&self) -> Received {
        match self.state {
            State::Reset => Received::Reset,
            State::Closed => Received::End,
            _ if self.peer_shutdown & wire::vsock::SHUTDOWN_SEND != 0 => Received::End,
            _ => Received::Nothing,
        }
    }

    /// Both directions were shut down by the peer.
    pub(super) fn peer_is_done(&self) -> bool {
        self.peer_shutdown & SHUTDOWN_BOTH == SHUTDOWN_BOTH
    }
}
