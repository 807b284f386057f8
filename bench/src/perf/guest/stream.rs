//! One socket of a lean guest, with Linux's bookkeeping.

use std::collections::VecDeque;
use std::time::Instant;

use wire::vsock::{Header, Operation, SHUTDOWN_BOTH, SocketType};

use super::{BUFFER_BYTES, FIRST_PORT, Role};
use crate::perf::control::MAX_METERS;

/// Linux announces room when the peer knows of less than this, in bytes (`VIRTIO_VSOCK_MAX_PKT_BUF_SIZE`).
const ANNOUNCE_BELOW: u32 = 64 * 1024;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) local_port: u32,
    pub(super) peer_cid: u32,
    pub(super) peer_port: u32,
}

/// A packet that was not read to its end.
#[derive(Debug)]
pub(super) struct Unread {
    pub(super) buffer: u32,
    pub(super) offset: usize,
    pub(super) len: usize,
}

#[derive(Debug)]
pub(super) struct Stream {
    pub(super) key: Key,
    pub(super) role: Role,
    /// In the order of dialling or accepting.
    pub(super) number: usize,
    pub(super) connected: bool,
    /// It is among those whose programs can do something.
    pub(super) queued: bool,
    pub(super) closing: bool,
    pub(super) peer_shutdown: u32,
    pub(super) arrived: VecDeque<Unread>,
    unread: u32,
    forwarded: u32,
    announced: u32,
    sent: u32,
    peer_buffer_bytes: u32,
    peer_forwarded: u32,
    /// Bytes of the message that is being sent which are still to be sent.
    pub(super) left_to_send: usize,
    /// Bytes of the message that is being received which have been received.
    pub(super) message_received: usize,
    /// Bytes sent and received since the beginning.
    pub(super) position_sent: u64,
    pub(super) position_received: u64,
    pub(super) since: Instant,
}

impl Stream {
    pub(super) fn new(key: Key, role: Role, number: usize) -> Stream {
        Stream {
            key,
            role,
            number,
            connected: false,
            queued: false,
            closing: false,
            peer_shutdown: 0,
            arrived: VecDeque::new(),
            unread: 0,
            forwarded: 0,
            announced: 0,
            sent: 0,
            peer_buffer_bytes: 0,
            peer_forwarded: 0,
            left_to_send: 0,
            message_received: 0,
            position_sent: 0,
            position_received: 0,
            since: Instant::now(),
        }
    }

    /// The pattern that the stream carries: both ends know the port that was dialled.
    pub(super) fn pattern_number(&self) -> usize {
        let port = match self.key.local_port >= super::FIRST_LOCAL_PORT {
            true => self.key.peer_port,
            false => self.key.local_port,
        };
        port.saturating_sub(FIRST_PORT) as usize
    }

    /// The meter that the stream counts on.
    pub(super) fn meter(&self) -> usize {
        self.number % MAX_METERS
    }

    pub(super) fn learn(&mut self, header: &Header) {
        self.peer_buffer_bytes = header.buf_alloc;
        self.peer_forwarded = header.fwd_cnt;
    }

    pub(super) fn credit(&self) -> u32 {
        self.peer_buffer_bytes
            .saturating_sub(self.sent.wrapping_sub(self.peer_forwarded))
    }

    pub(super) fn store(&mut self, buffer: u32, len: u32) {
        self.unread += len;
        self.arrived.push_back(Unread {
            buffer,
            offset: 0,
            len: len as usize,
        });
    }

    /// Whether more is unread than was ever offered.
    pub(super) fn is_overrun(&self) -> bool {
        self.unread > BUFFER_BYTES
    }

    pub(super) fn consumed(&mut self, len: usize) {
        self.unread -= len as u32;
        self.forwarded = self.forwarded.wrapping_add(len as u32);
        self.position_received += len as u64;
    }

    pub(super) fn unread(&self) -> u32 {
        self.unread
    }

    /// Linux's rule after a read.
    pub(super) fn wants_to_announce(&self) -> bool {
        let unannounced = self.forwarded.wrapping_sub(self.announced);
        unannounced > 0
            && (BUFFER_BYTES.saturating_sub(unannounced) < ANNOUNCE_BELOW || self.unread == 0)
    }

    /// A packet of this stream. The numbers in it are announced thereby.
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
            self.position_sent += u64::from(len);
        }
        Header {
            src_cid: cid,
            dst_cid: u64::from(self.key.peer_cid),
            src_port: self.key.local_port,
            dst_port: self.key.peer_port,
            len,
            socket_type: SocketType::Stream as u16,
            operation: operation as u16,
            flags,
            buf_alloc: BUFFER_BYTES,
            fwd_cnt: self.forwarded,
        }
    }

    pub(super) fn peer_is_done(&self) -> bool {
        self.peer_shutdown & SHUTDOWN_BOTH == SHUTDOWN_BOTH
    }
}
