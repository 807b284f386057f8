//! What is special about circuits without a window.

#![allow(clippy::unwrap_used)] // What goes wrong here is a failed test.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread;

use circuit::{Circuit, CircuitError, Error, Kind, Options, Reader, Writer};
use rustix::event::{PollFd, PollFlags, poll};

fn options(kind: Kind, ring_len: u64) -> Options {
    Options {
        ring_len,
        kind,
        ..Options::default()
    }
}

/// A circuit whose other side is an ordinary program.
fn one(options: &Options) -> (Writer, Reader, UnixStream) {
    let (socket, peer) = UnixStream::pair().unwrap();
    let circuit = Circuit::from_stream(socket.into(), options).unwrap();
    let (writer, reader) = circuit.into_split();
    (writer, reader, peer)
}

fn content(len: usize) -> Vec<u8> {
    let byte = |index: u64| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
    (0..len as u64).map(byte).collect()
}

fn wait_readable(end: &impl AsFd) {
    let mut waiting = [PollFd::new(end, PollFlags::IN)];
    poll(&mut waiting, None).unwrap();
}

#[test]
fn the_other_side_may_be_an_ordinary_program() {
    let (mut writer, mut reader, mut peer) = one(&Options::default());
    writer.write_all(b"question").unwrap();
    writer.finish().unwrap();
    let mut text = String::new();
    peer.read_to_string(&mut text).unwrap();
    assert_eq!(text, "question");
    peer.write_all(b"answer").unwrap();
    drop(peer);
    text.clear();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text, "answer");
}

/// The rings are limited, whatever is asked for, and so is what one side keeps for the other.
#[test]
fn rings_have_a_most() {
    let (writer, reader, _peer) = one(&options(Kind::Bytes, 1 << 30));
    assert_eq!((writer.capacity(), reader.capacity()), (4 << 20, 4 << 20));
    let (socket, _peer) = UnixStream::pair().unwrap();
    let impossible = options(Kind::Bytes, 4095);
    assert!(Circuit::from_stream(socket.into(), &impossible).is_err());
}

/// Both sides write more than any socket buffers before they read: with windows of that length it works, and so it does here.
#[test]
fn two_that_write_at_once_do_not_wait_for_each_other() {
    let (first, second) = UnixStream::pair().unwrap();
    let sides = [first, second].map(|socket| {
        thread::spawn(move || {
            let all = options(Kind::Bytes, 4 << 20);
            let circuit = Circuit::from_stream(socket.into(), &all).unwrap();
            let (mut writer, mut reader) = circuit.into_split();
            let sent = content(3 << 20);
            writer.write_all(&sent).unwrap();
            let mut received = vec![0; sent.len()];
            reader.read_exact(&mut received).unwrap();
            assert!(received == sent);
        })
    });
    for side in sides {
        side.join().unwrap();
    }
}

#[test]
fn records_may_be_cut_anywhere() {
    let (_writer, mut reader, mut peer) = one(&options(Kind::Records, 4096));
    let lens = [0, 1, 7, 8, 9, 4088];
    let mut bytes = Vec::new();
    for len in lens {
        let mut record = (len as u64).to_le_bytes().to_vec();
        record.extend(content(len));
        record.resize(record.len().next_multiple_of(8), 0);
        bytes.extend(record);
    }
    // One byte at a time, each waited for as an event loop does.
    let far = thread::spawn(move || {
        let mut record = Vec::new();
        let mut found = Vec::new();
        loop {
            match reader.try_receive(&mut record) {
                Ok(true) => {
                    assert!(record == content(record.len()));
                    found.push(record.len());
                }
                Ok(false) => return found,
                Err(Error::WouldBlock) => {
                    if reader.arm(0).unwrap() {
                        wait_readable(&reader);
                        reader.clear().unwrap();
                    }
                }
                Err(error) => panic!("{error}"),
            }
        }
    });
    for byte in bytes {
        peer.write_all(&[byte]).unwrap();
    }
    drop(peer);
    assert_eq!(far.join().unwrap(), lens);
}

#[test]
fn a_record_that_does_not_end_is_no_end() {
    for len in [1, 7, 8, 11, 15] {
        let (_writer, mut reader, mut peer) = one(&options(Kind::Records, 4096));
        let record = [&[3, 0, 0, 0, 0, 0, 0, 0][..], b"abc", &[0; 5]].concat();
        peer.write_all(&record).unwrap();
        peer.write_all(&record[..len]).unwrap();
        drop(peer);
        let mut received = Vec::new();
        assert!(reader.receive(&mut received).unwrap());
        assert_eq!(received, b"abc");
        for _ in 0..2 {
            let error = reader.receive(&mut received).unwrap_err();
            assert!(matches!(error, Error::PeerGone), "{len}: {error}");
        }
    }
}

