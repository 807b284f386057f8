//! The two hellos on the connection that a guest's agent opens to say that it is ready.

use std::io;
use std::path::Path;
use std::time::SystemTime;

use device::AgentSecret;
use rustix::net::SocketType;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::UnixStream;
use wire::agent::{
    CALLERS_KNOWN, CALLERS_PROVE, CAPABILITY_PROOF, CONNECTION_CHANNEL, DecodeError, Decoder,
    ErrorKind, Frame, HEADER_LEN, Hello, Invalid, MAX_MESSAGE_LEN, SECRET_LEN, Secret, negotiate,
};
use wire::connect::{self, Answer};

use api::AgentInfo;

use crate::gates::Gates;

/// The most bytes that are read before what an agent has to say must be whole: its hello, and a secret.
pub const MAX_HELLO_BYTES: usize = 2 * HEADER_LEN + MAX_MESSAGE_LEN + SECRET_LEN;

/// Why a connection is not that of an agent.
#[expect(missing_docs, reason = "the words of each say what it is")]
#[derive(Debug, thiserror::Error)]
pub enum HelloError {
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Decode(#[from] DecodeError),
    #[error("expected one hello, a secret if that was asked for, and nothing else")]
    NotAHello,
    #[error(
        "it supports versions {min} to {max} of the protocol, which this daemon does not support: install the agent of this release in the guest"
    )]
    Version {
        /// The lowest version that it speaks.
        min: u16,
        /// The highest version that it speaks.
        max: u16,
    },
    #[error("the secret is not that of the guest's agent, so this was another program: {0}")]
    NotTaken(String),
    #[error(
        "the guest's agent does not say whether the secret is its own: {0}; it calls again by itself"
    )]
    Unsaid(String),
    #[error("the daemon's own hello cannot be sent: {0}")]
    Own(#[from] Invalid),
}

/// Says hello to an agent and reads its hello; and where callers of the agent have to prove themselves, the secret that it gives for that. The
/// caller sets the deadline.
pub async fn greet<S>(
    stream: &mut S,
    callers_prove: bool,
) -> Result<(AgentInfo, AgentSecret), HelloError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let callers = match callers_prove {
        true => CALLERS_PROVE,
        false => CALLERS_KNOWN,
    };
    let ours = Hello {
        capabilities: vec![callers.to_owned()],
        ..hello()
    };
    let bytes = Frame::Hello(ours.clone()).to_bytes(CONNECTION_CHANNEL)?;
    stream.write_all(&bytes).await?;
    let mut words = Words::new(stream);
    let theirs = words.hello().await?;
    if negotiate(&ours, &theirs).is_none() {
        return Err(HelloError::Version {
            min: theirs.protocol_min,
            max: theirs.protocol_max,
        });
    }
    let secret = match callers_prove && theirs.can(CAPABILITY_PROOF) {
        true => words.secret().await?,
        false => AgentSecret::NotGiven,
    };
    if words.decoder.is_inside_frame() {
        return Err(HelloError::NotAHello);
    }
    let info = AgentInfo {
        software: harmless(&theirs.software),
        hostname: harmless(&theirs.hostname),
        boot_id: harmless(&theirs.boot_id),
        generation: harmless(&theirs.generation),
        capabilities: theirs
            .capabilities
            .iter()
            .map(|name| harmless(name))
            .collect(),
    };
    Ok((info, secret))
}

