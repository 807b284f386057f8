//! Programs of the host in a test: they dial guests as Firecracker's clients do, and listen for guests' dials.

use std::io::{self, IoSliceMut, Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::net::sockopt::{Timeout, set_socket_send_buffer_size, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, ReturnFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType,
};
use sha2::{Digest, Sha256};

use crate::pattern::Pattern;

/// How long any read or write of a test's host program may take, in seconds: a test that waits in vain must fail, not hang.
pub const IO_DEADLINE_S: u64 = 120;

/// How much is read or written in one call, in bytes.
const CHUNK_BYTES: usize = 64 * 1024;

/// What became of a dial.
#[derive(Debug)]
pub enum Dialed {
    /// The guest has accepted.
    Open(UnixStream),
    /// The line that said why not, with its `ERR `.
    Refused(String),
}

/// An address of the loopback, free now, at a host that nothing but this process uses, so that its port stays free.
///
/// # Errors
/// When there is none.
pub fn free_address() -> Result<SocketAddr> {
    static CALLS: AtomicU8 = AtomicU8::new(1);
    let [.., high, low] = std::process::id().to_be_bytes();
    let host = [127, high, low, CALLS.fetch_add(1, Ordering::Relaxed)];
    let listener = TcpListener::bind((IpAddr::from(host), 0))?;
    Ok(listener.local_addr()?)
}

/// Connects to a VM's host socket and asks for a port.
///
/// # Errors
/// When there is no daemon, or it closes without a word.
pub fn try_dial(host: &Path, port: u32) -> Result<Dialed> {
    let mut stream = connect(host)?;
    stream.write_all(format!("CONNECT {port}\n").as_bytes())?;
    let answer = read_line(&mut stream)?;
    if answer.starts_with("OK ") {
        Ok(Dialed::Open(stream))
    } else {
        Ok(Dialed::Refused(answer))
    }
}

/// Dials a guest's port that listens.
///
/// # Errors
/// Also when the guest refuses.
pub fn dial(host: &Path, port: u32) -> Result<UnixStream> {
    match try_dial(host, port)? {
        Dialed::Open(stream) => Ok(stream),
        Dialed::Refused(answer) => bail!("port {port}: {answer}"),
    }
}

/// How calls are refused that come too early. A driver that a guest has bound may not have started for the daemon yet.
const TOO_EARLY: [&str; 2] = ["nothing listens", "has not started the driver"];

/// Dials a guest's port again and again until its driver runs and something listens there.
///
/// # Errors
/// After `deadline`, and at once for any other reason.
pub fn dial_when_open(host: &Path, port: u32, deadline: Duration) -> Result<UnixStream> {
    let until = Instant::now() + deadline;
    loop {
        match try_dial(host, port)? {
            Dialed::Open(stream) => return Ok(stream),
            Dialed::Refused(answer) if TOO_EARLY.iter().any(|words| answer.contains(words)) => {}
            Dialed::Refused(answer) => bail!("port {port}: {answer}"),
        }
        ensure!(Instant::now() < until, "nothing listens on port {port}");
        thread::sleep(Duration::from_millis(20));
    }
}

/// Connects to a VM's host socket and says nothing yet.
///
/// # Errors
/// When nothing listens there.
pub fn connect(host: &Path) -> Result<UnixStream> {
    let stream = UnixStream::connect(host)
        .with_context(|| format!("cannot connect to {}", host.display()))?;
    bound(&stream)?;
    Ok(stream)
}

/// Listens at `path` with a backlog of this many connections; the system holds one more.
///
/// # Errors
/// The system's reason.
pub fn listen_with_backlog(path: &Path, backlog: i32) -> Result<UnixListener> {
    let socket = rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::STREAM,
        SocketFlags::CLOEXEC,
        None,
    )?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, backlog)?;
    Ok(UnixListener::from(socket))
}

