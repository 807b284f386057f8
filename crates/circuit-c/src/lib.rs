//! Zero-copy circuits for programs in C: `include/ringdown_circuit.h` says what each function does.
//!
//! Everything here is a call into the library `circuit`. Unsafe is what C cannot promise by a type: that pointers point to what they should.

use std::cell::RefCell;
use std::ffi::{CString, c_char, c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::ptr::{self, addr_of, addr_of_mut};
use std::slice;
use std::time::Duration;

use circuit::{Circuit, Kind, Options, Reader, Writer};

mod connect;

pub use connect::*;

/// Both ends of one side. Two threads may have one each, so a reference is made to the one that is used, and never to the whole.
#[derive(Debug)]
#[allow(non_camel_case_types)] // As C calls it.
pub struct ringdown_circuit {
    writer: Writer,
    reader: Reader,
    /// Never changes.
    peer: Option<CString>,
    is_zero_copy: bool,
    /// Belongs to the reading thread.
    record: Vec<u8>,
}

/// How a circuit is to be.
#[derive(Debug, Clone, Copy)]
#[repr(C)]
#[allow(non_camel_case_types)]
pub struct ringdown_circuit_options {
    /// Of each ring, in bytes.
    pub ring_len: u64,
    /// How long to look before sleeping; the largest number for always.
    pub spin_us: u64,
    /// 0 for bytes, 1 for records.
    pub kind: u32,
    /// Zero.
    pub reserved: u32,
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

fn set_errno(number: c_int) {
    // SAFETY: the calling thread's error number is always there.
    unsafe { *libc::__errno_location() = number };
}

/// Remembers what went wrong, as a number and in words.
fn fail(error: impl Into<io::Error>) {
    let error = error.into();
    let number = error.raw_os_error().unwrap_or(match error.kind() {
        io::ErrorKind::WouldBlock => libc::EAGAIN,
        io::ErrorKind::TimedOut => libc::ETIMEDOUT,
        io::ErrorKind::BrokenPipe => libc::EPIPE,
        io::ErrorKind::ConnectionReset => libc::ECONNRESET,
        io::ErrorKind::InvalidInput => libc::EINVAL,
        io::ErrorKind::InvalidData => libc::EPROTO,
        io::ErrorKind::Unsupported => libc::EOPNOTSUPP,
        io::ErrorKind::ConnectionRefused => libc::ECONNREFUSED,
        io::ErrorKind::PermissionDenied => libc::EACCES,
        io::ErrorKind::NotFound => libc::ENOENT,
        io::ErrorKind::AddrNotAvailable => libc::EADDRNOTAVAIL,
        io::ErrorKind::ResourceBusy => libc::EBUSY,
        io::ErrorKind::HostUnreachable => libc::EHOSTUNREACH,
        _ => libc::EIO,
    });
    // Our words have no zeros in them; those of a peer may.
    let words = error.to_string().replace('\0', "\\0");
    LAST_ERROR.set(CString::new(words).unwrap_or_default());
    set_errno(number);
}

fn status(outcome: circuit::Result<()>) -> c_int {
    match outcome {
        Ok(()) => 0,
        Err(error) => {
            fail(error);
            -1
        }
    }
}

fn count(outcome: io::Result<usize>) -> isize {
    match outcome {
        // No slice is longer.
        Ok(count) => count as isize,
        Err(error) => {
            fail(error);
            -1
        }
    }
}

fn answer(outcome: circuit::Result<bool>) -> c_int {
    match outcome {
        Ok(answer) => c_int::from(answer),
        Err(error) => {
            fail(error);
            -1
        }
    }
}

/// What to read or write, of C's. Nothing, where there is none.
///
/// # Safety
/// The bytes are valid for reading, and not written to meanwhile.
unsafe fn bytes<'a>(place: *const c_void, len: usize) -> &'a [u8] {
    match place.is_null() || len == 0 {
        true => &[],
        // SAFETY: the caller's promise.
        false => unsafe { slice::from_raw_parts(place.cast(), len) },
    }
}

/// # Safety
/// The bytes are valid for writing, and not used by others meanwhile.
unsafe fn bytes_mut<'a>(place: *mut c_void, len: usize) -> &'a mut [u8] {
    match place.is_null() || len == 0 {
        true => &mut [],
        // SAFETY: the caller's promise. What is there is overwritten, never read.
        false => unsafe { slice::from_raw_parts_mut(place.cast(), len) },
    }
}

/// # Safety
/// The circuit is one, and no other thread uses its writing end meanwhile.
unsafe fn writer<'a>(circuit: *mut ringdown_circuit) -> &'a mut Writer {
    // SAFETY: the caller's promise.
    unsafe { &mut *addr_of_mut!((*circuit).writer) }
}

/// # Safety
/// The circuit is one, and no other thread uses its reading end meanwhile.
unsafe fn reader<'a>(circuit: *mut ringdown_circuit) -> &'a mut Reader {
    // SAFETY: the caller's promise.
    unsafe { &mut *addr_of_mut!((*circuit).reader) }
}

fn parse(options: &ringdown_circuit_options) -> io::Result<Options> {
    let kind = match (options.kind, options.reserved) {
        (0, 0) => Kind::Bytes,
        (1, 0) => Kind::Records,
        (kind, reserved) => {
            let words = format!("kind {kind} and reserved {reserved}: expected 0 or 1, and 0");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, words));
        }
    };
    Ok(Options {
        ring_len: options.ring_len,
        kind,
        spin: match options.spin_us {
            u64::MAX => Duration::MAX,
            spin_us => Duration::from_micros(spin_us),
        },
    })
}

