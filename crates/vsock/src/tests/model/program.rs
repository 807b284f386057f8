//! A program on the host and the UNIX socket between it and the device.

use wire::vsock::{SEQPACKET_END_OF_MESSAGE, SocketType};

use super::audit::Audit;
use super::payload::ChunkQueue;
use super::socket::{After, Plan};
use crate::{CircuitId, Reason, Side};

/// What the kernel of the host keeps in a UNIX socket, in bytes.
pub(crate) const SOCKET_BUFFER: u32 = 208 * 1024;

/// How far a program has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    /// Waits for the answer to its dial, or has not been accepted by it.
    Dialling,
    Open,
    Rejected(Reason),
    /// The device has closed its end.
    Closed {
        reset: bool,
    },
}

/// How a listener on the host answers.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Answer {
    Accept(Plan),
    Refuse(Reason),
    /// Its backlog is full.
    Never,
}

/// A program and its socket.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) side: Side,
    pub(crate) socket_type: SocketType,
    pub(crate) circuit: Option<CircuitId>,
    pub(crate) call: Call,
    pub(crate) plan: Plan,
    pub(crate) buffer: u32,
    /// Written by the program, not yet read by the device.
    pub(crate) outgoing: ChunkQueue,
    /// Written by the device, not yet read by the program.
    pub(crate) incoming: ChunkQueue,
    /// Bytes that the program has read.
    pub(crate) read: u64,
    /// The program has shut its sending direction.
    pub(crate) finished: bool,
    /// The device has read the end of data.
    pub(crate) end_read: bool,
    /// The program takes no more data.
    pub(crate) refuses: bool,
    /// The device has shut the direction in which the program sends: its writes fail.
    pub(crate) cannot_write: bool,
    /// The device has shut the direction in which the program receives.
    pub(crate) end_shown: bool,
    /// The program has closed its socket.
    pub(crate) released: bool,
}

impl Program {
    pub(crate) fn new(side: Side, socket_type: SocketType, plan: Plan) -> Program {
        Program {
            side,
            socket_type,
            circuit: None,
            call: Call::Dialling,
            plan,
            buffer: SOCKET_BUFFER,
            outgoing: ChunkQueue::default(),
            incoming: ChunkQueue::default(),
            read: 0,
            finished: false,
            end_read: false,
            refuses: false,
            cannot_write: false,
            end_shown: false,
            released: false,
        }
    }

    /// Room for what the device delivers, in bytes.
    pub(crate) fn room(&self) -> u32 {
        self.buffer.saturating_sub(self.incoming.len())
    }

    /// Writes up to `len` bytes, or one whole message. Returns what was taken.
    pub(crate) fn write(&mut self, len: u32, audit: &mut Audit) -> u32 {
        let Some(circuit) = self.circuit else {
            return 0;
        };
        if self.finished || self.cannot_write || self.released || self.call != Call::Open {
            return 0;
        }
        let room = self.buffer.saturating_sub(self.outgoing.len());
        let (len, flags) = match self.socket_type {
            SocketType::Stream => (len.min(room), 0),
            SocketType::SeqPacket if len <= room => (len, SEQPACKET_END_OF_MESSAGE),
            SocketType::SeqPacket => (0, 0),
        };
        if len > 0 {
            let chunk = audit.write(circuit, self.side, len, flags);
            self.outgoing.push(chunk);
        }
        len
    }

    /// Reads up to `max` bytes.
    pub(crate) fn read(&mut self, max: u32) -> u32 {
        let mut total = 0;
        while let Some(chunk) = self.incoming.take(max - total) {
            total += chunk.len;
        }
        self.read += u64::from(total);
        total
    }

    /// `shutdown(SHUT_RD)`, or a part of `close()`.
    pub(crate) fn refuse(&mut self, audit: &mut Audit) {
        self.refuses = true;
        self.incoming.clear();
        if let Some(circuit) = self.circuit {
            audit.end(circuit, self.side).refuses = true;
        }
    }

    /// `close()`.
    pub(crate) fn close(&mut self, audit: &mut Audit) {
        if !std::mem::replace(&mut self.released, true) {
            self.finished = true;
            self.refuse(audit);
        }
    }

    /// Whether the device would find data, or the end of data, when it reads.
    pub(crate) fn has_news(&self) -> bool {
        self.outgoing.len() > 0 || (self.finished && !self.end_read)
    }

    /// Lets the program go on as far as it can.
    pub(crate) fn run(&mut self, audit: &mut Audit) -> bool {
        if self.released || self.call == Call::Dialling {
            return false;
        }
        let mut busy = false;
        if self.plan.reads && self.incoming.len() > 0 {
            busy |= self.read(u32::MAX) > 0;
        }
        while self.plan.left > 0 {
            // A longer message would be EMSGSIZE.
            let len = u64::from(self.plan.write_len.min(self.buffer)).min(self.plan.left) as u32;
            let written = self.write(len, audit);
            if written == 0 {
                break;
            }
            self.plan.left -= u64::from(written);
            busy = true;
        }
        let closed = self.call != Call::Open;
        if self.cannot_write || closed {
            self.plan.left = 0;
        }
        if self.plan.left > 0 {
            return busy;
        }
        if self.plan.after == After::HalfClose && !self.finished {
            self.finished = true;
            busy = true;
        }
        let over = closed || self.end_shown;
        if self.plan.after == After::Close || (self.plan.closes && over && self.incoming.len() == 0)
        {
            self.close(audit);
            busy = true;
        }
        busy
    }
}
