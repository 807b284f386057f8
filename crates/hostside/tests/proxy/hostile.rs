//! Guests that do not behave, at the egress service.

use std::io::Read;
use std::net::Shutdown;

use device::Called;
use vsock::Reason;
use wire::vsock::SocketType;

use crate::egress::{Egress, read_head};
use crate::support::*;

/// Whatever the other end says until it hangs up, however it does.
fn to_the_end(mut stream: impl Read) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A reset is an end, too.
    let _ = stream.read_to_end(&mut bytes);
    bytes
}

#[test]
fn garbage_is_hung_up_on() {
    let egress = Egress::new(Vec::new());
    for (said, answer) in [
        (&b"\x16\x03\x01\x02\x00"[..], &b""[..]),
        (b"\x04\x01\x00\x50\x7f\x00\x00\x01\x00", b""),
        (b"\x00", b""),
        (b"\xff\xff\xff\xff", b""),
        (b"\x05\x01\x02", b"\x05\xff"),
        (b"\x05\x00", b"\x05\xff"),
        (b"\x05\x01\x00\x04", b"\x05\x00"),
        (
            b"\x05\x01\x00\x05\x02\x00\x01\x01\x01\x01\x01\x00\x50",
            b"\x05\x00\x05\x07\x00\x01\0\0\0\0\0\0",
        ),
        (
            b"\x05\x01\x00\x05\x01\x00\x09",
            b"\x05\x00\x05\x08\x00\x01\0\0\0\0\0\0",
        ),
        (
            b"\x05\x01\x00\x05\x01\x00\x03\x00\x00\x50",
            b"\x05\x00\x05\x01\x00\x01\0\0\0\0\0\0",
        ),
    ] {
        let guest = egress.connect();
        write(&guest, said);
        assert_eq!(to_the_end(&guest), answer, "{said:?}");
    }
    for said in [
        "GET / HTTP/1.1\r\n\r\n",
        "CONNECT nowhere HTTP/1.1\r\n\r\n",
        "CONNECT a.test:0 HTTP/1.1\r\n\r\n",
        "CONNECT 127.1:80 HTTP/1.1\r\n\r\n",
        "CONNECT a.test:80 HTTP/3.0\r\n\r\n",
        "Hello?\r\n\r\n",
    ] {
        let guest = egress.connect();
        write(&guest, said.as_bytes());
        assert!(read_head(&guest).starts_with("HTTP/1.1 400 "), "{said}");
    }
}

#[test]
fn a_head_without_end_is_refused() {
    let egress = Egress::new(Vec::new());
    let guest = egress.connect();
    let mut head = b"CONNECT a.test:80 HTTP/1.1\r\nX: ".to_vec();
    head.resize(8192, b'x');
    write(&guest, &head);
    assert!(
        read_head(&guest)
            .starts_with("HTTP/1.1 400 the head of the request has more than 8192 bytes")
    );
}

#[test]
fn a_guest_that_goes_away_at_any_moment_leaves_nothing_behind() {
    let (listener, address) = tcp_listener();
    let egress = Egress::new(vec![allow(to_loopback())]);
    let request = format!("CONNECT {address} HTTP/1.1\r\n\r\n");
    for len in 0..request.len() {
        let guest = egress.connect();
        write(&guest, &request.as_bytes()[..len]);
        match len % 2 {
            0 => drop(guest),
            _ => {
                guest.shutdown(Shutdown::Write).expect("half-closed");
                assert_eq!(to_the_end(&guest), b"");
            }
        }
    }
    // All of them have gone: there is room for as many as one VM may have.
    let offer = service(config::ServiceTarget::Egress);
    // A quarter, of which a quarter is for privileged programs.
    let quarter = offer.max_connections as usize / 4;
    let limit = quarter - quarter / 4;
    egress.stand.offer(offer);
    let mut held = Vec::new();
    until("there is room for all", || {
        held.extend(egress.stand.stream(egress.id));
        held.len() == limit
    });
    let call = || {
        egress
            .stand
            .call(Called::Service(egress.id), SocketType::Stream)
    };
    assert_eq!(call().err(), Some(Reason::ServiceShare));
    // Another VM is not concerned.
    let other = policy::Address::new("db", 4);
    let called = Called::Service(egress.id);
    assert!(
        egress
            .stand
            .call_as(&other, called, SocketType::Stream, None)
            .is_ok()
    );
    held.pop();
    until("there is room again", || call().is_ok());
    listener.set_nonblocking(true).expect("an option");
    assert!(listener.accept().is_err(), "there was no call");
}

#[test]
fn a_guest_that_says_it_byte_by_byte_is_understood() {
    let (listener, address) = tcp_listener();
    let egress = Egress::new(vec![allow(to_loopback())]);
    let guest = egress.connect();
    for byte in format!("CONNECT {address} HTTP/1.1\r\nA: b\r\n\r\n").bytes() {
        write(&guest, &[byte]);
    }
    assert!(read_head(&guest).starts_with("HTTP/1.1 200 "));
    accept(&listener);
}