/// Gives a stream the deadline of tests for every read and write.
///
/// # Errors
/// The system's reason.
pub fn bound(stream: &UnixStream) -> io::Result<()> {
    let deadline = Some(Duration::from_secs(IO_DEADLINE_S));
    stream.set_read_timeout(deadline)?;
    stream.set_write_timeout(deadline)
}

/// Reads a line byte by byte, so that nothing behind it is taken, and returns it without its line break.
///
/// # Errors
/// When the stream ends first.
pub fn read_line(stream: &mut UnixStream) -> Result<String> {
    let mut line = Vec::new();
    let mut byte = [0];
    loop {
        if stream.read(&mut byte).context("waiting for an answer")? == 0 {
            bail!("closed after {:?}", String::from_utf8_lossy(&line));
        }
        if byte[0] == b'\n' {
            return Ok(String::from_utf8(line)?);
        }
        line.push(byte[0]);
    }
}

/// Sends the next `total` bytes of a pattern.
///
/// # Errors
/// The system's reason.
pub fn send(stream: &mut impl Write, pattern: &mut Pattern, total: u64) -> io::Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut left = total;
    while left > 0 {
        let len = usize::try_from(left).map_or(CHUNK_BYTES, |left| left.min(CHUNK_BYTES));
        pattern.fill(&mut buffer[..len]);
        stream.write_all(&buffer[..len])?;
        left -= len as u64;
    }
    Ok(())
}

/// Receives exactly the next `total` bytes of a pattern.
///
/// # Errors
/// When they differ, or do not come.
pub fn receive(stream: &mut impl Read, pattern: &mut Pattern, total: u64) -> Result<()> {
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut left = total;
    while left > 0 {
        let len = usize::try_from(left).map_or(CHUNK_BYTES, |left| left.min(CHUNK_BYTES));
        let count = match stream.read(&mut buffer[..len]) {
            // A read with a deadline is not taken up again by itself when the process was stopped in the middle of it.
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            result => result?,
        };
        ensure!(count > 0, "the data ends {left} bytes too early");
        pattern.check(&buffer[..count])?;
        left -= count as u64;
    }
    Ok(())
}

/// Receives to the end of the data and returns how many bytes came.
///
/// # Errors
/// When a byte is wrong, or the data ends with an error.
pub fn drain(stream: &mut impl Read, pattern: &mut Pattern) -> Result<u64> {
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut total = 0;
    loop {
        let count = stream
            .read(&mut buffer)
            .with_context(|| format!("after {total} bytes"))?;
        if count == 0 {
            return Ok(total);
        }
        pattern.check(&buffer[..count])?;
        total += count as u64;
    }
}

/// Receives to the end of the data; returns how many bytes came and their SHA-256 in hexadecimal.
///
/// # Errors
/// When the data ends with an error.
pub fn drain_digest(stream: &mut impl Read) -> Result<(u64, String)> {
    let mut digest = Sha256::new();
    let mut buffer = vec![0; CHUNK_BYTES];
    let mut total = 0;
    loop {
        let count = stream
            .read(&mut buffer)
            .with_context(|| format!("after {total} bytes"))?;
        if count == 0 {
            return Ok((total, format!("{:x}", digest.finalize())));
        }
        digest.update(&buffer[..count]);
        total += count as u64;
    }
}

/// The SHA-256, in hexadecimal, of the first `total` bytes of the pattern with seed 0.
pub fn digest_of(total: u64) -> String {
    let mut digest = Sha256::new();
    let mut pattern = Pattern::new(0);
    let mut buffer = vec![0; CHUNK_BYTES];
    while pattern.offset() < total {
        let left = total - pattern.offset();
        let len = usize::try_from(left).map_or(CHUNK_BYTES, |left| left.min(CHUNK_BYTES));
        pattern.fill(&mut buffer[..len]);
        digest.update(&buffer[..len]);
    }
    format!("{:x}", digest.finalize())
}

/// The path where host programs dial a VM with SEQPACKET sockets.
pub fn seqpacket_path(host: &Path) -> PathBuf {
    let mut path = host.as_os_str().to_owned();
    path.push(".seqpacket");
    PathBuf::from(path)
}

