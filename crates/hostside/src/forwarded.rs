//! A connection that a guest's agent carries ([`wire::agent::forward`]): a stream of bytes here, frames on the agent's side, each direction with an explicit
//! end. The end of the agent's connection is a cut.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use wire::agent::{Decoder, Frame, MAX_DATA_LEN, OPERATION_CHANNEL, Stream, data_header};

/// What the program of the guest says.
#[derive(Debug)]
pub struct FrameReader<R> {
    from: R,
    decoder: Decoder,
    /// What did not fit into the reader's buffer, of which so much has been read.
    rest: Vec<u8>,
    read: usize,
    has_ended: bool,
}

/// What the program of the guest is sent. It is to be flushed.
#[derive(Debug)]
pub struct FrameWriter<W> {
    to: W,
    /// A frame, of which so much has been sent.
    frame: Vec<u8>,
    sent: usize,
    has_ended: bool,
}

impl<R> FrameReader<R> {
    /// Frames of `from`. What was received before is in the decoder.
    pub fn new(from: R, decoder: Decoder) -> FrameReader<R> {
        FrameReader {
            from,
            decoder,
            rest: Vec::new(),
            read: 0,
            has_ended: false,
        }
    }
}

impl<R: AsyncRead + Unpin> AsyncRead for FrameReader<R> {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        while this.read == this.rest.len() && !this.has_ended {
            match this.decoder.next_frame().map_err(io::Error::other)? {
                Some((
                    OPERATION_CHANNEL,
                    Frame::Data {
                        stream: Stream::Stdout,
                        bytes,
                    },
                )) => {
                    let (fits, rest) = bytes.split_at(bytes.len().min(buffer.remaining()));
                    buffer.put_slice(fits);
                    this.rest.clear();
                    this.rest.extend_from_slice(rest);
                    this.read = 0;
                    return Poll::Ready(Ok(()));
                }
                Some((OPERATION_CHANNEL, Frame::EndOfStream(Stream::Stdout))) => {
                    this.has_ended = true;
                }
                Some(_) => {
                    let words =
                        "the guest's agent broke the protocol: neither data nor the end of it";
                    return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, words)));
                }
                None => {
                    let mut space = ReadBuf::new(this.decoder.space());
                    ready!(Pin::new(&mut this.from).poll_read(context, &mut space))?;
                    let count = space.filled().len();
                    if count == 0 {
                        let words = "the guest's side was cut off";
                        let error = io::Error::new(io::ErrorKind::UnexpectedEof, words);
                        return Poll::Ready(Err(error));
                    }
                    this.decoder.advance(count);
                }
            }
        }
        let rest = &this.rest[this.read..];
        let count = rest.len().min(buffer.remaining());
        buffer.put_slice(&rest[..count]);
        this.read += count;
        Poll::Ready(Ok(()))
    }
}

impl<W> FrameWriter<W> {
    /// Frames for `to`.
    pub fn new(to: W) -> FrameWriter<W> {
        FrameWriter {
            to,
            frame: Vec::new(),
            sent: 0,
            has_ended: false,
        }
    }
}

impl<W: AsyncWrite + Unpin> FrameWriter<W> {
    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.sent < self.frame.len() {
            let left = &self.frame[self.sent..];
            match ready!(Pin::new(&mut self.to).poll_write(context, left))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                count => self.sent += count,
            }
        }
        self.frame.clear();
        self.sent = 0;
        Poll::Ready(Ok(()))
    }
}

