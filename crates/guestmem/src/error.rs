//! What can go wrong with guest memory.

use std::io;

use thiserror::Error;

use crate::fault;

/// Why a region cannot be had, or bytes not be copied.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MemoryError {
    #[error("the region at guest address {guest_address:#x} has size zero")]
    EmptyRegion {
        /// Where it would have been.
        guest_address: u64,
    },
    #[error("{size:#x} bytes from {start:#x} on do not fit into the address space")]
    AddressOverflow {
        /// The guest address, front-end address or file offset in question.
        start: u64,
        /// Size of the region in bytes.
        size: u64,
    },
    #[error(
        "the region of {size:#x} bytes at {address:#x} overlaps the one of {other_size:#x} bytes at {other:#x}"
    )]
    Overlap {
        /// Start of the new region, in the kind of address that overlaps.
        address: u64,
        size: u64,
        /// Start of the region that is there.
        other: u64,
        other_size: u64,
    },
    #[error("the region's file must have {needed:#x} bytes, and has {found:#x}")]
    FileTooShort {
        /// Offset plus size, in bytes.
        needed: u64,
        /// Length of the file in bytes.
        found: u64,
    },
    #[error(
        "the region starts at {offset:#x} in its file, which is not a multiple of the page size {page_len:#x}"
    )]
    MisalignedOffset {
        offset: u64,
        /// The size of the file's pages in bytes.
        page_len: usize,
    },
    #[error(
        "the region's descriptor is not a regular file; use memory-backend-memfd or memory-backend-file with share=on"
    )]
    NotARegularFile,
    #[error(
        "the region's file is on a file system (statfs type {kind:#x}) whose pages may have to be waited for; use memory-backend-memfd, or a file on tmpfs or hugetlbfs (for windows: a runtime directory on a tmpfs, or `qmp`)"
    )]
    FileSystem {
        /// What statfs(2) calls the file system.
        kind: u32,
    },
    #[error("a guest may have at most {max} memory regions")]
    TooManyRegions { max: usize },
    #[error("a guest may have at most {} TiB in memory regions", max >> 40)]
    TooMuchMemory { max: u64 },
    #[error(
        "this process would have more than {} TiB of memory regions mapped, the most it may have",
        max >> 40
    )]
    TooMuchMapped { max: u64 },
    #[error(
        "this process has {} memory regions mapped, the most it may have",
        fault::MAX_MAPPINGS
    )]
    TooManyMappings,
    #[error(
        "there is no region of {size:#x} bytes at guest address {guest_address:#x} and front-end address {frontend_address:#x}"
    )]
    NoSuchRegion {
        /// The guest address asked for.
        guest_address: u64,
        /// The size asked for, in bytes.
        size: u64,
        /// The front-end address asked for.
        frontend_address: u64,
    },
    #[error("the region cannot be mapped: {0}")]
    Map(#[source] io::Error),
    #[error("guest address {address:#x} is in no memory region")]
    NotMapped {
        /// The first address without memory.
        address: u64,
    },
    #[error("{wanted} bytes from offset {offset} on are wanted of ranges that have {found}")]
    RangesTooShort {
        /// Where the bytes start, counted from the start of the list.
        offset: usize,
        /// How many bytes are wanted.
        wanted: usize,
        /// How many bytes the ranges have altogether.
        found: usize,
    },
    #[error("a transfer may have at most {max} pieces")]
    TooManySegments { max: usize },
    #[error(
        "the file behind the guest's memory was truncated, or the machine reported a memory error"
    )]
    Poisoned,
}