/// A SEQPACKET socket of the host.
#[derive(Debug)]
pub struct Messages(OwnedFd);

impl Messages {
    /// Connects to a SEQPACKET listener.
    ///
    /// # Errors
    /// The system's reason.
    pub fn connect(path: &Path) -> Result<Messages> {
        let socket = new_seqpacket()?;
        rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)
            .with_context(|| format!("cannot connect to {}", path.display()))?;
        Messages::bounded(socket)
    }

    /// Dials a guest's port; the answer is one message.
    ///
    /// # Errors
    /// Also when the guest refuses.
    pub fn dial(host: &Path, port: u32) -> Result<Messages> {
        let messages = Messages::connect(&seqpacket_path(host))?;
        messages.send(format!("CONNECT {port}\n").as_bytes(), false)?;
        let (answer, _) = messages.receive()?;
        let answer = String::from_utf8(answer)?;
        ensure!(answer.starts_with("OK "), "port {port}: {answer:?}");
        Ok(messages)
    }

    /// Sends one message.
    ///
    /// # Errors
    /// The system's reason.
    pub fn send(&self, bytes: &[u8], end_of_record: bool) -> Result<()> {
        let flags = match end_of_record {
            true => SendFlags::NOSIGNAL | SendFlags::EOR,
            false => SendFlags::NOSIGNAL,
        };
        let count = rustix::net::send(&self.0, bytes, flags)?;
        ensure!(count == bytes.len(), "{count} of {} bytes", bytes.len());
        Ok(())
    }

    /// Receives one message, whole, with its flags. An empty one is the end.
    ///
    /// # Errors
    /// The system's reason.
    pub fn receive(&self) -> Result<(Vec<u8>, ReturnFlags)> {
        let mut buffer = vec![0; 4 * 1024 * 1024];
        let mut control = RecvAncillaryBuffer::new(&mut []);
        let message = rustix::net::recvmsg(
            &self.0,
            &mut [IoSliceMut::new(&mut buffer)],
            &mut control,
            RecvFlags::empty(),
        )?;
        buffer.truncate(message.bytes);
        Ok((buffer, message.flags))
    }

    /// Says that no more messages will be sent.
    ///
    /// # Errors
    /// The system's reason.
    pub fn finish(&self) -> Result<()> {
        Ok(rustix::net::shutdown(
            &self.0,
            rustix::net::Shutdown::Write,
        )?)
    }

    fn bounded(socket: OwnedFd) -> Result<Messages> {
        let deadline = Some(Duration::from_secs(IO_DEADLINE_S));
        set_socket_timeout(&socket, Timeout::Recv, deadline)?;
        set_socket_timeout(&socket, Timeout::Send, deadline)?;
        // A message must fit in here as a whole. The system doubles the number, and by default allows no larger one.
        set_socket_send_buffer_size(&socket, 212_992)?;
        Ok(Messages(socket))
    }
}

/// A SEQPACKET listener of the host.
#[derive(Debug)]
pub struct MessageListener(OwnedFd);

impl MessageListener {
    /// Listens at `path`.
    ///
    /// # Errors
    /// The system's reason.
    pub fn bind(path: &Path) -> Result<MessageListener> {
        let socket = new_seqpacket()?;
        rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
        rustix::net::listen(&socket, 16)?;
        Ok(MessageListener(socket))
    }

    /// Takes the next call.
    ///
    /// # Errors
    /// The system's reason, or that none comes.
    pub fn accept(&self) -> Result<Messages> {
        let deadline = Some(Duration::from_secs(IO_DEADLINE_S));
        set_socket_timeout(&self.0, Timeout::Recv, deadline)?;
        Messages::bounded(rustix::net::accept_with(&self.0, SocketFlags::CLOEXEC)?)
    }
}

fn new_seqpacket() -> Result<OwnedFd> {
    Ok(rustix::net::socket_with(
        AddressFamily::UNIX,
        SocketType::SEQPACKET,
        SocketFlags::CLOEXEC,
        None,
    )?)
}
