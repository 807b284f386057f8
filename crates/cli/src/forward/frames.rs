//! Bytes between a program of the host and the agent, whose connection carries them in frames, each direction with an explicit end.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf, split};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use wire::agent::{
    Decoder, Frame, HEADER_LEN, MAX_DATA_LEN, OPERATION_CHANNEL, Stream, data_header,
};

use super::stream::LocalStream;

/// Carries bytes until both directions have ended, each for itself.
///
/// # Errors
/// The first error of either, or that the guest's connection ended without a word: the program's is to be reset then.
pub(super) async fn carry(
    program: &mut LocalStream,
    guest: UnixStream,
    decoder: Decoder,
) -> io::Result<()> {
    let (from_guest, to_guest) = guest.into_split();
    let (from_program, to_program) = split(program);
    tokio::try_join!(
        outward(from_program, to_guest),
        inward(from_guest, decoder, to_program),
    )?;
    Ok(())
}

async fn outward(
    mut from: ReadHalf<&mut LocalStream>,
    mut to: OwnedWriteHalf,
) -> io::Result<OwnedWriteHalf> {
    let mut frame = vec![0; HEADER_LEN + MAX_DATA_LEN];
    loop {
        let len = from.read(&mut frame[HEADER_LEN..]).await?;
        if len == 0 {
            let end = Frame::EndOfStream(Stream::Stdin).to_bytes(OPERATION_CHANNEL);
            // An agent that does not want it has ended the connection, which the other direction notices.
            let _ = to.write_all(&end.map_err(io::Error::other)?).await;
            // Kept until both have ended: the agent takes the end of the connection for a cut.
            return Ok(to);
        }
        let header =
            data_header(Stream::Stdin, OPERATION_CHANNEL, len).map_err(io::Error::other)?;
        frame[..HEADER_LEN].copy_from_slice(&header);
        to.write_all(&frame[..HEADER_LEN + len]).await?;
    }
}

async fn inward(
    mut from: OwnedReadHalf,
    mut decoder: Decoder,
    mut to: WriteHalf<&mut LocalStream>,
) -> io::Result<()> {
    loop {
        match decoder.next_frame().map_err(io::Error::other)? {
            Some((
                OPERATION_CHANNEL,
                Frame::Data {
                    stream: Stream::Stdout,
                    bytes,
                },
            )) => {
                to.write_all(bytes).await?;
            }
            Some((OPERATION_CHANNEL, Frame::EndOfStream(Stream::Stdout))) => {
                return match to.shutdown().await {
                    // It has gone by itself meanwhile.
                    Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(()),
                    result => result,
                };
            }
            Some(_) => {
                let words = "the guest's agent broke the protocol: neither data nor the end of it";
                return Err(io::Error::new(io::ErrorKind::InvalidData, words));
            }
            None => match from.read(decoder.space()).await? {
                0 => {
                    let words = "the guest's side was cut off";
                    return Err(io::Error::new(io::ErrorKind::UnexpectedEof, words));
                }
                count => decoder.advance(count),
            },
        }
    }
}