#[test]
fn what_is_no_record_ends_the_circuit() {
    for header in [4089_u64, u64::from(u32::MAX), 1 << 32, u64::MAX] {
        let (mut writer, mut reader, mut peer) = one(&options(Kind::Records, 4096));
        peer.write_all(&header.to_le_bytes()).unwrap();
        let error = reader.receive(&mut Vec::new()).unwrap_err();
        assert!(
            matches!(error, Error::Record { found, .. } if found == header),
            "{error}"
        );
        assert_eq!(peer.write(&[0]).unwrap_err().kind(), ErrorKind::BrokenPipe);
        writer.send(b"the other direction goes on").unwrap();
    }
}

#[test]
fn a_peer_that_went_away_is_an_error_for_who_writes() {
    let (mut writer, mut reader, mut peer) = one(&Options::default());
    writer.write_all(b"without a reader").unwrap();
    peer.write_all(b"last").unwrap();
    // With something unread: what a UNIX socket has for a reset.
    drop(peer);
    let mut bytes = [0; 9];
    assert_eq!(reader.read(&mut bytes).unwrap(), 4);
    assert_eq!(
        reader.read(&mut bytes).unwrap_err().kind(),
        ErrorKind::ConnectionReset
    );
    for _ in 0..2 {
        let error = writer.write(b"more").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BrokenPipe, "{error}");
    }
    assert!(matches!(
        writer.reserve(1, usize::MAX),
        Err(Error::Circuit(CircuitError::ReaderGone))
    ));
}

/// As much as can be without waiting: what the system takes and a ring full.
fn fill(writer: &mut Writer) -> usize {
    let mut sent = 0;
    loop {
        match writer.try_write(&content(sent + 1000)[sent..]) {
            Ok(len) => sent += len,
            Err(Error::WouldBlock) => return sent,
            Err(error) => panic!("{error}"),
        }
    }
}

#[test]
fn what_was_left_over_is_sent_by_whatever_is_done_next() {
    type Next = fn(&mut Writer, &mut Reader);
    let next: [(&str, Next); 3] = [
        ("an event loop", |writer, reader| {
            while reader.try_peek(1).is_err() {
                assert!(reader.arm(0).unwrap());
                wait_readable(reader);
                reader.clear().unwrap();
            }
            drop(writer.finish());
        }),
        ("a reader that waits", |writer, reader| {
            assert!(reader.wait(0).unwrap());
            drop(writer.finish());
        }),
        ("a writer that drains", |writer, _| {
            writer.drain().unwrap();
            drop(writer.finish());
        }),
    ];
    for (name, next) in next {
        let (mut writer, mut reader, mut peer) = one(&options(Kind::Bytes, 65_536));
        let sent = fill(&mut writer);
        assert!(sent > 65_536, "{name}: {sent}");
        let far = thread::spawn(move || {
            let mut all = vec![0; sent];
            peer.read_exact(&mut all).unwrap();
            assert!(all == content(sent));
            peer.write_all(b"!").unwrap();
            peer
        });
        next(&mut writer, &mut reader);
        far.join().unwrap();
    }
}

/// No writer is left to send it, except the thread that was left behind for that.
#[test]
fn what_was_left_over_arrives_also_when_the_circuit_is_dropped() {
    let (mut writer, reader, mut peer) = one(&options(Kind::Bytes, 65_536));
    let sent = fill(&mut writer);
    drop((writer, reader));
    let mut all = Vec::new();
    peer.read_to_end(&mut all).unwrap();
    assert!(all == content(sent), "{} of {sent}", all.len());
}

/// The descriptor becomes ready once for each time it was armed, and not otherwise.
#[test]
fn the_descriptor_is_quiet_when_nothing_was_asked_for() {
    let (mut writer, mut reader, mut peer) = one(&Options::default());
    let is_readable = |end: &Reader| {
        let mut waiting = [PollFd::new(end, PollFlags::IN)];
        let none = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        poll(&mut waiting, Some(&none)).unwrap() == 1
    };
    peer.write_all(b"a").unwrap();
    assert!(!is_readable(&reader));
    assert!(!reader.arm(0).unwrap(), "it is there");
    assert_eq!(reader.try_read(&mut [0; 9]).unwrap(), 1);
    assert!(reader.arm(0).unwrap());
    assert!(!is_readable(&reader));
    peer.write_all(b"b").unwrap();
    assert!(is_readable(&reader));
    reader.clear().unwrap();
    assert!(!is_readable(&reader));
    assert_eq!(reader.try_read(&mut [0; 9]).unwrap(), 1);
    assert!(!writer.arm(1).unwrap(), "there is room");
    // The end makes it ready, too, and then nothing more does.
    assert!(reader.arm(0).unwrap());
    drop(peer);
    assert!(is_readable(&reader));
    reader.clear().unwrap();
    assert!(!is_readable(&reader));
    assert_eq!(reader.try_read(&mut [0; 9]).unwrap(), 0);
}
