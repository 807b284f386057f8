//! SEQPACKET: messages keep their bounds, between guests and with sockets of messages on the host.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use bench::daemon::Daemon;
use bench::guest::{ConnectError, GuestConfig, ReceiveLayout, Received, State};
use bench::{frontend::FEATURE_SEQPACKET, host};
use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketType as UnixSocketType, accept,
    bind, connect as dial, listen, recv, send, socket,
};
use wire::vsock::{SEQPACKET_END_OF_RECORD, SocketType};

use crate::support::{
    assert_no_violations, connect_with, daemon, guest, guest_with, pattern, wait_for,
};

const SIZES: [usize; 8] = [1, 43, 4052, 4053, 65_536, 65_537, 150_000, 5];

fn unix_socket() -> OwnedFd {
    socket(AddressFamily::UNIX, UnixSocketType::SEQPACKET, None).unwrap()
}

fn listen_for_messages(path: &Path) -> OwnedFd {
    let listener = unix_socket();
    bind(&listener, &SocketAddrUnix::new(path).unwrap()).unwrap();
    listen(&listener, 16).unwrap();
    listener
}

fn messages_socket(daemon: &Daemon, name: &str) -> PathBuf {
    let mut path = daemon.host_socket(name).into_os_string();
    path.push(".seqpacket");
    PathBuf::from(path)
}

#[test]
fn messages_between_guests_keep_their_bounds_and_flags() {
    let daemon = daemon();
    for receive_layout in [ReceiveLayout::One, ReceiveLayout::HeaderApart] {
        let mut web = guest(&daemon, "web");
        let config = GuestConfig {
            receive_layout,
            ..GuestConfig::default()
        };
        let mut db = guest_with(&daemon, "db", config);
        db.listen_with(1, SocketType::SeqPacket, 16);
        let (near, far) = connect_with(&mut web, &mut db, 1, SocketType::SeqPacket);
        for (index, size) in SIZES.into_iter().enumerate() {
            let flags = if index % 2 == 0 {
                0
            } else {
                SEQPACKET_END_OF_RECORD
            };
            let sent = pattern(size, index as u64);
            web.send_message(near, &sent, flags).unwrap();
            let mut arrived = None;
            wait_for("the message", &mut [&mut web, &mut db], |guests| {
                arrived = guests[1].try_receive_message(far).ok();
                arrived.is_some()
            });
            let (message, arrived_flags) = arrived.unwrap();
            assert!(message == sent, "{} bytes for {size}", message.len());
            assert_eq!(arrived_flags & SEQPACKET_END_OF_RECORD, flags);
        }
        // Many at once, so that they wait in one queue.
        for value in 0..200_u8 {
            web.send_message(near, &[value; 7], 0).unwrap();
        }
        for value in 0..200_u8 {
            wait_for(
                "each of them",
                &mut [&mut web, &mut db],
                |guests| match guests[1].try_receive_message(far) {
                    Ok((message, _)) => {
                        assert_eq!(message, [value; 7]);
                        true
                    }
                    Err(_) => false,
                },
            );
        }
        assert_no_violations(&[&web, &db]);
    }
}

#[test]
fn messages_to_and_from_a_program_of_the_host_keep_their_bounds() {
    let daemon = daemon();
    let listener = listen_for_messages(&daemon.listener_path("web", 80));
    let mut web = guest(&daemon, "web");
    let near = web.connect_with(2, 80, SocketType::SeqPacket).unwrap();
    let far = accept(&listener).unwrap();
    let mut room = vec![0; 1 << 20];
    for (index, size) in SIZES.into_iter().enumerate() {
        let sent = pattern(size, index as u64);
        web.send_message(near, &sent, 0).unwrap();
        let (len, _) = recv(&far, &mut room[..], RecvFlags::empty()).unwrap();
        assert!(room[..len] == sent, "{len} bytes for {size}");
        assert_eq!(send(&far, &sent, SendFlags::NOSIGNAL).unwrap(), size);
        let mut arrived = Err(Received::Nothing);
        wait_for("the message", &mut [&mut web], |guests| {
            arrived = guests[0].try_receive_message(near);
            arrived != Err(Received::Nothing)
        });
        assert!(arrived.unwrap().0 == sent);
    }
    drop(far);
    wait_for("the end", &mut [&mut web], |guests| {
        guests[0].try_receive_message(near) == Err(Received::End)
    });
    assert_no_violations(&[&web]);
}

