//! The handshake of a host socket: `CONNECT <port>`, then `OK <host port>` or `ERR <reason>`.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use wire::agent::PORT;

use super::{Deadline, GuestError, Timed, printable};
use crate::unix;

/// How long the daemon and the guest may take, from the connection to the answer. A guest without KVM on a busy machine is slow.
pub(crate) const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// The longest answer, in bytes.
const MAX_ANSWER_LEN: usize = 1024;

/// A connection to the agent of the guest behind this host socket.
pub(crate) fn connect(path: &Path, deadline: Deadline) -> Result<UnixStream, GuestError> {
    let failed = |source| GuestError::Connect {
        path: path.to_owned(),
        source,
    };
    let left = deadline.at.saturating_duration_since(Instant::now());
    let stream = unix::connect(path, left).map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => GuestError::Denied {
            path: path.to_owned(),
        },
        _ => failed(source),
    })?;
    let mut timed = Timed {
        socket: stream.as_fd(),
        deadline: deadline.at,
    };
    timed
        .write_all(format!("CONNECT {PORT}\n").as_bytes())
        .map_err(failed)?;
    let answer = read_line(&mut timed).map_err(|error| no_answer(error, Some(deadline)))?;
    match answer.split_once(' ').unwrap_or((&answer, "")) {
        ("OK", port) if port.parse::<u32>().is_ok() => Ok(stream),
        ("ERR", reason) => Err(GuestError::Refused {
            reason: printable(reason),
        }),
        // Firecracker's own host sockets close without a word when no program listens.
        ("", _) => Err(GuestError::Refused {
            reason: "the host socket closed the connection".to_owned(),
        }),
        _ => Err(GuestError::Answer(format!("{answer:?}"))),
    }
}

/// What a failed read says about the other side.
pub(super) fn no_answer(error: io::Error, deadline: Option<Deadline>) -> GuestError {
    match (error.kind(), deadline) {
        (io::ErrorKind::TimedOut, Some(deadline)) => GuestError::NoAnswer {
            seconds: deadline.patience.as_secs(),
        },
        _ => GuestError::Broken(error.to_string()),
    }
}

/// A line without its end, and not a byte more of the stream; what there was if the stream ends before.
pub(crate) fn read_line(stream: &mut impl Read) -> io::Result<String> {
    let mut line = Vec::new();
    let mut byte = [0];
    // One byte at a time: what follows the line belongs to the agent protocol, whose decoder is elsewhere.
    while line.len() < MAX_ANSWER_LEN {
        match stream.read(&mut byte) {
            Ok(0) => break,
            Ok(_) if byte == *b"\n" => break,
            Ok(_) => line.push(byte[0]),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => break,
            Err(error) => return Err(error),
        }
    }
    Ok(String::from_utf8_lossy(&line).into_owned())
}
