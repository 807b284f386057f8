//! What a device's thread asks of the fabric's thread, and how.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};

use guestmem::guest::GuestMemory;
use guestmem::queue::{Ledger, Positions, QueueSetup};
use vhost::vhost_user::{Error as ProtocolError, Result as ProtocolResult};

use crate::Waker;

/// Messages of VMMs that are answered in one turn, before everything else has its turn. Each VMM waits for its answer before it says more, but another
/// may have said something meanwhile.
pub(crate) const MESSAGES_PER_TURN: usize = 8;

/// What a VMM finds behind a socket.
#[derive(Debug, Clone)]
pub(crate) struct Model {
    /// Virtio features beside those that all devices here have.
    pub(crate) features: u64,
    /// How many rings the device has.
    pub(crate) rings: usize,
    /// Its configuration, as the guest reads it; empty where the VMM has one itself.
    pub(crate) config: Vec<u8>,
    /// The VMM may say the same of a region of memory again: QEMU before version 8.1 adds and removes each once for every pair of rings.
    pub(crate) may_repeat_regions: bool,
}

/// Which device of which VM this is about.
#[derive(Debug, Clone)]
pub(crate) struct Identity {
    /// The number of the line or port.
    pub(crate) device: u32,
    /// Which use of that number: a device that was removed is not answered for by its successor.
    pub(crate) generation: u64,
    /// The VM, for the log.
    pub(crate) vm: String,
    /// The network of a card, for the log; none of a line.
    pub(crate) network: Option<String>,
}

/// How far each ring of a device has come, as far as it is known.
pub(crate) type RingPositions = Vec<Option<Positions>>;

/// What a VMM asks of the fabric.
#[derive(Debug)]
pub(crate) enum Request {
    /// Something has connected.
    Attach,
    /// What has connected speaks vhost-user: what was wrong with the VMM before it is over.
    Speak,
    /// Something is wrong with the VMM, which goes on all the same.
    Suspect { fault: &'static str },
    /// The VMM is gone. What it sent last is still to be read. If its connection did not end as it should, this says why.
    Detach { fault: Option<String> },
    /// A ring is complete and may run. A ring that runs already is replaced.
    Start { index: usize, start: Box<RingStart> },
    /// Stop a ring. The answer is where it would go on.
    Stop { index: usize },
    /// Interrupt the guest here from now on.
    SetCall { index: usize, call: Option<File> },
    /// Let a ring run, or hold it.
    SetEnabled { index: usize, enabled: bool },
    /// The guest's memory is this from now on.
    ReplaceMemory { memory: Arc<GuestMemory> },
    /// Forget every circuit.
    Reset,
}

#[derive(Debug)]
pub(crate) struct RingStart {
    pub(crate) setup: QueueSetup,
    pub(crate) memory: Arc<GuestMemory>,
    pub(crate) kick: File,
    pub(crate) call: Option<File>,
    pub(crate) enabled: bool,
    /// All features that the driver has accepted.
    pub(crate) features: u64,
    /// Where a successor of this process finds out where to go on.
    pub(crate) ledger: Option<Ledger>,
}

/// A request with the way back for its answer.
#[derive(Debug)]
pub(crate) struct Message {
    pub(crate) device: u32,
    /// See [`Identity::generation`].
    pub(crate) generation: u64,
    pub(crate) request: Request,
    pub(crate) answer: SyncSender<Answer>,
}

/// The fabric's answer: a number where one was asked for, or why it cannot be done.
pub(crate) type Answer = Result<u32, String>;

/// How to reach the fabric from another thread.
#[derive(Debug, Clone)]
pub(crate) struct Mailbox {
    pub(crate) messages: Sender<Message>,
    pub(crate) waker: Waker,
}

impl Mailbox {
    /// One, and where the fabric that this waker wakes finds what comes.
    pub(crate) fn new(waker: Waker) -> (Mailbox, Receiver<Message>) {
        let (messages, found) = channel();
        (Mailbox { messages, waker }, found)
    }
}

/// One device's way to ask the fabric.
#[derive(Debug, Clone)]
pub(super) struct Caller {
    pub(super) identity: Identity,
    pub(super) mailbox: Mailbox,
}

impl Caller {
    pub(super) fn call(&self, request: Request) -> ProtocolResult<u32> {
        let (answer, wait) = sync_channel(1);
        let message = Message {
            device: self.identity.device,
            generation: self.identity.generation,
            request,
            answer,
        };
        let gone = |_| ProtocolError::Disconnected;
        self.mailbox
            .messages
            .send(message)
            .map_err(|_| ProtocolError::Disconnected)?;
        self.mailbox.waker.wake();
        wait.recv().map_err(gone)?.map_err(|reason| {
            tracing::debug!(vm = self.identity.vm, %reason, "refused what the VMM asked");
            ProtocolError::ReqHandlerError(io::Error::other(reason))
        })
    }
}
