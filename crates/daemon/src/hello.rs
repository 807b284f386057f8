//! The two hellos on the connection that a guest's agent opens to say that it is ready.

use std::io;
use std::time::SystemTime;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use wire::agent::{
    CONNECTION_CHANNEL, DecodeError, Decoder, Frame, HEADER_LEN, Hello, Invalid, MAX_MESSAGE_LEN,
    negotiate,
};

use crate::api::types::AgentInfo;

/// The most bytes that are read before an agent's hello must be whole.
pub const MAX_HELLO_BYTES: usize = HEADER_LEN + MAX_MESSAGE_LEN;

/// Why a connection is not that of an agent.
#[derive(Debug, thiserror::Error)]
pub enum HelloError {
    /// The connection ended, or broke.
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    /// What came is not a frame.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// A frame came that is not a hello on the connection's own channel, or something came after it.
    #[error("expected one hello and nothing else")]
    NotAHello,
    /// The agent speaks other versions of the protocol.
    #[error(
        "it speaks versions {min} to {max} of the protocol, which this daemon does not: install the agent of this release in the guest"
    )]
    Version {
        /// The lowest version that it speaks.
        min: u16,
        /// The highest version that it speaks.
        max: u16,
    },
    /// The daemon's own hello exceeds a limit.
    #[error("the daemon's own hello cannot be sent: {0}")]
    Own(#[from] Invalid),
}

/// Says hello to an agent and reads its hello. The caller sets the deadline.
///
/// # Errors
/// [`HelloError`] when the other side is not an agent that this daemon understands.
pub async fn greet<S>(stream: &mut S) -> Result<AgentInfo, HelloError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let ours = hello();
    let bytes = Frame::Hello(ours.clone()).to_bytes(CONNECTION_CHANNEL)?;
    stream.write_all(&bytes).await?;
    let theirs = read_hello(stream).await?;
    if negotiate(&ours, &theirs).is_none() {
        return Err(HelloError::Version {
            min: theirs.protocol_min,
            max: theirs.protocol_max,
        });
    }
    Ok(AgentInfo {
        software: harmless(&theirs.software),
        hostname: harmless(&theirs.hostname),
        boot_id: harmless(&theirs.boot_id),
        generation: harmless(&theirs.generation),
        capabilities: theirs
            .capabilities
            .iter()
            .map(|name| harmless(name))
            .collect(),
    })
}

/// What the host says of itself: by its boot identifier a guest notices that it was moved, and it may set its clock by the time.
fn hello() -> Hello {
    let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let nanoseconds = since_1970.map_or(0, |time| time.as_nanos());
    Hello {
        boot_id: boot_id.trim().to_owned(),
        unix_ns: u64::try_from(nanoseconds).unwrap_or(0),
        ..Hello::new(concat!("ringdown ", env!("CARGO_PKG_VERSION")))
    }
}

async fn read_hello<S: AsyncRead + Unpin>(stream: &mut S) -> Result<Hello, HelloError> {
    let mut decoder = Decoder::new();
    let mut room = MAX_HELLO_BYTES;
    loop {
        let space = decoder.space();
        let wanted = room.min(space.len());
        if wanted == 0 {
            return Err(HelloError::NotAHello);
        }
        let count = stream.read(&mut space[..wanted]).await?;
        if count == 0 {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        room -= count;
        decoder.advance(count);
        let hello = match decoder.next_frame()? {
            None => continue,
            Some((CONNECTION_CHANNEL, Frame::Hello(hello))) => hello,
            Some(_) => return Err(HelloError::NotAHello),
        };
        return if decoder.is_inside_frame() {
            Err(HelloError::NotAHello)
        } else {
            Ok(hello)
        };
    }
}

/// A guest's text as it may be shown: what could steer a terminal or break a line of a log is replaced.
fn harmless(text: &str) -> String {
    text.chars()
        .map(|character| {
            if character.is_ascii_graphic() || character == ' ' {
                character
            } else {
                '?'
            }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .unwrap()
    }

    fn greet_with(bytes: Vec<u8>, pieces: usize) -> Result<AgentInfo, HelloError> {
        runtime().block_on(async {
            let (mut ours, mut theirs) = tokio::io::duplex(64 * 1024);
            let guest = async move {
                for piece in bytes.chunks(bytes.len().div_ceil(pieces).max(1)) {
                    // The daemon may hang up before everything has been written.
                    if theirs.write_all(piece).await.is_err() {
                        return;
                    }
                    tokio::task::yield_now().await;
                }
            };
            let (result, ()) = tokio::join!(greet(&mut ours), guest);
            result
        })
    }

    fn agents_hello() -> Hello {
        Hello {
            boot_id: "b00t".to_owned(),
            hostname: "web\x1b[2J\n\u{202e}".to_owned(),
            capabilities: vec!["exec".to_owned()],
            ..Hello::new("ringdown-agent 0.1.0")
        }
    }

    #[test]
    fn an_agent_is_understood_however_its_bytes_are_cut() {
        let bytes = Frame::Hello(agents_hello())
            .to_bytes(CONNECTION_CHANNEL)
            .unwrap();
        for pieces in [1, 2, bytes.len()] {
            let info = greet_with(bytes.clone(), pieces).unwrap();
            assert_eq!(info.software, "ringdown-agent 0.1.0");
            assert_eq!(info.capabilities, ["exec"]);
        }
    }

    #[test]
    fn a_guests_words_cannot_steer_a_terminal() {
        let bytes = Frame::Hello(agents_hello())
            .to_bytes(CONNECTION_CHANNEL)
            .unwrap();
        assert_eq!(greet_with(bytes, 1).unwrap().hostname, "web?[2J??");
    }

    #[test]
    fn other_frames_garbage_and_silence_are_refused() {
        let wrong_channel = Frame::Hello(agents_hello()).to_bytes(7).unwrap();
        assert!(matches!(
            greet_with(wrong_channel, 1),
            Err(HelloError::NotAHello)
        ));
        let signal = Frame::Signal(9).to_bytes(CONNECTION_CHANNEL).unwrap();
        assert!(matches!(greet_with(signal, 1), Err(HelloError::NotAHello)));
        assert!(matches!(
            greet_with(b"GET / HTTP/1.1\r\n\r\n".to_vec(), 1),
            Err(HelloError::Decode(_))
        ));
        assert!(matches!(greet_with(Vec::new(), 1), Err(HelloError::Io(_))));
        let mut talker = Frame::Hello(agents_hello())
            .to_bytes(CONNECTION_CHANNEL)
            .unwrap();
        talker.push(1);
        assert!(matches!(greet_with(talker, 1), Err(HelloError::NotAHello)));
    }

    #[test]
    fn a_hello_is_cut_off_at_its_limit() {
        // A frame of another kind that announces more than a hello may have, and sends it.
        let start = Frame::Data {
            stream: wire::agent::Stream::Stdout,
            bytes: &[0; MAX_HELLO_BYTES],
        };
        let bytes = start.to_bytes(CONNECTION_CHANNEL).unwrap();
        assert!(matches!(greet_with(bytes, 3), Err(HelloError::NotAHello)));
    }

    #[test]
    fn an_agent_of_another_time_is_refused_with_its_versions() {
        let future = Hello {
            protocol_min: 900,
            protocol_max: 901,
            ..agents_hello()
        };
        let bytes = Frame::Hello(future).to_bytes(CONNECTION_CHANNEL).unwrap();
        assert!(matches!(
            greet_with(bytes, 1),
            Err(HelloError::Version { min: 900, max: 901 })
        ));
    }
}