/// # Safety
/// The socket is open and the caller's to give; the options are, or there are none.
unsafe fn set_up(
    socket: c_int,
    options: *const ringdown_circuit_options,
    how: fn(UnixStream, &Options) -> circuit::Result<Circuit>,
) -> *mut ringdown_circuit {
    if socket < 0 {
        fail(io::Error::from_raw_os_error(libc::EBADF));
        return ptr::null_mut();
    }
    // SAFETY: the caller's promise.
    let socket = UnixStream::from(unsafe { OwnedFd::from_raw_fd(socket) });
    // SAFETY: the caller's promise.
    let options = unsafe { parse_pointer(options) };
    hand_out(options.and_then(|options| Ok(how(socket, &options)?)))
}

/// # Safety
/// The options are, or there are none.
unsafe fn parse_pointer(options: *const ringdown_circuit_options) -> io::Result<Options> {
    // SAFETY: the caller's promise.
    let options = unsafe { options.as_ref() };
    options.map_or_else(|| Ok(Options::default()), parse)
}

/// To C, which gives it back by `ringdown_circuit_close`.
fn hand_out(made: io::Result<Circuit>) -> *mut ringdown_circuit {
    match made {
        Ok(made) => {
            // Our words have no zeros in them.
            let peer = made.peer().map(|peer| CString::new(peer.to_string()));
            let peer = peer.map(Result::unwrap_or_default);
            let is_zero_copy = made.is_zero_copy();
            let (writer, reader) = made.into_split();
            Box::into_raw(Box::new(ringdown_circuit {
                writer,
                reader,
                peer,
                is_zero_copy,
                record: Vec::new(),
            }))
        }
        Err(error) => {
            fail(error);
            ptr::null_mut()
        }
    }
}

/// Fills in the options that are used where there are none.
///
/// # Safety
/// They can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_default_options(options: *mut ringdown_circuit_options) {
    let default = Options::default();
    let filled = ringdown_circuit_options {
        ring_len: default.ring_len,
        spin_us: default.spin.as_micros() as u64,
        kind: 0,
        reserved: 0,
    };
    // SAFETY: the caller's promise.
    unsafe { options.write(filled) };
}

/// Makes a circuit and hands its other side over.
///
/// # Safety
/// The socket is open and the caller's to give; the options are, or there are none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_offer(
    socket: c_int,
    options: *const ringdown_circuit_options,
) -> *mut ringdown_circuit {
    // SAFETY: the caller's promise.
    unsafe { set_up(socket, options, Circuit::offer) }
}

/// Takes the circuit that is handed over.
///
/// # Safety
/// As [`ringdown_circuit_offer`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_accept(
    socket: c_int,
    options: *const ringdown_circuit_options,
) -> *mut ringdown_circuit {
    // SAFETY: the caller's promise.
    unsafe { set_up(socket, options, Circuit::accept) }
}

/// Closes both ends and gives everything back.
///
/// # Safety
/// The circuit is valid, not closed yet and no longer in use; or it is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_close(circuit: *mut ringdown_circuit) {
    if !circuit.is_null() {
        // SAFETY: it was made by `Box::into_raw`, and the caller's promise.
        drop(unsafe { Box::from_raw(circuit) });
    }
}

