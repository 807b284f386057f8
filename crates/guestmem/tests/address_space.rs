//! The process's addresses are shared by all virtual machines. A file without pages costs its VMM nothing, however long it is.
//! These tests are a process of their own, since they use what all others would.

#![cfg(not(any(miri, loom)))]
#![allow(clippy::unwrap_used)] // This is a test.

use std::fs::File;
use std::sync::Mutex;

use guestmem::guest::{GuestMemory, MAX_MAPPED_BYTES, MAX_MEMORY_BYTES, MemoryError, RegionSpec};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

/// One test at a time has the process's addresses.
static ALONE: Mutex<()> = Mutex::new(());

const HALF: u64 = MAX_MEMORY_BYTES / 2;

/// As long as a region can be, and without a page.
fn sparse() -> File {
    let file = memfd_create("sparse", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&file, 2 * MAX_MEMORY_BYTES).unwrap();
    file.into()
}

fn region(file: &File, address: u64, size: u64) -> RegionSpec {
    RegionSpec {
        guest_address: address,
        size,
        frontend_address: address,
        file: file.try_clone().unwrap(),
        file_offset: 0,
    }
}

#[test]
fn one_memory_has_at_most_so_many_bytes() {
    let _alone = ALONE.lock().unwrap();
    let file = sparse();
    let too_long = vec![region(&file, 0, MAX_MEMORY_BYTES + 1)];
    let error = GuestMemory::with_regions(too_long).unwrap_err();
    assert!(
        matches!(error, MemoryError::TooMuchMemory { .. }),
        "{error}"
    );
    assert!(error.to_string().contains("8 TiB"), "{error}");

    let halves = vec![region(&file, 0, HALF), region(&file, 2 * HALF, HALF)];
    let mut memory = GuestMemory::with_regions(halves).unwrap();
    let error = memory.add_region(region(&file, 4 * HALF, 1)).unwrap_err();
    assert!(
        matches!(error, MemoryError::TooMuchMemory { .. }),
        "{error}"
    );
    memory.remove_region(0, HALF, 0).unwrap();
    memory.add_region(region(&file, 4 * HALF, 1)).unwrap();
}

#[test]
fn all_memories_together_leave_the_process_its_addresses() {
    let _alone = ALONE.lock().unwrap();
    let file = sparse();
    let whole = || GuestMemory::with_regions(vec![region(&file, 0, MAX_MEMORY_BYTES)]);
    let small = || GuestMemory::with_regions(vec![region(&file, 0, 4096)]);
    let mut memories: Vec<_> = (0..MAX_MAPPED_BYTES / MAX_MEMORY_BYTES)
        .map(|_| whole().unwrap())
        .collect();
    for refused in [whole(), small()] {
        let error = refused.unwrap_err();
        assert!(
            matches!(error, MemoryError::TooMuchMapped { .. }),
            "{error}"
        );
        assert!(error.to_string().contains("64 TiB"), "{error}");
    }
    // The process itself goes on.
    let mut heap: Vec<u8> = Vec::new();
    heap.try_reserve_exact(1 << 30).unwrap();
    std::thread::spawn(|| ()).join().unwrap();

    // What is given up is free at once, although another thread unmaps it.
    memories.pop();
    memories.push(whole().unwrap());
    drop(memories);
    small().unwrap();
}

/// A region that is refused after all takes nothing.
#[test]
fn what_is_refused_takes_no_room() {
    let _alone = ALONE.lock().unwrap();
    let file = sparse();
    let short = memfd_create("short", MemfdFlags::CLOEXEC).unwrap().into();
    for _ in 0..=MAX_MAPPED_BYTES / MAX_MEMORY_BYTES {
        let beyond = vec![region(&short, 0, MAX_MEMORY_BYTES)];
        let error = GuestMemory::with_regions(beyond).unwrap_err();
        assert!(matches!(error, MemoryError::FileTooShort { .. }), "{error}");
    }
    GuestMemory::with_regions(vec![region(&file, 0, MAX_MEMORY_BYTES)]).unwrap();
}
