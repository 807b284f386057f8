use std::env;
use std::fs;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::thread;

use super::*;
use crate::guest::{GuestMemory, MemoryError, Range};
use crate::guestmem_driver::Arena;
use crate::region::unmapper;

const PAGE: usize = 4096;

#[test]
fn a_truncated_region_is_poisoned_and_only_that_one() {
    let (lost, kept) = (Arena::new(4 * PAGE).unwrap(), Arena::new(4 * PAGE).unwrap());
    let memory = |arena: &Arena| GuestMemory::with_regions(vec![arena.region(0).unwrap()]).unwrap();
    let (lost_memory, kept_memory) = (memory(&lost), memory(&kept));
    lost_memory
        .write(&[Range { address: 0, len: 4 }], 0, b"once")
        .unwrap();
    assert!(!lost_memory.is_poisoned());

    lost.file().set_len(PAGE as u64).unwrap();
    // Nothing is lost while the missing pages are not touched.
    let mut found = [0; 4];
    lost_memory
        .read(&[Range { address: 0, len: 4 }], 0, &mut found)
        .unwrap();
    assert_eq!(&found, b"once");
    assert!(!lost_memory.is_poisoned());

    let over_the_end = [Range {
        address: PAGE as u64 - 2,
        len: 4,
    }];
    assert!(matches!(
        lost_memory.read(&over_the_end, 0, &mut found),
        Err(MemoryError::Poisoned)
    ));
    assert!(lost_memory.is_poisoned());
    // Further accesses do no harm, and say so, also where the page is still there.
    assert!(matches!(
        lost_memory.write(&over_the_end, 0, b"more"),
        Err(MemoryError::Poisoned)
    ));
    assert!(matches!(
        lost_memory.read(&[Range { address: 0, len: 4 }], 0, &mut found),
        Err(MemoryError::Poisoned)
    ));

    assert!(!kept_memory.is_poisoned());
    kept_memory.write(&over_the_end, 0, b"fine").unwrap();
    // A new mapping of the same memory, made long again, starts anew.
    lost.file().set_len(4 * PAGE as u64).unwrap();
    let again = memory(&lost);
    again.write(&over_the_end, 0, b"anew").unwrap();
    assert!(!again.is_poisoned());
    assert!(lost_memory.is_poisoned());
}

/// Otherwise all of the file's memory would be freed where the fault was, if its VMM has gone.
#[test]
fn a_poisoned_region_still_refers_to_its_file() {
    let arena = Arena::new(4 * PAGE).unwrap();
    let memory = GuestMemory::with_regions(vec![arena.region(0).unwrap()]).unwrap();
    let file = arena.file().metadata().unwrap();
    let (device, inode) = (file.dev(), file.ino());
    let (major, minor) = (libc::major(device), libc::minor(device));
    let file = format!(" {major:02x}:{minor:02x} {inode} ");
    let is_mapped = || {
        let maps = fs::read_to_string("/proc/self/maps").unwrap();
        maps.contains(&file)
    };
    arena.file().set_len(PAGE as u64).unwrap();
    drop(arena);
    let lost = [Range {
        address: PAGE as u64,
        len: 1,
    }];
    assert!(memory.write(&lost, 0, &[1]).is_err());
    assert!(memory.is_poisoned());
    unmapper::finish();
    assert!(is_mapped());
    drop(memory);
    unmapper::finish();
    assert!(!is_mapped());
}

#[test]
fn threads_that_fault_at_once_all_go_on() {
    let arena = Arena::new(64 * PAGE).unwrap();
    let memory = GuestMemory::with_regions(vec![arena.region(0).unwrap()]).unwrap();
    arena.file().set_len(0).unwrap();
    thread::scope(|scope| {
        for first in 0..4_u64 {
            let memory = &memory;
            scope.spawn(move || {
                for page in (first..64).step_by(4) {
                    let result = memory.write(
                        &[Range {
                            address: page * PAGE as u64,
                            len: 1,
                        }],
                        0,
                        &[1],
                    );
                    assert!(matches!(result, Err(MemoryError::Poisoned)));
                }
            });
        }
    });
    assert!(memory.is_poisoned());
}

#[test]
fn the_table_finds_what_is_in_it_and_has_a_last_entry() {
    static TABLE: [Slot; 3] = [const { empty_slot() }; 3];
    let found = |address| find(&TABLE, address).map(|span| (span.start, span.len));
    assert_eq!(found(0), None);
    let mut entries: Vec<_> = [1000, 2000, 3000]
        .map(|start| Registration::enter(&TABLE, start, 100, 10))
        .into();
    assert!(entries.iter().all(Option::is_some));
    assert!(
        Registration::enter(&TABLE, 4000, 100, 10).is_none(),
        "three are three"
    );
    for start in [1000, 2000, 3000] {
        let span = Some((start, 100));
        assert_eq!(
            [start - 1, start, start + 99, start + 100].map(found),
            [None, span, span, None]
        );
    }
    entries.remove(1);
    assert_eq!(found(2000), None);
    assert!(Registration::enter(&TABLE, 4000, 100, 10).is_some_and(|entry| !entry.is_poisoned()));
    assert_eq!(found(4000), None, "it was dropped at once");
    drop(entries);
    assert_eq!(found(1000), None);
}

