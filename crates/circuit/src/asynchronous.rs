//! Reading and writing as tokio does.
//!
//! ```
//! use circuit::asynchronous::{AsyncReader, AsyncWriter};
//! use circuit::{Circuit, Options};
//! use tokio::io::{AsyncReadExt, AsyncWriteExt};
//!
//! # tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(async {
//! let (here, there) = Circuit::pair(&Options::default())?;
//! let (writer, _reader) = here.into_split();
//! let (_writer, reader) = there.into_split();
//! let (mut writer, mut reader) = (AsyncWriter::new(writer)?, AsyncReader::new(reader)?);
//! writer.write_all(b"hello").await?;
//! writer.shutdown().await?;
//! let mut text = String::new();
//! reader.read_to_string(&mut text).await?;
//! assert_eq!(text, "hello");
//! # Ok::<(), std::io::Error>(()) })?;
//! # Ok::<(), std::io::Error>(())
//! ```
//!
//! Each end registers a descriptor of its own for the wake channel. Both get its readiness, whichever of them takes the byte: the runtime reports
//! that a byte came, not that one is there.

use std::io;
use std::os::fd::AsFd;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::UnixStream;

use crate::{Error, Reader, Result, Writer};

/// A [`Reader`] for tokio.
#[derive(Debug)]
pub struct AsyncReader {
    reader: Reader,
    wake: UnixStream,
}

/// A [`Writer`] for tokio.
#[derive(Debug)]
pub struct AsyncWriter {
    writer: Writer,
    wake: UnixStream,
}

/// Whatever the socket is: nothing but waiting is done with it.
fn register(end: &impl AsFd) -> io::Result<UnixStream> {
    let socket = std::os::unix::net::UnixStream::from(end.as_fd().try_clone_to_owned()?);
    socket.set_nonblocking(true)?;
    UnixStream::from_std(socket)
}

/// Tries until it works, fails, or there is nothing to do but to wait for the wake channel.
fn poll_until<End, T>(
    end: &mut End,
    wake: &UnixStream,
    context: &mut Context<'_>,
    mut attempt: impl FnMut(&mut End) -> Result<T>,
    arm: impl Fn(&mut End) -> Result<bool>,
    clear: impl Fn(&mut End) -> Result<()>,
) -> Poll<io::Result<T>> {
    loop {
        match attempt(end) {
            Err(Error::WouldBlock) => {}
            outcome => return Poll::Ready(outcome.map_err(io::Error::from)),
        }
        if !arm(end)? {
            continue;
        }
        ready!(wake.poll_read_ready(context))?;
        // "Would block" is how the runtime learns that what is there was taken. What comes from here on is reported again.
        let taken = wake.try_io(Interest::READABLE, || -> io::Result<()> {
            clear(end)?;
            Err(io::ErrorKind::WouldBlock.into())
        });
        match taken {
            Err(error) if error.kind() != io::ErrorKind::WouldBlock => {
                return Poll::Ready(Err(error));
            }
            _ => {}
        }
    }
}

impl AsyncReader {
    /// Within a runtime, of which I/O is enabled.
    ///
    /// # Errors
    /// What the system reports.
    pub fn new(reader: Reader) -> io::Result<AsyncReader> {
        Ok(AsyncReader {
            wake: register(&reader)?,
            reader,
        })
    }

    /// Receives one record in place of what was in `record`. False at the end.
    ///
    /// # Errors
    /// As [`Reader::receive`].
    pub async fn receive(&mut self, record: &mut Vec<u8>) -> io::Result<bool> {
        let AsyncReader { reader, wake } = self;
        std::future::poll_fn(|context| {
            poll_until(
                reader,
                wake,
                context,
                |reader| reader.try_receive(record),
                |reader| reader.arm(0),
                Reader::clear,
            )
        })
        .await
    }
}

impl AsyncRead for AsyncReader {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let AsyncReader { reader, wake } = self.get_mut();
        let read = poll_until(
            reader,
            wake,
            context,
            |reader| reader.try_read(into.initialize_unfilled()),
            |reader| reader.arm(0),
            Reader::clear,
        );
        let len = ready!(read)?;
        into.advance(len);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWriter {
    /// Within a runtime, of which I/O is enabled.
    ///
    /// # Errors
    /// What the system reports.
    pub fn new(writer: Writer) -> io::Result<AsyncWriter> {
        Ok(AsyncWriter {
            wake: register(&writer)?,
            writer,
        })
    }

    /// Sends one record.
    ///
    /// # Errors
    /// As [`Writer::send`].
    pub async fn send(&mut self, record: &[u8]) -> io::Result<()> {
        let AsyncWriter { writer, wake } = self;
        let least = crate::record_room(record.len()).unwrap_or(usize::MAX);
        std::future::poll_fn(|context| {
            poll_until(
                writer,
                wake,
                context,
                |writer| writer.try_send(record),
                |writer| writer.arm(least),
                Writer::clear,
            )
        })
        .await
    }
}

impl AsyncWrite for AsyncWriter {
    fn poll_write(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let AsyncWriter { writer, wake } = self.get_mut();
        poll_until(
            writer,
            wake,
            context,
            |writer| writer.try_write(bytes),
            |writer| writer.arm(1),
            Writer::clear,
        )
    }

    /// With a window there is nothing to flush: what was written can be read.
    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let AsyncWriter { writer, wake } = self.get_mut();
        poll_until(
            writer,
            wake,
            context,
            Writer::try_flush,
            Writer::arm_flush,
            Writer::clear,
        )
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let writer = self.get_mut();
        writer.writer.finish()?;
        Pin::new(writer).poll_flush(context)
    }
}