#[test]
fn a_program_calls_a_guest_with_messages() {
    let daemon = daemon();
    let mut web = guest(&daemon, "web");
    web.listen_with(80, SocketType::SeqPacket, 16);
    let program = unix_socket();
    let address = SocketAddrUnix::new(messages_socket(&daemon, "web")).unwrap();
    dial(&program, &address).unwrap();
    send(&program, b"CONNECT 80\n", SendFlags::NOSIGNAL).unwrap();
    let far = web.accept(80).unwrap();
    let mut room = [0; 64];
    let (len, _) = recv(&program, &mut room[..], RecvFlags::empty()).unwrap();
    assert!(room[..len].starts_with(b"OK "), "{:?}", &room[..len]);
    send(&program, b"one", SendFlags::NOSIGNAL).unwrap();
    send(&program, b"two", SendFlags::NOSIGNAL).unwrap();
    for expected in [&b"one"[..], b"two"] {
        wait_for("the message", &mut [&mut web], |guests| {
            match guests[0].try_receive_message(far) {
                Ok((message, _)) => {
                    assert_eq!(message, expected);
                    true
                }
                Err(_) => false,
            }
        });
    }
    assert_no_violations(&[&web]);
}

#[test]
fn streams_and_messages_do_not_mix() {
    let daemon = daemon();
    let _stream = host::listen(&daemon.listener_path("web", 80)).unwrap();
    let mut web = guest(&daemon, "web");
    let refused = web.connect_with(2, 80, SocketType::SeqPacket);
    assert!(
        matches!(refused, Err(ConnectError::Refused(_))),
        "{refused:?}"
    );
    let mut db = guest(&daemon, "db");
    db.listen(1);
    let near = web.dial(4, 1, SocketType::SeqPacket);
    wait_for("the refusal", &mut [&mut web, &mut db], |guests| {
        guests[0].state(near) == State::Reset
    });
    assert_no_violations(&[&web, &db]);
}

#[test]
fn a_guest_without_messages_is_not_sent_any() {
    let daemon = daemon();
    let mut web = guest(&daemon, "web");
    let config = GuestConfig::default().without(FEATURE_SEQPACKET);
    let mut db = guest_with(&daemon, "db", config);
    let refused = web.connect_with(4, 1, SocketType::SeqPacket);
    assert!(
        matches!(refused, Err(ConnectError::Refused(_))),
        "{refused:?}"
    );
    db.service();
    assert_eq!(db.counts().received_packets, 0);
    assert_no_violations(&[&web, &db]);
}

/// An empty message is nothing that vsock could carry; above all it is not the end of data.
#[test]
fn a_message_without_a_byte_is_no_end() {
    let daemon = daemon();
    let listener = listen_for_messages(&daemon.listener_path("web", 80));
    let mut web = guest(&daemon, "web");
    let near = web.connect_with(2, 80, SocketType::SeqPacket).unwrap();
    let far = accept(&listener).unwrap();
    for bytes in [&b""[..], b"one", b"", b"", b"two", b""] {
        send(&far, bytes, SendFlags::NOSIGNAL).unwrap();
    }
    drop(far);
    let mut arrived = Vec::new();
    wait_for("the end", &mut [&mut web], |guests| {
        match guests[0].try_receive_message(near) {
            Ok((message, _)) => arrived.push(message),
            Err(Received::Nothing) => return false,
            Err(other) => {
                assert_eq!(other, Received::End);
                return true;
            }
        }
        false
    });
    assert_eq!(arrived, [b"one", b"two"]);
    assert_no_violations(&[&web]);
}