impl<W: AsyncWrite + Unpin> AsyncWrite for FrameWriter<W> {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_send(context))?;
        let len = bytes.len().min(MAX_DATA_LEN);
        if len == 0 {
            return Poll::Ready(Ok(0));
        }
        let header = data_header(Stream::Stdin, OPERATION_CHANNEL, len);
        this.frame
            .extend_from_slice(&header.map_err(io::Error::other)?);
        this.frame.extend_from_slice(&bytes[..len]);
        match this.poll_send(context) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            // It is sent as a whole, by the next write or flush.
            _ => Poll::Ready(Ok(len)),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_send(context))?;
        Pin::new(&mut this.to).poll_flush(context)
    }

    /// Says the end. The stream below stays open, since its end would be a cut.
    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if !this.has_ended {
            ready!(this.poll_send(context))?;
            this.has_ended = true;
            Frame::EndOfStream(Stream::Stdin)
                .encode(OPERATION_CHANNEL, &mut this.frame)
                .map_err(io::Error::other)?;
        }
        Pin::new(this).poll_flush(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    fn frames(frames: &[Frame<'_>]) -> Vec<u8> {
        let frames = frames
            .iter()
            .map(|frame| frame.to_bytes(OPERATION_CHANNEL).unwrap());
        frames.collect::<Vec<_>>().concat()
    }

    fn said(bytes: &[u8]) -> Frame<'_> {
        Frame::Data {
            stream: Stream::Stdout,
            bytes,
        }
    }

    async fn read(bytes: &[u8]) -> (Vec<u8>, io::Result<()>) {
        let mut reader = FrameReader::new(bytes, Decoder::new());
        let mut all = Vec::new();
        loop {
            let mut piece = [0; 3];
            match reader.read(&mut piece).await {
                Ok(0) => return (all, Ok(())),
                Ok(len) => all.extend_from_slice(&piece[..len]),
                Err(error) => return (all, Err(error)),
            }
        }
    }

    #[tokio::test]
    async fn only_a_said_end_is_one() {
        let end = Frame::EndOfStream(Stream::Stdout);
        let whole = frames(&[said(b"hello "), said(b"there"), end.clone()]);
        let (bytes, result) = read(&whole).await;
        assert_eq!((&bytes[..], result.is_ok()), (&b"hello there"[..], true));
        for cut in 0..whole.len() {
            let (bytes, result) = read(&whole[..cut]).await;
            assert!(b"hello there".starts_with(&bytes));
            let error = result.unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::UnexpectedEof, "{cut}");
        }
        for wrong in [
            Frame::EndOfStream(Stream::Stdin),
            Frame::Signal(15),
            Frame::Data {
                stream: Stream::Stdin,
                bytes: b"x",
            },
        ] {
            let (bytes, result) = read(&frames(&[said(b"hello"), wrong, end.clone()])).await;
            assert_eq!((&bytes[..], result.is_err()), (&b"hello"[..], true));
        }
    }

    #[tokio::test]
    async fn what_is_written_arrives_whole_through_a_narrow_stream() {
        let (near, mut far) = duplex(7);
        let bytes: Vec<u8> = (0..2 * MAX_DATA_LEN + 5).map(|index| index as u8).collect();
        let sent = bytes.clone();
        let writing = tokio::spawn(async move {
            let mut writer = FrameWriter::new(near);
            writer.write_all(&sent).await.unwrap();
            writer.flush().await.unwrap();
            writer.shutdown().await.unwrap();
            writer.shutdown().await.unwrap();
        });
        let mut decoder = Decoder::new();
        let mut received = Vec::new();
        loop {
            match decoder.next_frame().unwrap() {
                Some((OPERATION_CHANNEL, Frame::Data { stream, bytes })) => {
                    assert_eq!(stream, Stream::Stdin);
                    received.extend_from_slice(bytes);
                }
                Some((OPERATION_CHANNEL, Frame::EndOfStream(Stream::Stdin))) => break,
                Some(other) => panic!("{other:?}"),
                None => {
                    let count = far.read(decoder.space()).await.unwrap();
                    decoder.advance(count);
                }
            }
        }
        assert!(received == bytes);
        writing.await.unwrap();
        assert_eq!(far.read(&mut [0]).await.unwrap(), 0, "one end is said once");
    }
}
