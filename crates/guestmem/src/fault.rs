//! What happens when a page of guest memory is gone.
//!
//! A region is backed by a file of the VMM's. The holder of that file can truncate it, and the next access to a lost page raises SIGBUS, which ends
//! the process and with it every other virtual machine's lines. (A memory error of the machine raises the same signal.) So a handler puts empty
//! private memory where the region was, marks the region as poisoned, and lets the access go on; the owner of the line sees
//! `GuestMemory::is_poisoned` and drops the line.
//!
//! # How it works
//!
//! A signal handler may not take locks or allocate, so the mapped spans stand in a fixed table of atomics. Each slot has a
//! generation, which is odd only while the slot holds a span: a handler that saw the same odd generation before
//! and after reading a slot has read a consistent span. The whole region is replaced, not only the page: it is one
//! system call and one mapping, however many pages are gone and however large they are, and no guest can make
//! the process run out of mappings this way.
//!
//! A fault outside every span of ours keeps its meaning: the handler that was there before is called, which may be that of a language's runtime or of
//! another library in the process. Where there was none, the default action is restored and the process dies of it.
//!
//! System calls that touch such a page do not raise the signal. They fail with `EFAULT`, which `io::is_memory_fault` recognises.

use std::io;
use std::mem::{self, MaybeUninit};
use std::ptr;
use std::sync::OnceLock;

use self::atomics::{AtomicBool, AtomicUsize, Ordering};
pub(crate) use self::table::Registration;
use self::table::{Slot, Span, find};

mod table;

#[cfg(test)]
#[cfg(loom)]
#[path = "fault/tests/interleavings.rs"]
mod interleavings;
#[cfg(test)]
#[cfg(not(any(miri, loom)))]
mod tests;

mod atomics {
    pub(super) use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering, fence};
}

/// How many regions one process can have mapped at a time, over all of its virtual machines.
///
/// Room for eight machines with as many regions as one may have, or for over a thousand ordinary ones with two to four.
/// The table's untouched pages cost nothing.
pub const MAX_MAPPINGS: usize = 4096;

/// Installs the handler for SIGBUS, for the whole process, once. Further calls do nothing.
///
/// Mapping a region does this by itself, so a daemon needs to call it only to learn of a failure early. The handler that is there is called for whatever
/// is not ours. A program that installs its own handler afterwards takes this one's place, and should do the same.
pub fn install() -> io::Result<()> {
    static INSTALLED: OnceLock<Result<(), i32>> = OnceLock::new();
    let outcome = INSTALLED.get_or_init(|| {
        // Known before ours can be called.
        let previous = current_action().and_then(|previous| {
            PREVIOUS.get_or_init(|| previous);
            set_action(Action::Ours)
        });
        previous.map_err(|error| error.raw_os_error().unwrap_or(libc::EINVAL))
    });
    outcome.map_err(io::Error::from_raw_os_error)
}

/// Enters a span, in bytes, whose pages are `page_len` bytes long. `None` when the table is full.
pub(crate) fn register(start: usize, len: usize, page_len: usize) -> Option<Registration> {
    Registration::enter(&SLOTS, start, len, page_len)
}

/// How many faults in registered spans there have been so far, in the whole process. While it is zero no region is poisoned.
pub(crate) fn count() -> usize {
    FAULTS.load(Ordering::Acquire)
}

/// What was there before our handler. To read it is one atomic load, which a handler may do.
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

static FAULTS: AtomicUsize = AtomicUsize::new(0);

static SLOTS: [Slot; MAX_MAPPINGS] = [const { empty_slot() }; MAX_MAPPINGS];

const fn empty_slot() -> Slot {
    Slot {
        taken: AtomicBool::new(false),
        generation: AtomicUsize::new(0),
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        page_len: AtomicUsize::new(0),
        poisoned: AtomicBool::new(false),
    }
}

/// Puts empty private memory in place of a span: all of it, or if that much may not be had, the page at `address`.
fn replace(span: &Span, address: usize) -> bool {
    let page = address - (address - span.start) % span.page_len;
    map_empty(span.start, span.len) || map_empty(page, span.page_len)
}

