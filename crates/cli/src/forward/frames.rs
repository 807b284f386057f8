//! Bytes between a program of the host and the agent, whose connection carries them in frames, each direction with an explicit end.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use hostside::forwarded::{FrameReader, FrameWriter};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, split};
use tokio::net::UnixStream;
use wire::agent::{Decoder, MAX_DATA_LEN};

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
    let (mut from_program, mut to_program) = split(program);
    let mut from_guest = FrameReader::new(from_guest, decoder);
    // Kept until both have ended: the agent takes the end of the connection for a cut.
    let mut to_guest = FrameWriter::new(to_guest);
    // The system reports a reset once. When a write meets it, the end that is read behind it is none.
    let is_program_broken = AtomicBool::new(false);
    let outward = async {
        let copied = copy(&mut from_program, &mut to_guest).await?;
        if is_program_broken.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        // An agent that does not want the end has ended the connection, which the other direction notices.
        let _ = to_guest.shutdown().await;
        io::Result::Ok(copied)
    };
    let inward = async {
        let copied = copy(&mut from_guest, &mut to_program).await?;
        is_program_broken.store(copied.is_err(), Ordering::Relaxed);
        match to_program.shutdown().await {
            // It has gone by itself meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotConnected => Ok(copied),
            result => result.map(|()| copied),
        }
    };
    match tokio::try_join!(outward, inward)? {
        (Ok(()), Ok(())) => Ok(()),
        (Err(error), _) | (_, Err(error)) => Err(error),
    }
}

/// Copies up to the end. That the other side takes no more is no error yet: what it has sent is still to be read.
async fn copy(
    from: &mut (impl AsyncRead + Unpin),
    to: &mut (impl AsyncWrite + Unpin),
) -> io::Result<io::Result<()>> {
    use io::ErrorKind::{BrokenPipe, ConnectionReset};
    let mut buffer = vec![0; MAX_DATA_LEN];
    loop {
        let len = from.read(&mut buffer).await?;
        if len == 0 {
            return Ok(Ok(()));
        }
        let sent = async {
            to.write_all(&buffer[..len]).await?;
            to.flush().await
        };
        match sent.await {
            Err(error) if matches!(error.kind(), BrokenPipe | ConnectionReset) => {
                return Ok(Err(error));
            }
            result => result?,
        }
    }
}
