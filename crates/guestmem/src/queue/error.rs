use thiserror::Error;

use super::{MAX_CHAIN_LEN, MAX_CHAIN_RANGES, MAX_QUEUE_SIZE};

/// How a driver, or its VMM, broke the rules of a virtqueue. Fatal for the line.
///
/// The sections named are those of virtio 1.2. The head of a chain in a packed ring is where its first descriptor is, unless the text
/// says otherwise: the chain's name comes with its last descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum QueueError {
    /// A size that no queue can have (2.7).
    #[error("a queue has a power of two of entries, {MAX_QUEUE_SIZE} at most, and not {size}")]
    Size {
        /// The number of entries asked for.
        size: u16,
    },
    /// A size that no packed queue can have (2.8).
    #[error("a packed queue has 1 to {MAX_QUEUE_SIZE} entries, and not {size}")]
    PackedSize {
        /// The number of entries asked for.
        size: u16,
    },
    /// A place to go on at that such a queue does not have.
    #[error("a queue of {size} cannot go on at base {base:#x}")]
    Base {
        /// What vhost-user's SET_VRING_BASE said.
        base: u32,
        /// Number of entries.
        size: u16,
    },
    /// A part of the queue that does not lie inside one region.
    #[error(
        "the {area}, {len} bytes at front-end address {address:#x}, is not inside one memory region that the VMM shares (share=on)"
    )]
    AreaOutside {
        /// Which of the three.
        area: &'static str,
        /// Its address in the front end's address space.
        address: u64,
        /// Its length in bytes.
        len: usize,
    },
    /// A part of the queue that is not aligned as it must be (2.7).
    #[error("the {area} at front-end address {address:#x} is not aligned to {alignment} bytes")]
    AreaMisaligned {
        /// Which of the three.
        area: &'static str,
        /// Its address in the front end's address space.
        address: u64,
        /// What the address must be a multiple of, in bytes.
        alignment: usize,
    },
    /// More chains made available than the queue has entries.
    #[error("the available index went from {from} to {to} in a queue of {size}")]
    AvailableIndexJump {
        /// How many chains were taken, modulo 65536.
        from: u16,
        /// The driver's index.
        to: u16,
        /// Number of entries.
        size: u16,
    },
    /// A head that is no index of the descriptor table.
    #[error("head {head} was made available in a queue of {size}")]
    HeadOutOfRange {
        /// The head.
        head: u16,
        /// Number of entries.
        size: u16,
    },
    /// A chain that the device has already.
    #[error("head {head} was made available while the device has it")]
    HeadInFlight {
        /// The head; in a packed ring, the identifier.
        head: u16,
    },
    /// A chain in a packed ring with more descriptors than there can be besides those that the device has.
    #[error(
        "the chain at descriptor {head} goes on for more than {free} descriptors, all that the device does not have of {size}"
    )]
    TooManyOut {
        /// Where its first descriptor is in the ring.
        head: u16,
        /// Descriptors that are not out.
        free: u16,
        /// Number of entries.
        size: u16,
    },
    /// A next descriptor that is none of the table's.
    #[error("descriptor {index} of chain {head} goes on to {next} in a table of {entries}")]
    NextOutOfRange {
        /// The chain's head.
        head: u16,
        /// The descriptor that has it.
        index: u16,
        /// The index of the next one.
        next: u16,
        /// Number of entries in the queue's table or the indirect one.
        entries: u16,
    },
    /// A chain with more descriptors than its table has: it has a loop.
    #[error("chain {head} has a loop: more than the {entries} descriptors of its table")]
    Loop {
        /// The chain's head.
        head: u16,
        /// Number of entries in the queue's table or the indirect one.
        entries: u16,
    },
    /// A chain that is longer than any may be.
    #[error("chain {head} has more than {MAX_CHAIN_LEN} descriptors")]
    ChainTooLong {
        /// The chain's head.
        head: u16,
    },
    /// A chain cut into too many ranges by the borders of regions.
    #[error(
        "chain {head} crosses so many memory regions that it has more than {MAX_CHAIN_RANGES} pieces"
    )]
    TooManyRanges {
        /// The chain's head.
        head: u16,
    },
    /// A chain of more than 2^32 bytes (2.7.5.2).
    #[error("chain {head} has more than 2^32 bytes")]
    TooManyBytes {
        /// The chain's head.
        head: u16,
    },
    /// A part for the device to read behind a part for it to write (2.7.4.2).
    #[error(
        "descriptor {index} of chain {head} is for the device to read and follows one for it to write"
    )]
    ReadableAfterWritable {
        /// The chain's head.
        head: u16,
        /// The descriptor in question, in the queue's table or the indirect one.
        index: u16,
    },
    /// A stretch of memory that the guest does not have.
    #[error(
        "descriptor {index} of chain {head} has {len} bytes at guest address {address:#x}, not all of it memory"
    )]
    NotMapped {
        /// The chain's head.
        head: u16,
        /// The descriptor in question, in the queue's table or the indirect one.
        index: u16,
        /// Its guest physical address.
        address: u64,
        /// Its length in bytes.
        len: u32,
    },
    /// An indirect descriptor from a driver that has not negotiated VIRTIO_F_INDIRECT_DESC (2.7.5.3.1).
    #[error("descriptor {index} of chain {head} is indirect, which was not negotiated")]
    IndirectNotNegotiated {
        /// The chain's head.
        head: u16,
        /// The descriptor in question.
        index: u16,
    },
    /// An indirect descriptor that also has a next one (2.7.5.3.1).
    #[error("descriptor {index} of chain {head} is indirect and has a next one")]
    IndirectWithNext {
        /// The chain's head.
        head: u16,
        /// The descriptor in question.
        index: u16,
    },
    /// An indirect descriptor that follows others, in a packed ring (2.8.19).
    #[error("descriptor {index} of chain {head} is indirect and not the chain's only one")]
    IndirectNotAlone {
        /// The chain's head.
        head: u16,
        /// The descriptor in question.
        index: u16,
    },
    /// An indirect descriptor in an indirect table (2.7.5.3.1).
    #[error("descriptor {index} in the indirect table of chain {head} is itself indirect")]
    IndirectInIndirect {
        /// The chain's head.
        head: u16,
        /// The descriptor in question, in the indirect table.
        index: u16,
    },
    /// An indirect table that is empty, too long, or no whole number of descriptors (2.7.5.3).
    #[error("the indirect table of chain {head} has {len} bytes, and must have a multiple of 16, from 16 to {}", 16 * MAX_CHAIN_LEN)]
    IndirectTableLength {
        /// The chain's head.
        head: u16,
        /// Its length in bytes.
        len: u32,
    },
}
