//! Circuits by name.

use std::ffi::{CStr, c_char, c_int};
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr;
use std::time::Duration;

use circuit::{Connector, Listener};

use crate::{fail, hand_out, parse_pointer, ringdown_circuit, ringdown_circuit_options};

/// Takes circuits.
#[derive(Debug)]
#[allow(non_camel_case_types)] // As C calls it.
pub struct ringdown_listener {
    listener: Listener,
}

/// # Safety
/// It is a string that ends with a zero, or there is none.
unsafe fn text<'a>(place: *const c_char) -> io::Result<&'a str> {
    if place.is_null() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "no name"));
    }
    // SAFETY: the caller's promise.
    let text = unsafe { CStr::from_ptr(place) };
    text.to_str()
        .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))
}

/// # Safety
/// The options are, or there are none.
unsafe fn connector(options: *const ringdown_circuit_options) -> io::Result<Connector> {
    // SAFETY: the caller's promise.
    let options = unsafe { parse_pointer(options) }?;
    Ok(Connector::new().options(options))
}

/// Connects to a program of another machine.
///
/// # Safety
/// The name is a string that ends with a zero; the options are, or there are none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_connect(
    to: *const c_char,
    options: *const ringdown_circuit_options,
) -> *mut ringdown_circuit {
    // SAFETY: the caller's promise.
    let (to, connector) = unsafe { (text(to), connector(options)) };
    hand_out(connector.and_then(|connector| Ok(connector.connect(to?)?)))
}

/// Accepts the circuits of callers of this port.
///
/// # Safety
/// The options are, or there are none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_listen(
    port: u32,
    options: *const ringdown_circuit_options,
) -> *mut ringdown_listener {
    // SAFETY: the caller's promise.
    let connector = unsafe { connector(options) };
    hand_out_listener(connector.and_then(|connector| Ok(connector.listen(port)?)))
}

/// Takes the circuits of one VM that calls this port.
///
/// # Safety
/// The name is a string that ends with a zero; the options are, or there are none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_listen_to_vm(
    port: u32,
    vm: *const c_char,
    options: *const ringdown_circuit_options,
) -> *mut ringdown_listener {
    // SAFETY: the caller's promise.
    let (vm, connector) = unsafe { (text(vm), connector(options)) };
    hand_out_listener(connector.and_then(|connector| Ok(connector.listen_to_vm(port, vm?)?)))
}

fn hand_out_listener(made: io::Result<Listener>) -> *mut ringdown_listener {
    match made {
        Ok(listener) => Box::into_raw(Box::new(ringdown_listener { listener })),
        Err(error) => {
            fail(error);
            ptr::null_mut()
        }
    }
}

/// The next circuit; waits for it.
///
/// # Safety
/// The listener is valid, and no other thread uses it meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_accept(
    listener: *mut ringdown_listener,
) -> *mut ringdown_circuit {
    // SAFETY: the caller's promise.
    let listener = unsafe { &mut (*listener).listener };
    hand_out(listener.accept().map_err(io::Error::from))
}

/// The next circuit, if it is there.
///
/// # Safety
/// As [`ringdown_accept`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_try_accept(
    listener: *mut ringdown_listener,
) -> *mut ringdown_circuit {
    // SAFETY: the caller's promise.
    let listener = unsafe { &mut (*listener).listener };
    hand_out(listener.try_accept().map_err(io::Error::from))
}

/// The descriptor becomes readable when there is a caller.
///
/// # Safety
/// The listener is one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_listener_descriptor(listener: *const ringdown_listener) -> c_int {
    // SAFETY: the caller's promise.
    let listener = unsafe { &(*listener).listener };
    listener.as_fd().as_raw_fd()
}

/// How long `ringdown_accept` waits.
///
/// # Safety
/// As [`ringdown_accept`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_listener_set_timeout(
    listener: *mut ringdown_listener,
    timeout_ms: i64,
) {
    let timeout = u64::try_from(timeout_ms).ok().map(Duration::from_millis);
    // SAFETY: the caller's promise.
    unsafe { &mut (*listener).listener }.set_timeout(timeout);
}

/// Takes no more circuits.
///
/// # Safety
/// The listener is valid, not closed yet and no longer in use; or it is NULL.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ringdown_listener_close(listener: *mut ringdown_listener) {
    if !listener.is_null() {
        // SAFETY: it was made by `Box::into_raw`, and the caller's promise.
        drop(unsafe { Box::from_raw(listener) });
    }
}