#[test]
fn a_fault_elsewhere_ends_the_process_as_usual() {
    assert_eq!(
        signal_of_child("fault::tests::child_faults_elsewhere"),
        Some(libc::SIGBUS)
    );
}

#[test]
fn a_signal_that_was_sent_ends_the_process_as_usual() {
    assert_eq!(
        signal_of_child("fault::tests::child_is_sent_the_signal"),
        Some(libc::SIGBUS)
    );
}

#[test]
fn whoever_was_there_before_hears_of_what_is_not_ours() {
    for name in [
        "fault::tests::child_has_a_handler",
        "fault::tests::child_has_a_handler_with_information",
    ] {
        assert_eq!(signal_of_child(name), None, "{name}");
    }
}

const CHILD: &str = "RINGDOWN_TEST_CHILD";

/// Runs one test of this file in a process of its own and says by which signal it died.
fn signal_of_child(name: &str) -> Option<i32> {
    let mut command = Command::new(env::current_exe().unwrap());
    let output = command
        .args(["--exact", name, "--nocapture", "--test-threads=1"])
        .env(CHILD, "1")
        .output()
        .unwrap();
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("child is running"),
        "{output:?}"
    );
    output.status.signal()
}

/// Does something only in a process that [`signal_of_child`] has started.
#[test]
fn child_faults_elsewhere() {
    if env::var_os(CHILD).is_none() {
        return;
    }
    no_core_dump();
    // A mapping of ours, so that the handler is there, and a foreign one that is truncated.
    let arena = Arena::new(PAGE).unwrap();
    let foreign = Arena::new(PAGE).unwrap();
    let protection = libc::PROT_READ;
    // SAFETY: a new mapping at a place that the kernel chooses.
    let page = unsafe {
        libc::mmap(
            ptr::null_mut(),
            PAGE,
            protection,
            libc::MAP_SHARED,
            foreign.file().as_raw_fd(),
            0,
        )
    };
    assert_ne!(page, libc::MAP_FAILED);
    foreign.file().set_len(0).unwrap();
    println!("child is running");
    // SAFETY: the page is mapped. Reading it raises the signal, which is the point.
    let byte = unsafe { page.cast::<u8>().read_volatile() };
    println!("{byte} was read, {}", arena.size());
}

/// As above.
#[test]
fn child_is_sent_the_signal() {
    if env::var_os(CHILD).is_none() {
        return;
    }
    no_core_dump();
    install().unwrap();
    println!("child is running");
    // SAFETY: no memory is involved.
    unsafe { libc::raise(libc::SIGBUS) };
}

static HEARD: AtomicUsize = AtomicUsize::new(0);

extern "C" fn hear(signal: libc::c_int) {
    HEARD.fetch_add(signal as usize, Ordering::SeqCst);
}

extern "C" fn hear_with_information(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    _context: *mut libc::c_void,
) {
    // SAFETY: the kernel's, passed on.
    let code = unsafe { (*info).si_code };
    HEARD.fetch_add(
        (signal + (code - libc::SI_TKILL)) as usize,
        Ordering::SeqCst,
    );
}

/// A handler that stays, then ours, then one fault of ours and one signal that is not: each is handled once, by its own handler.
fn hear_through_ours(handler: libc::sighandler_t, flags: libc::c_int) {
    // SAFETY: an all-zero sigaction is valid.
    let mut action: libc::sigaction = unsafe { mem::zeroed() };
    action.sa_sigaction = handler;
    action.sa_flags = flags;
    // SAFETY: the handler does what a handler may do.
    let installed = unsafe { libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) };
    assert_eq!(installed, 0);
    let arena = Arena::new(PAGE).unwrap();
    let memory = GuestMemory::with_regions(vec![arena.region(0).unwrap()]).unwrap();
    println!("child is running");
    arena.file().set_len(0).unwrap();
    assert!(
        memory
            .write(&[Range { address: 0, len: 1 }], 0, &[1])
            .is_err()
    );
    assert_eq!(HEARD.load(Ordering::SeqCst), 0);
    for times in 1..=2 {
        // SAFETY: no memory is involved.
        unsafe { libc::raise(libc::SIGBUS) };
        assert_eq!(HEARD.load(Ordering::SeqCst), times * libc::SIGBUS as usize);
    }
}

/// As above.
#[test]
fn child_has_a_handler() {
    if env::var_os(CHILD).is_some() {
        let handler: extern "C" fn(libc::c_int) = hear;
        hear_through_ours(handler as libc::sighandler_t, 0);
    }
}

/// As above.
#[test]
fn child_has_a_handler_with_information() {
    if env::var_os(CHILD).is_some() {
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            hear_with_information;
        hear_through_ours(handler as libc::sighandler_t, libc::SA_SIGINFO);
    }
}

fn no_core_dump() {
    let limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the limit is valid for the call.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_CORE, &limit) };
    assert_eq!(result, 0);
}

#[test]
fn a_span_leaves_the_table_when_it_is_unmapped() {
    let regions = || {
        let arena = Arena::new(PAGE).unwrap();
        GuestMemory::with_regions(vec![arena.region(0).unwrap()])
    };
    // More than the table holds: each has left it when its place is needed.
    for _ in 0..MAX_MAPPINGS {
        regions().unwrap();
    }
}
