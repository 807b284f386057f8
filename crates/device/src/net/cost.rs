//! What work costs, so that no guest gets more of the thread than another because its frames are larger, or have to be cut.
//!
//! The unit is about the time in which a byte is copied, some 0.1 ns. These are estimates and need not be exact: a batch ends, and the descriptors
//! are looked at, before much more has been done than was meant.

/// A frame or a segment that is given to a guest, beside its bytes.
pub(super) const PIECE: usize = 1 << 10;

/// One that is given to the host: a system call.
pub(super) const SYSTEM_CALL: usize = 8 << 10;

/// A batch, whatever is in it: as many small frames that go nowhere.
pub(super) const BATCH: usize = 64 << 10;

/// What one batch may cost. The frame with which it costs more is the last: as many small frames as a batch has, each with a system call.
pub(super) const MAX_BATCH: usize = 512 << 10;

/// So many bytes are taken for a batch, which mostly cost less than that.
pub(super) const MAX_BATCH_BYTES: usize = 256 << 10;

/// What may be done between two looks at the descriptors, some 200 µs: a look costs a system call, and what comes that way can wait for a few batches.
pub(super) const MAX_BLIND: usize = 2 << 20;