/// Makes sure that a secret is that of the agent behind the socket of a VMM with a vsock device of its own, by calling it with that. The agent's port
/// is below 1024, so that no ordinary program of the guest answers there. The caller sets the deadline: the directory of the VMM may hold up lookups.
///
/// # Errors
/// [`HelloError::NotTaken`] if the agent does not take it, [`HelloError::Unsaid`] if it does neither, and whatever keeps it from being asked.
pub async fn confirm(gates: &Gates, vmm: &Path, secret: &Secret) -> Result<(), HelloError> {
    let socket = gates.connect(vmm, SocketType::STREAM).await?;
    let mut stream = UnixStream::from_std(socket.into())?;
    let request = connect::request(wire::agent::PORT);
    stream.write_all(request.as_bytes()).await?;
    let mut answer = Vec::new();
    while answer.last() != Some(&b'\n') && answer.len() < connect::MAX_REQUEST_LEN {
        answer.push(stream.read_u8().await?);
    }
    if !matches!(Answer::parse(&answer), Answer::Accepted { .. }) {
        return Err(HelloError::NotTaken(
            "nothing answers at its port".to_owned(),
        ));
    }
    let mut bytes = Frame::Secret(secret.clone()).to_bytes(CONNECTION_CHANNEL)?;
    Frame::Hello(hello()).encode(CONNECTION_CHANNEL, &mut bytes)?;
    stream.write_all(&bytes).await?;
    let mut words = Words::new(&mut stream);
    words.receive().await?;
    match words.decoder.next_frame()? {
        Some((CONNECTION_CHANNEL, Frame::Hello(_))) => Ok(()),
        Some((_, Frame::Error(report))) => Err(match report.kind {
            ErrorKind::Forbidden | ErrorKind::WrongProof => {
                HelloError::NotTaken(harmless(&report.message))
            }
            _ => HelloError::Unsaid(harmless(&report.message)),
        }),
        _ => Err(HelloError::NotAHello),
    }
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

/// What an agent says, up to [`MAX_HELLO_BYTES`].
struct Words<'a, S> {
    stream: &'a mut S,
    decoder: Decoder,
    room: usize,
}

