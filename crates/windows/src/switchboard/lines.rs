//! Lines over a socket: read with a limit, and written with descriptors.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::SendFlags;
use tokio::io::{AsyncRead, AsyncReadExt, Interest};
use tokio::net::UnixStream;
use wire::switchboard::Lines;

/// The next line, or nothing at the end of the stream.
pub(super) async fn next(
    lines: &mut Lines,
    stream: &mut (impl AsyncRead + Unpin),
) -> io::Result<Option<Vec<u8>>> {
    loop {
        if let Some(line) = lines.next_line().map_err(invalid)? {
            return Ok(Some(line.to_vec()));
        }
        let read = stream.read(lines.space()).await?;
        if read == 0 {
            return match lines.is_inside_line() {
                true => Err(io::ErrorKind::UnexpectedEof.into()),
                false => Ok(None),
            };
        }
        lines.filled(read);
    }
}

/// Something that was said is not understood.
pub(super) fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

/// Sends a line, as one message, with descriptors.
pub(super) async fn send(
    stream: &UnixStream,
    line: &str,
    descriptors: &[OwnedFd],
) -> io::Result<()> {
    let sent = stream
        .async_io(Interest::WRITABLE, || {
            let borrowed: Vec<_> = descriptors.iter().map(AsFd::as_fd).collect();
            let bytes = line.as_bytes();
            Ok(sys::descriptors::send(
                stream,
                bytes,
                &borrowed,
                SendFlags::DONTWAIT,
            )?)
        })
        .await?;
    match sent == line.len() {
        true => Ok(()),
        false => Err(io::ErrorKind::WriteZero.into()),
    }
}
