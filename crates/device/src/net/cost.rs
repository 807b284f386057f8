//! What work costs, so that no guest gets more of the thread than another because its frames are larger, or have to be cut.
//!
//! The unit is about the time in which a byte is copied, some 0.1 ns. These are estimates and need not be exact: a batch ends, and the descriptors
//! are polled, before much more has been done than was meant.

use std::time::Duration;

use policy::Time;

/// A frame or a segment that is given to a guest, beside its bytes.
pub(super) const PIECE: usize = 1 << 10;

/// A descriptor that is read, and the piece of memory that is copied to or from: once when it is taken, and once for each destination.
pub(super) const DESCRIPTOR: usize = 128;

/// One that is given to the host: a system call.
pub(super) const SYSTEM_CALL: usize = 8 << 10;

/// One that asks the network itself, which takes it apart, makes an answer and passes that on: some 3 µs.
pub(super) const QUESTION: usize = 32 << 10;

/// A frame that the network itself has made, beside what passing it on costs: some 1.5 µs. With open connections a question makes it send several.
pub(super) const ANSWER: usize = 16 << 10;

/// A batch, whatever is in it: as many small frames that go nowhere.
pub(super) const BATCH: usize = 64 << 10;

/// What one batch may cost. The frame with which it costs more is the last: as many small frames as a batch has, each with a system call.
pub(super) const MAX_BATCH: usize = 512 << 10;

/// So many bytes are taken for a batch, which mostly cost less than that.
pub(super) const MAX_BATCH_BYTES: usize = 256 << 10;

/// What may be done between two polls of the descriptors, some 200 µs: a poll costs a system call, and what comes that way can wait for a few batches.
pub(super) const MAX_BLIND: usize = 2 << 20;

/// So many descriptors are taken for a batch, and those of the chain with which it has them: several for each frame of a full batch.
pub(super) const MAX_BATCH_DESCRIPTORS: usize = 4096;

/// So many descriptors of a receiver may be read for a frame that it is given, and for one that its buffers do not take. The longest frame takes 43 of the smallest buffers
/// that Linux posts; its longest buffer is in 19 pieces.
const FREE_DESCRIPTORS: usize = 64;

/// How long a receiver gets no frames for each descriptor beyond those. So these cost about a thousandth of the thread's time.
const REST: Duration = Duration::from_micros(10);

/// The longest debt with which a receiver still gets frames.
const MAX_DEBT: Duration = Duration::from_millis(20);

/// Descriptors of a receiver that were read.
#[derive(Debug, Default)]
pub(super) struct Read {
    pub(super) descriptors: usize,
    /// Beyond [`FREE_DESCRIPTORS`] for a frame.
    excess: usize,
}

impl Read {
    /// Counts those that were read for one frame.
    pub(super) fn add(&mut self, descriptors: usize) {
        self.descriptors += descriptors;
        self.excess += descriptors.saturating_sub(FREE_DESCRIPTORS);
    }
}

/// What a receiver's buffers cost beyond those of any driver. The senders are not to blame, so it pays with frames that it does not get.
#[derive(Debug, Default)]
pub(super) struct Debt {
    paid_at: Time,
}

impl Debt {
    pub(super) fn add(&mut self, now: Time, read: &Read) {
        // At most some thousands for each segment of a frame.
        self.paid_at = self.paid_at.max(now) + REST * read.excess as u32;
    }

    pub(super) fn is_too_high(&self, now: Time) -> bool {
        self.paid_at > now + MAX_DEBT
    }
}
