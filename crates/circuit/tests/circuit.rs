//! Circuits between threads and between processes, with a window and without.

#![allow(clippy::unwrap_used)] // What goes wrong here is a failed test.

use std::io::{ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::Duration;

use circuit::{
    Circuit, CircuitError, Error, Identity, Kind, MIN_RING_LEN, Options, Reader, Side, Window,
    WindowSpec, Writer,
};
use rustix::event::{PollFd, PollFlags, poll};

/// Rings so small that all ends wait for each other.
fn small() -> Options {
    Options {
        ring_len: MIN_RING_LEN,
        ..Options::default()
    }
}

fn records() -> Options {
    Options {
        kind: Kind::Records,
        ..small()
    }
}

/// A circuit, and how one waits for it: with a window without looking, with it, and as it comes; and without a window.
#[derive(Debug, Clone)]
struct Case {
    options: Options,
    has_window: bool,
}

fn cases(options: &Options) -> Vec<Case> {
    let spins = [Duration::ZERO, Duration::from_micros(50), Duration::MAX];
    let windows = spins.map(|spin| Case {
        options: Options {
            spin,
            ..options.clone()
        },
        has_window: true,
    });
    windows.into_iter().chain([over_stream(options)]).collect()
}

fn over_stream(options: &Options) -> Case {
    Case {
        options: options.clone(),
        has_window: false,
    }
}

impl Case {
    fn circuits(&self) -> (Circuit, Circuit) {
        if self.has_window {
            return Circuit::pair(&self.options).unwrap();
        }
        let (first, second) = UnixStream::pair().unwrap();
        let circuit = |socket: UnixStream| {
            let made = Circuit::from_stream(socket.into(), &self.options).unwrap();
            assert!(!made.is_zero_copy());
            made
        };
        (circuit(first), circuit(second))
    }

    fn ends(&self) -> ((Writer, Reader), (Writer, Reader)) {
        let (here, there) = self.circuits();
        (here.into_split(), there.into_split())
    }
}

/// With a window.
fn pair(options: &Options) -> ((Writer, Reader), (Writer, Reader)) {
    let (here, there) = Circuit::pair(options).unwrap();
    assert!(here.is_zero_copy());
    (here.into_split(), there.into_split())
}

/// Bytes of a stream by their position, so that each knows where it belongs.
fn content(len: usize) -> Vec<u8> {
    let byte = |index: u64| (index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8;
    (0..len as u64).map(byte).collect()
}

#[test]
fn a_stream_goes_both_ways_at_once_through_four_threads() {
    for case in cases(&small()) {
        let ((mut writer, mut reader), (mut far_writer, mut far_reader)) = case.ends();
        let sent = content(300_000);
        let (there, back) = (sent.clone(), sent.clone());
        let threads = [
            thread::spawn(move || writer.write_all(&there).unwrap()),
            thread::spawn(move || far_writer.write_all(&back).unwrap()),
        ];
        let expected = sent.clone();
        let far = thread::spawn(move || {
            let mut received = Vec::new();
            far_reader.read_to_end(&mut received).unwrap();
            assert!(received == expected);
        });
        let mut received = Vec::new();
        reader.read_to_end(&mut received).unwrap();
        assert!(received == sent);
        far.join().unwrap();
        threads
            .into_iter()
            .for_each(|thread| thread.join().unwrap());
    }
}

#[test]
fn one_thread_asks_and_another_answers() {
    for case in cases(&small()) {
        let ((mut writer, mut reader), (mut far_writer, mut far_reader)) = case.ends();
        let far = thread::spawn(move || {
            let mut question = [0; 64];
            while far_reader.read_exact(&mut question).is_ok() {
                far_writer.write_all(&question).unwrap();
            }
        });
        for round in 0..2000_u32 {
            let question = [round as u8; 64];
            writer.write_all(&question).unwrap();
            let mut answer = [0; 64];
            reader.read_exact(&mut answer).unwrap();
            assert_eq!(answer, question);
        }
        writer.finish().unwrap();
        far.join().unwrap();
    }
}

#[test]
fn bytes_can_be_made_and_looked_at_in_place() {
    for case in cases(&small()) {
        let ((mut writer, _), (_, mut reader)) = case.ends();
        let far = thread::spawn(move || {
            let mut sum = 0_u64;
            while let Some(span) = reader.peek(usize::MAX).unwrap() {
                span.for_each(|chunk| {
                    sum += chunk.iter().map(|byte| u64::from(*byte)).sum::<u64>()
                });
                let len = span.len();
                reader.release(len).unwrap();
            }
            sum
        });
        for _ in 0..100 {
            let mut room = writer.reserve(1000, 1000).unwrap();
            room.span().fill(|chunk| chunk.fill(3));
            room.commit(1000).unwrap();
        }
        drop(writer);
        assert_eq!(far.join().unwrap(), 300_000);
    }
}

#[test]
fn a_reader_can_wait_for_more_than_it_has() {
    for case in cases(&small()) {
        let ((mut writer, _), (_, mut reader)) = case.ends();
        writer.write_all(b"half").unwrap();
        let far = thread::spawn(move || {
            assert!(reader.wait(3).unwrap(), "four are there");
            assert!(reader.wait(9).unwrap());
            let Some(span) = reader.peek(usize::MAX).unwrap() else {
                panic!("it has not ended");
            };
            assert!(span.len() >= 10);
            assert!(!reader.wait(10).unwrap(), "only ten ever come");
            assert!(matches!(
                reader.wait(MIN_RING_LEN as usize),
                Ok(false) | Err(Error::Circuit(CircuitError::TooLong { .. }))
            ));
            let mut all = String::new();
            reader.read_to_string(&mut all).unwrap();
            all
        });
        writer.write_all(b"anothe").unwrap();
        writer.finish().unwrap();
        assert_eq!(far.join().unwrap(), "halfanothe");
    }
}

/// The writer has filled the ring and sleeps; the reader takes less than would wake it, and waits for more than is left.
#[test]
fn a_reader_that_waits_for_more_than_is_left_gets_it_from_a_writer_that_sleeps() {
    for case in cases(&small()) {
        let ((mut writer, _back), (_forth, mut reader)) = case.ends();
        let far = thread::spawn(move || writer.write_all(&[5; 1000 + 5 * 3500]).unwrap());
        assert!(reader.wait(MIN_RING_LEN as usize - 1).unwrap());
        for len in [1000, 3500, 3500, 3500, 3500, 3500] {
            assert!(reader.wait(len - 1).unwrap());
            reader.release(len).unwrap();
        }
        assert!(reader.peek(1).unwrap().is_none());
        far.join().unwrap();
    }
}

#[test]
fn records_keep_their_boundaries() {
    for case in cases(&records()) {
        let ((mut writer, _back), (_forth, mut reader)) = case.ends();
        let far = thread::spawn(move || {
            let mut lens = Vec::new();
            let mut record = Vec::new();
            while reader.receive(&mut record).unwrap() {
                assert!(record == content(record.len()));
                lens.push(record.len());
            }
            lens
        });
        let most = MIN_RING_LEN as usize - 8;
        let lens: Vec<usize> = [0, 1, 8, most, most - 1, 0, 7]
            .into_iter()
            .chain((0..500).map(|index| index * 37 % 1500))
            .collect();
        for len in &lens {
            writer.send(&content(*len)).unwrap();
        }
        for len in [most + 1, usize::from(u16::MAX)] {
            let error = writer.send(&vec![0; len]).unwrap_err();
            let too_long = matches!(error, Error::Circuit(CircuitError::TooLong { .. }));
            assert!(too_long, "{error}");
        }
        writer.finish().unwrap();
        assert_eq!(far.join().unwrap(), lens);
    }
}

#[test]
fn a_datagram_for_which_there_is_no_room_is_dropped() {
    let ((mut writer, _), (_, mut reader)) = pair(&records());
    let mut sent = 0;
    while writer.try_send(&[7; 100]).is_ok() {
        sent += 1;
    }
    assert_eq!(sent, MIN_RING_LEN as usize / 112);
    assert!(matches!(writer.try_send(&[7; 100]), Err(Error::WouldBlock)));
    let mut record = Vec::new();
    for _ in 0..sent {
        assert!(reader.try_receive(&mut record).unwrap());
        assert_eq!(record, [7; 100]);
    }
    assert!(matches!(
        reader.try_receive(&mut record),
        Err(Error::WouldBlock)
    ));
}

#[test]
fn bytes_are_no_records() {
    for case in cases(&small()) {
        let ((mut writer, mut reader), _far) = case.ends();
        assert!(matches!(writer.send(b""), Err(Error::Kind { .. })));
        assert!(matches!(
            reader.receive(&mut Vec::new()),
            Err(Error::Kind { .. })
        ));
    }
    for case in cases(&records()) {
        let ((mut writer, mut reader), _far) = case.ends();
        assert_eq!(
            writer.write(b"x").unwrap_err().kind(),
            ErrorKind::InvalidInput
        );
        assert_eq!(
            reader.read(&mut [0]).unwrap_err().kind(),
            ErrorKind::InvalidInput
        );
    }
}

#[test]
fn nobody_waits_longer_than_one_wants() {
    for case in cases(&small()) {
        let ((mut writer, mut reader), _far) = case.ends();
        let time = Some(Duration::from_millis(20));
        reader.set_timeout(time);
        assert_eq!(
            reader.read(&mut [0]).unwrap_err().kind(),
            ErrorKind::TimedOut
        );
        assert!(matches!(reader.wait(5), Err(Error::TimedOut { .. })));
        writer.set_timeout(time);
        // What the system takes is more than the ring; then the ring fills up, too.
        let fill = |writer: &mut Writer| while writer.write_all(&[0; 1024]).is_ok() {};
        match case.has_window {
            true => writer.write_all(&[0; MIN_RING_LEN as usize]).unwrap(),
            false => fill(&mut writer),
        }
        assert!(matches!(
            writer.reserve(1024, 1024),
            Err(Error::TimedOut { .. })
        ));
        assert!(matches!(writer.drain(), Err(Error::TimedOut { .. })));
    }
}

#[test]
fn an_end_is_shown_only_when_it_was_sent() {
    // Said, then gone.
    let ((mut writer, near_reader), (far_writer, mut reader)) = pair(&small());
    writer.write_all(b"all").unwrap();
    drop((writer, near_reader));
    let mut text = String::new();
    assert_eq!(reader.read_to_string(&mut text).unwrap(), 3);
    drop(far_writer);

    // Reset.
    let (mut here, there) = Circuit::pair(&small()).unwrap();
    here.writer().write_all(b"part").unwrap();
    here.reset();
    let (mut far_writer, mut reader) = there.into_split();
    let mut bytes = [0; 4];
    reader.read_exact(&mut bytes).unwrap();
    assert_eq!(
        reader.read(&mut bytes).unwrap_err().kind(),
        ErrorKind::ConnectionReset
    );
    let error = far_writer.write_all(&[0; 9000]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
}

/// A peer that dies says nothing. Here it is one that has only the socket and the memory, and never was a circuit.
#[test]
fn a_peer_that_is_gone_without_a_word_is_an_error() {
    let timeouts = [None, Some(Duration::from_millis(1))];
    let options = cases(&small())
        .into_iter()
        .filter(|case| case.has_window)
        .map(|case| case.options);
    for (options, timeout) in
        options.flat_map(|options| timeouts.map(|timeout| (options.clone(), timeout)))
    {
        let (socket, peer) = UnixStream::pair().unwrap();
        let (mut writer, mut reader) = Circuit::offer(socket, &options).unwrap().into_split();
        writer.write_all(&vec![0; MIN_RING_LEN as usize]).unwrap();
        let waiting = thread::spawn(move || {
            let error = writer.write(&[1]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
            assert!(matches!(writer.try_reserve(1, 1), Err(Error::PeerGone)));
        });
        drop(peer);
        // The peer is gone, not late, also with a short timeout.
        reader.set_timeout(timeout);
        let error = reader.read(&mut [0]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
        assert!(matches!(reader.try_peek(1), Err(Error::PeerGone)));
        waiting.join().unwrap();
    }
}

/// A party that carries the wake channel can end it for both sides, which live on for a moment and have the window still.
#[test]
fn a_circuit_that_is_ended_from_outside_shows_nobody_an_end() {
    let spec = WindowSpec {
        identity: Identity {
            generation: 1,
            nonce: [7; 16],
        },
        kind: Kind::Bytes,
        ring_len: MIN_RING_LEN,
        page_len: 4096,
    };
    let file = Window::create(&spec).unwrap();
    let side = |side| {
        let (wake, carried) = UnixStream::pair().unwrap();
        let window = Window::attach(&file, 0, &spec).unwrap();
        let circuit = Circuit::from_parts(window, side, wake.into(), Duration::ZERO);
        (circuit, carried)
    };
    let ((first, of_first), (mut second, of_second)) = (side(Side::First), side(Side::Second));
    let (mut writer, mut reader) = first.into_split();
    writer.write_all(b"half of i").unwrap();
    drop((of_first, of_second));
    assert!(matches!(reader.peek(1), Err(Error::PeerGone)));
    drop((writer, reader));
    let mut received = Vec::new();
    let error = second.reader().read_to_end(&mut received).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}");
}

#[test]
fn a_writer_learns_that_nobody_reads() {
    for case in cases(&small()) {
        let ((mut writer, _reader), (_far_writer, far_reader)) = case.ends();
        let waiting = thread::spawn(move || {
            // A stream takes some bytes before it reports the error.
            loop {
                if let Err(error) = writer.write_all(&[0; 10_000]) {
                    return error.kind();
                }
            }
        });
        drop(far_reader);
        assert_eq!(waiting.join().unwrap(), ErrorKind::BrokenPipe);
    }
}

/// As an event loop does it: try, arm, poll, clear.
#[test]
fn the_descriptor_tells_when_to_look_again() {
    for case in cases(&small()) {
        let ((mut writer, _), (_, mut reader)) = case.ends();
        let sent = content(100_000);
        let expected = sent.clone();
        let far = thread::spawn(move || {
            let mut received = Vec::new();
            let mut buffer = [0; 1000];
            loop {
                match reader.try_read(&mut buffer) {
                    Ok(0) => return assert!(received == expected),
                    Ok(len) => received.extend_from_slice(&buffer[..len]),
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
        let mut rest = &sent[..];
        while !rest.is_empty() {
            match writer.try_write(rest) {
                Ok(len) => rest = &rest[len..],
                Err(Error::WouldBlock) => {
                    if writer.arm(1).unwrap() {
                        wait_readable(&writer);
                        writer.clear().unwrap();
                    }
                }
                Err(error) => panic!("{error}"),
            }
        }
        drop(writer);
        far.join().unwrap();
    }
}

fn wait_readable(end: &impl AsFd) {
    let mut waiting = [PollFd::new(end, PollFlags::IN)];
    poll(&mut waiting, None).unwrap();
}

#[test]
fn what_is_no_offer_is_refused() {
    for (said, words) in [
        (&b"GET / HTTP/1.1\r\n"[..], "GET"),
        (b"RDOFFER1", "the end after 8"),
        (b"", "the end after 0"),
    ] {
        let (socket, mut peer) = UnixStream::pair().unwrap();
        peer.write_all(said).unwrap();
        drop(peer);
        let error = Circuit::accept(socket, &small()).unwrap_err().to_string();
        assert!(
            error.contains(words) && error.contains("expected"),
            "{error}"
        );
    }
    let larger = Options::default();
    for (offered, accepted, words) in [
        (&larger, &small(), "2097152"),
        (&small(), &records(), "expected records"),
    ] {
        let (socket, peer) = UnixStream::pair().unwrap();
        let _offered = Circuit::offer(socket, offered).unwrap();
        let error = Circuit::accept(peer, accepted).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    }
}

#[test]
fn a_drained_circuit_has_been_read_to_its_last_byte() {
    let ((mut writer, _), (_, mut reader)) = pair(&small());
    writer.write_all(&[1; 3000]).unwrap();
    let far = thread::spawn(move || {
        let mut bytes = [0; 3000];
        reader.read_exact(&mut bytes).unwrap();
        reader
    });
    writer.drain().unwrap();
    far.join().unwrap();
    writer.finish().unwrap();
    writer.drain().unwrap();
}