/// Ends both directions at once.
///
/// # Safety
/// The circuit is valid, and no other thread uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_reset(circuit: *mut ringdown_circuit) {
    // SAFETY: the caller's promise.
    unsafe { writer(circuit) }.reset();
    // SAFETY: the caller's promise.
    unsafe { reader(circuit) }.reset();
}

/// How long functions wait.
///
/// # Safety
/// As [`ringdown_circuit_reset`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_set_timeout(
    circuit: *mut ringdown_circuit,
    timeout_ms: i64,
) {
    let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
    // SAFETY: the caller's promise.
    unsafe { writer(circuit) }.set_timeout(timeout);
    // SAFETY: the caller's promise.
    unsafe { reader(circuit) }.set_timeout(timeout);
}

/// Writes, and waits for room.
///
/// # Safety
/// The circuit is valid, no other thread uses its writing end meanwhile, and so many bytes can be read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_write(
    circuit: *mut ringdown_circuit,
    from: *const c_void,
    len: usize,
) -> isize {
    // SAFETY: the caller's promise.
    let (writer, from) = unsafe { (writer(circuit), bytes(from, len)) };
    count(io::Write::write(writer, from))
}

/// Writes what there is room for.
///
/// # Safety
/// As [`ringdown_circuit_write`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_try_write(
    circuit: *mut ringdown_circuit,
    from: *const c_void,
    len: usize,
) -> isize {
    // SAFETY: the caller's promise.
    let (writer, from) = unsafe { (writer(circuit), bytes(from, len)) };
    count(writer.try_write(from).map_err(io::Error::from))
}

/// Reads, and waits for bytes.
///
/// # Safety
/// The circuit is valid, no other thread uses its reading end meanwhile, and so many bytes can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_read(
    circuit: *mut ringdown_circuit,
    into: *mut c_void,
    len: usize,
) -> isize {
    // SAFETY: the caller's promise.
    let (reader, into) = unsafe { (reader(circuit), bytes_mut(into, len)) };
    count(io::Read::read(reader, into))
}

/// Reads what there is.
///
/// # Safety
/// As [`ringdown_circuit_read`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_try_read(
    circuit: *mut ringdown_circuit,
    into: *mut c_void,
    len: usize,
) -> isize {
    // SAFETY: the caller's promise.
    let (reader, into) = unsafe { (reader(circuit), bytes_mut(into, len)) };
    count(reader.try_read(into).map_err(io::Error::from))
}

/// Only where pages are larger than a ring.
fn in_two_pieces() -> io::Error {
    let words = "the room goes over the end of a ring whose pages cannot be mapped twice: ask for less, or use write";
    io::Error::new(io::ErrorKind::Unsupported, words)
}

/// Room in the ring.
///
/// # Safety
/// The circuit is valid, no other thread uses its writing end meanwhile, and the length can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_reserve(
    circuit: *mut ringdown_circuit,
    least: usize,
    most: usize,
    len: *mut usize,
) -> *mut c_void {
    // SAFETY: the caller's promise.
    let writer = unsafe { writer(circuit) };
    let found = match writer.reserve(least.max(1), most) {
        Ok(mut room) => room.span().pieces()[0],
        Err(error) => {
            fail(error);
            return ptr::null_mut();
        }
    };
    if found.1 < least {
        fail(in_two_pieces());
        return ptr::null_mut();
    }
    // SAFETY: the caller's promise.
    unsafe { len.write(found.1) };
    found.0.cast()
}

/// Gives the next bytes to the peer.
///
/// # Safety
/// The circuit is valid, and no other thread uses its writing end meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_commit(
    circuit: *mut ringdown_circuit,
    len: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    status(unsafe { writer(circuit) }.commit(len))
}

/// What is in the ring.
///
/// # Safety
/// The circuit is valid, no other thread uses its reading end meanwhile, and the length can be written to.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_peek(
    circuit: *mut ringdown_circuit,
    most: usize,
    len: *mut usize,
) -> *const c_void {
    // SAFETY: the caller's promise.
    let reader = unsafe { reader(circuit) };
    let (place, found) = match reader.peek(most.max(1)) {
        Ok(Some(span)) => span.pieces()[0],
        Ok(None) => {
            set_errno(0);
            (ptr::null_mut(), 0)
        }
        Err(error) => {
            fail(error);
            (ptr::null_mut(), 0)
        }
    };
    // SAFETY: the caller's promise.
    unsafe { len.write(found) };
    place.cast_const().cast()
}

