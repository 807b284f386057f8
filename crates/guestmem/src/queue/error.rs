use thiserror::Error;

use super::{MAX_CHAIN_LEN, MAX_CHAIN_RANGES, MAX_QUEUE_SIZE};

/// How a driver, or its VMM, broke the rules of a virtqueue. Fatal for the line.
///
/// The sections named are those of virtio 1.2. The head of a chain in a packed ring is where its first descriptor is, unless the text
/// says otherwise: the chain's name comes with its last descriptor.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum QueueError {
    #[error("a queue has a power of two of entries, {MAX_QUEUE_SIZE} at most, and not {size}")]
    Size {
        /// The number of entries asked for.
        size: u16,
    },
    #[error("a packed queue has 1 to {MAX_QUEUE_SIZE} entries, and not {size}")]
    PackedSize {
        /// The number of entries asked for.
        size: u16,
    },
    #[error("a queue of {size} cannot go on at base {base:#x}")]
    Base { base: u32, size: u16 },
    #[error(
        "the ledger, of a queue of {noted}, does not fit a queue of {size} and its used index: the device has to be reset"
    )]
    Ledger { size: u16, noted: u16 },
    #[error("a packed queue cannot go back to positions that were written down")]
    NoPositions,
    #[error(
        "the {area}, {len} bytes at front-end address {address:#x}, is not inside one memory region that the VMM shares (share=on)"
    )]
    AreaOutside {
        area: &'static str,
        /// Its address in the front end's address space.
        address: u64,
        len: usize,
    },
    #[error("the {area} at front-end address {address:#x} is not aligned to {alignment} bytes")]
    AreaMisaligned {
        area: &'static str,
        /// Its address in the front end's address space.
        address: u64,
        /// What the address must be a multiple of, in bytes.
        alignment: usize,
    },
    #[error("the available index went from {from} to {to} in a queue of {size}")]
    AvailableIndexJump {
        /// How many chains were taken, modulo 65536.
        from: u16,
        to: u16,
        size: u16,
    },
    #[error("head {head} was made available in a queue of {size}")]
    HeadOutOfRange { head: u16, size: u16 },
    #[error("head {head} was made available while the device has it")]
    HeadInFlight {
        /// The head; in a packed ring, the identifier.
        head: u16,
    },
    #[error(
        "the chain at descriptor {head} goes on for more than {free} descriptors, all that the device does not have of {size}"
    )]
    TooManyOut {
        /// Where its first descriptor is in the ring.
        head: u16,
        /// Descriptors that are not out.
        free: u16,
        size: u16,
    },
    #[error("descriptor {index} of chain {head} goes on to {next} in a table of {entries}")]
    NextOutOfRange {
        head: u16,
        /// The descriptor that has it.
        index: u16,
        /// The index of the next one.
        next: u16,
        /// Number of entries in the queue's table or the indirect one.
        entries: u16,
    },
    #[error("chain {head} has a loop: more than the {entries} descriptors of its table")]
    Loop {
        head: u16,
        /// Number of entries in the queue's table or the indirect one.
        entries: u16,
    },
    #[error("chain {head} has more than {MAX_CHAIN_LEN} descriptors")]
    ChainTooLong { head: u16 },
    #[error(
        "chain {head} crosses so many memory regions that it has more than {MAX_CHAIN_RANGES} pieces"
    )]
    TooManyRanges { head: u16 },
    #[error("chain {head} has more than 2^32 bytes")]
    TooManyBytes { head: u16 },
    #[error(
        "descriptor {index} of chain {head} is for the device to read and follows one for it to write"
    )]
    ReadableAfterWritable {
        head: u16,
        /// The descriptor in question, in the queue's table or the indirect one.
        index: u16,
    },
    #[error(
        "descriptor {index} of chain {head} has {len} bytes at guest address {address:#x}, not all of it memory"
    )]
    NotMapped {
        head: u16,
        /// The descriptor in question, in the queue's table or the indirect one.
        index: u16,
        address: u64,
        len: u32,
    },
    #[error("descriptor {index} of chain {head} is indirect, which was not negotiated")]
    IndirectNotNegotiated { head: u16, index: u16 },
    #[error("descriptor {index} of chain {head} is indirect and has a next one")]
    IndirectWithNext { head: u16, index: u16 },
    #[error("descriptor {index} of chain {head} is indirect and not the chain's only one")]
    IndirectNotAlone { head: u16, index: u16 },
    #[error("descriptor {index} in the indirect table of chain {head} is itself indirect")]
    IndirectInIndirect {
        head: u16,
        /// The descriptor in question, in the indirect table.
        index: u16,
    },
    #[error("the indirect table of chain {head} has {len} bytes, and must have a multiple of 16, from 16 to {}", 16 * MAX_CHAIN_LEN)]
    IndirectTableLength { head: u16, len: u32 },
}
