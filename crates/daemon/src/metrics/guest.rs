//! Asking one guest's agent for its figures.

use std::io;
use std::path::{Path, absolute};
use std::time::Duration;

use hostside::gates::Gates;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};
use sys::links::{Fuse, address_of, find};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use wire::agent::job::{Answer, Ask, Stats};
use wire::agent::{CONNECTION_CHANNEL, Decoder, Frame, Hello, OPERATION_CHANNEL, PORT};

/// How long a guest may take, from the call to its figures.
pub(super) const GUEST_TIMEOUT: Duration = Duration::from_secs(5);

/// How long one may take that did not answer its last caller.
pub(super) const SILENT_TIMEOUT: Duration = Duration::from_secs(1);

/// The longest answer to the call, in bytes.
const MAX_LINE_LEN: usize = 256;

/// The figures of the guest behind this host socket. The caller sets the deadline.
pub(super) async fn ask(gates: &Gates, host_socket: &Path) -> io::Result<Box<Stats>> {
    let at = host_socket.to_owned();
    // It may be in a VMM's directory.
    let connected = gates.at(host_socket, move || connect(&at)).await;
    let connected = connected.ok_or(io::ErrorKind::Interrupted)??;
    let mut stream = UnixStream::from_std(connected)?;
    stream
        .write_all(format!("CONNECT {PORT}\n").as_bytes())
        .await?;
    read_line(&mut stream).await?;
    let hello = Hello::new(concat!("ringdown ", env!("CARGO_PKG_VERSION")));
    let stats = Ask::Stats {
        interval_ms: 1000,
        count: 1,
    };
    let mut request = Vec::new();
    Frame::Hello(hello)
        .encode(CONNECTION_CHANNEL, &mut request)
        .and_then(|()| Frame::Ask(stats).encode(OPERATION_CHANNEL, &mut request))
        .map_err(io::Error::other)?;
    stream.write_all(&request).await?;
    let mut decoder = Decoder::new();
    loop {
        match decoder.next_frame().map_err(invalid)? {
            Some((CONNECTION_CHANNEL, Frame::Hello(_))) => {}
            Some((_, Frame::Answer(Answer::Stats(stats)))) => return Ok(stats),
            Some((_, Frame::Error(report))) => {
                return Err(io::Error::other(format!("{:?}", report.message)));
            }
            Some(_) => return Err(invalid("a frame that does not belong there")),
            None => {
                let count = stream.read(decoder.space()).await?;
                if count == 0 {
                    return Err(io::ErrorKind::UnexpectedEof.into());
                }
                decoder.advance(count);
            }
        }
    }
}

/// Connects to a socket of this daemon's own, to which no link of others leads.
fn connect(host_socket: &Path) -> io::Result<std::os::unix::net::UnixStream> {
    let found = find(&absolute(host_socket)?, Fuse::Refused)?;
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    rustix::net::connect(&socket, &address_of(&found)?)?;
    Ok(socket.into())
}

/// The answer to the call, and not a byte more.
async fn read_line(stream: &mut UnixStream) -> io::Result<()> {
    let mut line = Vec::new();
    while line.len() < MAX_LINE_LEN {
        match stream.read_u8().await? {
            b'\n' if line.starts_with(b"OK ") => return Ok(()),
            b'\n' => break,
            byte => line.push(byte),
        }
    }
    Err(invalid(format!(
        "the call was answered with {:?}",
        String::from_utf8_lossy(&line)
    )))
}

fn invalid(error: impl ToString) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error.to_string())
}
