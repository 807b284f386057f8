//! Circuits in a runtime.
#![cfg(feature = "tokio")]
#![allow(clippy::unwrap_used)] // What goes wrong here is a failed test.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::thread;

use circuit::asynchronous::{AsyncReader, AsyncWriter};
use circuit::{Circuit, Kind, MIN_RING_LEN, Options};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::runtime::{Builder, Runtime};

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

fn options(kind: Kind) -> Options {
    Options {
        ring_len: MIN_RING_LEN,
        kind,
        ..Options::default()
    }
}

/// With a window, and without.
fn pairs(kind: Kind) -> [(Circuit, Circuit); 2] {
    let options = options(kind);
    let (first, second) = UnixStream::pair().unwrap();
    let over_stream =
        [first, second].map(|socket| Circuit::from_stream(socket.into(), &options).unwrap());
    [Circuit::pair(&options).unwrap(), over_stream.into()]
}

/// Four tasks in one thread: each end sleeps while the others work, two of them on the same socket.
#[test]
fn a_stream_goes_both_ways_at_once() {
    let sent: Vec<u8> = (0..200_000_u32)
        .map(|index| (index * 7 / 3) as u8)
        .collect();
    for (here, there) in pairs(Kind::Bytes) {
        runtime().block_on(async {
            let end = |circuit: Circuit| {
                let (writer, reader) = circuit.into_split();
                (
                    AsyncWriter::new(writer).unwrap(),
                    AsyncReader::new(reader).unwrap(),
                )
            };
            let write = async |mut writer: AsyncWriter| {
                writer.write_all(&sent).await.unwrap();
                writer.shutdown().await.unwrap();
                writer
            };
            let read = async |mut reader: AsyncReader| {
                let mut received = Vec::new();
                reader.read_to_end(&mut received).await.unwrap();
                assert!(received == sent);
                reader
            };
            let ((writer, reader), (far_writer, far_reader)) = (end(here), end(there));
            tokio::join!(
                write(writer),
                read(reader),
                write(far_writer),
                read(far_reader)
            );
        });
    }
}

#[test]
fn one_side_may_be_a_thread() {
    for (here, there) in pairs(Kind::Bytes) {
        let far = thread::spawn(move || {
            let (mut writer, mut reader) = there.into_split();
            let mut all = Vec::new();
            reader.read_to_end(&mut all).unwrap();
            writer.write_all(&all).unwrap();
        });
        runtime().block_on(async {
            let (writer, reader) = here.into_split();
            let (mut writer, mut reader) = (
                AsyncWriter::new(writer).unwrap(),
                AsyncReader::new(reader).unwrap(),
            );
            writer.write_all(&[9; 50_000]).await.unwrap();
            writer.shutdown().await.unwrap();
            let mut all = Vec::new();
            reader.read_to_end(&mut all).await.unwrap();
            assert!(all == [9; 50_000]);
        });
        far.join().unwrap();
    }
}

#[test]
fn records_are_sent_and_received() {
    for (here, there) in pairs(Kind::Records) {
        runtime().block_on(async {
            let (writer, _back) = here.into_split();
            let (_forth, reader) = there.into_split();
            let mut writer = AsyncWriter::new(writer).unwrap();
            let mut reader = AsyncReader::new(reader).unwrap();
            let send = async {
                for len in 0..1000 {
                    writer.send(&vec![len as u8; len]).await.unwrap();
                }
                writer.shutdown().await.unwrap();
            };
            let receive = async {
                let (mut record, mut count) = (Vec::new(), 0);
                while reader.receive(&mut record).await.unwrap() {
                    assert!(record == vec![count as u8; count]);
                    count += 1;
                }
                assert_eq!(count, 1000);
            };
            tokio::join!(send, receive);
            assert!(writer.send(&[0; 5000]).await.is_err());
        });
    }
}

/// Far more than the system buffers, to a peer that reads only once it was all written; then an answer.
#[test]
fn what_is_flushed_has_left() {
    let (socket, mut peer) = UnixStream::pair().unwrap();
    let circuit = Circuit::from_stream(socket.into(), &Options::default()).unwrap();
    let sent: Vec<u8> = (0..5_000_000_u32).map(|index| (index / 7) as u8).collect();
    let expected = sent.clone();
    let far = thread::spawn(move || {
        let mut all = vec![0; expected.len()];
        peer.read_exact(&mut all).unwrap();
        assert!(all == expected);
        peer.write_all(b"all").unwrap();
        assert_eq!(peer.read(&mut [0]).unwrap(), 0, "the end");
    });
    runtime().block_on(async {
        let (writer, reader) = circuit.into_split();
        let mut writer = AsyncWriter::new(writer).unwrap();
        let mut reader = AsyncReader::new(reader).unwrap();
        writer.write_all(&sent).await.unwrap();
        writer.flush().await.unwrap();
        let mut answer = [0; 3];
        reader.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"all");
        writer.shutdown().await.unwrap();
    });
    far.join().unwrap();
}