/// Waits for bytes.
///
/// # Safety
/// The circuit is valid, and no other thread uses its reading end meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_wait(
    circuit: *mut ringdown_circuit,
    beyond: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    answer(unsafe { reader(circuit) }.wait(beyond))
}

/// Gives what was peeked at back.
///
/// # Safety
/// The circuit is valid, and no other thread uses its reading end meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_release(
    circuit: *mut ringdown_circuit,
    len: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    status(unsafe { reader(circuit) }.release(len))
}

/// Sends a record.
///
/// # Safety
/// As [`ringdown_circuit_write`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_send(
    circuit: *mut ringdown_circuit,
    record: *const c_void,
    len: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    let (writer, record) = unsafe { (writer(circuit), bytes(record, len)) };
    status(writer.send(record))
}

/// Receives a record.
///
/// # Safety
/// As [`ringdown_circuit_read`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_receive(
    circuit: *mut ringdown_circuit,
    into: *mut c_void,
    size: usize,
) -> isize {
    // SAFETY: the caller's promise.
    let (reader, into) = unsafe { (reader(circuit), bytes_mut(into, size)) };
    // SAFETY: the caller's promise: it belongs to the reading end.
    let record = unsafe { &mut *addr_of_mut!((*circuit).record) };
    match reader.receive(record) {
        Ok(true) => {
            let fitting = record.len().min(into.len());
            into[..fitting].copy_from_slice(&record[..fitting]);
            record.len() as isize
        }
        Ok(false) => {
            set_errno(0);
            -1
        }
        Err(error) => {
            fail(error);
            -1
        }
    }
}

/// Says that no more will come.
///
/// # Safety
/// The circuit is valid, and no other thread uses its writing end meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_finish(circuit: *mut ringdown_circuit) -> c_int {
    // SAFETY: the caller's promise.
    status(unsafe { writer(circuit) }.finish())
}

/// What becomes readable.
///
/// # Safety
/// The circuit is one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_descriptor(circuit: *const ringdown_circuit) -> c_int {
    // SAFETY: the caller's promise. Neither end ever changes the descriptor.
    let reader = unsafe { &*addr_of!((*circuit).reader) };
    std::os::fd::AsFd::as_fd(reader).as_raw_fd()
}

/// Whether there is a window.
///
/// # Safety
/// The circuit is one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_is_zero_copy(circuit: *const ringdown_circuit) -> c_int {
    // SAFETY: the caller's promise. It is never written to.
    c_int::from(unsafe { *addr_of!((*circuit).is_zero_copy) })
}

/// Who is at the other side.
///
/// # Safety
/// The circuit is one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_peer(circuit: *const ringdown_circuit) -> *const c_char {
    // SAFETY: the caller's promise. It is never written to.
    let peer = unsafe { &*addr_of!((*circuit).peer) };
    peer.as_ref().map_or(ptr::null(), |peer| peer.as_ptr())
}

/// Asks to be woken when there is something to read.
///
/// # Safety
/// The circuit is valid, and no other thread uses its reading end meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_arm_read(circuit: *mut ringdown_circuit) -> c_int {
    // SAFETY: the caller's promise.
    answer(unsafe { reader(circuit) }.arm(0))
}

/// Asks to be woken when there is room.
///
/// # Safety
/// The circuit is valid, and no other thread uses its writing end meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_arm_write(
    circuit: *mut ringdown_circuit,
    least: usize,
) -> c_int {
    // SAFETY: the caller's promise.
    answer(unsafe { writer(circuit) }.arm(least.max(1)))
}

/// Takes what made the descriptor readable.
///
/// # Safety
/// The circuit is valid, and no other thread uses its reading end meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_circuit_clear(circuit: *mut ringdown_circuit) -> c_int {
    // SAFETY: the caller's promise.
    status(unsafe { reader(circuit) }.clear())
}

/// What went wrong last in this thread.
#[unsafe(no_mangle)]
pub extern "C" fn ringdown_circuit_error() -> *const c_char {
    LAST_ERROR.with_borrow(|words| words.as_ptr())
}
