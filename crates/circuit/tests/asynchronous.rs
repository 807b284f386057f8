//! Circuits in a runtime.
#![cfg(feature = "tokio")]

use std::io::{Read, Write};
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

/// Four tasks in one thread: each end sleeps while the others work, two of them on the same socket.
#[test]
fn a_stream_goes_both_ways_at_once() {
    let sent: Vec<u8> = (0..200_000_u32)
        .map(|index| (index * 7 / 3) as u8)
        .collect();
    runtime().block_on(async {
        let (here, there) = Circuit::pair(&options(Kind::Bytes)).unwrap();
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

#[test]
fn one_side_may_be_a_thread() {
    let (here, there) = Circuit::pair(&options(Kind::Bytes)).unwrap();
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

#[test]
fn records_are_sent_and_received() {
    runtime().block_on(async {
        let (here, there) = Circuit::pair(&options(Kind::Records)).unwrap();
        let mut writer = AsyncWriter::new(here.into_split().0).unwrap();
        let mut reader = AsyncReader::new(there.into_split().1).unwrap();
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