fn map_empty(start: usize, len: usize) -> bool {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_FIXED | libc::MAP_NORESERVE;
    // SAFETY: the span is a mapping of our own, and it stays one: the access that faulted holds a reference to it. No code may rely on its content,
    // since a guest can change it at any time.
    let mapped = unsafe {
        libc::mmap(
            ptr::without_provenance_mut(start),
            len,
            protection,
            flags,
            -1,
            0,
        )
    };
    mapped != libc::MAP_FAILED
}

/// Only what is safe in a signal handler: atomics, `mmap`, `sigaction`, `raise`, and the handler that was there before.
extern "C" fn on_bus_error(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
) {
    // SAFETY: the calling thread's error number is always there.
    let error_number = unsafe { libc::__errno_location() };
    // SAFETY: as above. It is put back below, since the handler runs between any two instructions.
    let saved = unsafe { *error_number };
    // SAFETY: with SA_SIGINFO the kernel passes a valid description of the signal.
    let said = unsafe { &*info };

    let mut handled = false;
    // A positive code is the kernel's; anything else was sent by a process and carries no address.
    let is_sent = said.si_code <= 0;
    if !is_sent {
        // SAFETY: for SIGBUS raised by the kernel the address is the field that is filled in.
        let address = unsafe { said.si_addr() }.addr();
        if let Some(span) = find(&SLOTS, address) {
            // The mark comes first: a reader of empty memory must be able to see the mark.
            span.slot.poisoned.store(true, Ordering::Release);
            FAULTS.fetch_add(1, Ordering::AcqRel);
            handled = replace(&span, address);
        }
    }
    if !handled {
        // SAFETY: what the kernel has passed is passed on.
        unsafe { pass_on(signal, info, context, is_sent) };
        let is_default = current_action().is_ok_and(|action| action.sa_sigaction == libc::SIG_DFL);
        // With the default action the access is repeated on return and ends the process as if there were no handler. A signal that was sent is not
        // repeated by itself.
        if is_default && is_sent {
            // SAFETY: no memory is involved; the signal stays pending until this handler returns.
            unsafe { libc::raise(libc::SIGBUS) };
        }
    }
    // SAFETY: the pointer is this thread's own, from above.
    unsafe { *error_number = saved };
}

/// To the previous handler. Without one, or when it is removed, the default action.
///
/// # Safety
/// What the kernel has passed to a handler of SIGBUS.
unsafe fn pass_on(
    signal: libc::c_int,
    info: *mut libc::siginfo_t,
    context: *mut libc::c_void,
    is_sent: bool,
) {
    let previous = PREVIOUS.get();
    let handler = previous.map_or(libc::SIG_DFL, |previous| previous.sa_sigaction);
    match (handler, previous) {
        // Only a signal that was sent can be ignored.
        (libc::SIG_IGN, _) if is_sent => {}
        (libc::SIG_DFL | libc::SIG_IGN, _) | (_, None) => {
            // It fails for numbers that are no signal only.
            let _ = set_action(Action::Default);
        }
        (handler, Some(previous)) if previous.sa_flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: its installer declared by the flag that it is such a function.
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                unsafe { mem::transmute(handler) };
            handler(signal, info, context);
        }
        (handler, Some(_)) => {
            // SAFETY: its installer declared by not setting the flag that it is such a function.
            let handler: extern "C" fn(libc::c_int) = unsafe { mem::transmute(handler) };
            handler(signal);
        }
    }
}

fn current_action() -> io::Result<libc::sigaction> {
    let mut current = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the action is written by the call, and none is set.
    let result = unsafe { libc::sigaction(libc::SIGBUS, ptr::null(), current.as_mut_ptr()) };
    match result {
        // SAFETY: it was filled in; an all-zero one would be valid, too.
        0 => Ok(unsafe { current.assume_init() }),
        _ => Err(io::Error::last_os_error()),
    }
}

#[derive(Clone, Copy)]
enum Action {
    Ours,
    Default,
}

fn set_action(action: Action) -> io::Result<()> {
    let zeroed = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: an all-zero sigaction is valid: no flags, an empty mask, the default action.
    let mut new = unsafe { zeroed.assume_init() };
    match action {
        Action::Ours => {
            let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
                on_bus_error;
            new.sa_sigaction = handler as libc::sighandler_t;
            new.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        }
        Action::Default => new.sa_sigaction = libc::SIG_DFL,
    }
    // SAFETY: the action is fully initialised, and the handler does only what a handler may do.
    let result = unsafe { libc::sigaction(libc::SIGBUS, &new, ptr::null_mut()) };
    if result == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}
