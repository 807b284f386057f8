//! What a guest says before its bytes are carried: SOCKS5 or HTTP, told apart by the first byte.

use std::io;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use wire::destination::Destination;
use wire::http_connect::{self, MAX_HEAD_LEN};
use wire::socks::{self, Announcement, Greeting};

use super::error::EgressError;
use super::linger_until;

/// Bytes that a guest may say before it is answered. What comes behind a request belongs to the server, and the guest has
/// no reason to send more of it than this before it knows that there is one.
const MAX_EARLY_LEN: usize = MAX_HEAD_LEN;

/// What a guest says at first.
pub(crate) enum Request {
    /// Where this call is to go.
    Asked(Asked),
    /// Where another one is to go.
    Announced(Announcement),
}

/// Where a call is to go.
pub(crate) struct Asked {
    /// Where to.
    pub(crate) destination: Destination,
    /// How it was asked, and so how it is answered.
    pub(crate) dialect: Dialect,
    /// What the guest has said already behind its request.
    pub(crate) early: Vec<u8>,
}

/// How a guest asked.
pub(crate) enum Dialect {
    /// In SOCKS.
    Socks,
    /// By CONNECT.
    Connect,
    /// By a request that is passed on, with this head.
    Forward { head: Vec<u8> },
    /// On another call, in SOCKS: nothing is said on this one.
    Announced,
}

impl Dialect {
    /// What the guest is answered when it is put through, and what its server is sent first.
    pub(crate) fn accept(&self, early: &[u8]) -> (Vec<u8>, Vec<u8>) {
        match self {
            Dialect::Socks => {
                let answer = socks::Reply::Succeeded.to_bytes();
                (answer.to_vec(), early.to_vec())
            }
            Dialect::Connect => (http_connect::ESTABLISHED.to_vec(), early.to_vec()),
            // It is the server that answers.
            Dialect::Forward { head } => (Vec::new(), [head, early].concat()),
            Dialect::Announced => (Vec::new(), early.to_vec()),
        }
    }

    /// What the guest is answered when it is not.
    pub(crate) fn refuse(&self, error: &EgressError) -> Vec<u8> {
        match self {
            Dialect::Socks | Dialect::Announced => error.socks().to_bytes().to_vec(),
            Dialect::Connect | Dialect::Forward { .. } => error.http(),
        }
    }
}

/// What the guest has said so far.
struct Heard {
    bytes: Vec<u8>,
}

impl Heard {
    async fn more(&mut self, stream: &mut UnixStream) -> io::Result<()> {
        let mut piece = [0; 1024];
        let room = piece.len().min(MAX_EARLY_LEN - self.bytes.len());
        match stream.read(&mut piece[..room]).await? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            len => {
                self.bytes.extend(&piece[..len]);
                Ok(())
            }
        }
    }
}

/// Listens until the guest has said where it wants to go. What cannot be understood is answered here, as far as the protocol has an answer.
///
/// # Errors
/// That the guest hung up, or what it said that made no sense.
pub(crate) async fn listen(stream: &mut UnixStream) -> io::Result<Request> {
    let mut heard = Heard {
        bytes: Vec::with_capacity(1024),
    };
    heard.more(stream).await?;
    match heard.bytes[0] {
        socks::VERSION => listen_to_socks(stream, heard).await,
        _ => listen_to_http(stream, heard).await.map(Request::Asked),
    }
}

async fn listen_to_socks(stream: &mut UnixStream, mut heard: Heard) -> io::Result<Request> {
    loop {
        match Greeting::parse(&heard.bytes) {
            Greeting::Partial => heard.more(stream).await?,
            Greeting::Complete {
                without_authentication: true,
                len,
            } => {
                heard.bytes.drain(..len);
                stream.write_all(&socks::METHOD_ACCEPTED).await?;
                break;
            }
            Greeting::Complete { .. } => {
                stream.write_all(&socks::METHOD_REFUSED).await?;
                return Err(nonsense(
                    "the client requires authentication, which is not offered",
                ));
            }
            Greeting::Invalid => return Err(nonsense("this is no SOCKS5 greeting")),
        }
    }
    loop {
        let (reply, words) = match socks::Request::parse(&heard.bytes) {
            socks::Request::Partial => {
                heard.more(stream).await?;
                continue;
            }
            socks::Request::Connect { destination, len } => {
                return Ok(Request::Asked(Asked {
                    destination,
                    dialect: Dialect::Socks,
                    early: heard.bytes.split_off(len),
                }));
            }
            socks::Request::Announce { announcement, .. } => {
                return Ok(Request::Announced(announcement));
            }
            socks::Request::Refused(reply) => (
                reply,
                "the client asks for a command that is not offered".to_owned(),
            ),
            socks::Request::BadDestination(error) => {
                (socks::Reply::GeneralFailure, error.to_string())
            }
            socks::Request::Invalid => return Err(nonsense("this is no SOCKS5 request")),
        };
        stream.write_all(&reply.to_bytes()).await?;
        return Err(nonsense(&words));
    }
}

async fn listen_to_http(stream: &mut UnixStream, mut heard: Heard) -> io::Result<Asked> {
    loop {
        let (destination, dialect, len) = match http_connect::Request::parse(&heard.bytes) {
            http_connect::Request::Partial => {
                heard.more(stream).await?;
                continue;
            }
            http_connect::Request::Connect { destination, len } => {
                (destination, Dialect::Connect, len)
            }
            http_connect::Request::Forward {
                destination,
                head,
                len,
            } => (destination, Dialect::Forward { head }, len),
            http_connect::Request::Invalid(error) => {
                let words = error.to_string();
                // A guest that begins with no letter speaks neither protocol, and would not understand the answer.
                if heard.bytes[0].is_ascii_alphabetic() {
                    let answer = http_connect::refusal(400, "http_request_error", &words);
                    stream.write_all(&answer).await?;
                }
                return Err(nonsense(&words));
            }
        };
        return Ok(Asked {
            destination,
            dialect,
            early: heard.bytes.split_off(len),
        });
    }
}

fn nonsense(words: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, words.to_owned())
}

/// Ends a connection whose last word the guest should be able to read: the guest's own words are taken in for a moment, so that closing does
/// not look like a reset.
pub(crate) async fn hang_up(mut stream: UnixStream) {
    let end = linger_until();
    let drain = async {
        stream.shutdown().await?;
        let mut piece = [0; 1024];
        let mut left = MAX_EARLY_LEN;
        loop {
            match stream.read(&mut piece).await? {
                0 => return Ok::<_, io::Error>(()),
                len => left = left.saturating_sub(len),
            }
            if left == 0 {
                return Ok(());
            }
        }
    };
    // Whatever happens, it is over.
    let _ = tokio::time::timeout_at(end, drain).await;
}