impl<'a, S: AsyncRead + Unpin> Words<'a, S> {
    fn new(stream: &'a mut S) -> Words<'a, S> {
        Words {
            stream,
            decoder: Decoder::new(),
            room: MAX_HELLO_BYTES,
        }
    }

    async fn hello(&mut self) -> Result<Hello, HelloError> {
        self.receive().await?;
        match self.decoder.next_frame()? {
            Some((CONNECTION_CHANNEL, Frame::Hello(hello))) => Ok(hello),
            _ => Err(HelloError::NotAHello),
        }
    }

    async fn secret(&mut self) -> Result<AgentSecret, HelloError> {
        self.receive().await?;
        match self.decoder.next_frame()? {
            Some((CONNECTION_CHANNEL, Frame::Secret(secret))) => Ok(AgentSecret::Given(secret)),
            _ => Err(HelloError::NotAHello),
        }
    }

    /// Reads until there is a frame, or what is none.
    async fn receive(&mut self) -> Result<(), HelloError> {
        while !self.decoder.has_frame() {
            let space = self.decoder.space();
            let wanted = self.room.min(space.len());
            if wanted == 0 {
                return Err(HelloError::NotAHello);
            }
            let count = self.stream.read(&mut space[..wanted]).await?;
            if count == 0 {
                return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
            }
            self.room -= count;
            self.decoder.advance(count);
        }
        Ok(())
    }
}

/// A guest's text as it may be shown: what could steer a terminal or break a line of a log is replaced.
pub(crate) fn harmless(text: &str) -> String {
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
    use std::sync::Arc;
    use std::time::Duration;

    use super::*;
    use crate::gates::Held;

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
            let (result, ()) = tokio::join!(greet(&mut ours, false), guest);
            result.map(|(info, _)| info)
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

    /// What becomes of an agent that says these frames where callers have to prove themselves.
    fn greet_proving(frames: &[Frame<'_>], pieces: usize) -> Result<AgentSecret, HelloError> {
        let mut bytes = Vec::new();
        for frame in frames {
            frame.encode(CONNECTION_CHANNEL, &mut bytes).unwrap();
        }
        runtime().block_on(async {
            let (mut ours, mut theirs) = tokio::io::duplex(64 * 1024);
            for piece in bytes.chunks(bytes.len().div_ceil(pieces)) {
                theirs.write_all(piece).await.unwrap();
            }
            let greeted = greet(&mut ours, true).await;
            let mut words = Words::new(&mut theirs);
            assert!(words.hello().await.unwrap().can(CALLERS_PROVE));
            greeted.map(|(_, secret)| secret)
        })
    }

    #[test]
    fn a_secret_comes_behind_the_hello_that_announces_it() {
        let secret = Secret::new([5; SECRET_LEN]);
        let mut hello = agents_hello();
        // An agent of before.
        let old = greet_proving(&[Frame::Hello(hello.clone())], 1).unwrap();
        assert_eq!(old, AgentSecret::NotGiven);
        hello.capabilities.push(CAPABILITY_PROOF.to_owned());
        let frames = [Frame::Hello(hello.clone()), Frame::Secret(secret.clone())];
        for pieces in [1, 2, 100] {
            let given = greet_proving(&frames, pieces).unwrap();
            assert_eq!(given, AgentSecret::Given(secret.clone()));
        }
        for wrong in [
            [Frame::Hello(hello.clone()), Frame::Signal(1)].to_vec(),
            [
                Frame::Hello(hello.clone()),
                Frame::Secret(secret.clone()),
                Frame::Signal(1),
            ]
            .to_vec(),
            [Frame::Secret(secret.clone()), Frame::Hello(hello.clone())].to_vec(),
        ] {
            let refused = greet_proving(&wrong, 1);
            assert!(matches!(refused, Err(HelloError::NotAHello)), "{refused:?}");
        }
        assert_eq!(format!("{:?}", frames[1]), "Secret(Secret)");
    }

    #[test]
    fn a_secret_is_the_agents_if_the_agent_behind_the_vmm_takes_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("v.sock");
        let ours = Secret::new([5; SECRET_LEN]);
        let words = "not the one";
        let report = |kind| wire::agent::ErrorReport::new(kind, words);
        let gates = Gates::new(1);
        let kinds = [ErrorKind::WrongProof, ErrorKind::Forbidden, ErrorKind::Busy];
        runtime().block_on(async {
            let vmm = tokio::net::UnixListener::bind(&path).unwrap();
            let agents = ours.clone();
            let agent = async {
                for kind in kinds {
                    let (mut stream, _) = vmm.accept().await.unwrap();
                    let mut request = [0; 13];
                    stream.read_exact(&mut request).await.unwrap();
                    assert_eq!(&request, b"CONNECT 1007\n");
                    stream.write_all(b"OK 1073741824\n").await.unwrap();
                    let mut words = Words::new(&mut stream);
                    let AgentSecret::Given(given) = words.secret().await.unwrap() else {
                        panic!("a secret is given");
                    };
                    let answer = match given == agents {
                        true => Frame::Hello(agents_hello()),
                        false => Frame::Error(report(kind)),
                    };
                    let bytes = answer.to_bytes(CONNECTION_CHANNEL).unwrap();
                    stream.write_all(&bytes).await.unwrap();
                }
            };
            let other = Secret::new([6; SECRET_LEN]);
            let daemon = async {
                confirm(&gates, &path, &ours).await.unwrap();
                let refused = confirm(&gates, &path, &other).await;
                assert!(matches!(refused, Err(HelloError::NotTaken(said)) if said == words));
                let unsaid = confirm(&gates, &path, &other).await;
                assert!(matches!(unsaid, Err(HelloError::Unsaid(said)) if said == words));
            };
            tokio::join!(agent, daemon);
            assert!(matches!(
                confirm(&gates, &directory.path().join("none"), &ours).await,
                Err(HelloError::Io(_))
            ));
        });
    }

    #[test]
    fn a_vmm_whose_directory_hangs_holds_up_its_own_agent_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("v.sock");
        let vmm = std::os::unix::net::UnixListener::bind(&path).unwrap();
        vmm.set_nonblocking(true).unwrap();
        let secret = Secret::new([5; SECRET_LEN]);
        runtime().block_on(async {
            let gates = Arc::new(Gates::new(2));
            let held = Held::at(&gates, &path).await;
            let soon = Duration::from_millis(50);
            let waits = tokio::time::timeout(soon, confirm(&gates, &path, &secret)).await;
            assert!(waits.is_err());
            let called = vmm.accept().map(drop).unwrap_err();
            assert_eq!(called.kind(), io::ErrorKind::WouldBlock);
            let other = directory.path().join("none");
            let other = confirm(&gates, &other, &secret).await;
            assert!(matches!(other, Err(HelloError::Io(_))), "{other:?}");
            held.end();
        });
    }
}
